"""What replays say of two runs: whether each can be repeated, and how far rounding alone carries the tensor in which they part.

The steps themselves are replayed in :mod:`narrowgauge.trainer.replays`, which needs PyTorch; this is what is left of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

MARGIN = 4.0
"""How many times the largest of a few measured changes still counts as rounding: the next one may be larger."""


@dataclass(frozen=True, slots=True)
class MeasuredEnvelope:
    """How far one-ulp changes of all weights carry one tensor in one step.

    Args:
        step: of the replays.
        tensor: ``KIND:NAME``.
        changes: of its norm, relative, one for each replay.
    """

    step: int
    tensor: str
    changes: tuple[float, ...]

    @property
    def limit(self) -> float:
        """The relative difference up to which rounding explains it."""
        return MARGIN * max(self.changes, default=0.0)

    def holds(self, relative: float) -> bool:
        """Whether a relative difference lies inside.

        Example:
            >>> MeasuredEnvelope(3, "grad:w", (1e-4, 2e-4)).holds(5e-4), MeasuredEnvelope(3, "grad:w", (1e-4,)).holds(5e-4)
            (True, False)
        """
        return relative <= self.limit

    def __str__(self) -> str:
        times = "one replay" if len(self.changes) == 1 else f"{len(self.changes)} replays"
        return f"in {times} with weights changed by one ulp of float32 it moved by at most {max(self.changes):.2g}"


@dataclass(frozen=True, slots=True)
class Replayed:
    """Both runs computed again, from the last state that they have in common.

    Args:
        since: the step of that state.
        repeats: whether each replay has the bits of its record; ``None`` where ranks summed in another order than one process.
        agree: the replays are equal to each other in every step, so that nothing the runs were given parts them.
        said: where a replay parts from its record, a sentence each.
        persists: whether a run that cannot be repeated parts from its replay again after a later checkpoint, if it has one.
        envelope: of the tensor in which they part, if it was measured.
    """

    since: int
    repeats: tuple[bool | None, bool | None]
    agree: bool
    said: tuple[str, ...] = ()
    persists: bool | None = None
    envelope: MeasuredEnvelope | None = None

    @property
    def excludes_settings(self) -> bool:
        """Whether no setting can be why: computed again as they were given, the two runs are equal."""
        return self.agree and False in self.repeats

    def sentences(self) -> list[str]:
        """What it says, for a ticket."""
        found = []
        if self.repeats == (True, True):
            found.append(f"both were computed again from step {self.since} on, with the bits of their records")
        found += self.said
        if self.excludes_settings:
            found.append("computed again here, both give the same: nothing that they were given parts them")
        return found

    def to_dict(self) -> dict[str, Any]:
        """As values for JSON."""
        envelope = self.envelope
        return {
            "since": self.since,
            "repeats": list(self.repeats),
            "agree": self.agree,
            "persists": self.persists,
            "envelope": envelope
            and {"tensor": envelope.tensor, "changes": list(envelope.changes), "limit": envelope.limit},
        }
