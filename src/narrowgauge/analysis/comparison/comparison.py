"""Compare recipes: a row of metrics for each, and a verdict in words that a statistician would
sign.

Runs of one seed start from the same weights and read the same batches. So their *paired* difference
of final validation losses contains little of the seed's effect. Its mean over the seeds gets an
interval (``intervals.py``). Each recipe is compared with one baseline. The baseline is chosen by
its cost, never by its loss. The best of several equal recipes is the luckiest. Relative to it, the
others would look worse than they are.

Diverged and unfinished runs are named and enter no average. A recipe wins only if its interval
rules out a loss worse by more than 1 %. Each interval is for one recipe: of twenty harmless
recipes, expect one outside. Only runs of one seed are paired, so only their settings must agree.
Another seed always has another validation text.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

from narrowgauge.analysis.columns import column
from narrowgauge.analysis.comparison.classification import Classification, Rank, RunStats, classify
from narrowgauge.analysis.comparison.intervals import (
    MOST_SEEDS,
    PairedDifference,
    seeds_needed,
    shown_loss,
)
from narrowgauge.analysis.comparison.labels import run_labels
from narrowgauge.analysis.settings import settings_diff
from narrowgauge.analysis.thresholds import ACCEPTABLE
from narrowgauge.errors import RecordError
from narrowgauge.runs.finding import listed
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import SUMMARY, Row
from narrowgauge.spec.tables import Column, Table, json_value


@dataclass(frozen=True)
class Comparison:
    """Hold recipes and their comparison with a baseline.

    Args:
        classes: classification of each recipe, by its label.
        baseline: baseline of all comparisons; ``None`` if no run counts.

    Example:
        >>> from pathlib import Path
        >>> run = Run(Path("a"), {"config": {"recipe": "float32", "seed": 0}}, summary={"val_loss": 2.0})
        >>> compare_runs([run]).rows[0]["recipe"]
        'float32/float32'
    """

    classes: Mapping[str, Classification]
    baseline: str | None

    @property
    def rows(self) -> tuple[Row, ...]:
        """Return a row per recipe.

        Columns: ``recipe``, ``val_loss`` (mean over the seeds that count), ``val_loss_std``
        (between seeds), ``tokens_per_second`` (median), ``bytes_per_param``, ``step_seconds``
        (median), ``step_memory_bytes``, ``edq``, ``noise``, ``lost_fraction``, ``diverged``
        (whether any seed did), ``num_seeds``. Unknown values are ``None``.
        """
        return tuple(recipe.row for recipe in self.classes.values())

    @property
    def verdict(self) -> tuple[str, ...]:
        """Return at most eight sentences, the most important first."""
        return tuple(sentences_of(self))

    @property
    def differences(self) -> tuple[PairedDifference, ...]:
        """Return the differences from the baseline, one per other recipe with a common seed."""
        differences = []
        for recipe in self.classes.values():
            if recipe.difference is not None:
                differences.append(recipe.difference)
        return tuple(differences)

    @property
    def has_intervals(self) -> bool:
        """Return whether any recipe shares two seeds with the baseline."""
        return any(difference.num_pairs > 1 for difference in self.differences)

    @property
    def acceptable(self) -> float:
        """Return the acceptable excess over the baseline's loss, in nats."""
        if self.baseline is None:
            return 0.0
        return ACCEPTABLE * abs(float(self.classes[self.baseline].row["val_loss"] or 0.0))

    @property
    def cheapest(self) -> Classification | None:
        """Return the cheapest recipe that is fit for use.

        With one seed each, all compared ones without faults are.
        """
        best = None
        for recipe in self.classes.values():
            is_fit = recipe.is_fit
            if not self.has_intervals and recipe.difference is not None:
                is_fit = is_fit or recipe.usable_rank is Rank.NO_INTERVAL
            is_sized = recipe.row["bytes_per_param"] is not None
            if is_sized and is_fit and (best is None or recipe.cost < best.cost):
                best = recipe
        return best

    def table(self) -> Table:
        """Return the rows as the table of the terminal and the page."""
        minus = {difference.recipe: difference.text for difference in self.differences}

        def loss(row: Row) -> str:
            return _shown_loss(row, self.classes[row["recipe"]].runs)

        def late_edq(row: Row) -> str:
            edq = self.classes[row["recipe"]].late_edq
            if edq is None:
                return "–"
            return f"{edq:.3f}"

        columns = [Column("recipe", "recipe", code=True), Column("val. loss", loss, right=True)]
        if minus:
            title = f"minus {self.baseline}"
            columns.append(Column(title, lambda row: minus.get(row["recipe"], "–"), right=True))
        for name in ("bytes_per_param", "tokens_per_second"):
            columns.append(Column(SUMMARY[name].label, SUMMARY[name].cell, right=True))
        columns += [
            Column("MiB a step", SUMMARY["step_memory_bytes"].cell, right=True),
            Column("late EDQ", late_edq, right=True),
            Column("seeds", "num_seeds", right=True),
            Column("verdict", lambda row: self.classes[row["recipe"]].verdict),
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
        """Return ``compare.json``: a list of rows, valid JSON for all values.

        Columns beside those of :attr:`rows`: ``late_edq``, ``difference`` from the baseline's loss
        with its 95 % ``difference_interval`` (``None`` with one pair), ``verdict`` and ``faults``.
        """
        rows = []
        for recipe in self.classes.values():
            minus = recipe.difference
            row = {**recipe.row, "late_edq": recipe.late_edq}
            row |= {"difference": None, "difference_interval": None}
            if minus is not None:
                row["difference"] = minus.mean
                if minus.num_pairs > 1:
                    row["difference_interval"] = [minus.low, minus.high]
            rows.append(row | {"verdict": recipe.verdict, "faults": recipe.faults})
        text = json.dumps(json_value(rows), indent=1, allow_nan=False, ensure_ascii=False)
        return f"{text}\n".encode()


def _shown_loss(row: Row, runs: Sequence[RunStats]) -> str:
    if row["val_loss"] is not None:
        text = shown_loss(row["val_loss"])
        if row["val_loss_std"] is not None:
            text += f" (std {shown_loss(row['val_loss_std'])})"
        if row["diverged"]:
            text += ", diverged"
        return text
    if row["diverged"]:
        return "diverged"
    for run in runs:
        if run.run.summary is None:
            return "unfinished"
    return "not recorded"


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare runs by recipe and seed.

    The baseline is the most precise recipe with a finished run, no divergence and no lost updates.
    Recipes without low-precision matmuls come first. Then more bytes per parameter, then the wider
    compute, then the order decide. Losses never decide, or the intervals would not hold (see the
    module). A recipe is as good as the baseline only if its interval ends below 1 % of the loss.
    Otherwise the verdict gives the number of seeds needed.

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
    groups: dict[str, list[RunStats]] = {}
    for run, label in zip(runs, run_labels(runs), strict=True):
        groups.setdefault(label, []).append(RunStats.of(run, label))
    rows = {label: _row(label, group) for label, group in groups.items()}
    return Comparison(*classify(groups, rows))


def _row(label: str, group: Sequence[RunStats]) -> Row:
    # Diverged runs also have a known speed and size.
    ended = []
    counting = []
    durations = []
    for run in group:
        summary = run.run.summary
        if summary is None:
            continue
        ended.append(summary)
        if run.counts:
            counting.append(summary)
        seconds = column(run.run, "steps", "seconds").finite
        if len(seconds):
            durations.append(statistics.median(seconds.tolist()))
    measured = counting or ended
    losses = [float(summary["val_loss"]) for summary in counting]
    deviation = None
    if len(losses) > 1:
        deviation = statistics.stdev(losses)
    return {
        "recipe": label,
        "val_loss": _reduced(losses, statistics.fmean),
        "val_loss_std": deviation,
        "tokens_per_second": _over(measured, "tokens_per_second", statistics.median),
        "bytes_per_param": _over(measured, "bytes_per_param", statistics.median),
        # Few steps compile, so they do not move a median.
        "step_seconds": _reduced(durations, statistics.median),
        "step_memory_bytes": _over(measured, "step_memory_bytes", max),
        "edq": _over(counting, "edq", statistics.fmean),
        "noise": _over(counting, "noise", statistics.fmean),
        "lost_fraction": _over(counting, "lost_fraction", statistics.fmean),
        "diverged": any(run.divergence for run in group),
        "num_seeds": len(losses),
    }


def _over(
    summaries: Sequence[Row], key: str, reduce: Callable[[list[float]], float]
) -> float | None:
    values = []
    for summary in summaries:
        value = summary.get(key)
        if value is not None and math.isfinite(value):
            values.append(value)
    return _reduced(values, reduce)


def _reduced(values: list[float], reduce: Callable[[list[float]], float]) -> float | None:
    if not values:
        return None
    return reduce(values)


# ── the verdict ───────────────────────────────────────────────────────────────────────────────────


def sentences_of(comparison: Comparison) -> Iterator[str]:
    """Yield the sentences of a verdict, the most important first."""
    yield from _cheapest(comparison)
    yield from _of_recipes(comparison)
    runs = list[RunStats]()
    for recipe in comparison.classes.values():
        runs += recipe.runs
    yield from _of_runs(runs)


def _cheapest(comparison: Comparison) -> Iterator[str]:
    base = comparison.baseline
    recipes = comparison.classes.values()
    if base is None or not comparison.differences:
        sentence = "No two recipes have finished runs of one seed on the same data, so nothing can be compared."
        if base is not None and len(recipes) == 1:
            loss = shown_loss(comparison.rows[0]["val_loss"])
            sentence = f"{base} alone was run: validation loss {loss}."
        yield sentence
        return
    reference = comparison.classes[base]
    levels = []
    for run in reference.runs:
        level = (run.run.run.get("data") or {}).get("unigram_loss")
        if level is not None:
            levels.append(level)
    if levels and not reference.row["val_loss"] < min(levels):
        yield (
            f"No recipe is named: {base} learned no more than token frequencies, at "
            f"{min(levels):.4f}. Take more steps."
        )
        return
    best = comparison.cheapest
    if best is None:
        reason = "no record holds bytes per parameter"
        if any(recipe.row["bytes_per_param"] is not None for recipe in recipes):
            reason = "none of known bytes per parameter is fit for use"
        yield f"No recipe is named the cheapest: {reason}."
        return
    if not comparison.has_intervals:
        yield "One seed each, so a difference may be chance: take 3."
    smaller = [recipe for recipe in recipes if recipe.cost < best.cost]
    if best is reference:
        claim = f"No recipe takes fewer bytes than {base}"
        if any(recipe.cost[0] < best.cost[0] for recipe in smaller):
            claim = f"No smaller recipe is known to be as good as {base}"
        yield f"{claim}: {_size(best)} bytes per parameter."
        return
    claim = "is the cheapest within the noise"
    if not comparison.has_intervals:
        claim = "costs least"
    elif any(recipe.usable_rank is Rank.INCONCLUSIVE for recipe in smaller):
        claim = "is the cheapest of those that these seeds can rank"
    where = f"where {base} takes {_size(reference)}"
    yield f"{best.label} {claim}: {_size(best)} bytes per parameter, {where}."


def _size(recipe: Classification) -> str:
    size = recipe.row["bytes_per_param"]
    if size is None:
        return "an unknown number"
    return f"{size:.2f}"


def _of_recipes(comparison: Comparison) -> Iterator[str]:
    """Yield what these seeds do not resolve, what is worse, not to be used, and not audited."""
    unsure = []
    seeds = 0
    worse = []
    faulty = []
    unaudited = []
    for recipe in comparison.classes.values():
        difference = recipe.difference
        if recipe.faults:
            faulty.append(f"{recipe.label} {', '.join(recipe.faults)}")
            continue
        if recipe.row["num_seeds"] and recipe.late_edq is None:
            unaudited.append(recipe.label)
        if difference is not None and recipe.rank is Rank.WORSE:
            worse.append(f"{recipe.label} ({difference.text})")
        elif difference is not None and recipe.rank is Rank.INCONCLUSIVE:
            unsure.append(f"{recipe.label} ({difference.text})")
            needed = seeds_needed(difference.spread, comparison.acceptable) or MOST_SEEDS + 1
            seeds = max(seeds, needed, difference.num_pairs + 1)
    if unsure:
        cure = f"{seeds} seeds tell it in four of five such comparisons."
        if seeds > MOST_SEEDS:
            cure = f"More than {MOST_SEEDS} seeds would tell: take longer runs."
        worse_than = f"worse than {comparison.baseline} by more than 1 % of the loss or not"
        yield f"Not resolved, {worse_than}: {listed(unsure)}. {cure}"
    if worse:
        yield f"Worse by less than 1 %, by their 95 % intervals: {listed(worse)}."
    if faulty:
        yield f"Not to be used: {'; '.join(faulty)}."
    if unaudited and len(comparison.classes) > 1:
        yield f"Not audited, so lost updates would not be seen: {listed(unaudited)}."


_FREE = ("recipe", "seed", "warmup_steps")
"""Settings that may differ between compared runs."""
_ALIKE = (("data", "fingerprint"), ("machine", "device"), ("machine", "num_threads"))
"""Entries of other tables of ``run.toml`` that may not."""


def _of_runs(runs: Sequence[RunStats]) -> Iterator[str]:
    """Name the runs left out, and the settings that differ between runs of one seed.

    Skip settings that one run lacks.
    """
    unfinished = []
    logs: dict[str, None] = {}
    for run in runs:
        if run.run.is_foreign:
            logs[run.label] = None
        if not run.counts and not run.divergence:
            done = 0
            if run.run.steps:
                done = int(run.run.steps[-1].get("step", 0))
            planned = run.run.config.get("steps")
            steps = f"{done} of {planned}" if planned else str(done)
            unfinished.append(f"{run.label}, seed {run.seed} ({steps} steps)")
    if unfinished:
        left_out = "Left out of every number, not finished or without a validation loss"
        yield f"{left_out}: {listed(unfinished)}."
    values: dict[str, dict[str, None]] = {}
    for first, second in combinations(runs, 2):
        if first.seed != second.seed:
            continue
        for setting in settings_diff(first.run.run, second.run.run):
            is_config = setting.table == "config" and setting.name not in _FREE
            if is_config or (setting.table, setting.name) in _ALIKE:
                values.setdefault(setting.name, {}).update(dict.fromkeys(setting.values))
    items = []
    if values.pop("fingerprint", None):
        items.append("data, so those losses are not compared")
    for name, texts in values.items():
        items.append(f"{name} {', '.join(texts)}")
    if logs:
        kinds = "logs of other frameworks, without recipe, audit or seed (0 is taken)"
        items.append(f"{kinds}: {listed(logs)}")
    if items:
        yield f"The runs differ in more than recipe and seed ({'; '.join(items)})."
