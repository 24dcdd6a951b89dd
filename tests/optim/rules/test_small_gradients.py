"""Gradients whose squares vanish in float32 never move a weight by more than float64's AdamW."""

import math

import pytest
import torch
from torch import nn

import narrowgauge as ng

RATE = 1e-3


@pytest.mark.parametrize("storage", ["float32", "exact", "word", "compact", "states8", "kahan"])
@pytest.mark.parametrize("betas", [(0.9, 0.999), (0.9, 0.95)])
def test_no_step_is_longer_than_that_of_float64(storage, betas):
    dtype = torch.float32 if storage == "float32" else torch.bfloat16
    exponents = torch.arange(-126.0, -50)
    gradients = torch.exp2(exponents).repeat_interleave(256).view(-1, 256).to(dtype)
    weight = nn.Parameter(torch.full_like(gradients, 0.5))
    exact = nn.Parameter(weight.detach().double())
    options = {"lr": RATE, "betas": betas, "eps": 0.0, "weight_decay": 0.0}
    optimizer = ng.AdamW([weight], storage=storage, low_bits="zero", audit_every=0, **options)
    reference = torch.optim.AdamW([exact], **options)
    for _ in range(20):
        weight.grad = gradients.clone()
        exact.grad = gradients.double()
        optimizer.step()
        reference.step()
    change = optimizer.stored(weight).double().mean(1) - 0.5
    expected = exact.detach().mean(1) - 0.5
    assert (change <= 0.02 * RATE).all()
    # Averages in bfloat16 vanish between two steps, and a step's own share remains.
    most = 1.1 / math.sqrt(1 - betas[1]) if storage == "kahan" else 1.1
    assert (change > most * expected).all()
    if storage == "float32":  # its range is known
        is_large = exponents > -62
        assert torch.allclose(change[is_large], expected[is_large], rtol=0.01)
