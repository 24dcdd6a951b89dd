"""Optimizer states in 8 bits as others publish them, by their formulas, in float32: rows to stand beside ours.

A row says how a weight and both moments are kept between two steps: ``encode`` gives the tensors that are held, ``decode`` the
float32 values that they stand for. :class:`CodedAdamW` steps one weight of a row; all of them decode, take AdamW's step in
float32, move the weight by moments that are not rounded yet, and encode.

=========================  =========================================================  ==================================
row                        moments                                                    weight beside the bfloat16 one
=========================  =========================================================  ==================================
fp8-moments                e4m3 and e5m2, a float32 scale per tensor                  float32
fp8-lm                     e4m3 and float16, a power of two per tensor                float16, a power of two per tensor
coat                       e4m3 twice, in groups of 128 whose range is expanded       float32
flashoptim                 companded int8 and uint8 of the root, in groups of 32      8 bits of half a spacing
bitsandbytes               the dynamic map of 256 values, in blocks of 256            float32
=========================  =========================================================  ==================================

Every scale here comes from the largest of the *new* values, so a step needs two passes: one to find it, one to write. Ours are
bounded before the step. A tensor's or a block's scale also depends on how a matrix is cut into shards; a row's does not.

Formulas only; nothing of anybody's code is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial

import torch
from torch import Tensor

from oracles import flashoptim

Parts = tuple[Tensor, ...]


@dataclass(frozen=True)
class Kept:
    """How one tensor is kept.

    Args:
        encode: from float32 values to the tensors that are held.
        decode: from those and the shape to float32 values.
    """

    encode: Callable[[Tensor], Parts]
    decode: Callable[[Parts, torch.Size], Tensor]

    def there_and_back(self, x: Tensor) -> Tensor:
        """The values that are left of ``x``."""
        return self.decode(self.encode(x), x.shape)


@dataclass(frozen=True)
class PublishedStates:
    """One published way to keep the states of AdamW.

    Args:
        name: in tables.
        source: publication, and the code where a formula is from there.
        weight: of a matrix; the first tensor held is the bfloat16 one that the model sees.
        exp_avg, exp_avg_sq: of its moments.
        least: tensors of fewer values keep float32 moments.
    """

    name: str
    source: str
    weight: Kept
    exp_avg: Kept
    exp_avg_sq: Kept
    least: int = 0

    def codes(self, count: int) -> tuple[Kept, Kept]:
        """How both moments of a tensor of ``count`` values are kept."""
        return (FLOAT32, FLOAT32) if count < self.least else (self.exp_avg, self.exp_avg_sq)

    def bytes_per_param(self, *shape: int) -> float:
        """Bytes per parameter of a matrix: weight, bfloat16 gradient and states, counted from tensors."""
        zeros = torch.zeros(shape)
        held = [
            *self.weight.encode(zeros),
            *(part for kept in self.codes(zeros.numel()) for part in kept.encode(zeros)),
        ]
        return 2 + sum(part.numel() * part.element_size() for part in held) / zeros.numel()


# ── one scale for a tensor ──────────────────────────────────────────────────────────────────────────────────────────────


def largest_of(dtype: torch.dtype) -> float:
    """The largest finite value of a format."""
    return torch.finfo(dtype).max


def by_amax(x: Tensor, dtype: torch.dtype) -> Parts:
    """Codes to the nearest even, and the float32 scale that takes the largest of all to the largest of the format."""
    scale = x.abs().amax().clamp(min=1e-30) / largest_of(dtype)
    return (x / scale).to(dtype), scale


def by_power_of_two(x: Tensor, dtype: torch.dtype) -> Parts:
    """Codes to the nearest even, and the largest power of two by which no value overflows; of zeros, 1.

    Source: MS-AMP at 0367bdc, ``common/tensor/meta.py``, ``compute_scaling_factor`` with a margin of 0.
    """
    amax = x.abs().amax().double()
    exponent = torch.floor(torch.log2(largest_of(dtype) / amax)) if amax > 0 else torch.zeros_like(amax)
    scale = torch.exp2(exponent.clamp(-126, 126)).float()
    return (x * scale).to(dtype), 1 / scale


def times_scale(parts: Parts, shape: torch.Size) -> Tensor:
    """What codes and the scale of all of them stand for."""
    return (parts[0].float() * parts[1]).view(shape)


# ── groups of neighbours in the flattened tensor ────────────────────────────────────────────────────────────────────────


def grouped(x: Tensor, size: int) -> Tensor:
    """Groups of consecutive elements as rows, the last one filled up with zeros."""
    flat = x.flatten()
    return torch.nn.functional.pad(flat, (0, -len(flat) % size)).view(-1, size)


def ungrouped(groups: Tensor, shape: torch.Size) -> Tensor:
    """Undoes :func:`grouped`."""
    return groups.flatten()[: shape.numel()].view(shape)


def held(groups: Tensor, count: int) -> Tensor:
    """Codes in groups as they are held: no byte is spent on what fills the last group up."""
    return groups.flatten()[:count]


COAT_GROUP, COAT_STEPS, COAT_SMALLEST = 128, 16, 1e-30


def encode_expanded(x: Tensor) -> Parts:
    """COAT's dynamic range expansion: ``sign(x) |x / c|^k`` in e4m3, with scale, ``k`` and ``c`` of each group in float32.

    ``c`` is the geometric mean of the group's largest and smallest magnitude that is not zero, and ``k``, a multiple of a
    sixteenth, widens (or narrows) their ratio to half the square of 448, about what e4m3 spans. Where all magnitudes of a group
    are equal there is nothing to widen, and ``k`` is 1 here; the formula would divide by zero.

    Source: COAT (2410.19313); its release at 80ec99f, ``fp8_adamw_expand_cuda_kernel.cu``, which keeps both moments in e4m3, and
    ``_fp8_quantization_config.py`` (groups of 128, sixteenths).
    """
    groups, top = grouped(x, COAT_GROUP), largest_of(torch.float8_e4m3fn)
    magnitude = groups.abs()
    highest = magnitude.amax(1, keepdim=True)
    lowest = torch.where(magnitude > 0, magnitude, math.inf).amin(1, keepdim=True).clamp(max=highest)
    highest, lowest = highest + COAT_SMALLEST, lowest + COAT_SMALLEST
    ratio, centre = highest / lowest, highest.sqrt() * lowest.sqrt()
    widened = torch.floor(math.log2(top * top / 2) / torch.log2(ratio) * COAT_STEPS) / COAT_STEPS
    power = torch.where(ratio > 1, widened, 1.0)
    scale = (highest / centre) ** power / top
    codes = (groups.sign() * (magnitude / centre) ** power / scale).clamp(-top, top).to(torch.float8_e4m3fn)
    return held(codes, x.numel()), scale, power, centre


def decode_expanded(parts: Parts, shape: torch.Size) -> Tensor:
    """Undoes :func:`encode_expanded`."""
    codes, scale, power, centre = parts
    values = grouped(codes.float(), COAT_GROUP) * scale
    return ungrouped(values.sign() * values.abs() ** (1 / power) * centre, shape)


BLOCK = 256


@lru_cache
def dynamic_map(signed: bool) -> Tensor:
    """The 256 values of the dynamic tree code, ascending, float32: 0, 1, and seven decades below 1.

    A decade ``10^-d`` holds the middles of equal pieces of ``[0.1, 1] · 10^-d``: as many as bits are left when ``d`` of seven
    tell the decade, so that each decade has half the values of the one above. Without a sign there is one bit more.

    Source: Dettmers et al. 2022 (2110.02861), after Dettmers 2016 (1511.04561).
    """
    values = [0.0, 1.0]
    for decade in range(7):
        ends = torch.linspace(0.1, 1, 2 ** (6 - decade + (not signed)) + 1, dtype=torch.float32)
        middles = (10.0**-decade * ((ends[:-1] + ends[1:]) / 2)).tolist()
        values += middles + ([-value for value in middles] if signed else [])
    return torch.tensor(sorted(values), dtype=torch.float32)


def encode_mapped(x: Tensor, *, signed: bool) -> Parts:
    """For each value, divided by its block's largest, the place of the nearest in the map; and that largest, float32.

    A value in the middle of two takes the lower. Source: bitsandbytes 0.50.2, ``backends/default/ops.py``.
    """
    blocks, values = grouped(x, BLOCK), dynamic_map(signed)
    scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
    places = torch.bucketize((blocks * (1 / scale)).clamp(-1, 1), (values[:-1] + values[1:]) / 2)
    return held(places.to(torch.uint8), x.numel()), scale


def decode_mapped(parts: Parts, shape: torch.Size, *, signed: bool) -> Tensor:
    """Undoes :func:`encode_mapped`."""
    codes, scale = parts
    values = dynamic_map(signed)[codes.long()]
    return ungrouped(grouped(values, BLOCK) * scale, shape)


# ── weights ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def encode_half_master(x: Tensor) -> Parts:
    """A float16 master with a power of two for the tensor, and the bfloat16 of what it stands for."""
    master = by_power_of_two(x, torch.float16)
    return times_scale(master, x.shape).bfloat16(), *master


FLOAT32 = Kept(lambda x: (x.clone(),), lambda parts, shape: parts[0])
MASTER = Kept(lambda x: (x.bfloat16(), x.clone()), lambda parts, shape: parts[1])
HALF_MASTER = Kept(encode_half_master, lambda parts, shape: times_scale(parts[1:], shape))
CORRECTED = Kept(flashoptim.split_weight, lambda parts, shape: flashoptim.joined_weight(*parts))
EXPANDED = Kept(encode_expanded, decode_expanded)


def _tensor(scaled: Callable[[Tensor, torch.dtype], Parts], dtype: torch.dtype) -> Kept:
    return Kept(partial(scaled, dtype=dtype), times_scale)


def _mapped(signed: bool) -> Kept:
    return Kept(partial(encode_mapped, signed=signed), partial(decode_mapped, signed=signed))


PUBLISHED: Mapping[str, PublishedStates] = {
    row.name: row
    for row in (
        PublishedStates(
            "fp8-moments",
            "Fishman et al. 2025, Scaling FP8 training to trillion-token LLMs (2409.12517): the formats; their scales and"
            " masters were not read, so these are the plain ones",
            MASTER, _tensor(by_amax, torch.float8_e4m3fn), _tensor(by_amax, torch.float8_e5m2),
        ),
        PublishedStates(
            "fp8-lm",
            "Peng et al. 2023, FP8-LM (2310.18313); MS-AMP at 4480ffa, optim/adamw.cu",
            HALF_MASTER, _tensor(by_power_of_two, torch.float8_e4m3fn), _tensor(by_power_of_two, torch.float16),
        ),
        PublishedStates("coat", "Xi et al. 2025, COAT (2410.19313); its release at 80ec99f", MASTER, EXPANDED, EXPANDED),
        PublishedStates(
            "flashoptim",
            "FlashOptim (2602.23349); oracles/flashoptim.py",
            CORRECTED,
            Kept(flashoptim.encode_first, lambda parts, shape: flashoptim.decode_first(*parts, shape)),
            Kept(flashoptim.encode_second, lambda parts, shape: flashoptim.decode_second(*parts, shape)),
        ),
        PublishedStates(
            "bitsandbytes",
            "Dettmers et al. 2022 (2110.02861); bitsandbytes 0.50.2",
            MASTER, _mapped(signed=True), _mapped(signed=False), least=4096,
        ),
    )
}  # fmt: skip
"""All rows by name."""


class CodedAdamW:
    """One weight, kept and stepped as a row says.

    Args:
        weight: float32 or bfloat16 weight to start from.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        row: PublishedStates,
        weight: Tensor,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.row, self.lr, self.betas, self.eps, self.weight_decay = row, lr, betas, eps, weight_decay
        self.shape, self.steps = weight.shape, 0
        self._codes = row.codes(weight.numel())
        self._weight = row.weight.encode(weight.float())
        self._moments = tuple(kept.encode(torch.zeros(self.shape)) for kept in self._codes)

    @property
    def weight(self) -> Tensor:
        """The weight that is kept, float32."""
        return self.row.weight.decode(self._weight, self.shape)

    @property
    def exp_avg(self) -> Tensor:
        """The first moment that is kept, float32."""
        return self._codes[0].decode(self._moments[0], self.shape)

    @property
    def exp_avg_sq(self) -> Tensor:
        """The second moment that is kept, float32."""
        return self._codes[1].decode(self._moments[1], self.shape)

    def step(self, gradient: Tensor) -> None:
        """Take one step: everything is decoded, computed in float32, and encoded again."""
        self.steps += 1
        (beta1, beta2), g = self.betas, gradient.float()
        exp_avg = beta1 * self.exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * g * g
        first = exp_avg / (1 - beta1**self.steps)
        second = exp_avg_sq / (1 - beta2**self.steps)
        weight = self.weight * (1 - self.lr * self.weight_decay)
        self._weight = self.row.weight.encode(weight - self.lr * first / (second.sqrt() + self.eps))
        self._moments = tuple(
            kept.encode(value) for kept, value in zip(self._codes, (exp_avg, exp_avg_sq), strict=True)
        )

    def bytes_per_param(self) -> float:
        """Bytes of weight, bfloat16 gradient and everything else that is kept, per parameter."""
        held = (*self._weight, *(part for parts in self._moments for part in parts))
        return 2 + sum(part.numel() * part.element_size() for part in held) / self.shape.numel()
