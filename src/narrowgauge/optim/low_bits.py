"""Random low bits: weights of a 16-bit checkpoint that move from the first step.

A checkpoint in bfloat16, copied to float32, still lies on the grid of bfloat16. The forward pass rounds weights to bfloat16. It
sees no change of a weight before the sum of its updates reaches half an ulp. At a learning rate of 5e-6 and a weight of 0.2 that
is a hundred steps.

Low bits at random within the cell that rounds to the same bfloat16 value end this. No visible weight changes at first. Some lie
near the end of their cell, and move by an ulp in the first step. On average, the visible change is the update. The offset of a
weight is drawn once; stochastic rounding draws new noise at each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.numerics.dtensor import largest_over_ranks, local_of, own_part, split_groups
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.rounding import EXPONENT, MAGNITUDE, bits_of, half, random_bits
from narrowgauge.optim import codes
from narrowgauge.optim.codes import MANTISSA, Lane
from narrowgauge.spec.storages import VISIBLE, Storage

LOW_BITS = ("zero", "random")
"""The values of the option ``low_bits``."""


def random_in_cell(visible: str, bits: Tensor, random: Tensor) -> Tensor:
    """Return a random value of the cell that rounds to each visible weight, in the bits of :func:`codes.visible_value`.

    It is uniform in the cell, which below a power of two is half as wide. Zeros, infinities and NaN stay as they are. ``bits``
    and ``random`` are int32.
    """
    below = VISIBLE[visible][1]
    offset = (random >> (32 - below)) & ((1 << below) - 1)
    # Below a power of two, but for the smallest normal one, an ulp is half as large.
    narrowed = ((3 * offset) >> 2) - (1 << (below - 2))
    is_power = ((bits & MANTISSA) == 0) & ((bits & EXPONENT) > 1 << 23)
    offset = torch.where(
        is_power, torch.where(narrowed < 0, 2 * narrowed, narrowed), offset - half(below)
    )
    infinity = EXPONENT if visible == "bfloat16" else 31 << 23
    magnitude = bits & MAGNITUDE
    return torch.where((magnitude == 0) | (magnitude >= infinity), bits, bits + offset)


def has_low_bits(storage: Storage) -> bool:
    """Return whether a storage keeps more of a weight than the model sees."""
    return bool(storage.beside) and storage.visible != "float32" and not storage.weight.scaled


def fill_states(states: Sequence[Any], seed: int, skip: Tensor) -> None:
    """Fill the low bits of states before their first step, unless ``skip`` (0-d) is not 0. They have their gradients.

    A tensor with any low bit keeps all of its own. The random bits hash an element's weight and its gradient's mantissa.
    """
    states = [state for state in states if has_low_bits(state.storage)]
    flags = _on_any_rank([state.owner for state in states], [_has_bits(state) for state in states])
    for state, has_bits in zip(states, flags, strict=True):
        storage, keeps = state.storage, has_bits | (skip != 0)
        number = torch.tensor(
            step_seed(seed, 0), dtype=torch.int32, device=skip.device
        )  # steps count from 1
        for lanes, words in state.pieces():
            filled = state.layout.with_fields(
                lanes, [_filled(storage, lane, number) for lane in lanes]
            )
            for old, new in zip(words, filled, strict=True):
                old.copy_(torch.where(keeps, old, new))


def _has_bits(state: Any) -> Tensor:
    """Return whether any stored weight of this rank differs from the visible one, 0-d bool."""
    result = torch.zeros((), dtype=torch.bool, device=state.parameter.device)
    for lanes, _ in state.pieces():
        for lane in lanes:
            seen = codes.visible_value(state.storage.visible, lane.visible)
            result = result | (codes.read_weight(state.storage, lane) != seen).any()
    return result


def _on_any_rank(owners: Sequence[Any], flags: Sequence[Tensor]) -> list[Tensor]:
    """Return each 0-d flag, true if it is on any rank that holds a part of its owner."""
    numbers = [flag.to(torch.int32).view(1) for flag in flags]
    return [
        number[0] != 0 for number in largest_over_ranks(numbers, list(map(split_groups, owners)))
    ]


def _filled(storage: Storage, lane: Lane, seed: Tensor) -> dict[str, Tensor]:
    """Return the weight's fields of a lane in place, with random low bits."""
    mantissa = codes.gradient_mantissa(storage.visible, lane.gradient)
    key = bits_of(codes.visible_value(storage.visible, lane.visible)) ^ mantissa
    bits = random_in_cell(storage.visible, lane.visible, random_bits(key, seed))
    # Round a tail down, which stays in the cell; a leading part to nearest, which gives the visible weight.
    addend = half(codes.dropped_bits(storage.weight)) if storage.weight.parts > 1 else 0
    return codes.write_weight(storage, lane, codes.visible_value(storage.visible, bits), addend)[1]


def fill_low_bits(model: nn.Module, seed: int = 0) -> int:
    """Fill the low bits of float32 parameters that lie on the grid of bfloat16 or float16, for any optimizer.

    Call it once before training, where a 16-bit checkpoint was read into float32. A forward pass under autocast to the
    checkpoint's format sees the same weights as before. A parameter with any low bit of its own does not change.

    Args:
        model: its parameters may be DTensors: the bits do not depend on the sharding.
        seed: of the random bits. A bit depends on the seed, the weight, and its place in its tensor.
    Returns:
        The number of parameters' elements that were filled.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(64, 64).bfloat16().float()
        >>> before = model.weight.bfloat16()
        >>> ng.fill_low_bits(model)
        4160
        >>> torch.equal(model.weight.bfloat16(), before)
        True
    """
    parameters = [p for p in model.parameters() if p.dtype is torch.float32]
    number, total = step_seed(seed, 0), 0
    for visible in ("bfloat16", "float16"):
        off = [
            (local_of(p.detach()) != local_of(p.detach()).to(getattr(torch, visible))).any()
            for p in parameters
        ]
        off = _on_any_rank(parameters, off)
        filled = [p for p, is_off in zip(parameters, off, strict=True) if not is_off]
        for parameter in filled:
            weights = local_of(parameter.detach())
            index = torch.arange(parameter.numel(), device=weights.device).view(parameter.shape)
            place = local_of(own_part(parameter, index)).to(torch.int32) * 0x61C88647
            bits = codes.visible_bits(visible, weights)
            random = random_bits(
                bits ^ place, torch.tensor(number, dtype=torch.int32, device=weights.device)
            )
            weights.copy_(codes.visible_value(visible, random_in_cell(visible, bits, random)))
            total += parameter.numel()
        parameters = [p for p in parameters if all(p is not other for other in filled)]
    return total
