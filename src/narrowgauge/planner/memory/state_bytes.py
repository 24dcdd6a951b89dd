"""State: bytes of weights, gradients and optimizer states that a rank holds between steps.

What a parameter takes follows from the storage's own fields (:mod:`narrowgauge.spec.storages`); here it is multiplied by how many
parameters of each kind a rank has.

Source: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5: stage 1 shares optimizer states, 2 gradients too, 3 weights too.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.planner.inputs.architectures import Adapters, Architecture, Matmul
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import VISIBLE, Storage, for_vectors, width_of
from narrowgauge.spec.update_rules import UPDATE_RULES, refuse_matrix_rule


@dataclass(frozen=True, slots=True)
class Bytes:
    """Bytes of some parameters: weights as the model sees them, gradients, and the rest of the optimizer's state."""

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0

    def __add__(self, other: Bytes) -> Bytes:
        return Bytes(self.weights + other.weights, self.gradients + other.gradients, self.optimizer + other.optimizer)

    def scaled(self, factor: float) -> Bytes:
        """Of ``factor`` times as many parameters."""
        return Bytes(self.weights * factor, self.gradients * factor, self.optimizer * factor)

    @property
    def total(self) -> float:
        return self.weights + self.gradients + self.optimizer


OPTIMIZER_STATES = {name: row.moments for name, row in UPDATE_RULES.items() if row.moments is not None}
"""The states that optimizers keep of each element of a matrix, with the storage's code for each."""
_FACTOR_BYTES = 4  # of each row and column of a matrix that Adafactor steps


def is_stepped(storage: Storage, optimizer: str) -> bool:
    """Whether an optimizer steps parameters in a storage: Muon and Adafactor only in float32 arithmetic.

    Example:
        >>> from narrowgauge.spec.storages import STORAGES
        >>> is_stepped(STORAGES["kahan"], "muon"), is_stepped(STORAGES["collage-plus"], "muon")
        (True, False)
    """
    return not UPDATE_RULES[optimizer].is_matrix or storage.arithmetic == "float32"


def with_optimizer(recipe: Recipe, optimizer: str) -> Recipe:
    """AdamW's recipe with the states of another optimizer, a key of ``OPTIMIZER_STATES``.

    Raises:
        RecipeError: no such optimizer is planned, or it does not step a storage of the recipe.

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
    for storage in recipe.storages:
        if not is_stepped(storage, optimizer):
            refuse_matrix_rule(optimizer, storage)
    states = OPTIMIZER_STATES[optimizer]
    overrides = tuple(
        override if override.storage is None else replace(override, storage=override.storage.keeping(states))
        for override in recipe.overrides
    )
    return replace(recipe, storage=recipe.storage.keeping(states), overrides=overrides)


@lru_cache(maxsize=256)
def bytes_per_parameter(storage: Storage) -> Bytes:
    """Bytes per parameter, without scales by row.

    Example:
        >>> from narrowgauge.spec.storages import STORAGES
        >>> bytes_per_parameter(STORAGES["master"]), bytes_per_parameter(STORAGES["word"])
        (Bytes(weights=2.0, gradients=2.0, optimizer=12.0), Bytes(weights=2.0, gradients=2.0, optimizer=4.0))
    """
    visible = VISIBLE[storage.visible][0] / 8
    return Bytes(visible, visible, sum(width_of(group) for group in storage.packing) / 8)


@dataclass(frozen=True, slots=True)
class StatePart:
    """State of one part of a model: of matrices that tensor parallelism shards, and of what every rank holds whole."""

    matrices: Bytes = Bytes()
    whole: Bytes = Bytes()

    def on_rank(self, tensor: int) -> Bytes:
        """What each of ``tensor`` ranks holds."""
        return self.matrices.scaled(1 / tensor) + self.whole

    def __add__(self, other: StatePart) -> StatePart:
        return StatePart(self.matrices + other.matrices, self.whole + other.whole)

    def scaled(self, factor: float) -> StatePart:
        return StatePart(self.matrices.scaled(factor), self.whole.scaled(factor))


@dataclass(frozen=True, slots=True)
class ModelState:
    """State of a model by where it lies: embedding and learned positions on the first stage, last norm and head on the last.

    A tied head lies on both if they are two. ``layers`` are without experts.
    """

    layers: StatePart
    experts: StatePart
    embedding: StatePart
    head: StatePart


@lru_cache(maxsize=256)
def state_of(architecture: Architecture, recipe: Recipe) -> ModelState:
    """The state of a whole model; a model of which only the size is known is one matrix."""
    if not architecture.has_shape:
        sizes = bytes_per_parameter(recipe.storage).scaled(architecture.num_parameters)
        return ModelState(StatePart(sizes), StatePart(), StatePart(), StatePart())
    if architecture.adapters is not None:
        return _frozen(architecture, recipe, architecture.adapters)
    layers, experts = StatePart(), StatePart()
    for name, storage, matmul, count in _named(architecture, recipe):
        part = _matrix(storage, matmul, count)
        if name.startswith("experts."):
            experts += part
        else:
            layers += part
    layers += _vectors(architecture, recipe)
    table = _outer_storage(recipe, "model.embed_tokens.weight")
    embedding = Matmul("embed_tokens", architecture.hidden_size, architecture.vocab_size, 1, "head", "column")
    head = _outer_storage(recipe, "lm_head.weight")
    norm = StatePart(
        whole=bytes_per_parameter(recipe.storage_of("model.norm.weight", 1)).scaled(architecture.norm_parameters)
    )
    positions = StatePart(
        whole=bytes_per_parameter(table).scaled((architecture.max_positions or 0) * architecture.hidden_size)
    )
    first = _matrix(table, embedding, 1) + positions
    last = norm if architecture.tie_embeddings else norm + _matrix(head, embedding, 1)
    if architecture.head_bias:
        last += StatePart(bytes_per_parameter(for_vectors(head)).scaled(architecture.vocab_size))
    return ModelState(layers, experts, first + norm if architecture.has_embedding_norm else first, last)


def _outer_storage(recipe: Recipe, name: str) -> Storage:
    """The storage of embedding or head, which are AdamW's where Muon steps the layers."""
    found = recipe.storage_of(name, 2)
    return found.keeping(OPTIMIZER_STATES["adamw"]) if found.states == OPTIMIZER_STATES["muon"] else found


