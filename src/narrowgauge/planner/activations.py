"""Activations: the tensors that decoder layers save for backward.

A published constant (34 bytes per token and feature: Korthikanti et al.) holds for one
implementation. Hugging Face's modules save half as much again as fused kernels. So a layer is a
list of saved tensors, each with its bytes per token. ``"eager"`` kernels run the Hugging Face
modules one operation after the other. Norms and activation functions of ``"compiled"`` layers and
``"fused"`` kernels (Megatron-LM, TransformerEngine, Liger) save only their input and recompute the
rest.

Source: Korthikanti et al., Reducing Activation Recomputation in Large Transformer Models, arXiv
2205.05198, section 4, for tensors saved by each operation. The eager columns are counts of
``torch.autograd.graph.saved_tensors_hooks`` (tests/planner/test_activations.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from narrowgauge.planner.program import DEFAULT, Program, adapters_of
from narrowgauge.planner.shapes import Architecture, LatentAttention, Layers, Mixture
from narrowgauge.spec.computes import Compute
from narrowgauge.spec.formats import bytes_per_number
from narrowgauge.spec.recipes import Recipe

EAGER_ACTIVATION_TENSORS = {"gelu_new": 4}
"""Tensors of the MLP's width that an activation function saves in eager mode, where it is several
operations.
"""
SCORE_BYTES = 5
"""Bytes of a score that unfused attention saves: the softmax, the dropout mask and its result
(Korthikanti et al.).
"""
_STATISTIC = 4  # bytes of a float32 per token: the scale of a norm or a row


class SavedTensor(NamedTuple):
    """Describe tensors of one kind that a layer saves for backward.

    Args:
        bytes_per_token: in one layer.
        is_stream: part of the residual stream. Tensor ranks shard it only with sequence
            parallelism.
        is_repeated: recomputed with norms, gates and up-projections (``selective = "modules"``).
    """

    name: str
    bytes_per_token: float
    is_stream: bool = False
    is_repeated: bool = False


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
        """Tell whether matmuls cast the stream (autocast).

        Each matmul saves its own cast of input and weight.
        """
        return self.stream != self.matmul


def widths_of(recipe: Recipe, gathered: str = "", program: Program = DEFAULT) -> Widths:
    """Return the widths of a recipe.

    FSDP's mixed precision casts ``gathered`` float32 weights, instead of autocast.

    Frozen embeddings in float32 make the stream float32.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> widths_of(parse("bfloat16/float32"))
        Widths(stream=4.0, matmul=2.0)
    """
    stream = bytes_per_number(gathered or recipe.storage.visible)
    if program.part("embeddings").dtype == "float32":
        return Widths(4.0, bytes_per_number(recipe.compute.dtype))
    if gathered or recipe.storage.visible != "float32":
        return Widths(stream, stream)
    return Widths(stream, bytes_per_number(recipe.compute.dtype))


class LayerBytes(NamedTuple):
    """Hold what a mean layer saves for backward.

    Args:
        per_token: bytes of all saved tensors per token.
        stream: the part of them in the residual stream.
        casts: bytes of autocast's weight casts. A low-precision compute saves none beyond its
            matmul.
    """

    per_token: float
    stream: float
    casts: float


@lru_cache(maxsize=256)
def layer_bytes(
    a: Architecture,
    recipe: Recipe,
    program: Program = DEFAULT,
    gathered: str = "",
    repeated: str = "",
    sequence_length: int = 0,
) -> LayerBytes:
    """Return the bytes that a mean layer saves.

    The recipe's main compute and storage set the width of each tensor. Overrides by layer do not
    count. ``repeated`` is what backward recomputes (``Program.selective``). ``sequence_length`` is
    for the scores of unfused attention.
    """
    widths = widths_of(recipe, gathered, program)
    per_token = stream = 0.0
    for kind in a.layers:
        share = kind.count / a.num_layers
        layer = _Layer(a, kind, recipe.compute, widths, program)
        for tensor in layer.tensors(repeated, sequence_length):
            if repeated != "modules" or not tensor.is_repeated:
                per_token += share * tensor.bytes_per_token
                if tensor.is_stream:
                    stream += share * tensor.bytes_per_token
    casts = 0.0
    if widths.is_cast and recipe.compute.is_wide and program.trains_all:
        for matmul in a.layer_matmuls:
            casts += widths.matmul * matmul.num_elements / a.num_layers
    return LayerBytes(per_token, stream, casts)


@dataclass(frozen=True, slots=True)
class _Layer:
    architecture: Architecture
    kind: Layers
    compute: Compute
    widths: Widths
    program: Program

    def tensors(self, repeated: str, sequence_length: int) -> Iterator[SavedTensor]:
        """Yield what a layer saves for backward under a kind of recomputation."""
        a = self.architecture
        kind = self.kind
        if repeated == "operations":
            yield from self.every_second_matmul()
            return
        norms = kind.norms * self.norm_bytes(a.hidden_size)
        yield SavedTensor("norms", norms, is_stream=True)
        if kind.has_attention:
            yield from self.attention()
            if self.program.attention == "eager" and not repeated:
                yield SavedTensor("scores", SCORE_BYTES * a.num_heads * sequence_length)
        else:
            mixer = self.widths.matmul * kind.mixer_width
            yield SavedTensor("inputs and outputs of another mixer's matmuls", mixer)
        if kind.inner_size:
            yield from self.mlp()
        if kind.mixture:
            yield from self.mixture(kind.mixture)

    def norm_bytes(self, size: int, groups: int = 1, stream: float | None = None) -> float:
        """Return the bytes that a norm saves per token, with ``groups`` statistics and ``stream``
        bytes per element.
        """
        stream = stream or self.widths.stream
        kind = self.architecture.norm
        if kind == "layer":
            # Mean and scale, in the input's dtype on a CPU.
            return stream * size + 2 * stream * groups
        if self.program.kernels != "eager":
            return stream * size + _STATISTIC * groups
        # The input as float32, its scale, and the normalized value before the gain.
        normalized = 4.0 if kind == "rms-float32" else stream
        return (4 + normalized) * size + _STATISTIC * groups

    def inputs(self, size: float, consumers: int = 1, *, is_saved_anyway: bool = False) -> float:
        """Return the bytes that matmuls save of one input per token.

        ``is_saved_anyway``: another operation saves the uncast input, in the matmuls' dtype.
        """
        # Under autocast every layer casts the input separately, so layers do not share codes.
        casts = consumers if self.widths.is_cast and not is_saved_anyway else 1
        if not self.compute.keeps_codes:
            return 0.0 if is_saved_anyway else self.widths.matmul * size * casts
        cast = self.compute.output.left
        bits = float(cast.element.storage_bits)
        if cast.block is not None:
            bits += cast.bits - cast.element.bits
        codes = size * bits / 8
        if cast.granularity == "row":
            codes += _STATISTIC
        return codes * casts

    def attention(self) -> Iterator[SavedTensor]:
        """Yield projection inputs, queries, keys, values and the attention's result."""
        a = self.architecture
        e = self.widths.matmul
        queries = a.num_heads * a.query_dim
        values = a.num_heads * a.value_dim
        if a.latent:
            yield from self._latent_tensors(a.latent)
            keys = queries
            saved_values = values
        else:
            matmuls = 3
            if a.has_fused_inputs:
                matmuls = 1
            inputs = self.inputs(a.hidden_size, matmuls)
            yield SavedTensor("input of the projections", inputs, True, True)
            keys = saved_values = a.num_kv_heads * a.value_dim
        if a.head_norms != "none":
            groups = 2
            if a.head_norms == "head":
                groups = a.num_heads + a.num_kv_heads
            yield SavedTensor(
                "norms of queries and keys", self.norm_bytes(queries + keys, groups, e)
            )
        # Values that are views of one result keep all of it, in addition to the rotated queries and
        # keys.
        saved = queries + keys + saved_values
        if a.has_fused_inputs and not a.positions:
            saved += queries + keys
        is_repeated = a.latent is not None
        yield SavedTensor("queries, keys and values", e * saved, is_repeated=is_repeated)
        yield SavedTensor("attention", e * values + _STATISTIC * a.num_heads)
        yield SavedTensor(
            "input of the output projection", self.inputs(values, is_saved_anyway=True)
        )
        ranks = 0
        for matmul in adapters_of(a, self.program):
            if matmul.name.endswith("lora_B"):
                ranks += matmul.in_features * matmul.count
        yield SavedTensor("inputs of the adapters' second matrices", e * ranks / a.num_layers)

    def _latent_tensors(self, latent: LatentAttention) -> Iterator[SavedTensor]:
        inputs = self.inputs(self.architecture.hidden_size, 2)
        yield SavedTensor("input of the projections", inputs, True, True)
        for rank in (latent.query_rank, latent.key_value_rank):
            if rank:
                norm = self.norm_bytes(rank, stream=self.widths.matmul)
                yield SavedTensor("norm of a latent", norm)
                yield SavedTensor("latent", self.inputs(rank), is_repeated=True)

    def inner(self, name: str, size: int, copies: int = 1) -> Iterator[SavedTensor]:
        """Yield gate and up, and their product, in an MLP or in the ``copies`` experts of a token."""
        a = self.architecture
        is_eager = self.program.kernels == "eager"
        tensors = 1
        if is_eager:
            tensors = EAGER_ACTIVATION_TENSORS.get(a.activation, 1)
        if a.is_gated:
            tensors += 2 if is_eager else 1
        yield SavedTensor(name, copies * tensors * self.widths.matmul * size)
        yield SavedTensor(f"product of the {name}", copies * self.inputs(size), is_repeated=True)

    def every_second_matmul(self) -> Iterator[SavedTensor]:
        """Yield what torchtitan saves with per-operation checkpointing: a layer's input, attention,
        and every second matmul.
        """
        a = self.architecture
        e = self.widths.matmul
        yield SavedTensor("input of the layer", self.widths.stream * a.hidden_size, is_stream=True)
        if self.kind.has_attention:
            attention_bytes = e * a.num_heads * a.value_dim + _STATISTIC * a.num_heads
            yield SavedTensor("attention", attention_bytes)
        size = 0
        for matmul in self.kind.matmuls[::2]:
            chosen = 1
            if matmul.is_expert and self.kind.mixture:
                chosen = self.kind.mixture.experts_per_token
            size += matmul.out_features * chosen
        yield SavedTensor("every second matmul", e * size)

    def mlp(self) -> Iterator[SavedTensor]:
        """Yield inputs and inner tensors of a dense MLP."""
        a = self.architecture
        gates = 1
        if a.is_gated and not a.has_fused_inputs:
            gates = 2
        yield SavedTensor("input of the MLP", self.inputs(a.hidden_size, gates), True, True)
        yield from self.inner("MLP", self.kind.inner_size)

    def mixture(self, mixture: Mixture) -> Iterator[SavedTensor]:
        """Yield the router, each token's copies for its experts, and their inner tensors."""
        a = self.architecture
        e = self.widths.matmul
        chosen = mixture.experts_per_token
        # The router's input, its float32 probabilities, and the chosen experts: their weights, and
        # three lists of indices.
        yield SavedTensor(
            "router",
            e * a.hidden_size + 4.0 * mixture.num_experts + 32.0 * chosen + _STATISTIC,
            is_stream=True,
        )
        yield SavedTensor(
            "inputs of the experts", chosen * self.inputs(a.hidden_size), is_stream=True
        )
        yield from self.inner("experts", mixture.expert_size, chosen)
        # Megatron-Core multiplies by the router's weight in the activation.
        if self.program.kernels != "fused":
            yield SavedTensor("results of the experts", chosen * e * a.hidden_size, True, True)
        if mixture.shared_size:
            yield from self.inner("shared experts", mixture.shared_size)
