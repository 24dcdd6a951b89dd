"""A layer serves every sequence length: one graph when compiled, one program when exported."""

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from narrowgauge.matmul.inference import quantize_for_inference
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.computes import COMPUTES, stores_codes

TRAINED = [name for name, row in COMPUTES.items() if not row.transform and row.dtype == "bfloat16"]
TRAINED.remove("mxfp4")  # its blocks are mxfp8's, its format and draws nvfp4's; a trace takes 10 s
SERVED = [name for name, row in COMPUTES.items() if stores_codes(row)]
WAYS = [*(("trained", name) for name in TRAINED), *(("served", name) for name in SERVED)]
LENGTHS = (16, 33, 48, 7)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("way", "compute"), WAYS)
def test_four_lengths_make_one_graph_and_one_program(way, compute):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32)).bfloat16()
    if way == "served":
        quantize_for_inference(model, compute)
    else:
        swap_linears(model, lambda _: compute)
    torch._dynamo.reset()
    counters.clear()
    compiled = torch.compile(model, dynamic=True, backend="aot_eager")
    lengths = {1: torch.export.Dim("t", min=2, max=4096)}
    example = torch.randn(4, 16, 64).bfloat16()
    for length in LENGTHS:
        # More than a block of tokens, since a compiler makes a graph of its own for sizes of one, and
        # at most 1,024: a processor without int8 products sums longer ones in parts.
        x = torch.randn(20, length, 64).bfloat16().requires_grad_(way == "trained")
        y = compiled(x)
        if way == "trained":
            y.float().sum().backward()
        else:
            assert torch.equal(y, model(x))
    assert counters["stats"]["unique_graphs"] == 1
    model.eval()
    exported = torch.export.export(model, (example,), dynamic_shapes=(lengths,)).module()
    for length in LENGTHS:
        x = torch.randn(4, length, 64).bfloat16()
        assert torch.equal(exported(x), model(x))
