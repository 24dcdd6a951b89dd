"""Grouped linears: each expert's values are those of a linear layer on that expert's tokens, bit
for bit.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from matmul.scenarios import CPU, EIGHT
from narrowgauge.matmul import grouped, native
from narrowgauge.matmul.clock import set_draw
from narrowgauge.matmul.experts import GroupedLinear, _one_by_one, grouped_linear
from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.spec.computes import COMPUTES, Compute
from oracles import cuda_matmuls as device_rules

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
    set_draw([swapped], seed=like.draw.seed)
    return swapped


@pytest.mark.parametrize(("dtype", "with_bias"), [(torch.bfloat16, False), (torch.float32, True)])
@pytest.mark.parametrize("row", [row.name for row in EIGHT] + ["int8-outlier-codes"])
def test_each_expert_is_a_linear_layer_of_its_own(
    row: str, dtype: torch.dtype, with_bias: bool
) -> None:
    x, weights, offsets, bias, grad = mixture(ENDS, 40, (48, 40), dtype)
    weights.requires_grad_()
    own_bias = bias.requires_grad_() if with_bias else None
    layer = GroupedLinear(4, "experts.down_proj", COMPUTES[row])
    set_draw([layer], seed=77)
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


@pytest.fixture
def hopper(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Take the CPU for a chip, and stand-ins for its kernels."""
    monkeypatch.setattr(native, "architecture_of", lambda device: "sm90")
    monkeypatch.setattr(torch, "_scaled_mm", device_rules.scaled_mm_v1)
    monkeypatch.setattr(torch, "_scaled_grouped_mm", device_rules.scaled_grouped_mm)
    native._works.cache_clear()
    grouped.works.cache_clear()
    yield
    native._works.cache_clear()
    grouped.works.cache_clear()


@pytest.mark.parametrize("ends", [(40, 40, 200, 201, 290), (0, 0, 128, 300), (1,)], ids=str)
def test_all_experts_at_once_have_the_bits_of_one_after_the_other(
    hopper: None, ends: tuple[int, ...]
) -> None:
    x, weights, offsets, _, grad = mixture(ends, 300, (64, 96))
    assert grouped.has_kernels(ROW.name, x, weights)
    results = []
    for is_at_once in (True, False):
        own_x, own_weights = x.clone().requires_grad_(), weights.clone().requires_grad_()
        if is_at_once:
            y = grouped_linear(own_x, own_weights, offsets, ROW)
        else:
            y = _one_by_one(own_x, own_weights, offsets, ROW.name, None, None, 1)
        y.backward(grad)
        results.append((y.detach(), own_x.grad, own_weights.grad))
    for at_once, expected in zip(*results, strict=True):
        assert torch.equal(at_once, expected)


def test_biases_are_added_to_the_rounded_product(hopper: None) -> None:
    x, weights, offsets, biases, grad = mixture((40, 40, 200), 210, (64, 96))
    biases.requires_grad_()
    y = grouped_linear(x, weights, offsets, ROW, biases)
    plain = grouped_linear(x, weights, offsets, ROW)
    rows = biases.detach().repeat_interleave(torch.tensor([40, 0, 160]), 0)
    assert torch.equal(y[:200], plain[:200] + rows) and not y[200:].any()
    y.backward(grad)
    for expert, (start, stop) in enumerate(pairwise((0, 40, 40, 200))):
        expected = grad[start:stop].double().sum(0)
        torch.testing.assert_close(biases.grad[expert].double(), expected, rtol=2**-8, atol=1e-5)


def test_a_compiler_gets_one_graph_of_all_experts(hopper: None) -> None:
    x, weights, offsets, _, _ = mixture((40, 40, 200), 210, (64, 96))
    layer = GroupedLinear(3, "experts", ROW)
    assert grouped.has_kernels(ROW.name, x, weights)
    call = torch.compile(layer, backend="eager", fullgraph=True)
    assert torch.equal(call(x, weights, offsets), layer(x, weights, offsets))


@pytest.mark.parametrize("dims", [2, 3], ids=["an empty expert", "scales"])
def test_a_grouped_kernel_that_is_off_in_its_trial_is_not_used(
    hopper: None, dims: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert grouped.works(CPU)
    grouped.works.cache_clear()

    def off(a: Tensor, b: Tensor, *scales: Tensor, **options: Any) -> Tensor:
        result = device_rules.scaled_grouped_mm(a, b, *scales, **options)
        if b.ndim == 2 == dims:
            result[1] = torch.nan
        if b.ndim == 3 == dims:
            result[200:] *= 2
        return result

    monkeypatch.setattr(torch, "_scaled_grouped_mm", off)
    assert not grouped.works(CPU)


def test_a_compute_without_a_grouped_kernel_takes_one_expert_after_the_other(hopper: None) -> None:
    at_once = {name for name in COMPUTES if grouped.kernels_work(name, CPU)}
    assert at_once == {"float8-row"}
