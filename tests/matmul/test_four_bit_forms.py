"""Layers in the newer four-bit forms: their products are those of their casts, and gradients come right on average."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from narrowgauge.matmul.linear import Linear
from narrowgauge.matmul.operand import drawn_signs, random_words
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.numerics.quantization import padded, quantize
from narrowgauge.spec import computes
from narrowgauge.spec.computes import SLOTS
from tensors import gaussian

FORMS = [name for name in computes.VARIANTS if name.startswith(("nvfp4+", "mxfp4+"))]
TOKENS, IN, OUT = 80, 72, 48
"""Sides that are no multiples of a block, so that operands are filled up."""


def passed(name: str, step: int = 0, layers: int = 1) -> tuple[Linear, list[Tensor]]:
    """A layer of a compute at a step, and its output and both gradients."""
    model = nn.Sequential(*[nn.Linear(IN, OUT, bias=False) for _ in range(layers)]).bfloat16()
    with torch.no_grad():
        for each in model:
            each.weight.copy_(gaussian(OUT, IN, seed=1))  # type: ignore[operator]
    layer = next(iter(swap_linears(model, name).layers.values()))
    assert isinstance(layer, Linear)
    layer.clock.set(step=step)
    x = gaussian(TOKENS, IN).bfloat16().requires_grad_()
    y = layer(x)
    y.backward(gaussian(TOKENS, OUT, seed=2).bfloat16())
    assert x.grad is not None and layer.weight.grad is not None
    return layer, [y.detach(), x.grad, layer.weight.grad]


def off(found: Tensor, meant: Tensor) -> float:
    return float((found.double() - meant).norm() / meant.norm())


@pytest.mark.parametrize("name", FORMS)
def test_each_product_is_that_of_its_casts(name: str) -> None:
    layer, found = passed(name, step=3)
    compute = layer.compute
    assert compute == computes.VARIANTS[name]
    tensors = {
        "input": gaussian(TOKENS, IN).bfloat16(),
        "weight": layer.weight.detach(),
        "gradient": gaussian(TOKENS, OUT, seed=2).bfloat16(),
    }
    for (matmul, product), result in zip(compute.products.items(), found, strict=True):
        values = []
        for side, cast in (("left", product.left), ("right", product.right)):
            slot = SLOTS[f"{matmul}.{side}"]
            x, dim = tensors[slot.tensor], slot.dim
            length = 0 if slot.tensor == "weight" else TOKENS
            keys = layer.keys()
            words = None if keys is None else random_words(cast, x, dim, keys, slot.random_key, length)
            signs = drawn_signs(cast, x.shape[dim], dim, layer.keys(), matmul)
            assert (signs is not None) == (cast.rotation == "hadamard-drawn")
            whole = padded(x.float() if signs is None else x.float() * signs, cast, dim)
            made = quantize(whole, cast, dim, words=words).values().double()
            values.append(made if dim == 1 else made.t())
        meant = (values[0] @ values[1].t())[: result.shape[0], : result.shape[1]]
        # The result is rounded to bfloat16 once or twice, and summed in float32.
        assert off(result, meant) < 2.0**-7, matmul
