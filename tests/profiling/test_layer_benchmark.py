"""What is timed is what a layer does: its operations give the layer's own output and gradients. No time is measured."""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import nn

from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.planner.roofline import Setting, Shape
from narrowgauge.profiling.measurement import narrow_operations, operands, operations_of
from narrowgauge.spec.computes import COMPUTES, VARIANTS, Compute, casts_made

CPU = torch.device("cpu")
NARROW = [row for row in COMPUTES.values() if not row.is_wide]
NARROW += [VARIANTS["float8-tensor+smooth"], VARIANTS["float8-delayed-e5m2+smooth"]]
TOKENS = 40


@pytest.mark.parametrize("row", NARROW, ids=lambda row: row.name)
@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_the_parts_of_a_layer_make_the_layer(row: Compute, weights: str) -> None:
    shape = Shape(48, 64)
    x, weight, grad = operands(shape, Setting(row.name, "bfloat16", weights), TOKENS, CPU)
    layer = nn.Linear(shape.in_features, shape.out_features, bias=False)
    layer.weight = nn.Parameter(weight)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        [narrow] = swap_linears(nn.Sequential(layer), lambda _: row).layers.values()
    parts = narrow_operations(row, x, weight, grad, narrow.keys())
    assert set(parts) == {*casts_made(row), "output", "grad_input", "grad_weight"}
    x.requires_grad_()
    y = layer(x)
    y.backward(grad)
    for place, of_layer in (("output", y), ("grad_input", x.grad), ("grad_weight", layer.weight.grad)):
        timed = parts[place]()
        assert timed.dtype == of_layer.dtype
        assert torch.equal(timed, of_layer), place


@pytest.mark.parametrize("shape", [Shape(48, 64), Shape(48, 64, True)], ids=["linear", "transposed"])
@pytest.mark.parametrize("weights", ["bfloat16", "float32"])
def test_plain_parts_are_what_pytorch_does(shape: Shape, weights: str) -> None:
    setting = Setting("bfloat16", "bfloat16", weights)
    x, weight, grad = operands(shape, setting, TOKENS, CPU)
    assert weight.shape == (48, 64) and weight.is_contiguous() != shape.is_transposed
    parts = operations_of(shape, setting, TOKENS, CPU)
    x.requires_grad_()
    weight = weight.detach().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = nn.functional.linear(x, weight)
    y.backward(grad)
    assert ("output.right" in parts) == (weights == "float32")
    for place, expected in (("output", y), ("grad_input", x.grad), ("grad_weight", weight.grad)):
        assert torch.equal(parts[place](), expected)
