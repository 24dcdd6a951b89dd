"""States of matrix rules that have shapes of their own: bases, and moments of low rank.

Each is stored in the code of a moment, which has one part. If the code is scaled by row, the largest
magnitude of each row is its bound.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import Addend, bits_of, quiet, random_bits
from narrowgauge.optim.codes import MANTISSA, decode, encode, multipliers
from narrowgauge.optim.planes import INTEGER, dropped_bits
from narrowgauge.spec.storages import BFLOAT16, FLOAT32, Code, width_of


def alone_dtype(code: Code) -> torch.dtype:
    """Return PyTorch's dtype with the same bits, if there is one."""
    if code == FLOAT32:
        return torch.float32
    if code == BFLOAT16:
        return torch.bfloat16
    return INTEGER[width_of(((code.name, code.bits),))]


def saved_as(name: str, code: Code) -> str:
    """Return the name of a separate state in a checkpoint. Integers are named ``…_codes``."""
    return name if alone_dtype(code).is_floating_point else f"{name}_codes"


def alone_value(code: Code, tensor: Tensor, bound: Tensor | None = None) -> Tensor:
    """Return the float32 values.

    For a float32 state this is its own memory, not a copy. A scaled code needs its bound.
    """
    back = None
    if bound is not None:
        back = multipliers(bound)[1]
    return decode(code, tensor.view(INTEGER[tensor.dtype.itemsize * 8]).to(torch.int32), 0, back)


def encode_alone(code: Code, values: Tensor, seed: Tensor, bound: Tensor | None = None) -> Tensor:
    """Encode values as a tensor of :func:`alone_dtype`.

    A scaled code needs the ``bound`` of each row, ``[…, rows, 1]``.

    A stochastic code rounds under ``seed`` (0-d int32). The random bits hash a value's mantissa and
    its position in its matrix.
    """
    value = quiet(values.float().contiguous())
    dropped = dropped_bits(code)
    addend: Addend = None
    if code.rounding == "stochastic":
        rows = math.prod(value.shape[-2:-1])
        columns = (1, *value.shape)[-1]
        row = torch.arange(rows, dtype=torch.int32, device=value.device)
        column = torch.arange(columns, dtype=torch.int32, device=value.device)
        # Modulo 2^32: the numbers of a matrix of more elements begin again.
        place = (row[:, None] * columns + column).view(value.shape[-2:])
        random = random_bits(place ^ (bits_of(value) & MANTISSA), seed)
        addend = (random >> (32 - dropped)) & ((1 << dropped) - 1)
    dtype = alone_dtype(code)
    into = None
    if bound is not None:
        into = multipliers(bound)[0]
    return encode(code, value, addend, 0, into).to(INTEGER[8 * dtype.itemsize]).view(dtype)
