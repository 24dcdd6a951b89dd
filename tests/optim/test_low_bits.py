"""Random low bits: uniform in the bits of each visible weight's cell, which does not change; and
what they are for.
"""

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.optim.low_bits import random_of, random_offset
from narrowgauge.optim.step import codes
from narrowgauge.spec.storages import STORAGES
from optim.pairs import build, every_value, narrow, parameters, step_along
from tensors import take_steps

FILLED = [name for name, row in STORAGES.items() if row.extra_fields and row.visible != "float32"]


@pytest.mark.parametrize("visible", ["bfloat16", "float16"])
def test_every_value_of_the_cell_rounds_to_the_visible_weight(visible):
    """All 16-bit values beside the ends of the random bits, and some between."""
    every = every_value(visible)
    values = every.float()
    bits = codes.visible_bits(visible, values)
    for random in (0, 1 << 16, 1 << 19, 0x3FFFFFFF, 0x40000000, 0x7FFFFFFF, -(1 << 31), -1):
        offset = random_offset(visible, bits, torch.full_like(bits, random))
        new = codes.visible_value(visible, bits + offset)
        assert torch.equal(new.to(every.dtype), every)
        assert torch.equal(new[values == 0], values[values == 0])


@pytest.mark.parametrize("sign", [1, -1])
@pytest.mark.parametrize("value", [1.0, 0.25, -2.0, 0.13])
@pytest.mark.parametrize(("storage", "bound"), [("exact", 0.01), ("word", 0.04), ("kahan", 0.04)])
def test_the_visible_change_is_the_update(storage, bound, value, sign):
    """Also at powers of two, below which an ulp is half as large: one step of a 16th of an ulp, a
    million equal weights.

    In ``word`` equal weights round alike. In ``kahan`` a step that ends between two weights goes to
    the even one.
    """
    weight = nn.Parameter(torch.full((1024, 1024), value, dtype=torch.bfloat16))
    start = weight.detach().double()
    rate = abs(float(start[0, 0])) * 2.0**-11
    optimizer = ng.SGD([weight], lr=rate, storage=storage, compile=False)
    step_along(optimizer, -sign)
    share = (weight.detach().double() - start).mean() / (sign * rate)
    assert abs(float(share) - 1) < bound


@pytest.mark.parametrize("storage", FILLED)
def test_a_first_step_begins_in_the_cell_and_the_rest_is_as_ever(storage):
    """With a rate of 0 no visible weight changes.

    Equal weights get different low bits, also without a gradient.
    """
    weights = parameters(storage, [(80, 64), (6, 10), (300,)])
    for p in weights:
        p.data.fill_(0.3)
    optimizer = build("adamw", weights, storage, lr=0.0, low_bits="random")
    before = [p.detach().clone() for p in weights]
    step_along(optimizer, 0.0)
    for p, visible in zip(weights, before, strict=True):
        assert torch.equal(p, visible)
        stored = optimizer.stored(p)
        assert torch.equal(stored.to(p.dtype), p)
        assert stored.unique().numel() > min(p.numel() // 3, 60)


def test_weights_of_a_16_bit_run_are_filled_whenever_it_is_taken_over():
    """After three steps of torch's AdamW: the model has no low bits, and its optimizer none either."""
    weights = parameters("word")
    theirs = torch.optim.AdamW(weights, lr=1e-3)
    take_steps(theirs, range(3))
    ours = ng.AdamW(weights, lr=1e-3, compile=False)
    ours.load_state_dict(theirs.state_dict())
    stored = ours.stored(weights[0])
    seen = weights[0].float()
    assert (stored != seen).float().mean() > 0.9 and torch.equal(stored.bfloat16(), weights[0])


def test_names_that_a_model_gives_later_draw_no_bits():
    """As for an audit before the first step."""
    results = []
    for is_named in (False, True):
        torch.manual_seed(0)
        model = nn.Linear(8, 8).bfloat16()
        optimizer = ng.AdamW(model.parameters(), compile=False)
        if is_named:
            ng.audit(optimizer, model)
        take_steps(optimizer, range(1))
        results.append(optimizer.stored(model.weight))
    assert torch.equal(*results)


def test_names_and_places_draw_the_bits_and_a_vector_of_ones_has_none():
    def stored(name, *shapes, low_bits="random"):
        named = [(f"{name}{k}", narrow(*shape)) for k, shape in enumerate(shapes)]
        optimizer = ng.AdamW(named, low_bits=low_bits, seed=3)
        optimizer.make_missing(optimizer.param_groups[0], [p for _, p in named])
        return [optimizer.stored(p) for _, p in named]

    first, second, gains = stored("w", (64, 64), (64, 64), (64,))
    assert (first == second).float().mean() < 0.02 and torch.equal(gains, torch.ones(64))
    assert torch.equal(first, stored("w", (64, 64))[0])
    assert not torch.equal(first, stored("v", (64, 64))[0])
    assert torch.equal(stored("w", (64, 64), low_bits="zero")[0], torch.ones(64, 64))
    zeros = torch.zeros(4, 3, 2)
    drawn = random_of(zeros, 1, "x")
    flat = random_of(zeros.view(24), 1, "x")
    assert torch.equal(drawn.view(24), flat) and drawn.unique().numel() == 24
