"""The storages of float64: every bit is that of the rule in Python's own floats, whatever the model sees and however it lies."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.rounding import rounded_to_odd, sqrt
from narrowgauge.optim import codec
from narrowgauge.spec.storages import STORAGES, VISIBLE
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
    kind = codec.INTEGER[8 * expected.element_size()]
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


def test_rounding_to_odd_loses_nothing_that_a_narrower_rounding_reads() -> None:
    x = torch.cat([drawn((3000,), 1) * 2.0 ** torch.linspace(-160, 140, 3000, dtype=torch.float64), drawn((50,), 2)])
    near = rounded_to_odd(x)
    is_exact = near.double() == x
    odd = (near.view(torch.int32) & 1).bool()
    assert bool((is_exact | odd).all()) and bool(odd.any())
    beside = torch.nextafter(near.abs(), torch.tensor(math.inf)).double() - near.abs().double()
    assert bool(((near.double() - x).abs() <= beside).all())
    edges = torch.tensor([math.inf, -math.inf, 0.0, -0.0, 1e300, -1e300], dtype=torch.float64)
    assert rounded_to_odd(edges).tolist()[:2] == [math.inf, -math.inf]
    assert rounded_to_odd(edges)[4].item() == torch.finfo(torch.float32).max
    assert math.isnan(rounded_to_odd(torch.tensor([math.nan], dtype=torch.float64)).item())


def test_roots_are_correctly_rounded() -> None:
    x = torch.cat([drawn((20000,), 3).abs(), torch.tensor([0.0, math.inf, 5e-324], dtype=torch.float64)])
    assert sqrt(x).tolist() == [math.sqrt(value) for value in x.tolist()]


@every_storage
def test_bytes_are_counted_and_a_state_is_loaded_bit_for_bit(storage: str) -> None:
    params = parameters(storage)
    optimizer = ng.AdamW(params, **ADAMW, storage=storage)
    for step in range(3):
        set_gradients(params, step)
        optimizer.step()
    visible = VISIBLE[STORAGES[storage].visible][0] / 8
    large = optimizer.states()[params[0]]
    kept = sum(t.element_size() for name, t in large.items() if name != "step")
    assert kept + 2 * visible == STORAGES[storage].bytes_per_param == (32 if visible == 8 else 28)
    others = [nn.Parameter(p.detach().clone()) for p in params]
    resumed = ng.AdamW(others, **ADAMW, storage=storage)
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for step in range(3, 6):
        for some in (params, others):
            set_gradients(some, step)
        optimizer.step()
        resumed.step()
    for mine, theirs in zip(params, others, strict=True):
        assert_same_bits(mine.detach(), theirs.detach())
        assert_same_bits(optimizer.stored(mine), resumed.stored(theirs))


def test_a_float64_state_of_torch_is_taken_without_loss(recwarn: pytest.WarningsRecorder) -> None:
    params = parameters("float64/float64")
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    made = torch.optim.AdamW(theirs, **ADAMW)
    set_gradients(theirs, 0)
    made.step()
    optimizer = ng.AdamW(params, **ADAMW, storage="float64/float64")
    optimizer.load_state_dict(made.state_dict())
    assert not [str(each.message) for each in recwarn if "was cut" in str(each.message)]
    for mine, other in zip(params, theirs, strict=True):
        assert_same_bits(optimizer.stored(mine, "exp_avg_sq"), made.state[other]["exp_avg_sq"])


def test_steps_are_those_of_torch_within_a_few_ulps() -> None:
    params = parameters("float64/float64")
    theirs = [nn.Parameter(p.detach().clone()) for p in params]
    optimizer, made = ng.AdamW(params, **ADAMW, storage="float64/float64"), torch.optim.AdamW(theirs, **ADAMW)
    for step in range(20):
        for some in (params, theirs):
            set_gradients(some, step)
        optimizer.step()
        made.step()
    for mine, other in zip(params, theirs, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-13, atol=1e-14)


@every_storage
def test_a_weight_that_someone_else_sets_is_adopted(storage: str) -> None:
    params = parameters(storage)
    optimizer = ng.AdamW(params, **ADAMW, storage=storage)
    for step in range(2):
        set_gradients(params, step)
        optimizer.step()
    stored = optimizer.stored(params[0])
    with torch.no_grad():
        params[0][3:5].fill_(0.25)
    optimizer.refresh()
    now = optimizer.stored(params[0])
    assert bool((now[3:5] == 0.25).all())
    assert_same_bits(now[5:], stored[5:])


@every_storage
@pytest.mark.parametrize("place", ["weight", "gradient"])
def test_a_nan_is_stored_without_sign_and_payload(storage: str, place: str) -> None:
    found = []
    for sign in (1.0, -1.0):
        params = parameters(storage)
        optimizer = ng.AdamW(params, **ADAMW, storage=storage)
        set_gradients(params, 0)
        target = params[0].detach() if place == "weight" else params[0].grad
        assert target is not None
        target[0, :3] = torch.copysign(torch.tensor(math.nan), torch.tensor(sign)).to(target.dtype)
        optimizer.step()
        found.append([params[0].detach(), *optimizer.states()[params[0]].values()])
    for one, other in zip(*found, strict=True):
        assert_same_bits(one, other)
    # A float16 weight holds it as infinity.
    assert not found[0][0][0, :3].isfinite().any() and not found[0][0][0, :3].signbit().any()


def test_clipping_is_in_float64() -> None:
    """A clipped gradient is the gradient times a float64: through float32 it would be 1e-8 off."""
    params = parameters("float64/float64")
    optimizer = ng.SGD(params, lr=1.0, storage="float64/float64", max_grad_norm=0.3)
    set_gradients(params, 0)
    before = [p.detach().clone() for p in params]
    gradients = flat([p.grad for p in params if p.grad is not None])
    optimizer.step()
    norm = math.sqrt(math.fsum(value * value for value in gradients))
    assert optimizer.grad_norm is not None and optimizer.grad_norm.dtype is torch.float64
    assert optimizer.grad_norm.item() == pytest.approx(norm, rel=1e-15)
    wanted = [w - g * (0.3 / (norm + 1e-6)) for w, g in zip(flat(before), gradients, strict=True)]
    assert max(abs(a - b) for a, b in zip(flat(params), wanted, strict=True)) < 1e-15


@pytest.mark.parametrize("rule", ["muon", "adafactor"])
def test_a_matrix_rule_is_refused_with_advice(rule: str) -> None:
    with pytest.raises(ng.errors.RecipeError, match="whose updates are float64, and matrix rules decide in float32"):
        ng.prepare(nn.Linear(4, 4), "float64/float64", rule=rule, lr=0.1)


def test_refusals_of_float64_weights_name_the_storage_that_takes_them() -> None:
    weight = nn.Parameter(torch.ones(3, dtype=torch.float64))
    for options in ({}, {"storage": "float64"}):
        with pytest.raises(ng.errors.RecipeError, match="'float64/float64'"):
            ng.AdamW([weight], **options)
    assert ng.AdamW([weight], storage="float64/float64").param_groups[0]["params"] == [weight]


def test_planes_of_float64_lie_one_to_a_lane() -> None:
    for name in DOUBLE:
        row = STORAGES[name]
        lanes = codec.num_lanes(row)
        assert lanes == (1 if row.visible == "float64" else 2)
        for plane in codec.planes(row):
            words = codec.allocate(row, plane, (5, 3), torch.device("cpu"))
            assert words.dtype is torch.int64 and words.shape == (lanes, -(-15 // lanes))
            values = drawn((5, 3), 4)
            packed = codec.from_parameter_order(row, plane, values)
            assert_same_bits(codec.to_parameter_order(row, plane, packed, (5, 3)), values)


def summed(row: str, dtype: torch.dtype, parts: list[float]) -> Tensor:
    parameter = nn.Parameter(torch.zeros(3, 2, dtype=dtype))
    accumulator = ng.GradientAccumulator([parameter], row)
    for part in parts:
        gradient = torch.full_like(parameter, part)
        parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient  # as autograd does
        accumulator.accumulate()
    assert accumulator.bytes_per_param() == (8 if row == "float64" else 0 if dtype is torch.float32 else 4)
    accumulator.finish()
    assert parameter.grad is not None and parameter.grad.dtype is dtype
    return parameter.grad


@pytest.mark.parametrize(
    ("dtype", "parts", "sum_of_all", "in_float32"),
    [
        # Just below the tie of 1 and the next number; in float32 it is the tie.
        (torch.bfloat16, [1.0, 2.0**-8, -(2.0**-30)], 1.0, 1 + 2.0**-7),
        (torch.float16, [1.0, 2.0**-11, -(2.0**-24)], 1.0, 1 + 2.0**-10),
        (torch.float32, [1.0, 2.0**-24, 2.0**-24], 1 + 2.0**-23, 1.0),
    ],
)
def test_micro_batches_are_summed_in_float64_and_rounded_once(
    dtype: torch.dtype, parts: list[float], sum_of_all: float, in_float32: float
) -> None:
    assert summed("float64", dtype, parts).unique().tolist() == [sum_of_all]
    assert summed("float32", dtype, parts).unique().tolist() == [in_float32]
