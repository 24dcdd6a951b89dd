"""Optimizer states in 8 bits as others publish them, by their formulas, in float32: rows of
benchmarks to stand beside ours.

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
from torch import Tensor

Rounding = Callable[[Tensor], Tensor]
E4M3 = torch.float8_e4m3fn


class PublishedStates(NamedTuple):
    """One published way to store a weight and its moments.

    Args:
        weight: returns the bfloat16 weight that the model sees, and the one that is stored.
        exp_avg, exp_avg_sq: return the moments that are stored.
        bytes_per_param: of weight, bfloat16 gradient and everything else.
    """

    weight: Callable[[Tensor], tuple[Tensor, Tensor]]
    exp_avg: Rounding
    exp_avg_sq: Rounding
    bytes_per_param: float


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


def master(x: Tensor) -> tuple[Tensor, Tensor]:
    return x.bfloat16(), x


def narrow(x: Tensor, rounding: Rounding) -> tuple[Tensor, Tensor]:
    """Return a weight of which only a rounded value is stored, and which the model sees."""
    stored = rounding(x)
    return stored.bfloat16(), stored


def same(x: Tensor) -> Tensor:
    return x


HALF = partial(by_power_of_two, dtype=torch.float16)
EXPANDED = partial(grouped, size=128, rounding=expanded)
PUBLISHED = {
    # Peng et al. 2023 (2310.18313); MS-AMP at 4480ffa, optim/adamw.cu
    "fp8-lm": PublishedStates(
        partial(narrow, rounding=HALF), partial(by_power_of_two, dtype=E4M3), HALF, 9
    ),
    # Xi et al. 2025 (2410.19313); its release at 80ec99f
    "coat": PublishedStates(master, EXPANDED, EXPANDED, 10 + 24 / 128),
    # FlashOptim (2602.23349)
    "flashoptim": PublishedStates(
        split_weight,
        partial(grouped, size=32, rounding=softsign),
        partial(grouped, size=32, rounding=root),
        7 + 4 / 32,
    ),
}
VECTORS = PublishedStates(master, same, same, 16)


# Rows that must lose: the weight itself in 8 bits, as in FP8-LM's ablation (2310.18313, table 6,
# #3), and Collage's parts (2405.03637) in 8 bits, for which it gives no formula. The arithmetic is
# float32's.
def seen_in_eight_bits(x: Tensor) -> tuple[Tensor, Tensor]:
    seen = by_row(x).bfloat16()
    return seen, seen.float()


CONTROLS = {
    "nearest8": PublishedStates(seen_in_eight_bits, same, same, 11),
    "float8/collage-plus": PublishedStates(
        lambda x: (x.bfloat16(), by_three(x)), by_row, by_three, 11
    ),
}


class PublishedAdamW(torch.optim.Optimizer):
    """AdamW over bfloat16 weights, of which matrices are stored as a row says.

    A weight moves by moments that are not rounded yet. Vectors have float32 masters and moments.
    """

    def __init__(self, groups: Any, row: PublishedStates, **options: Any) -> None:
        super().__init__(groups, options)
        self.row = row

    def stored(self, p: Tensor) -> Tensor:
        """Return the weight that is stored, float32."""
        return self.stored_values(p)["weight"]

    def stored_values(self, p: Tensor) -> dict[str, Any]:
        """Return what is stored of a weight and its moments."""
        state: dict[str, Any] = self.state[p]
        if not state:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            weight = self.row_of(p).weight(p.detach().float())[1]
            state |= {"step": 0, "weight": weight, "exp_avg": zeros, "exp_avg_sq": zeros}
        return state

    def row_of(self, p: Tensor) -> PublishedStates:
        return self.row if p.ndim > 1 else VECTORS

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.stored_values(p)
                row = self.row_of(p)
                weight, first, second = stepped(state, p.grad.float(), group)
                seen, state["weight"] = row.weight(weight)
                state["exp_avg"] = row.exp_avg(first)
                state["exp_avg_sq"] = row.exp_avg_sq(second)
                p.copy_(seen)


def stepped(
    state: dict[str, Any], g: Tensor, group: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight and its moments after a step of AdamW."""
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    state["step"] += 1
    first = beta1 * state["exp_avg"] + (1 - beta1) * g
    second = beta2 * state["exp_avg_sq"] + (1 - beta2) * g * g
    root = (second / (1 - beta2 ** state["step"])).sqrt() + group["eps"]
    weight = state["weight"] * (1 - lr * group["weight_decay"])
    return weight - lr * (first / (1 - beta1 ** state["step"])) / root, first, second
