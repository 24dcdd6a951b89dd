"""Detours: which batches a run left out when it went back to a checkpoint.

A spike that comes from the data comes again when the same batches are taken again. So a run that is told to roll back goes
to its last checkpoint and round the batches between there and the spike. Each detour is an event of the run folder,
written before it is taken: a resume reads them all, and takes the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Detour:
    """Batches that were left out.

    Args:
        step: the checkpoint from which the run went on: steps done.
        batches: how many were left out.
    """

    step: int
    batches: int


def batch_index(step: int, detours: Iterable[Detour]) -> int:
    """Which batch of the data the step after ``step`` steps takes.

    Law: no batch is taken twice by steps after a detour.

    Example:
        >>> [batch_index(step, [Detour(100, 8)]) for step in (99, 100, 101)]
        [99, 108, 109]
    """
    return step + sum(detour.batches for detour in detours if detour.step <= step)


def detours_of(events: Iterable[Mapping[str, Any]]) -> list[Detour]:
    """The detours that a run's events tell of, in the order in which they were taken.

    Example:
        >>> detours_of([{"kind": "rollback", "step": 108, "to_step": 100, "batches": 8}])
        [Detour(step=100, batches=8)]
    """
    return [Detour(row["to_step"], row["batches"]) for row in events if row.get("kind") == "rollback"]
