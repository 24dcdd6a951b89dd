"""Grouped linears: each expert's values are those of a linear layer on that expert's tokens, bit
for bit.
"""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from matmul.scenarios import EIGHT
from narrowgauge.matmul.experts import GroupedLinear
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.computes import COMPUTES, Compute

pytestmark = pytest.mark.filterwarnings("ignore")

ENDS = (10, 10, 30, 37)  # the second of four experts got no tokens, and three tokens have no expert


def mixture(
    ends: tuple[int, ...],
    tokens: int,
    sides: tuple[int, int],
    dtype: torch.dtype = torch.bfloat16,
) -> tuple[Tensor, ...]:
    """x with one outlier feature, weights, offsets, biases, the output's gradient."""
    draw = torch.Generator().manual_seed(1)
    inputs, outputs = sides
    x = torch.randn(tokens, inputs, generator=draw)
    x[:, 3] *= 20
    weights = torch.randn(len(ends), outputs, inputs, generator=draw)
    biases = torch.randn(len(ends), outputs, generator=draw)
    grad = torch.randn(tokens, outputs, generator=draw)
    offsets = torch.tensor(ends, dtype=torch.int32)
    return x.to(dtype), weights.to(dtype), offsets, biases.to(dtype), grad.to(dtype)


def plain(
    row: str | Compute, weight: Tensor, bias: Tensor | None, like: GroupedLinear, expert: int
) -> Linear:
    """One expert as a layer of its own."""
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, dtype=weight.dtype)
    holder = nn.ModuleDict({"expert": layer})
    with torch.no_grad():
        layer.weight.copy_(weight)
        if bias is not None:
            layer.bias.copy_(bias)
    swapped = swap_linears(holder, lambda name: row, keep=()).layers["expert"]  # scalify's too
    swapped.key.copy_(like.key[expert])
    return swapped


@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("row", [row.name for row in EIGHT] + ["int8-outlier-codes"])
def test_each_expert_is_a_linear_layer_of_its_own(
    row: str, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weights, offsets, bias, grad = mixture(ENDS, 40, (48, 40), dtype)
    weights.requires_grad_()
    own_bias = bias.requires_grad_() if with_bias else None
    layer = GroupedLinear(4, "experts.down_proj", COMPUTES[row], seed=77)
    y = layer(x.requires_grad_(), weights, offsets, own_bias)
    y[: ENDS[-1]].backward(grad[: ENDS[-1]])
    for expert, (start, stop) in enumerate(pairwise((0, *ENDS))):
        tokens = slice(start, stop)
        if start == stop:
            assert not weights.grad[expert].any()
            continue
        alone = plain(
            COMPUTES[row],
            weights[expert],
            None if own_bias is None else own_bias[expert],
            layer,
            expert,
        )
        group = x.detach()[tokens].clone().requires_grad_()
        expected = alone(group)
        expected.backward(grad[tokens])
        assert torch.equal(y[tokens], expected)
        assert torch.equal(x.grad[tokens], group.grad)
        assert torch.equal(weights.grad[expert], alone.weight.grad)
        if with_bias:
            assert torch.equal(bias.grad[expert], alone.bias.grad)


# ── all experts in one product ────────────────────────────────────────────────────────────────────

ROW = COMPUTES["float8-row"]
