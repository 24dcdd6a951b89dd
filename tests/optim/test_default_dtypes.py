"""A default dtype is the user's to choose: no step, no kernel and no cache may depend on it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

import narrowgauge as ng
from optim.pairs import FEW, build, parameters
from tensors import assert_same_bits, parameters_of, step_gradients

OTHERS = [torch.bfloat16, torch.float64]


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def stepped(optimizer: ng.Optimizer, slopes: list[list[Tensor]], dtype: torch.dtype) -> dict[str, Tensor]:
    """Everything kept after steps that are taken under a default dtype."""
    with default_dtype(dtype):
        for step in slopes:
            for p, slope in zip(parameters_of(optimizer), step, strict=True):
                p.grad = slope
            optimizer.step()
        states = {f"{k} {n}": v for k, s in optimizer.state_dict()["state"].items() for n, v in s.items()}
        weights = {f"{k} weight": optimizer.stored(p) for k, p in enumerate(parameters_of(optimizer))}
    audit = {"audit": optimizer.last_audit} if optimizer.last_audit is not None else {}
    return states | weights | audit | {f"{k} seen": p.detach().clone() for k, p in enumerate(parameters_of(optimizer))}


@pytest.mark.parametrize("dtype", OTHERS)
@FEW
def test_steps_have_the_same_bits_under_any_default_dtype(rule: str, storage: str, dtype: torch.dtype) -> None:
    slopes = [step_gradients(parameters(storage), step) for step in range(3)]
    options = {"max_grad_norm": 0.5, "audit_every": 2}
    found = [
        stepped(build(rule, parameters(storage), storage, **options), slopes, each) for each in (torch.float32, dtype)
    ]
    assert_same_bits(*found)
