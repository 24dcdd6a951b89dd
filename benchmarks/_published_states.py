"""AdamW that rounds its weights and states in float32: as others publish their 8-bit states, or as a
row's options say.

=============  ===========================================================  =====================================
row            moments                                                      weight beside the bfloat16 one
=============  ===========================================================  =====================================
fp8-lm         e4m3 and float16, a power of two per tensor                  float16, a power of two per tensor
coat           e4m3 twice, in groups of 128 whose range is expanded         float32
flashoptim     companded int8 and uint8 of the root, in groups of 32        8 bits of half a spacing
=============  ===========================================================  =====================================

Every scale comes from the largest of the *new* values. Groups are consecutive elements of the
flattened tensor. A formula here gives the float32 values that its codes stand for. Nothing of
anybody's code is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

Rounding = Callable[[Tensor], Tensor]
E4M3 = torch.float8_e4m3fn


class PublishedStates(NamedTuple):
    """One way to store a weight and its moments.

    Args:
        weight: returns the weight that the model sees, and the one that is stored.
        exp_avg, exp_avg_sq: return the moments that are stored.
        bytes_per_param: of weight, gradient and everything else.
        grad: returns the gradient that is stored.
    """

    weight: Callable[[Tensor], tuple[Tensor, Tensor]]
    exp_avg: Rounding
    exp_avg_sq: Rounding
    bytes_per_param: float
    grad: Rounding


# ── a scale for a tensor, or for a row ────────────────────────────────────────────────────────────


def by_power_of_two(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to the nearest even, with the largest power of two by which no value overflows.

    Source: MS-AMP at 0367bdc, ``common/tensor/meta.py``, ``compute_scaling_factor`` with a margin
    of 0.
    """
    amax = x.abs().amax().double().clamp(min=1e-300)
    exponent = torch.floor(torch.log2(torch.finfo(dtype).max / amax))
    scale = torch.exp2(exponent.clamp(-126, 126)).float()
    return (x * scale).to(dtype).float() * (1 / scale)


def by_row(x: Tensor) -> Tensor:
    """Round to e4m3, with a power of two for each row by which its largest is at most 256."""
    amax = x.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(amax)) - 8)
    return (x / scale).to(E4M3).float() * scale


def by_three(x: Tensor) -> Tensor:
    """Add three codes by row, each of what is left by those before it."""
    first = by_row(x)
    second = by_row(x - first)
    third = by_row(x - first - second)
    return first + (second + third)


# ── groups of neighbours in the flattened tensor ──────────────────────────────────────────────────


def grouped(x: Tensor, size: int, rounding: Rounding) -> Tensor:
    """Round groups of consecutive elements as rows, the last one filled up with zeros."""
    flat = x.flatten()
    groups = torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)
    return rounding(groups).flatten()[: len(flat)].view(x.shape)


def expanded(groups: Tensor) -> Tensor:
    """Round by COAT's dynamic range expansion: ``sign(x) |x / c|^k`` in e4m3, with scale, ``k`` and
    ``c`` of each group in float32.

    ``c`` is the geometric mean of the group's largest and smallest magnitude that is not zero, and
    ``k``, a multiple of a sixteenth, widens (or narrows) their ratio to half the square of 448,
    about what e4m3 spans. Where all magnitudes of a group are equal there is nothing to widen, and
    ``k`` is 1 here; the formula would divide by zero.

    Source: COAT (2410.19313); its release at 80ec99f, ``fp8_adamw_expand_cuda_kernel.cu`` and
    ``_fp8_quantization_config.py``.
    """
    top = torch.finfo(E4M3).max
    magnitude = groups.abs()
    highest = magnitude.amax(1, keepdim=True)
    nonzero = torch.where(magnitude > 0, magnitude, math.inf)
    lowest = nonzero.amin(1, keepdim=True).clamp(max=highest) + 1e-30
    highest = highest + 1e-30
    ratio = highest / lowest
    centre = highest.sqrt() * lowest.sqrt()
    power = torch.floor(math.log2(top * top / 2) / torch.log2(ratio) * 16) / 16
    power = torch.where(ratio > 1, power, 1.0)
    scale = (highest / centre) ** power / top
    codes = (groups.sign() * (magnitude / centre) ** power / scale).clamp(-top, top).to(E4M3)
    values = codes.float() * scale
    return values.sign() * values.abs() ** (1 / power) * centre


# ── FlashOptim ────────────────────────────────────────────────────────────────────────────────────


def split_weight(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Return a weight as bfloat16, and with an int8 tail in 127ths of half the bfloat16's spacing."""
    seen = weight.bfloat16()
    _, exponent = torch.frexp(seen.double())  # |x| = f · 2^exponent with f in [½, 1)
    binade = torch.where(seen == 0, -126, exponent - 1).clamp(min=-126)
    half_spacing = torch.ldexp(torch.ones_like(weight, dtype=torch.float64), binade - 7 - 1)
    share = ((weight - seen.float()).double() / half_spacing).clamp(-1, 1)
    tail = (share.sign() * (share.abs() * 127 + 0.5).floor()).float()
    return seen, seen.float() + ((tail / 127).double() * half_spacing).float()


def softsign(groups: Tensor) -> Tensor:
    """Round to int8 codes, companded by a softsign, with a float16 scale for each group.

    The codes are relative to the scale before it is rounded to float16; that is as published.
    """
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-12)
    x = groups / scale
    companded = (127 * (2 * x / (1 + x.abs())) + 0.5).floor() / 127
    return companded / (2 - companded.abs()) * scale.half().float()


