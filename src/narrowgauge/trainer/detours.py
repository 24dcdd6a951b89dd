"""Detours: the batches that a run skips after a rollback to a checkpoint.

A spike caused by the data recurs when the same batches are trained on again. A rollback therefore returns to the last checkpoint
and skips the batches between it and the spike. Each detour is an event in the run folder, written before it takes effect: a
resumed run reads them and takes the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Detour:
    """Skipped batches.

    Args:
        step: step of the checkpoint from which the run continued.
        batches: number of skipped batches.
    """

    step: int
    batches: int


def batch_index(step: int, detours: Iterable[Detour]) -> int:
    """The index of the batch for the step after ``step`` steps.

    Invariant: steps after a detour take no batch twice.

    Example:
        >>> [batch_index(step, [Detour(100, 8)]) for step in (99, 100, 101)]
        [99, 108, 109]
    """
    return step + sum(detour.batches for detour in detours if detour.step <= step)


def detours_of(events: Iterable[Mapping[str, Any]]) -> list[Detour]:
    """The detours recorded in a run's events, in order.

    Example:
        >>> detours_of([{"kind": "rollback", "step": 108, "to_step": 100, "batches": 8}])
        [Detour(step=100, batches=8)]
    """
    return [Detour(row["to_step"], row["batches"]) for row in events if row.get("kind") == "rollback"]
