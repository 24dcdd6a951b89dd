"""What every pair of a rule and a storage does, whatever the two are.

A rule's text and a storage's codes meet in one place, ``decode -> rule -> encode``, so most
contracts could fail for any pair and are asked of all: learning, going on from a copy, odd shapes
and step_gradients, bytes. What a contract asks is in few tests, each of which checks several things
on one optimizer: building and warming up two hundred pairs is what costs.
"""

import math

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.optim.rules.matrix import extras_of
from narrowgauge.spec.storages import STORAGES
from optim.pairs import (
    EVERY,
    RULES,
    SOME,
    build,
    everything,
    kernel_of,
    parameters,
    step_along,
)
from oracles.lion import Lion64
from tensors import (
    assert_same_bits,
    same_bits,
    set_gradients,
    step_gradients,
    take_steps,
)

TORCHS = {
    "adamw": (torch.optim.AdamW, {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
    "adam": (torch.optim.Adam, {"weight_decay": 0.1, "eps": 1e-3}),
    "sgd": (torch.optim.SGD, {"weight_decay": 0.1, "dampening": 0.3}),
    "nesterov": (torch.optim.SGD, {"weight_decay": 0.1}),
    "plain sgd": (torch.optim.SGD, {"weight_decay": 0.1}),
    "lion": (Lion64, {"weight_decay": 0.1, "betas": (0.8, 0.9)}),
}


@pytest.mark.parametrize("rule", TORCHS)
@pytest.mark.parametrize(("storage", "error"), [("float32", 1e-6), ("float64", 1e-14)])
def test_it_is_torchs_own_to_the_last_bits(storage, error, rule):
    """Against float64; a first step, a later one and one after a change of rate differ in their
    formulas. Groups have rates of their own, and a parameter without a gradient counts no step.
    """
    make, options = TORCHS[rule]
    params = parameters(storage)
    groups = [{"params": params[:1]}, {"params": params[1:], "lr": 0.05}]
    ours = build(rule, groups, storage, low_bits="zero", **options)
    wide = [nn.Parameter(p.detach().double()) for p in params]
    groups = [{"params": wide[:1]}, {"params": wide[1:], "lr": 0.05}]
    theirs = make(groups, **{**RULES[rule].options, **options})
    for step in range(6):
        set_gradients(params, step)
        set_gradients(wide, step)
        if step == 1:
            params[2].grad = wide[2].grad = None
        for optimizer in (ours, theirs):
            optimizer.param_groups[0]["lr"] *= 0.5 if step == 3 else 1.0
            optimizer.step()
    for p, q in zip(params, wide, strict=True):
        stored = ours.stored(p)
        torch.testing.assert_close(stored.double(), q.detach(), rtol=error, atol=error)
        assert torch.equal(p, stored.float().to(p.dtype))
        names = ours.state[p].keys() - {"step"}
        assert {ours.state[p][name].dtype for name in names} <= {stored.dtype}


@SOME
def test_gradients_that_are_absent_zero_or_not_finite(rule, storage):
    decay = {"weight_decay": 0.0} if rule != "own" else {}
    params = parameters(storage)
    optimizer = build(rule, params, storage, max_grad_norm=2.0, low_bits="zero", **decay)
    start = [p.detach().clone() for p in params]
    step_along(optimizer, 0.0)
    for p, before in zip(params, start, strict=True):
        assert torch.equal(optimizer.stored(p), before.to(optimizer.stored(p).dtype))
    take_steps(optimizer, range(1))
    unskipped = everything(optimizer)
    for bad, place in ((math.inf, 0), (-math.inf, 1), (math.nan, 2)):
        set_gradients(params, 9)
        params[place].grad.view(-1)[3] = bad
        optimizer.step()
        assert optimizer.num_skipped == place + 1
        assert_same_bits(unskipped, everything(optimizer))
    take_steps(optimizer, range(1, 2))
    before = everything(optimizer)
    set_gradients(params, 2, 0.0)
    params[0].grad = None
    optimizer.step()
    after = everything(optimizer)
    for name, value in before.items():
        assert not name.startswith("0 ") or same_bits(value, after[name]), name
    assert [float(after[f"{k} step"]) for k in range(3)] == [3.0, 4.0, 4.0]
    assert all(optimizer.stored(p).isfinite().all() for p in params)


@pytest.mark.parametrize("storage", STORAGES)
def test_a_nan_reaches_the_weight_unless_a_guard_skips_the_step(storage):
    params = parameters(storage)
    optimizer = build("adamw", params, storage)
    set_gradients(params, 0)
    params[0].grad.view(-1)[3] = math.nan
    optimizer.step()
    assert [int((~p.isfinite()).sum()) for p in params] == [1, 0, 0]


ODD = [(), (0,), (0, 4), (1, 1), (3, 5, 2), (7, 9), (4, 3, 2, 2)]


def strided(values: Tensor) -> Tensor:
    """The same values, at other places in memory."""
    if values.ndim == 4:
        return values.contiguous(memory_format=torch.channels_last)
    backwards = tuple(range(values.ndim))[::-1]
    wide = torch.zeros((*values.shape[::-1], 2), dtype=values.dtype)
    wide[..., 1] = values.permute(backwards)
    return wide[..., 1].permute(backwards)


@SOME
def test_odd_shapes_and_strides_have_the_same_bits(rule, storage):
    dense = parameters(storage, ODD)
    odd = [nn.Parameter(strided(p.detach())) for p in dense]
    pair = [build(rule, params, storage, max_grad_norm=2.0) for params in (dense, odd)]
    places = [(p.data_ptr(), p.stride()) for p in odd]
    before = [p.detach().clone() for p in dense]
    for step in range(3):
        for p, q, gradient in zip(dense, odd, step_gradients(dense, step), strict=True):
            p.grad, q.grad = gradient, strided(gradient)
            if step == 1:  # the strides of a gradient are its own
                p.grad, q.grad = q.grad, p.grad
        for optimizer in pair:
            optimizer.step()
    assert_same_bits(*map(everything, pair))
    assert places == [(p.data_ptr(), p.stride()) for p in odd]
    for p, value in zip(dense, before, strict=True):
        assert p.numel() < 2 or not torch.equal(p, value)


@EVERY
def test_the_bytes_counted_are_those_of_the_tables(rule, storage):
    """Those of weight, gradient and states, of bounds of rows and of a matrix rule's own states."""
    optimizer = build(rule, parameters(storage, [(16, 32)]), storage)
    take_steps(optimizer, range(1))
    kernel_rule, row = kernel_of(rule, storage)
    extras = extras_of(kernel_rule, (16, 32), optimizer.param_groups[0])
    count = 16 * len(row.scaled) + sum(map(math.prod, extras.values()))
    assert optimizer.bytes_per_param() == row.bytes_per_param + 4 * count / (16 * 32)
