"""Classify each recipe of a comparison. The verdict, the tables and the page read the result.

A *rank* compares a recipe's final losses with the baseline's. A *fault* is a reason not to use a
recipe, at any rank: it diverged, loses its updates, skipped steps, or ends worse by more than 1 %. The thresholds stand here,
except the audit's threshold of lost updates (:data:`~narrowgauge.spec.significance.MIN_EDQ`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum

from narrowgauge.analysis.comparison.intervals import PairedDifference, interval
from narrowgauge.analysis.comparison.run_stats import TIMING_NOISE, RunStats, late_median, requested_steps
from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import Row
from narrowgauge.spec.significance import MIN_EDQ

NEGLIGIBLE = 1e-3
"""A difference does not matter if its whole interval lies within this fraction of the baseline's loss."""
ACCEPTABLE = 0.01
"""A certain increase up to this fraction of the baseline's loss is a price. A larger one is a fault."""
MAX_SKIPPED = 0.05
"""Fraction of skipped steps that makes a fault. A loss scale settles within fewer."""
CLEAR_RATIO = 1.005
"""Minimum speed ratio, in every seed, of a faster recipe."""

LATE = ("edq", "noise", "lost_fraction")


class Rank(Enum):
    """Compare a recipe's loss with the baseline's. ``BETTER`` and ``WORSE`` are statistically significant."""

    BASELINE = "the baseline"
    BETTER = "better"
    WITHIN_NOISE = "within the noise"
    NEGLIGIBLE = "within a thousandth"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    NO_INTERVAL = "no interval"
    NO_LOSS = "no loss"


def rank(difference: PairedDifference | None, negligible: float, acceptable: float = math.inf) -> Rank:
    """Return the rank of a recipe, from its difference to the baseline's loss.

    Args:
        difference: ``None`` without a common seed.
        negligible: an interval within ± this does not matter, however certain.
        acceptable: inconclusive if the interval reaches higher and is not clearly better or worse.

    Example:
        >>> rank(PairedDifference("a", 0.1, 0.02, 3), 0.004), rank(PairedDifference("a", 0.01, 0.02, 3), 0.004)
        (<Rank.WORSE: 'worse'>, <Rank.WITHIN_NOISE: 'within the noise'>)
    """
    if difference is None or not math.isfinite(difference.half):
        return Rank.NO_INTERVAL
    if difference.low > 0 and difference.high > negligible:
        return Rank.WORSE
    if difference.high < 0 and -difference.low > negligible:
        return Rank.BETTER
    if difference.high > acceptable:
        return Rank.INCONCLUSIVE
    return Rank.WITHIN_NOISE if difference.low <= 0 <= difference.high else Rank.NEGLIGIBLE


@dataclass(frozen=True)
class Classification:
    """Hold the results of a comparison for one recipe.

    Args:
        row: the recipe's row of ``compare.json``.
        rank: rank of its final loss.
        difference: its final loss minus the baseline's; ``None`` without a common seed.
        late: the audit's last values of ``edq``, ``noise`` and ``lost_fraction``.
    """

    label: str
    runs: tuple[RunStats, ...]
    row: Row
    rank: Rank
    difference: PairedDifference | None = None
    faults: tuple[str, ...] = ()
    late: Mapping[str, float | None] = field(default_factory=dict)

    @property
    def usable_rank(self) -> Rank | None:
        """Return the rank of a recipe without faults, else ``None``."""
        return None if self.faults else self.rank

    @property
    def is_fit(self) -> bool:
        """Return whether it is known to be usable and acceptably good. A baseline without faults is."""
        return self.usable_rank in (Rank.BASELINE, Rank.BETTER, Rank.WITHIN_NOISE, Rank.NEGLIGIBLE)

    @property
    def cost(self) -> tuple[float, float]:
        """Return the sort key of recipes: bytes per parameter, then time."""
        return _rounded_size(self.row), -(self.row["tokens_per_second"] or 0.0)


