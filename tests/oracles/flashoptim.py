"""FlashOptim's AdamW by its published formulas, in float32: the rival at seven bytes, which refuses machines without CUDA.

A weight is a bfloat16 and an int8 tail, the rest in 127ths of half the bfloat16's spacing. Moments lie in groups of 32
elements, consecutive in the flattened tensor, with one float16 scale per group and moment: the first as int8 companded
by a softsign, the second as uint8 of its square root. Everything is rounded to the nearest. A checkpoint by default
holds the moments as bfloat16, and what is loaded is quantized anew.

Source: FlashOptim (arXiv 2602.23349) and its released optimizer; nothing of the code is taken.
"""

from __future__ import annotations

import torch
from torch import Tensor

GROUP = 32
TAIL_STEPS = 127
FIRST_STEPS = 127
SECOND_STEPS = 255
SMALLEST_SCALE = 1e-12


def half_spacing(seen: Tensor) -> Tensor:
    """Half of the distance between bfloat16 values in the binade of each: a power of two, float64."""
    _, exponent = torch.frexp(seen.double())  # |x| = f · 2^exponent with f in [½, 1)
    binade = torch.where(seen == 0, -126, exponent - 1).clamp(min=-126)
    return torch.ldexp(torch.ones_like(seen, dtype=torch.float64), binade - 7 - 1)


def split_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """A float32 weight as bfloat16 and int8 tail."""
    seen = weight.to(torch.bfloat16)
    share = ((weight - seen.float()).double() / half_spacing(seen)).clamp(-1, 1)
    return seen, (share.sign() * (share.abs() * TAIL_STEPS + 0.5).floor()).to(torch.int8)


def joined_weight(seen: Tensor, tail: Tensor) -> Tensor:
    """The float32 weight that bfloat16 and tail stand for."""
    rest = (tail.float() / TAIL_STEPS).double() * half_spacing(seen)
    return seen.float() + rest.float()


def grouped(x: Tensor) -> Tensor:
    """Groups of consecutive elements as rows, the last one filled up with zeros."""
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % GROUP)).view(-1, GROUP)


def encode_first(exp_avg: Tensor) -> tuple[Tensor, Tensor]:
    """First moments as int8 codes in groups, and the float16 scale of each group.

    The codes are relative to the scale before it is rounded to float16; that is as published.
    """
    groups = grouped(exp_avg)
    scale = groups.abs().amax(1, keepdim=True).clamp(min=SMALLEST_SCALE)
    x = groups / scale
    companded = 2 * x / (1 + x.abs())
    return (FIRST_STEPS * companded + 0.5).floor().to(torch.int8), scale.half()


def decode_first(codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    """The first moments that codes and scales stand for."""
    companded = codes.float() / FIRST_STEPS
    return ungrouped(companded / (2 - companded.abs()) * scales.float(), shape)


def encode_second(exp_avg_sq: Tensor) -> tuple[Tensor, Tensor]:
    """Second moments as uint8 codes of their square roots in groups, and the float16 scale of each group."""
    roots = grouped(exp_avg_sq).sqrt()
    scale = roots.amax(1, keepdim=True).clamp(min=SMALLEST_SCALE)
    return (SECOND_STEPS * roots / scale + 0.5).floor().to(torch.uint8), scale.half()


def decode_second(codes: Tensor, scales: Tensor, shape: torch.Size) -> Tensor:
    """The second moments that codes and scales stand for."""
    return ungrouped((codes.float() / SECOND_STEPS * scales.float()).square(), shape)


def ungrouped(groups: Tensor, shape: torch.Size) -> Tensor:
    """Undoes :func:`grouped`."""
    return groups.flatten()[: shape.numel()].view(shape)
