"""Leaves: the micro-batches of a step, numbered over the whole job, and which of them a rank computes.

A *leaf* holds the same samples for every number of ranks. Leaf l runs on rank ``l % ranks``, so each rank does
``ceil(leaves / ranks)`` rounds; a rank that has no leaf left repeats its first and contributes nothing, since every rank takes
part in every exchange. What is recorded of leaves is added up in their order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
