"""An ask: a model trained in one recipe, layout and program on one machine.

Memory, time and every number of an answer are functions of an ask.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from itertools import chain
from typing import Any, NamedTuple

from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import Cluster
from narrowgauge.planner.program import DEFAULT, Program, Tuning
from narrowgauge.planner.shapes import Architecture, Weight
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.formats import bytes_per_number
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import VISIBLE, Storage, for_vectors
from narrowgauge.spec.toml import load_data
from narrowgauge.spec.update_rules import UPDATE_RULES

FITTED: dict[str, Any] = load_data("fitted", "planner")
"""The numbers that no data sheet has, each with its source in the file."""


@dataclass(frozen=True, eq=False)
class Shares:
    """Hold the fractions of a chip's printed rates that training reaches.

    Args:
        linear: of the dense 16-bit peak, by linear layers in a compiled loop, with all gaps.
        float8: speed of linear layers in 8 bits or fewer over 16 bits, casts included.
        experts: inner size of an expert whose matmuls reach half of the linear share.
        adapters: operations of frozen layers with adapters over their formula.
        attention: of the peak, by attention to 32,768 tokens of a sequence on a rank, and from
            131,072 on.
        bandwidth, link, network: of the memory's, a link's and a network's printed rate.
        hidden: part of the exchange of shards that computing hides.
    """

    linear: float
    float8: float
    experts: float
    adapters: float
    attention: tuple[float, float]
    bandwidth: float
    link: float
    network: float
    hidden: float


def shares_of(chip: Chip) -> Shares:
    """Return the shares of a chip: its architecture's linear share, and the rest in common."""
    linear = FITTED["linear"][""]
    for start, share in FITTED["linear"].items():
        if start and chip.architecture.startswith(start):
            linear = share
    return Shares(linear=linear, **FITTED["shares"])


class State(NamedTuple):
    """Hold the state of a part of a model before it is divided: bytes of frozen weights, of
    weights that train, of their gradients and of their optimizer states.

    ``whole`` is optimizer state that is never sharded.
    """

    frozen: float = 0.0
    weights: float = 0.0
    gradients: float = 0.0
    states: float = 0.0
    whole: float = 0.0

    def plus(self, other: State, factor: float = 1.0) -> State:
        """Return the sum with ``factor`` times another."""
        return State(*(a + factor * b for a, b in zip(self, other, strict=True)))


@dataclass(frozen=True)
class Ask:
    """Describe a training job. Its memory and time are those of its worst rank.

    Args:
        cluster: has at least as many chips as the layout has ranks.
        program: the training loop.
        tuning: what trains.
        optimizer: a rule of ``narrowgauge show rules``, for its states.
        shares: of the chip's rates; None for the fitted ones.
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster
    sequence_length: int
    program: Program = DEFAULT
    tuning: Tuning = field(default_factory=Tuning)
    optimizer: str = "adamw"
    shares: Shares | None = None

    @property
    def chip(self) -> Chip:
        return self.cluster.chip

    @property
    def kind(self) -> str:
        """Return the class of question, which decides the error bars."""
        return "dense" if self.architecture.mixture is None else "mixture"

    @cached_property
    def storage(self) -> Storage:
        """Return the recipe's storage with the optimizer's states."""
        return self.recipe.storage.keeping(UPDATE_RULES[self.optimizer].moments)

    @property
    def num_chips(self) -> int:
        return self.layout.num_ranks

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of an optimizer step, over all ranks."""
        return self.layout.num_sequences * self.sequence_length

    @property
    def tokens(self) -> float:
        """Count the tokens of a micro-batch on one rank."""
        return self.layout.tokens_on_rank(self.sequence_length)

    @property
    def stream_ranks(self) -> int:
        """Count the tensor ranks that share norms and residuals: all, but one before 2022, when
        attention was not fused either (Korthikanti et al., arXiv 2205.05198).
        """
        return 1 if self.program.attention == "eager" else self.layout.tensor

    @cached_property
    def gathered(self) -> str:
        """Return the dtype in which FSDP's mixed precision gathers float32 shards; empty for
        autocast and 16-bit weights.
        """
        is_sharded = self.layout.zero >= 2 and self.layout.num_sharing > 1
        if is_sharded and self.recipe.storage.visible == "float32":
            return self.program.gathered
        return ""

    @cached_property
    def stream_width(self) -> float:
        """Return the bytes of a number of the residual stream; float32 under autocast."""
        return bytes_per_number(self.gathered or self.recipe.storage.visible)

    @cached_property
    def matmul_width(self) -> float:
        """Return the bytes of a number that matmuls and attention read and write."""
        if self.gathered or self.recipe.storage.visible != "float32":
            return self.stream_width
        return bytes_per_number(self.recipe.compute.dtype)

    @cached_property
    def state(self) -> dict[str, State]:
        """Return the state of the model by place, before it is divided among ranks."""
        return state_of(self.architecture, self.recipe.storage, self.optimizer, self.tuning)

    @cached_property
    def trained_parameters(self) -> int:
        """Count the parameters that train, adapters included."""
        return trained_of(self.architecture, self.tuning)

    @cached_property
    def weight_bytes(self) -> float:
        """Return the mean bytes of an unsharded weight in the layers, as its matmul reads it."""
        visible = bytes_per_number(self.gathered or self.recipe.storage.visible)
        if not self.tuning.lora:
            return visible
        total = 0.0
        elements = 0
        for matmul in self.architecture.layer_matmuls:
            total += matmul.num_elements * (self.tuning.frozen_bytes(matmul) or visible)
            elements += matmul.num_elements
        return total / elements


