"""State: bytes of weights, gradients and optimizer states that a rank holds between steps.

The storage's fields (:mod:`narrowgauge.spec.storages`) give the bytes per parameter. We multiply
them by a rank's number of parameters of each kind.

Source: Rajbhandari et al., ZeRO, arXiv 1910.02054, section 5: stage 1 shards optimizer states, 2
gradients, 3 weights.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from narrowgauge.planner.ask import OPTIMIZER_STATES, Ask
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.program import DEFAULT, Part, Program, adapters_of
from narrowgauge.planner.shapes import Architecture, Weight
from narrowgauge.spec.storages import VISIBLE, Code, Storage, for_vectors, width_of
from narrowgauge.spec.update_rules import UPDATE_RULES


class Bytes(NamedTuple):
    """Hold bytes of parameters: weights as the model sees them, gradients, and the remaining
    optimizer state.

    ``unsharded`` is optimizer state that is never sharded.
    """

    weights: float = 0.0
    gradients: float = 0.0
    optimizer: float = 0.0
    unsharded: float = 0.0

    def plus(self, addend: Bytes, factor: float = 1.0) -> Bytes:
        """Return the sum with ``factor`` times ``addend``."""
        return Bytes(
            self.weights + factor * addend.weights,
            self.gradients + factor * addend.gradients,
            self.optimizer + factor * addend.optimizer,
            self.unsharded + factor * addend.unsharded,
        )

    def times(self, factor: float) -> Bytes:
        """Return ``factor`` times these bytes."""
        return Bytes().plus(self, factor)


RANKS = {
    rule.name: int(option.default)
    for rule in UPDATE_RULES.values()
    for option in rule.options
    if option.name == "rank"
}
"""Default rank of the subspace, by low-rank rule."""


@lru_cache(maxsize=256)
def bytes_per_parameter(storage: Storage) -> Bytes:
    """Return the bytes of one parameter, without scales by row.

    Example:
        >>> from narrowgauge.spec.storages import STORAGES
        >>> bytes_per_parameter(STORAGES["word"])
        Bytes(weights=2.0, gradients=2.0, optimizer=4.0, unsharded=0.0)
    """
    visible = VISIBLE[storage.visible][0] / 8
    return Bytes(visible, visible, sum(map(width_of, storage.packing)) / 8)


class ModelState(NamedTuple):
    """Hold a model's state by place (:attr:`Architecture.weights`). A tied head is on the first and
    the last stage if they differ. ``reference`` is a frozen copy of the model.
    """

    layers: Bytes
    experts: Bytes
    first: Bytes
    last: Bytes
    reference: Bytes


@lru_cache(maxsize=256)
def state_of(
    a: Architecture, storage: Storage, optimizer: str = "adamw", tensor: int = 1, expert_tensor: int = 1,
    program: Program = DEFAULT,
) -> ModelState:  # fmt: skip
    """Return the state of a model on each of ``tensor`` ranks.

    ``expert_tensor`` ranks shard an expert's matrices. The program's table of parts says what is
    frozen, and in which format.
    """
    places = {}
    for place, weights in a.weights.items():
        ranks = expert_tensor if place == "experts" else tensor
        places[place] = Bytes()
        for weight in weights:
            part = program.part_of(weight)
            places[place] = places[place].plus(_state(storage, optimizer, weight, ranks, part))
            if weight.has_bias:
                biases = Weight("biases", weight.count * weight.out_features, 1, 1, "norms")
                of_biases = _state(storage, optimizer, biases, 1, program.part_of(biases))
                places[place] = places[place].plus(of_biases)
    for matmul in adapters_of(a, program):
        added = _state(storage, optimizer, matmul, tensor, Part())
        places["layers"] = places["layers"].plus(added)
    copy = Bytes()
    if program.reference is not None:
        copy = Bytes(program.reference.bytes * a.num_parameters / tensor)
    return ModelState(**places, reference=copy)


def _state(storage: Storage, optimizer: str, weight: Weight, ranks: int, part: Part) -> Bytes:
    """Return the state of weights without biases; ``ranks`` shard those that are split.

    A rule for matrices leaves vectors, embedding and head to AdamW.
    """
    vector_parts = {"norms", "embeddings", "head"}
    if UPDATE_RULES[optimizer].is_matrix and weight.part in vector_parts:
        optimizer = "adamw"
    if weight.part == "norms":
        storage = for_vectors(storage)
    share = 1.0 if weight.split == "none" else 1 / ranks
    if not part.trains:
        return Bytes(part.bytes * weight.num_elements * share)
    row = storage.keeping(OPTIMIZER_STATES[optimizer])
    beside = row.bytes_per_row * weight.count * weight.out_features
    state = bytes_per_parameter(row).times(weight.num_elements).plus(Bytes(optimizer=beside))
    unsharded = 0.0
    if optimizer in RANKS:
        unsharded = float(weight.count * _subspace_bytes(storage, optimizer, weight))
    return state.times(share).plus(Bytes(unsharded=unsharded))


def _subspace_bytes(storage: Storage, optimizer: str, matmul: Weight) -> int:
    """Return the bytes of a matrix's basis and of the moments of its coordinates.

    Every rank holds all of them.

    Source: :mod:`narrowgauge.optim.rules.matrix`, ``rank · (shorter + 2 · longer side)`` values,
    and scales of their rows.
    """
    shorter, longer = sorted((matmul.in_features, matmul.out_features))
    first = _code_bytes(storage.exp_avg)
    second = _code_bytes(storage.exp_avg_sq)
    scale = 4 * storage.exp_avg.scaled
    scales = scale + 4 * storage.exp_avg_sq.scaled
    rank = min(RANKS[optimizer], shorter)
    num_rows = longer
    if matmul.out_features < matmul.in_features:
        num_rows = rank
    total = rank * (shorter * first + longer * (first + second))
    total += shorter * scale + num_rows * scales
    if optimizer == "gradnorm_lorp":
        total += 8 * matmul.in_features  # lengths
    return total


def _code_bytes(code: Code) -> int:
    return width_of(((code.name, code.bits),)) // 8


def state_of_ask(ask: Ask) -> ModelState:
    """Return the state of an ask's model on one of its tensor ranks."""
    layout = ask.layout
    ranks = layout.tensor, layout.expert_tensor_ranks
    return state_of(ask.architecture, ask.recipe.storage, ask.optimizer, *ranks, ask.program)


def on_stage(ask: Ask, layers: float, stage: int) -> tuple[Bytes, Bytes]:
    """Return a stage's state on a rank before ZeRO: experts, and the rest.

    The first stage has the embedding, the last the head.
    """
    state = state_of_ask(ask)
    share = layers / ask.architecture.num_layers
    rest = state.layers.plus(state.reference).times(share)
    is_last = stage == ask.layout.pipeline - 1
    if stage == 0 or (is_last and ask.architecture.tie_embeddings):
        rest = rest.plus(state.first)
    if is_last:
        rest = rest.plus(state.last)
    return state.experts.times(share / ask.layout.expert), rest


def shared(state: Bytes, layout: Layout, ranks: int) -> Bytes:
    """Return the state on one of ``ranks`` under the layout's ZeRO stage."""
    return Bytes(
        state.weights / (ranks if layout.zero >= 3 else 1),
        state.gradients / (ranks if layout.zero >= 2 else 1),
        state.optimizer / (ranks if layout.zero >= 1 else 1) + state.unsharded,
    )
