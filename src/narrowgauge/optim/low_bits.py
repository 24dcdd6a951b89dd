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

Zeros stay zeros. In a vector, an element of 1 or -1 keeps low bits of zero: so gains and biases
begin. The element alone decides: a rank sees a part of the vector.
"""

import torch
from torch import Tensor

from narrowgauge.numerics.chunks import flat_chunks
from narrowgauge.numerics.dtensor import add_up, local_of, place_along, split_groups
from narrowgauge.numerics.hashing import named_seed, signed
from narrowgauge.numerics.rounding import EXPONENT, MAGNITUDE, random_bits
from narrowgauge.optim.step.bit_layout import fields_of
from narrowgauge.optim.step.codes import encode, visible_value, write_weight
from narrowgauge.optim.step.parameter_formats import is_vector
from narrowgauge.optim.step.state import LocalState
from narrowgauge.optim.step.state_chunks import chunks_of
from narrowgauge.spec.storages import VISIBLE

LOW_BITS = ("zero", "random")
"""The values of the option ``low_bits``."""


def lacks_low_bits(parameter: Tensor, value: Tensor) -> bool:
    """Return whether all values lie on the grid of a narrow parameter: their low bits are unknown.

    The ranks that share the parameter ask together.
    """
    if parameter.dtype is torch.float32:
        return False
    local = local_of(value)
    is_off_grid = (local.to(parameter.dtype).to(local.dtype) != local).any()
    return not add_up(is_off_grid.int(), split_groups(parameter), "max").item()


def random_of(owner: Tensor, seed: int, name: str) -> Tensor:
    """Return 32 random bits, int32, for each element of this rank's part of a parameter."""
    # Where each element lies in the whole tensor, modulo 2^32.
    index = torch.zeros(local_of(owner).shape, dtype=torch.int32, device=owner.device)
    stride = 1
    for dim in reversed(range(owner.ndim)):
        along = place_along(owner, dim) * signed(stride, 32)
        index += along.view(-1, *[1] * (owner.ndim - 1 - dim))
        stride *= owner.shape[dim]
    for (part,) in flat_chunks(index):
        part.copy_(random_bits(part, named_seed(seed, name)))
    return index


def random_offset(visible: str, bits: Tensor, random: Tensor) -> Tensor:
    """Return a random distance from visible weights within their cells, in :func:`visible_bits`.

    ``random`` are 32 bits.

    It is uniform and odd, so never between two visible weights. It is 0 for zeros, infinities and
    NaN.
    """
    magnitude = bits & MAGNITUDE
    infinity = EXPONENT if visible == "bfloat16" else 31 << 23
    offset = (random >> (32 - VISIBLE[visible][1])) | 1
    return offset.masked_fill((magnitude == 0) | (magnitude >= infinity), 0)


def fill_state(state: LocalState, seed: int, name: str) -> None:
    """Fill the low bits of a new state of the parameter with a name, within the cells of its weights."""
    storage = state.storage
    if storage.visible == "float32" or not storage.extra_fields:
        return
    keeps_ones = is_vector(state.owner)
    for chunk in chunks_of(state, random_of(state.owner, seed, name)):
        bits = chunk.lane().visible
        weight = visible_value(storage.visible, bits)
        offset = random_offset(storage.visible, bits, chunk.arguments[0])
        if keeps_ones:
            offset = offset.masked_fill(weight.abs() == 1, 0)
        value = visible_value(storage.visible, bits + offset)
        if storage.weight.parts == 2:
            # Toward zero, since a low part of half an ulp would be a tie.
            field = fields_of(storage)["weight"]
            chunk.store({field.name: encode(field, value - weight, 0)})
        else:
            chunk.store(write_weight(storage, value, 0)[1])
