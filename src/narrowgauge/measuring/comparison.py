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
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from narrowgauge.analysis.columns import column
from narrowgauge.analysis.thresholds import (
    ACCEPTABLE,
    LEAST_LOSS,
    MAX_LOSS_RISE,
    MAX_SKIPPED,
    NEGLIGIBLE,
    NOISE,
)
from narrowgauge.errors import RecordError
from narrowgauge.measuring.intervals import PairedDifference, interval, shown_loss
from narrowgauge.measuring.labels import run_labels, seed_of
from narrowgauge.measuring.settings import recipe_of, settings_diff
from narrowgauge.runs.finding import listed
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import SUMMARY, Row, finite_number, number
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.tables import Column, Table, json_value

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
        return row["verdict"]
    text = shown_loss(row["val_loss"])
    if row["val_loss_std"] is not None:
        text += f" (std {shown_loss(row['val_loss_std'])})"
    return text


def _edq_cell(row: Row) -> str:
    return "–" if row["late_edq"] is None else f"{row['late_edq']:.3f}"


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
    usable = [label for label in groups if rows[label]["num_seeds"]]
    baseline = max(usable, key=lambda label: _width(rows[label], groups[label][0]), default=None)
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
    losses = [float(row["loss"]) for row in run.steps if row.get("loss") is not None]
    end = losses[-1] if losses else None
    if run.summary is not None:
        end = number(run.summary.get("val_loss"))
    if end is not None and not math.isfinite(end):
        return f"its loss is {end}"
    if len(run.steps) < 10 or not has_zero(losses):
        return ""
    first = statistics.median(losses[:5])
    last = statistics.median(losses[-5:])
    quarter = losses[: max(5, len(losses) // 4)]
    middle = statistics.median(quarter)
    noise = statistics.median(abs(x - middle) for x in quarter)
    if last - first > max(MAX_LOSS_RISE * first, NOISE * noise):
        return f"its loss began at {first:.2f} and ended at {last:.2f}"
    return ""


def has_zero(losses: Sequence[float]) -> bool:
    """Return whether a loss has a size of its own, as a likelihood has: it begins well above zero,
    and stays above.

    A loss of GRPO begins at zero, and those of PPO, ELBOs and densities pass it: their shares say
    nothing.
    """
    finite = [x for x in losses if math.isfinite(x)]
    return bool(finite) and min(finite) > 0 and statistics.median(finite[:5]) >= LEAST_LOSS


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
        return statistics.median(values[-max(3, len(values) // 10) :])
    return finite_number((run.summary or {}).get("edq"))


# ── one recipe ────────────────────────────────────────────────────────────────────────────────────


def _row(label: str, group: Sequence[Run]) -> Row:
    ended = [run for run in group if run.summary is not None]
    counting = [run for run in ended if _counts(run)]
    durations = []
    for run in ended:  # few steps compile, so they do not move a median
        durations += column(run, "steps", "seconds").finite.tolist()
    summaries = [run.summary or {} for run in counting]
    # Diverged runs also have a known speed and size.
    measured = summaries or [run.summary or {} for run in ended]
    losses = [float(summary["val_loss"]) for summary in summaries]
    edqs = [edq for edq in map(_late_edq, counting) if edq is not None]
    row = {
        "recipe": label,
        "val_loss": statistics.fmean(losses) if losses else None,
        "val_loss_std": statistics.stdev(losses) if len(losses) > 1 else None,
        "tokens_per_second": _over(measured, "tokens_per_second", statistics.median),
        "bytes_per_param": _over(measured, "bytes_per_param", statistics.median),
        "step_seconds": statistics.median(durations) if durations else None,
        "step_memory_bytes": _over(measured, "step_memory_bytes", max),
        "edq": _over(summaries, "edq", statistics.fmean),
        "noise": _over(summaries, "noise", statistics.fmean),
        "lost_fraction": _over(summaries, "lost_fraction", statistics.fmean),
        "diverged": any(map(divergence, group)),
        "num_seeds": len(losses),
        "late_edq": statistics.median(edqs) if edqs else None,
        "difference": None,
        "difference_interval": None,
    }
    taken = sum(int(summary.get("steps") or 0) for summary in summaries)
    skipped = sum(int(summary.get("num_skipped") or 0) for summary in summaries)
    return row | {"verdict": _fault(row, share_skipped=skipped / max(1, taken))}


def _over(
    summaries: Sequence[Row], key: str, reduce: Callable[[list[float]], float]
) -> float | None:
    values = []
    for summary in summaries:
        value = summary.get(key)
        if value is not None and math.isfinite(value):
            values.append(value)
    return reduce(values) if values else None


def _fault(row: Row, *, share_skipped: float) -> str:
    """Return why a recipe is not to be used, by its own runs alone; empty if it may be."""
    if row["diverged"]:
        return "diverged"
    if not row["num_seeds"]:
        return "no loss"
    if row["late_edq"] is not None and row["late_edq"] < MIN_EDQ:
        return "loses its updates"
    return "skips steps" if share_skipped > MAX_SKIPPED else ""


def _width(row: Row, run: Run) -> tuple[bool, bool, float, int]:
    """Return the sort key of baselines: the most precise recipe without faults is the largest."""
    recipe = recipe_of(run)
    bits = 0 if recipe is None else _WIDTHS.get(recipe.compute.name, 0)
    return not row["verdict"], bits > 0, round(row["bytes_per_param"] or 0.0, 1), bits


def _verdict(difference: PairedDifference | None, loss: float) -> str:
    """Return a recipe's verdict from its difference to the baseline's loss."""
    negligible = NEGLIGIBLE * abs(loss)
    acceptable = ACCEPTABLE * abs(loss)
    if difference is None or not math.isfinite(difference.half):
        return NO_INTERVAL
    if difference.low > 0 and difference.high > negligible:
        return "worse by more than 1 %" if difference.mean > acceptable else "worse"
    if difference.high < 0 and -difference.low > negligible:
        return "better"
    return "not distinguishable" if difference.high > acceptable else "within the noise"


def _paired_difference(
    label: str, group: Sequence[Run], baseline: Sequence[Run]
) -> PairedDifference | None:
    """Return a recipe's loss minus the baseline's over common seeds on the same data; ``None``
    without any.
    """
    base = {seed_of(run): run for run in baseline if _counts(run)}
    pairs = []
    for run in group:
        other = base.get(seed_of(run))
        if other is None or not _counts(run):
            continue
        fingerprints = {run.data_fingerprint, other.data_fingerprint}
        if len(fingerprints) == 1 or "" in fingerprints:
            pairs.append((run.summary or {})["val_loss"] - (other.summary or {})["val_loss"])
    return PairedDifference(label, *interval(pairs), len(pairs)) if pairs else None


# ── the verdict ───────────────────────────────────────────────────────────────────────────────────


def _cost(row: Row) -> tuple[float, float]:
    """Return the sort key of recipes: bytes per parameter, then time. Less than a tenth of a byte is
    a few norm weights, not a saving.
    """
    size = row["bytes_per_param"]
    return math.inf if size is None else round(size, 1), -(row["tokens_per_second"] or 0.0)


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
    reference = next(row for row in rows if row["recipe"] == baseline)
    tables = [run.run.get("data") or {} for run in groups[baseline]]
    levels = [table["unigram_loss"] for table in tables if table.get("unigram_loss") is not None]
    if levels and not reference["val_loss"] < min(levels):
        return (
            f"No recipe is named: {baseline} learned no more than token frequencies, at "
            f"{min(levels):.4f}. Take more steps."
        )
    has_intervals = any(difference.num_pairs > 1 for difference in differences)
    fit = FIT if has_intervals else (*FIT, NO_INTERVAL)
    candidates = []
    for row in rows:
        if row["verdict"] in fit and row["bytes_per_param"] is not None:
            candidates.append(row)
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
    values = dict[str, dict[Any, None]]()
    for first, second in combinations(runs, 2):
        if seed_of(first) != seed_of(second):
            continue
        for setting in settings_diff(first.run, second.run):
            is_config = setting.table == "config" and setting.name not in _FREE
            if is_config or (setting.table, setting.name) in _ALIKE:
                values.setdefault(setting.name, {}).update(dict.fromkeys(setting.values))
    items = []
    if values.pop("fingerprint", None):
        items.append("data, so those losses are not compared")
    items += [f"{name} {', '.join(texts)}" for name, texts in values.items()]
    if any(run.is_foreign for run in runs):
        items.append("logs of other frameworks, without recipe, audit or seed (0 is taken)")
    if items:
        yield f"The runs differ in more than recipe and seed: {'; '.join(items)}."
