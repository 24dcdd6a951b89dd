"""Compare recipes: a row of metrics for each, and a verdict in words that a statistician would sign.

Runs of one seed start from the same weights and read the same batches. So their *paired* difference of final validation losses
contains little of the seed's effect. Its mean over the seeds gets an interval (``intervals.py``). Each recipe is compared with
one baseline. The baseline is chosen by its cost, never by its loss. The best of several equal recipes is the luckiest. Relative
to it, the others would look worse than they are.

Diverged and unfinished runs are named and enter no average. ``classification.py`` classifies each recipe. ``verdict.py``
writes the sentences.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from narrowgauge.analysis.columns import column
from narrowgauge.analysis.comparison.classification import ACCEPTABLE, Classification, Rank, classify, run_faults
from narrowgauge.analysis.comparison.intervals import PairedDifference, shown_loss
from narrowgauge.analysis.comparison.labels import run_labels
from narrowgauge.analysis.comparison.run_stats import RunStats
from narrowgauge.analysis.comparison.verdict import sentences
from narrowgauge.analysis.settings import recipe_of
from narrowgauge.errors import RecordError
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

        Columns: ``recipe``, ``val_loss`` (mean over the seeds that count), ``val_loss_std`` (between seeds),
        ``tokens_per_second`` (median), ``bytes_per_param``, ``step_seconds`` (median),
        ``step_memory_bytes``, ``edq``, ``noise``, ``lost_fraction``, ``diverged`` (whether any seed did), ``num_seeds``.
        Unknown values are ``None``.
        """
        return tuple(recipe.row for recipe in self.classes.values())

    @property
    def verdict(self) -> tuple[str, ...]:
        """Return at most six sentences."""
        return tuple(sentences(self))

    @property
    def differences(self) -> tuple[PairedDifference, ...]:
        """Return the differences from the baseline, one per other recipe with a common seed."""
        return tuple(recipe.difference for recipe in self.classes.values() if recipe.difference is not None)

    @property
    def has_intervals(self) -> bool:
        """Return whether any recipe shares two seeds with the baseline."""
        return any(difference.num_pairs > 1 for difference in self.differences)

    @property
    def acceptable(self) -> float:
        """Return the acceptable excess over the baseline's loss, in nats."""
        loss = None if self.baseline is None else self.classes[self.baseline].row["val_loss"]
        return ACCEPTABLE * abs(float(loss or 0.0))

    @property
    def cheapest(self) -> Classification | None:
        """Return the cheapest recipe that is fit for use. With one seed each, all compared ones without faults are."""
        usable = [
            recipe
            for recipe in self.classes.values()
            if recipe.is_fit
            or (not self.has_intervals and recipe.difference and recipe.usable_rank is Rank.NO_INTERVAL)
        ]
        sized = [recipe for recipe in usable if recipe.row["bytes_per_param"] is not None]
        return min(sized, key=lambda recipe: recipe.cost, default=None)

    def table(self) -> Table:
        """Return the rows as the table of the terminal and the page."""
        minus = {difference.recipe: difference.text for difference in self.differences}
        difference = Column(f"minus {self.baseline}", lambda row: minus.get(row["recipe"], "–"), right=True)
        columns = (
            Column("recipe", "recipe", code=True),
            Column("val. loss", lambda row: _shown_loss(row, self.classes[row["recipe"]].runs), right=True),
            *([difference] if minus else []),
            *(Column(SUMMARY[k].label, SUMMARY[k].cell, right=True) for k in ("bytes_per_param", "tokens_per_second")),
            Column("MiB a step", SUMMARY["step_memory_bytes"].cell, right=True),
            Column("late EDQ", lambda row: self._shown_edq(row["recipe"]), right=True),
            Column("seeds", "num_seeds", right=True),
            Column(
                "verdict",
                lambda row: rank.value if (rank := self.classes[row["recipe"]].usable_rank) else "not to be used",
            ),
        )
        return Table(columns, list(self.rows))

    def _shown_edq(self, label: str) -> str:
        edq = self.classes[label].late_edq
        return "–" if edq is None else f"{edq:.3f}"

    def text(self) -> str:
        """Return the verdict, one sentence per line."""
        return "\n".join(self.verdict)

    def json(self) -> bytes:
        """Return ``compare.json``: a list of rows, valid JSON for all values."""
        return json.dumps(json_value(self.rows), indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _shown_loss(row: Row, runs: Sequence[RunStats]) -> str:
    if row["val_loss"] is not None:
        spread = "" if row["val_loss_std"] is None else f" (std {shown_loss(row['val_loss_std'])})"
        return f"{shown_loss(row['val_loss'])}{spread}{', diverged' if row['diverged'] else ''}"
    if row["diverged"]:
        return "diverged"
    return "unfinished" if any(run.run.summary is None for run in runs) else "not recorded"


def compare_runs(runs: Sequence[Run]) -> Comparison:
    """Compare runs by recipe and seed.

    Invariant: torch is not needed, nothing is written, and the same runs give the same sentences.

    The baseline is the most precise recipe with a finished run, no divergence and no lost updates. Recipes without
    low-precision matmuls come first. Then more bytes per parameter, then the wider compute, then the order decide. Losses
    never decide, or the intervals would not hold (see the module). A recipe is as good as the baseline only if its interval
    ends below 1 % of the loss. Otherwise the verdict gives the number of seeds needed.

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
        bfloat16/word is the cheapest within the noise: 8.00 bytes per parameter instead of the 16.00 of bfloat16/master. ...
    """
    if not runs:
        raise RecordError("no run was named.", "Name run folders, or the folder of a comparison.")
    groups: dict[str, list[RunStats]] = {}
    for run, label in zip(runs, run_labels(runs), strict=True):
        groups.setdefault(label, []).append(RunStats.of(run, label))
    rows = {label: _row(label, group) for label, group in groups.items()}
    baseline = _widest(rows, groups)
    return Comparison(classify(groups, rows, baseline), baseline)


def _row(label: str, group: Sequence[RunStats]) -> Row:
    counted = [run.run.summary for run in group if run.counts and run.run.summary is not None]
    # Diverged runs also have a known speed and size.
    ended = counted or [run.run.summary for run in group if run.run.summary is not None]

    def over(summaries: Sequence[Row], key: str, reduce: Callable[[list[float]], float]) -> float | None:
        values = [s[key] for s in summaries if s.get(key) is not None and math.isfinite(s[key])]
        return reduce(values) if values else None

    losses = [float(s["val_loss"]) for s in counted]
    timed = [column(run.run, "steps", "seconds").finite for run in group if run.run.summary is not None]
    durations = [statistics.median(seconds.tolist()) for seconds in timed if len(seconds)]
    return {
        "recipe": label,
        "val_loss": statistics.fmean(losses) if losses else None,
        "val_loss_std": statistics.stdev(losses) if len(losses) > 1 else None,
        "tokens_per_second": over(ended, "tokens_per_second", statistics.median),
        "bytes_per_param": over(ended, "bytes_per_param", statistics.median),
        # Few steps compile, so they do not move a median.
        "step_seconds": statistics.median(durations) if durations else None,
        "step_memory_bytes": over(ended, "step_memory_bytes", max),
        **{key: over(counted, key, statistics.fmean) for key in ("edq", "noise", "lost_fraction")},
        "diverged": any(run.divergence for run in group),
        "num_seeds": len(losses),
    }


_WIDTHS = {"float32": 32, "float16": 16, "bfloat16": 16}


def _widest(rows: Mapping[str, Row], groups: Mapping[str, Sequence[RunStats]]) -> str | None:
    def width(label: str) -> tuple[bool, bool, float, int]:
        recipe = recipe_of(groups[label][0].run)
        bits = _WIDTHS.get(recipe.compute.name, 0) if recipe is not None else 0
        return not run_faults(groups[label]), bits > 0, round(rows[label]["bytes_per_param"] or 0.0, 1), bits

    usable = [label for label in rows if rows[label]["num_seeds"]]
    return max(usable, key=width, default=None)
