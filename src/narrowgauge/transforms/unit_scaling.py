"""Unit scaling with u-muP: a Llama whose weights, activations and gradients all have variance one at initialization.

Low-precision formats need scales because tensors differ in size: activations near 1, weights near 0.02, gradients near 1e-6.
Unit scaling changes the sizes. Weights are drawn with variance one. Each operation is multiplied by constants known from its
shape. These give its output, its input's gradient and its weight's gradient variance one. A cast to float8 then needs no scale.
With u-muP the best learning rate of a narrow model is also the best rate of a wide one.

A product of independent matrices of variance one has variance ``fan_in``. Its backward sums over ``fan_out`` and, for the
weight, over tokens. So forward and backward need different constants. A constant may differ from the true derivative's in two
places: where the gradient ends (Adam ignores a weight's scale), or where a later constant compensates it. All others are equal.
So each parameter's gradient is a multiple of the true one.

The loss is outside the model: ``F.cross_entropy`` of the logits, summed and divided by the number of tokens. The head undoes
that division in its input's gradient. A tied embedding stays tied: both uses have the same factor to the true gradient.

Source: Blake et al., Unit Scaling, arXiv 2303.11257; Blake et al., u-muP, arXiv 2407.17465 (residual weights: appendix G).
Multipliers that u-muP leaves to tuning are 1 here.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers import LlamaForCausalLM
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
    eager_attention_forward,
)

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import widening
from narrowgauge.torch_names import fsdp_groups

# The factor of `up * silu(gate)`: between the limits of a linear and a step function, a fit at multiplier 1.
SILU_GLU = 2.0**0.5 * math.sqrt(2.0) ** 0.5


@dataclass
class Batch:
    """Hold the batch sizes in the constants, shared by all modules of a model. ``None`` takes them from each call."""

    sequence_length: int | None = None
    tokens: int | None = None

    def tokens_of(self, x: Tensor) -> int:
        """Return the number of tokens that the gradient of a weight sums over. ``x [..., width]`` is its input."""
        return self.tokens or x.numel() // x.shape[-1]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: float | Tensor | None, backward: float | Tensor | None) -> Tensor:
        ctx.factor = backward
        return x.view_as(x) if forward is None else x * forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] if ctx.factor is None else gradients[0] * ctx.factor, None, None


def scaled(x: Tensor, *, forward: float | Tensor | None = None, backward: float | Tensor | None = None) -> Tensor:
    """Return ``x * forward``, but multiply its gradient by ``backward``. ``None`` is 1, without a copy.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = scaled(x, forward=3.0, backward=0.5)
        >>> y.sum().backward()
        >>> y.tolist(), x.grad.tolist()
        ([3.0, 3.0], [0.5, 0.5])
    """
    return cast(Tensor, _Scaled.apply(x, forward, backward))  # type: ignore[no-untyped-call]


def linear(module: Any, x: Tensor, batch: Batch, grad_input: float | None = None) -> Tensor:
    """Call a linear layer of any class with its constants. ``grad_input=None``: the caller has scaled ``x``'s gradient."""
    tokens = batch.tokens_of(x)
    if grad_input is not None:
        x = scaled(x, backward=grad_input)
    weights = {name: scaled(p, backward=tokens**-0.5) for name, p in module.named_parameters(recurse=False)}
    return scaled(functional_call(module, weights, (x,)), forward=module.in_features**-0.5)


def attention_output(sequence_length: int, head_dim: int) -> float:
    """Return the factor of causal attention's output, with logits divided by ``head_dim``.

    Token ``t`` averages about ``t`` values, so the mean square over a sequence is ``log(s) / s``. The published form has a pole
    at length 1, where nothing is averaged. From length 3 on both forms are equal.
    """
    length = sequence_length
    mixed = torch.sym_max(1.0, math.log2(length) * math.log(2.0)) / length
    return cast(float, mixed ** (-0.5 * (1 - 1 / (1 + 4 * head_dim))))


