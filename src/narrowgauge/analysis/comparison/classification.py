"""Classify each recipe of a comparison. The verdict, the tables and the page read the result.

A *rank* compares a recipe's final losses with the baseline's. A *fault* is a reason not to use a
recipe, at any rank: it diverged, loses its updates, skipped steps, or ends worse by more than 1 %.
A recipe that loses its updates falls behind late, at small learning rates. The large first steps
dominate sums over a run, so we read the audit's last values.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from narrowgauge.analysis.columns import column
from narrowgauge.analysis.comparison.intervals import PairedDifference, interval
from narrowgauge.analysis.comparison.labels import seed_of
from narrowgauge.analysis.settings import recipe_of
from narrowgauge.analysis.thresholds import (
    ACCEPTABLE,
    LEAST_LOSS,
    MAX_LOSS_RISE,
    MAX_SKIPPED,
    NEGLIGIBLE,
    NOISE,
)
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, finite_number, number
from narrowgauge.spec.significance import MIN_EDQ


class Rank(Enum):
    """Compare a recipe's loss with the baseline's.

    ``BETTER`` and ``WORSE`` are statistically significant.
    """

    BASELINE = "the baseline"
    BETTER = "better"
    WITHIN_NOISE = "within the noise"
    WORSE = "worse"
    INCONCLUSIVE = "inconclusive"
    NO_INTERVAL = "no interval"
    NO_LOSS = "no loss"


# ── one run ───────────────────────────────────────────────────────────────────────────────────────


def divergence(run: Run) -> str:
    """Describe how a run diverged; empty if it did not."""
    for event in run.events:
        if event.get("what") == "divergence":
            words = str(event.get("text") or "").partition(". ")[0]
            return f"at step {event.get('step')}: {words}"
    losses = [float(row["loss"]) for row in run.steps if row.get("loss") is not None]
    name = "loss"
    end = losses[-1] if losses else None
    if run.summary is not None:
        name = "validation loss"
        end = number(run.summary.get("val_loss"))
    if end is not None and not math.isfinite(end):
        return f"its {name} is {end}"
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


@dataclass(frozen=True)
class RunStats:
    """Hold a run of a comparison and its shared statistics.

    Args:
        label: label of its recipe, as printed.
        divergence: how the run diverged; empty if it did not.
        late_edq: median of the last tenth of audited values (at least three), else the summary's
            value.
    """

    label: str
    seed: int
    run: Run
    divergence: str
    late_edq: float | None

    @classmethod
    def of(cls, run: Run, label: str) -> RunStats:
        values = column(run, "steps", "edq").finite
        late = finite_number((run.summary or {}).get("edq"))
        if len(values):
            late = float(np.median(values[-max(3, len(values) // 10) :]))
        return cls(label, seed_of(run), run, divergence(run), late)

    @property
    def counts(self) -> bool:
        """Return whether averages may include this run."""
        return (
            self.run.summary is not None
            and not self.divergence
            and self.run.summary.get("val_loss") is not None
        )

    @property
    def data(self) -> str | None:
        """Return the fingerprint of the data and their split; ``None`` if it is not recorded."""
        return (self.run.run.get("data") or {}).get("fingerprint")

    @property
    def loss(self) -> float:
        """Return the last validation loss. Only a run that counts has one."""
        assert self.run.summary is not None
        return float(self.run.summary["val_loss"])


# ── one recipe ────────────────────────────────────────────────────────────────────────────────────


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
        if self.faults:
            return None
        return self.rank

    @property
    def verdict(self) -> str:
        """Return its rank in words."""
        if self.faults:
            return "not to be used"
        return self.rank.value

    @property
    def is_fit(self) -> bool:
        """Return whether it is known to be usable and acceptably good.

        A baseline without faults is.
        """
        return self.usable_rank in (Rank.BASELINE, Rank.BETTER, Rank.WITHIN_NOISE)

    @property
    def cost(self) -> tuple[float, float]:
        """Return the sort key of recipes: bytes per parameter, then time."""
        size = self.row["bytes_per_param"]
        if size is None:
            size = math.inf
        # Less than a tenth of a byte is a few norm weights, not a saving.
        return round(size, 1), -(self.row["tokens_per_second"] or 0.0)


def classify(
    groups: Mapping[str, Sequence[RunStats]], rows: Mapping[str, Row]
) -> tuple[dict[str, Classification], str | None]:
    """Classify every recipe by its label, and choose the baseline.

    ``rows`` are the rows of ``compare.json``.
    """
    baseline = _widest(groups, rows)
    loss = 0.0
    if baseline is not None:
        loss = float(rows[baseline]["val_loss"] or 0.0)
    classes = {}
    for label, group in groups.items():
        difference = None
        if baseline is not None and label != baseline:
            difference = _paired_difference(label, group, groups[baseline])
        ranked = rank(difference, loss)
        if label == baseline:
            ranked = Rank.BASELINE
        elif not rows[label]["num_seeds"]:
            ranked = Rank.NO_LOSS
        faults = run_faults(group)
        limit = ACCEPTABLE * abs(loss)
        if difference is not None and ranked is Rank.WORSE and difference.mean > limit:
            share = ""
            if loss:
                share = f" ({difference.mean / abs(loss):+.1%})"
            faults.append(f"ends worse than {baseline} by {difference.text}{share}")
        classes[label] = Classification(
            label, tuple(group), rows[label], ranked, difference, tuple(faults), _late_edq(group)
        )
    return classes, baseline


_WIDTHS = {"float32": 32, "float16": 16, "bfloat16": 16}


def _widest(groups: Mapping[str, Sequence[RunStats]], rows: Mapping[str, Row]) -> str | None:
    """Return the baseline: the most precise recipe without faults."""

    def width(label: str) -> tuple[bool, bool, float, int]:
        recipe = recipe_of(groups[label][0].run)
        bits = 0
        if recipe is not None:
            bits = _WIDTHS.get(recipe.compute.name, 0)
        size = round(rows[label]["bytes_per_param"] or 0.0, 1)
        return not run_faults(groups[label]), bits > 0, size, bits

    usable = [label for label in rows if rows[label]["num_seeds"]]
    return max(usable, key=width, default=None)


def rank(difference: PairedDifference | None, loss: float) -> Rank:
    """Return the rank of a recipe, from its difference to the baseline's loss; ``None`` without a
    common seed.
    """
    negligible = NEGLIGIBLE * abs(loss)
    if difference is None or not math.isfinite(difference.half):
        return Rank.NO_INTERVAL
    if difference.low > 0 and difference.high > negligible:
        return Rank.WORSE
    if difference.high < 0 and -difference.low > negligible:
        return Rank.BETTER
    if difference.high > ACCEPTABLE * abs(loss):
        return Rank.INCONCLUSIVE
    return Rank.WITHIN_NOISE


def _paired_difference(
    label: str, group: Sequence[RunStats], baseline: Sequence[RunStats]
) -> PairedDifference | None:
    """Return a recipe's loss minus the baseline's over common seeds on the same data; ``None``
    without any.
    """
    base = {run.seed: run for run in baseline if run.counts}
    pairs = []
    for run in group:
        base_run = base.get(run.seed)
        if base_run is None or not run.counts:
            continue
        if run.data == base_run.data or run.data is None or base_run.data is None:
            pairs.append(run.loss - base_run.loss)
    if not pairs:
        return None
    return PairedDifference(label, *interval(pairs), len(pairs))


def _late_edq(group: Sequence[RunStats]) -> float | None:
    """Return the median of the late EDQ over the runs that count."""
    values = [run.late_edq for run in group if run.counts and run.late_edq is not None]
    return statistics.median(values) if values else None


def run_faults(group: Sequence[RunStats]) -> list[str]:
    """Return the reasons not to use a recipe, from its own runs alone.

    Each continues a sentence after the recipe's label.
    """
    faults = []
    diverged = [run for run in group if run.divergence]
    if diverged:
        words = diverged[0].divergence.strip().rstrip(".")
        of_runs = f"{len(diverged)} of {counted(len(group), 'run')}"
        faults.append(f"diverged in {of_runs} (seed {diverged[0].seed}, {words})")
    edq = _late_edq(group)
    if edq is not None and edq < MIN_EDQ:
        faults.append(f"loses its updates (a late EDQ of {edq:.2f}, where 1 loses nothing)")
    taken = 0
    skipped = 0
    for run in group:
        if run.counts and run.run.summary is not None:
            taken += int(run.run.summary.get("steps") or len(run.run.steps))
            skipped += int(run.run.summary.get("num_skipped") or 0)
    if taken and skipped > MAX_SKIPPED * taken:
        faults.append(f"skipped {skipped:,} of its {taken:,} steps")
    return faults
