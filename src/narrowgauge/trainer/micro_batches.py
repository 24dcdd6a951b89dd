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
class Turn:
    """What a rank does in one round.

    Args:
        leaf: the number of the micro-batch.
        is_absent: the rank has no leaf left and repeats this one.
        is_last: the last round of the step.
    """

    leaf: int
    is_absent: bool = False
    is_last: bool = False


def turns(num_leaves: int, rank: int = 0, size: int = 1) -> list[Turn]:
    """The rounds of one rank.

    Args:
        num_leaves: of the step; at least one for each rank.
        rank, size: this rank and how many there are.

    Example:
        >>> [(turn.leaf, turn.is_absent) for turn in turns(5, rank=2, size=3)]
        [(2, False), (2, True)]
    """
    rounds = -(-num_leaves // size)
    leaves = [rank + size * number for number in range(rounds)]
    return [Turn(leaf if leaf < num_leaves else rank, leaf >= num_leaves, leaf == leaves[-1]) for leaf in leaves]


def sum_in_order(shares: Sequence[Tensor], num_leaves: int, size: int = 1) -> Tensor:
    """The sum of a number of each leaf, added in the order of the leaves whoever has computed them.

    Args:
        shares: 0-d, of this rank's rounds.
        num_leaves: how many leaves there are.
        size: how many ranks there are.
    Returns:
        0-d, the same bits on every rank and for every number of ranks.
    """
    table = torch.stack([share.detach() for share in shares])
    if size > 1:
        gathered = torch.empty(size * len(shares), dtype=table.dtype, device=table.device)
        torch.distributed.all_gather_into_tensor(gathered, table)
        table = gathered.view(size, -1).t().reshape(-1)  # round by round, each by rank: the order of the leaves
    total = table[0]
    for share in table[1:num_leaves].unbind():
        total = total + share
    return total


def gather_in_order(values: Sequence[float], num_leaves: int, here: Ranks) -> list[float]:
    """A number of each leaf from all ranks, in the order of the leaves.

    Args:
        values: of this rank's rounds.
        num_leaves: how many leaves there are.
        here: this process.
    """
    by_rank = here.gather(list(values))
    return [by_rank[leaf % here.size][leaf // here.size] for leaf in range(num_leaves)]


# ── batches that rollbacks skip ─────────────────────────────────────────────────────────────────────────────────────


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
