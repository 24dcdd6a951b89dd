"""A unit-scaled model as a plain one: its constants are multiplied into the weights, for programs without unit scaling.

All constants of the forward pass are linear. Those of a linear layer are multiplied into its weight and bias; the rest of
attention's into the queries, and ``1 / width`` of the logits into the last norm, so that tied weights stay tied. The
residual stream's own factors cancel because every norm divides by them: the plain stream is the unit one times a number that
grows with depth, and each branch is multiplied by that number where it is added.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.transforms import unit_rules as rules
from narrowgauge.transforms.unit_layers import UnitGPT2Block
from narrowgauge.transforms.unit_scaling import batch_of, layers_of


@torch.no_grad()
def plain_state_dict(model: nn.Module, sequence_length: int | None = None) -> dict[str, Tensor]:
    """Weights with which the plain class computes the unit-scaled model's function.

    Invariant: logits agree up to float32 rounding, and up to a norm's epsilon relative to mean squares of 1 to 3.

    Args:
        model: from :func:`narrowgauge.transforms.unit_scaling.unit_scale`.
        sequence_length: attention gets the constant of this length, for inputs of any length; ``None`` uses that of
            ``fix_batch``.

    Returns:
        Float32 copies, by the names of ``model.state_dict()``; tied names share one tensor.

    Raises:
        RecipeError: the model is not unit-scaled, or no length is known.

    Cost: 4 bytes per parameter.
    """
    length = sequence_length or batch_of(model).sequence_length
    if length is None:
        raise RecipeError(
            "a plain model has one constant for attention, and this unit-scaled one takes it from each input's length.",
            "Pass the length of its training as sequence_length.",
        )
    named = model.state_dict(keep_vars=True)
    plain = {value: value.detach().float().clone() for value in named.values()}
    for parameter, factor in _factors(model, length):
        plain[parameter] *= factor
    for layer in layers_of(model):
        attention = _parts(layer)[0]
        width = attention.config.num_attention_heads * attention.head_dim
        # The whole query matrix of a Llama, the first third of GPT-2's fused one.
        for parameter in (attention.c_attn if hasattr(attention, "c_attn") else attention.q_proj).parameters():
            part = plain[parameter][..., :width] if hasattr(attention, "c_attn") else plain[parameter]
            part *= attention.head_dim**-0.5
    return {name: plain[value] for name, value in named.items()}


def _parts(layer: Any) -> tuple[Any, Any]:
    return (layer.attn if isinstance(layer, UnitGPT2Block) else layer.self_attn), layer.mlp


def _factors(model: Any, length: int) -> Iterator[tuple[nn.Parameter, float]]:
    """Parameters, each with the number that multiplies it."""
    gpt2 = isinstance(layers_of(model)[0], UnitGPT2Block)
    inner = rules.GELU if gpt2 else rules.SILU_GLU
    # Unit scaling divides GPT-2's sum of two embeddings by √2, the plain model does not.
    stream = 2**0.5 if gpt2 else 1.0
    for layer in layers_of(model):
        attention, mlp = _parts(layer)
        weights: Any = layer.unit_residual
        skip, share, skip_mlp, share_mlp = weights.tolist()
        mixed = rules.attention_output(length, attention.head_dim)
        # The last matrix of a branch: the factor of its input, and of the branch.
        last = {
            attention.c_proj if gpt2 else attention.o_proj: (mixed, stream * share / skip),
            mlp.c_proj if gpt2 else mlp.down_proj: (inner, stream / skip * share_mlp / skip_mlp),
        }
        stream /= skip * skip_mlp
        for linear in (*attention.children(), *mlp.children()):
            before, after = last.get(linear, (1.0, 1.0))
            for name, parameter in linear.named_parameters(recurse=False):
                factor = after * rules.fans(linear)[0] ** -0.5
                yield parameter, factor * before if name == "weight" else factor
    head = model.get_output_embeddings()
    for parameter in (model.transformer.ln_f if gpt2 else model.model.norm).parameters():
        yield parameter, 1 / head.in_features
