"""LoRA layers as PEFT makes them, and what each adds to the weight of its base."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.matmul.linear import is_transposed
from narrowgauge.torch_support.torch_names import plain_name


def name_without_adapters(name: str) -> str:
    """Return the name of a module or tensor without the prefixes of PEFT and of other wrappers."""
    return plain_name(name).removeprefix("module.").removeprefix("base_model.model.")


def is_adapted(layer: Any) -> bool:
    """Return whether a module is a layer with LoRA adapters."""
    return hasattr(layer, "lora_A") and hasattr(layer, "get_base_layer")


def product_of(layer: Any) -> Tensor:
    """Return what the active adapters of a layer add to its base's weight: float64, in the weight's
    shape.
    """
    base = layer.get_base_layer()
    product: Tensor = torch.zeros_like(base.weight.detach(), dtype=torch.float64)
    for adapter in layer.active_adapters:
        down = layer.lora_A[adapter].weight.detach().double()
        up = layer.lora_B[adapter].weight.detach().double()
        matrix = layer.scaling[adapter] * (up @ down)
        product += matrix.T if is_transposed(base) else matrix
    return product
