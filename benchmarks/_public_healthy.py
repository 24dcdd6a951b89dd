"""Sixty loops in which nothing is wrong, of more than twelve kinds, for the loop of ``_public_loop.py``.

Schedules, accumulation, restarts and frozen parts that are meant, declared oddities, tied weights, dropout, clipping, averages,
several groups, other optimizers, a loss scaler, small data in several epochs. They were written before anything was diagnosed.

Claim: at most one of sixty is named. Baseline: none. Run: ``./dev bench public_bugs --parts healthy``.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from _public_loop import AT, LR, STEPS, WARMUP, Groups, Setting, written


class Lion(torch.optim.Optimizer):
    """Lion: the sign of an interpolated momentum (https://arxiv.org/abs/2302.06675, Algorithm 2)."""

    def __init__(self, groups: Groups) -> None:
        super().__init__(groups, {"lr": LR, "betas": (0.9, 0.99), "weight_decay": 0.0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """One update, at a tenth of the rate, as the paper advises beside AdamW."""
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                if p.grad is not None:
                    momentum = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                    p.mul_(1 - group["lr"] * group["weight_decay"])
                    p.sub_(momentum.lerp(p.grad, 1 - beta1).sign(), alpha=0.1 * group["lr"])
                    momentum.lerp_(p.grad, 1 - beta2)


def _of(kind: Any, **options: Any) -> Any:
    def make(groups: Groups) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(groups, lr=LR, **options)
        return optimizer

    make.__qualname__ = f"{kind.__name__} {options}"
    return make


def _cosine(step: int) -> float:
    return min(1.0, step / WARMUP) * (0.55 + 0.45 * math.cos(math.pi * max(0, step - WARMUP) / STEPS))


def _stable_then_decay(step: int) -> float:
    return min(1.0, step / WARMUP) * (1.0 if step < 45 else 1 - 0.9 * (step - 45) / 15)


def _warmed_again(step: int) -> float:
    """A second run from a checkpoint, with a warm-up of its own."""
    return 0.6 * (min(1.0, step / WARMUP) if step < AT else min(1.0, (step - AT + 1) / WARMUP))


_ADAM, _SGD = _of(torch.optim.Adam, betas=(0.9, 0.95)), _of(torch.optim.SGD, momentum=0.9)
_KINDS: dict[str, Setting] = {
    "usual": Setting(),
    "cosine": Setting(rate=_cosine),
    "constant": Setting(rate=lambda step: 0.3),
    "stable, then decay": Setting(rate=_stable_then_decay),
    "no warm-up": Setting(rate=lambda step: 0.5 * (1 - step / 80)),
    "one micro-batch": Setting(micro=1),
    "eight micro-batches": Setting(micro=8),
    "not clipped": Setting(clip=0.0),
    "clipped hard": Setting(clip=0.1),
    "clipped rarely": Setting(clip=0.6),
    "dropout": Setting(dropout=0.2),
    "dropout, evaluated": Setting(dropout=0.2, evaluates=True),
    "tied": Setting(tied=True),
    "small start": Setting(small_start=True),
    "bfloat16 autocast": Setting(autocast=True),
    "loss scaler": Setting(scaler=True),
    "loss scaler, autocast": Setting(scaler=True, autocast=True, clip=0.0),
    "lengths": Setting(lengths=True),
    "lengths, declared": Setting(lengths=True, declared=(("ignore", 0),)),
    "prompts": Setting(prompts=True),
    "packed": Setting(packed=True),
    "frozen embedding": Setting(frozen=("model.embed_tokens",)),
    "frozen layer": Setting(frozen=("model.layers.0",)),
    "average": Setting(average=True),
    "average, evaluated": Setting(average=True, evaluates=True),
    "epochs": Setting(epochs=True),
    "epochs, tied, dropout": Setting(epochs=True, tied=True, dropout=0.1),
    "restart": Setting(restarts=True),
    "restart, warmed again": Setting(restarts=True, rate=_warmed_again),
    "restart, epochs": Setting(restarts=True, epochs=True, evaluates=True),
    "three groups": Setting(embedding_rate=0.1),
    "smoothing, declared": Setting(smoothing=0.1, declared=(("loss", "own"),)),
    "written by hand": Setting(optimizer=written),
    "written by hand, restart": Setting(optimizer=written, restarts=True),
    "adam": Setting(optimizer=_ADAM),
    "adam, no decay": Setting(optimizer=_ADAM, options=(("weight_decay", 0.0),), declared=(("decay_groups", ""),)),
    "amsgrad": Setting(optimizer=_of(torch.optim.AdamW, betas=(0.9, 0.95), amsgrad=True)),
    "beta2 0.999": Setting(options=(("betas", (0.9, 0.999)),)),
    "large epsilon": Setting(options=(("eps", 1e-4),)),
    "fused": Setting(optimizer=_of(torch.optim.AdamW, betas=(0.9, 0.95), fused=True)),
    "foreach": Setting(optimizer=_of(torch.optim.AdamW, betas=(0.9, 0.95), foreach=True)),
    "sgd": Setting(optimizer=_SGD, rate=lambda step: 30.0 * _cosine(step)),
    "nesterov": Setting(optimizer=_of(torch.optim.SGD, momentum=0.9, nesterov=True), rate=lambda step: 30 * _cosine(step)),
    "adafactor": Setting(optimizer=_of(torch.optim.Adafactor), rate=lambda step: 3.0 * _cosine(step)),
    "lion": Setting(optimizer=Lion),
    "rmsprop": Setting(optimizer=_of(torch.optim.RMSprop, alpha=0.95), rate=lambda step: 0.3 * _cosine(step)),
    "nadam": Setting(optimizer=_of(torch.optim.NAdam, betas=(0.9, 0.95))),
    "adagrad": Setting(optimizer=_of(torch.optim.Adagrad)),
}  # fmt: skip
HEALTHY: dict[str, Setting] = {
    **_KINDS,
    **{
        f"{name}, seed 1": replace(_KINDS[name], seed=1)
        for name in (
            "usual", "cosine", "dropout, evaluated", "tied", "loss scaler", "lengths", "prompts", "epochs", "restart", "average",
            "frozen layer", "clipped rarely",
        )
    },
}  # fmt: skip
assert len(HEALTHY) == 60
