"""Smooth-SwiGLU: a diverging channel of a gated MLP neither saturates nor takes precision from the other channels.

Late in long float8 runs the gate and the up row of a few channels align, so that ``silu(gate) * up`` becomes quadratic in its
input: a channel jumps to a thousand times the others, for some tokens, and a scale chosen from earlier steps, or shared with all
other channels, no longer fits. So each channel of the down projection's input is divided by a factor of its own before the
cast, and each column of the weight is multiplied by the same factor *after* its cast: the sum over channels is the same, the
weight's scale is not affected, and of the gradients only the weight's needs its columns multiplied.

The factors are powers of two, from each call's own channels. They are part of the cast
(:func:`narrowgauge.numerics.quantization.smoothing`), in the variants of computes whose whole input shares one scale
(:mod:`narrowgauge.spec.computes`): ``float8-delayed+smooth`` in a recipe. This file is for a model that is used without a recipe.

Source: Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv 2409.12517. There the factor is the reciprocal of
the largest magnitude itself; the released code computes it per token instead of per channel.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from narrowgauge.errors import RecipeError


def smooth(model: nn.Module) -> None:
    """Let every gated MLP of a Llama use the smooth variant of the compute that its layers get, in place.

    Names, parameters and ``state_dict`` stay. In computes with one scale for the whole input (``float8-tensor``,
    ``float8-delayed`` and similar) down projections use ``+smooth``, gate and up projections ``+fresh``. In every other
    compute, in plain layers and after quantization for inference, no bit changes.

    Args:
        model: with Hugging Face's ``LlamaMLP`` modules, or one itself; swapped before or later. A second call changes nothing.
    Raises:
        RecipeError: it has none, or they are not plain ones (unit-scaled, for instance).
    Cost: none by itself; a smooth layer multiplies its output in 16 bits, its gradients in 8.
    Example:
        >>> from transformers import LlamaConfig
        >>> mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48))
        >>> smooth(mlp)
        >>> mlp.down_proj.variant
        '+smooth'
    """
    found = [module for module in model.modules() if isinstance(module, LlamaMLP)]
    other = next((module for module in found if type(module) is not LlamaMLP), None)
    if not found or other is not None:
        what = "no LlamaMLP" if other is None else f"a {type(other).__name__}"
        raise RecipeError(
            f"Smooth-SwiGLU scales the plain gated MLPs of a Llama, and there is {what} in this {type(model).__name__}.",
            "Use a Llama that no other transform has changed.",
        )
    for module in found:
        for layer, variant in ((module.gate_proj, "+fresh"), (module.up_proj, "+fresh"), (module.down_proj, "+smooth")):
            _mark(layer, variant)


def _mark(layer: Any, variant: str) -> None:
    layer.variant = variant
    if hasattr(layer, "set_compute"):  # swapped already
        layer.set_compute(layer.compute)
