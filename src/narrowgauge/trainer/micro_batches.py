"""Assign the micro-batches of a step to ranks, and sum their losses in one order for any number of ranks.

A micro-batch holds the same sequences for every number of ranks. Micro-batch m runs on rank ``m % ranks``. A rank that has none
left repeats its first and contributes nothing, since every rank takes part in every exchange.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.distributed.exchanges import all_gather


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """One round of a rank in a step."""

    number: int  # in the step, over all ranks
    is_absent: bool = False  # the rank has no micro-batch left and repeats this one
    is_last: bool = False  # the last round of the step


def micro_batches_of_rank(num_micro_batches: int, rank: int = 0, size: int = 1) -> list[MicroBatch]:
    """Return the rounds of one rank, in a step with at least one micro-batch for each rank.

    Example:
        >>> [(part.number, part.is_absent) for part in micro_batches_of_rank(5, rank=2, size=3)]
        [(2, False), (2, True)]
    """
    numbers = range(rank, rank + size * -(-num_micro_batches // size), size)
    return [
        MicroBatch(number if number < num_micro_batches else rank, number >= num_micro_batches, number == numbers[-1])
        for number in numbers
    ]


def sum_in_order(shares: Sequence[Tensor], num_micro_batches: int, size: int = 1) -> Tensor:
    """Sum the 0-d ``shares`` of all ranks' rounds in the order of the micro-batches: the same bits for any number of ranks."""
    table = torch.stack([share.detach() for share in shares])
    if size > 1:
        gathered = torch.empty(size * len(shares), dtype=table.dtype, device=table.device)
        all_gather(gathered, table)
        table = gathered.view(size, -1).t().reshape(-1)  # round by round, each by rank: the order of the micro-batches
    total = table[0]
    for share in table[1:num_micro_batches].unbind():
        total = total + share
    return total
