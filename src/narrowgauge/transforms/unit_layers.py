"""The modules of a Llama or GPT-2 with unit scaling's constants in their forward, and the rules that give the constants.

A product of matrices with independent entries of variance one has entries of variance ``fan_in``; divided by the root of that,
they fit the range of any narrow format. Its backward sums over ``fan_out`` and, for the weight, over tokens, so forward and
backward need *different* constants. A constant may differ from the true derivative's in two places: where the gradient ends (a
weight: an optimizer such as Adam is independent of its scale), or where another constant compensates it later. Everywhere else
they are equal, so that each parameter's gradient is a multiple of the true one. :func:`scaled` applies different constants
forward and backward.

Source: Blake et al., Unit Scaling, arXiv 2303.11257; Blake et al., u-muP, arXiv 2407.17465 (residual weights: appendix G). All
multipliers that u-muP leaves to tuning are 1 here.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS
from transformers.models.gpt2.modeling_gpt2 import GPT2MLP, GPT2Attention, GPT2Block
from transformers.models.gpt2.modeling_gpt2 import eager_attention_forward as gpt2_eager
from transformers.models.llama.modeling_llama import (
    LlamaAttention,
    LlamaDecoderLayer,
    LlamaMLP,
    LlamaRMSNorm,
    apply_rotary_pos_emb,
)
from transformers.models.llama.modeling_llama import eager_attention_forward as llama_eager

from narrowgauge.numerics import widening

Factor = float | Tensor


@dataclass
class Batch:
    """The batch sizes that the rules depend on; one object, shared by all modules of a model.

    Args:
        sequence_length: tokens that attention averages over; ``None``: those of each call.
        tokens: number of tokens of an optimizer step, which divides the loss; ``None``: those of each call.
        sequences: rows of the last call's input.
    """

    sequence_length: int | None = None
    tokens: int | None = None
    sequences: int = 1

    def tokens_of(self, x: Tensor) -> int:
        """How many tokens the gradient of a weight sums over, where ``x [..., width]`` is its input."""
        return self.tokens or x.numel() // x.shape[-1]


class _Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, forward: Factor | None, backward: Factor | None) -> Tensor:
        ctx.factor = backward
        return x.view_as(x) if forward is None else x * forward

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        return gradients[0] if ctx.factor is None else gradients[0] * ctx.factor, None, None


def scaled(x: Tensor, *, forward: Factor | None = None, backward: Factor | None = None) -> Tensor:
    """``x * forward``, whose gradient is multiplied by ``backward`` instead; ``None`` is 1, without a copy.

    Example:
        >>> x = torch.ones(2, requires_grad=True)
        >>> y = scaled(x, forward=3.0, backward=0.5)
        >>> y.sum().backward()
        >>> y.tolist(), x.grad.tolist()
        ([3.0, 3.0], [0.5, 0.5])
    """
    return cast(Tensor, _Scaled.apply(x, forward, backward))  # type: ignore[no-untyped-call]


def fans(module: Any) -> tuple[int, int]:
    """Inputs and outputs of a linear layer; transformers' ``Conv1D`` has no such attributes and a transposed weight."""
    if hasattr(module, "in_features"):
        return module.in_features, module.out_features
    fan_in, fan_out = module.weight.shape
    return fan_in, fan_out


def linear(module: nn.Module, x: Tensor, batch: Batch, grad_input: float | None = None) -> Tensor:
    """A linear layer of any class with its constants around it: its inputs, outputs and gradients have unit variance.

    Args:
        module: computes ``x @ weight + bias``, in any format.
        x: ``[..., fan_in]``.
        batch: for the gradients of weight and bias.
        grad_input: factor of the input's gradient; ``None`` where the caller has applied it to ``x``.
    """
    tokens, fan_in = batch.tokens_of(x), fans(module)[0]
    if grad_input is not None:
        x = scaled(x, backward=grad_input)
    weights = {name: scaled(p, backward=tokens**-0.5) for name, p in module.named_parameters(recurse=False)}
    return scaled(functional_call(module, weights, (x,)), forward=fan_in**-0.5)


def log_interpolate(weight: float, lower: float, upper: float) -> float:
    """Geometric interpolation between two positive numbers: ``lower`` at 0, ``upper`` at 1."""
    return float(lower ** (1 - weight) * upper**weight)


