"""What a step does with its gradients' norm: clip, skip, and move the loss scale."""

from __future__ import annotations

import math

import torch

import narrowgauge as ng
from narrowgauge.optim.clip import Decision, StepControl


def decided(gradients: list[torch.Tensor], max_norm: float) -> Decision:
    control = StepControl(lambda *_: False)
    device = torch.device("cpu")
    return control(
        gradients, device, max_norm=max_norm, skip_above=math.inf, scaler=None, grad_scale=None, found_inf=None
    )


def test_clipping_scales_as_torch_does() -> None:
    gradient = torch.randn(190, 180, generator=torch.Generator().manual_seed(0))
    parameter = torch.nn.Parameter(torch.zeros_like(gradient))
    parameter.grad = gradient.clone()
    torch.nn.utils.clip_grad_norm_([parameter], 0.25)
    scale = decided([gradient], 0.25).control[0]
    torch.testing.assert_close(gradient * scale, parameter.grad, rtol=1e-6, atol=0)


def test_a_spike_that_is_skipped_does_not_lower_the_loss_scale() -> None:
    scaler = ng.LossScaler(initial=4.0, hysteresis=1)
    weight = torch.nn.Parameter(torch.ones(4, 4).half())
    optimizer = ng.AdamW([weight], lr=0.1, storage="float16/split", audit_every=0, loss_scaler=scaler)
    optimizer.skip_above = 1.0
    scaler.scale((weight.float() * 2.0).sum()).backward()
    optimizer.step()
    assert optimizer.num_skipped == 1 and float(scaler.scale_tensor) == 4.0
