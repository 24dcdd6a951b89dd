"""What a step does with its gradients' norm: clip, and skip."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch

import narrowgauge as ng
from narrowgauge.optim.clip import decide, decide_on_host
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


def test_a_host_decides_with_the_bits_of_a_device() -> None:
    """A norm below the limit leaves the gradients: then the factor is that without a limit."""
    values = [0.0, 1e-45, 1e-8, 0.2, 3.1, 7.7, 3e38, math.inf, math.nan]
    for norm, limit, scale, found_inf in product(values, values[2:8], (1.0, 3.0, 0.0), (0.0, 1.0)):
        options = [limit, scale, found_inf]
        decision = decide(torch.tensor(norm), torch.tensor(options))
        on_host = torch.tensor(decide_on_host(norm, options))
        assert torch.equal(on_host.nan_to_num(-1), decision.nan_to_num(-1)), (norm, options)
        if scale and norm / scale + 1e-6 < limit / 2:
            assert on_host[0] == torch.tensor(scale).reciprocal()