# Fits to measured standard deviations between the limits of a linear and a step function, at multiplier 1.
SILU_GLU = log_interpolate(1 / (1 + 1), 2.0, math.sqrt(2.0))
"""The factor of ``up * silu(gate)``."""
GELU = log_interpolate(1 / (1 + 1 / 4), 2.0, math.sqrt(2 / (1 - 1 / math.pi)))
"""The factor of ``gelu``."""


def attention_output(sequence_length: int, head_dim: int) -> float:
    """The factor of causal attention's output, where logits are divided by ``head_dim``.

    Token ``t`` averages about ``t`` values, so the mean square over a sequence is ``log(s) / s``. The published form has a
    pole at length 1, where nothing is averaged; from 3 on this one is the same.
    """
    length = sequence_length
    mixed = torch.sym_max(1.0, math.log2(length) * math.log(2.0)) / length
    return cast(float, mixed ** (-0.5 * (1 - 1 / (1 + 4 * head_dim))))


def residual_weights(branch: int, num_layers: int) -> tuple[float, float]:
    """Factors of the skip and of a branch, so that embedding, attentions and MLPs contribute equally to the output.

    ``branch`` is the index among all branches; attention and MLP are one each.

    Example:
        >>> [round(w * w, 4) for w in residual_weights(0, 2)]
        [0.6667, 0.3333]
    """
    tau = (num_layers + branch) ** -0.5
    return 1 / math.sqrt(1 + tau**2), tau / math.sqrt(1 + tau**2)


def cross_entropy_gradient(vocab_size: int) -> float:
    """One over the root mean square of ``softmax - onehot`` where all tokens are equally likely."""
    return vocab_size / math.sqrt(vocab_size - 1)


# ── modules ────────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# Each class is Hugging Face's own with another ``forward``: setting a module's class keeps its parameters, names, hooks and
# position in the model. Linear layers inside a decoder layer are *called* and can be of any class. Values that differ between
# layers are tensors, not Python numbers, so that compiled layers share one graph.


class UnitEmbedding(nn.Embedding):
    """Rows of unit variance; each is used ``tokens / rows`` times on average."""

    unit: Batch
    unit_output: float

    def forward(self, input: Tensor) -> Tensor:
        self.unit.sequences = input.shape[0]
        return self._rows(input, input.numel())

    def _rows(self, input: Tensor, num_tokens: int) -> Tensor:
        tokens = self.unit.tokens or num_tokens
        weight = scaled(self.weight, backward=(self.num_embeddings / tokens) ** 0.5)
        rows = F.embedding(input, weight, self.padding_idx)
        return rows if self.unit_output == 1 else rows * self.unit_output


class UnitPositions(UnitEmbedding):
    """GPT-2's learned positions: looked up once for all sequences, so their gradient also sums over the sequences."""

    def forward(self, input: Tensor) -> Tensor:
        return self._rows(input, input.numel() * (self.unit.sequences if input.shape[0] == 1 else 1))


class UnitRMSNorm(LlamaRMSNorm):
    """Llama's norm, float32 inside; its gain's gradient sums over tokens."""

    unit: Batch

    def forward(self, hidden_states: Tensor) -> Tensor:
        wide = hidden_states.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return scaled(self.weight, backward=self.unit.tokens_of(wide) ** -0.5) * wide.to(hidden_states.dtype)


class UnitLayerNorm(nn.LayerNorm):
    """GPT-2's norm; the gradients of gain and bias sum over tokens."""

    unit: Batch

    def forward(self, input: Tensor) -> Tensor:
        factor = self.unit.tokens_of(input) ** -0.5
        gain, bias = scaled(self.weight, backward=factor), scaled(self.bias, backward=factor)
        return F.layer_norm(input, self.normalized_shape, gain, bias, self.eps)


class UnitReadout(nn.Linear):
    """The head: logits are divided by ``fan_in`` itself, so that they do not grow with the width.

    The loss is outside the model, and its gradient is ``(softmax - onehot) / tokens``. Only the head stays wide, so it takes that
    unchanged; the gradients of its weight and of the layers below have unit variance. All constants multiply its operands: the
    logits, the largest tensor of a step, are not read again.
    """

    unit: Batch

    def forward(self, input: Tensor) -> Tensor:
        tokens = self.unit.tokens_of(input)
        arriving = tokens * cross_entropy_gradient(self.out_features)
        x = scaled(input, forward=1 / self.in_features, backward=arriving * self.out_features**-0.5)
        weight = scaled(self.weight, backward=arriving * tokens**-0.5 * self.in_features)
        return widening.linear(x, weight)


