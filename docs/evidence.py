"""Fill measured figures and tables into the pages, from ``evidence/`` and the records of benchmarks.

A row of ``evidence/SECTION.jsonl`` is one claim. Its figure, dates, machines and bits are those of
the records of its runs, or stand in the row, written by hand. A page cites it by its key; what
stands between the two comments is written here::

    at <!-- evidence: naive -->+0.182 ± 0.041<!-- end --> nats

A name of ``evidence/tables.toml`` cites a table instead, of rows × columns × an aggregate of the
runs in a cell; ``section NAME`` cites a whole section, as RESULTS.md does, ``when KEY`` the dates
and processors of a figure, and ``not run`` lists the runs that are still missing. ::

    python docs/evidence.py     write README, RESULTS, CLAIMS and docs/
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
import statistics
from functools import cache
from pathlib import Path

from narrowgauge.spec.significance import student_t
from narrowgauge.spec.toml import load_toml

ROOT = Path(__file__).parents[1]
CITATION = re.compile(r"(<!-- evidence: ([^>]+?) -->)(.*?)(<!-- end -->)", re.DOTALL)
SAME = (
    "setting", "model", "lr", "beta2", "steps", "seed", "text", "processor", "torch", "transformers",
    "repeat", "tensors", "threads",
)  # fmt: skip
"""What the two runs of a pair have in common, beside the digests of the baseline's step."""
MARGIN = 0.010
"""In nats: ``word`` ends where ``master`` does, if the 90 % interval of their difference lies within
± this over :data:`SEEDS`. Written down on 30 November 2026, before the runs.
"""
SEEDS = 12


@cache
def lines_of(place: str):
    """Return the objects of a file of JSON lines, which the first run makes."""
    path = ROOT / place
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    return [json.loads(line) for line in text.splitlines()]


@cache
def sections():
    """Return the rows of each section."""
    paths = sorted((ROOT / "evidence").glob("*.jsonl"))
    return {path.stem: lines_of(f"evidence/{path.name}") for path in paths}


@cache
def evidence():
    """Return all rows by key."""
    rows = {}
    for section in sections().values():
        rows |= {row["key"]: row for row in section}
    return rows


# ── a cell: the figure of some runs ───────────────────────────────────────────────────────────────


def fits(value, wanted) -> bool:
    """Return whether a field has a value, or one of several."""
    return value in wanted if isinstance(wanted, list) else bool(value == wanted)


def chosen(runs, where, step: int | None = None):
    """Return the runs with these fields, with ``loss`` and outliers as they were after a step, or at
    the end.
    """
    matching = []
    for run in runs:
        if all(fits(run.get(name), value) for name, value in where.items()):
            losses = run.get("losses", {})
            place = str(run.get("steps") if step is None else step)
            if step is None or place in losses:
                measured_then = run.get("outliers", {}).get(place, {})
                matching.append({**run, **measured_then, "loss": losses.get(place)})
    return matching


def conditions(run, baseline: str):
    """Return what the two runs of a pair have in common. The ``unigram`` loss names what they hold
    out.
    """
    held_out = round(run.get("unigram") or 0.0, 6)
    return [*map(run.get, SAME), held_out, run.get("digests", {}).get(baseline)]


def pairs(runs, baseline):
    """Return each run with those of the baseline that have the same conditions, and a loss."""
    paired = []
    for run, base in itertools.product(runs, baseline):
        name = base["row"]
        if base["loss"] is not None and conditions(run, name) == conditions(base, name):
            paired.append((run, base))
    return paired


def half_interval(values, confidence: float = 0.95) -> float:
    """Return half the interval of the mean of one value per seed."""
    seeds = len(values)
    return student_t(seeds - 1, confidence) * math.sqrt(statistics.variance(values) / seeds)


