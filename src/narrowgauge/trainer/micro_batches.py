"""Which samples a rank trains on in a step: the batch, and its micro-batches.

A micro-batch holds the same samples for every number of ranks. Micro-batch m runs on rank ``m % ranks``, so each rank does
``ceil(micro-batches / ranks)`` rounds. A rank that has none left repeats its first and contributes nothing, since every rank
takes part in every exchange. What is recorded of micro-batches is added up in their order.

A spike caused by the data recurs when the same batches are trained on again. A rollback therefore returns to the last checkpoint
and skips the batches between it and the spike. Each rollback is an event in the run folder, written before it takes effect: a
resumed run reads the events and takes the same batches.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.distributed.ranks import Ranks


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What a rank computes in one round of a step.

    Args:
        number: of the micro-batch in the step, over all ranks.
        is_absent: the rank has no micro-batch left and repeats this one.
        is_last: the last round of the step.
    """

    number: int
    is_absent: bool = False
    is_last: bool = False


def micro_batches_of_rank(num_micro_batches: int, rank: int = 0, size: int = 1) -> list[MicroBatch]:
    """Return the rounds of one rank, in a step with at least one micro-batch for each rank.

    Example:
        >>> [(each.number, each.is_absent) for each in micro_batches_of_rank(5, rank=2, size=3)]
        [(2, False), (2, True)]
    """
    numbers = range(rank, rank + size * -(-num_micro_batches // size), size)
    return [
        MicroBatch(number if number < num_micro_batches else rank, number >= num_micro_batches, number == numbers[-1])
        for number in numbers
    ]


def sum_in_order(shares: Sequence[Tensor], num_micro_batches: int, size: int = 1) -> Tensor:
    """Return the sum of a number of each micro-batch, added in their order, whichever rank computed them.

    ``shares`` are the 0-d numbers of this rank's rounds; all ranks call it. The sum is 0-d and has the same bits on every
    rank and for every number of ranks.
    """
    table = torch.stack([share.detach() for share in shares])
    if size > 1:
        gathered = torch.empty(size * len(shares), dtype=table.dtype, device=table.device)
        torch.distributed.all_gather_into_tensor(gathered, table)
        table = gathered.view(size, -1).t().reshape(-1)  # round by round, each by rank: the order of the micro-batches
    total = table[0]
    for share in table[1:num_micro_batches].unbind():
        total = total + share
    return total


def gather_in_order(values: Sequence[float], num_micro_batches: int, here: Ranks) -> list[float]:
    """Return a number of each micro-batch from all ranks, in their order; ``values`` are those of this rank's rounds."""
    by_rank = here.gather(list(values))
    return [by_rank[number % here.size][number // here.size] for number in range(num_micro_batches)]


# ── batches that rollbacks skip ─────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class SkippedBatches:
    """How many batches are skipped after a rollback to the checkpoint of a step."""

    step: int
    batches: int


def batch_index(step: int, skipped: Iterable[SkippedBatches]) -> int:
    """Return the index of the batch for the step after ``step`` steps.

    Invariant: no batch is taken twice.

    Example:
        >>> [batch_index(step, [SkippedBatches(100, 8)]) for step in (99, 100, 101)]
        [99, 108, 109]
    """
    return step + sum(each.batches for each in skipped if each.step <= step)


def skipped_batches_of(events: Iterable[Mapping[str, Any]]) -> list[SkippedBatches]:
    """Return the batches that a run skipped, by its events, in order.

    Example:
        >>> skipped_batches_of([{"kind": "rollback", "step": 108, "to_step": 100, "batches": 8}])
        [SkippedBatches(step=100, batches=8)]
    """
    return [SkippedBatches(row["to_step"], row["batches"]) for row in events if row.get("kind") == "rollback"]
