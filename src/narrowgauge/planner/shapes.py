"""Architectures: the shape of a decoder down to each matmul.

Parameters and operations are sums over one list of matmuls, so they always agree.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, NamedTuple

Part = Literal["attention", "mlp", "experts", "head"]
Split = Literal["column", "row", "none"]
Norm = Literal["rms", "rms-float32", "layer"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """Describe the experts of a mixture: a router chooses ``experts_per_token`` of ``num_experts``
    in each of ``num_layers``.

    ``shared_size`` is the total intermediate size of the experts that every token visits.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    num_layers: int
    shared_size: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
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


class Counts(NamedTuple):
    """Hold what a step of a user's module took: bytes of activations and gradients at its peak, and
    operations per token.

    ``trained`` counts the parameters that train.
    """

    tokens: int
    activations: int
    gradients: int
    trained: int
    operations: float


@dataclass(frozen=True, slots=True)
class Matmul:
    """Describe equal multiplied weights, ``[out_features, in_features]`` each.

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
    split: Split
    tokens_share: float = 1.0
    has_bias: bool = False

    @property
    def is_expert(self) -> bool:
        """Tell whether expert parallelism shards it."""
        return self.name.startswith("experts.")

    @property
    def is_of_mixture(self) -> bool:
        """Tell whether it is in a mixture's layer, shared experts included."""
        return self.part == "experts" or self.name.startswith("shared.")

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


