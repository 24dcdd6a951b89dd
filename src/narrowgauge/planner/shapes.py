"""Architectures: the shape of a decoder, as kinds of equal layers down to each weight.

Parameters, operations, state and exchanges are sums over one list of weights, so they always agree.
A hybrid is a list of several kinds.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property


@dataclass(frozen=True, slots=True)
class WeightShape:
    """Describe ``count`` equal weights, ``[out_features, in_features]`` each. Vectors are one row.

    ``part`` is attention, mlp, experts, head, embeddings or norms. ``tokens_share`` is the fraction
    of tokens that each of them sees, 1 outside mixtures.
    """

    name: str
    in_features: int
    out_features: int
    part: str
    count: int = 1
    tokens_share: float = 1.0

    @property
    def is_expert(self) -> bool:
        """Tell whether expert parallelism shards it."""
        return self.name.startswith("experts.")

    @property
    def num_parameters(self) -> int:
        return self.count * self.out_features * self.in_features

    @property
    def met(self) -> float:
        """Return the number of them that a token meets."""
        return self.count * self.tokens_share

    @property
    def flops_per_token(self) -> float:
        """Count forward's operations per token: two per weight that the token meets."""
        return 2 * self.met * self.out_features * self.in_features


@dataclass(frozen=True)
class Layers:
    """Describe equal layers.

    Args:
        matmuls: every multiplied weight of one layer. Those of MLPs are named ``up_proj`` or
            ``down_proj``.
        vectors: parameters of norms, biases and other vectors in one layer.
        count: number of layers.
        has_attention: else the matmuls of its part "attention" are those of another mixer.
        window: attended tokens; None for all.
    """

    matmuls: tuple[WeightShape, ...]
    vectors: int
    count: int = 1
    has_attention: bool = True
    window: int | None = None

    @cached_property
    def inner_size(self) -> float:
        """Count the inputs of the matmuls that end an MLP, or all chosen and shared experts, that a
        token meets.
        """
        downs = [matmul for matmul in self.matmuls if matmul.name.endswith("down_proj")]
        return sum(matmul.met * matmul.in_features for matmul in downs)

    @cached_property
    def wide_size(self) -> float:
        """Count the outputs of the matmuls that begin them: twice as many with a gate."""
        ups = [matmul for matmul in self.matmuls if matmul.name.endswith("up_proj")]
        return sum(matmul.met * matmul.out_features for matmul in ups)

    @cached_property
    def experts(self) -> int:
        """Return the number of experts; 0 without a mixture."""
        return max(matmul.count * (matmul.name == "experts.down_proj") for matmul in self.matmuls)

    @cached_property
    def chosen(self) -> int:
        """Return the number of experts that a token visits."""
        return round(
            max(matmul.met * (matmul.name == "experts.down_proj") for matmul in self.matmuls)
        )

    @cached_property
    def mixer_width(self) -> int:
        """Count the inputs and outputs of the matmuls of another mixer than attention."""
        total = 0
        for matmul in self.matmuls:
            if matmul.part == "attention" and not self.has_attention:
                total += matmul.count * (matmul.in_features + matmul.out_features)
        return total

    def mean_keys(self, sequence_length: int) -> float:
        """Return the attended keys per token of a layer with attention: half the sequence. A window
        ``w`` shortens the mean to ``w - w² / 2s``.
        """
        near = min(self.window or sequence_length, sequence_length)
        return near - near**2 / (2 * sequence_length)


def parameters_of(weights: Iterable[WeightShape]) -> int:
    """Count the parameters of all weights."""
    return sum(weight.num_parameters for weight in weights)


