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


class FlashAdamW:
    """One weight, kept and stepped as FlashOptim does.

    Args:
        weight: float32 or bfloat16 weight to start from.
        lr, betas, eps, weight_decay: as in ``torch.optim.AdamW``.
    """

    def __init__(
        self,
        weight: Tensor,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
    ) -> None:
        self.lr, self.betas, self.eps, self.weight_decay = lr, betas, eps, weight_decay
        self.shape, self.steps = weight.shape, 0
        self.seen, self.tail = split_weight(weight.float())
        self.keep(torch.zeros(self.shape), torch.zeros(self.shape))

    def keep(self, exp_avg: Tensor, exp_avg_sq: Tensor) -> None:
        """Quantize both moments."""
        self.first = encode_first(exp_avg)
        self.second = encode_second(exp_avg_sq)

    @property
    def weight(self) -> Tensor:
        """The weight that is kept, float32."""
        return joined_weight(self.seen, self.tail)

    @property
    def exp_avg(self) -> Tensor:
        """The first moment that is kept, float32."""
        return decode_first(*self.first, self.shape)

    @property
    def exp_avg_sq(self) -> Tensor:
        """The second moment that is kept, float32."""
        return decode_second(*self.second, self.shape)

    def step(self, gradient: Tensor) -> None:
        """Take one step: everything is decoded, computed in float32, and cut again."""
        self.steps += 1
        (beta1, beta2), g = self.betas, gradient.float()
        exp_avg = beta1 * self.exp_avg + (1 - beta1) * g
        exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * g * g
        first = exp_avg / (1 - beta1**self.steps)
        second = exp_avg_sq / (1 - beta2**self.steps)
        weight = self.weight * (1 - self.lr * self.weight_decay)
        self.seen, self.tail = split_weight(weight - self.lr * first / (second.sqrt() + self.eps))
        self.keep(exp_avg, exp_avg_sq)

    def kept(self) -> dict[str, Tensor]:
        """Every tensor that is kept, by name."""
        return {
            "seen": self.seen,
            "tail": self.tail,
            "first": self.first[0],
            "first scales": self.first[1],
            "second": self.second[0],
            "second scales": self.second[1],
        }

    def checkpoint(self) -> dict[str, Tensor]:
        """What its ``state_dict`` holds by default: the tail without loss, the moments as bfloat16."""
        moments = {"exp_avg": self.exp_avg.to(torch.bfloat16), "exp_avg_sq": self.exp_avg_sq.to(torch.bfloat16)}
        return {"seen": self.seen.clone(), "tail": self.tail.to(torch.bfloat16), **moments}

    def resumed(self) -> FlashAdamW:
        """Another one, loaded from this one's :meth:`checkpoint`."""
        saved = self.checkpoint()
        other = FlashAdamW(saved["seen"], self.lr, self.betas, self.eps, self.weight_decay)
        other.tail, other.steps = saved["tail"].to(torch.int8), self.steps
        other.keep(saved["exp_avg"].float(), saved["exp_avg_sq"].float())
        return other

    def bytes_per_param(self) -> float:
        """Bytes of weight, bfloat16 gradient and everything else that is kept, per parameter."""
        total = sum(part.numel() * part.element_size() for part in self.kept().values())
        return 2 + total / self.shape.numel()
