"""What a heat map can show of a run's gauges: one reading of every tensor, and which way of it is worse.

A reading is a column of one of the tables of ``gauges.jsonl``. Each has a value of perfect health, so that of many readings
the worst can be told: the one farthest from it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Measure:
    """One reading that a heat map can show.

    Args:
        table, field: where a row of ``gauges.jsonl`` has it.
        title: what it is.
        how: how to read its heat map.
        low, high: the ends of the colours, in the reading's own unit.
        good: the reading of perfect health; what lies farthest from it is the worst.
        log: whether the colours count powers of ten.
    """

    table: str
    field: str
    title: str
    how: str
    low: float
    high: float
    good: float = 0.0
    log: bool = False

    def worst(self, values: Iterable[float]) -> float:
        """The value farthest from health, of at least one."""
        found = list(values)
        low, high = min(found), max(found)
        return high if high - self.good >= self.good - low else low


MEASURES: dict[str, Measure] = {
    "edq": Measure(
        "updates", "edq", "EDQ: share of the update that arrived",
        "A row is a parameter, a column a sampled step. The middle colour is 1: the whole update arrived. Towards 0 it was "
        "rounded away and the parameter stands still; above 1 the storage moved it farther than asked.",
        0.0, 2.0, good=1.0,
    ),
    "noise": Measure(
        "updates", "noise", "Noise beside the update",
        "What the storage added beside the intended update, relative to it. 1 means as much noise as update, which "
        "stochastic rounding can bear, since it averages out; rounding to nearest cannot.",
        1e-3, 30.0, log=True,
    ),
    "lost": Measure(
        "updates", "lost_fraction", "Share of changes that were lost",
        "The share of intended changes that left the stored value exactly as it was. High in embeddings is normal, since "
        "most words are rare; high in every row late in training says the updates have become too small for the storage.",
        0.0, 1.0,
    ),
    "underflow": Measure(
        "tensors", "underflow", "Underflow of the cast",
        "The share of nonzero values that the cast into the matmul made zero. A row is an operand; rows that brighten with "
        "time are tensors outgrowing their format's small end.",
        1e-6, 1.0, log=True,
    ),
    "overflow": Measure(
        "tensors", "overflow", "Overflow of the cast",
        "The share of values beyond the end of their format. It should be dark nearly everywhere. Formats "
        "with a scale per block cut off a few of the largest values by the rule of their scales, which are powers of two; "
        "under any other scale a row that stays bright has one that is too large or too old.",
        1e-6, 1.0, log=True,
    ),
    "outlier": Measure(
        "tensors", "outlier", "Outliers: largest magnitude over the rms",
        "How far the largest value of a tensor stands above its typical one. A normal distribution reads 4 to 6; rows that "
        "climb into the hundreds need a scale per row or block.",
        1.0, 1000.0, log=True,
    ),
    "bias": Measure(
        "moments", "bias", "Second moments against an exact shadow",
        "The stored second moments over those kept exactly. The middle colour is 1: no bias. Below, the steps come out too "
        "long; above, too short.",
        0.0, 2.0, good=1.0,
    ),
    "frozen": Measure(
        "moments", "frozen_fraction", "Share of second moments that stand still",
        "The share of second moments that did not move since the last sample although their exact shadow did. A row that "
        "brightens is freezing: its decay is too slow for the storage.",
        0.0, 1.0,
    ),
    "max_logit": Measure(
        "attention", "max_logit", "Largest attention logit",
        "A row is an attention layer. Logits that climb through the hundreds end in attention on a single token and in "
        "gradient spikes.",
        1.0, 1e4, log=True,
    ),
}  # fmt: skip
"""The readings a reader can choose, the first by default."""
