"""A reduction ends with its model."""

import gc
import weakref

from torch import nn

import narrowgauge as ng


def test_a_model_that_is_gone_leaves_no_reduction():
    model = nn.Linear(2, 2)
    reduction = weakref.ref(ng.reduce_gradients_with(model, "reproducible"))
    gc.collect()
    assert reduction() is not None
    del model
    gc.collect()
    assert reduction() is None
