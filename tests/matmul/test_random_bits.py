"""Random bits are a hash of seed, layer, operand and content: whatever steps the model, wherever it
is resumed.
"""

import pytest
import torch
from torch import nn

from matmul.scenarios import gaussian, make_layer
from narrowgauge.matmul.operand import layer_keys
from narrowgauge.matmul.swapping import swap_linears

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("differs", ["weight", "input", "gradient", "last tokens"])
@pytest.mark.parametrize("compute", ["int8-row", "nvfp4"])
def test_passes_of_other_content_round_independently(compute, differs):
    """The noise of a sum over eight of them has the variance of independent ones. A loss on the last
    tokens alone, as a classifier's, leaves all other gradients 0; then the inputs differ too.
    """
    layer, _ = make_layer(compute, 64, 48, bias=False)
    start = layer.weight.detach().clone()
    sums = []
    variances = []
    for seed in range(12):
        layer.key = layer_keys(layer.names, seed)
        gradients = []
        for number in range(8):
            seeds = dict.fromkeys(("weight", "input", "gradient", "last tokens"), 100)
            seeds[differs] = number
            layer.weight.data = start * (1 + 0.02 * gaussian(48, 64, seed=seeds["weight"]))
            x = gaussian(2, 65, 64, seed=seeds["input"] + seeds["last tokens"]) + 0.5
            grad = gaussian(2, 65, 48, seed=seeds["gradient"] + seeds["last tokens"])
            if differs == "last tokens":
                grad[:, :-2] = 0
                grad[0] = 0
            gradients.append(torch.autograd.grad(layer(x), layer.weight, grad)[0].double())
        sums.append(sum(gradients))
        variances.append(torch.stack(gradients))
    ratio = torch.stack(sums).var(0).mean() / torch.stack(variances).var(0).sum(0).mean()
    assert 0.8 < ratio < 1.2  # 1.4 with shared bits, and 8 where all but the weight is equal


@pytest.mark.parametrize("wraps", [False, True])
def test_two_passes_before_a_backward_under_ddp(wraps, one_rank):
    """DDP writes buffers before each pass, also those that an earlier pass has saved."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
    swap_linears(model, "int8-row")
    call = nn.parallel.DistributedDataParallel(model) if wraps else model
    losses = [call(torch.full((2, 4, 32), value)).square().mean() for value in (0.5, 1.0)]
    sum(losses).backward()
    assert model[0].weight.grad.any()
