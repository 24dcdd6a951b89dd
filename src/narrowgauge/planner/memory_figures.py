"""What the memory of a rank is computed from: bytes of a recipe's state and of its tensors, and the question's own numbers.

What one layer keeps comes from formulas (:mod:`narrowgauge.planner.activations`), or from a count in the model's own modules
where the caller has one: a :data:`LayerCounter` replaces the formula in every layout whose layers run as those modules do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from narrowgauge.planner.activations import (
    Attention,
    Kernels,
    Widths,
    bytes_per_token,
    cast_weight_bytes,
    layer_tensors,
    widths_of,
)
from narrowgauge.planner.architectures import Architecture
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.state_bytes import Bytes, ModelState, bytes_of, state_of
from narrowgauge.spec.recipes import Recipe

COUNTED = "counted in the model's own modules with fake tensors (narrowgauge plan --exact)"
"""The source of a term whose bytes were counted and do not follow from a formula."""
KORTHIKANTI = "Korthikanti et al., arXiv 2205.05198, section 4; as in layers that run (planner/activations.py)"
"""The source of what layers keep by formula."""


class LayerCount(NamedTuple):
    """What one layer keeps for backward, as it was counted.

    Args:
        bytes_per_token: of activations.
        bytes_per_layer: whatever the number of tokens: casts of the weights.
    """

    bytes_per_token: float
    bytes_per_layer: float


LayerCounter = Callable[[Recipe, int], LayerCount]
"""Counts a layer of the planned model, of a recipe and a sequence length."""


@dataclass(frozen=True, slots=True)
class Figures:
    """What does not depend on the layout.

    Args:
        state: of the whole model.
        per: bytes per parameter of the recipe's storage.
        widths: of tensors.
        per_layer, scores: bytes per token that a layer keeps, on average, and of eager attention's scores.
        stream: of ``per_layer``, what has the residual stream's width and is whole on tensor ranks that do not share it.
        casts: bytes of the casts of a layer's weights that autocast keeps.
        num_parameters: of the model.
        layer, experts: parameters of the largest layer without experts, and of a layer's experts.
        is_counted: whether ``per_layer`` and ``casts`` were counted.
    """

    state: ModelState
    per: Bytes
    widths: Widths
    num_parameters: int
    per_layer: float = 0.0
    stream: float = 0.0
    scores: float = 0.0
    casts: float = 0.0
    layer: int = 0
    experts: float = 0.0
    is_counted: bool = False

    def layer_on_rank(self, layout: Layout) -> float:
        """Parameters of the largest layer on one of the ranks that share it."""
        return self.layer / layout.tensor + self.experts / layout.expert / layout.expert_tensor_ranks


def kernels_of(layout: Layout) -> Kernels:
    """Hugging Face's modules where every rank computes whole layers, Megatron-LM's fused kernels elsewhere."""
    return "eager" if layout.is_whole else "fused"


def figures_of(
    architecture: Architecture,
    recipe: Recipe,
    sequence_length: int,
    attention: Attention,
    kernels: Kernels,
    counted: LayerCounter | None = None,
) -> Figures:
    """The figures of a model in a recipe; ``counted`` replaces the formula of eager kernels."""
    figures = _by_formula(architecture, recipe, sequence_length, attention, kernels)
    if counted is None or kernels != "eager" or not architecture.has_shape:
        return figures
    found = counted(recipe, sequence_length)
    # Counted are layers that a rank has whole: no part of them lies on tensor ranks.
    own = {"per_layer": found.bytes_per_token, "casts": found.bytes_per_layer, "scores": 0.0, "stream": 0.0}
    return replace(figures, **own, is_counted=True)  # type: ignore[arg-type]


@lru_cache(maxsize=1024)
def _by_formula(
    architecture: Architecture, recipe: Recipe, sequence_length: int, attention: Attention, kernels: Kernels
) -> Figures:
    a, widths = architecture, widths_of(recipe.compute, recipe.storage.visible)
    known = (state_of(a, recipe), _per_parameter(a, recipe), widths, a.num_parameters)
    if not a.has_shape:
        return Figures(*known)
    mixtures = a.mixture.num_layers if a.mixture else 0
    keys = a.mean_keys(sequence_length, is_causal=False)
    kept = stream = scores = 0.0
    for is_mixture, count in ((False, a.num_layers - mixtures), (True, mixtures)):
        if count:
            tensors = layer_tensors(a, recipe, is_mixture=is_mixture, attention=attention, kernels=kernels)
            kept += count * bytes_per_token(tensors) / a.num_layers
            stream += count * sum(tensor.bytes_per_token for tensor in tensors if tensor.is_stream) / a.num_layers
            scores += count * sum(tensor.per_key for tensor in tensors) * keys / a.num_layers
    elements = sum(m.count * m.in_features * m.out_features for m in a.matmuls if m.part != "head") / a.num_layers
    experts = a.expert_parameters / mixtures if mixtures else 0.0
    others = (a.dense_layer_parameters * (mixtures < a.num_layers), a.mixture_layer_parameters - round(experts))
    return Figures(*known, kept, stream, scores, cast_weight_bytes(a, recipe) * elements, max(others), experts)


def _per_parameter(architecture: Architecture, recipe: Recipe) -> Bytes:
    """Of the parameters of layers; of a frozen model the gradients and states of adapters, by its parameters."""
    stored = bytes_of(recipe.storage)
    if architecture.adapters is None:
        return stored
    share = architecture.trained_share
    return Bytes(
        architecture.adapters.base_bytes + share * stored.weights, share * stored.gradients, share * stored.optimizer
    )


@dataclass(frozen=True, slots=True)
class Request:
    """What is planned, with the arguments of :func:`memory_terms`."""

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    sequence_length: int
    attention: Attention
    kernels: Kernels
    is_loss_chunked: bool
    fixed: Mapping[str, float]
    figures: Figures

    @property
    def tokens(self) -> float:
        """Of a micro-batch on a rank."""
        return self.layout.micro_batch * self.sequence_length / self.layout.context

    @property
    def per_layer(self) -> float:
        """Bytes per token that a layer keeps on a rank."""
        scores = 0.0 if self.layout.recompute == "selective" else self.figures.scores
        layout, stream = self.layout, self.figures.stream
        return stream / layout.stream_ranks + (self.figures.per_layer - stream + scores) / layout.tensor

    @property
    def casts(self) -> float:
        """Bytes of the casts of one layer's weights on a rank."""
        return self.figures.casts / self.layout.tensor

    @property
    def layer_source(self) -> str:
        """Where ``per_layer`` is from."""
        return COUNTED if self.figures.is_counted else KORTHIKANTI
