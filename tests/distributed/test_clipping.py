"""PyTorch's own clipping of gradients that were summed exactly is refused; of all others it is
PyTorch's.
"""

from __future__ import annotations

import gc
import math
import weakref

import pytest
import torch
from torch import nn
from torch.nn import utils

import narrowgauge as ng
from narrowgauge.distributed.reduction import reduction_of
from narrowgauge.errors import RecipeError


def summed(reduction: str = "reproducible") -> nn.Linear:
    torch.manual_seed(0)
    model = nn.Linear(64, 64)
    inputs = torch.randn(5, 64)
    with ng.reduce_gradients_with(model, reduction).micro_batch():
        model(inputs).square().sum().backward()
    return model


def test_a_norm_that_depends_on_order_is_refused_and_a_maximum_is_not() -> None:
    model = summed()
    gradients = [p.grad for p in model.parameters()]
    for norm in (utils.get_total_norm, lambda _: utils.clip_grad_norm_(model.parameters(), 1.0)):
        with pytest.raises(RecipeError, match=r"depends on the number of ranks.*max_grad_norm="):
            norm(gradients)
    largest = max(g.abs().max() for g in gradients)
    assert utils.clip_grad_norm_(model.parameters(), math.inf, norm_type=math.inf) == largest


def test_other_gradients_are_clipped_as_ever() -> None:
    summed()
    theirs = nn.Linear(64, 64)
    theirs(torch.randn(5, 64)).square().sum().backward()
    closed = summed()
    reduction_of(closed).close()
    for model in (theirs, summed("float32"), closed):
        parts = torch.stack([p.grad.norm() for p in model.parameters() if p.grad is not None])
        assert utils.clip_grad_norm_(model.parameters(), math.inf) == parts.norm()


def test_a_model_that_is_gone_leaves_no_reduction() -> None:
    model = nn.Linear(2, 2)
    reduction = weakref.ref(ng.reduce_gradients_with(model, "reproducible"))
    gc.collect()
    assert reduction() is not None
    del model
    gc.collect()
    assert reduction() is None
