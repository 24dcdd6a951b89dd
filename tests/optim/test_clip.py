"""What a step does with its gradients' norm: clip, and skip."""

import math
from itertools import product

import numpy as np
import pytest
import torch

import narrowgauge as ng
from narrowgauge.optim.clip import OPTIONS, decide
from tensors import gaussian


@pytest.mark.parametrize(("size", "scale"), [(1.0, 1.0), (1e-8, 1.0), (1.0, 1024.0)])
def test_clipping_scales_as_torch_does(size, scale):
    """Also where the norm is as small as what is added to it, and where the loss is scaled."""
    parameter = torch.nn.Parameter(torch.zeros(190, 180))
    gradient = gaussian(190, 180, scale=size)
    parameter.grad = gradient * scale
    optimizer = ng.SGD([parameter], lr=1.0, storage="float32", max_grad_norm=0.25 * size)
    optimizer.grad_scale = torch.tensor(scale)  # as GradScaler sets it
    optimizer.step()
    parameter.grad = gradient
    norm = torch.nn.utils.clip_grad_norm_([parameter], 0.25 * size)
    torch.testing.assert_close(optimizer.grad_norm, norm)
    torch.testing.assert_close(parameter.detach(), -gradient, rtol=1e-6, atol=0)


def test_a_host_decides_with_the_bits_of_a_device():
    """A norm below the limit leaves the gradients: then the factor is that without a limit."""
    values = [0.0, 1e-45, 1e-8, 0.2, 3.1, 7.7, 3e38, math.inf, math.nan]
    for norm, limit, scale, found_inf in product(values, values[2:8], (1.0, 3.0, 0.0), (0.0, 1.0)):
        numbers = np.array([norm, limit, scale, found_inf, *OPTIONS[3:]], np.float32)
        with np.errstate(all="ignore"):
            on_host = np.array(decide(np, numbers[0], numbers[1:]), np.float32)
        on_device = torch.from_numpy(numbers)
        decision = [float(x) for x in decide(torch, on_device[0], on_device[1:])]
        assert np.array_equal(on_host, np.float32(decision), equal_nan=True), numbers
        if scale and norm / scale + 1e-6 < limit / 2:
            assert on_host[0] == torch.tensor(scale).reciprocal()
