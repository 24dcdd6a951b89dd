"""What a step does with its gradients' norm: clip, skip, and move the loss scale."""

from __future__ import annotations

import math

import pytest
import torch

import narrowgauge as ng
from narrowgauge.optim.clip import Decision, StepControl, decide
from optim.pairs import FEW, build, everything, parameters
from tensors import assert_same_bits, step_gradients


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


@FEW
@pytest.mark.parametrize("scale", [None, 8.0], ids=["unscaled", "scaled"])
def test_a_step_below_the_limit_is_the_unclipped_step(rule: str, storage: str, scale: float | None) -> None:
    def stepped(max_norm: float | None) -> dict[str, torch.Tensor]:
        scaler = None if scale is None else ng.LossScaler(initial=scale)
        weights = parameters(storage)
        optimizer = build(rule, weights, storage, max_grad_norm=max_norm, loss_scaler=scaler)
        for step in range(3):
            gradients = step_gradients(weights, step, 2.0**-6)  # of norm 0.2
            loss = sum((w * g).sum().float() for w, g in zip(weights, gradients, strict=True))
            (loss if scaler is None else scaler.scale(loss)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return everything(optimizer)

    assert_same_bits(stepped(1.0), stepped(None))


@pytest.mark.parametrize(("norm", "skips"), [(2.0, 0.0), (2.1, 1.0), (math.inf, 1.0)])
def test_a_norm_above_the_bound_is_skipped_and_one_at_the_bound_is_not(norm: float, skips: float) -> None:
    options = torch.tensor([math.inf, 2.0, 1.0, 0.0])
    assert decide(torch.tensor(norm), options)[1] == skips
