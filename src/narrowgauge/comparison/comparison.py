"""What recipes cost beside each other: rows of figures, and a verdict in words that a statistician would sign.

Runs of one seed start from the same weights and see the same batches, so their *paired* difference of final validation
losses hides little behind the luck of a seed. Its mean over the seeds gets an interval (``intervals.py``). Each recipe is
held against one yardstick, and the yardstick is chosen by what it spends, never by how it ended: the best of several
equal recipes is the luckiest, and beside the luckiest the others look worse than they are.

What diverged or never ended is said and averaged into nothing. What the figures mean is said in ``verdict.py``.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from narrowgauge.comparison.classification import Evidence, faults
from narrowgauge.comparison.equal_time import losses_at_equal_time
from narrowgauge.comparison.intervals import Difference, interval, shown_loss
from narrowgauge.comparison.labels import recipe_name, run_labels, seed_of
from narrowgauge.comparison.run_stats import Trial, divergence, late_reading
from narrowgauge.comparison.verdict import sentences
from narrowgauge.errors import RecipeError, RecordError, suggestion
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Column, Table


@dataclass(frozen=True)
class Comparison:
    """Recipes beside each other.

    Attributes:
        rows: a row per recipe: ``recipe``, ``val_loss`` (mean over the seeds that count), ``val_loss_std`` (between
            seeds), ``tokens_per_second`` (median), ``bytes_per_param``, ``peak_memory_bytes``, ``edq``, ``noise``,
            ``lost_fraction``, ``diverged`` (whether any seed did), ``num_seeds``. What is not known is ``None``.
        verdict: sentences.
        yardstick: the recipe that the others are held against; ``None`` where no run counts.
        folders: of the runs.
        differences: from the yardstick, a row per other recipe that has a seed in common with it.
        equal_time: ``recipe``, ``seconds``, ``val_loss``, ``difference``, ``half``, ``num_seeds``: losses at the moment
            the fastest was done, each the yardstick's plus the paired difference.
        late: ``edq``, ``noise`` and ``lost_fraction`` of each recipe as the audit read them last, which the verdict
            judges by; the rows' are those of whole runs.
        not_to_be_used: why, by recipe; recipes without a fault are not in it.

    Example:
        >>> from narrowgauge.runs.record import Run
        >>> run = Run(Path("a"), {"config": {"recipe": "float32", "seed": 0}}, summary={"val_loss": 2.0})
        >>> compare_runs([run]).rows[0]["recipe"]
        'float32/float32'
    """

    rows: tuple[Row, ...]
    verdict: tuple[str, ...]
    yardstick: str | None
    folders: tuple[Path, ...]
    differences: tuple[Difference, ...] = ()
    equal_time: tuple[Row, ...] = ()
    late: Mapping[str, Row] = field(default_factory=dict)
    not_to_be_used: Mapping[str, tuple[str, ...]] = field(default_factory=dict)

    def table(self) -> Table:
        """The rows as a table to print."""
        minus = {d.recipe: d.text for d in self.differences}
        columns = (
            Column("recipe", "recipe", code=True),
            Column("val. loss", _shown_loss, right=True),
            Column(f"minus {self.yardstick}", lambda row: minus.get(row["recipe"], "–"), right=True),
            Column("bytes/param", _shown("bytes_per_param", "{:.2f}"), right=True),
            Column("tokens/s", _shown("tokens_per_second", "{:,.0f}"), right=True),
            Column("peak MiB", _shown("peak_memory_bytes", "{:,.0f}", 2.0**-20), right=True),
            Column("EDQ", _shown("edq", "{:.3f}"), right=True),
            Column("noise", _shown("noise", "{:.3f}"), right=True),
            Column("lost", _shown("lost_fraction", "{:.1%}"), right=True),
            Column("seeds", "num_seeds", right=True),
        )
        return Table(tuple(c for c in columns if self.differences or not c.title.startswith("minus")), list(self.rows))

    def text(self) -> str:
        """The verdict, a sentence a line."""
        return "\n".join(self.verdict)

    def json(self) -> bytes:
        """The rows as ``compare.json`` holds them: a list of objects, valid JSON whatever the figures."""
        plain = [{key: _finite(value) for key, value in row.items()} for row in self.rows]
        return json.dumps(plain, indent=1, allow_nan=False, ensure_ascii=False).encode() + b"\n"


def _finite(value: Any) -> Any:
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _shown(key: str, form: str, factor: float = 1.0) -> Callable[[Row], str]:
    return lambda row: "–" if row.get(key) is None else form.format(row[key] * factor)


def _shown_loss(row: Row) -> str:
    if row["val_loss"] is None:
        return "diverged" if row["diverged"] else "unfinished"
    spread = "" if row["val_loss_std"] is None else f" (std {shown_loss(row['val_loss_std'])})"
    return f"{shown_loss(row['val_loss'])}{spread}{', diverged' if row['diverged'] else ''}"


def compare_runs(runs: Sequence[Run], yardstick: str | None = None) -> Comparison:
    """Hold runs beside each other, by recipe and seed.

    Law: torch is not needed, nothing is written, and the same runs give the same sentences.

    The default yardstick is the widest recipe that has a finished run, did not diverge and does not lose its updates: first
    one without narrow matmuls, then the most bytes per parameter, then the wider compute, then the first in order. It
    never depends on the losses, so that an interval holds what it promises (see the module).

    Args:
        runs: finished or not, in any order.
        yardstick: a recipe among them.
    Returns:
        The comparison.
    Raises:
        RecordError: there is no run, or a run's record is damaged.
        RecipeError: no run is of the yardstick.
    Example:
        >>> def run(recipe, seed, loss, size):
        ...     config = {"recipe": recipe, "seed": seed}
        ...     return Run(Path("a"), {"config": config}, summary={"val_loss": loss, "bytes_per_param": size})
        >>> losses = {("bfloat16/master", 0): 2.0, ("bfloat16/master", 1): 2.1}
        >>> losses |= {("bfloat16/word", 0): 2.001, ("bfloat16/word", 1): 2.0995}
        >>> sizes = {"bfloat16/master": 16.0, "bfloat16/word": 8.0}
        >>> found = compare_runs([run(name, seed, loss, sizes[name]) for (name, seed), loss in losses.items()])
        >>> print(found.verdict[0])
        bfloat16/word is the cheapest within the noise: 8.00 bytes per parameter where bfloat16/master takes 16.00, and ...
    """
    if not runs:
        raise RecordError("no run was named.", "Name run folders, or the folder of a comparison.")
    trials = [
        Trial(label, seed_of(run), run, divergence(run)) for label, run in zip(run_labels(runs), runs, strict=True)
    ]
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        groups.setdefault(trial.recipe, []).append(trial)
    rows = {recipe: _row(recipe, group) for recipe, group in groups.items()}
    chosen = _asked_yardstick(yardstick, groups) if yardstick is not None else _widest(rows, groups)
    differences = _differences(groups, chosen)
    at_time = losses_at_equal_time(groups, chosen)
    evidence = Evidence(groups, rows, chosen, differences, at_time)
    return Comparison(
        tuple(rows.values()),
        tuple(sentences(evidence)),
        chosen,
        tuple(run.path for run in runs),
        tuple(differences.values()),
        at_time,
        {recipe: {key: late_reading(group, key) for key in _AUDITED} for recipe, group in groups.items()},
        {recipe: tuple(why) for recipe, why in evidence.faults.items() if why},
    )


_AUDITED = ("edq", "noise", "lost_fraction")


def _row(recipe: str, group: Sequence[Trial]) -> Row:
    counted = [t.run.summary for t in group if t.counts and t.run.summary is not None]
    # What a recipe takes is known of a run that diverged, too.
    ended = counted or [t.run.summary for t in group if t.run.summary is not None]

    def over(summaries: Sequence[Row], key: str, reduce: Callable[[list[float]], float]) -> float | None:
        known = [s[key] for s in summaries if s.get(key) is not None and math.isfinite(s[key])]
        return reduce(known) if known else None

    losses = [float(s["val_loss"]) for s in counted]
    return {
        "recipe": recipe,
        "val_loss": statistics.fmean(losses) if losses else None,
        "val_loss_std": statistics.stdev(losses) if len(losses) > 1 else None,
        "tokens_per_second": over(ended, "tokens_per_second", statistics.median),
        "bytes_per_param": over(ended, "bytes_per_param", statistics.median),
        "peak_memory_bytes": over(ended, "peak_memory_bytes", max),
        "edq": over(counted, "edq", statistics.fmean),
        "noise": over(counted, "noise", statistics.fmean),
        "lost_fraction": over(counted, "lost_fraction", statistics.fmean),
        "diverged": any(trial.diverged for trial in group),
        "num_seeds": len(losses),
    }


def _asked_yardstick(name: str, groups: Mapping[str, Sequence[Trial]]) -> str:
    for known in (name, recipe_name(name)):
        if known in groups:
            return known
    raise RecipeError(
        f"the yardstick {name} was asked for, and the runs are of {', '.join(groups)}.",
        suggestion(name, groups) or "Name one of them.",
    )


_WIDTHS = {"float32": 32, "float16": 16, "bfloat16": 16}


def _widest(rows: Mapping[str, Row], groups: Mapping[str, Sequence[Trial]]) -> str | None:
    def width(recipe: str) -> tuple[bool, bool, float, int]:
        compute = recipe.split("/")[0]
        sound = not faults(groups[recipe])
        return sound, compute in _WIDTHS, round(rows[recipe]["bytes_per_param"] or 0.0, 1), _WIDTHS.get(compute, 0)

    usable = [recipe for recipe in rows if rows[recipe]["num_seeds"]]
    return max(usable, key=width, default=None)


def _differences(groups: Mapping[str, Sequence[Trial]], yardstick: str | None) -> dict[str, Difference]:
    """Of each recipe that has a seed in common with the yardstick."""
    if yardstick is None:
        return {}
    base = {t.seed: t.loss for t in groups[yardstick] if t.counts}
    found = {}
    for recipe, group in groups.items():
        pairs = [t.loss - base[t.seed] for t in group if t.counts and t.seed in base]
        if pairs and recipe != yardstick:
            found[recipe] = Difference(recipe, *interval([pairs]), len(pairs))
    return found
