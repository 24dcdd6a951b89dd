"""What a step does with its gradients' norm: clip, and skip."""

from __future__ import annotations

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.optim.clip import decide
from tensors import gaussian


@pytest.mark.parametrize("size", [1.0, 1e-8])
def test_clipping_scales_as_torch_does(size: float) -> None:
    """Also where the norm is as small as what is added to it."""
    parameter = torch.nn.Parameter(torch.zeros(190, 180))
    parameter.grad = gaussian(190, 180, scale=size)
    limit = 0.25 * size
    ng.SGD([parameter], lr=1.0, weight_decay=0.0, storage="float32", max_grad_norm=limit).step()
    torch.nn.utils.clip_grad_norm_([parameter], limit)
    torch.testing.assert_close(parameter.detach(), -parameter.grad, rtol=1e-6, atol=0)


@pytest.mark.parametrize("loss_scale", [1.0, 8.0])
def test_a_norm_below_the_limit_leaves_the_gradients(loss_scale: float) -> None:
    norm = torch.tensor(0.2 * loss_scale)
    factors = []
    for limit in (1.0, math.inf):
        options = torch.tensor([limit, loss_scale, 0.0])
        factors.append(float(decide(norm, options)[0]))
    assert factors == [1 / loss_scale] * 2