def interval(values) -> str:
    """Return the mean of one value per seed, ± half its 95 % interval, and the seeds if few."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean):
        return "diverged"
    text = f"{mean:+.4f}"
    if len(values) > 1:
        text += f" ± {half_interval(values):.4f}"
    return text + few(len(values))


def few(seeds: int) -> str:
    """Return the number of seeds, if it is below three."""
    return f" ({seeds} seed{'s' * (seeds > 1)})" if seeds < 3 else ""


def differences(paired):
    """Return the losses less the baseline's, one mean for each seed and text; infinite where a run
    diverged.

    Two machines repeat the weights of a seed, so their pairs on one text count as one sample.
    """
    samples = {}
    for run, base in paired:
        loss = math.inf if run["loss"] is None else run["loss"] - base["loss"]
        samples.setdefault((run["seed"], run["text"]), []).append(loss)
    return [statistics.fmean(losses) for losses in samples.values()]


def of_one_text(runs):
    """Return the runs of the text with the most seeds, of the newest of these. Two texts are never
    pooled.
    """
    texts = {}
    for run in sorted(runs, key=lambda run: run.get("date", ""), reverse=True):
        texts.setdefault(run.get("text", ""), []).append(run)
    return max(texts.values(), key=num_seeds, default=[])


def num_seeds(runs) -> int:
    return len({run.get("seed") for run in runs})


def short(processor: str) -> str:
    """Return the vendor and the instruction set of a kind of processor."""
    own = processor.partition(",")[0].removeprefix("x86_64 ")
    return own.replace("AuthenticAMD", "AMD").replace("GenuineIntel", "Intel")


def equivalence(paired) -> str:
    """Return the mean difference with its 90 % interval and, once all seeds are there, whether this
    lies within the margin (two one-sided tests).

    Runs of ``… turned`` began with another bit in one weight: the mean size of their differences
    says how far apart two runs of the baseline end.
    """
    turned = [pair for pair in paired if pair[0]["row"].endswith(" turned")]
    losses = differences([pair for pair in paired if pair not in turned])
    if not losses:
        return "no two runs to compare yet"
    seeds = len(losses)
    text = interval(losses)
    reach = math.inf
    if seeds > 1 and text != "diverged":
        half = half_interval(losses, 0.90)
        reach = abs(statistics.fmean(losses)) + half
        text = f"{statistics.fmean(losses):+.4f} ± {half:.4f} (90%, {seeds} seeds)"
    if seeds < SEEDS:
        text += f", no answer before {SEEDS} seeds"
    elif reach <= MARGIN:
        text += f", within ± {MARGIN}"
    else:
        text += f", not shown to be within ± {MARGIN}"
    if turned:
        sizes = [abs(loss) for loss in differences(turned)]
        floor = f"{statistics.fmean(sizes):.4f} away (mean of {len(sizes)})"
        text += f"; `master` with one bit of one weight changed at the start ends {floor}"
    return text


def fraction_kept(paired) -> float:
    """Return the fall of the runs' losses over that of the baseline's.

    A format that rounds the weights begins above the checkpoint, where the baseline begins.
    """
    fall = statistics.fmean(base["losses"]["0"] - run["loss"] for run, base in paired)
    return fall / statistics.fmean(base["losses"]["0"] - base["loss"] for _, base in paired)


def range_of(runs, field: str, form: str) -> str:
    """Return the least and the greatest value of a field, of repeats behind their median; or its
    text.
    """
    values = [run[field] for run in runs if run.get(field) is not None]
    if not values or isinstance(values[0], str):
        return values[0] if values else "–"
    ends = " to ".join(dict.fromkeys(format(value, form) for value in (min(values), max(values))))
    if "repeat" not in runs[0] or " to " not in ends:
        return ends
    return f"{statistics.median(values):{form}} ({ends})"


def ratios(runs, others, field: str):
    """Return runs with a field divided by that of another row in the same repeat."""
    divided = []
    for run, other in itertools.product(runs, others):
        if all(run.get(name) == other.get(name) for name in SAME):
            divided.append({**run, field: run[field] / other[field]})
    return divided


def series(runs, field: str, form: str) -> str:
    """Return the field of the runs of each row that has it, behind the row's name."""
    rows = {}
    for run in runs:
        if field in run:
            rows.setdefault(run["row"], []).append(run)
    return ", ".join(f"`{name}` {range_of(rows[name], field, form)}" for name in rows)


