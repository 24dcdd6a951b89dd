"""Random bits are a hash of seed, layer, operand and content: whatever steps the model, wherever it
is resumed.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn

from matmul.scenarios import gaussian, make_layer, passed
from narrowgauge.matmul.operand import layer_keys
from narrowgauge.matmul.swapping import swap_linears

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("compute", ["int8-row", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("changes", ["the weight", "the input"])
def test_a_gradient_that_repeats_has_new_noise_in_each_step(compute: str, changes: str) -> None:
    """A good part of the error differs from step to step; the rest is the weight's own cast."""
    layer, _ = make_layer(compute, 64, 48, bias=False)
    start = layer.weight.detach().clone()
    grad = gaussian(65, 48, seed=4)
    errors = []
    for step in range(24):
        x = gaussian(65, 64, seed=step if changes == "the input" else 3)
        if changes == "the weight":
            with torch.no_grad():
                layer.weight.copy_(start * (1 + 0.02 * gaussian(48, 64, seed=50 + step)))
        result = passed(layer, x, grad).grad_input.double()
        errors.append(result - grad.double() @ layer.weight.detach().double())
    stacked = torch.stack(errors)
    assert stacked.var(0).mean() > 0.3 * stacked.square().mean()


@pytest.mark.parametrize("has_two_tokens", [False, True])
@pytest.mark.parametrize("compute", ["int8-row", "nvfp4"])
def test_micro_batches_round_independently(compute: str, has_two_tokens: bool) -> None:
    """Of equal mean and unequal values, 8 of them: the noise of the sum has the variance of
    independent ones. A loss on the last tokens alone, as a classifier's, leaves all other gradients
    0.
    """
    layer, _ = make_layer(compute, 64, 48, bias=False)
    sums = []
    parts = []
    for seed in range(12):
        layer.seed = seed
        layer.key = layer_keys(layer.names, layer.seed)
        of_seed = []
        for micro_batch in range(8):
            x = gaussian(2, 65, 64, seed=micro_batch) + 0.5
            grad = gaussian(2, 65, 48, seed=100 + micro_batch)
            if has_two_tokens:
                grad[:, :-2] = 0
                grad[0] = 0
            of_seed.append(torch.autograd.grad(layer(x), layer.weight, grad)[0].double())
        sums.append(sum(of_seed))
        parts.append(torch.stack(of_seed))
    ratio = torch.stack(sums).var(0).mean() / torch.stack(parts).var(0).sum(0).mean()
    assert 0.8 < ratio < 1.2  # 1.4 with shared bits


@pytest.mark.parametrize("wraps", [False, True])
def test_two_passes_before_a_backward_under_ddp(wraps: bool, one_rank: None) -> None:
    """DDP writes buffers before each pass, also those that an earlier pass has saved."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    swap_linears(model, "int8-row")
    call = nn.parallel.DistributedDataParallel(model) if wraps else model
    losses = [call(torch.full((2, 4, 32), value)).square().mean() for value in (0.5, 1.0)]
    sum(losses).backward()
    assert model[0].weight.grad.any()
