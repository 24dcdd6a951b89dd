"""The storages of float64: every bit is that of the rule in Python's own floats, whatever the model sees and however it lies."""

from __future__ import annotations

import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import layout
from narrowgauge.spec.storages import STORAGES
from oracles import float64_rules as oracle

DOUBLE = [name for name, row in STORAGES.items() if row.arithmetic == "float64"]
# The last is strided, and its rows are copied; the two before share a bucket.
SHAPES = [(70, 65), (5,), (3, 7), (6, 4)]
ADAMW = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.1}
LION = {"lr": 1e-3, "betas": (0.9, 0.99), "weight_decay": 0.1}
RULES: dict[str, tuple[Callable[..., ng.Optimizer], dict[str, Any], oracle.Update]] = {
    "adamw": (ng.AdamW, ADAMW, oracle.adamw(**ADAMW)),
    "adam": (ng.Adam, ADAMW, oracle.adamw(**ADAMW, is_coupled=True)),
    "sgd": (ng.SGD, {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01}, oracle.sgd(0.1, 0.9, 0.01)),
    "nesterov": (
        ng.SGD,
        {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01, "nesterov": True},
        oracle.sgd(0.1, 0.9, 0.01, nesterov=True),
    ),
    "plain sgd": (ng.SGD, {"lr": 0.1, "weight_decay": 0.01}, oracle.sgd(0.1, 0.0, 0.01)),
    "lion": (ng.Lion, LION, oracle.lion(**LION)),
}
every_storage = pytest.mark.parametrize("storage", DOUBLE)


def drawn(shape: tuple[int, ...], seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, dtype=torch.float64, generator=generator)


def parameters(storage: str) -> list[nn.Parameter]:
    dtype = getattr(torch, STORAGES[storage].visible)
    values = [drawn(shape, seed).to(dtype) for seed, shape in enumerate(SHAPES)]
    values[-1] = values[-1].t().contiguous().t()
    return [nn.Parameter(value) for value in values]


def set_gradients(params: list[nn.Parameter], step: int) -> None:
    for k, parameter in enumerate(params):
        parameter.grad = drawn(tuple(parameter.shape), 100 + 7 * step + k).to(parameter.dtype)


def assert_same_bits(found: Tensor, expected: Tensor) -> None:
    kind = layout.INTEGER[8 * expected.element_size()]
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    assert torch.equal(found.contiguous().view(-1).view(kind), expected.contiguous().view(-1).view(kind))


def flat(tensors: list[Tensor]) -> list[float]:
    return torch.cat([tensor.detach().double().reshape(-1) for tensor in tensors]).tolist()


@every_storage
@pytest.mark.parametrize("rule", RULES)
def test_steps_are_those_of_pythons_floats_bit_for_bit(rule: str, storage: str) -> None:
    make, options, update = RULES[rule]
    params, gradients = parameters(storage), []
    weights = flat(params)
    optimizer = make(params, **options, storage=storage, audit_every=3)
    for step in range(12):
        set_gradients(params, step)
        gradients.append(flat([p.grad for p in params if p.grad is not None]))
        optimizer.step()
    wanted, states = oracle.steps(update, weights, gradients)
    assert flat([optimizer.stored(p) for p in params]) == wanted
    for name in states[0]:
        kept = [optimizer.stored(p, name) for p in params]
        assert {each.dtype for each in kept} == {torch.float64}
        assert flat(kept) == [state[name] for state in states]


@every_storage
def test_the_model_sees_the_nearest_ties_away_from_zero(storage: str) -> None:
    """Even of a value that is beside a tie by less than float32 shows: rounded twice, it would go the other way."""
    dtype = getattr(torch, STORAGES[storage].visible)
    epsilon = Fraction(torch.finfo(dtype).eps)
    places = [k + part for k in (0, 1, 2, 3) for part in (0.5, 0.5 + 2**-30, 0.5 - 2**-30)]
    values = [scale * (1 + float(epsilon) * place) for place in places for scale in (1.0, -1.0, 2.0**-9, 2.0**7)]
    parameter = nn.Parameter(torch.zeros(len(values), dtype=dtype))
    optimizer = ng.SGD([parameter], lr=0.0, storage=storage)
    optimizer.adopt({parameter: torch.tensor(values, dtype=torch.float64)})
    assert optimizer.stored(parameter).tolist() == values
    for value, seen in zip(values, parameter.tolist(), strict=True):
        step = epsilon * Fraction(2) ** (math.frexp(value)[1] - 1)
        count = math.floor(abs(Fraction(value)) / step + Fraction(1, 2))
        assert abs(Fraction(seen)) == count * step and (seen < 0) == (value < 0), value