def runs_of(spec):
    """Return the runs of a cell, of one text, and their pairs if it has a baseline."""
    records = lines_of(f"benchmarks/{spec['records']}.jsonl")
    where = spec["where"]
    step = spec.get("step")
    runs = chosen(records, where, step)
    if "over" in spec:
        runs = ratios(runs, chosen(records, {**where, "row": spec["over"]}), spec["field"])
    if "baseline" not in spec:
        return of_one_text(runs), []
    paired = pairs(runs, chosen(records, {**where, "row": spec["baseline"]}, step))
    runs = of_one_text([run for run, _ in paired])
    return runs, [pair for pair in paired if pair[0] in runs]


def corpus() -> str:
    """Return how many faults of the corpus are read. Its tests hold that the tables are true."""
    tables = {}
    for name in ("faults", "healthy"):
        text = (ROOT / f"tests/corpus/{name}.toml").read_text(encoding="utf-8")
        tables[name] = load_toml(text)
    named = []
    healthy = len(tables["healthy"]["healthy"])
    for section in tables["faults"].values():
        for row in section.values():
            row = section.get(row.get("like"), {}) | row
            if row.get("run") == []:  # the healthy twin of a fault
                healthy += 1
            else:
                named.append("check" in row or "run" in row)
    return (
        f"{sum(named)} of {len(named)} named, none at another place; "
        f"0 of {healthy} healthy loops accused"
    )


def cell(spec) -> str:
    """Return the figure of a cell.

    Args:
        spec: ``records``, a file of ``benchmarks/``; ``where``, the fields of the runs; ``step``,
            after which their losses count; ``baseline``, whose runs of the same seed they are
            compared with. What they ``show``: the ``range`` of a ``field``, which may be text, in a
            ``form``, ``over`` another row's; that of each row as a ``series``; the loss ``less`` the baseline's; their
            ``equivalence``; the ``change`` from the first loss; how much of the baseline's fall is
            ``kept``; or the ``dates`` of the runs. A ``corpus`` has no records, but tests.
    """
    how = spec["show"]
    if how == "corpus":
        return corpus()
    form = spec.get("form", ".3g")
    runs, paired = runs_of(spec)
    if how == "equivalence":
        text = equivalence(paired)
    elif not runs:
        return "–"
    elif how == "range":
        text = range_of(runs, spec["field"], form)
    elif how == "series":
        text = series(runs, spec["field"], form)
    elif how == "less":
        text = interval(differences(paired))
    elif how == "change":
        text = interval([run["loss"] - run["losses"]["0"] for run in runs])
    elif how == "dates":
        return dates_of(runs)
    else:
        text = f"{fraction_kept(paired):.0%}{few(len(differences(paired)))}"
    return re.sub(r"-(?=\d)", "−", text).replace("%", " %")


def figure(row) -> str:
    """Return a row's figure, which is that of a cell or was written down, as text."""
    return cell(row["cell"]) if "cell" in row else str(row["figure"])


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def markdown(heads, lines) -> str:
    text = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in text)


def table(spec) -> str:
    """Return a table: a cell has what the table, its row and its column say. A row without any run
    is left out.

    Args:
        spec: ``columns`` and ``rows`` with a title and parts of a cell. A row may be the name of
            runs alone.
    """
    lines = []
    for row in spec["rows"]:
        if isinstance(row, str):
            row = {"title": spec.get("title", "{}").format(row), "where": {"row": row}}
        cells = [row["title"]]
        for column in spec["columns"]:
            where = {**spec["where"], **row["where"], **column.get("where", {})}
            cells.append(cell({**spec, **row, **column, "where": where}))
        if any(text != "–" for text in cells[1:]):
            lines.append(cells)
    if not lines:
        return "No run of this table is recorded yet."
    return markdown([spec["head"], *(column["title"] for column in spec["columns"])], lines)


@cache
def golden():
    """Return the recorded bits of steps, layers and sums, by section and name."""
    return load_toml((ROOT / "tests/golden/steps.toml").read_text(encoding="utf-8"))


