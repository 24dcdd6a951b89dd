"""Merging adapters and taking them out again leaves the base's bits, and rounds the merged weights
once.
"""

from __future__ import annotations

from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng

peft = pytest.importorskip("peft")


def adapted(**options: Any) -> Any:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 32), nn.ReLU(), nn.Linear(32, 8)).bfloat16()
    config = peft.LoraConfig(r=4, target_modules=["0", "2"], init_lora_weights=False, **options)
    return peft.get_peft_model(model, config, autocast_adapter_dtype=False)


def bases(model: Any) -> list[Tensor]:
    return [m.get_base_layer().weight for m in model.modules() if hasattr(m, "lora_A")]


def nearest(value: Fraction) -> float:
    """Return the nearest bfloat16, of two the even one."""
    low = torch.tensor(float(value)).bfloat16()
    near = []
    for end in (-torch.inf, torch.inf):
        near.append(torch.nextafter(low, torch.tensor(end).bfloat16()))
    candidates = [low, *near]
    distances = [abs(Fraction(float(x)) - value) for x in candidates]
    closest = []
    for x, d in zip(candidates, distances, strict=True):
        if d == min(distances):
            closest.append(x)
    return float(min(closest, key=lambda x: int(x.view(torch.int16)) % 2))


def test_a_thousand_cycles_leave_the_base() -> None:
    model = adapted()
    before = [weight.detach().clone() for weight in bases(model)]
    x = torch.randn(3, 24).bfloat16()
    expected = model(x)
    for _ in range(1000):
        assert ng.merge(model) == 2
        assert ng.unmerge(model) == 2
    assert all(map(torch.equal, bases(model), before))
    assert torch.equal(model(x), expected)


def test_merged_weights_are_the_nearest_of_base_and_product() -> None:
    model = adapted()
    layer = next(m for m in model.modules() if hasattr(m, "lora_A"))
    base = layer.get_base_layer().weight.detach().clone()
    up = layer.lora_B["default"].weight
    down = layer.lora_A["default"].weight
    ng.merge(model)
    assert ng.merge(model) == 0
    weight = layer.get_base_layer().weight
    for row, column in ((0, 0), (3, 5), (31, 23), (7, 11), (12, 1)):
        products = []
        for k in range(4):
            products.append(Fraction(float(up[row, k])) * Fraction(float(down[k, column])))
        exact = Fraction(float(base[row, column])) + 2 * sum(products)
        assert float(weight[row, column]) == nearest(exact)
    assert layer.merged


def test_a_merged_model_answers_with_its_adapters() -> None:
    model = adapted().float()
    x = torch.randn(3, 24)
    expected = model(x)
    ng.merge(model)
    torch.testing.assert_close(model(x), expected)


def test_dora_and_merged_layers_are_refused_before_anything_is_written() -> None:
    for model in (adapted(use_dora=True), adapted()):
        if not any(getattr(m, "lora_variant", None) for m in model.modules()):
            model.merge_adapter()
        before = [weight.detach().clone() for weight in bases(model)]
        with pytest.raises(ng.errors.RecipeError, match="more than LoRA, or merged already"):
            ng.merge(model)
        assert all(map(torch.equal, bases(model), before))
