"""Optimizer states in 8 bits as others publish them, by their formulas, in float32: rows of
benchmarks to stand beside ours.

=============  ===========================================================  =====================================
row            moments                                                      weight beside the bfloat16 one
=============  ===========================================================  =====================================
fp8-lm         e4m3 and float16, a power of two per tensor                  float16, a power of two per tensor
coat           e4m3 twice, in groups of 128 whose range is expanded         float32
flashoptim     companded int8 and uint8 of the root, in groups of 32        8 bits of half a spacing
bitsandbytes   the dynamic map of 256 values, in blocks of 256              float32
=============  ===========================================================  =====================================

Every scale comes from the largest of the *new* values, so a step needs two passes: one to find it,
one to write. Groups are consecutive elements of the flattened tensor. Formulas only; nothing of
anybody's code is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import round_stochastic
from narrowgauge.spec.formats import get_format

Parts = tuple[Tensor, ...]


class Kept(NamedTuple):
    """How one tensor is kept: ``encode`` gives the tensors that are held, ``decode`` the float32
    values they stand for.
    """

    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts, torch.Size], Tensor]


@dataclass(frozen=True)
class PublishedStates:
    """One published way to keep a weight and its moments.

    Tensors of fewer than ``least`` values keep float32 moments.

    The first tensor held of a weight is the bfloat16 one that the model sees.
    """

    weight: Kept
    exp_avg: Kept
    exp_avg_sq: Kept
    least: int = 0


# ── one scale for a tensor ────────────────────────────────────────────────────────────────────────


def by_power_of_two(x: Tensor, dtype: torch.dtype) -> Parts:
    """Codes to the nearest even, and the largest power of two by which no value overflows; of
    zeros, 1.

    Source: MS-AMP at 0367bdc, ``common/tensor/meta.py``, ``compute_scaling_factor`` with a margin
    of 0.
    """
    amax = x.abs().amax().double()
    if amax > 0:
        exponent = torch.floor(torch.log2(torch.finfo(dtype).max / amax))
    else:
        exponent = torch.zeros_like(amax)
    scale = torch.exp2(exponent.clamp(-126, 126)).float()
    return (x * scale).to(dtype), 1 / scale


def times_scale(parts: Parts, shape: torch.Size) -> Tensor:
    return (parts[0].float() * parts[1]).view(shape)


def by_row(x: Tensor, draws: Callable[[Tensor], Tensor] | None = None) -> Parts:
    """Codes in e4m3 and a power of two for each row, by which its largest is at most 256. With
    ``draws`` of [0, 1), round stochastically; else to the nearest even.
    """
    amax = x.abs().amax(-1, keepdim=True).clamp(min=2.0**-100)
    scale = torch.exp2(torch.ceil(torch.log2(amax)) - 8)
    scaled = x / scale
    if draws is None:
        return scaled.to(torch.float8_e4m3fn), scale
    return round_stochastic(scaled, get_format("float8_e4m3fn"), draws(scaled)).to(
        torch.float8_e4m3fn
    ), scale


def encode_weight_by_row(x: Tensor, **options: Any) -> Parts:
    """A weight of 8 bits alone: the bfloat16 that holds it, and the scale of each row."""
    codes, scale = by_row(x, **options)
    return (codes.float() * scale).bfloat16(), scale


def encode_triple(x: Tensor) -> Parts:
    """Three codes by row, each of what is left by those before it."""
    parts: list[Tensor] = []
    rest = x
    for _ in range(3):
        code = by_row(rest)
        rest = rest - times_scale(code, x.shape)
        parts += code
    return tuple(parts)


def decode_triple(parts: Parts, shape: torch.Size) -> Tensor:
    first, second, third = (times_scale(parts[k : k + 2], shape) for k in (0, 2, 4))
    return first + (second + third)


def encode_half_master(x: Tensor) -> Parts:
    """A float16 master with a power of two for the tensor, and the bfloat16 of what it stands for."""
    master = by_power_of_two(x, torch.float16)
    return times_scale(master, x.shape).bfloat16(), *master


# ── groups of neighbours in the flattened tensor ──────────────────────────────────────────────────


def grouped(x: Tensor, size: int) -> Tensor:
    """Groups of consecutive elements as rows, the last one filled up with zeros."""
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def ungrouped(groups: Tensor, shape: torch.Size) -> Tensor:
    return groups.flatten()[: shape.numel()].view(shape)


def encode_expanded(x: Tensor) -> Parts:
    """COAT's dynamic range expansion: ``sign(x) |x / c|^k`` in e4m3, with scale, ``k`` and ``c`` of
    each group in float32.

    ``c`` is the geometric mean of the group's largest and smallest magnitude that is not zero, and
    ``k``, a multiple of a sixteenth, widens (or narrows) their ratio to half the square of 448,
    about what e4m3 spans. Where all magnitudes of a group are equal there is nothing to widen, and
    ``k`` is 1 here; the formula would divide by zero.

    Source: COAT (2410.19313); its release at 80ec99f, ``fp8_adamw_expand_cuda_kernel.cu`` and
    ``_fp8_quantization_config.py``.
    """
    groups = grouped(x, 128)
    top = torch.finfo(torch.float8_e4m3fn).max
    magnitude = groups.abs()
    highest = magnitude.amax(1, keepdim=True)
    lowest = (
        torch.where(magnitude > 0, magnitude, math.inf).amin(1, keepdim=True).clamp(max=highest)
    )
    highest = highest + 1e-30
    lowest = lowest + 1e-30
    ratio = highest / lowest
    centre = highest.sqrt() * lowest.sqrt()
    power = torch.where(
        ratio > 1, torch.floor(math.log2(top * top / 2) / torch.log2(ratio) * 16) / 16, 1.0
    )
    scale = (highest / centre) ** power / top
    codes = (
        (groups.sign() * (magnitude / centre) ** power / scale)
        .clamp(-top, top)
        .to(torch.float8_e4m3fn)
    )
    return codes.flatten()[: x.numel()], scale, power, centre


def decode_expanded(parts: Parts, shape: torch.Size) -> Tensor:
    codes, scale, power, centre = parts
    values = grouped(codes.float(), 128) * scale
    return ungrouped(values.sign() * values.abs() ** (1 / power) * centre, shape)


@lru_cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of the dynamic tree code, ascending, float32: 0, 1, and seven decades below 1.

    A decade ``10^-d`` holds the middles of equal pieces of ``[0.1, 1] · 10^-d``: as many as bits
    are left when ``d`` of seven tell the decade, so that each decade has half the values of the one
    above. Without a sign there is one bit more.

    Source: Dettmers et al. 2022 (2110.02861), after Dettmers 2016 (1511.04561).
    """
    values = [0.0, 1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (6 - decade + (not signed)) + 1, dtype=torch.float32)
        middles = (10.0**-decade * ((ends[:-1] + ends[1:]) / 2)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def encode_mapped(x: Tensor, *, signed: bool) -> Parts:
    """For each value, divided by its block's largest, the place of the nearest in the map; and that
    largest, float32.

    A value in the middle of two takes the lower. Source: bitsandbytes 0.50.2,
    ``backends/default/ops.py``.
    """
    blocks = grouped(x, 256)
    values = dynamic_map(signed)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
    places = torch.bucketize((blocks * (1 / scale)).clamp(-1, 1), (values[:-1] + values[1:]) / 2)
    return places.to(torch.uint8).flatten()[: x.numel()], scale


def decode_mapped(parts: Parts, shape: torch.Size, *, signed: bool) -> Tensor:
    codes, scale = parts
    return ungrouped(grouped(dynamic_map(signed)[codes.long()], 256) * scale, shape)


# ── FlashOptim ────────────────────────────────────────────────────────────────────────────────────


def half_spacing(seen: Tensor) -> Tensor:
    """Half of the distance between bfloat16 values in the binade of each: a power of two, float64."""
    _, exponent = torch.frexp(seen.double())  # |x| = f · 2^exponent with f in [½, 1)
    binade = torch.where(seen == 0, -126, exponent - 1).clamp(min=-126)
    return torch.ldexp(torch.ones_like(seen, dtype=torch.float64), binade - 7 - 1)


def split_weight(weight: Tensor) -> Parts:
    """A float32 weight as bfloat16 and an int8 tail, the rest in 127ths of half the bfloat16's
    spacing.
    """
    seen = weight.to(torch.bfloat16)
    share = ((weight - seen.float()).double() / half_spacing(seen)).clamp(-1, 1)
    return seen, (share.sign() * (share.abs() * 127 + 0.5).floor()).to(torch.int8)


def joined_weight(parts: Parts, shape: torch.Size) -> Tensor:
    seen, tail = parts
    return seen.float() + ((tail.float() / 127).double() * half_spacing(seen)).float()


def encode_first(exp_avg: Tensor) -> Parts:
    """First moments as int8 codes, companded by a softsign, and the float16 scale of each group.

    The codes are relative to the scale before it is rounded to float16; that is as published.
    """
    groups = grouped(exp_avg, 32)
    scale = groups.abs().amax(1, keepdim=True).clamp(min=1e-12)
    x = groups / scale
    return (127 * (2 * x / (1 + x.abs())) + 0.5).floor().to(torch.int8), scale.half()


def decode_first(parts: Parts, shape: torch.Size) -> Tensor:
    companded = parts[0].float() / 127
    return ungrouped(companded / (2 - companded.abs()) * parts[1].float(), shape)


def encode_second(exp_avg_sq: Tensor) -> Parts:
    """Second moments as uint8 codes of their square roots, and the float16 scale of each group."""
    roots = grouped(exp_avg_sq, 32).sqrt()
    scale = roots.amax(1, keepdim=True).clamp(min=1e-12)
    return (255 * roots / scale + 0.5).floor().to(torch.uint8), scale.half()


def decode_second(parts: Parts, shape: torch.Size) -> Tensor:
    return ungrouped((parts[0].float() / 255 * parts[1].float()).square(), shape)


# ── rows ──────────────────────────────────────────────────────────────────────────────────────────

FLOAT32 = Kept(lambda x: (x.clone(),), lambda parts, shape: parts[0])
MASTER = Kept(lambda x: (x.bfloat16(), x.clone()), lambda parts, shape: parts[1])
VECTORS = PublishedStates(MASTER, FLOAT32, FLOAT32)
EXPANDED = Kept(encode_expanded, decode_expanded)
PUBLISHED = {
    # Peng et al. 2023 (2310.18313); MS-AMP at 4480ffa, optim/adamw.cu
    "fp8-lm": PublishedStates(
        Kept(encode_half_master, lambda parts, shape: times_scale(parts[1:], shape)),
        Kept(partial(by_power_of_two, dtype=torch.float8_e4m3fn), times_scale),
        Kept(partial(by_power_of_two, dtype=torch.float16), times_scale),
    ),
    # Xi et al. 2025 (2410.19313); its release at 80ec99f
    "coat": PublishedStates(MASTER, EXPANDED, EXPANDED),
    # FlashOptim (2602.23349)
    "flashoptim": PublishedStates(
        Kept(split_weight, joined_weight),
        Kept(encode_first, decode_first),
        Kept(encode_second, decode_second),
    ),
    # Dettmers et al. 2022 (2110.02861); 0.50.2
    "bitsandbytes": PublishedStates(
        MASTER,
        Kept(partial(encode_mapped, signed=True), partial(decode_mapped, signed=True)),
        Kept(partial(encode_mapped, signed=False), partial(decode_mapped, signed=False)),
        least=4096,
    ),
}


def only_seen(parts: Parts, shape: torch.Size) -> Tensor:
    return parts[0].float()


# Rows that must lose: the weight itself in 8 bits, as in FP8-LM's ablation (2310.18313, table 6,
# #3), and Collage's parts (2405.03637) in 8 bits, for which it gives no formula. The arithmetic is
# float32's.
DRAWN = partial(encode_weight_by_row, draws=torch.rand_like)
CONTROLS = {
    "nearest8": PublishedStates(Kept(encode_weight_by_row, only_seen), FLOAT32, FLOAT32),
    "weight8": PublishedStates(Kept(DRAWN, only_seen), FLOAT32, FLOAT32),
    "float8/collage-plus": PublishedStates(
        Kept(
            lambda x: (x.bfloat16(), *encode_triple(x)),
            lambda parts, shape: decode_triple(parts[1:], shape),
        ),
        Kept(by_row, times_scale),
        Kept(encode_triple, decode_triple),
    ),
}


class PublishedAdamW(torch.optim.Optimizer):
    """AdamW over bfloat16 weights, of which matrices are kept and stepped as a row says: decoded,
    computed in float32, and encoded again. The model sees the first tensor that is kept of a weight.

    A weight moves by moments that are not rounded yet. Vectors have float32 masters and moments.
    """

    def __init__(self, groups: Any, row: PublishedStates, **options: Any) -> None:
        super().__init__(groups, options)
        self.row = row

    def codes(self, p: Tensor) -> tuple[Kept, Kept, Kept]:
        """Return how a weight and its moments are kept."""
        row = self.row if p.ndim > 1 else VECTORS
        if p.numel() < row.least:
            return row.weight, FLOAT32, FLOAT32
        return row.weight, row.exp_avg, row.exp_avg_sq

    def kept(self, p: Tensor) -> dict[str, Any]:
        """Return what is kept of a weight."""
        state: dict[str, Any] = self.state[p]
        if not state:
            values = (p.float(), torch.zeros(p.shape), torch.zeros(p.shape))
            pairs = zip(self.codes(p), values, strict=True)
            state |= {"step": 0, "parts": [code.encode(value) for code, value in pairs]}
        return state

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                state = self.kept(p)
                state["step"] += 1
                codes = self.codes(p)
                pairs = zip(codes, state["parts"], strict=True)
                values = [code.decode(parts, p.shape) for code, parts in pairs]
                pairs = zip(
                    codes, stepped(*values, p.grad.float(), state["step"], group), strict=True
                )
                state["parts"] = [code.encode(value) for code, value in pairs]
                p.copy_(state["parts"][0][0])

    @torch.no_grad()
    def stored(self, p: Tensor) -> Tensor:
        """Return the weight that is kept, float32."""
        return self.codes(p)[0].decode(self.kept(p)["parts"][0], p.shape)

    def bytes_per_param(self) -> float:
        """Return the bytes of weight, bfloat16 gradient and everything else that is kept."""
        held = 0
        for state in self.state.values():
            for parts in state["parts"]:
                held += sum(part.numel() * part.element_size() for part in parts)
        return 2 + held / sum(p.numel() for p in self.state)


def stepped(
    weight: Tensor, first: Tensor, second: Tensor, g: Tensor, step: int, group: dict[str, Any]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return a weight and its moments after a step of AdamW."""
    beta1, beta2 = group["betas"]
    lr = group["lr"]
    first = beta1 * first + (1 - beta1) * g
    second = beta2 * second + (1 - beta2) * g * g
    root = (second / (1 - beta2**step)).sqrt() + group["eps"]
    weight = weight * (1 - lr * group["weight_decay"])
    return weight - lr * (first / (1 - beta1**step)) / root, first, second
