"""AdamW in float64, by its papers' equations: what every kept weight and moment is compared with; and
Lion.

Source: Kingma & Ba, ICLR 2015 (1412.6980).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class AdamW64:
    """One weight and its moments, all float64; ``lr``, ``betas`` and ``eps`` as in
    ``torch.optim.AdamW`` without decay.
    """

    def __init__(
        self,
        weight: Tensor,
        lr: float,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
    ) -> None:
        self.lr = lr
        self.betas = betas
        self.eps = eps
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
        self.weight = self.weight - self.lr * first / (second.sqrt() + self.eps)


class Lion64(torch.optim.Optimizer):
    """Lion as its paper's algorithm 2 writes it (arXiv 2302.06675)."""

    def __init__(self, params: Any, **options: Any) -> None:
        super().__init__(params, options)

    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                momentum = self.state[p].get("momentum", torch.zeros_like(p))
                direction = torch.sign(beta1 * momentum + (1 - beta1) * p.grad)
                p.data -= group["lr"] * (direction + group["weight_decay"] * p.data)
                self.state[p]["momentum"] = beta2 * momentum + (1 - beta2) * p.grad