def classify(
    groups: Mapping[str, Sequence[RunStats]],
    rows: Mapping[str, Row],
    baseline: str | None,
    resolve: float | None = None,
) -> dict[str, Classification]:
    """Classify every recipe of a comparison, by its label.

    Args:
        rows: rows of ``compare.json``, by recipe.
        baseline: ``None`` if no run counts.
        resolve: a difference of losses. If set, a recipe is as good as the baseline only if it is certainly no worse than by
            this. It is equal if it is certainly closer.
    """
    loss = 0.0 if baseline is None else float(rows[baseline]["val_loss"] or 0.0)
    other_steps = "" if len(set(requested_steps(groups).values())) == 1 else "after another number of steps"
    classes = {}
    for label, group in groups.items():
        difference, faults = paired_difference(label, groups, baseline), run_faults(group)
        ranked = _rank_of(label, baseline, difference, loss, resolve) if rows[label]["num_seeds"] else Rank.NO_LOSS
        if difference is not None and ranked is Rank.WORSE and difference.mean > ACCEPTABLE * abs(loss):
            share = f"{difference.mean / abs(loss):+.1%}" if loss else ""
            more = ", ".join(filter(None, (share, other_steps)))
            faults.append(f"ends worse than {baseline} by {difference.text}{f' ({more})' if more else ''}")
        late = {metric: late_median(group, metric) for metric in LATE}
        classes[label] = Classification(label, tuple(group), rows[label], ranked, difference, tuple(faults), late)
    return classes


def _rank_of(
    label: str, baseline: str | None, difference: PairedDifference | None, loss: float, resolve: float | None
) -> Rank:
    if label == baseline:
        return Rank.BASELINE
    limit = acceptable(loss, resolve)
    return rank(difference, min(NEGLIGIBLE * abs(loss), limit), limit)


def acceptable(loss: float, resolve: float | None) -> float:
    """Return the acceptable excess over a baseline's loss."""
    return ACCEPTABLE * abs(loss) if resolve is None else resolve


def paired_difference(
    label: str, groups: Mapping[str, Sequence[RunStats]], baseline: str | None
) -> PairedDifference | None:
    """Return a recipe's loss minus the baseline's over common seeds; ``None`` without any, or for the baseline itself."""
    if baseline is None or label == baseline:
        return None
    base = {run.seed: run.loss for run in groups[baseline] if run.counts}
    pairs = [run.loss - base[run.seed] for run in groups[label] if run.counts and run.seed in base]
    return PairedDifference(label, *interval(pairs), len(pairs)) if pairs else None


# ── faults ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def run_faults(group: Sequence[RunStats]) -> list[str]:
    """Return the reasons not to use a recipe, from its own runs alone. Each continues a sentence after the recipe's label."""
    faults = []
    if diverged := [run for run in group if run.divergence]:
        words = diverged[0].divergence.strip().rstrip(".")
        of_runs = f"{len(diverged)} of {counted(len(group), 'run')}"
        faults.append(f"diverged in {of_runs} (seed {diverged[0].seed}, {words})")
    edq, lost = late_median(group, "edq"), late_median(group, "lost_fraction")
    if edq is not None and edq < MIN_EDQ:
        more = "" if lost is None else f"; {lost:.0%} of the changes were lost"
        faults.append(f"loses its updates (a late EDQ of {edq:.2f}, where 1 loses nothing{more})")
    ended = [(run.run.summary, len(run.run.steps)) for run in group if run.counts and run.run.summary is not None]
    taken = sum(int(summary.get("steps") or length) for summary, length in ended)
    skipped = sum(int(summary.get("num_skipped") or 0) for summary, _ in ended)
    if taken and skipped > MAX_SKIPPED * taken:
        faults.append(f"skipped {skipped:,} of its {taken:,} steps")
    return faults


# ── time ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def is_faster(recipe: Classification, slower: Classification) -> bool:
    """Return whether a recipe is faster beyond chance: in every common seed, or by much in a single pair."""
    speeds = [
        {run.seed: float((run.run.summary or {}).get("tokens_per_second") or 0.0) for run in recipe.runs}
        for recipe in (recipe, slower)
    ]
    pairs = [(speeds[0][seed], speeds[1][seed]) for seed in speeds[0] if seed in speeds[1]]
    ratios = [mine / theirs for mine, theirs in pairs if min(mine, theirs) > 0 and math.isfinite(mine + theirs)]
    ratios = ratios or [recipe.row["tokens_per_second"] / slower.row["tokens_per_second"]]
    return min(ratios) > (CLEAR_RATIO if len(ratios) > 1 else TIMING_NOISE)


def _rounded_size(row: Row) -> float:
    # Less than a tenth of a byte is a few norm weights, not a saving.
    return math.inf if row["bytes_per_param"] is None else round(row["bytes_per_param"], 1)