def root(groups: Tensor) -> Tensor:
    """Round to uint8 codes of square roots, with a float16 scale for each group."""
    roots = groups.sqrt()
    scale = roots.amax(1, keepdim=True).clamp(min=1e-12)
    codes = (255 * roots / scale + 0.5).floor()
    return (codes / 255 * scale.half().float()).square()


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────


def same(x: Tensor) -> Tensor:
    return x


def alone(x: Tensor, rounding: Rounding = same) -> tuple[Tensor, Tensor]:
    """Return a weight of which only a rounded value is stored, and which the model sees."""
    stored = rounding(x)
    return stored, stored


HALF = partial(by_power_of_two, dtype=torch.float16)
EXPANDED = partial(grouped, size=128, rounding=expanded)
WIDE = PublishedStates(alone, same, same, 16, same)
FORMULAS = {
    # Peng et al. 2023 (2310.18313); MS-AMP at 4480ffa, optim/adamw.cu
    "published/fp8-lm": PublishedStates(
        partial(alone, rounding=HALF), partial(by_power_of_two, dtype=E4M3), HALF, 9, same
    ),
    # Xi et al. 2025 (2410.19313); its release at 80ec99f
    "published/coat": PublishedStates(alone, EXPANDED, EXPANDED, 10 + 24 / 128, same),
    # FlashOptim (2602.23349)
    "published/flashoptim": PublishedStates(
        split_weight,
        partial(grouped, size=32, rounding=softsign),
        partial(grouped, size=32, rounding=root),
        7 + 4 / 32,
        same,
    ),
    # Rows that must lose: the weight itself in 8 bits, as in FP8-LM's ablation (2310.18313, table 6,
    # #3), and Collage's parts (2405.03637) in 8 bits, for which it gives no formula. The arithmetic
    # is float32's.
    "nearest8": PublishedStates(partial(alone, rounding=by_row), same, same, 11, same),
    "float8/collage-plus": PublishedStates(lambda x: (x, by_three(x)), by_row, by_three, 11, same),
}


# ── roundings that a row names ────────────────────────────────────────────────────────────────────


def linear(x: Tensor) -> Tensor:
    """Round to multiples of a 255th of the largest."""
    step = x.abs().max().clamp(min=1e-30) / 255
    return (x / step).round() * step


def scaled(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Round to nearest, with a scale that takes the largest to the format's largest."""
    scale = x.abs().amax().clamp(min=1e-30) / torch.finfo(dtype).max
    return (x / scale).to(dtype).float() * scale


ROUNDINGS: dict[str, Rounding] = {
    "linear": linear,
    "e5m2": lambda x: x.to(torch.float8_e5m2).float(),
    "e4m3-scaled": partial(scaled, dtype=E4M3),
    "e5m2-scaled": partial(scaled, dtype=torch.float8_e5m2),
}


def rounded_states(options: dict[str, str]) -> PublishedStates:
    """Return float32 states, of which some are rounded: ``{"exp_avg_sq": "e5m2"}``."""
    roundings: dict[str, Any] = {name: ROUNDINGS[how] for name, how in options.items()}
    if "weight" in roundings:
        roundings["weight"] = partial(alone, rounding=roundings["weight"])
    return WIDE._replace(**roundings)


class RoundedAdamW(torch.optim.Optimizer):
    """torch's AdamW over float32 masters. Those of matrices, and their moments, are rounded after
    each step.

    A weight moves by moments that are not rounded yet. Vectors stay in float32.
    """

    def __init__(self, groups: Any, row: PublishedStates, **options: Any) -> None:
        super().__init__(groups, options)
        self.row = row
        self.masters: dict[Tensor, nn.Parameter] = {}
        inner = []
        for group in self.param_groups:
            for p in group["params"]:
                stored = self.row_of(p).weight(p.detach().float())[1]
                self.masters[p] = nn.Parameter(stored.clone())
            inner.append({**group, "params": [self.masters[p] for p in group["params"]]})
        self.inner = torch.optim.AdamW(inner)

    def row_of(self, p: Tensor) -> PublishedStates:
        return self.row if p.ndim > 1 else WIDE

    def stored(self, p: Tensor) -> Tensor:
        """Return the weight that is stored, float32."""
        return self.masters[p].detach()

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group, inner in zip(self.param_groups, self.inner.param_groups, strict=True):
            inner["lr"] = group["lr"]
        for p, master in self.masters.items():
            master.grad = self.row_of(p).grad(p.grad.float())
        self.inner.step()
        for p, master in self.masters.items():
            row = self.row_of(p)
            state = self.inner.state[master]
            seen, stored = row.weight(master)
            p.copy_(seen)
            master.copy_(stored)
            state["exp_avg"].copy_(row.exp_avg(state["exp_avg"]))
            state["exp_avg_sq"].copy_(row.exp_avg_sq(state["exp_avg_sq"]))
