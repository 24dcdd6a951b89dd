"""Architectures: the shapes of decoders, down to each matmul, and the parameters and operations that follow from them.

A decoder is a stack of layers between an embedding and a head. A layer has an attention (of heads that share keys and values, or
with latent keys and values) and an MLP or a mixture of experts. ``matmuls`` lists every weight that is multiplied, once per kind;
the counts of parameters and of operations are sums over that list, so that no two of them can disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec.computes import COMPUTES, stored_bytes

Part = Literal["attention", "mlp", "experts", "head"]
Split = Literal["column", "row", "none"]
Norm = Literal["rms", "rms-float32", "layer"]


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of a mixture, and which layers have them.

    Args:
        num_experts: per layer; a router chooses ``experts_per_token`` of them.
        expert_size: intermediate size of an expert.
        shared_size: intermediate size of the experts that every token visits, together; 0 without.
        num_layers: layers with a mixture; the others have an MLP.
        has_biases: of the router and the experts.
        num_vectors: further parameters of a layer with a mixture: the gate of a shared expert, a correction of the router.
    """

    num_experts: int
    experts_per_token: int
    expert_size: int
    num_layers: int
    shared_size: int = 0
    has_biases: bool = False
    num_vectors: int = 0


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Sizes of an attention whose keys and values are expanded from a latent vector (MLA).

    Args:
        query_rank: of the latent query; None if queries are projected directly.
        plain_dim, rotary_dim: of a head's query and key without and with positions.

    Source: DeepSeek-V2, arXiv 2405.04434, section 2.1.
    """

    query_rank: int | None
    key_value_rank: int
    plain_dim: int
    rotary_dim: int
    value_dim: int


_SIDE, _OUTLIER_COLUMNS = 4096, 4
BASE_BYTES = {
    "bfloat16": 2.0,
    "int8": 1.0,
    "int8-outlier": stored_bytes(COMPUTES["int8-outlier"], _SIDE, _SIDE, _OUTLIER_COLUMNS) / _SIDE**2,
    "float8": 1.0,
    "nf4": 0.5 + 0.127 / 8,
    "nvfp4": 0.5 + 1 / 16,
}
"""Bytes a parameter of a frozen base: nf4 with doubly quantized scales (QLoRA, arXiv 2305.14314, section 3: 0.127 bits), nvfp4
with a scale of 8 bits for each 16, int8-outlier with 0.1 % of the columns in 16 bits too (LLM.int8(), arXiv 2208.07339, section
3.2: at most that share of the features), of a matrix of 4,096 × 4,096."""


@dataclass(frozen=True, slots=True)
class Adapters:
    """LoRA: two matrices of a low rank beside each linear layer of attention and MLP, which is frozen.

    ``base``, a key of ``BASE_BYTES``, is how the frozen layers are kept; what is narrower than 16 bits is widened before each
    product (QLoRA).

    Source: Hu et al., LoRA, arXiv 2106.09685; Dettmers et al., QLoRA, arXiv 2305.14314.
    """

    rank: int
    base: str = "bfloat16"

    def __post_init__(self) -> None:
        if self.rank < 1:
            raise RecipeError(f"adapters of rank {self.rank} were requested.", "Use 1 or more, such as 16.")
        if self.base not in BASE_BYTES:
            raise RecipeError(
                f"a base in {self.base!r} was requested.",
                suggestion(self.base, BASE_BYTES) or f"It is one of {', '.join(BASE_BYTES)}.",
            )

    @property
    def base_bytes(self) -> float:
        return BASE_BYTES[self.base]

    @property
    def is_widened(self) -> bool:
        """Whether a layer is widened to 16 bits before each of its products."""
        return self.base_bytes < BASE_BYTES["bfloat16"]

    def parameters_of(self, matmul: Matmul) -> int:
        """Parameters of all adapters of a kind of matmul; experts, routers and the head have none."""
        if matmul.part not in ("attention", "mlp"):
            return 0
        return self.rank * (matmul.in_features + matmul.out_features) * matmul.count


@dataclass(frozen=True, slots=True)
class Matmul:
    """Equal weights that are multiplied, ``[out_features, in_features]`` each.

    Args:
        name: of the module in Hugging Face's Llama, or the published one.
        count: of weights in the model.
        split: what tensor parallelism shards: rows of the output (``"column"``), the sum (``"row"``) or nothing.
        tokens_share: share of the tokens that each weight sees, 1 outside mixtures.
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
    def num_parameters(self) -> int:
        return self.count * self.out_features * (self.in_features + self.has_bias)

    @property
    def flops_per_token(self) -> float:
        """Of forward: two per weight that a token meets."""
        return 2 * self.count * self.in_features * self.out_features * self.tokens_share


