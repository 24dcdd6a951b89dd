"""Classify each recipe of a comparison. The verdict, the tables and the page read the result.

A *rank* compares a recipe's final losses with the baseline's. A *fault* is a reason not to use a
recipe, at any rank: it diverged, loses its updates, skipped steps, or ends worse by more than 1 %. The thresholds stand here,
except the audit's threshold of lost updates (:data:`~narrowgauge.spec.significance.MIN_EDQ`).
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from narrowgauge.analysis.comparison.intervals import PairedDifference, interval
from narrowgauge.analysis.comparison.run_stats import RunStats
from narrowgauge.runs.finding import counted
from narrowgauge.runs.schema import Row
from narrowgauge.spec.significance import MIN_EDQ

NEGLIGIBLE = 1e-3
"""A difference does not matter if its whole interval lies within this fraction of the baseline's loss."""
ACCEPTABLE = 0.01
"""A certain increase up to this fraction of the baseline's loss is a price. A larger one is a fault."""
MAX_SKIPPED = 0.05
"""Fraction of skipped steps that makes a fault. A loss scale settles within fewer."""


class Rank(Enum):
    """Compare a recipe's loss with the baseline's. ``BETTER`` and ``WORSE`` are statistically significant."""

    BASELINE = "the baseline"
    BETTER = "better"
    WITHIN_NOISE = "within the noise"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    NO_INTERVAL = "no interval"
    NO_LOSS = "no loss"


def rank(difference: PairedDifference | None, loss: float) -> Rank:
    """Return the rank of a recipe, from its difference to the baseline's loss; ``None`` without a common seed.

    Example:
        >>> rank(PairedDifference("a", 0.1, 0.02, 3), 4.0), rank(PairedDifference("a", 0.01, 0.02, 3), 4.0)
        (<Rank.WORSE: 'worse'>, <Rank.WITHIN_NOISE: 'within the noise'>)
    """
    negligible = NEGLIGIBLE * abs(loss)
    if difference is None or not math.isfinite(difference.half):
        return Rank.NO_INTERVAL
    if difference.low > 0 and difference.high > negligible:
        return Rank.WORSE
    if difference.high < 0 and -difference.low > negligible:
        return Rank.BETTER
    return Rank.INCONCLUSIVE if difference.high > ACCEPTABLE * abs(loss) else Rank.WITHIN_NOISE


@dataclass(frozen=True)
class Classification:
    """Hold the results of a comparison for one recipe.

    Args:
        row: the recipe's row of ``compare.json``.
        rank: rank of its final loss.
        difference: its final loss minus the baseline's; ``None`` without a common seed and data.
        late_edq: the audit's last values; ``None`` without an audit.
    """

    label: str
    runs: tuple[RunStats, ...]
    row: Row
    rank: Rank
    difference: PairedDifference | None = None
    faults: tuple[str, ...] = ()
    late_edq: float | None = None

    @property
    def usable_rank(self) -> Rank | None:
        """Return the rank of a recipe without faults, else ``None``."""
        return None if self.faults else self.rank

    @property
    def is_fit(self) -> bool:
        """Return whether it is known to be usable and acceptably good. A baseline without faults is."""
        return self.usable_rank in (Rank.BASELINE, Rank.BETTER, Rank.WITHIN_NOISE)

    @property
    def cost(self) -> tuple[float, float]:
        """Return the sort key of recipes: bytes per parameter, then time."""
        size = self.row["bytes_per_param"]
        # Less than a tenth of a byte is a few norm weights, not a saving.
        return math.inf if size is None else round(size, 1), -(self.row["tokens_per_second"] or 0.0)


def classify(
    groups: Mapping[str, Sequence[RunStats]], rows: Mapping[str, Row], baseline: str | None
) -> dict[str, Classification]:
    """Classify every recipe of a comparison, by its label. ``rows`` are the rows of ``compare.json``."""
    loss = 0.0 if baseline is None else float(rows[baseline]["val_loss"] or 0.0)
    classes = {}
    for label, group in groups.items():
        difference, faults = paired_difference(label, groups, baseline), run_faults(group)
        ranked = Rank.BASELINE if label == baseline else rank(difference, loss)
        if not rows[label]["num_seeds"]:
            ranked = Rank.NO_LOSS
        if difference is not None and ranked is Rank.WORSE and difference.mean > ACCEPTABLE * abs(loss):
            share = f" ({difference.mean / abs(loss):+.1%})" if loss else ""
            faults.append(f"ends worse than {baseline} by {difference.text}{share}")
        classes[label] = Classification(
            label, tuple(group), rows[label], ranked, difference, tuple(faults), late_edq(group)
        )
    return classes


def paired_difference(
    label: str, groups: Mapping[str, Sequence[RunStats]], baseline: str | None
) -> PairedDifference | None:
    """Return a recipe's loss minus the baseline's over common seeds; ``None`` without any, or for the baseline itself.

    Runs on other data than the baseline's are left out.
    """
    if baseline is None or label == baseline:
        return None
    base = {run.seed: run for run in groups[baseline] if run.counts}
    paired = [(run, base[run.seed]) for run in groups[label] if run.counts and run.seed in base]
    pairs = [run.loss - other.loss for run, other in paired if None in (run.data, other.data) or run.data == other.data]
    return PairedDifference(label, *interval(pairs), len(pairs)) if pairs else None


def late_edq(group: Sequence[RunStats]) -> float | None:
    """Return the median of the late EDQ over the runs that count."""
    values = [run.late_edq for run in group if run.counts and run.late_edq is not None]
    return statistics.median(values) if values else None


def run_faults(group: Sequence[RunStats]) -> list[str]:
    """Return the reasons not to use a recipe, from its own runs alone. Each continues a sentence after the recipe's label."""
    faults = []
    if diverged := [run for run in group if run.divergence]:
        words = diverged[0].divergence.strip().rstrip(".")
        of_runs = f"{len(diverged)} of {counted(len(group), 'run')}"
        faults.append(f"diverged in {of_runs} (seed {diverged[0].seed}, {words})")
    edq = late_edq(group)
    if edq is not None and edq < MIN_EDQ:
        faults.append(f"loses its updates (a late EDQ of {edq:.2f}, where 1 loses nothing)")
    ended = [(run.run.summary, len(run.run.steps)) for run in group if run.counts and run.run.summary is not None]
    taken = sum(int(summary.get("steps") or length) for summary, length in ended)
    skipped = sum(int(summary.get("num_skipped") or 0) for summary, _ in ended)
    if taken and skipped > MAX_SKIPPED * taken:
        faults.append(f"skipped {skipped:,} of its {taken:,} steps")
    return faults
