"""Fill measured figures and tables into the pages, from ``evidence/`` and the records of benchmarks.

A row of ``evidence/SECTION.jsonl`` is one claim: its figure, and what was measured when, where and
how. A page cites it by its key; what stands between the two comments is written here::

    at <!-- evidence: naive -->+0.182 ± 0.041<!-- end --> nats

A name of ``evidence/tables.toml`` cites a table instead, of rows × columns × an aggregate of the
runs in a cell; ``section NAME`` cites a whole section, as RESULTS.md does. ::

    python docs/evidence.py                  write README, RESULTS, CLAIMS, docs/ and the planner's losses
    python docs/evidence.py --measured KEY   these figures are of today
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import math
import re
import statistics
from collections.abc import Iterable, Sequence
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.spec.notation import parse
from narrowgauge.spec.significance import student_t
from narrowgauge.spec.toml import load_toml

ROOT = Path(__file__).parents[1]
CITATION = re.compile(r"(<!-- evidence: ([^>]+?) -->)(.*?)(<!-- end -->)", re.DOTALL)
SAME = ("setting", "model", "lr", "beta2", "steps", "seed", "vectors", "torch")
"""What the two runs of a pair have in common, beside their held-out text: other processors round
differently.
"""

Row = dict[str, Any]
Pairs = list[tuple[Row, Row]]


@cache
def lines_of(place: str) -> list[Row]:
    """Return the objects of a file of JSON lines."""
    text = (ROOT / place).read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def sections() -> dict[str, list[Row]]:
    """Return the rows of each section: those held out from what was tuned stand first."""
    rows = {}
    for path in sorted((ROOT / "evidence").glob("*.jsonl")):
        section = lines_of(f"evidence/{path.name}")
        rows[path.stem] = sorted(section, key=lambda row: not row["held_out"])
    return rows


@cache
def evidence() -> dict[str, Row]:
    """Return all rows by key."""
    return {row["key"]: row for row in itertools.chain(*sections().values())}


# ── a cell: the figure of some runs ───────────────────────────────────────────────────────────────


def chosen(runs: Iterable[Row], where: Row, step: int | None = None) -> list[Row]:
    """Return the runs with these fields, with ``loss`` as it was after a step, or at the end."""
    matching = []
    for run in runs:
        if all(run.get(name) == value for name, value in where.items()):
            losses = run.get("losses", {})
            place = str(run.get("steps") if step is None else step)
            if step is None or place in losses:
                matching.append({**run, "loss": losses.get(place)})
    return matching


def conditions(run: Row) -> tuple[Any, ...]:
    """Return what the two runs of a pair have in common. The ``unigram`` loss names their text."""
    return *map(run.get, SAME), round(run.get("unigram") or 0.0, 6)


def pairs(runs: Iterable[Row], baseline: Iterable[Row]) -> Pairs:
    """Return each run with the baseline's of the same seed and machine, on all machines."""
    bases = {conditions(run): run for run in baseline if run["loss"] is not None}
    return [(run, bases[conditions(run)]) for run in runs if conditions(run) in bases]


def half_interval(values: Sequence[float]) -> float:
    """Return half the 95 % interval of the mean of one value per seed."""
    seeds = len(values)
    return student_t(seeds - 1) * math.sqrt(statistics.variance(values) / seeds)


def interval(values: Sequence[float]) -> str:
    """Return the mean of one value per seed, ± half its 95 % interval, and the seeds if few."""
    mean = statistics.fmean(values)
    if not math.isfinite(mean):
        return "diverged"
    text = f"{mean:+.4f}"
    seeds = len(values)
    if seeds > 1:
        text += f" ± {half_interval(values):.4f}"
    if seeds < 3:
        text += f" ({seeds} seed{'s' * (seeds > 1)})"
    return text


def differences(paired: Pairs) -> list[float]:
    """Return the losses less the baseline's, one mean a seed; infinite where a run diverged.

    Two machines repeat a seed's weights and text, so their pairs count as one sample.
    """
    by_seed: dict[int, list[float]] = {}
    for run, base in paired:
        loss = math.inf if run["loss"] is None else run["loss"] - base["loss"]
        by_seed.setdefault(run["seed"], []).append(loss)
    return [statistics.fmean(losses) for losses in by_seed.values()]