@dataclass(frozen=True, slots=True)
class Architecture:
    """The shape of a decoder.

    Args:
        intermediate_size: of an MLP.
        is_gated: whether the MLP multiplies two projections (SwiGLU, GeGLU) instead of one.
        max_positions: learned positions; None for rotary or other fixed ones.
        norm: ``"rms"`` has gains, ``"rms-float32"`` applies them in float32, ``"layer"`` has gains and biases.
        norms_per_layer: of the width of the residual stream.
        head_norms: norms of queries and keys: ``"none"``, of each ``"head"``, or of ``"all"`` heads together.
        has_gains: whether norms have gains (and biases) at all.
        has_embedding_norm: whether embeddings are normalized before the first layer.
        num_vectors: further parameters of every layer, such as those of a trained activation function.
        activation: the MLP's function, in Hugging Face's spelling.
        has_fused_inputs: whether queries, keys and values are one matmul; and gate and up, in a gated MLP.
        has_sinks: whether each head has a learned logit that takes attention away.
        window, window_share: tokens that a layer attends to, None for all; and the share of the layers with that window.
        adapters: LoRA over the frozen model; None if all is trained.
        stated_parameters: the count of a model of which nothing else is known (:func:`of_size`).
        source: where the shape is published.
        left_out: parts of the model that are not in the shape, such as a vision tower; empty if it is whole.

    Example:
        >>> shape = Architecture("small", 2, 64, 4, 2, 16, 160, 100)
        >>> shape.num_parameters == 2 * 100 * 64 + 2 * (2 * 64 * 64 + 2 * 64 * 32 + 3 * 64 * 160 + 2 * 64) + 64
        True
    """

    name: str
    num_layers: int
    hidden_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    intermediate_size: int
    vocab_size: int
    is_gated: bool = True
    tie_embeddings: bool = False
    max_positions: int | None = None
    norm: Norm = "rms"
    norms_per_layer: int = 2
    head_norms: Literal["none", "head", "all"] = "none"
    qkv_bias: bool = False
    output_bias: bool = False
    mlp_bias: bool = False
    norm_bias: bool = True
    head_bias: bool = False
    has_gains: bool = True
    has_embedding_norm: bool = False
    num_vectors: int = 0
    activation: str = "silu"
    has_fused_inputs: bool = False
    has_sinks: bool = False
    window: int | None = None
    window_share: float = 1.0
    mixture: Mixture | None = None
    latent: LatentAttention | None = None
    stated_parameters: int | None = None
    source: str = ""
    left_out: str = ""
    adapters: Adapters | None = None

    @property
    def has_shape(self) -> bool:
        """Whether more is known than the number of parameters."""
        return self.stated_parameters is None

    @property
    def num_dense_layers(self) -> int:
        """Layers with an MLP instead of a mixture."""
        return self.num_layers - (self.mixture.num_layers if self.mixture else 0)

    @property
    def query_dim(self) -> int:
        """Size of a head's query or key."""
        return self.latent.plain_dim + self.latent.rotary_dim if self.latent else self.head_dim

    @property
    def value_dim(self) -> int:
        return self.latent.value_dim if self.latent else self.head_dim

    @property
    def matmuls(self) -> tuple[Matmul, ...]:
        """Every weight that is multiplied; a head that is tied to the embedding is among them.

        Example:
            >>> shape = Architecture("small", 2, 64, 4, 2, 16, 160, 100)
            >>> [(m.name, m.in_features, m.out_features, m.count) for m in shape.matmuls][:3]
            [('q_proj', 64, 64, 2), ('k_proj', 64, 32, 2), ('v_proj', 64, 32, 2)]
        """
        if not self.has_shape:
            return ()
        head = Matmul("lm_head", self.hidden_size, self.vocab_size, 1, "head", "column", 1.0, self.head_bias)
        mlps = self._mlp(self.intermediate_size, self.num_dense_layers, "mlp") if self.num_dense_layers else ()
        return (*self.attention_matmuls(self.num_layers), *mlps, *self._mixture_matmuls(), head)

    def attention_matmuls(self, num_layers: int = 1) -> tuple[Matmul, ...]:
        heads = self.num_heads * self.value_dim
        output = Matmul("o_proj", heads, self.hidden_size, num_layers, "attention", "row", 1.0, self.output_bias)
        if self.latent:
            return (*self._latent_matmuls(self.latent, num_layers), output)
        queries, keys = self.num_heads * self.head_dim, self.num_kv_heads * self.head_dim
        sizes = (("q_proj", queries), ("k_proj", keys), ("v_proj", keys))
        inputs = (
            Matmul(name, self.hidden_size, size, num_layers, "attention", "column", 1.0, self.qkv_bias)
            for name, size in sizes
        )
        return (*inputs, output)

    def _latent_matmuls(self, latent: LatentAttention, num_layers: int) -> tuple[Matmul, ...]:
        queries = self.num_heads * self.query_dim
        expanded = self.num_heads * (latent.plain_dim + latent.value_dim)
        rows: list[tuple[str, int, int, Split, bool]] = [
            ("kv_a_proj", self.hidden_size, latent.key_value_rank + latent.rotary_dim, "none", self.qkv_bias),
            ("kv_b_proj", latent.key_value_rank, expanded, "column", False),
        ]
        if latent.query_rank is None:
            rows.insert(0, ("q_proj", self.hidden_size, queries, "column", False))
        else:
            rows.insert(0, ("q_b_proj", latent.query_rank, queries, "column", False))
            rows.insert(0, ("q_a_proj", self.hidden_size, latent.query_rank, "none", self.qkv_bias))
        return tuple(
            Matmul(name, inputs, outputs, num_layers, "attention", split, 1.0, bias)
            for name, inputs, outputs, split, bias in rows
        )

    def _mlp(
        self, size: int, count: int, part: Part, share: float = 1.0, bias: bool | None = None, prefix: str = ""
    ) -> tuple[Matmul, ...]:
        bias = self.mlp_bias if bias is None else bias
        names = ("gate_proj", "up_proj") if self.is_gated else ("up_proj",)
        ins = (Matmul(prefix + name, self.hidden_size, size, count, part, "column", share, bias) for name in names)
        return (*ins, Matmul(prefix + "down_proj", size, self.hidden_size, count, part, "row", share, bias))

    def _mixture_matmuls(self) -> tuple[Matmul, ...]:
        mixture = self.mixture
        if mixture is None:
            return ()
        layers, share = mixture.num_layers, mixture.experts_per_token / mixture.num_experts
        bias = mixture.has_biases
        router = Matmul("router", self.hidden_size, mixture.num_experts, layers, "experts", "none", 1.0, bias)
        experts = self._mlp(mixture.expert_size, layers * mixture.num_experts, "experts", share, bias, "experts.")
        # Shared experts lie on every rank, like an MLP.
        shared = self._mlp(mixture.shared_size, layers, "mlp", prefix="shared.") if mixture.shared_size else ()
        return (router, *experts, *shared)

    @property
    def vector_parameters(self) -> int:
        """Parameters of norms and sinks in one layer; biases of matmuls are counted there."""
        count = self.norms_per_layer * self.norm_parameters + (self.num_heads if self.has_sinks else 0)
        if self.latent:
            count += (self.latent.query_rank or 0) + self.latent.key_value_rank
        heads = {"none": 0, "head": 2, "all": self.num_heads + self.num_kv_heads}[self.head_norms]
        return count + heads * self.head_dim * self._per_norm + self.num_vectors

    @property
    def norm_parameters(self) -> int:
        """Parameters of a norm of the residual stream's width: gains and biases."""
        return self.hidden_size * self._per_norm

    @property
    def _per_norm(self) -> int:
        if not self.has_gains:
            return 0
        return 2 if self.norm == "layer" and self.norm_bias else 1

    @property
    def embedding_parameters(self) -> int:
        """Parameters of the input embedding, the learned positions and the embedding's norm."""
        norm = self.norm_parameters if self.has_embedding_norm else 0
        return (self.vocab_size + (self.max_positions or 0)) * self.hidden_size + norm

    @property
    def outer_parameters(self) -> int:
        """Parameters outside the layers: embedding, positions, last norm, and the head if it has its own."""
        head = 0 if self.tie_embeddings else self.vocab_size * self.hidden_size
        bias = self.vocab_size if self.head_bias else 0
        return self.embedding_parameters + self.norm_parameters + head + bias

    @property
    def dense_layer_parameters(self) -> int:
        weights = (*self.attention_matmuls(), *self._mlp(self.intermediate_size, 1, "mlp"))
        return self.vector_parameters + sum(matmul.num_parameters for matmul in weights)

    @property
    def mixture_layer_parameters(self) -> int:
        """Parameters of a layer with experts; 0 without."""
        if self.mixture is None:
            return 0
        experts = sum(matmul.num_parameters for matmul in self._mixture_matmuls()) // self.mixture.num_layers
        attention = sum(matmul.num_parameters for matmul in self.attention_matmuls())
        return self.vector_parameters + attention + experts + self.mixture.num_vectors

    @property
    def layer_parameters(self) -> int:
        """Parameters of the largest layer."""
        if not self.has_shape:
            return 0
        return max(self.dense_layer_parameters if self.num_dense_layers else 0, self.mixture_layer_parameters)

    @property
    def num_parameters(self) -> int:
        """All parameters; a tied embedding counts once."""
        if self.stated_parameters is not None:
            return self.stated_parameters
        mixtures = self.mixture.num_layers if self.mixture else 0
        layers = self.num_dense_layers * self.dense_layer_parameters + mixtures * self.mixture_layer_parameters
        return self.outer_parameters + layers

    @property
    def num_trained_parameters(self) -> int:
        """Parameters that have gradients and states: all, or those of the adapters."""
        if self.adapters is None:
            return self.num_parameters
        return sum(self.adapters.parameters_of(matmul) for matmul in self.matmuls)

    @property
    def trained_share(self) -> float:
        return 1.0 if self.adapters is None else self.num_trained_parameters / self.num_parameters

    @property
    def expert_parameters(self) -> int:
        """Parameters of the experts among which routers choose: what expert parallelism shares."""
        return sum(matmul.num_parameters for matmul in self._mixture_matmuls() if matmul.name.startswith("experts."))

    @property
    def num_active_parameters(self) -> int:
        """Parameters that a token meets: all but the experts that it does not visit.

        An embedding counts whole, as in most model cards; DeepSeek-V3's 36.6 billion leave the input embedding out.
        """
        if self.mixture is None:
            return self.num_parameters
        idle = 1 - self.mixture.experts_per_token / self.mixture.num_experts
        return self.num_parameters - round(self.expert_parameters * idle)

    def mean_keys(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Keys that a token attends to, on average over tokens and layers.

        Half the sequence if the mask is used; all of it in Megatron's convention, in which a kernel without mask is counted. A
        window ``w`` shortens the causal mean to ``w - w² / 2s``.
        """
        whole = sequence_length / 2 if is_causal else float(sequence_length)
        if self.window is None or self.window >= sequence_length:
            return whole
        near = self.window - self.window**2 / (2 * sequence_length) if is_causal else float(self.window)
        return self.window_share * near + (1 - self.window_share) * whole

    def attention_flops(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Operations of scores and values per token, forward and backward, in all layers.

        The half below the diagonal, which ``is_causal`` counts, is ``6 L h s``; the whole, as Megatron-LM counts, ``12 L h s``.
        Backward counts twice forward; what a kernel computes again is not counted.

        Source: Narayanan et al., arXiv 2104.04473, appendix; Dao, FlashAttention-2, arXiv 2307.08691, section 4.1 (causal half).

        Example:
            >>> Architecture("small", 2, 64, 4, 4, 16, 160, 100).attention_flops(128) == 6 * 2 * 64 * 128
            True
        """
        per_key = 2 * self.num_heads * (self.query_dim + self.value_dim)
        return 3 * self.num_layers * per_key * self.mean_keys(sequence_length, is_causal=is_causal)

    def flops_per_token(self, sequence_length: int, *, is_causal: bool = True) -> float:
        """Operations of a training step per token: ``6`` per multiplied parameter that a token meets, and the attention's.

        Recomputation is not counted: it is in HFU, not in MFU.
        """
        if self.stated_parameters is not None:
            return 6.0 * self.stated_parameters
        # A frozen weight has no gradient; the operations of adapters are left out, as is usual.
        passes = 3 if self.adapters is None else 2
        weights = passes * sum(matmul.flops_per_token for matmul in self.matmuls)
        return weights + self.attention_flops(sequence_length, is_causal=is_causal)


def of_size(num_parameters: float) -> Architecture:
    """A model of which only the number of parameters is known: enough for its state, not for activations or time.

    Example:
        >>> of_size(10e9).num_parameters
        10000000000
    """
    return Architecture(
        f"{num_parameters:.3g} parameters", 0, 0, 0, 0, 0, 0, 0, stated_parameters=round(num_parameters)
    )
