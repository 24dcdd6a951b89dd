"""Architectures: the shape of a decoder, as kinds of equal layers down to each weight.

Parameters, operations, state and exchanges are sums over one list of weights, so they always agree.
A hybrid is a list of several kinds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple

Part = Literal["attention", "mlp", "experts", "head", "embeddings", "norms"]
Split = Literal["column", "row", "none"]


class Mixture(NamedTuple):
    """Describe the experts of a layer: a router chooses ``experts_per_token`` of ``num_experts``.

    ``shared_size`` is the total intermediate size of the experts that every token visits.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int = 0


class LatentAttention(NamedTuple):
    """Describe attention with keys and values expanded from a latent vector (MLA).

    Args:
        query_rank: of the latent query; None for direct projection.
        plain_dim, rotary_dim: dimensions of a head's query and key without and with positions.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    query_rank: int | None
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


@dataclass(frozen=True, slots=True)
class Weight:
    """Describe equal weights, ``[out_features, in_features]`` each. Vectors are one row.

    Args:
        count: number of weights in the model.
        split: dimension that tensor parallelism shards: output rows (``"column"``), the sum
            (``"row"``) or none.
        tokens_share: fraction of tokens per weight, 1 outside mixtures.
    """

    name: str
    in_features: int
    out_features: int
    count: int
    part: Part
    split: Split = "none"
    tokens_share: float = 1.0
    has_bias: bool = False

    @property
    def is_expert(self) -> bool:
        """Tell whether expert parallelism shards it."""
        return self.name.startswith("experts.")

    @property
    def num_elements(self) -> int:
        return self.count * self.out_features * self.in_features

    @property
    def num_parameters(self) -> int:
        return self.count * self.out_features * (self.in_features + self.has_bias)

    @property
    def flops_per_token(self) -> float:
        """Count forward's operations per token: two per weight that the token meets."""
        return 2 * self.num_elements * self.tokens_share


