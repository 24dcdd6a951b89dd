"""Update rules written by hand. Each line of a rule is a method, so that a row of the corpus can get it wrong."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

Group = dict[str, Any]
Groups = list[Group]
BETAS = (0.9, 0.95)


def torch_adamw(groups: Groups) -> torch.optim.Optimizer:
    return torch.optim.AdamW(groups, betas=BETAS)


def adamw(groups: Groups) -> torch.optim.Optimizer:
    return AdamW(groups, betas=BETAS)


def sgd(groups: Groups) -> torch.optim.Optimizer:
    return SGD(groups, momentum=0.9)


def nesterov(groups: Groups) -> torch.optim.Optimizer:
    return SGD(groups, momentum=0.9, nesterov=True)


class AdamW(torch.optim.AdamW):
    """AdamW. States are float32; bfloat16 and float16 weights have float32 masters."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self.update(p, group)

    def update(self, p: Tensor, group: Group) -> None:
        state = self.state[p]
        if not state:
            zeros = torch.zeros_like(p, dtype=torch.float32)
            state.update(step=torch.tensor(0.0), exp_avg=zeros, exp_avg_sq=zeros.clone())
            if p.dtype != torch.float32:
                state["master"] = p.detach().float()
        weight = state.get("master", p)
        state["step"] += 1
        self.decay(weight, group)
        gradient, (beta1, beta2) = self.gradient(weight, p.grad.float(), group), group["betas"]
        state["exp_avg"].lerp_(gradient, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        direction = self.direction(state["exp_avg"], state["exp_avg_sq"], int(state["step"]), group)
        weight.sub_(self.rate(group) * direction)
        if weight is not p:
            p.copy_(weight)

    def decay(self, weight: Tensor, group: Group) -> None:
        weight.mul_(1 - group["lr"] * group["weight_decay"])

    def gradient(self, weight: Tensor, gradient: Tensor, group: Group) -> Tensor:
        return gradient

    def rate(self, group: Group) -> float:
        return float(group["lr"])

    def direction(self, first: Tensor, second: Tensor, number: int, group: Group) -> Tensor:
        m, v = corrected(first, second, number, group)
        return m / (v.sqrt() + group["eps"])


def corrected(first: Tensor, second: Tensor, number: int, group: Group) -> tuple[Tensor, Tensor]:
    """Return both moments without their bias towards zero."""
    beta1, beta2 = group["betas"]
    return first / (1 - beta1**number), second / (1 - beta2**number)


class SGD(torch.optim.SGD):
    """SGD with momentum."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    gradient, state = self.decayed(p, group), self.state[p]
                    if "momentum_buffer" in state:
                        self.accumulate(state["momentum_buffer"], gradient, group)
                    else:
                        state["momentum_buffer"] = gradient.clone()
                    p.sub_(self.direction(gradient, state["momentum_buffer"], group), alpha=group["lr"])

    def decayed(self, p: Tensor, group: Group) -> Tensor:
        return p.grad.add(p, alpha=group["weight_decay"])

    def accumulate(self, velocity: Tensor, gradient: Tensor, group: Group) -> None:
        velocity.mul_(group["momentum"]).add_(gradient)

    def direction(self, gradient: Tensor, velocity: Tensor, group: Group) -> Tensor:
        return gradient.add(velocity, alpha=group["momentum"]) if group["nesterov"] else velocity


class Lion(torch.optim.Optimizer):
    """Lion (https://arxiv.org/abs/2302.06675, Algorithm 2), at a tenth of the rate, as the paper advises."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"betas": (0.9, 0.99)})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    gradient = self.gradient(p, group)
                    self.decay(p, group)
                    p.sub_(momentum.lerp(gradient, 1 - beta1).sign(), alpha=0.1 * group["lr"])
                    momentum.lerp_(gradient, 1 - beta2)

    def gradient(self, p: Tensor, group: Group) -> Tensor:
        return p.grad

    def decay(self, p: Tensor, group: Group) -> None:
        p.mul_(1 - 0.1 * group["lr"] * group["weight_decay"])


class Muon(torch.optim.Optimizer):
    """Muon (https://kellerjordan.github.io/posts/muon/). Vectors take plain momentum."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"momentum": 0.95})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    buffer = self.state[p].setdefault("momentum_buffer", torch.zeros_like(p))
                    buffer.lerp_(p.grad, 1 - group["momentum"])
                    self.decay(p, group)
                    p.sub_(self.direction(p, self.momentum(p.grad, buffer, group)), alpha=group["lr"])

    def momentum(self, gradient: Tensor, buffer: Tensor, group: Group) -> Tensor:
        return gradient.lerp(buffer, group["momentum"])

    def decay(self, p: Tensor, group: Group) -> None:
        p.mul_(1 - group["lr"] * group["weight_decay"])

    def direction(self, p: Tensor, update: Tensor) -> Tensor:
        if update.ndim != 2:
            return update
        return self.scale(update.shape) * orthogonal(update)

    def scale(self, shape: torch.Size) -> float:
        return math.sqrt(max(1.0, shape[0] / shape[1]))


def orthogonal(update: Tensor) -> Tensor:
    """Set all singular values to 1."""
    u, _, v = torch.linalg.svd(update, full_matrices=False)
    return u @ v
