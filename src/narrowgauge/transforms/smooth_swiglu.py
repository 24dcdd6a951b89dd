"""Smooth-SwiGLU: a diverging channel of a gated MLP neither saturates nor takes precision from the other channels.

Late in long float8 runs the gate and the up row of a few channels align. ``silu(gate) * up`` is then quadratic in its input,
and a channel jumps to a thousand times the others: a scale shared with them no longer fits. So each channel of the down
projection's input is divided by its own power of two before the cast, and the weight's column multiplied by it *after* its
cast.

The factors are part of the cast (:func:`narrowgauge.numerics.quantization.smoothing`), in variants of computes whose whole input
shares one scale: ``float8-delayed+smooth`` in a recipe. This file is for a model that is used without a recipe.

Source: Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv 2409.12517; its released code computes the factor per
token instead of per channel.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from narrowgauge.errors import RecipeError


def smooth(model: nn.Module) -> None:
    """Let every plain gated MLP of a Llama use the smooth variant of the compute that its layers get, before or after a swap.

    Computes with one scale for the whole input (``float8-tensor``, ``float8-delayed``) use it; in others no bit changes.

    Example:
        >>> from transformers import LlamaConfig
        >>> mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48))
        >>> smooth(mlp)
        >>> mlp.down_proj.variant
        '+smooth'
    """
    mlps: list[Any] = [module for module in model.modules() if type(module) is LlamaMLP]
    if not mlps:
        raise RecipeError(f"Cannot smooth this {type(model).__name__}: it has no plain LlamaMLP.", "Use a Llama.")
    for mlp in mlps:
        for layer, variant in ((mlp.gate_proj, "+fresh"), (mlp.up_proj, "+fresh"), (mlp.down_proj, "+smooth")):
            layer.variant = variant
            if hasattr(layer, "set_compute"):  # swapped already
                layer.set_compute(layer.compute)
