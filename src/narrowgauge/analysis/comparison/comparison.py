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
        """Return at most six sentences, the most important first."""
        runs = [run for recipe in self.classes.values() for run in recipe.runs]
        return _cheapest(self), *_of_recipes(self), *_of_runs(runs)

    @property
    def differences(self) -> tuple[PairedDifference, ...]:
        """Return the differences from the baseline, one per other recipe with a common seed."""
        return tuple(
            recipe.difference for recipe in self.classes.values() if recipe.difference is not None
        )

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
        """Return the cheapest recipe that is fit for use.

        With one seed each, all compared ones without faults are.
        """
        sized = [
            recipe for recipe in self.classes.values() if recipe.row["bytes_per_param"] is not None
        ]
        is_single = not self.has_intervals
        usable = [
            r
            for r in sized
            if r.is_fit or (is_single and r.difference and r.usable_rank is Rank.NO_INTERVAL)
        ]
        return min(usable, key=lambda recipe: recipe.cost, default=None)

    def table(self) -> Table:
        """Return the rows as the table of the terminal and the page."""
        minus = {difference.recipe: difference.text for difference in self.differences}
        classes = self.classes
        difference = Column(
            f"minus {self.baseline}", lambda row: minus.get(row["recipe"], "–"), right=True
        )
        columns = (
            Column("recipe", "recipe", code=True),
            Column(
                "val. loss", lambda row: _shown_loss(row, classes[row["recipe"]].runs), right=True
            ),
            *([difference] if minus else []),
            *(
                Column(SUMMARY[k].label, SUMMARY[k].cell, right=True)
                for k in ("bytes_per_param", "tokens_per_second")
            ),
            Column("MiB a step", SUMMARY["step_memory_bytes"].cell, right=True),
            Column(
                "late EDQ",
                lambda r: "–" if (x := classes[r["recipe"]].late_edq) is None else f"{x:.3f}",
                right=True,
            ),
            Column("seeds", "num_seeds", right=True),
            Column("verdict", lambda row: classes[row["recipe"]].verdict),
        )
        return Table(columns, list(self.rows))

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
            ends = [minus.low, minus.high] if minus is not None and minus.num_pairs > 1 else None
            judged = {
                "late_edq": recipe.late_edq,
                "difference": minus and minus.mean,
                "difference_interval": ends,
            }
            rows.append(
                {**recipe.row, **judged, "verdict": recipe.verdict, "faults": recipe.faults}
            )
        return (
            json.dumps(json_value(rows), indent=1, allow_nan=False, ensure_ascii=False).encode()
            + b"\n"
        )