def less(paired: Pairs) -> str:
    """Return the interval over all machines, and that of each machine where two disagree.

    Machines disagree if their means differ in sign, or by more than both half intervals. A machine
    of one seed has no interval and is not asked.
    """
    machines = {}
    for name in dict.fromkeys(run["vectors"] for run, _ in paired):
        losses = differences([pair for pair in paired if pair[0]["vectors"] == name])
        if len(losses) > 1 and all(map(math.isfinite, losses)):
            machines[name] = losses
    text = interval(differences(paired))
    for first, second in itertools.combinations(machines.values(), 2):
        means = statistics.fmean(first), statistics.fmean(second)
        reach = half_interval(first) + half_interval(second)
        if means[0] * means[1] < 0 or abs(means[0] - means[1]) > reach:
            parts = [f"{name} {interval(losses)}" for name, losses in machines.items()]
            return f"{text}; {', '.join(parts)}"
    return text


def fraction_kept(paired: Pairs) -> float:
    """Return the fall of the runs' losses over that of the baseline's.

    A format that rounds the weights begins above the checkpoint, where the baseline begins.
    """
    fall = statistics.fmean(base["losses"]["0"] - run["loss"] for run, base in paired)
    return fall / statistics.fmean(base["losses"]["0"] - base["loss"] for _, base in paired)


def mean(runs: list[Row], field: str, form: str) -> str:
    values = [run[field] for run in runs if run.get(field) is not None]
    return format(statistics.fmean(values), form) if values else "–"


def series(runs: list[Row], field: str) -> str:
    """Return the field of each run that has it, behind the run's name."""
    texts = []
    for run in runs:
        if field in run:
            texts.append(f"`{run['row']}` {run[field]}")
    return ", ".join(texts)


def cell(spec: Row) -> str:
    """Return the figure of a cell.

    Args:
        spec: ``records``, a file of ``benchmarks/``; ``where``, the fields of the runs; ``step``,
            after which their losses count; ``baseline``, whose runs of the same seed they are
            compared with. What they ``show``: the ``text`` or the ``mean`` of a ``field``, the
            text of each run as a ``series``, the ``seeds``, the loss ``less`` the baseline's or its
            ``change`` from the first one, how far it is ``ahead`` in 0.001 nats, or how much of
            the baseline's fall is ``kept``; in a ``form``.
    """
    how = spec["show"]
    records = lines_of(f"benchmarks/{spec['records']}.jsonl")
    runs = chosen(records, spec["where"], spec.get("step"))
    paired: Pairs = []
    if "baseline" in spec:
        where = {**spec["where"], "row": spec["baseline"]}
        paired = pairs(runs, chosen(records, where, spec.get("step")))
        runs = [run for run, _ in paired]
    if not runs:
        return "–"
    if how == "text":
        return str(runs[0].get(spec["field"]) or "–")
    if how == "series":
        return series(runs, spec["field"])
    if how == "seeds":
        return str(len({run["seed"] for run in runs}))
    if how == "mean":
        text = mean(runs, spec["field"], spec["form"])
    elif how == "less":
        text = less(paired)
    elif how == "change":
        text = interval([run["loss"] - run["losses"]["0"] for run in runs])
    elif how == "ahead":
        text = f"{-1e3 * statistics.fmean(differences(paired)):+.2f}"
    else:
        text = format(fraction_kept(paired), spec["form"])
    return text.replace("-", "−").replace("%", " %")


def figure(row: Row) -> str:
    """Return a row's figure, which is that of a cell or was written down, as text."""
    return cell(row["cell"]) if "cell" in row else str(row["figure"])


# ── tables ────────────────────────────────────────────────────────────────────────────────────────


def markdown(heads: Sequence[str], lines: Iterable[Sequence[str]]) -> str:
    text = [heads, ["---", *["---:"] * (len(heads) - 1)], *lines]
    return "\n".join(f"| {' | '.join(line)} |" for line in text)


def table(spec: Row) -> str:
    """Return a table: a cell has what the table, its column and its row say.

    Args:
        spec: ``columns`` and ``rows`` with a title and parts of a cell. A row may be the name of
            runs alone, and without ``rows`` every name has one. A column may name other
            ``records``, where the runs of a row may have another name, as which they are ``timed``.
    """
    records = lines_of(f"benchmarks/{spec['records']}.jsonl")
    names = dict.fromkeys(run["row"] for run in chosen(records, spec["where"]))
    lines = []
    for row in spec.get("rows", names):
        if isinstance(row, str):
            row = {"title": spec.get("title", "{}").format(row), "where": {"row": row}}
        cells = [row["title"]]
        for column in spec["columns"]:
            shared = {**spec, **row}
            where = {**spec["where"], **row["where"]}
            if "records" in column:
                # These runs have nothing else in common with those of the other columns.
                shared, where = {}, {"row": row.get("timed", where.get("row"))}
            where |= column.get("where", {})
            cells.append(cell({**shared, **column, "where": where}))
        lines.append(cells)
    return markdown([spec["head"], *(column["title"] for column in spec["columns"])], lines)


