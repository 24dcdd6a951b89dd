"""Adapters over a quantized base: frozen linear layers under PEFT's LoRA and others become codes
and scales.

An 8-bit layer multiplies as :func:`narrowgauge.quantize_for_inference` does: its input is cast too
(LLM.int8). A 4-bit layer is widened to its input's format (QLoRA). Backward multiplies the gradient
by the widened weight, so the adapters of earlier layers learn. Adapters stay unchanged.

Source: Dettmers et al. 2022, LLM.int8() (2208.07339); Dettmers et al. 2023, QLoRA (2305.14314).
"""

from __future__ import annotations

from typing import Any

from torch import nn

from narrowgauge.errors import RecipeError
from narrowgauge.matmul import inference
from narrowgauge.matmul.gemm import warn_if_emulated
from narrowgauge.matmul.linear import is_linear, refuse_replaced_forward
from narrowgauge.matmul.roles import roles_of
from narrowgauge.matmul.swapping import matches
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.notation import get_compute
from narrowgauge.torch_support.anatomy import parts


def quantize_base(
    model: nn.Module,
    compute: str | Compute = "int8-outlier-codes",
    keep: tuple[str, ...] | None = None,
) -> nn.Module:
    """Store the frozen linear layers of a model with adapters as codes and scales, in place.

    Args:
        model: a ``PeftModel``, or any model whose frozen weights have ``requires_grad=False``;
            float32 or 16 bits.
        compute: its weights' cast is stored. Any compute of
            :func:`narrowgauge.quantize_for_inference`, such as ``int8-outlier-codes``, takes 1 byte
            a parameter; ``nvfp4`` takes 0.56 and ``mxfp4`` 0.53.
        keep: patterns of base model names of layers to leave alone. ``None``: those
            outside the blocks, such as the language model's head.
    Returns:
        The model, which trains and saves its adapters as before.
    Raises:
        RecipeError: an unknown compute, or one whose weights cannot be stored; no frozen linear
            layer.
    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 8))
        >>> model[0].requires_grad_(False)
        Linear(in_features=64, out_features=64, bias=False)
        >>> quantize_base(model, "nvfp4")[0].weight_codes.shape
        torch.Size([64, 32])
    """
    chosen = get_compute(compute)
    is_packed = inference.is_packed(chosen.output.right)
    if not is_packed:
        inference.with_codes(chosen)
    roles = roles_of(model) if keep is None else {}
    adapters = parts(model).adapters
    layers: dict[str, Any] = {}
    for path, layer in model.named_modules():
        is_base = is_linear(layer) and layer not in adapters and path not in roles
        name = path.removeprefix("base_model.model.")
        if is_base and not layer.weight.requires_grad and not matches(name, keep or ()):
            refuse_replaced_forward(name, layer, chosen)
            layers[name.removesuffix(".base_layer")] = layer
    if not layers:
        raise RecipeError(
            f"Cannot quantize this {type(model).__name__} because it has no frozen linear layer.",
            "Give the model that get_peft_model returns, or freeze its base with "
            "requires_grad_(False).",
        )
    inference.quantize_layers(layers, chosen)
    if not is_packed:
        warn_if_emulated(chosen, next(iter(layers.values())).weight_codes.device)
    return model
