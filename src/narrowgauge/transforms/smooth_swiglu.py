"""Smooth-SwiGLU: no channel of the down projection's input stands out, and nothing is changed.

Late in long float8 runs the gate and the up row of a few channels align, so that ``silu(gate) * up`` becomes quadratic in
the stream: a channel jumps to a thousand times the others, for some tokens, and a scale chosen from earlier steps, or shared
with all other channels, no longer fits. The channel's largest magnitude can be moved across the product: divide the
channel by it, multiply the matching column of the down projection's weight by it, both *before* they are cast. The sum over
channels is the same sum.

The factors here are powers of two, so that in bfloat16 and float32 moving them is exact: outputs and gradients have the same
bits as without, until something narrower casts them. What was an outlier of the input is one of the *weight* afterwards,
which a fresh or a per-column scale takes better than a stale one; where both operands share one scale per tensor, the weight's
small columns pay what the input's channels paid before.

Source: Fishman et al., Scaling FP8 training to trillion-token LLMs, arXiv 2409.12517. There the factor is
the reciprocal of the largest magnitude itself; the released code takes it for each token instead of each channel.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers.models.llama.modeling_llama import LlamaMLP

from narrowgauge.errors import RecipeError

_EXPONENT = 0x7F800000


def channel_scales(x: Tensor) -> Tensor:
    """For each channel the largest power of two that is not above its largest magnitude.

    Law: the same whatever the order of the tokens. 1 for a channel of zeros or subnormals, or with an infinity or a NaN.

    Args:
        x: ``[..., channels]``.

    Returns:
        Float32 ``[channels]``, without a gradient, in ``2**-64 … 2**64``, so that reciprocals are exact too.

    Example:
        >>> channel_scales(torch.tensor([[3.0, 0.0, -0.25], [-5.0, 0.0, 0.1]])).tolist()
        [4.0, 1.0, 0.25]
    """
    largest = x.detach().abs().flatten(0, -2).amax(0).float()
    scales = (largest.view(torch.int32) & _EXPONENT).view(torch.float32)
    ordinary = (scales > 0) & torch.isfinite(scales)
    return torch.where(ordinary, scales, 1.0).clamp(2.0**-64, 2.0**64)


def smooth(model: nn.Module) -> None:
    """Put Smooth-SwiGLU into every gated MLP of a Llama, in place.

    Law: names, parameters and ``state_dict`` stay, and so does every bit of outputs and gradients, where down projections are
    computed in bfloat16 or float32 and nothing in them over- or underflows. The input of each down projection has magnitudes
    below 2, and in every channel one of 1 or more.

    Args:
        model: with Hugging Face's ``LlamaMLP`` modules, or one itself; down projections of any class.

    Raises:
        RecipeError: it has none, or they are not plain ones (they are smooth or unit-scaled already).

    Cost: one pass over the down projection's input and two over its weight; where nothing fuses them, a copy of each.

    Example:
        >>> from transformers import LlamaConfig
        >>> mlp = LlamaMLP(LlamaConfig(hidden_size=32, intermediate_size=48))
        >>> x = torch.randn(3, 32)
        >>> before = mlp(x)
        >>> smooth(mlp)
        >>> torch.equal(mlp(x), before)
        True
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
        module.__class__ = SmoothLlamaMLP


class SmoothLlamaMLP(LlamaMLP):
    """Llama's MLP with every channel of the last product near 1."""

    def forward(self, x: Tensor) -> Tensor:
        inner = self.act_fn(self.gate_proj(x)) * self.up_proj(x)
        scales = channel_scales(inner).to(inner.dtype)
        weight = self.down_proj.weight * scales.to(self.down_proj.weight.dtype)
        return cast(Tensor, functional_call(self.down_proj, {"weight": weight}, (inner / scales,)))