def _shown_loss(row: Row, runs: Sequence[RunStats]) -> str:
    if row["val_loss"] is not None:
        spread = "" if row["val_loss_std"] is None else f" (std {shown_loss(row['val_loss_std'])})"
        return f"{shown_loss(row['val_loss'])}{spread}{', diverged' if row['diverged'] else ''}"
    if row["diverged"]:
        return "diverged"
    return "unfinished" if any(run.run.summary is None for run in runs) else "not recorded"


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
        bfloat16/word is the cheapest within the noise: 8.00 bytes per parameter instead of the 16.00 of bfloat16/master. ...
    """
    if not runs:
        raise RecordError("no run was named.", "Name run folders, or the folder of a comparison.")
    groups: dict[str, list[RunStats]] = {}
    for run, label in zip(runs, run_labels(runs), strict=True):
        groups.setdefault(label, []).append(RunStats.of(run, label))
    rows = {label: _row(label, group) for label, group in groups.items()}
    return Comparison(*classify(groups, rows))


def _row(label: str, group: Sequence[RunStats]) -> Row:
    counted = [run.run.summary for run in group if run.counts and run.run.summary is not None]
    # Diverged runs also have a known speed and size.
    ended = counted or [run.run.summary for run in group if run.run.summary is not None]

    def over(
        summaries: Sequence[Row], key: str, reduce: Callable[[list[float]], float]
    ) -> float | None:
        values = [s[key] for s in summaries if s.get(key) is not None and math.isfinite(s[key])]
        return reduce(values) if values else None

    losses = [float(s["val_loss"]) for s in counted]
    timed = [
        column(run.run, "steps", "seconds").finite for run in group if run.run.summary is not None
    ]
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


# ── the verdict ───────────────────────────────────────────────────────────────────────────────────


def _cheapest(comparison: Comparison) -> str:
    base = comparison.baseline
    if base is None or not comparison.differences:
        if base is not None and len(comparison.classes) == 1:
            return f"{base} alone was run: validation loss {shown_loss(comparison.rows[0]['val_loss'])}."
        return "No two recipes have finished runs of one seed on the same data, so nothing can be compared."
    tables = [run.run.run.get("data") or {} for run in comparison.classes[base].runs]
    levels = [table["unigram_loss"] for table in tables if "unigram_loss" in table]
    if levels and not comparison.classes[base].row["val_loss"] < min(levels):
        level = f"{min(levels):.4f}"
        return f"No recipe is named: {base} learned no more than token frequencies, at {level}. Take more steps."
    best = comparison.cheapest
    if best is None:
        has_bytes = any(
            recipe.row["bytes_per_param"] is not None for recipe in comparison.classes.values()
        )
        reason = "no record holds bytes per parameter"
        if has_bytes:
            reason = "none of known bytes per parameter is fit for use"
        return f"No recipe is named the cheapest: {reason}."
    reference = comparison.classes[base]
    size = f"{best.row['bytes_per_param']:.2f} bytes per parameter"
    hint = (
        "" if comparison.has_intervals else "One seed each, so a difference may be chance: take 3. "
    )
    if best.label == base:
        is_least = all(recipe.cost[0] >= best.cost[0] for recipe in comparison.classes.values())
        words = (
            "No recipe takes fewer bytes than"
            if is_least
            else "No smaller recipe is known to be as good as"
        )
        return f"{hint}{words} {base}: {size}."
    if best.cost[0] == reference.cost[0]:
        size += f", as {base}, and more tokens per second"
    elif reference.row["bytes_per_param"] is not None:
        size += f" instead of the {reference.row['bytes_per_param']:.2f} of {base}"
    loss = ""
    difference = best.difference
    if difference is not None:
        seeds = (
            f" (95 % interval over {difference.num_pairs} seeds)"
            if difference.num_pairs > 1
            else ""
        )
        loss = f" Its loss differs from that of {base} by {difference.text}{seeds}."
    if hint:
        return f"{hint}{best.label} costs least: {size}.{loss}"
    is_cheaper = [
        r.usable_rank is Rank.INCONCLUSIVE and r.cost < best.cost
        for r in comparison.classes.values()
    ]
    place = "of those that these seeds can rank" if any(is_cheaper) else "within the noise"
    return f"{best.label} is the cheapest {place}: {size}.{loss}"


def _of_recipes(comparison: Comparison) -> Iterator[str]:
    """Say what these seeds do not resolve, what is worse, not to be used, and not audited."""
    recipes = comparison.classes.values()
    base = comparison.baseline
    named: dict[Rank | None, list[PairedDifference]] = {}
    for recipe in recipes:
        if recipe.difference is not None:
            named.setdefault(recipe.usable_rank, []).append(recipe.difference)
    texts = {
        rank: listed(f"{d.recipe} ({d.text})" for d in differences)
        for rank, differences in named.items()
    }
    if unsure := named.get(Rank.INCONCLUSIVE):
        needed = [
            seeds_needed(difference.spread, comparison.acceptable) or MOST_SEEDS + 1
            for difference in unsure
        ]
        most = max(*needed, *(difference.num_pairs + 1 for difference in unsure))
        advice = f"{most} seeds tell it in four of five such comparisons."
        if most > MOST_SEEDS:
            advice = f"More than {MOST_SEEDS} seeds would tell: take longer runs."
        question = f"worse than {base} by more than 1 % of the loss or not"
        yield f"Not resolved, {question}: {texts[Rank.INCONCLUSIVE]}. {advice}"
    if Rank.WORSE in texts:
        yield f"Worse by less than 1 %, by their 95 % intervals: {texts[Rank.WORSE]}."
    if faulty := [
        f"{recipe.label} {', '.join(recipe.faults)}" for recipe in recipes if recipe.faults
    ]:
        yield f"Not to be used: {'; '.join(faulty)}."
    unseen = [
        r.label for r in recipes if not r.faults and r.row["num_seeds"] and r.late_edq is None
    ]
    if unseen and len(recipes) > 1:
        yield f"Not audited, so lost updates would not be seen: {listed(unseen)}."


_FREE = ("recipe", "seed", "warmup_steps")
"""Settings that may differ between compared runs."""
_ALIKE = (("data", "fingerprint"), ("machine", "device"), ("machine", "num_threads"))
"""Entries of other tables of ``run.toml`` that may not."""


def _of_runs(runs: Sequence[RunStats]) -> Iterator[str]:
    """Name the runs left out, and the settings that differ between runs of one seed.

    Skip settings that one run lacks.
    """
    unfinished = []
    for run in runs:
        if not run.counts and not run.divergence:
            steps = int(run.run.steps[-1].get("step", 0)) if run.run.steps else 0
            planned = run.run.config.get("steps")
            unfinished.append(
                f"{run.label}, seed {run.seed} ({steps}{f' of {planned}' if planned else ''} steps)"
            )
    if unfinished:
        yield f"Left out of every number, not finished or without a validation loss: {listed(unfinished)}."
    values: dict[str, dict[str, None]] = {}
    for first, second in combinations(runs, 2):
        for setting in (
            settings_diff(first.run.run, second.run.run) if first.seed == second.seed else ()
        ):
            is_config = setting.table == "config" and setting.name not in _FREE
            if is_config or (setting.table, setting.name) in _ALIKE:
                values.setdefault(setting.name, {}).update(dict.fromkeys(setting.values))
    items = ["data, so those losses are not compared"] if values.pop("fingerprint", None) else []
    items += [f"{name} {', '.join(texts)}" for name, texts in values.items()]
    if logs := dict.fromkeys(run.label for run in runs if run.run.is_foreign):
        items.append(
            f"logs of other frameworks, without recipe, audit or seed (0 is taken): {listed(logs)}"
        )
    if items:
        yield f"The runs differ in more than recipe and seed ({'; '.join(items)})."
