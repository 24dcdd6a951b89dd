"""Merge LoRA adapters into their base and take them out again, without loss.

PEFT's ``merge_adapter`` adds the product of the adapters to a 16-bit weight, and
``unmerge_adapter`` subtracts it. Each rounds: the frozen base moves with every cycle. Here a merged
weight is the nearest one of base + product, and the base's bits are kept beside it: 2 bytes for
each merged 16-bit weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.measuring.adapters import is_adapted, product_of
from narrowgauge.numerics.dtensor import is_sharded
from narrowgauge.numerics.rounding import round_to
from narrowgauge.spec.formats import dtype_name

_BASE = "_narrowgauge_base"
"""Attribute of a merged layer: the base's weight."""


@torch.no_grad()
def merge(model: nn.Module) -> int:
    """Put the active LoRA adapters of PEFT into the weights that they adapt, each rounded once.

    Args:
        model: with LoRA on linear layers, in training or not. Layers that are merged stay as they
            are.
    Returns:
        The number of layers that were merged. :func:`unmerge` restores them.
    Raises:
        RecipeError: a layer is quantized or sharded, no linear layer, or more than LoRA (DoRA, a
            bias); or PEFT merged it. Nothing was merged then.
    Example:
        >>> model = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))  # doctest: +SKIP
        >>> ng.merge(model)  # generate, export … # doctest: +SKIP
        >>> ng.unmerge(model)  # train on # doctest: +SKIP
    """
    layers = [(name, layer) for name, layer in _layers(model) if not hasattr(layer, _BASE)]
    for name, layer in layers:
        _require_plain(name, layer)
    for _, layer in layers:
        base = layer.get_base_layer().weight
        vars(layer)[_BASE] = base.detach().clone()
        base.data.copy_(_merged(layer))
        layer.merged_adapters.extend(layer.active_adapters)
    return len(layers)


@torch.no_grad()
def unmerge(model: nn.Module) -> int:
    """Give the layers that :func:`merge` merged the bits of their base.

    Args:
        model: as it was merged. The adapters may have changed since.
    Returns:
        The number of layers.
    Example:
        >>> import torch, narrowgauge as ng
        >>> ng.unmerge(torch.nn.Linear(2, 2))  # nothing is merged
        0
    """
    layers = [layer for _, layer in _layers(model) if hasattr(layer, _BASE)]
    for layer in layers:
        layer.get_base_layer().weight.data.copy_(vars(layer).pop(_BASE))
        layer.merged_adapters.clear()
    return len(layers)


def _layers(model: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, module in model.named_modules():
        if is_adapted(module):
            yield name, module


def _require_plain(name: str, layer: Any) -> None:
    """Refuse a layer that is not LoRA over a whole matrix of numbers, or that is merged already."""
    weight = layer.get_base_layer()._parameters.get("weight")  # not the copy of stored codes
    if weight is None or weight.ndim != 2 or not weight.is_floating_point() or is_sharded(weight):
        raise RecipeError(
            f"Cannot merge {name} because its base has no whole matrix of numbers.",
            "Call dequantize_base(model) first, or merge before the model is sharded.",
        )
    variants = getattr(layer, "lora_variant", {})
    for adapter in layer.active_adapters:
        has_bias = getattr(layer.lora_B[adapter], "bias", None) is not None
        if variants.get(adapter) is not None or has_bias or layer.merged_adapters:
            raise RecipeError(
                f"Cannot merge {name} because it is more than LoRA, or merged already.",
                "Call unmerge_adapter(), and leave out DoRA and lora_bias.",
            )


def _merged(layer: Any) -> Tensor:
    """Return the nearest weight to base + product, of which nothing else is rounded to the base's
    format.
    """
    weight: Tensor = layer.get_base_layer().weight.detach()
    exact = weight.double() + product_of(layer)
    if weight.dtype.itemsize > 2:
        return exact.to(weight.dtype)
    # Torch would round twice, by way of float32.
    return round_to(exact, dtype_name(weight.dtype)).to(weight.dtype)
