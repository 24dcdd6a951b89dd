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
from narrowgauge.spec.update_rules import UPDATE_RULES, refuse_pair


@dataclass(frozen=True, slots=True)
class Bytes:
    """Hold bytes of parameters: weights as the model sees them, gradients, and the remaining optimizer state.

    ``whole`` is optimizer state that is never sharded.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    whole: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(
            self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer,
            self.whole + other.whole,
        )  # fmt: skip

    def __mul__(self, factor: float) -> Bytes:
        return Bytes(self.weights * factor, self.gradients * factor, self.optimizer * factor, self.whole * factor)


OPTIMIZER_STATES = {name: row.moments for name, row in UPDATE_RULES.items() if row.moments is not None}
"""States of each optimizer per matrix element, with the storage's code for each state."""
_FACTOR_BYTES = 4  # per row and column of a matrix under Adafactor
RANKS = {row.name: option.default for row in UPDATE_RULES.values() for option in row.options if option.name == "rank"}
"""Default rank of the subspace, by low-rank rule."""


def is_stepped(storage: Storage, optimizer: str) -> bool:
    """Tell whether an optimizer supports a storage, see :func:`narrowgauge.spec.update_rules.refuse_pair`.

    Example:
        >>> from narrowgauge.spec.storages import STORAGES
        >>> is_stepped(STORAGES["kahan"], "muon"), is_stepped(STORAGES["collage-plus"], "muon")
        (True, False)
    """
    try:
        refuse_pair(optimizer, storage, is_matrix=UPDATE_RULES[optimizer].is_matrix, is_adamw=optimizer == "adamw")
    except RecipeError:
        return False
    return True


def with_optimizer(recipe: Recipe, optimizer: str) -> Recipe:
    """Replace AdamW's states in a recipe by another optimizer's, a key of ``OPTIMIZER_STATES``.

    Raises:
        RecipeError: the optimizer cannot be planned, or does not support the storage; or layers of the recipe differ.

    Example:
        >>> from narrowgauge.spec.notation import parse
        >>> {name: with_optimizer(parse("bfloat16/master"), name).bytes_per_param for name in OPTIMIZER_STATES}
        {'adamw': 16.0, 'adam': 16.0, 'lion': 12.0, 'muon': 12.0, 'adafactor': 8.0, 'galore': 8.0, 'gradnorm_lorp': 8.0}
    """
    if optimizer not in OPTIMIZER_STATES:
        raise RecipeError(
            f"the states of optimizer {optimizer!r} were requested.",
            suggestion(optimizer, OPTIMIZER_STATES) or f"Known: {', '.join(OPTIMIZER_STATES)}.",
        )
    if recipe.overrides:
        main = replace(recipe, overrides=())
        raise RecipeError(
            f"Cannot plan {recipe.title} because its layers differ.", f"Plan {main.name}, and add the rest."
        )
    refuse_pair(optimizer, recipe.storage, is_matrix=UPDATE_RULES[optimizer].is_matrix, is_adamw=optimizer == "adamw")
    storage = recipe.storage.keeping(OPTIMIZER_STATES[optimizer])
    return replace(recipe, storage=replace(storage, low_rank=optimizer) if optimizer in RANKS else storage)


@lru_cache(maxsize=256)
def bytes_per_parameter(storage: Storage) -> Bytes:
    """Return the bytes of one parameter, without scales by row.

    Example:
        >>> from narrowgauge.spec.storages import STORAGES
        >>> bytes_per_parameter(STORAGES["word"])
        Bytes(weights=2.0, gradients=2.0, optimizer=4.0, whole=0.0)
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
    """Return the state of a model on each of ``tensor`` ranks. ``expert_tensor`` ranks shard an expert's matrices."""
    storage = outer = recipe.storage
    # AdamW steps embedding, head and vectors if a matrix rule of moments steps the layers.
    if storage.low_rank or storage.states == OPTIMIZER_STATES["muon"]:
        outer = replace(storage.keeping(OPTIMIZER_STATES["adamw"]), low_rank="")
    vectors = bytes_per_parameter(for_vectors(outer if storage.low_rank else storage))
    layers, experts = vectors * a.vectors, Bytes()
    for matmul in a.matmuls[:-1]:
        if matmul.is_expert:
            experts += _matrix_state(storage, matmul, vectors, expert_tensor)
        else:
            layers += _matrix_state(storage, matmul, vectors, tensor)
    embedding = Matmul("embed_tokens", a.hidden_size, a.vocab_size, 1, "head", "column")
    first = _matrix_state(outer, embedding, vectors, tensor)
    first += bytes_per_parameter(outer) * (a.positions * a.hidden_size)
    last = vectors * a.outer_vectors
    if not a.tie_embeddings:
        last += _matrix_state(outer, a.matmuls[-1], vectors, tensor)
    return ModelState(layers, experts, first, last)


def _matrix_state(storage: Storage, matmul: Matmul, vectors: Bytes, ranks: int) -> Bytes:
    """Return the state of a matmul's weights and biases. ``ranks`` shard the weights if the matmul is split."""
    rows = Bytes(optimizer=storage.bytes_per_row * matmul.count * matmul.out_features)
    subspace = Bytes(whole=matmul.count * _subspace_bytes(storage, matmul)) if storage.low_rank else Bytes()
    if not storage.states and not storage.low_rank:
        rows += Bytes(optimizer=_FACTOR_BYTES * matmul.count * (matmul.in_features + matmul.out_features))
    sharded = bytes_per_parameter(storage) * matmul.num_elements + rows
    biases = vectors * (matmul.count * matmul.out_features * matmul.has_bias)
    return sharded * (1 if matmul.split == "none" else 1 / ranks) + subspace + biases


def _subspace_bytes(storage: Storage, matmul: Matmul) -> int:
    """Return the bytes of a matrix's basis and of the moments of its coordinates. Every rank holds all of them.

    Source: :mod:`narrowgauge.optim.rules.matrix`, ``rank · (shorter + 2 · longer side)`` values.
    """
    shorter, longer = sorted((matmul.in_features, matmul.out_features))
    first, second = (width_of([(code.name, code.bits)]) // 8 for code in (storage.exp_avg, storage.exp_avg_sq))
    lengths = 8 * matmul.in_features if storage.low_rank == "gradnorm_lorp" else 0
    rank = min(int(RANKS[storage.low_rank]), shorter)
    return rank * (shorter * first + longer * (first + second)) + lengths


def on_stage(
    architecture: Architecture, recipe: Recipe, layout: Layout, layers: float, stage: int
) -> tuple[Bytes, Bytes]:
    """Return a stage's state on a rank before ZeRO: experts, and the rest.

    The first stage has the embedding, the last the head.
    """
    state = state_of(architecture, recipe, layout.tensor, layout.expert_tensor_ranks)
    share = layers / architecture.num_layers
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
    return Bytes(state.weights * shares[0], state.gradients * shares[1], state.optimizer * shares[2] + state.whole)