@dataclass(frozen=True)
class Architecture:
    """Describe the shape of a decoder.

    Args:
        layers: its kinds of layers.
        num_heads, num_kv_heads, query_dim, value_dim: of attention.
        outer_vectors: other parameters outside the layers, without embedding, positions and head.
            They include norms, and parts that no text decoder has, such as a vision tower.
        is_latent: keys and values are expanded from a latent vector (MLA, arXiv 2405.04434).
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
    is_latent: bool = False
    tie_embeddings: bool = False
    positions: int = 0

    def __hash__(self) -> int:
        return hash((self.name, self.num_parameters))

    @cached_property
    def layer_matmuls(self) -> list[WeightShape]:
        """Return the matmuls of all layers: all but the head."""
        matmuls = []
        for layers in self.layers:
            for matmul in layers.matmuls:
                matmuls.append(replace(matmul, count=layers.count * matmul.count))
        return matmuls

    @cached_property
    def matmuls(self) -> list[WeightShape]:
        """Return every multiplied weight, the head last, also if it is tied to the embedding."""
        head = WeightShape("lm_head", self.hidden_size, self.vocab_size, "head")
        return [*self.layer_matmuls, head]

    @cached_property
    def weights(self) -> dict[str, list[WeightShape]]:
        """Return all parameters by place: the layers and their experts, the first and the last
        stage of a pipeline.
        """
        vectors = sum(layers.count * layers.vectors for layers in self.layers)
        rows = self.vocab_size + self.positions
        places = {
            "layers": [WeightShape("norms", vectors, 1, "norms")],
            "experts": [],
            "first": [WeightShape("embed_tokens", self.hidden_size, rows, "embeddings")],
            "last": [WeightShape("norm", self.outer_vectors, 1, "norms")],
        }
        for matmul in self.layer_matmuls:
            places["experts" if matmul.is_expert else "layers"].append(matmul)
        if not self.tie_embeddings:
            places["last"].append(self.matmuls[-1])
        return places

    @cached_property
    def parameters(self) -> dict[str, int]:
        """Count the parameters of each place of ``weights``."""
        return {place: parameters_of(weights) for place, weights in self.weights.items()}

    @cached_property
    def num_parameters(self) -> int:
        """Count all parameters; a tied embedding counts once."""
        return sum(self.parameters.values())

    @cached_property
    def largest_layer(self) -> int:
        """Count the parameters of the largest layer without its experts."""
        largest = 0
        for layers in self.layers:
            dense = [matmul for matmul in layers.matmuls if not matmul.is_expert]
            largest = max(largest, layers.vectors + parameters_of(dense))
        return largest

    @cached_property
    def widest(self) -> float:
        """Return the most outputs of the matmuls that begin an MLP, or a token's experts."""
        return max(layers.wide_size for layers in self.layers)

    @cached_property
    def mean_outputs(self) -> float:
        """Count the outputs of the matmuls of a mean layer."""
        outputs = sum(matmul.met * matmul.out_features for matmul in self.layer_matmuls)
        return outputs / self.num_layers

    @cached_property
    def num_layers(self) -> int:
        return sum(layers.count for layers in self.layers)

    @cached_property
    def num_mixture_layers(self) -> int:
        return sum(layers.count for layers in self.layers if layers.experts)

    @cached_property
    def num_experts(self) -> int:
        """Return the experts of a layer; 0 in a dense model."""
        return max(layers.experts for layers in self.layers)

    def attention_flops(self, sequence_length: int) -> float:
        """Count operations of scores and values per token, forward and backward, in all layers, of
        the half below the diagonal: ``6 L h s``.

        Source: Narayanan et al., arXiv 2104.04473, appendix; Dao, FlashAttention-2, arXiv
        2307.08691, section 4.1 (causal half).
        """
        keys = 0.0
        for layers in self.layers:
            if layers.has_attention:
                keys += layers.count * layers.mean_keys(sequence_length)
        return 6 * self.num_heads * (self.query_dim + self.value_dim) * keys

    def flops_per_token(self, sequence_length: int) -> float:
        """Count a training step's operations per token: ``6`` per multiplied parameter that a token
        meets, plus attention.

        Recomputation does not count: it is in HFU, not in MFU.
        """
        matmuls = 3 * sum(matmul.flops_per_token for matmul in self.matmuls)
        return matmuls + self.attention_flops(sequence_length)