@dataclass(frozen=True)
class Architecture:
    """Describe the shape of a decoder.

    Args:
        matmuls: every multiplied weight, the head last, also if tied to the embedding.
        vectors: parameters of norms and other vectors in all layers, including biases of matmuls.
        outer_vectors: other parameters outside the layers, without embedding, positions, head and
            its biases. They include norms and parts that no text decoder has, such as a vision
            tower.
        num_heads, num_kv_heads, query_dim, value_dim: of attention.
        intermediate_size: of an MLP.
        is_gated: the MLP multiplies two projections (SwiGLU, GeGLU) instead of one.
        positions: number of learned positions; 0 for rotary or other fixed positions.
        norm: ``"rms"`` has gains, ``"rms-float32"`` applies them in float32, ``"layer"`` may have
            gains and biases.
        norms_per_layer: norms of the residual stream's width.
        head_norms: norms of queries and keys: ``"none"``, per ``"head"``, or over ``"all"`` heads.
        activation: the MLP's function, in Hugging Face's spelling.
        has_fused_inputs: queries, keys and values are one matmul.
        window, window_share: attended tokens per layer, None for all; and the fraction of layers
            with that window.
        num_attention_layers: layers with attention; None for all. The other ones are counted by
            their matmuls, whose names begin with ``mixer.``.
        counts: of a step of a user's module; None for formulas.
        left_out: parts of the model without planned time and activations; empty if none.
    """

    name: str
    num_layers: int
    hidden_size: int
    vocab_size: int
    matmuls: tuple[Matmul, ...]
    vectors: int
    outer_vectors: int
    num_heads: int
    num_kv_heads: int
    query_dim: int
    value_dim: int
    intermediate_size: int
    is_gated: bool = True
    tie_embeddings: bool = False
    positions: int = 0
    norm: Norm = "rms"
    norms_per_layer: int = 2
    head_norms: Literal["none", "head", "all"] = "none"
    activation: str = "silu"
    has_fused_inputs: bool = False
    window: int | None = None
    window_share: float = 1.0
    mixture: Mixture | None = None
    latent: LatentAttention | None = None
    left_out: str = ""
    num_attention_layers: int | None = None
    counts: Counts | None = None

    def __hash__(self) -> int:
        return hash((self.name, self.num_parameters))

    @property
    def num_dense_layers(self) -> int:
        """Count layers with an MLP instead of a mixture."""
        return self.num_layers - self.num_mixture_layers

    @property
    def num_mixture_layers(self) -> int:
        """Count layers with a mixture."""
        return self.mixture.num_layers if self.mixture else 0

    @property
    def attention_share(self) -> float:
        """Return the fraction of layers that have attention."""
        if self.num_attention_layers is None:
            return 1.0
        return self.num_attention_layers / self.num_layers

    @cached_property
    def mixer_width(self) -> float:
        """Count the inputs and outputs of the matmuls of other mixers, for a mean layer."""
        total = 0
        for matmul in self.matmuls:
            if matmul.name.startswith("mixer."):
                total += matmul.count * (matmul.in_features + matmul.out_features)
        return total / self.num_layers

    @property
    def num_experts(self) -> int:
        """Count the experts of a mixture's layer; 1 without one."""
        return self.mixture.num_experts if self.mixture else 1

    @property
    def layer_matmuls(self) -> tuple[Matmul, ...]:
        """Return the matmuls of the layers: all but the head."""
        return self.matmuls[:-1]

    @cached_property
    def outer_parameters(self) -> int:
        """Count the parameters outside the layers; the head's weight counts unless tied."""
        head = self.matmuls[-1]
        total = (self.vocab_size + self.positions) * self.hidden_size + self.outer_vectors
        total += head.num_parameters
        if self.tie_embeddings:
            total -= head.num_elements
        return total

    @cached_property
    def num_parameters(self) -> int:
        """Count all parameters; a tied embedding counts once."""
        total = self.outer_parameters + self.vectors
        for matmul in self.layer_matmuls:
            total += matmul.num_parameters
        return total

    @cached_property
    def expert_parameters(self) -> int:
        """Count the parameters of routed experts, which expert parallelism shards."""
        return sum(matmul.num_parameters for matmul in self.matmuls if matmul.is_expert)

    @cached_property
    def largest_layer(self) -> int:
        """Count the parameters of the largest layer without its experts."""
        sizes = {"attention": self.vectors / self.num_layers, "mlp": 0.0, "experts": 0.0}
        layers = {
            "attention": self.num_layers,
            "mlp": self.num_dense_layers,
            "experts": self.num_mixture_layers,
        }
        for matmul in self.layer_matmuls:
            if not matmul.is_expert:
                kind = "experts" if matmul.is_of_mixture else matmul.part
                sizes[kind] += matmul.num_parameters / layers[kind]
        return round(sizes["attention"] + max(sizes["mlp"], sizes["experts"]))

    def mean_keys(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Return the attended keys per token, averaged over tokens and layers.

        This is half the sequence with the mask, all of it in Megatron's convention. A window ``w``
        shortens the causal mean to ``w - w² / 2s``.
        """
        unwindowed = sequence_length / 2 if is_causal else float(sequence_length)
        if self.window is None or self.window >= sequence_length:
            return unwindowed
        near = float(self.window)
        if is_causal:
            near -= self.window**2 / (2 * sequence_length)
        return self.window_share * near + (1 - self.window_share) * unwindowed

    def attention_flops(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Count operations of scores and values per token, forward and backward, in all layers.

        ``is_causal`` counts the half below the diagonal, ``6 L h s``. Megatron-LM counts the whole,
        ``12 L h s``.

        Source: Narayanan et al., arXiv 2104.04473, appendix; Dao, FlashAttention-2, arXiv
        2307.08691, section 4.1 (causal half).
        """
        if self.counts:  # all that no linear layer does
            return max(0.0, self.counts.operations - self._matmul_flops)
        per_key = 2 * self.num_heads * (self.query_dim + self.value_dim)
        layers = self.num_layers * self.attention_share
        return 3 * layers * per_key * self.mean_keys(sequence_length, is_causal=is_causal)

    def flops_per_token(self, sequence_length: int) -> float:
        """Count a training step's operations per token: ``6`` per multiplied parameter that a token
        meets, plus attention.

        Recomputation does not count: it is in HFU, not in MFU.
        """
        return self._matmul_flops + self.attention_flops(sequence_length)

    @cached_property
    def _matmul_flops(self) -> float:
        return 3 * sum(matmul.flops_per_token for matmul in self.matmuls)
