"""Values on which two computations of one function differ first, if they differ.

Compiled code is checked on them.

A compiler may flush subnormals, drop a rounding, fuse a multiplication with an addition, divide
approximately or reorder a comparison. On most values this changes at most the last bit. These
values expose it: zeros of both signs, subnormals, ties between two values of a format, the ends of
its range, infinities, NaN, and values of every magnitude.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
"""Integers with the bits of a value, by its bytes."""
# Ties between two values of a lower-precision format, or its largest value.
_TIES = (
    1.0,
    1.5,
    3.0,
    *(1 + 2.0**-bits for bits in (1, 2, 3, 4, 7, 8, 9, 10, 11, 12, 16, 23)),
    448.0,
    57344.0,
    65504.0,
)


def draw(dtype: torch.dtype, shape: Sequence[int], *, edges: bool, seed: int = 0) -> Tensor:
    """Draw normal values of a float dtype, or with ``edges`` finite edge values.

    An int32 holds two bfloat16: positive normal values, since a second moment is not negative, or
    edge values with infinities and NaN. Draw random bits for other dtypes.
    """
    if dtype is torch.int32:
        pairs = (*shape[:-1], 2 * shape[-1])
        if not edges:
            return normal_values(torch.bfloat16, pairs, seed).abs().view(torch.int32)
        return with_nan(edge_values(torch.bfloat16, pairs, seed=seed), seed).view(torch.int32)
    if dtype.is_floating_point and edges:
        return edge_values(dtype, shape, seed=seed, finite=True)
    if dtype.is_floating_point:
        return normal_values(dtype, shape, seed)
    generator = torch.Generator().manual_seed(seed)
    if dtype is torch.bool:
        return torch.randint(2, tuple(shape), generator=generator, dtype=torch.uint8).bool()
    ends = torch.iinfo(dtype)
    return torch.randint(ends.min, ends.max, tuple(shape), generator=generator, dtype=dtype)


def normal_values(dtype: torch.dtype, shape: Sequence[int], seed: int = 0) -> Tensor:
    """Draw normal values, float32 rounded to a dtype."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, dtype=torch.float32, generator=generator).to(dtype)


def edge_values(
    dtype: torch.dtype, shape: Sequence[int], *, seed: int = 0, finite: bool = False
) -> Tensor:
    """Draw one third edge values of both signs, one third values of every magnitude, one third
    normal ones. No NaN.

    ``seed`` chooses among them. ``finite`` omits infinities.
    """
    generator = torch.Generator().manual_seed(seed)
    info = torch.finfo(dtype)
    tiny = info.tiny
    eps = info.eps
    ends = [
        0.0,
        tiny * eps,
        tiny * eps * 3,
        tiny * (1 - eps),
        tiny,
        tiny * 2,
        1 - eps / 2,
        info.max,
        info.max / 2,
    ]
    listed = torch.tensor([*ends, *_TIES, *([] if finite else [float("inf")])], dtype=torch.float64)
    listed = torch.cat([listed, -listed]).clamp(
        *((info.min, info.max) if finite else (None, float("inf")))
    )
    edges = listed[torch.randint(len(listed), shape, generator=generator)]
    normal = torch.randn(shape, dtype=torch.float64, generator=generator)
    low, high = torch.tensor([tiny * eps, info.max], dtype=torch.float64).log2().floor().tolist()
    exponents = torch.randint(int(low), int(high), shape, generator=generator)
    kinds = torch.randint(3, shape, generator=generator)
    mantissas = 1 + torch.rand(shape, dtype=torch.float64, generator=generator)
    spread = torch.ldexp(mantissas, exponents) * normal.sign()
    chosen = torch.where(kinds == 0, edges, torch.where(kinds == 1, spread, normal))
    return chosen.float().to(dtype)


def with_nan(values: Tensor, seed: int = 0) -> Tensor:
    """Copy 16- or 32-bit floats and make every seventeenth, counted from ``seed``, a NaN.

    NaNs have both signs and several payloads: the quiet one, the smallest (signaling), and all
    ones.
    """
    kind = INTEGERS[values.dtype.itemsize]
    width = 8 * values.dtype.itemsize
    infinity = int(torch.tensor(torch.inf, dtype=values.dtype).view(kind))
    patterns = [infinity | (infinity >> 1), infinity + 1, (1 << (width - 1)) - 1]
    positive = torch.tensor(patterns, dtype=torch.int64)
    signed = torch.cat([positive, positive - (1 << (width - 1))])
    place = torch.arange(values.numel(), dtype=torch.int64).view(values.shape) + seed
    integers = values.view(kind)
    chosen = signed[place // 17 % len(signed)].to(integers.device)
    result = torch.where((place % 17 == 16).to(integers.device), chosen, integers)
    return result.to(integers.dtype).view(values.dtype)


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Return whether two tensors have the same bits. Any NaN of a float tensor equals any other."""
    if a.dtype is not b.dtype or a.shape != b.shape:
        return False
    kind = INTEGERS[a.dtype.itemsize]
    same = a.view(kind) == b.view(kind)
    if a.is_floating_point():
        same |= a.isnan() & b.isnan()
    return bool(same.all())
