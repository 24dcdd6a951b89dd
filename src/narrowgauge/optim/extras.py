"""States of matrix rules that have shapes of their own: bases, and moments of low rank.

Each is stored in the code of a moment, which has one part. If the code is scaled by row, the largest
magnitude of each row is its bound.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import Addend, bits_of, quiet, random_bits
from narrowgauge.optim.codes import MANTISSA, decode, encode, multipliers
from narrowgauge.optim.planes import INTEGER, dropped_bits

if TYPE_CHECKING:
    from narrowgauge.optim.state import LocalState


def extra_values(state: LocalState, name: str, index: tuple[int, ...] = ()) -> Tensor:
    """Return the float32 values of an extra, or of its ``index``.

    For a float32 extra this is its own memory, not a copy.
    """
    back = None
    if name in state.extra_bounds:
        back = multipliers(state.extra_bounds[name][index])[1]
    tensor = state.extras[name][index]
    words = tensor.view(INTEGER[tensor.dtype.itemsize * 8]).to(torch.int32)
    return decode(state.extra_codes[name], words, 0, back)


def store_extra(
    state: LocalState,
    name: str,
    values: Tensor,
    seed: Tensor,
    skip: Tensor | None = None,
    index: tuple[int, ...] = (),
) -> None:
    """Store values of an extra, or of its ``index``, unless ``skip`` (0-d bool).

    A stochastic code rounds under ``seed`` (0-d int32). The random bits hash a value's mantissa and
    its position in its matrix.
    """
    code = state.extra_codes[name]
    value = quiet(values.float().contiguous())
    into = None
    bound = None
    if name in state.extra_bounds:
        bound = value.abs().amax(-1, keepdim=True)
        into = multipliers(bound)[0]
    addend: Addend = None
    if code.rounding == "stochastic":
        # Modulo 2^32: the numbers of a matrix of more elements begin again.
        place = torch.arange(math.prod(value.shape[-2:]), dtype=torch.int32, device=value.device)
        mantissa = bits_of(value) & MANTISSA
        random = random_bits(place.view(value.shape[-2:]) ^ mantissa, seed)
        dropped = dropped_bits(code)
        addend = (random >> (32 - dropped)) & ((1 << dropped) - 1)
    tensor = state.extras[name]
    new = encode(code, value, addend, 0, into).to(INTEGER[8 * tensor.dtype.itemsize])
    for memory, result in ((tensor, new.view(tensor.dtype)), (state.extra_bounds.get(name), bound)):
        if memory is None or result is None:
            continue
        if skip is not None:
            result = torch.where(skip, memory[index], result)
        memory[index].copy_(result)