def attend(module: Any, query: Tensor, key: Tensor, value: Tensor, eager: Any, **kwargs: Any) -> tuple[Tensor, Any]:
    """The model's own attention function with logits divided by the head's width and outputs of unit variance."""
    function = ALL_ATTENTION_FUNCTIONS.get_interface(module.config._attn_implementation, eager)
    mixed, weights = function(module, query, key, value, scaling=1 / module.head_dim, dropout=0.0, **kwargs)
    length = module.unit.sequence_length or key.shape[-2]
    return mixed.flatten(-2) * attention_output(length, module.head_dim), weights


class UnitLlamaAttention(LlamaAttention):
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
        mixed, weights = attend(self, query, key, value, llama_eager, attention_mask=attention_mask, **kwargs)
        return linear(self.o_proj, mixed, self.unit, mixed.shape[-1] ** -0.5), weights


class UnitLlamaMLP(LlamaMLP):
    """Gate and up divide gradients by the root of *their* number of outputs, down by that of its own: the product is exact."""

    unit: Batch

    def forward(self, x: Tensor) -> Tensor:
        x = scaled(x, backward=self.intermediate_size**-0.5)
        gate, up = linear(self.gate_proj, x, self.unit), linear(self.up_proj, x, self.unit)
        return linear(self.down_proj, F.silu(gate) * up * SILU_GLU, self.unit, self.hidden_size**-0.5)


class UnitLlamaLayer(LlamaDecoderLayer):
    """Two branches, each with a weight in the residual stream; gradients inside a branch do not have that factor."""

    unit_residual: Tensor

    def forward(self, hidden_states: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        skip, branch, skip_mlp, branch_mlp = self.unit_residual.unbind()
        x = self.input_layernorm(scaled(hidden_states, backward=branch))
        x, _ = self.self_attn(x, *args, **kwargs)
        hidden_states = hidden_states * skip + scaled(x, forward=branch)
        x = self.mlp(self.post_attention_layernorm(scaled(hidden_states, backward=branch_mlp)))
        return hidden_states * skip_mlp + scaled(x, forward=branch_mlp)


class UnitGPT2Attention(GPT2Attention):
    """Self-attention; q, k and v are one fused matmul."""

    unit: Batch

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, Any]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        fused = linear(self.c_attn, hidden_states, self.unit, self.embed_dim**-0.5)
        query, key, value = (part.view(shape).transpose(1, 2) for part in fused.split(self.embed_dim, dim=-1))
        if past_key_values is not None:
            key, value = past_key_values.update(key, value, self.layer_idx)
        mixed, weights = attend(self, query, key, value, gpt2_eager, attention_mask=attention_mask, **kwargs)
        return linear(self.c_proj, mixed, self.unit, self.embed_dim**-0.5), weights


class UnitGPT2MLP(GPT2MLP):
    """As in Llama's, the constants of the two matrices compensate each other in the gradients."""

    unit: Batch

    def forward(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        (width, inner) = fans(self.c_fc)
        x = self.act(linear(self.c_fc, hidden_states, self.unit, inner**-0.5)) * GELU
        return linear(self.c_proj, x, self.unit, width**-0.5)


class UnitGPT2Block(GPT2Block):
    unit_residual: Tensor

    def forward(  # type: ignore[override]
        self,
        hidden_states: Tensor,
        past_key_values: Any = None,
        attention_mask: Tensor | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> Tensor:
        skip, branch, skip_mlp, branch_mlp = self.unit_residual.unbind()
        x = self.ln_1(scaled(hidden_states, backward=branch))
        x, _ = self.attn(x, past_key_values=past_key_values, attention_mask=attention_mask, **kwargs)
        hidden_states = hidden_states * skip + scaled(x, forward=branch)
        x = self.mlp(self.ln_2(scaled(hidden_states, backward=branch_mlp)))
        return hidden_states * skip_mlp + scaled(x, forward=branch_mlp)
