"""Smooth-SwiGLU: a channel of a gated MLP that runs away neither saturates nor takes the others' bits.

Late in long float8 runs the gate and the up row of a few channels align, so that ``silu(gate) * up`` becomes quadratic in
the stream: a channel jumps to a thousand times the others, for some tokens, and a scale chosen from earlier steps, or shared
with all other channels, no longer fits. So each channel of the down projection's input is divided by a factor of its own
before it is cast, and each column of the weight is multiplied by the same factor *after* its cast: the sum over channels is
the same sum, the weight's scale never hears of it, and nothing of it is left in the gradients but a multiple of the columns
of the weight's.

The factors are powers of two, from each call's own channels. They are part of the cast
(:func:`narrowgauge.numerics.quantization.smoothing`), in the variants of rows whose whole input shares one scale
(:mod:`narrowgauge.spec.variants`): a recipe says ``float8-delayed+smooth``. This file is for a model of which one has no recipe.

Source: Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv 2409.12517. There the factor is the reciprocal of
the largest magnitude itself; the released code takes it for each token instead of each channel.
"""

from __future__ import annotations

from typing import Any

from torch import nn
from transformers.models.llama.modeling_llama import LlamaMLP

from narrowgauge.errors import RecipeError


def smooth(model: nn.Module) -> None:
    """Let every gated MLP of a Llama compute in the smooth variant of whatever row its layers get, in place.

    Law: names, parameters and ``state_dict`` stay. In rows that scale the whole input at once (``float8-tensor``,
    ``float8-delayed`` and their kin) down projections go on as ``+smooth``, gate and up as ``+fresh``; in every other row, in
    plain layers and once quantized for inference, nothing changes by a bit.

    Args:
        model: with Hugging Face's ``LlamaMLP`` modules, or one itself; narrow already or later. Twice is as once.

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
            "Take a Llama that no other transform has changed.",
        )
    for module in found:
        for layer, variant in ((module.gate_proj, "+fresh"), (module.up_proj, "+fresh"), (module.down_proj, "+smooth")):
            _mark(layer, variant)


def _mark(layer: Any, variant: str) -> None:
    layer.variant = variant
    if hasattr(layer, "set_compute"):  # narrow already
        layer.set_compute(layer.compute)
