"""Compare recipes: a row of metrics for each, an interval for each, and one verdict.

Runs of one seed start from the same weights and read the same batches. So their *paired* difference
of final validation losses contains little of the seed's effect, and its mean over the seeds gets an
interval (``intervals.py``). Each recipe is compared with one baseline, which is chosen by its cost,
never by its loss: the best of several equal recipes is the luckiest.

Diverged and unfinished runs enter no average. A recipe is as good as the baseline only if its
interval rules out a loss worse by more than 1 %. Each interval is for one recipe: of twenty harmless
recipes, expect one outside.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.errors import RecordError
from narrowgauge.measuring.columns import column
from narrowgauge.measuring.intervals import PairedDifference, interval, shown_loss
from narrowgauge.measuring.labels import run_labels, seed_of
from narrowgauge.measuring.settings import recipe_of, settings_diff
from narrowgauge.runs.finding import listed
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import SUMMARY, Row, finite_number, number
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.tables import Column, Table, json_value

NEGLIGIBLE = 1e-3
"""Fraction of the baseline's loss: a difference whose whole interval lies within does not matter."""
ACCEPTABLE = 0.01
"""Fraction of the baseline's loss: a certain increase up to this is a price, a larger one a fault."""
MAX_SKIPPED = 0.05
"""Fraction of steps: a loss scale settles within fewer."""
MAX_LOSS_RISE = 0.2
"""Fraction of the first loss: a run that ends higher has diverged."""
LEAST_LOSS = 0.05
"""Nats: losses that begin lower have no size of their own."""
BASELINE = "the baseline"
NO_INTERVAL = "no interval"
FIT = (BASELINE, "better", "within the noise")
"""Verdicts of recipes that are known to be as good as the baseline."""
_WIDTHS = {"float32": 32, "float16": 16, "bfloat16": 16}
_FREE = ("recipe", "seed", "warmup_steps")
"""Settings that may differ between compared runs."""
_ALIKE = (("data", "fingerprint"), ("machine", "device"), ("machine", "num_threads"))
"""Entries of other tables of ``run.toml`` that may not."""


@dataclass(frozen=True)
class Comparison:
    """Hold recipes and their comparison with a baseline.

    Args:
        rows: a row per recipe: ``recipe``, ``val_loss`` (mean over the seeds that count),
            ``val_loss_std`` (between seeds), ``tokens_per_second`` (median), ``bytes_per_param``,
            ``step_seconds`` (median), ``step_memory_bytes``, ``edq``, ``noise``,
            ``lost_fraction``, ``diverged`` (whether any seed did), ``num_seeds``, ``late_edq``
            (the audit's last values), ``difference`` from the baseline's loss with its 95 %
            ``difference_interval`` (``None`` with one pair), ``verdict``. Unknown values are
            ``None``.
        baseline: baseline of all comparisons; ``None`` if no run counts.
        differences: from the baseline, one per other recipe with a common seed.
        verdict: at most three sentences: the cheapest recipe that is as good, the runs that are
            left out, and the settings in which runs of one seed differ.

    Example:
        >>> from pathlib import Path
        >>> run = Run(Path("a"), {"config": {"recipe": "float32", "seed": 0}}, summary={"val_loss": 2.0})
        >>> compare_runs([run]).rows[0]["recipe"]
        'float32/float32'
    """

    rows: tuple[Row, ...]
    baseline: str | None
    differences: tuple[PairedDifference, ...]
    verdict: tuple[str, ...]

    @property
    def acceptable(self) -> float:
        """Return the acceptable excess over the baseline's loss, in nats."""
        for row in self.rows:
            if row["recipe"] == self.baseline:
                return ACCEPTABLE * abs(float(row["val_loss"]))
        return 0.0

    def table(self) -> Table:
        """Return the rows as the table of the terminal and the page."""
        minus = {difference.recipe: difference.text for difference in self.differences}
        columns = [
            Column("recipe", "recipe", code=True),
            Column("val. loss", _loss_cell, right=True),
            Column(f"minus {self.baseline}", lambda row: minus.get(row["recipe"], "–"), right=True),
        ]
        for name in ("bytes_per_param", "tokens_per_second"):
            columns.append(Column(SUMMARY[name].label, SUMMARY[name].cell, right=True))
        columns += [
            Column("MiB a step", SUMMARY["step_memory_bytes"].cell, right=True),
            Column("late EDQ", _edq_cell, right=True),
            Column("seeds", "num_seeds", right=True),
            Column("verdict", "verdict"),
        ]
        shown = []
        for entry in columns:  # a column in which no run has a value says nothing
            if any(entry.cell(row) not in ("", "–") for row in self.rows):
                shown.append(entry)
        return Table(tuple(shown), list(self.rows))

    def text(self) -> str:
        """Return the verdict, one sentence per line."""
        return "\n".join(self.verdict)

    def json(self) -> bytes:
        """Return ``compare.json``: the rows, valid JSON for all values."""
        rows = json_value(list(self.rows))
        return f"{json.dumps(rows, indent=1, allow_nan=False, ensure_ascii=False)}\n".encode()


