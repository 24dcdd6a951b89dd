"""The optimizer among others: tied, frozen and late weights, groups, torch's own hooks and
schedules, a scaled loss.

None of this looks at what a rule computes or a storage keeps, so it is asked of a few pairs.
"""

import math

import pytest
import torch

import narrowgauge as ng
from optim.pairs import build, everything, parameters, step_along, unchanged
from tensors import (
    assert_same_bits,
    parameters_of,
    peak_bytes,
    set_gradients,
    step_gradients,
)
from text.refusals import refused


@pytest.mark.parametrize(
    ("rule", "storage", "compile"),
    [
        ("adamw", "word", False),
        ("muon", "kahan", False),
        ("galore", "word", False),
        ("plain sgd", "naive", True),
    ],
)
def test_steps_have_the_same_bits_under_autocast_and_any_default_dtype_and_device(
    rule, storage, compile
):
    """They are the user's to choose: no step may depend on them, nor what is saved and loaded, nor
    what runs compiled.
    """
    outcomes = []
    for dtype, device, is_autocast in (
        (torch.float32, "cpu", False),
        (torch.float32, "cpu", True),
        (torch.float64, "cpu", False),
        (torch.float32, "meta", False),
    ):
        optimizer = build(rule, parameters(storage), storage, max_grad_norm=0.5, audit_every=3)
        optimizer.compile = compile
        for step in range(3):
            set_gradients(parameters_of(optimizer), step)
            torch.set_default_dtype(dtype)
            try:
                with torch.device(device), torch.autocast("cpu", torch.bfloat16, is_autocast):
                    optimizer.step()
                    ran = set(optimizer.ran_compiled().values())
                    optimizer.load_state_dict(optimizer.state_dict())
            finally:
                torch.set_default_dtype(torch.float32)
        assert (ran == {"C++"}) == compile
        assert optimizer.num_skipped == 0 and optimizer.grad_norm is not None
        outcomes.append({**everything(optimizer), "norm": optimizer.grad_norm.reshape(1)})
        assert_same_bits(outcomes[0], outcomes[-1])


def test_the_first_step_of_a_large_tensor_takes_little_memory():
    """It is proved on short cases."""
    (weight,) = parameters("exact", [(1 << 12, 1 << 10)])
    options = {"momentum": 0.9, "storage": "exact", "compile": True, "low_bits": "zero"}
    optimizer = ng.SGD([weight], audit_every=0, **options)
    optimizer.make_missing(optimizer.param_groups[0], [weight])
    set_gradients([weight], 0)
    assert peak_bytes(optimizer.step) < weight.nbytes
    assert set(optimizer.ran_compiled().values()) == {"C++"}


SCALED = [
    ("adamw", "float16/split", ""), ("lion", "float16/split", ""),
    ("adamw", "float32", "unscaled before"),  # which torch does for float32 alone
]  # fmt: skip


@pytest.mark.parametrize(("rule", "storage", "kind"), SCALED)
def test_an_overflow_is_a_step_attempted_and_not_taken(rule, storage, kind):
    """The same bits as without a scale, with a schedule that counts all four steps and a rule that
    counts three.
    """
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**6)
    scaled = build(rule, parameters(storage), storage)
    plain = build(rule, parameters(storage), storage, max_grad_norm=math.inf)
    schedules = []
    for optimizer in (scaled, plain):
        schedules.append(torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5))
    params = parameters_of(scaled)
    for step in range(4):
        slopes = step_gradients(params, step)
        if step == 1:
            slopes[2] *= math.inf
        scaled.zero_grad()
        for p, q, slope in zip(params, parameters_of(plain), slopes, strict=True):
            q.grad = slope
            scaler.scale((p * slope).float().sum()).backward()
        if kind:
            scaler.unscale_(scaled)
        scaler.step(scaled)
        scaler.update()
        plain.step()
        for schedule in schedules:
            schedule.step()
    # Where GradScaler unscales gradients itself, it does not even ask for a step that overflowed.
    assert scaled.num_skipped == int(storage != "float32")
    assert [schedule.last_epoch for schedule in schedules] == [4, 4]
    assert float(scaled.state_dict()["state"][0]["step"]) == 3.0
    assert scaler.get_scale() == 2.0**5
    assert_same_bits(everything(scaled), everything(plain))


def test_a_float16_loss_that_nobody_scaled_is_refused_and_nothing_changes():
    """Zero gradients pass: distributed checkpoints make states by a step along them."""
    optimizer = build("adamw", parameters("float16/split"), "float16/split")
    optimizer.scales_loss = True  # as prepare says for float16
    step_along(optimizer, 0.0)
    with unchanged(optimizer), refused("an unscaled loss"):
        step_along(optimizer, 1.0)
