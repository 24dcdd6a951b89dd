"""Small trainings that several tests share, each a pure function of its arguments; and which
storages stand for which.
"""

from typing import Any

import torch

import expectations
import narrowgauge as ng
from narrowgauge.optim import optimizers
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.update_rules import UPDATE_RULES

OPTIMIZERS = {name: getattr(optimizers, row.optimizer) for name, row in UPDATE_RULES.items()}
"""The optimizer class of each rule."""

REPRESENTATIVES = {
    name: row.stands_for for name, row in expectations.STORAGES.items() if row.stands_for
}
"""One storage of each kind, with what it stands for."""


def arrived(start: torch.Tensor, end: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the fraction of an exact change that is stored after a training."""
    moved = end.double() - start.double()
    return float((moved * exact).sum() / exact.square().sum())


def stall(
    storage: str, *, seed: int = 1, lr: float = 1e-5, steps: int = 400, side: int = 256
) -> tuple[float, Any]:
    """The stall case: weights ~N(0,1), gradients 0.05 + 0.1 N(0,1) from a cycle of 50, beta2 0.999,
    a small rate.

    Return the error of the stored displacement, relative to that of the same AdamW in float64, and
    the audit.
    """
    generator = torch.Generator().manual_seed(seed)
    start = torch.randn(side, side, generator=generator).bfloat16()
    cycle = []
    for _ in range(50):
        cycle.append((0.05 + 0.1 * torch.randn(side, side, generator=generator)).bfloat16())
    weight = torch.nn.Parameter(start.to(getattr(torch, STORAGES[storage].visible), copy=True))
    options = {"lr": lr, "betas": (0.9, 0.999), "weight_decay": 0.0}
    optimizer = ng.AdamW(
        [("weight", weight)], storage=storage, compile=False, low_bits="zero", **options
    )
    optimizer.adopt({weight: start.float()})  # as the storage rounds it
    before = optimizer.stored(weight).double()
    exact = torch.nn.Parameter(before.clone())
    reference = torch.optim.AdamW([exact], **options)
    for t in range(1, steps + 1):
        weight.grad = cycle[t % 50].to(weight.dtype)
        exact.grad = cycle[t % 50].double()
        optimizer.step()
        reference.step()
    moved = optimizer.stored(weight).double() - before
    expected = exact.detach() - before
    return float((moved - expected).norm() / expected.norm()), ng.audit(optimizer)["weight"]
