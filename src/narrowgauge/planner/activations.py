"""Activations: the tensors that decoder layers save for backward.

A published constant (34 bytes per token and feature: Korthikanti et al.) holds for one implementation. Hugging Face's modules
save half as much again as fused kernels. So a layer is a list of saved tensors, each with its bytes per token. There are two
kinds of kernels. ``"eager"`` runs the Hugging Face modules one operation after the other. ``"fused"`` stands for Megatron-LM,
TransformerEngine and Liger. Their norms and activation functions save only their input and recompute the rest.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv 2205.05198, section 4, for
tensors saved by each operation. The eager columns are counts of ``torch.autograd.graph.saved_tensors_hooks``
(tests/planner/test_activations.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, NamedTuple

from narrowgauge.planner.model import Architecture
from narrowgauge.planner.roofline import bytes_per_number
from narrowgauge.spec.computes import BLOCKS, Compute
from narrowgauge.spec.recipes import Recipe

Kernels = Literal["eager", "fused"]
EAGER_ACTIVATION_TENSORS = {"gelu_new": 4}
"""Tensors of the MLP's width that an activation function saves in eager mode, where it is several operations."""
_STATISTIC = 4  # bytes of a float32 per token: the scale of a norm or a row


class SavedTensor(NamedTuple):
    """Describe tensors of one kind that a layer saves for backward.

    Args:
        bytes_per_token: in one layer.
        is_stream: part of the residual stream. Tensor ranks shard it only with sequence parallelism.
    """

    name: str
    bytes_per_token: float
    is_stream: bool = False


class Widths(NamedTuple):
    """Hold the bytes per element of a model's tensors under a recipe.

    Args:
        stream: of the residual stream and norms; float32 under autocast.
        matmul: of inputs and outputs of attention and MLP.
    """

    stream: float
    matmul: float

    @property
    def is_cast(self) -> bool:
        """Tell whether matmuls cast the stream (autocast). Each matmul saves its own cast of input and weight."""
        return self.stream != self.matmul


def widths_of(recipe: Recipe) -> Widths:
    """Return the widths of a recipe.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> widths_of(parse("bfloat16/float32"))
        Widths(stream=4.0, matmul=2.0)
    """
    stream = bytes_per_number(recipe.storage.visible)
    return Widths(stream, bytes_per_number(recipe.compute.dtype) if recipe.storage.visible == "float32" else stream)


class LayerBytes(NamedTuple):
    """Hold what a mean layer saves for backward.

    Args:
        per_token: bytes of all saved tensors per token.
        stream: the part of them in the residual stream.
        casts: bytes of autocast's weight casts. A low-precision compute saves none beyond its matmul.
    """

    per_token: float
    stream: float
    casts: float


@lru_cache(maxsize=256)
def layer_bytes(a: Architecture, recipe: Recipe, kernels: Kernels = "eager") -> LayerBytes:
    """Return the bytes that a mean layer saves.

    The recipe's main compute and storage set the width of each tensor. Overrides by layer do not count. Attention is a flash
    kernel, which saves no scores.
    """
    widths = widths_of(recipe)
    layer = _Layer(a, recipe.compute, widths, kernels)
    per_token = stream = 0.0
    for mlp, count in ((layer.mlp, a.num_dense_layers), (layer.mixture, a.num_layers - a.num_dense_layers)):
        tensors = [*layer.norms(), *layer.attention(), *mlp()] if count else []
        per_token += count / a.num_layers * sum(tensor.bytes_per_token for tensor in tensors)
        stream += count / a.num_layers * sum(tensor.bytes_per_token for tensor in tensors if tensor.is_stream)
    width = widths.matmul if widths.is_cast and recipe.compute.is_wide else 0.0
    return LayerBytes(per_token, stream, width * sum(matmul.num_elements for matmul in a.matmuls[:-1]) / a.num_layers)


