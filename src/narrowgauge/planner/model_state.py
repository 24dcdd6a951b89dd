"""State: bytes of weights, gradients and optimizer states that a rank holds between steps.

The storage's fields (:mod:`narrowgauge.spec.storages`) give the bytes per parameter. We multiply them by a rank's number of
parameters of each kind.

Source: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5: stage 1 shards optimizer states, 2 gradients, 3 weights.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import Architecture, Matmul
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import VISIBLE, Storage, for_vectors, width_of
from narrowgauge.spec.update_rules import UPDATE_RULES, refuse_matrix_rule


@dataclass(frozen=True, slots=True)
class Bytes:
    """Hold bytes of parameters: weights as the model sees them, gradients, and the remaining optimizer state."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer)

    def __mul__(self, factor: float) -> Bytes:
        return Bytes(self.weights * factor, self.gradients * factor, self.optimizer * factor)


OPTIMIZER_STATES = {name: row.moments for name, row in UPDATE_RULES.items() if row.moments is not None}
"""States of each optimizer per matrix element, with the storage's code for each state."""
_FACTOR_BYTES = 4  # per row and column of a matrix under Adafactor


def is_stepped(storage: Storage, optimizer: str) -> bool:
    """Tell whether an optimizer supports a storage. Muon and Adafactor need float32 arithmetic.

    Example:
        >>> from narrowgauge.spec.storages import STORAGES
        >>> is_stepped(STORAGES["kahan"], "muon"), is_stepped(STORAGES["collage-plus"], "muon")
        (True, False)
    """
    return not UPDATE_RULES[optimizer].is_matrix or storage.arithmetic == "float32"


def with_optimizer(recipe: Recipe, optimizer: str) -> Recipe:
    """Replace AdamW's states in a recipe by another optimizer's, a key of ``OPTIMIZER_STATES``.

    Raises:
        RecipeError: the optimizer cannot be planned, or does not support a storage of the recipe.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> {name: with_optimizer(parse("bfloat16/master"), name).bytes_per_param for name in OPTIMIZER_STATES}
        {'adamw': 16.0, 'adam': 16.0, 'lion': 12.0, 'muon': 12.0, 'adafactor': 8.0}
    """
    if optimizer not in OPTIMIZER_STATES:
        raise RecipeError(
            f"the states of optimizer {optimizer!r} were requested.",
            suggestion(optimizer, OPTIMIZER_STATES) or f"Known: {', '.join(OPTIMIZER_STATES)}.",
        )
    if not is_stepped(recipe.storage, optimizer):
        refuse_matrix_rule(optimizer, recipe.storage)
    return replace(recipe, storage=recipe.storage.keeping(OPTIMIZER_STATES[optimizer]))


@lru_cache(maxsize=256)
def bytes_per_parameter(storage: Storage) -> Bytes:
    """Return the bytes of one parameter, without scales by row.

    Example:
        >>> from narrowgauge.spec.storages import STORAGES
        >>> bytes_per_parameter(STORAGES["master"]), bytes_per_parameter(STORAGES["word"])
        (Bytes(weights=2.0, gradients=2.0, optimizer=12.0), Bytes(weights=2.0, gradients=2.0, optimizer=4.0))
    """
    visible = VISIBLE[storage.visible][0] / 8
    return Bytes(visible, visible, sum(width_of(group) for group in storage.packing) / 8)


@dataclass(frozen=True, slots=True)
class ModelState:
    """Hold a model's state by stage: embedding and learned positions on the first, head and last norm on the last.

    A tied head is on both stages if they differ. ``layers`` exclude experts.
    """

    layers: Bytes
    experts: Bytes = Bytes()
    embedding: Bytes = Bytes()
    head: Bytes = Bytes()


@lru_cache(maxsize=256)
def state_of(a: Architecture, recipe: Recipe, tensor: int = 1, expert_tensor: int = 1) -> ModelState:
    """Return the state of a model on each of ``tensor`` ranks. ``expert_tensor`` ranks shard an expert's matrices.

    A model of unknown shape is one matrix.
    """
    per = bytes_per_parameter(recipe.storage)
    if not a.has_shape:
        return ModelState(per * (a.num_parameters / tensor))
    vector = bytes_per_parameter(for_vectors(recipe.storage))
    layers, experts = vector * a.vectors, Bytes()
    for matmul in a.matmuls[:-1]:
        ranks = expert_tensor if matmul.is_expert else tensor
        part = _matrix_state(recipe.storage, matmul, matmul.count, ranks)
        experts, layers = (experts + part, layers) if matmul.is_expert else (experts, layers + part)
    outer = _outer_storage(recipe.storage)
    embedding = Matmul("embed_tokens", a.hidden_size, a.vocab_size, 1, "head", "column")
    first = _matrix_state(outer, embedding, 1, tensor)
    first += bytes_per_parameter(outer) * (a.positions * a.hidden_size)
    last = vector * a.outer_vectors
    if not a.tie_embeddings:
        last += _matrix_state(outer, a.matmuls[-1], 1, tensor)
    return ModelState(layers, experts, first, last)


def _outer_storage(storage: Storage) -> Storage:
    """Return the storage of embedding and head. AdamW steps them if Muon steps the layers."""
    return storage.keeping(OPTIMIZER_STATES["adamw"]) if storage.states == OPTIMIZER_STATES["muon"] else storage


def _matrix_state(storage: Storage, matmul: Matmul, count: float, ranks: int) -> Bytes:
    """Return the state of ``count`` weights of a matmul and their biases. ``ranks`` shard them if the matmul is split."""
    elements = count * matmul.in_features * matmul.out_features
    rows = Bytes(optimizer=storage.bytes_per_row * count * matmul.out_features)
    if not storage.states:
        rows += Bytes(optimizer=_FACTOR_BYTES * count * (matmul.in_features + matmul.out_features))
    biases = bytes_per_parameter(for_vectors(storage)) * (count * matmul.out_features * matmul.has_bias)
    return (bytes_per_parameter(storage) * elements + rows) * (1 if matmul.split == "none" else 1 / ranks) + biases


def on_stage(
    architecture: Architecture, recipe: Recipe, layout: Layout, layers: float, stage: int
) -> tuple[Bytes, Bytes]:
    """Return a stage's state on a rank before ZeRO: experts, and the rest.

    The first stage has the embedding, the last the head.
    """
    state = state_of(architecture, recipe, layout.tensor, layout.expert_tensor_ranks)
    share = layers / architecture.num_layers if architecture.has_shape else 1 / layout.pipeline
    rest = state.layers * share
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    if is_first or (is_last and architecture.tie_embeddings):
        rest += state.embedding
    if is_last:
        rest += state.head
    return state.experts * (share / layout.expert), rest


def shared(state: Bytes, layout: Layout, ranks: int) -> Bytes:
    """Return the state on one of ``ranks`` under the layout's ZeRO stage."""
    shares = [1 / ranks if layout.zero >= stage else 1.0 for stage in (3, 2, 1)]
    return Bytes(state.weights * shares[0], state.gradients * shares[1], state.optimizer * shares[2])