def _frozen(architecture: Architecture, recipe: Recipe, adapters: Adapters) -> ModelState:
    """The state of a frozen model and its adapters, which alone have gradients and states."""
    visible, trained = Bytes(bytes_per_parameter(recipe.storage).weights), bytes_per_parameter(recipe.storage)
    layers, experts = (
        StatePart(whole=visible.scaled(architecture.vector_parameters * architecture.num_layers)),
        StatePart(),
    )
    for matmul in architecture.matmuls:
        if matmul.part == "head":
            continue
        elements = matmul.count * matmul.in_features * matmul.out_features
        kept = Bytes(adapters.base_bytes if matmul.name != "router" else visible.weights).scaled(elements)
        kept += visible.scaled(matmul.num_parameters - elements) + trained.scaled(adapters.parameters_of(matmul))
        part = StatePart(whole=kept) if matmul.split == "none" else StatePart(kept)
        if matmul.name.startswith("experts."):
            experts += part
        else:
            layers += part
    table = architecture.hidden_size * architecture.vocab_size
    positions = architecture.embedding_parameters - table
    head = architecture.outer_parameters - architecture.embedding_parameters
    return ModelState(
        layers, experts, StatePart(visible.scaled(table), visible.scaled(positions)), StatePart(visible.scaled(head))
    )


def _named(architecture: Architecture, recipe: Recipe) -> Iterator[tuple[str, Storage, Matmul, float]]:
    """Each layer matmul's name and storage, and how many weights have it; by layer where a recipe names exceptions."""
    for matmul in architecture.matmuls:
        if matmul.part == "head":
            continue
        module = "self_attn" if matmul.part == "attention" else "mlp"
        if not (recipe.keep or recipe.overrides):
            yield matmul.name, recipe.storage, matmul, matmul.count
            continue
        for layer in range(architecture.num_layers):
            storage = recipe.storage_of(f"model.layers.{layer}.{module}.{matmul.name}.weight", 2)
            yield matmul.name, storage, matmul, matmul.count / architecture.num_layers


def _vectors(architecture: Architecture, recipe: Recipe) -> StatePart:
    """Norms of all layers, and the other vectors."""
    numbers = range(architecture.num_layers) if recipe.keep or recipe.overrides else (0,)
    names = (f"model.layers.{layer}.input_layernorm.weight" for layer in numbers)
    mixture = architecture.mixture
    routers = mixture.num_layers * mixture.num_vectors if mixture else 0
    count = (architecture.vector_parameters * architecture.num_layers + routers) / len(numbers)
    return sum(
        (StatePart(whole=bytes_per_parameter(recipe.storage_of(name, 1)).scaled(count)) for name in names), StatePart()
    )


def _matrix(storage: Storage, matmul: Matmul, count: float) -> StatePart:
    elements = count * matmul.in_features * matmul.out_features
    rows = Bytes(optimizer=storage.bytes_per_row * count * matmul.out_features)
    if not storage.states:
        rows += Bytes(optimizer=_FACTOR_BYTES * count * (matmul.in_features + matmul.out_features))
    matrices = bytes_per_parameter(storage).scaled(elements) + rows
    biases = bytes_per_parameter(for_vectors(storage)).scaled(count * matmul.out_features * matmul.has_bias)
    return StatePart(whole=matrices + biases) if matmul.split == "none" else StatePart(matrices, biases)


def on_stage(
    architecture: Architecture, state: ModelState, layout: Layout, layers: float, stage: int
) -> tuple[Bytes, Bytes]:
    """A stage's state before ZeRO shares it: experts, and the rest; the first stage has the embedding, the last the head."""
    share = layers / architecture.num_layers if architecture.has_shape else 1 / layout.pipeline
    rest = state.layers.scaled(share)
    is_first, is_last = stage == 0, stage == layout.pipeline - 1
    if is_first or (is_last and architecture.tie_embeddings):
        rest += state.embedding
    if is_last:
        rest += state.head
    return state.experts.scaled(share / layout.expert).on_rank(layout.expert_tensor_ranks), rest.on_rank(layout.tensor)


def shared(state: Bytes, layout: Layout, ranks: int) -> Bytes:
    """What one of ``ranks`` keeps of a state under the layout's ZeRO stage."""
    shares = [1 / ranks if layout.zero >= stage else 1.0 for stage in (3, 2, 1)]
    return Bytes(state.weights * shares[0], state.gradients * shares[1], state.optimizer * shares[2])
