"""Infinite values are values: a weight of ±inf stays, and a huge gradient costs its element."""

import math

import pytest
import torch
from torch import Tensor

from narrowgauge.spec.storages import STORAGES
from optim.pairs import build, is_legal, parameters
from tensors import take_steps

pytestmark = pytest.mark.usefixtures("one_thread")
# Infinity and NaN of float16 weights are read as 65536, from which training can return.
WIDE_ENOUGH = [name for name, row in STORAGES.items() if row.visible != "float16"]


@pytest.mark.parametrize("decay", [0.0, 0.1])
@pytest.mark.parametrize("rule", ["adamw", "adam", "sgd", "lion"])
@pytest.mark.parametrize("storage", WIDE_ENOUGH)
def test_an_infinite_weight_stays_and_the_others_of_its_row_do_not_notice(storage, rule, decay):
    """As torch keeps them: the decay rate of a dead head, a masked bias."""
    if not is_legal(rule, storage):
        return
    stepped = []
    for infinity in (math.inf, 1.0):
        (weight,) = parameters(storage, [(4, 64)])
        weight.data[0, :2] = torch.tensor([infinity, -infinity])
        optimizer = build(rule, [weight], storage, weight_decay=decay, low_bits="zero")
        take_steps(optimizer, range(3))
        stepped.append((weight.detach(), optimizer.stored(weight)))
    for values in stepped[0]:
        assert values[0, :2].tolist() == [math.inf, -math.inf]
    for ours, theirs in zip(*stepped, strict=True):
        assert ours.flatten()[2:].isfinite().all()
        if rule == "adamw":  # no row is bounded by its weights
            assert torch.equal(ours.flatten()[2:], theirs.flatten()[2:])


def moved(storage: str, glitch: float) -> Tensor:
    """Return how far weights move in steps 100 to 120 if one gradient of the tenth is a glitch."""
    torch.manual_seed(0)
    (weight,) = parameters(storage, [(2, 64)], scale=0.0)
    options = {"lr": 1e-3, "betas": (0.9, 0.95), "weight_decay": 0.0}
    optimizer = build("adamw", [weight], storage, low_bits="zero", **options)
    before = weight.detach()
    for step in range(320):
        weight.grad = torch.randn_like(weight) * 1e-2 + 1e-2
        if step == 10:
            weight.grad[0, 0] = glitch
        if step == 300:
            before = optimizer.stored(weight)
        optimizer.step()
    return optimizer.stored(weight) - before


@pytest.mark.parametrize("glitch", [1e10, math.inf])
@pytest.mark.parametrize("storage", ["compact", "states8", "float32-states8"])
def test_one_huge_gradient_costs_its_element_and_not_its_row(storage, glitch):
    others = moved(storage, glitch)[0, 1:].mean() / moved(storage, 1e-2)[0, 1:].mean()
    assert 0.9 < float(others) < 1.1
