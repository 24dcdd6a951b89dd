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

from narrowgauge.planner.model import Architecture, Matmul
from narrowgauge.planner.program import DEFAULT, Program, adapters_of
from narrowgauge.planner.roofline import bytes_per_number
from narrowgauge.spec.computes import BLOCKS, Compute
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
    if gathered:
        return Widths(stream, stream)
    return Widths(
        stream,
        bytes_per_number(recipe.compute.dtype) if recipe.storage.visible == "float32" else stream,
    )


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
    layer = _Layer(a, recipe.compute, widths, program)
    per_token = stream = 0.0
    for mlp, count in (
        (layer.mlp, a.num_dense_layers),
        (layer.mixture, a.num_layers - a.num_dense_layers),
    ):
        tensors = [*layer.norms(), *layer.attention(), *mlp()] if count else []
        if repeated == "operations":
            tensors = (
                list(layer.every_second_matmul(is_mixture=mlp == layer.mixture)) if count else []
            )
        elif program.attention == "eager" and not repeated:
            tensors.append(SavedTensor("scores", SCORE_BYTES * a.num_heads * sequence_length))
        tensors = [
            tensor for tensor in tensors if not (repeated == "modules" and tensor.is_repeated)
        ]
        per_token += count / a.num_layers * sum(tensor.bytes_per_token for tensor in tensors)
        stream += (
            count
            / a.num_layers
            * sum(tensor.bytes_per_token for tensor in tensors if tensor.is_stream)
        )
    is_autocast = widths.is_cast and recipe.compute.is_wide and program.trains_all
    width = widths.matmul if is_autocast else 0.0
    return LayerBytes(
        per_token,
        stream,
        width * sum(matmul.num_elements for matmul in a.matmuls[:-1]) / a.num_layers,
    )


@dataclass(frozen=True, slots=True)
class _Layer:
    architecture: Architecture
    compute: Compute
    widths: Widths
    program: Program

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

    def norms(self) -> Iterator[SavedTensor]:
        a = self.architecture
        yield SavedTensor(
            "norms", a.norms_per_layer * self.norm_bytes(a.hidden_size), is_stream=True
        )

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
            codes = size * cast.element.storage_bits / 8 + (
                _STATISTIC if cast.granularity == "row" else 0
            )
        # Under autocast every layer casts the input separately, so layers do not share codes.
        return codes * (1 if is_saved_anyway else casts)

    def attention(self) -> Iterator[SavedTensor]:
        """Yield projection inputs, queries, keys, values and the attention's result."""
        a = self.architecture
        e = self.widths.matmul
        queries = a.num_heads * a.query_dim
        values = a.num_heads * a.value_dim
        if a.latent:
            yield from self._latent_tensors()
            keys = queries
            saved_values = values
        else:
            fused = 1 if a.has_fused_inputs else 3
            yield SavedTensor(
                "input of the projections", self.inputs(a.hidden_size, fused), True, True
            )
            keys = saved_values = a.num_kv_heads * a.value_dim
        if a.head_norms != "none":
            groups = a.num_heads + a.num_kv_heads if a.head_norms == "head" else 2
            yield SavedTensor(
                "norms of queries and keys", self.norm_bytes(queries + keys, groups, e)
            )
        # Values that are views of one result keep all of it, in addition to the rotated queries and
        # keys.
        rotated = queries + keys if a.has_fused_inputs and not a.positions else 0
        values_of_all = e * (queries + keys + saved_values + rotated)
        yield SavedTensor(
            "queries, keys and values", values_of_all, is_repeated=a.latent is not None
        )
        yield SavedTensor("attention", e * values + _STATISTIC * a.num_heads)
        yield SavedTensor(
            "input of the output projection", self.inputs(values, is_saved_anyway=True)
        )
        if self.program.lora:
            ranks = sum(m.count for m in adapters_of(a, self.program)) / 2
            yield SavedTensor(
                "inputs of the adapters' second matrices",
                e * self.program.lora * ranks / a.num_layers,
            )

    def _latent_tensors(self) -> Iterator[SavedTensor]:
        a = self.architecture
        latent = self.architecture.latent
        assert latent is not None
        yield SavedTensor("input of the projections", self.inputs(a.hidden_size, 2), True, True)
        ranks = [rank for rank in (latent.query_rank, latent.key_value_rank) if rank]
        yield SavedTensor(
            "norms of the latents",
            sum(self.norm_bytes(rank, stream=self.widths.matmul) for rank in ranks),
        )
        yield SavedTensor("latents", sum(self.inputs(rank) for rank in ranks), is_repeated=True)

    def inner(self, name: str, size: int, copies: int = 1) -> Iterator[SavedTensor]:
        """Yield gate and up, and their product, in an MLP or in the ``copies`` experts of a token."""
        a = self.architecture
        is_eager = self.program.kernels == "eager"
        tensors = EAGER_ACTIVATION_TENSORS.get(a.activation, 1) if is_eager else 1
        if a.is_gated:
            tensors += 2 if is_eager else 1
        yield SavedTensor(name, copies * tensors * self.widths.matmul * size)
        yield SavedTensor(f"product of the {name}", copies * self.inputs(size), is_repeated=True)

    def every_second_matmul(self, *, is_mixture: bool) -> Iterator[SavedTensor]:
        """Yield what torchtitan saves with per-operation checkpointing: a layer's input, attention,
        and every second matmul.
        """
        a = self.architecture
        e = self.widths.matmul

        def is_here(m: Matmul) -> bool:
            return (
                m.part == "attention"
                or (m.part == "experts" or m.name.startswith("shared.")) == is_mixture
            )

        matmuls = list(filter(is_here, a.matmuls[:-1]))
        yield SavedTensor("input of the layer", self.widths.stream * a.hidden_size, is_stream=True)
        yield SavedTensor("attention", e * a.num_heads * a.value_dim + _STATISTIC * a.num_heads)
        chosen = a.mixture.experts_per_token if a.mixture else 1
        sizes = [m.out_features * (chosen if m.is_expert else 1) for m in matmuls[::2]]
        yield SavedTensor("every second matmul", e * sum(sizes))

    def mlp(self) -> Iterator[SavedTensor]:
        """Yield inputs and inner tensors of a dense MLP."""
        a = self.architecture
        gates = 2 if a.is_gated and not a.has_fused_inputs else 1
        yield SavedTensor("input of the MLP", self.inputs(a.hidden_size, gates), True, True)
        yield from self.inner("MLP", a.intermediate_size)

    def mixture(self) -> Iterator[SavedTensor]:
        """Yield the router, each token's copies for its experts, and their inner tensors."""
        a = self.architecture
        mixture = self.architecture.mixture
        e = self.widths.matmul
        assert mixture is not None
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
        if (
            self.program.kernels != "fused"
        ):  # Megatron-Core multiplies by the router's weight in the activation
            yield SavedTensor("results of the experts", chosen * e * a.hidden_size, True, True)
        if mixture.shared_size:
            yield from self.inner("shared experts", mixture.shared_size)