def residual_weights(branch: int, num_layers: int) -> tuple[float, float]:
    """Return the factors of the skip and of a branch. With them embedding, attentions and MLPs contribute equally.

    ``branch`` is the index among all branches. Attention and MLP are one branch each.

    Example:
        >>> [round(w * w, 4) for w in residual_weights(0, 2)]
        [0.6667, 0.3333]
    """
    tau = (num_layers + branch) ** -0.5
    return 1 / math.sqrt(1 + tau**2), tau / math.sqrt(1 + tau**2)


# ── modules ────────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# Each is Hugging Face's own class with another `forward`. Setting a module's class keeps its parameters, names, hooks and
# place. Values that differ between layers are tensors, not Python numbers, so that compiled layers share one graph.


class UnitEmbedding(nn.Embedding):
    """Embed with rows of unit variance. Each is used ``tokens / rows`` times on average."""

    unit: Batch

    def forward(self, input: Tensor) -> Tensor:
        tokens = self.unit.tokens or input.numel()
        weight = scaled(self.weight, backward=(self.num_embeddings / tokens) ** 0.5)
        return F.embedding(input, weight, self.padding_idx)


class UnitRMSNorm(LlamaRMSNorm):
    """Compute Llama's norm in float32. Its gain's gradient sums over tokens."""

    unit: Batch

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return scaled(self.weight, backward=self.unit.tokens_of(wide) ** -0.5) * wide.to(hidden_states.dtype)


class UnitReadout(nn.Linear):
    """Compute the head. Divide logits by ``fan_in`` itself, so that they do not grow with the width.

    The loss's gradient is ``(softmax - onehot) / tokens``. Only the head is never in a narrow format, so it takes that
    unchanged. The gradients of its weight and of the layers below have unit variance. All constants multiply its operands. So
    the logits, the largest tensor of a step, are not read again.
    """

    unit: Batch

    def forward(self, input: Tensor) -> Tensor:
        tokens, vocab_size = self.unit.tokens_of(input), self.out_features
        # One over the root mean square of `softmax - onehot` where all tokens are equally likely.
        arriving = tokens * (vocab_size / math.sqrt(vocab_size - 1))
        x = scaled(input, forward=1 / self.in_features, backward=arriving * vocab_size**-0.5)
        weight = scaled(self.weight, backward=arriving * tokens**-0.5 * self.in_features)
        return widening.linear(x, weight)


