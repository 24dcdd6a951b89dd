"""Unit scaling with u-muP: a model whose weights, activations and gradients all have variance one at initialization.

Narrow formats need scales because the sizes of tensors differ: activations near 1, weights near 0.02, gradients near 1e-6. Unit
scaling changes the sizes instead. Weights are initialized with variance one, and each operation is multiplied by a constant,
known from its shape, that gives its output, its input's gradient and its weight's gradient variance one. A cast to float8
then needs no scale. With u-muP's rules for the learning rate, which belong to this form, the best rate of a narrow model is
also that of a wide one.

Two constants depend on the batch: that of attention's output on the sequence length, and those of gradients on the number of
tokens, which divides the loss. :func:`fix_batch` makes both part of the model; without it they follow each call's input, as in
the source.

The loss is outside the model: ``F.cross_entropy`` of the logits, summed and divided by the number of tokens. The head undoes that
division in the gradient of its input and multiplies it by ``V / sqrt(V - 1)``, so that all matmuls below it have operands of unit
variance. *A tied embedding stays tied*: its multiplier is 1 as an embedding and ``1 / width`` as a head. With these rules the
factor between computed and true gradient is the same for both uses, so their sum is a multiple of the true gradient.

Source: Blake et al., Unit Scaling, arXiv 2303.11257; Blake et al., u-muP, arXiv 2407.17465.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from transformers import GPT2LMHeadModel, LlamaForCausalLM
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaDecoderLayer, LlamaMLP, LlamaRMSNorm

from narrowgauge._torch import fsdp_groups
from narrowgauge.errors import RecipeError
from narrowgauge.transforms import unit_layers as rules
from narrowgauge.transforms import unit_layers as unit
from narrowgauge.transforms.unit_layers import Batch, UnitGPT2Block, fans, residual_weights

_CLASSES: dict[type[nn.Module], dict[type[nn.Module], type[nn.Module]]] = {
    LlamaForCausalLM: {
        nn.Embedding: unit.UnitEmbedding,
        LlamaDecoderLayer: unit.UnitLlamaLayer,
        LlamaAttention: unit.UnitLlamaAttention,
        LlamaMLP: unit.UnitLlamaMLP,
        LlamaRMSNorm: unit.UnitRMSNorm,
    },
    GPT2LMHeadModel: {
        nn.Embedding: unit.UnitEmbedding,
        GPT2Block: unit.UnitGPT2Block,
        GPT2Attention: unit.UnitGPT2Attention,
        GPT2MLP: unit.UnitGPT2MLP,
        nn.LayerNorm: unit.UnitLayerNorm,
    },
}
_ACTIVATIONS: dict[type[nn.Module], set[str]] = {
    LlamaForCausalLM: {"silu", "swish"},
    GPT2LMHeadModel: {"gelu", "gelu_new", "gelu_pytorch_tanh"},
}


def unit_scale(model: nn.Module, seed: int = 0) -> None:
    """Turn a Llama or GPT-2 into its unit-scaled u-muP form, in place, with newly initialized weights.

    Invariant: names, shapes and number of parameters stay; tied weights stay tied. Weights and embeddings are normal with
    variance one, a function of ``seed`` and the shapes alone; biases are zero, gains one. The gradient of every parameter
    is a fixed multiple of the true gradient of the model's new function. Linear layers inside decoder layers may be of
    any class with ``weight [out, in]``, or transformers' ``Conv1D``, and may be swapped later; the head must be a plain
    ``nn.Linear``, and stay one.

    Args:
        model: Hugging Face's ``LlamaForCausalLM`` or ``GPT2LMHeadModel``.
        seed: of the weights.
    Raises:
        RecipeError: another architecture, one with parts that have no rule (dropout, other activations, a head of another
            class), or a model that is unit-scaled already.
    Cost: in eager mode a multiplication, and its rounding, forward and backward for each operation; compiled, they are fused.
    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config)
        >>> unit_scale(model, seed=0)
        >>> round(model.model.layers[0].mlp.up_proj.weight.std().item(), 1)
        1.0
    """
    kind = _kind_of(model)
    _check(model, kind)
    classes = _CLASSES[kind]
    batch, layers = Batch(), decoder_layers(model)
    for module in list(model.modules()):
        swapped = classes.get(type(module))
        if swapped is not None:
            module.__class__ = swapped
            module.unit = batch  # type: ignore[assignment]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head.__class__, head.unit = unit.UnitReadout, batch
    tables: list[Any] = [module for module in model.modules() if isinstance(module, nn.Embedding)]
    for table in tables:
        # GPT-2 adds two embeddings of unit variance.
        table.unit_output = len(tables) ** -0.5
    if len(tables) == 2:
        tables[1].__class__ = unit.UnitPositions
    for index, layer in enumerate(layers):
        weights = [*residual_weights(2 * index, len(layers)), *residual_weights(2 * index + 1, len(layers))]
        device = next(layer.parameters()).device
        residual = torch.tensor(weights, dtype=torch.float32, device=device)
        layer.register_buffer("unit_residual", residual, persistent=False)
    _draw(model, seed)


def fix_batch(model: nn.Module, *, sequence_length: int | None = None, tokens: int | None = None) -> None:
    """Make the length of a sequence and the tokens of a step part of a unit-scaled model.

    Invariant: with ``tokens``, gradients of micro-batches add up to the gradient of the batch, however it is split; with
    ``sequence_length``, the logits of a token do not depend on the number of tokens after it.

    Args:
        model: from :func:`unit_scale`.
        sequence_length: in training.
        tokens: number of tokens of a step, over all micro-batches, which divides the loss before its backward pass.
    Raises:
        RecipeError: the model is not unit-scaled.
    """
    batch = batch_of(model)
    batch.sequence_length, batch.tokens = sequence_length, tokens


def learning_rate_factors(model: nn.Module) -> dict[str, float]:
    """The factor of Adam's learning rate for each parameter of a unit-scaled model, a tied one by its first name.

    A matrix has ``fan_in ** -0.5``, an embedding ``width ** -0.5``, gains, biases and the head 1; parameters of decoder
    layers have ``num_layers ** -0.5`` in addition. A tied embedding has two rules and gets the geometric mean of both,
    ``width ** -0.25`` (measured at widths 64 to 256, the mean loss of five short runs: 2.24; by the embedding's rule 2.29, by
    the head's 2.23).

    Rates are near 1 in this form: those short runs were best at 0.5, before the factors. Decay should be independent of
    the rate: give each group ``decay_of_a_step / (lr * factor)`` if the optimizer multiplies the two.

    Raises:
        RecipeError: the model is not unit-scaled.
    Source: Blake et al., u-muP, arXiv 2407.17465; the tied embedding's rule is ours.
    """
    batch_of(model)
    layers = decoder_layers(model)
    inside = {p: len(layers) ** -0.5 for layer in layers for p in layer.parameters()}
    own = dict(_own_factors(model))
    return {name: inside.get(p, 1.0) * own.get(p, 1.0) for name, p in model.named_parameters()}


def _own_factors(model: nn.Module) -> Iterator[tuple[Tensor, float]]:
    """Factors of matrices, except an untied head, without that of the layers."""
    head = next(module.weight for module in model.modules() if isinstance(module, unit.UnitReadout))
    for module in model.modules():
        weight = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding):
            yield module.weight, module.embedding_dim ** (-0.25 if module.weight is head else -0.5)
        elif isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, unit.UnitReadout):
            yield weight, fans(module)[0] ** -0.5


def decoder_layers(model: nn.Module) -> list[nn.Module]:
    kinds = (LlamaDecoderLayer, GPT2Block)
    return [module for module in model.modules() if isinstance(module, kinds)]


def batch_of(model: nn.Module) -> Batch:
    for module in model.modules():
        if isinstance(module, unit.UnitReadout):
            return module.unit
    raise RecipeError(f"{type(model).__name__} is not unit-scaled.", "Call unit_scale(model) first.")


def _kind_of(model: nn.Module) -> type[nn.Module]:
    for kind in _CLASSES:
        if isinstance(model, kind):
            return kind
    raise RecipeError(
        f"unit scaling supports Llama and GPT-2 with a language model's head, and was given a {type(model).__name__}.",
        "Use a model of these classes, or another compute.",
    )


def _check(model: Any, kind: type[nn.Module]) -> None:
    config, head = model.config, model.get_output_embeddings()
    name = type(model).__name__
    if fsdp_groups(model):
        raise RecipeError(
            f"unit scaling redraws whole weights of layers of known classes, and this {name} is sharded by FSDP2.",
            "Unit-scale it before fully_shard, or pass it whole to narrowgauge.prepare, with mesh=...",
        )
    if any(isinstance(module, unit.UnitReadout) for module in model.modules()):
        raise RecipeError(f"this {name} is unit-scaled already.", "Build a new one.")
    if type(head) is not nn.Linear or head.bias is not None:
        raise RecipeError(
            f"unit scaling scales the head itself, and that of this {name} is a {type(head).__name__}.",
            'Keep it wide, with keep = ["lm_head"].',
        )
    activation = getattr(config, "hidden_act", None) or config.activation_function
    if activation not in _ACTIVATIONS[kind]:
        raise RecipeError(
            f"unit scaling has no rule for the activation '{activation}' of this {name}.",
            f"It supports {' and '.join(sorted(_ACTIVATIONS[kind]))} there.",
        )
    dropouts = ("attention_dropout", "attn_pdrop", "embd_pdrop", "resid_pdrop")
    for option in (*dropouts, "add_cross_attention", "scale_attn_by_inverse_layer_idx", "reorder_and_upcast_attn"):
        if getattr(config, option, None):
            raise RecipeError(
                f"unit scaling has no rule for {option} = {getattr(config, option)} of this {name}.",
                f"Build the model with {option} = {0.0 if option in dropouts else False}.",
            )


@torch.no_grad()
def _draw(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gains = {id(m.weight) for m in model.modules() if isinstance(m, (unit.UnitRMSNorm, unit.UnitLayerNorm))}
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(generator=generator))
        else:
            parameter.fill_(1.0 if id(parameter) in gains else 0.0)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0.0


# ── the same model as a plain one, for programs without unit scaling ───────────────────────────────────────────────────
#
# All constants of the forward pass are linear, so they can be multiplied into the weights. Those of a linear layer go into its
# weight and bias; the rest of attention's into the queries, and ``1 / width`` of the logits into the last norm, so that tied
# weights stay tied. The residual stream's own factors cancel because every norm divides by them: the plain stream is the unit
# one times a number that grows with depth, and each branch is multiplied by that number where it is added.


@torch.no_grad()
def plain_state_dict(model: nn.Module, sequence_length: int | None = None) -> dict[str, Tensor]:
    """Weights with which the plain class computes the unit-scaled model's function.

    Invariant: logits agree up to float32 rounding, and up to a norm's epsilon relative to mean squares of 1 to 3.

    Args:
        model: from :func:`unit_scale`.
        sequence_length: attention gets the constant of this length, for inputs of any length; ``None`` uses that of
            ``fix_batch``.
    Returns:
        Float32 copies, by the names of ``model.state_dict()``; tied names share one tensor.
    Raises:
        RecipeError: the model is not unit-scaled, or no length is known.
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
    for layer in decoder_layers(model):
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
    gpt2 = isinstance(decoder_layers(model)[0], UnitGPT2Block)
    inner = rules.GELU if gpt2 else rules.SILU_GLU
    # Unit scaling divides GPT-2's sum of two embeddings by √2, the plain model does not.
    stream = 2**0.5 if gpt2 else 1.0
    for layer in decoder_layers(model):
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
