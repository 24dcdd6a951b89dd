"""Orders of sums are recovered exactly: of loops, halves, lanes, blocks and random trees, and what is no tree is refused."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from narrowgauge.gauges.probes import summation_order
from narrowgauge.gauges.probes.summation_order import (
    Tree,
    depth,
    describe,
    notation,
    pairwise,
    reveal,
    sequential,
    signature,
    subtree_sizes,
)
from oracles.tree_sums import random_tree, tree_sum

CPU = torch.device("cpu")


def joined(order: Tree, parts: list[Tree]) -> Tree:
    """The sum of partial sums, in an order of their numbers."""
    return parts[order] if isinstance(order, int) else tuple(joined(part, parts) for part in order)


LANES = joined(pairwise(8), [sequential(range(lane, 32, 8)) for lane in range(8)])
FOUR_BLOCKS = joined(sequential(4), [sequential(range(start, start + 4)) for start in range(0, 16, 4)])
KNOWN: dict[str, tuple[int, Tree]] = {
    "sequential": (17, sequential(17)),
    "last term first": (13, sequential(reversed(range(13)))),
    "pairwise": (16, pairwise(16)),
    "lanes": (32, LANES),
    "blocks": (16, FOUR_BLOCKS),
    **{f"random {seed}": (5 + 3 * seed, random_tree(5 + 3 * seed, seed)) for seed in range(6)},
}


def sum_in(tree: Any, length: int, is_positive: bool) -> summation_order.Sum:
    """A sum whose order is known, as the probes see one of PyTorch's."""

    def add(rows: Tensor, largest: Tensor | None = None) -> Tensor:
        terms = rows.exp() if is_positive else rows
        total = torch.tensor([float(tree_sum(tree, row)) for row in terms.numpy()])
        return total > 1 if is_positive else total

    return summation_order.Sum(add, length, tuple(range(length)), 8, is_positive)


def revealed(found: summation_order.Sum) -> Tree | None:
    sizes = summation_order._sizes_of_positive if found.is_positive else summation_order._sizes_of_signed
    return reveal(found.length, lambda pairs: sizes(found, CPU, math.inf, pairs))


@pytest.mark.parametrize(("length", "tree"), KNOWN.values(), ids=KNOWN)
def test_a_known_order_is_recovered_exactly(length: int, tree: Tree) -> None:
    for is_positive in (False, True):
        found = revealed(sum_in(tree, length, is_positive))
        assert found is not None and notation(found) == notation(tree)


@pytest.mark.parametrize("seed", range(4))
def test_sums_of_many_terms_at_once_are_recovered(seed: int) -> None:
    tree = random_tree(24, seed, (2, 4, 5))
    found = revealed(sum_in(tree, 24, is_positive=False))
    assert found is not None and notation(found) == notation(tree)


def test_what_no_order_of_additions_explains_is_refused() -> None:
    def exact(rows: Tensor) -> Tensor:
        return torch.tensor([math.fsum(row) for row in rows.tolist()])

    def running_mean(rows: Tensor) -> Tensor:
        mean = torch.zeros(len(rows))
        for number, column in enumerate(rows.unbind(1), start=1):
            mean = mean + (column - mean) / number
        return mean * rows.shape[1]

    def another_order_per_row(rows: Tensor) -> Tensor:
        orders = (sequential(12), pairwise(12))
        return torch.tensor([float(tree_sum(orders[place % 2], row)) for place, row in enumerate(rows.numpy())])

    for add in (exact, running_mean, another_order_per_row):
        assert revealed(summation_order.Sum(add, 12, tuple(range(12)), 4)) is None


def test_a_hash_tells_orders_apart_and_not_the_sides_of_an_addition() -> None:
    assert signature(((0, 1), 2)) == signature((2, (1, 0))) != signature((0, (1, 2)))
    assert depth(pairwise(64)) == 6 and depth(sequential(64)) == 63
    assert subtree_sizes(pairwise(8), [(0, 1), (0, 2), (3, 4)]) == [2, 4, 8]


@pytest.mark.parametrize(
    ("tree", "words"),
    [
        (pairwise(16), "pairwise"),
        (tuple(range(8)), "fused"),
        (sequential(reversed(range(9))), "sequential, last term first"),
        (FOUR_BLOCKS, "4 consecutive blocks (sequential), joined sequential"),
        (LANES, "8 strided sums (sequential), joined pairwise"),
        (tuple(sequential(range(lane, 16, 4)) for lane in range(4)), "4 strided sums (sequential), joined at once"),
        (((0, 3), ((1, 4), (2, 5))), "irregular, depth 3"),
    ],
)
def test_orders_in_words(tree: Tree, words: str) -> None:
    assert describe(tree) == words


def test_terms_at_a_distance_are_described_by_where_they_stand() -> None:
    lanes = ((0, 2), (1, 3))
    assert describe(lanes, [0, 9, 24, 33]) == "8 strided sums"
    assert describe(((0, 1), (2, 3)), [0, 9, 64, 70]) == "pairwise"
