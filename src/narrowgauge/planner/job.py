"""A training job: a model trained in one recipe, layout and program on one machine.

Memory, time and every number of an answer are functions of a job.
"""

from dataclasses import dataclass
from functools import cached_property, lru_cache

from narrowgauge.planner.cluster import Cluster
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.program import DEFAULT, EVERYTHING, Program, Tuning
from narrowgauge.planner.shapes import Architecture, parameters_of
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.formats import bytes_per_number
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import VISIBLE, Storage
from narrowgauge.spec.toml import load_data
from narrowgauge.spec.update_rules import UPDATE_RULES

FITTED = load_data("fitted", "planner")
"""The numbers that no data sheet has, each with its meaning and its source in the file."""
FOREIGN_RULES = load_data("rules", "planner")
"""Bytes of state a parameter of rules that this project does not step."""


Parts = dict[str, float]
"""Numbers of a model's state by place (:attr:`Architecture.weights`)."""


@dataclass(frozen=True)
class Job:
    """Describe a training job. Its memory and time are those of its worst rank.

    Args:
        cluster: has at least as many chips as the layout has ranks.
        program: the training loop.
        tuning: what trains.
        optimizer: a rule of ``narrowgauge show rules`` or ``FOREIGN_RULES``, for its states.
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster
    sequence_length: int
    program: Program = DEFAULT
    tuning: Tuning = EVERYTHING
    optimizer: str = "adamw"

    @property
    def chip(self) -> Chip:
        return self.cluster.chip

    @property
    def kind(self) -> str:
        """Return the class of question, which decides the error bars."""
        if self.tuning.lora:
            return "adapters"
        return "mixture" if self.architecture.num_experts else "dense"

    @property
    def bytes_per_param(self) -> float:
        """Return the bytes of a trained parameter with its gradient and states."""
        storage = self.recipe.storage
        return VISIBLE[storage.visible][0] / 4 + _state_width(storage, self.optimizer)

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of an optimizer step, over all ranks."""
        return self.layout.num_sequences * self.sequence_length

    @property
    def tokens(self) -> float:
        """Count the tokens of a micro-batch on one rank."""
        return self.layout.micro_batch * self.sequence_length / self.layout.context

    @cached_property
    def weight_dtype(self) -> str:
        """Return the dtype of an unsharded weight. FSDP2's mixed precision gathers float32 shards in
        16 bits; autocast keeps float32.
        """
        visible = self.recipe.storage.visible
        is_sharded = self.layout.zero >= 2 and self.layout.num_sharing > 1
        return "bfloat16" if is_sharded and visible == "float32" else visible

    @cached_property
    def stream_width(self) -> float:
        """Return the bytes of a number of the residual stream; float32 under autocast."""
        return bytes_per_number(self.weight_dtype)

    @cached_property
    def matmul_width(self) -> float:
        """Return the bytes of a number that matmuls and attention read and write; autocast's."""
        return min(self.stream_width, bytes_per_number(self.recipe.dtype))

    @cached_property
    def state(self) -> dict[str, Parts]:
        """Return the state of the model by kind and place, before it is divided among ranks."""
        return state_of(self.architecture, self.recipe.storage, self.optimizer, self.tuning)

    @property
    def trained_parameters(self) -> int:
        """Count the parameters that train, adapters included."""
        return int(sum(self.state["trained"].values()))

    @cached_property
    def trained_share(self) -> float:
        return min(1.0, self.trained_parameters / self.architecture.num_parameters)

    @cached_property
    def weight_bytes(self) -> float:
        """Return the mean bytes of an unsharded weight in the layers, as its matmul reads it."""
        if not self.tuning.lora:
            return self.stream_width
        frozen = self.state["frozen"]
        number = parameters_of(self.architecture.layer_matmuls)
        return (frozen["layers"] + frozen["experts"]) / number

    def on_rank(self, kind: str, level: int = 4) -> float:
        """Return a kind of state on a rank, sharded from a ZeRO ``level`` on."""
        layout = self.layout
        state = self.state[kind]
        ends = state["first"], state["last"]
        rest = max(ends) if layout.pipeline > 1 else sum(ends)
        rest = (rest + state["layers"] / layout.pipeline) / layout.tensor
        experts = state["experts"] / layout.pipeline / layout.ranks_of_experts
        if layout.zero < level:
            return rest + experts
        # Expert ranks lie inside the ranks that shard the rest of the state. They hold frozen
        # experts whole.
        sharing = max(1, layout.num_sharing * layout.tensor // layout.ranks_of_experts)
        if kind == "frozen" and layout.expert > 1:
            sharing = 1
        return rest / layout.num_sharing + experts / sharing


def _state_width(storage: Storage, optimizer: str) -> float:
    """Return the bytes of a parameter beside its weight and its gradient."""
    rule = UPDATE_RULES.get(optimizer)
    stored = storage.with_states(rule.moments.items() if rule else ())
    width = stored.bytes_per_param - VISIBLE[stored.visible][0] / 4
    return width + FOREIGN_RULES.get(optimizer, 0.0)


@lru_cache(maxsize=256)
def state_of(a: Architecture, storage: Storage, optimizer: str, tuning: Tuning) -> dict[str, Parts]:
    """Return the state of a model by kind and place: the number of trained parameters, the bytes of
    frozen ones and of optimizer states, and of states that every rank holds whole.

    A rule for matrices leaves vectors, embedding and head to AdamW.
    """
    state = {}
    for kind in ("trained", "frozen", "states", "whole"):
        state[kind] = dict.fromkeys(a.weights, 0.0)
    trained = [("layers", adapter) for adapter in tuning.adapters(a)]
    for place, weights in a.weights.items():
        for weight in weights:
            frozen = tuning.frozen_bytes(weight)
            state["frozen"][place] += frozen * weight.num_parameters
            if not tuning.lora:
                trained.append((place, weight))
    widths = {name: _state_width(storage, name) for name in (optimizer, "adamw")}
    for place, weight in trained:
        name = optimizer
        rule = UPDATE_RULES.get(optimizer)
        if rule and rule.is_matrix and weight.part in ("norms", "embeddings", "head"):
            name = "adamw"
        state["trained"][place] += weight.num_parameters
        state["states"][place] += widths[name] * weight.num_parameters
        if rule and name == optimizer and "rank" in rule.options:
            # A basis, and the moments of coordinates.
            shorter, longer = sorted((weight.in_features, weight.out_features))
            numbers = min(rule.options["rank"], shorter) * weight.count
            state["whole"][place] += 4 * numbers * (shorter + 2 * longer)
    return state