@cache
def versions():
    """Return the version of each package that ``./dev`` installs."""
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    return dict(re.findall(r"^(\S+)==([^\s;]+)", text, re.MULTILINE))


@cache
def digest(name: str) -> str:
    """Return what a figure holds on, as it is today.

    Args:
        name: ``text: PATH``, the hash of a file; ``package: NAME``, its version; or a section of
            the golden bits and a row in it, such as ``steps: adamw word``: the hashes of visible
            and of stored values.
    """
    section, _, row = name.rpartition(": ")
    if section == "text":
        path = ROOT / row
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "gone"
    if section == "package":
        return versions().get(row, "gone")
    hashes = golden().get(section, {}).get(row, "gone").split()
    return " ".join(hashes[:2])


def tracked(runs) -> str:
    """Return a mark of how many of some runs have the bits of today: of their own step and layers."""
    if any("by hand" in run for run in runs):
        return "by hand"
    if not any("digests" in run for run in runs):
        return "not tracked"
    number = 0
    for run in runs:
        if "digests" in run:
            held = run["digests"][run["row"]]
            number += all(digest(name) == value for name, value in held.items())
    if number == len(runs):
        return ""
    return f"† {number} of {len(runs)} runs are of today's bits"


def dates_of(runs) -> str:
    """Return the first and the last date of runs."""
    dates = [run["date"] for run in runs]
    return " to ".join(dict.fromkeys([min(dates), max(dates)]))


def measured(row) -> str:
    """Return when and where a figure was measured, and whether it has the bits of today."""
    if "cell" not in row:
        return f"{row['measured']}, by hand"
    if row["cell"]["show"] == "corpus":
        return "by the tests of this commit"
    runs, paired = runs_of(row["cell"])
    runs = runs + [base for _, base in paired]
    if not runs:
        return "not run"
    machines = sorted({short(run["processor"]) for run in runs})
    return ", ".join(filter(None, [dates_of(runs), *machines, tracked(runs)]))


def section_table(name: str) -> str:
    """Return a section as RESULTS.md shows it."""
    lines = []
    for row in sections()[name]:
        text = figure(row)
        is_missed = row["missed"] and ", within ±" not in text  # what `equivalence` says
        target = row["target"] if is_missed else "–"
        command = f"`{row['command']}`" if row["command"] else "none"
        lines.append([row["claim"], text, target, measured(row), command])
    return markdown(["what", "figure", "missed target", "measured", "command"], lines)


def not_run(spec) -> str:
    """List the trainings that have fewer seeds than were asked for."""
    lines = []
    for plan in spec["plans"]:
        records = lines_of(f"benchmarks/{plan['records']}.jsonl")
        missing = []
        for row in plan["rows"]:
            runs = chosen(records, {**plan["where"], "row": row})
            number = sum(run.get("num_seeds", 0) for run in runs) or num_seeds(runs)
            if number < plan["seeds"]:
                missing.append(f"`{row}` {number}")
        if missing:
            asked = f"{plan['seeds']} seeds were asked for"
            lines.append(f"- {plan['title']}: {asked}. So far: {', '.join(missing)}.")
    return "\n".join(lines)


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────


def written(name: str) -> str:
    """Return what stands at a citation: a table between empty lines, the figure of a row, or when
    and where it was measured.
    """
    tables = load_toml((ROOT / "evidence" / "tables.toml").read_text(encoding="utf-8"))
    kind, _, key = name.partition(" ")
    if kind == "section":
        return f"\n\n{section_table(key)}\n\n"
    if kind == "when":
        return re.split(", (?:not tracked|by hand|†)", measured(evidence()[key]))[0]
    if name == "not run":
        return f"\n\n{not_run(tables[name])}\n\n"
    return f"\n\n{table(tables[name])}\n\n" if name in tables else figure(evidence()[name])


def filled(text: str) -> str:
    """Return a page with its figures and tables as the evidence has them today."""
    return CITATION.sub(lambda cited: cited[1] + written(cited[2]) + cited[4], text)


def pages():
    """Return the files that cite evidence."""
    return [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]


def main() -> None:
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
