"""An ask: a model trained in one recipe, layout and program on one machine.

Memory, time and every number of an answer are functions of an ask.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import Cluster
from narrowgauge.planner.program import DEFAULT, EVERYTHING, Program, Tuning
from narrowgauge.planner.shapes import Architecture
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.formats import bytes_per_number
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import VISIBLE, Storage
from narrowgauge.spec.toml import load_data
from narrowgauge.spec.update_rules import UPDATE_RULES

_PLACES = ("first", "last", "layers", "experts")
State = defaultdict[tuple[str, str], float]
"""Numbers of the state of a model by place and kind."""
FITTED: dict[str, Any] = load_data("fitted", "planner")
"""The numbers that no data sheet has, each with its meaning and its source in the file."""


def shares_of(chip: Chip) -> dict[str, Any]:
    """Return the fractions of a chip's printed rates that training reaches."""
    starts = FITTED["linear"]
    architecture = next(start for start in starts if chip.architecture.startswith(start))
    return {"linear": starts[architecture], **FITTED["shares"]}


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
    tuning: Tuning = EVERYTHING
    optimizer: str = "adamw"
    shares: Mapping[str, Any] | None = None

    @property
    def chip(self) -> Chip:
        return self.cluster.chip

    @property
    def kind(self) -> str:
        """Return the class of question, which decides the error bars."""
        return "mixture" if self.architecture.num_experts else "dense"

    @cached_property
    def storage(self) -> Storage:
        """Return the recipe's storage with the optimizer's states."""
        return self.recipe.storage.keeping(UPDATE_RULES[self.optimizer].moments)

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of an optimizer step, over all ranks."""
        return self.layout.num_sequences * self.sequence_length

    @property
    def tokens(self) -> float:
        """Count the tokens of a micro-batch on one rank."""
        return self.layout.micro_batch * self.sequence_length / self.layout.context

    @property
    def stream_ranks(self) -> int:
        """Count the tensor ranks that share norms and residuals: all, but one before 2022
        (Korthikanti et al., arXiv 2205.05198).
        """
        return 1 if self.program.saves_scores else self.layout.tensor

    @cached_property
    def weight_dtype(self) -> str:
        """Return the dtype of an unsharded weight. FSDP's mixed precision gathers float32 shards in
        the program's; autocast keeps float32.
        """
        visible = self.recipe.storage.visible
        is_sharded = self.layout.zero >= 2 and self.layout.num_sharing > 1
        is_gathered = is_sharded and visible == "float32" and self.program.gathers_bfloat16
        return "bfloat16" if is_gathered else visible

    @property
    def stream_width(self) -> float:
        """Return the bytes of a number of the residual stream; float32 under autocast."""
        return bytes_per_number(self.weight_dtype)

    @property
    def matmul_width(self) -> float:
        """Return the bytes of a number that matmuls and attention read and write; autocast's."""
        return min(self.stream_width, bytes_per_number(self.recipe.dtype))

    @cached_property
    def state(self) -> State:
        """Return the state of the model by place and kind, before it is divided among ranks."""
        return state_of(self.architecture, self.recipe.storage, self.optimizer, self.tuning)

    @property
    def trained_parameters(self) -> int:
        """Count the parameters that train, adapters included."""
        return int(sum(self.state[place, "trained"] for place in _PLACES))

    @property
    def trained_share(self) -> float:
        return min(1.0, self.trained_parameters / self.architecture.num_parameters)

    @cached_property
    def weight_bytes(self) -> float:
        """Return the mean bytes of an unsharded weight in the layers, as its matmul reads it."""
        if not self.tuning.lora:
            return self.stream_width
        frozen = self.state["layers", "frozen"] + self.state["experts", "frozen"]
        return frozen / sum(matmul.num_parameters for matmul in self.architecture.layer_matmuls)

    def on_rank(self, kind: str, level: int = 4) -> float:
        """Return a kind of state on a rank, sharded from a ZeRO ``level`` on."""
        layout = self.layout
        first, last, layers, experts = (self.state[place, kind] for place in _PLACES)
        rest = max(first, last) if layout.pipeline > 1 else first + last
        rest = (rest + layers / layout.pipeline) / layout.tensor
        experts /= layout.pipeline * layout.ranks_of_experts
        if layout.zero < level:
            return rest + experts
        # Expert ranks lie inside the ranks that shard the rest of the state.
        sharing = max(1, layout.num_sharing * layout.tensor // layout.ranks_of_experts)
        return rest / layout.num_sharing + experts / sharing


@lru_cache(maxsize=256)
def state_of(a: Architecture, storage: Storage, optimizer: str, tuning: Tuning) -> State:
    """Return the state of a model by place (:attr:`Architecture.weights`) and kind: the number of
    trained parameters, the bytes of frozen ones and of optimizer states, and of states that every
    rank holds whole.

    A rule for matrices leaves vectors, embedding and head to AdamW.
    """
    state: State = defaultdict(float)
    trained = [("layers", adapter) for adapter in tuning.adapters(a)]
    for place, weights in a.weights.items():
        for weight in weights:
            frozen = tuning.frozen_bytes(weight)
            state[place, "frozen"] += frozen * weight.num_parameters
            if not frozen:
                trained.append((place, weight))
    for place, weight in trained:
        rule = UPDATE_RULES[optimizer]
        if rule.is_matrix and weight.part in ("norms", "embeddings", "head"):
            rule = UPDATE_RULES["adamw"]
        stored = storage.keeping(rule.moments)
        width = stored.bytes_per_param - VISIBLE[stored.visible][0] / 4
        state[place, "trained"] += weight.num_parameters
        state[place, "states"] += width * weight.num_parameters
        if "rank" in rule.options:  # a basis and the moments of coordinates
            shorter, longer = sorted((weight.in_features, weight.out_features))
            numbers = min(rule.options["rank"], shorter) * weight.count
            state[place, "whole"] += 4 * numbers * (shorter + 2 * longer)
    return state