@lru_cache(maxsize=64)
def trained_of(a: Architecture, tuning: Tuning) -> int:
    """Count the parameters of a model that train."""
    trained = sum(weight.num_elements for weight in tuning.adapters(a))
    for weight in chain.from_iterable(a.weights.values()):
        if not tuning.frozen_bytes(weight):
            trained += weight.num_parameters
    if a.tie_embeddings and "head" in tuning.train and "embeddings" not in tuning.train:
        trained += a.head.num_elements
    return trained


@lru_cache(maxsize=256)
def state_of(a: Architecture, storage: Storage, optimizer: str, tuning: Tuning) -> dict[str, State]:
    """Return the state of a model by place (:attr:`Architecture.weights`)."""
    places = dict.fromkeys(a.weights, State())
    for place, weights in a.weights.items():
        for weight in weights:
            frozen = tuning.frozen_bytes(weight)
            state = State(frozen=frozen * weight.num_parameters)
            if not frozen:
                state = _trained(storage, optimizer, weight)
            places[place] = places[place].plus(state)
    for weight in tuning.adapters(a):
        places["layers"] = places["layers"].plus(_trained(storage, optimizer, weight))
    return places


def _trained(storage: Storage, optimizer: str, weight: Weight) -> State:
    """Return the state of weights that train.

    A rule for matrices leaves vectors, embedding and head to AdamW.
    """
    if UPDATE_RULES[optimizer].is_matrix and weight.part in ("norms", "embeddings", "head"):
        optimizer = "adamw"
    if weight.part == "norms":
        storage = for_vectors(storage)
    row = storage.keeping(UPDATE_RULES[optimizer].moments)
    count = weight.num_parameters
    visible = VISIBLE[row.visible][0] / 8 * count
    states = row.bytes_per_param * count - 2 * visible
    states += row.bytes_per_row * weight.count * weight.out_features
    whole = weight.count * _subspace_bytes(storage, optimizer, weight)
    return State(0.0, visible, visible, states, whole)


def _subspace_bytes(storage: Storage, optimizer: str, weight: Weight) -> float:
    """Return the bytes of a matrix's basis and of the moments of its coordinates under a low-rank
    rule. Every rank holds all of them.

    Source: :mod:`narrowgauge.optim.rules.matrix`, ``rank · (shorter + 2 · longer side)`` values.
    """
    rank = UPDATE_RULES[optimizer].options.get("rank")
    if rank is None:
        return 0.0
    shorter, longer = sorted((weight.in_features, weight.out_features))
    rank = min(int(rank), shorter)
    first = storage.exp_avg.bits / 8
    second = storage.exp_avg_sq.bits / 8
    return rank * (shorter * first + longer * (first + second))
