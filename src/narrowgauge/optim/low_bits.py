"""Random low bits: weights of a 16-bit checkpoint that move from the first step.

A checkpoint in bfloat16, copied to float32, still lies on the grid of bfloat16. The forward pass
rounds weights to bfloat16. It sees no change of a weight before the sum of its updates reaches half
an ulp. At a learning rate of 5e-6 and a weight of 0.2 that is a hundred steps.

Low bits at random within the cell that rounds to the same bfloat16 value end this. No visible
weight changes at first. Some lie near the end of their cell, and move by an ulp in the first step.
On average, the visible change is the update. The offset of a weight is drawn once; stochastic
rounding draws new noise at each step.

The random bits hash the seed, the tensor's name (or its place among the parameters) and the
element's position in the whole tensor. So sharding and resuming change none, and equal weights have
different ones. They are uniform in the *bits*. Below a power of two an ulp is half as large: a
value uniform in its cell would leave it too fast on one side, too slowly on the other.

Zeros stay zeros. A vector of one value, such as gains of 1, stays as it is.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.chunks import chunk_size
from narrowgauge.numerics.dtensor import largest_over_ranks, local_of, place_along, split_groups
from narrowgauge.numerics.hashing import named_seed
from narrowgauge.numerics.rounding import bits_of, random_bits
from narrowgauge.optim.values import store_low_bits
from narrowgauge.spec.storages import Storage

LOW_BITS = ("zero", "random")
"""The values of the option ``low_bits``."""


def has_low_bits(storage: Storage) -> bool:
    """Return whether a storage keeps more of a weight than the model sees."""
    return bool(storage.beside) and storage.visible != "float32"


def random_rows(
    owner: Tensor, part: Tensor, seed: int, name: str
) -> Iterator[tuple[slice, Tensor]]:
    """Yield some rows at a time of this rank's ``part`` of a parameter, and 32 random bits for each
    element, int32.
    """
    device = part.device
    number = torch.tensor(named_seed(seed, name), dtype=torch.int32, device="cpu").to(device)
    # Where rows begin in the whole tensor, and where the elements of a row lie. Modulo 2^32.
    rows = torch.zeros(1, dtype=torch.int32, device=device)
    in_row = rows.view(())
    stride = 1
    for dim in reversed(range(owner.ndim)):
        along = place_along(owner, dim) * ((stride + (1 << 31)) % (1 << 32) - (1 << 31))
        stride *= owner.shape[dim]
        if dim:
            in_row = along.view(-1, *[1] * (owner.ndim - 1 - dim)) + in_row
        else:
            rows = along
    count = part.numel()
    size = max(1, chunk_size(device) * len(rows) // max(1, count))
    for start in range(0, len(rows) if count else 0, size):
        place = rows[start : start + size].view(-1, *[1] * (owner.ndim - 1)) + in_row
        yield slice(start, start + size), random_bits(place, number)


def fill_states(states: Mapping[Any, str], seed: int) -> None:
    """Fill the low bits of new states, each with the name of its parameter.

    Two may have one name.
    """
    narrow = [state for state in states if has_low_bits(state.storage)]
    varying = set(_varying([state.owner for state in narrow]))
    for state in narrow:
        if state.owner not in varying:
            continue
        part = state.parameter
        random = torch.empty(part.shape or (1,), dtype=torch.int32, device=part.device)
        for rows, bits in random_rows(state.owner, part, seed, states[state]):
            random[rows] = bits
        store_low_bits(state, random.view(part.shape))


def _varying(owners: Sequence[Tensor]) -> list[Tensor]:
    """Return all but the vectors of one value. Ranks that share a vector agree."""
    vectors = [owner for owner in owners if owner.ndim < 2]
    ends = []
    for owner in vectors:
        bits = bits_of(local_of(owner.detach()).float().reshape(-1))
        # The largest bits and, turned around, the smallest. A rank without elements knows none.
        bits_and_inverse = torch.nn.functional.pad(
            torch.stack([bits, ~bits]), (0, 1), value=-(1 << 31)
        )
        ends.append(bits_and_inverse.amax(1))
    ends = largest_over_ranks(ends, list(map(split_groups, vectors)))
    varying = dict.fromkeys(owners)
    for owner, (largest, smallest) in zip(vectors, ends, strict=True):
        if bool(largest == ~smallest):
            varying.pop(owner, None)
    return list(varying)


def num_off_grid(values: Sequence[tuple[Tensor, Tensor]]) -> list[int]:
    """Return how many elements of each tensor have low bits, over all ranks: of ``(owner, this
    rank's values)``.
    """
    counts = []
    for owner, value in values:
        count = (value.to(owner.dtype).to(value.dtype) != value).sum()
        counts.append(count.clamp(max=(1 << 31) - 1).to(torch.int32).view(1))
    groups = [split_groups(owner) for owner, _ in values]
    return list(map(int, largest_over_ranks(counts, groups)))


def without_low_bits(values: Mapping[Tensor, Tensor]) -> list[Tensor]:
    """Return the parameters whose values all lie on the grid of their format: of these low bits are
    not known.
    """
    narrow = [p for p in values if p.dtype is not torch.float32]
    counts = num_off_grid([(p, local_of(values[p])) for p in narrow])
    return [p for p, count in zip(narrow, counts, strict=True) if not count]