def is_recipe(name: str) -> bool:
    """Return whether the package has this recipe today."""
    try:
        parse(name)
    except RecipeError:
        return False
    return True


def losses() -> str:
    """Return the losses of our recipes that were measured with three seeds, as lines of TOML."""
    where = {"setting": "llama-1m", "lr": 1e-3, "beta2": 0.95}
    records = lines_of("benchmarks/trainings.jsonl")
    masters = chosen(records, {**where, "row": "master"})
    lines = []
    for row in dict.fromkeys(run["row"] for run in records):
        runs = chosen(records, {**where, "row": row})
        recipe = row if "/" in row else f"bfloat16/{row}"
        paired = pairs(runs, masters)
        costs = differences(paired)
        if len(costs) >= 3 and is_recipe(recipe):
            # 0.0 takes its sign from a cost that rounds to -0.0.
            cost = round(statistics.fmean(costs), 4) + 0.0
            lines.append(f'"{recipe}" = [{cost:.4f}, {half_interval(costs):.4f}]')
    return "\n".join(sorted(lines))


@cache
def golden() -> dict[str, dict[str, str]]:
    """Return the recorded bits of steps, layers and sums, by section and name."""
    return load_toml((ROOT / "tests/golden/steps.toml").read_text(encoding="utf-8"))


def digest(name: str) -> str:
    """Return what a figure holds on, as it is today.

    Args:
        name: ``text: PATH``, the hash of a file; or a section of the golden bits and a row in it,
            such as ``steps: adamw word``: the hashes of visible and of stored values.
    """
    section, _, row = name.partition(": ")
    if section == "text":
        path = ROOT / row
        return hashlib.sha256(path.read_bytes()).hexdigest()[:16] if path.is_file() else "gone"
    hashes = golden()[section].get(row, "gone").split()
    return " ".join(hashes[:2])


def is_of_today(row: Row) -> bool:
    """Return whether the bits and texts that a figure holds on are those of its measurement."""
    return all(digest(name) == value for name, value in row["holds"].items())


def section_table(name: str) -> str:
    """Return a section as RESULTS.md shows it. † marks a figure that holds on other bits today."""
    lines = []
    for row in sections()[name]:
        target = row["target"] if row["missed"] else "–"
        measured = f"{row['date']}, {row['machine']}"
        if not is_of_today(row):
            measured += "†"
        claim = ("Held out: " if row["held_out"] else "") + row["claim"]
        command = f"`{row['command']}`" if row["command"] else "not recorded"
        lines.append([claim, figure(row), target, measured, command])
    return markdown(["what", "figure", "missed target", "measured", "command"], lines)


# ── pages ─────────────────────────────────────────────────────────────────────────────────────────


def written(name: str) -> str:
    """Return what stands at a citation: a table between empty lines, or the figure of a row."""
    if name == "losses":
        return f"\n{losses()}\n# "
    tables = load_toml((ROOT / "evidence" / "tables.toml").read_text(encoding="utf-8"))
    if name.startswith("section "):
        return f"\n\n{section_table(name.removeprefix('section '))}\n\n"
    return f"\n\n{table(tables[name])}\n\n" if name in tables else figure(evidence()[name])


def filled(text: str) -> str:
    """Return a page with its figures and tables as the evidence has them today."""
    return CITATION.sub(lambda cited: cited[1] + written(cited[2]) + cited[4], text)


def pages() -> list[Path]:
    """Return the files that cite evidence."""
    markdown_pages = [*sorted(ROOT.glob("*.md")), *sorted((ROOT / "docs").rglob("*.md"))]
    return [*markdown_pages, ROOT / "src/narrowgauge/planner/data/losses.toml"]


def measured_today(keys: Sequence[str]) -> None:
    """Date rows of the evidence, and take today's digests of what their figures hold on."""
    for path in sorted((ROOT / "evidence").glob("*.jsonl")):
        lines = []
        for row in lines_of(f"evidence/{path.name}"):
            if row["key"] in keys:
                row["date"] = date.today().isoformat()
                row["holds"] = {name: digest(name) for name in row["holds"]}
            lines.append(json.dumps(row, ensure_ascii=False) + "\n")
        path.write_text("".join(lines), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description="Write figures and tables into the pages.")
    parser.add_argument("--measured", nargs="+", default=[], metavar="KEY")
    measured_today(parser.parse_args().measured)
    for page in pages():
        text = page.read_text(encoding="utf-8")
        page.write_text(filled(text), encoding="utf-8")


if __name__ == "__main__":
    main()