class UnitAttention(LlamaAttention):
    """Run the model's own attention function. Divide logits by the head's width; outputs have unit variance."""

    unit: Batch

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor] | None = None,
        attention_mask: Tensor | None = None,
        past_key_values: Any = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        assert position_embeddings is not None
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        # One tensor for all three, so that a narrow format casts it once.
        x = scaled(hidden_states, backward=hidden_states.shape[-1] ** -0.5)
        query, key, value = (
            linear(projection, x, self.unit).view(shape).transpose(1, 2)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        query, key = apply_rotary_pos_emb(query, key, *position_embeddings)
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(self.config._attn_implementation, eager_attention_forward)
        mixed, weights = attend(
            self, query, key, value, attention_mask=attention_mask, scaling=1 / self.head_dim, dropout=0.0, **kwargs
        )
        mixed = mixed.flatten(-2) * attention_output(self.unit.sequence_length or key.shape[-2], self.head_dim)
        return linear(self.o_proj, mixed, self.unit, mixed.shape[-1] ** -0.5), weights


class UnitMLP(LlamaMLP):
    """Divide gradients by the root of the number of outputs: gate's and up's, or down's. The product is exact."""

    unit: Batch

    def forward(self, x: Tensor) -> Tensor:
        x = scaled(x, backward=self.intermediate_size**-0.5)
        gate, up = linear(self.gate_proj, x, self.unit), linear(self.up_proj, x, self.unit)
        return linear(self.down_proj, F.silu(gate) * up * SILU_GLU, self.unit, self.hidden_size**-0.5)


class UnitLayer(LlamaDecoderLayer):
    """Weight two branches in the residual stream. Gradients inside a branch do not have that factor."""

    unit_residual: Tensor

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        skip, branch, skip_mlp, branch_mlp = self.unit_residual.unbind()
        x = self.input_layernorm(scaled(hidden_states, backward=branch))
        x, _ = self.self_attn(x, *args, **kwargs)
        hidden_states = hidden_states * skip + scaled(x, forward=branch)
        x = self.mlp(self.post_attention_layernorm(scaled(hidden_states, backward=branch_mlp)))
        return hidden_states * skip_mlp + scaled(x, forward=branch_mlp)


_CLASSES: dict[type[nn.Module], type[nn.Module]] = {
    nn.Embedding: UnitEmbedding,
    LlamaDecoderLayer: UnitLayer,
    LlamaAttention: UnitAttention,
    LlamaMLP: UnitMLP,
    LlamaRMSNorm: UnitRMSNorm,
}

# ── whole models ───────────────────────────────────────────────────────────────────────────────────────────────────────


def unit_scale(model: nn.Module, seed: int = 0) -> None:
    """Turn a Llama into its unit-scaled u-muP form, in place, with newly initialized weights.

    Names, shapes and ties of weights stay. Matrices are normal with variance one, and depend only on ``seed`` and the shapes.
    Biases are zero, gains one. Linear layers inside decoder layers may be of any class, and may be swapped later. The head must
    stay a plain ``nn.Linear``.

    Raises:
        RecipeError: another architecture or activation, dropout, a head of another class, a model sharded or unit-scaled
        already.
    Example:
        >>> from transformers import LlamaConfig
        >>> config = LlamaConfig(vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=1)
        >>> model = LlamaForCausalLM(config)
        >>> unit_scale(model, seed=0)
        >>> round(model.model.layers[0].mlp.up_proj.weight.std().item(), 1)
        1.0
    """
    _require_llama(model)
    batch, layers = Batch(), _layers(model)
    for module in list(model.modules()):
        if type(module) in _CLASSES:
            module.__class__ = _CLASSES[type(module)]
            module.unit = batch  # type: ignore[assignment]
    head: Any = model.get_output_embeddings()  # type: ignore[operator]
    head.__class__, head.unit = UnitReadout, batch
    for index, layer in enumerate(layers):
        weights = [*residual_weights(2 * index, len(layers)), *residual_weights(2 * index + 1, len(layers))]
        residual = torch.tensor(weights, dtype=torch.float32, device=next(layer.parameters()).device)
        layer.register_buffer("unit_residual", residual, persistent=False)
    _draw(model, seed)


def _layers(model: nn.Module) -> list[nn.Module]:
    return [module for module in model.modules() if isinstance(module, LlamaDecoderLayer)]


def _readout(model: nn.Module) -> UnitReadout:
    for module in model.modules():
        if isinstance(module, UnitReadout):
            return module
    raise RecipeError(f"{type(model).__name__} is not unit-scaled.", "Call unit_scale(model) first.")


def _require_llama(model: Any) -> None:
    name = type(model).__name__
    if not isinstance(model, LlamaForCausalLM):
        raise RecipeError(
            f"Cannot unit-scale a {name}: only Llama with a language model's head has rules.", "Use another compute."
        )
    if fsdp_groups(model):
        raise RecipeError(
            f"Cannot unit-scale this {name} because FSDP2 has sharded it, and whole weights are redrawn.",
            "Pass it whole to narrowgauge.prepare, with mesh=...",
        )
    head, config = model.get_output_embeddings(), model.config
    if isinstance(head, UnitReadout):
        raise RecipeError(f"This {name} is unit-scaled already.", "Build a new one.")
    if type(head) is not nn.Linear or head.bias is not None:
        raise RecipeError(
            f"Cannot unit-scale this {name} because its head is a {type(head).__name__}.",
            'Keep it a plain nn.Linear without bias, with keep = ["lm_head"].',
        )
    if config.hidden_act not in ("silu", "swish") or config.attention_dropout:
        raise RecipeError(
            f"Cannot unit-scale this {name}: no rule for hidden_act = {config.hidden_act!r} "
            f"with attention_dropout = {config.attention_dropout}.",
            "Build it with hidden_act = 'silu' and attention_dropout = 0.0.",
        )


@torch.no_grad()
def _draw(model: nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    gains = {m.weight for m in model.modules() if isinstance(m, UnitRMSNorm)}
    for parameter in model.parameters():
        if parameter.ndim >= 2:
            parameter.copy_(torch.empty(parameter.shape, dtype=torch.float32).normal_(generator=generator))
        else:
            parameter.fill_(1.0 if parameter in gains else 0.0)
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module.padding_idx is not None:
            module.weight[module.padding_idx] = 0.0


def fix_batch(model: nn.Module, *, sequence_length: int | None = None, tokens: int | None = None) -> None:
    """Fix the sequence length and the tokens of a step (over all micro-batches) in a unit-scaled model's constants.

    With ``tokens``, gradients of micro-batches add up to the gradient of the batch, for any split. With ``sequence_length``, a
    token's logits do not depend on the number of tokens after it.
    """
    batch = _readout(model).unit
    batch.sequence_length, batch.tokens = sequence_length, tokens


def learning_rate_factors(model: nn.Module) -> dict[str, float]:
    """Return the factor of Adam's learning rate for each parameter of a unit-scaled model. Tied ones have their first name.

    A matrix has ``fan_in ** -0.5``, an embedding ``width ** -0.5``, gains, biases and the head 1. Parameters of decoder layers
    have ``num_layers ** -0.5`` in addition. A tied embedding has two rules and gets their geometric mean, ``width ** -0.25``
    (ours). The mean loss of five short runs is 2.24, with the embedding's rule 2.29, with the head's 2.23.
    """
    head, layers = _readout(model).weight, _layers(model)
    inside = {p: len(layers) ** -0.5 for layer in layers for p in layer.parameters()}
    factors: dict[Tensor, float] = {}
    for module in model.modules():
        weight: Any = getattr(module, "weight", None)
        if isinstance(module, nn.Embedding):
            factors[weight] = module.embedding_dim ** (-0.25 if weight is head else -0.5)
        elif isinstance(weight, Tensor) and weight.ndim == 2 and not isinstance(module, UnitReadout):
            factors[weight] = cast(int, module.in_features) ** -0.5
    return {name: inside.get(p, 1.0) * factors.get(p, 1.0) for name, p in model.named_parameters()}


@torch.no_grad()
def plain_state_dict(model: nn.Module, sequence_length: int | None = None) -> dict[str, Tensor]:
    """Return float32 weights with which the plain class computes the unit-scaled model's function, up to rounding.

    All constants of the forward pass are linear, so they are multiplied into the weights. The residual stream's factors cancel
    because every norm divides by them. The plain stream is the unit one times a number that grows with depth.

    Args:
        model: from :func:`unit_scale`.
        sequence_length: sequence length for attention's constant; ``None`` uses the length of ``fix_batch``.
    Raises:
        RecipeError: the model is not unit-scaled, or no length is known.
    """
    length = sequence_length or _readout(model).unit.sequence_length
    if length is None:
        raise RecipeError(
            "Cannot export a unit-scaled model without a sequence length: a plain model has one constant for attention, "
            "and this one takes it from each input's length.",
            "Pass the length of its training as sequence_length.",
        )
    named = model.state_dict(keep_vars=True)
    plain = {value: value.detach().float().clone() for value in named.values()}
    for parameter, factor in _factors(model, length):
        plain[parameter] *= factor
    return {name: plain[value] for name, value in named.items()}


def _factors(model: Any, length: int) -> Iterator[tuple[nn.Parameter, float]]:
    stream = 1.0
    for layer in _layers(model):
        attention, mlp = cast(Any, layer.self_attn), cast(Any, layer.mlp)
        skip, branch, skip_mlp, branch_mlp = cast(Tensor, layer.unit_residual).tolist()
        # The last matrix of a branch gets the factors of its input and of the branch.
        last = {
            attention.o_proj: (attention_output(length, attention.head_dim), stream * branch / skip),
            mlp.down_proj: (SILU_GLU, stream / skip * branch_mlp / skip_mlp),
        }
        stream /= skip * skip_mlp
        for module in (*attention.children(), mlp.gate_proj, mlp.up_proj, mlp.down_proj):
            before, after = last.get(module, (1.0, 1.0))
            for name, parameter in module.named_parameters(recurse=False):
                factor = after * module.in_features**-0.5
                yield parameter, factor * before if name == "weight" else factor
        for parameter in attention.q_proj.parameters():
            yield parameter, attention.head_dim**-0.5
    yield model.model.norm.weight, 1 / _readout(model).in_features
