"""AdamW in float64, by its papers' equations: what every kept weight and moment is compared with.

Source: Kingma & Ba, ICLR 2015 (1412.6980); Loshchilov & Hutter, ICLR 2019 (1711.05101).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor


class AdamW64:
    """One weight and its moments, all float64.

    Args:
        weight: where it starts.
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
        self.weight = weight.double()
        self.exp_avg, self.exp_avg_sq = torch.zeros_like(self.weight), torch.zeros_like(self.weight)
        self.steps = 0

    def step(self, gradient: Tensor) -> None:
        """Take one step."""
        self.steps += 1
        (beta1, beta2), g = self.betas, gradient.double()
        self.exp_avg = beta1 * self.exp_avg + (1 - beta1) * g
        self.exp_avg_sq = beta2 * self.exp_avg_sq + (1 - beta2) * g * g
        first = self.exp_avg / (1 - beta1**self.steps)
        second = self.exp_avg_sq / (1 - beta2**self.steps)
        self.weight = self.weight * (1 - self.lr * self.weight_decay) - self.lr * first / (second.sqrt() + self.eps)


def directions(
    exp_avg: Tensor, exp_avg_sq: Tensor, gradient: Tensor, betas: tuple[float, float], eps: float = 1e-8
) -> Tensor:
    """m/√v as the *next* step divides them, its gradient taken in: what errors of kept moments do to the weights.

    Where a kept second moment is zero, the new gradient's share is all that the denominator has: the step is then
    1/√(1 - beta2) times too long, or longer still where that gradient happens to be small.

    Args:
        exp_avg, exp_avg_sq: moments as they were kept.
        gradient: of the next step.
        betas, eps: as in AdamW; bias corrections are left out.
    Returns:
        float64.
    """
    g = gradient.double()
    first = betas[0] * exp_avg.double() + (1 - betas[0]) * g
    second = betas[1] * exp_avg_sq.double() + (1 - betas[1]) * g * g
    return first / (second.sqrt() + eps)


class Follower(Protocol):
    """Whatever keeps one weight and its moments, and steps them."""

    @property
    def weight(self) -> Tensor: ...

    @property
    def exp_avg(self) -> Tensor: ...

    @property
    def exp_avg_sq(self) -> Tensor: ...

    def step(self, gradient: Tensor) -> None: ...


@dataclass(frozen=True)
class Deviation:
    """How far a follower was from float64.

    Args:
        movement: ‖moved − wanted‖ / ‖wanted‖ of the kept weight at the end.
        direction: root mean square error of :func:`directions` over the last quarter of the steps, in units of the root
            mean square of the exact ones.
        zeros: the share of second moments that were kept as zero at the end, though gradients came.
    """

    movement: float
    direction: float
    zeros: float


def deviation(follower: Follower, exact: AdamW64, gradients: Sequence[Tensor]) -> Deviation:
    """Step both through the gradients, and compare.

    Args:
        follower: at the start.
        exact: at the same start, with the same options.
        gradients: one per step.
    """
    began = follower.weight.double(), exact.weight
    missed, whole = 0.0, 0.0
    for place, g in enumerate(gradients):
        if 4 * place >= 3 * len(gradients):
            wanted = directions(exact.exp_avg, exact.exp_avg_sq, g, exact.betas)
            found = directions(follower.exp_avg, follower.exp_avg_sq, g, exact.betas)
            missed += float((found - wanted).square().sum())
            whole += float(wanted.square().sum())
        follower.step(g)
        exact.step(g)
    moved, wanted = follower.weight.double() - began[0], exact.weight - began[1]
    zeros = ((follower.exp_avg_sq == 0) & (exact.exp_avg_sq > 0)).double().mean()
    return Deviation(float((moved - wanted).norm() / wanted.norm()), math.sqrt(missed / whole), float(zeros))