def _loss_cell(row: Row) -> str:
    if row["val_loss"] is None:
        return str(row["verdict"])
    text = shown_loss(row["val_loss"])
    if row["val_loss_std"] is not None:
        text += f" (std {shown_loss(row['val_loss_std'])})"
    return text


def _edq_cell(row: Row) -> str:
    if row["late_edq"] is None:
        return "–"
    return f"{row['late_edq']:.3f}"


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare runs by recipe and seed.

    The baseline is the most precise recipe with a finished run, no divergence and no lost updates.
    Recipes without low-precision matmuls come first. Then more bytes per parameter, then the wider
    compute, then the order decide. Losses never decide, or the intervals would not hold (see the
    module).

    Args:
        runs: finished or not, in any order.
    Returns:
        The comparison.
    Raises:
        RecordError: there is no run, or a run's record is damaged.
    Example:
        >>> from pathlib import Path
        >>> def run(recipe, seed, loss, size):
        ...     config = {"recipe": recipe, "seed": seed}
        ...     return Run(Path("a"), {"config": config}, summary={"val_loss": loss, "bytes_per_param": size})
        >>> losses = {("bfloat16/master", 0): 2.0, ("bfloat16/master", 1): 2.1}
        >>> losses |= {("bfloat16/word", 0): 2.001, ("bfloat16/word", 1): 2.0995}
        >>> sizes = {"bfloat16/master": 16.0, "bfloat16/word": 8.0}
        >>> comparison = compare_runs([run(name, seed, loss, sizes[name]) for (name, seed), loss in losses.items()])
        >>> print(comparison.verdict[0])
        bfloat16/word is the cheapest within the noise: 8.00 bytes per parameter, where bfloat16/master takes 16.00.
    """
    if not runs:
        raise RecordError("no run was named.", "Name run folders, or the folder of a comparison.")
    labels = run_labels(runs)
    groups = dict[str, list[Run]]()
    for run, label in zip(runs, labels, strict=True):
        groups.setdefault(label, []).append(run)
    rows = {label: _row(label, group) for label, group in groups.items()}
    baseline = _widest(groups, rows)
    differences = []
    for label, row in rows.items():
        if baseline is None or label == baseline:
            row["verdict"] = row["verdict"] or BASELINE
            continue
        difference = _paired_difference(label, groups[label], groups[baseline])
        row["verdict"] = row["verdict"] or _verdict(difference, rows[baseline]["val_loss"])
        if difference is not None:
            differences.append(difference)
            row["difference"] = difference.mean
            if difference.num_pairs > 1:
                row["difference_interval"] = [difference.low, difference.high]
    verdict = [_cheapest(list(rows.values()), baseline, differences, groups)]
    verdict += [*_left_out(runs, labels), *_other_settings(runs)]
    return Comparison(tuple(rows.values()), baseline, tuple(differences), tuple(verdict))


# ── one run ───────────────────────────────────────────────────────────────────────────────────────


def divergence(run: Run) -> str:
    """Describe how a run diverged; empty if it did not."""
    for event in run.events:
        if event.get("what") == "divergence":
            words = str(event.get("text") or "").partition(". ")[0]
            return f"at step {event.get('step')}: {words}"
    losses = []
    for row in run.steps:
        if row.get("loss") is not None:
            losses.append(float(row["loss"]))
    end = next(reversed(losses), None)
    if run.summary is not None:
        end = number(run.summary.get("val_loss"))
    if end is not None and not math.isfinite(end):
        return f"its loss is {end}"
    # A loss of GRPO begins at zero, and those of PPO, ELBOs and densities pass it: their shares say
    # nothing.
    if len(losses) < 10 or min(losses) <= 0:
        return ""
    first = statistics.median(losses[:5])
    last = statistics.median(losses[-5:])
    if first >= LEAST_LOSS and last > (1 + MAX_LOSS_RISE) * first:
        return f"its loss began at {first:.2f} and ended at {last:.2f}"
    return ""


def _counts(run: Run) -> bool:
    """Return whether averages may include a run."""
    summary = run.summary
    return summary is not None and summary.get("val_loss") is not None and not divergence(run)


def _late_edq(run: Run) -> float | None:
    """Return the median of the last tenth of audited values, else the summary's value: large first
    steps dominate sums over a run.
    """
    values = column(run, "steps", "edq").finite.tolist()
    if values:
        return float(statistics.median(values[-max(3, len(values) // 10) :]))
    return finite_number((run.summary or {}).get("edq"))


# ── one recipe ────────────────────────────────────────────────────────────────────────────────────


def _row(label: str, group: Sequence[Run]) -> Row:
    ended = []
    summaries = []
    for run in group:
        if run.summary is None:
            continue
        seconds = column(run, "steps", "seconds").finite.tolist()
        summary = run.summary | {"late_edq": _late_edq(run), "step_seconds": None}
        if seconds:  # few steps compile, so they do not move a median
            summary["step_seconds"] = statistics.median(seconds)
        ended.append(summary)
        if _counts(run):
            summaries.append(summary)
    # Diverged runs also have a known speed and size.
    measured = summaries or ended
    deviation = None
    if len(summaries) > 1:
        deviation = _over(summaries, "val_loss", statistics.stdev)
    row = {
        "recipe": label,
        "val_loss": _over(summaries, "val_loss", statistics.fmean),
        "val_loss_std": deviation,
        "tokens_per_second": _over(measured, "tokens_per_second", statistics.median),
        "bytes_per_param": _over(measured, "bytes_per_param", statistics.median),
        "step_seconds": _over(ended, "step_seconds", statistics.median),
        "step_memory_bytes": _over(measured, "step_memory_bytes", max),
        "edq": _over(summaries, "edq", statistics.fmean),
        "noise": _over(summaries, "noise", statistics.fmean),
        "lost_fraction": _over(summaries, "lost_fraction", statistics.fmean),
        "diverged": any(map(divergence, group)),
        "num_seeds": len(summaries),
        "late_edq": _over(summaries, "late_edq", statistics.median),
        "difference": None,
        "difference_interval": None,
    }
    taken = _over(summaries, "steps", sum) or 1
    skipped = _over(summaries, "num_skipped", sum) or 0
    return row | {"verdict": _fault(row, share_skipped=skipped / taken)}


def _over(
    summaries: Sequence[Row], key: str, reduce: Callable[[list[float]], float]
) -> float | None:
    values = []
    for summary in summaries:
        value = summary.get(key)
        if value is not None and math.isfinite(value):
            values.append(value)
    if not values:
        return None
    return reduce(values)


def _fault(row: Row, *, share_skipped: float) -> str:
    """Return why a recipe is not to be used, by its own runs alone; empty if it may be."""
    if row["diverged"]:
        return "diverged"
    if not row["num_seeds"]:
        return "no loss"
    if row["late_edq"] is not None and row["late_edq"] < MIN_EDQ:
        return "loses its updates"
    if share_skipped > MAX_SKIPPED:
        return "skips steps"
    return ""


def _widest(groups: Mapping[str, Sequence[Run]], rows: Mapping[str, Row]) -> str | None:
    """Return the baseline: the most precise recipe without faults."""

    def width(label: str) -> tuple[bool, bool, bool, float, int]:
        row = rows[label]
        recipe = recipe_of(groups[label][0])
        bits = 0
        if recipe is not None:
            bits = _WIDTHS.get(recipe.compute.name, 0)
        size = round(row["bytes_per_param"] or 0.0, 1)
        return row["num_seeds"] > 0, not row["verdict"], bits > 0, size, bits

    widest = max(groups, key=width)
    return widest if rows[widest]["num_seeds"] else None


def _verdict(difference: PairedDifference | None, loss: float) -> str:
    """Return a recipe's verdict from its difference to the baseline's loss."""
    negligible = NEGLIGIBLE * abs(loss)
    acceptable = ACCEPTABLE * abs(loss)
    if difference is None or not math.isfinite(difference.half):
        return NO_INTERVAL
    if difference.low > 0 and difference.high > negligible:
        if difference.mean > acceptable:
            return "worse by more than 1 %"
        return "worse"
    if difference.high < 0 and -difference.low > negligible:
        return "better"
    if difference.high > acceptable:
        return "not distinguishable"
    return "within the noise"


def _paired_difference(
    label: str, group: Sequence[Run], baseline: Sequence[Run]
) -> PairedDifference | None:
    """Return a recipe's loss minus the baseline's over common seeds on the same data; ``None``
    without any.
    """
    base = dict(zip(map(seed_of, baseline), baseline, strict=True))
    pairs = []
    for run in group:
        other = base.get(seed_of(run))
        if other is None or not _counts(run) or not _counts(other):
            continue
        fingerprints = {run.data_fingerprint, other.data_fingerprint}
        if len(fingerprints) == 1 or "" in fingerprints:
            pairs.append((run.summary or {})["val_loss"] - (other.summary or {})["val_loss"])
    if not pairs:
        return None
    return PairedDifference(label, *interval(pairs), len(pairs))


# ── the verdict ───────────────────────────────────────────────────────────────────────────────────


def _cost(row: Row) -> tuple[float, float]:
    """Return the sort key of recipes: bytes per parameter, then time. Less than a tenth of a byte is
    a few norm weights, not a saving.
    """
    size = row["bytes_per_param"]
    if size is None:
        size = math.inf
    return round(size, 1), -(row["tokens_per_second"] or 0.0)


def _cheapest(
    rows: Sequence[Row],
    baseline: str | None,
    differences: Sequence[PairedDifference],
    groups: dict[str, list[Run]],
) -> str:
    """Return the sentence about the cheapest recipe that is as good as the baseline."""
    if baseline is None or not differences:
        if baseline is not None and len(rows) == 1:
            return f"{baseline} alone was run: validation loss {shown_loss(rows[0]['val_loss'])}."
        return "No two recipes have finished runs of one seed on the same data, so nothing can be compared."
    level = math.inf
    for run in groups[baseline]:
        level = min(level, (run.run.get("data") or {}).get("unigram_loss") or math.inf)
    fit = list(FIT)
    has_intervals = max(difference.num_pairs for difference in differences) > 1
    if not has_intervals:
        fit.append(NO_INTERVAL)
    candidates = []
    reference = rows[0]
    for row in rows:
        if row["recipe"] == baseline:
            reference = row
        if row["verdict"] in fit and row["bytes_per_param"] is not None:
            candidates.append(row)
    if not reference["val_loss"] < level:
        return (
            f"No recipe is named: {baseline} learned no more than token frequencies, at "
            f"{level:.4f}. Take more steps."
        )
    if not candidates:
        return "No recipe of known bytes per parameter is as good as the baseline."
    best = min(candidates, key=_cost)
    size = f"{best['bytes_per_param']:.2f} bytes per parameter"
    if best is reference:
        return f"No smaller recipe is known to be as good as {baseline}: {size}."
    claim = "is the cheapest within the noise"
    if not has_intervals:
        claim = "costs least (one seed: a difference may be chance, take 3)"
    where = "an unknown number"
    if reference["bytes_per_param"] is not None:
        where = f"{reference['bytes_per_param']:.2f}"
    return f"{best['recipe']} {claim}: {size}, where {baseline} takes {where}."


def _left_out(runs: Sequence[Run], labels: Sequence[str]) -> Iterator[str]:
    names = []
    for run, label in zip(runs, labels, strict=True):
        if not _counts(run):
            reason = divergence(run) or f"{len(run.steps)} steps, no validation loss"
            names.append(f"{label}, seed {seed_of(run)} ({reason})")
    if names:
        yield f"Left out of every mean: {listed(names)}."


def _other_settings(runs: Sequence[Run]) -> Iterator[str]:
    """Name the settings that differ between runs of one seed. Skip those that one run lacks."""
    first_of_seed = dict[int, Run]()
    names = dict[str, None]()
    for run in runs:
        first = first_of_seed.setdefault(seed_of(run), run)
        for setting in settings_diff(first.run, run.run):
            is_config = setting.table == "config" and setting.name not in _FREE
            if is_config or (setting.table, setting.name) in _ALIKE:
                names[f"{setting.table}.{setting}"] = None
        if run.is_foreign:
            names["logs of other frameworks, without recipe, audit or seed (0 is taken)"] = None
    if names:
        yield f"The runs differ in more than recipe and seed: {'; '.join(names)}."