@dataclass(frozen=True, slots=True)
class Layers:
    """Describe equal layers.

    Args:
        count: number of layers.
        matmuls: every multiplied weight of all of them.
        vectors: parameters of norms and other vectors in all of them, without biases of matmuls.
        has_attention: else the matmuls of its part "attention" are those of another mixer.
        window: attended tokens; None for all.
        inner_size: intermediate size of a dense MLP; 0 without one.
    """

    count: int
    matmuls: tuple[Weight, ...]
    vectors: int
    has_attention: bool = True
    window: int | None = None
    inner_size: int = 0
    mixture: Mixture | None = None

    def times(self, count: int) -> Layers:
        """Return ``count`` times these layers."""
        matmuls = [replace(matmul, count=count * matmul.count) for matmul in self.matmuls]
        return replace(
            self, count=count * self.count, matmuls=tuple(matmuls), vectors=count * self.vectors
        )

    @property
    def mixer_width(self) -> float:
        """Count the inputs and outputs of the matmuls of another mixer than attention, in a layer."""
        total = 0
        for matmul in self.matmuls:
            if matmul.part == "attention" and not self.has_attention:
                total += matmul.count * (matmul.in_features + matmul.out_features)
        return total / self.count

    def mean_keys(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Return the attended keys per token of a layer with attention.

        This is half the sequence with the mask, all of it in Megatron's convention. A window ``w``
        shortens the causal mean to ``w - w² / 2s``.
        """
        if self.window is None or self.window >= sequence_length:
            return sequence_length / 2 if is_causal else float(sequence_length)
        near = float(self.window)
        if is_causal:
            near -= self.window**2 / (2 * sequence_length)
        return near


@dataclass(frozen=True)
class Architecture:
    """Describe the shape of a decoder.

    Args:
        layers: its kinds of layers.
        outer_vectors: other parameters outside the layers, without embedding, positions and head.
            They include norms, biases, and parts that no text decoder has, such as a vision tower.
        num_heads, num_kv_heads, query_dim, value_dim: of attention.
        is_gated: the MLP multiplies two projections (SwiGLU, GeGLU) instead of one.
        positions: number of learned positions; 0 for rotary or other fixed positions.
    """

    name: str
    layers: tuple[Layers, ...]
    hidden_size: int
    vocab_size: int
    num_heads: int
    num_kv_heads: int
    query_dim: int
    value_dim: int
    outer_vectors: int = 0
    is_gated: bool = True
    tie_embeddings: bool = False
    positions: int = 0
    latent: LatentAttention | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.num_parameters))

    # weights

    @cached_property
    def layer_matmuls(self) -> tuple[Weight, ...]:
        """Return the matmuls of the layers: all but the head."""
        return tuple(matmul for layers in self.layers for matmul in layers.matmuls)

    @cached_property
    def head(self) -> Weight:
        """Return the head's weight; a tied one is the embedding."""
        return Weight("lm_head", self.hidden_size, self.vocab_size, 1, "head", "column")

    @cached_property
    def matmuls(self) -> tuple[Weight, ...]:
        """Return every multiplied weight, the head last, also if tied to the embedding."""
        return (*self.layer_matmuls, self.head)

    @cached_property
    def weights(self) -> dict[str, list[Weight]]:
        """Return all parameters by place: the layers and their experts, the first and the last
        stage of a pipeline.
        """
        vectors = sum(layers.vectors for layers in self.layers)
        places: dict[str, list[Weight]] = {
            "layers": [Weight("norms", vectors, 1, 1, "norms")],
            "experts": [],
            "first": [replace(self.head, name="embed_tokens", part="embeddings")],
            "last": [Weight("norm", self.outer_vectors, 1, 1, "norms")],
        }
        if self.positions:
            learned = Weight("positions", self.hidden_size, self.positions, 1, "embeddings")
            places["first"].append(learned)
        for matmul in self.layer_matmuls:
            places["experts" if matmul.is_expert else "layers"].append(matmul)
        if not self.tie_embeddings:
            places["last"].append(self.head)
        return places

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Count the parameters of each place of ``weights``."""
        return {
            place: sum(weight.num_parameters for weight in weights)
            for place, weights in self.weights.items()
        }

    @cached_property
    def num_parameters(self) -> int:
        """Count all parameters; a tied embedding counts once."""
        return sum(self.parameters.values())

    @cached_property
    def largest_layer(self) -> int:
        """Count the parameters of the largest layer without its experts."""
        sizes = []
        for layers in self.layers:
            size = layers.vectors
            for matmul in layers.matmuls:
                size += 0 if matmul.is_expert else matmul.num_parameters
            sizes.append(size / layers.count)
        return round(max(sizes))

    # layers

    @cached_property
    def num_layers(self) -> int:
        return sum(layers.count for layers in self.layers)

    @property
    def mixtures(self) -> Iterator[tuple[int, Mixture]]:
        """Yield the numbers of layers with experts, and their experts."""
        for layers in self.layers:
            if layers.mixture:
                yield layers.count, layers.mixture

    @cached_property
    def num_mixture_layers(self) -> int:
        return sum(count for count, _ in self.mixtures)

    @cached_property
    def mixture(self) -> Mixture | None:
        """Return the experts of a layer; None without any."""
        return next((mixture for _, mixture in self.mixtures), None)

    @property
    def num_experts(self) -> int:
        """Count the experts of a mixture's layer; 1 without one."""
        return self.mixture.num_experts if self.mixture else 1

    @property
    def intermediate_size(self) -> int:
        """Return the intermediate size of a dense MLP."""
        return max(layers.inner_size for layers in self.layers)

    # operations

    def attention_flops(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Count operations of scores and values per token, forward and backward, in all layers.

        ``is_causal`` counts the half below the diagonal, ``6 L h s``. Unfused attention computes
        the whole.

        Source: Narayanan et al., arXiv 2104.04473, appendix; Dao, FlashAttention-2, arXiv
        2307.08691, section 4.1 (causal half).
        """
        keys = 0.0
        for layers in self.layers:
            if layers.has_attention:
                keys += layers.count * layers.mean_keys(sequence_length, is_causal=is_causal)
        return 6 * self.num_heads * (self.query_dim + self.value_dim) * keys

    def flops_per_token(self, sequence_length: int) -> float:
        """Count a training step's operations per token: ``6`` per multiplied parameter that a token
        meets, plus attention.

        Recomputation does not count: it is in HFU, not in MFU.
        """
        matmuls = 3 * sum(matmul.flops_per_token for matmul in self.matmuls)
        return matmuls + self.attention_flops(sequence_length)