@dataclass(frozen=True, slots=True)
class _Layer:
    architecture: Architecture
    compute: Compute
    widths: Widths
    kernels: Kernels

    def norm_bytes(self, size: int, groups: int = 1, stream: float | None = None) -> float:
        """Return the bytes that a norm saves per token, with ``groups`` statistics and ``stream`` bytes per element."""
        stream, kind = stream or self.widths.stream, self.architecture.norm
        if kind == "layer":
            # Mean and scale, in the input's dtype on a CPU.
            return stream * size + 2 * stream * groups
        if self.kernels == "fused":
            return stream * size + _STATISTIC * groups
        # The input as float32, its scale, and the normalized value before the gain.
        normalized = 4.0 if kind == "rms-float32" else stream
        return (4 + normalized) * size + _STATISTIC * groups

    def norms(self) -> Iterator[SavedTensor]:
        a = self.architecture
        yield SavedTensor("norms", a.norms_per_layer * self.norm_bytes(a.hidden_size), is_stream=True)

    def inputs(self, size: float, consumers: int = 1, *, is_saved_anyway: bool = False) -> float:
        """Return the bytes that matmuls save of one input per token.

        ``is_saved_anyway``: another operation saves the uncast input, in the matmuls' dtype.
        """
        casts = consumers if self.widths.is_cast else 1
        if not self.compute.keeps_codes:
            return 0.0 if is_saved_anyway else self.widths.matmul * size * casts
        cast = self.compute.output.left
        if cast.granularity in BLOCKS:
            codes = size * (cast.element.storage_bits + cast.bits - cast.element.bits) / 8
        else:
            codes = size * cast.element.storage_bits / 8 + (_STATISTIC if cast.granularity == "row" else 0)
        # Under autocast every layer casts the input separately, so layers do not share codes.
        return codes * (1 if is_saved_anyway else casts)

    def attention(self) -> Iterator[SavedTensor]:
        """Yield projection inputs, queries, keys, values and the attention's result."""
        a, e = self.architecture, self.widths.matmul
        queries, values = a.num_heads * a.query_dim, a.num_heads * a.value_dim
        if a.latent:
            yield from self._latent_tensors()
            keys, saved_values = queries, values
        else:
            fused = 1 if a.has_fused_inputs else 3
            yield SavedTensor("input of the projections", self.inputs(a.hidden_size, fused), is_stream=True)
            keys = saved_values = a.num_kv_heads * a.value_dim
        if a.head_norms != "none":
            groups = a.num_heads + a.num_kv_heads if a.head_norms == "head" else 2
            yield SavedTensor("norms of queries and keys", self.norm_bytes(queries + keys, groups, e))
        # Values that are views of one result keep all of it, in addition to the rotated queries and keys.
        rotated = queries + keys if a.has_fused_inputs and not a.positions else 0
        yield SavedTensor("queries, keys and values", e * (queries + keys + saved_values + rotated))
        yield SavedTensor("attention", e * values + _STATISTIC * a.num_heads)
        yield SavedTensor("input of the output projection", self.inputs(values, is_saved_anyway=True))

    def _latent_tensors(self) -> Iterator[SavedTensor]:
        a, latent = self.architecture, self.architecture.latent
        assert latent is not None
        yield SavedTensor("input of the projections", self.inputs(a.hidden_size, 2), is_stream=True)
        ranks = [rank for rank in (latent.query_rank, latent.key_value_rank) if rank]
        yield SavedTensor(
            "norms of the latents", sum(self.norm_bytes(rank, stream=self.widths.matmul) for rank in ranks)
        )
        yield SavedTensor("latents", sum(self.inputs(rank) for rank in ranks))

    def mlp_bytes(self, size: int) -> float:
        """Return the bytes of gate, up and their product, without the input."""
        a = self.architecture
        tensors = EAGER_ACTIVATION_TENSORS.get(a.activation, 1) if self.kernels == "eager" else 1
        if a.is_gated:
            tensors += 1 if self.kernels == "fused" else 2
        return tensors * self.widths.matmul * size + self.inputs(size)

    def mlp(self) -> Iterator[SavedTensor]:
        """Yield inputs and inner tensors of a dense MLP."""
        a = self.architecture
        gates = 2 if a.is_gated and not a.has_fused_inputs else 1
        yield SavedTensor("input of the MLP", self.inputs(a.hidden_size, gates), is_stream=True)
        yield SavedTensor("MLP", self.mlp_bytes(a.intermediate_size))

    def mixture(self) -> Iterator[SavedTensor]:
        """Yield the router, each token's copies for its experts, and their inner tensors."""
        a, mixture, e = self.architecture, self.architecture.mixture, self.widths.matmul
        assert mixture is not None
        chosen = mixture.experts_per_token
        # The router's input, its float32 probabilities, and the chosen experts: their weights, and three lists of indices.
        yield SavedTensor(
            "router", e * a.hidden_size + 4.0 * mixture.num_experts + 32.0 * chosen + _STATISTIC, is_stream=True
        )
        yield SavedTensor("inputs of the experts", chosen * self.inputs(a.hidden_size), is_stream=True)
        yield SavedTensor("experts", chosen * self.mlp_bytes(mixture.expert_size))
        yield SavedTensor("results of the experts", chosen * e * a.hidden_size, is_stream=True)
        if mixture.shared_size:
            yield SavedTensor("shared experts", self.mlp_bytes(mixture.shared_size))
