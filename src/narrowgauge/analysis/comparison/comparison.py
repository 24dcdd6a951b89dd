"""Comparison of recipes: a row of metrics for each, and a verdict in words that a statistician would sign.

Runs of one seed start from the same weights and read the same batches, so their *paired* difference of final validation losses
contains little of the seed's effect. Its mean over the seeds gets an interval (``intervals.py``). Each recipe is compared with
one baseline, chosen by what it costs and never by how it ended: the best of several equal recipes is the luckiest, and
relative to it the others look worse than they are.

Runs that diverged or did not finish are named and enter no average. ``classification.py`` classifies each recipe, and
``verdict.py`` puts the classifications into sentences.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge.analysis.comparison.classification import Classes, classify, run_faults
from narrowgauge.analysis.comparison.intervals import PairedDifference, shown_loss
from narrowgauge.analysis.comparison.labels import recipe_name, run_labels
from narrowgauge.analysis.comparison.run_stats import RunStats, losses_at_equal_time
from narrowgauge.analysis.comparison.verdict import sentences
from narrowgauge.errors import RecipeError, RecordError, suggestion
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import SUMMARY, Row
from narrowgauge.spec.tables import Column, Table


@dataclass(frozen=True)
class Comparison:
    """Recipes compared with a baseline.

    Attributes:
        rows: a row per recipe: ``recipe``, ``val_loss`` (mean over the seeds that count), ``val_loss_std`` (between
            seeds), ``tokens_per_second`` (median), ``bytes_per_param``, ``step_seconds`` (median), the counted memory
            ``state_bytes``, ``activation_bytes`` and ``peak_tensor_bytes``, ``peak_memory_bytes``, ``edq``, ``noise``,
            ``lost_fraction``, ``diverged`` (whether any seed did), ``num_seeds``. Unknown values are ``None``.
        verdict: at most eight sentences.
        baseline: the recipe that the others are compared with; ``None`` where no run counts.
        folders: of the runs.
        equal_time: ``recipe``, ``seconds``, ``val_loss``, ``difference``, ``half``, ``num_seeds``: losses at the moment
            the fastest recipe finished, each the baseline's plus the paired difference.
        classes: the classification of each recipe, by its label in ``rows``.

    Example:
        >>> from narrowgauge.runs.record import Run
        >>> run = Run(Path("a"), {"config": {"recipe": "float32", "seed": 0}}, summary={"val_loss": 2.0})
        >>> compare_runs([run]).rows[0]["recipe"]
        'float32/float32'
    """

    rows: tuple[Row, ...]
    verdict: tuple[str, ...]
    baseline: str | None
    folders: tuple[Path, ...]
    equal_time: tuple[Row, ...]
    classes: Classes

    @property
    def differences(self) -> tuple[PairedDifference, ...]:
        """Return those from the baseline, one per other recipe that has a seed in common with it."""
        return tuple(one.difference for one in self.classes.values() if one.difference is not None)

    @property
    def late(self) -> dict[str, Row]:
        """The audit's last ``edq``, ``noise`` and ``lost_fraction`` of each recipe, for the verdict; rows cover whole runs."""
        return {label: dict(one.late) for label, one in self.classes.items()}

    @property
    def not_to_be_used(self) -> dict[str, tuple[str, ...]]:
        """Return the faults of each recipe that has any."""
        return {label: tuple(fault.text for fault in one.faults) for label, one in self.classes.items() if one.faults}

    def table(self) -> Table:
        """Return the rows as a table."""
        minus = {d.recipe: d.text for d in self.differences}
        columns = (
            Column("recipe", "recipe", code=True),
            Column("val. loss", lambda row: _shown_loss(row, self.classes[row["recipe"]].runs), right=True),
            Column(f"minus {self.baseline}", lambda row: minus.get(row["recipe"], "–"), right=True),
            *(Column(SUMMARY[k].label, SUMMARY[k].cell, right=True) for k in ("bytes_per_param", "tokens_per_second")),
            *self._memory_columns(),
            Column("mean EDQ", _shown("edq", "{:.3f}"), right=True),
            Column("noise", SUMMARY["noise"].cell, right=True),
            Column("mean lost", SUMMARY["lost_fraction"].cell, right=True),
            Column("seeds", "num_seeds", right=True),
            Column("verdict", lambda row: self._word(row["recipe"])),
        )
        return Table(tuple(c for c in columns if self.differences or not c.title.startswith("minus")), list(self.rows))

    def _word(self, label: str) -> str:
        one = self.classes[label]
        return "not to be used" if one.faults else one.rank.value

    def _memory_columns(self) -> list[Column]:
        """Counted memory where it is known; else the peak of the process, which hardly depends on a format."""
        counted = {"activ. MiB": "activation_bytes", "peak MiB": "peak_tensor_bytes"}
        if not any(row.get(name) is not None for row in self.rows for name in counted.values()):
            counted = {"peak MiB": "peak_memory_bytes"}
        return [Column(title, _shown(name, "{:,.1f}", 2.0**-20), right=True) for title, name in counted.items()]

    def text(self) -> str:
        """Return the verdict, one sentence per line."""
        return "\n".join(self.verdict)

    def json(self) -> bytes:
        """Return the rows as ``compare.json`` holds them: a list of objects, valid JSON with any values."""
        plain = [{key: _finite(value) for key, value in row.items()} for row in self.rows]
        return json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shown(key: str, form: str, factor: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "–" if row.get(key) is None else form.format(row[key] * factor)


def _shown_loss(row: Row, runs: Sequence[RunStats]) -> str:
    if row["val_loss"] is None:
        if row["diverged"]:
            return "diverged"
        return "unfinished" if any(run.run.summary is None for run in runs) else "not recorded"
    spread = "" if row["val_loss_std"] is None else f" (std {shown_loss(row['val_loss_std'])})"
    return f"{shown_loss(row['val_loss'])}{spread}{', diverged' if row['diverged'] else ''}"


def compare_runs(
    runs: Sequence[Run],
    baseline: str | None = None,
    *,
    resolve: float | None = None,
) -> Comparison:
    """Compare runs by recipe and seed.

    Invariant: torch is not needed, nothing is written, and the same runs give the same sentences.

    The default baseline is the widest recipe that has a finished run, did not diverge and does not lose its updates: first
    one without narrow matmuls, then the most bytes per parameter, then the wider compute, then the first in order. It never
    depends on the losses, or the intervals would not hold (see the module).

    Args:
        runs: finished or not, in any order.
        baseline: a recipe among them.
        resolve: the difference of losses, in nats, that is to be resolved: a recipe is as good as the baseline only if it is
            certainly no worse than by this; otherwise the verdict says how many seeds would tell. ``None`` for 1 % of the loss.
    Returns:
        The comparison.
    Raises:
        RecordError: there is no run, or a run's record is damaged.
        RecipeError: no run has the baseline's recipe, or ``resolve`` is not above 0 and finite.
    Example:
        >>> def run(recipe, seed, loss, size):
        ...     config = {"recipe": recipe, "seed": seed}
        ...     return Run(Path("a"), {"config": config}, summary={"val_loss": loss, "bytes_per_param": size})
        >>> losses = {("bfloat16/master", 0): 2.0, ("bfloat16/master", 1): 2.1}
        >>> losses |= {("bfloat16/word", 0): 2.001, ("bfloat16/word", 1): 2.0995}
        >>> sizes = {"bfloat16/master": 16.0, "bfloat16/word": 8.0}
        >>> found = compare_runs([run(name, seed, loss, sizes[name]) for (name, seed), loss in losses.items()])
        >>> print(found.verdict[0])
        bfloat16/word is the cheapest within the noise: 8.00 bytes per parameter instead of the 16.00 of bfloat16/master. ...
    """
    if not runs:
        raise RecordError("no run was named.", "Name run folders, or the folder of a comparison.")
    require_resolvable(resolve)
    groups: dict[str, list[RunStats]] = {}
    for run, label in zip(runs, run_labels(runs), strict=True):
        groups.setdefault(label, []).append(RunStats.of(run, label))
    rows = {label: _row(label, group) for label, group in groups.items()}
    chosen = _requested_baseline(baseline, groups) if baseline is not None else _widest(rows, groups)
    equal_time = losses_at_equal_time(groups, chosen)
    classes = classify(groups, rows, chosen, equal_time, resolve)
    folders = tuple(run.path for run in runs)
    return Comparison(tuple(rows.values()), tuple(sentences(classes)), chosen, folders, equal_time, classes)


def require_resolvable(resolve: float | None) -> None:
    """Refuse a difference to be resolved that is not above 0 and finite."""
    if resolve is not None and not 0 < resolve < math.inf:
        raise RecipeError(f"resolve = {resolve} was requested.", "Give a difference of losses above 0, such as 0.005.")


def _row(label: str, group: Sequence[RunStats]) -> Row:
    counted = [run.run.summary for run in group if run.counts and run.run.summary is not None]
    # The speed and size of a run that diverged are known, too.
    ended = counted or [run.run.summary for run in group if run.run.summary is not None]

    def over(summaries: Sequence[Row], key: str, reduce: Callable[[list[float]], float]) -> float | None:
        known = [s[key] for s in summaries if s.get(key) is not None and math.isfinite(s[key])]
        return reduce(known) if known else None

    losses = [float(s["val_loss"]) for s in counted]
    return {
        "recipe": label,
        "val_loss": statistics.fmean(losses) if losses else None,
        "val_loss_std": statistics.stdev(losses) if len(losses) > 1 else None,
        "tokens_per_second": over(ended, "tokens_per_second", statistics.median),
        "bytes_per_param": over(ended, "bytes_per_param", statistics.median),
        "step_seconds": statistics.median(steps) if (steps := _step_seconds(group)) else None,
        "state_bytes": over(ended, "state_bytes", max),
        "activation_bytes": over(ended, "activation_bytes", max),
        "peak_tensor_bytes": over(ended, "peak_tensor_bytes", max),
        "peak_memory_bytes": over(ended, "peak_memory_bytes", max),
        "edq": over(counted, "edq", statistics.fmean),
        "noise": over(counted, "noise", statistics.fmean),
        "lost_fraction": over(counted, "lost_fraction", statistics.fmean),
        "diverged": any(run.divergence for run in group),
        "num_seeds": len(losses),
    }


def _step_seconds(group: Sequence[RunStats]) -> list[float]:
    """Return the median step of each run that ended: few steps compile, and do not move a median."""
    return [
        run.curve.step_seconds for run in group if run.run.summary is not None and run.curve.step_seconds is not None
    ]


def _requested_baseline(name: str, groups: Mapping[str, Sequence[RunStats]]) -> str:
    for known in (name, recipe_name(name)):
        if known in groups:
            return known
    raise RecipeError(
        f"the baseline {name} was requested, and the runs are of {', '.join(groups)}.",
        suggestion(name, groups) or "Name one of them.",
    )


_WIDTHS = {"float64": 64, "float32": 32, "float16": 16, "bfloat16": 16}


def _widest(rows: Mapping[str, Row], groups: Mapping[str, Sequence[RunStats]]) -> str | None:
    def width(label: str) -> tuple[bool, bool, float, int]:
        recipe = groups[label][0].recipe
        bits = _WIDTHS.get(recipe.compute.name, 0) if recipe is not None else 0
        return not run_faults(groups[label]), bits > 0, round(rows[label]["bytes_per_param"] or 0.0, 1), bits

    usable = [label for label in rows if rows[label]["num_seeds"]]
    return max(usable, key=width, default=None)
