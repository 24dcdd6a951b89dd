"""The optimizer as ``torch.optim`` knows one: groups, closures, schedules, saving, copying, and odd parameters."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import optimizers
from narrowgauge.spec.storages import STORAGES
from narrowgauge.trainer.counted_memory import counted_allocations
from optim.scenarios import storage_error
from tensors import bits, gaussian, parameters_of, step_gradients, take_steps

SHAPES: list[tuple[int, ...]] = [(4, 6), (5,), (3, 3, 3), (1, 1), (7, 1)]
EIGHT = ("word", "exact", "compact", "states8", "kahan", "float16/split", "collage-plus", "float8/collage-plus")
SAME = pytest.mark.parametrize("storage", EIGHT)


def visible(storage: str) -> torch.dtype:
    dtype: torch.dtype = getattr(torch, STORAGES[storage].visible)
    return dtype


def parameters(storage: str, shapes: list[tuple[int, ...]] | None = None) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(shape, generator=generator) for shape in (SHAPES if shapes is None else shapes)]
    return [nn.Parameter(value.to(visible(storage))) for value in values]


def adamw(params: Any, storage: str, **options: Any) -> ng.AdamW:
    return ng.AdamW(params, storage=storage, **{"lr": 1e-2, "audit_every": 2, **options})


def everything(optimizer: ng.AdamW) -> list[Tensor]:
    """Visible weights, then all that is kept, as bytes."""
    kept = [p.detach() for p in parameters_of(optimizer)]
    kept += [optimizer.stored(p, n) for p in parameters_of(optimizer) for n in ("weight", "exp_avg", "exp_avg_sq")]
    return [bits(value).clone() for value in kept]


# ── the interface ───────────────────────────────────────────────────────────────────────────────────────────────


def test_a_wrong_group_leaves_the_optimizer_as_it_was() -> None:
    optimizer = adamw(parameters("word"), "word")
    for group in ({"params": parameters("float32")}, {"params": parameters("exact"), "storage": "exakt"}):
        with pytest.raises(ng.errors.RecipeError):
            optimizer.add_param_group(group)
    assert len(optimizer.param_groups) == 1
    take_steps(optimizer, range(1))


# ── odd parameters and gradients ────────────────────────────────────────────────────────────────────────────────


@SAME
def test_clipping_is_torchs(storage: str) -> None:
    optimizer = adamw(parameters(storage), storage, max_grad_norm=0.25)
    take_steps(optimizer, range(1))
    norm = torch.cat([p.grad.double().view(-1) for p in parameters_of(optimizer) if p.grad is not None]).norm()
    assert optimizer.grad_norm is not None
    assert abs(float(optimizer.grad_norm) / float(norm) - 1) < 1e-6
    for p in parameters_of(optimizer):
        assert p.grad is not None
        wanted = 0.1 * p.grad.double() * (0.25 / (norm + 1e-6))
        # A step of the smallest binade of an 8-bit window, where there is one, is 2^-17 of the largest in the row.
        near, floor = storage_error(storage, "exp_avg", p.ndim), 2.0**-17 * wanted.abs().max()
        error = (optimizer.stored(p, "exp_avg").double() - wanted).abs()
        assert (error <= (near + 1e-6) * wanted.abs() + (floor if near > 2.0**-5 else 1e-9)).all()


@SAME
def test_a_step_that_is_refused_changes_nothing(storage: str) -> None:
    dense, embedding = nn.Parameter(torch.ones(3, 2).to(visible(storage))), nn.Embedding(4, 2, sparse=True)
    embedding = embedding.to(visible(storage))
    optimizer = adamw([dense, *embedding.parameters()], storage)
    embedding(torch.tensor([1])).float().sum().backward()
    dense.grad = torch.ones_like(dense)
    with pytest.raises(ng.errors.RecipeError, match="sparse"):
        optimizer.step()
    assert (dense == 1).all()


COPIES = {"Muon": 4, "GradNormLoRP": 8, "Adafactor": 2, "GaLore": 4}
"""Transient memory of a matrix rule, at most, in float32 copies of the matrix, as the docstrings say."""


@pytest.mark.parametrize(("rule", "storage"), [*((rule, "word") for rule in COPIES), ("Muon", "states8")])
def test_a_matrix_rules_transient_memory(rule: str, storage: str) -> None:
    weight = nn.Parameter(gaussian(512, 4096).bfloat16())
    options = {"rank": 32} if rule in ("GaLore", "GradNormLoRP") else {}
    optimizer = getattr(optimizers, rule)([weight], storage=storage, compile=False, audit_every=2, **options)
    for step in range(2):  # the second is audited
        weight.grad = step_gradients([weight], step)[0]
        with counted_allocations(torch.device("cpu")) as allocations:
            optimizer.step()
    assert allocations is not None and allocations.peak / (4 * weight.numel()) <= COPIES[rule]
