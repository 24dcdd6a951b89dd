"""The products of a linear layer by hand, in float64: casts written from the formats' standards.

Nothing here is imported from the package. ``test_zoo`` asks it about every layer of its models.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

E4M3 = "float8_e4m3fn"
LARGEST = {E4M3: 448.0, "float4_e2m1fn": 6.0, "int8": 127.0}
E2M1 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
FORWARD = {
    "bfloat16": None,
    "float8-row": (E4M3, "row", "row", "float32"),
    "float8-tensor": (E4M3, "tensor", "tensor", "float32"),
    "float8-block": (E4M3, "1x128", "128x128", "power"),
    "mxfp8": (E4M3, "1x32", "1x32", "power"),
    "mxfp4": ("float4_e2m1fn", "1x32", "1x32", "floor"),
    "nvfp4": ("float4_e2m1fn", "1x16", "16x16", "two levels"),
    "int8-row": ("int8", "row", "row", "float32"),
}
"""Format, groups of the input and of the weight, and scales, of the forward product."""
DETERMINISTIC = ("bfloat16", "float8-row", "float8-tensor", "float8-block", "mxfp8")


def rounded(x: Tensor, name: str) -> Tensor:
    x = x.clamp(-LARGEST[name], LARGEST[name])
    if name == "int8":
        return torch.round(x)
    if name == E4M3:
        return x.float().to(torch.float8_e4m3fn).double()
    size = x.abs()
    middles = (E2M1[1:] + E2M1[:-1]) / 2
    place = torch.bucketize(size, middles)  # a tie goes to the lower value
    is_tie = (place < 7) & (size == middles[place.clamp(max=6)])
    place = torch.where(is_tie & (place % 2 == 1), place + 1, place)
    return torch.sign(x) * E2M1[place]


def amax_of(x: Tensor, groups: str) -> Tensor:
    """Return for each value of ``[side, contraction]`` the largest magnitude of its group."""
    if groups == "tensor":
        return x.abs().amax().expand_as(x)
    if groups == "row":
        return x.abs().amax(1, keepdim=True).expand_as(x)
    rows, terms = map(int, groups.split("x"))
    full = F.pad(x, (0, -x.shape[1] % terms, 0, -x.shape[0] % rows)).abs()
    blocks = full.view(full.shape[0] // rows, rows, full.shape[1] // terms, terms)
    largest = blocks.amax((1, 3), keepdim=True).expand_as(blocks).reshape(full.shape)
    return largest[: x.shape[0], : x.shape[1]]


def cast(x: Tensor, name: str, groups: str, scales: str) -> Tensor:
    """Return ``[side, contraction]`` as codes and scales represent it."""
    x = x.double()
    amax = amax_of(x, groups).clamp_min(2.0**-100)
    if scales == "float32":
        scale = (amax.float() / LARGEST[name]).double()
    elif scales == "power":
        scale = 2.0 ** torch.ceil(torch.log2(amax / LARGEST[name]))
    elif scales == "floor":
        scale = 2.0 ** (torch.floor(torch.log2(amax)) - 2)
    else:
        outer = (x.abs().amax().clamp_min(2.0**-100).float() / (448 * 6)).double()
        inner = (amax / 6 / outer).clamp(max=448).float().to(torch.float8_e4m3fn).double()
        scale = inner.clamp_min(2.0**-9) * outer
    return rounded(x / scale, name) * scale


def product(compute: str, lhs: Tensor, rhs: Tensor, is_weight: bool = True) -> Tensor:
    """Return the product of ``[rows, contraction]`` and ``[columns, contraction]``."""
    row = FORWARD[compute]
    if row is None:
        return lhs.bfloat16().double() @ rhs.bfloat16().double().t()
    name, left, right, scales = row
    return cast(lhs, name, left, scales) @ cast(rhs, name, right if is_weight else left, scales).t()
