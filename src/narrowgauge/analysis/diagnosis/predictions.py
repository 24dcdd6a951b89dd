"""What a cause is: the signs that it predicts, what it does to a run, and what to do about it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from narrowgauge.analysis.diagnosis.evidence import Evidence

HEALTHY = "healthy"
"""The null cause."""
Applies = Callable[[Evidence], bool]


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason for a run to go wrong.

    Args:
        name: its key in the table.
        title: a few words.
        effect: what it does to a run.
        remedy: what to do; ``{module}``, ``{cure}`` and ``{safer}`` stand for the module where it shows, the storage that keeps
            updates, and a compute with more range.
        source: where the cause and its signature are described.
        predicts: by sign: how likely a run with this cause shows it.
        applies: whether a run can have it at all.
        prior: how often, relative to the other causes, before anything is known.
        replay: what a replay of the step would show.
        measure: what tells it where no sign of a record does.
        required: signs of which one at least must be present for the cause to be considered; none: any sign will do.
        notes: signs that are worth a word where none of the required ones is present: a setting without an effect.
        spreads: whether it disturbs so much that what shows later may be its consequence; what only slows learning does not.
    """

    name: str
    title: str
    effect: str
    remedy: str
    source: str
    predicts: Mapping[str, float] = field(default_factory=dict)
    applies: Applies = lambda evidence: True
    prior: float = 1.0
    replay: str = ""
    measure: str = ""
    required: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    spreads: bool = True
