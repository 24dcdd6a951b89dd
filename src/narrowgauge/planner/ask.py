"""An ask: a model trained in one recipe, layout and program on one machine.

Memory, time and every number of an answer are functions of an ask.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from itertools import chain

from narrowgauge.planner.activations import Widths, widths_of
from narrowgauge.planner.efficiency import Efficiency, efficiency_of
from narrowgauge.planner.errors import LONG
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import Cluster
from narrowgauge.planner.program import DEFAULT, Program, adapters_of
from narrowgauge.planner.shapes import Architecture
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.formats import bytes_per_number
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.update_rules import UPDATE_RULES

OPTIMIZER_STATES = {
    name: row.moments for name, row in UPDATE_RULES.items() if row.moments is not None
}
"""States of each optimizer per matrix element, with the storage's code for each state."""


@dataclass(frozen=True)
class Ask:
    """Describe a training job. Its memory and time are those of its worst rank.

    Args:
        cluster: has at least as many chips as the layout has ranks.
        shares: efficiencies; None for the published ones.
        program: the training loop.
        optimizer: a rule of ``narrowgauge show rules`` but ``"sgd"``, for its states.
        correction: planned over measured rate of a run like this one; 1 without one.
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster
    sequence_length: int
    shares: Efficiency | None = None
    program: Program = DEFAULT
    optimizer: str = "adamw"
    correction: float = 1.0

    @property
    def chip(self) -> Chip:
        return self.cluster.chip

    @property
    def efficiency(self) -> Efficiency:
        return self.shares or efficiency_of(self.chip, self.program)

    @property
    def kind(self) -> str:
        """Return the class of question, which decides the error bars.

        No published run checks the counted step of a module.
        """
        if self.architecture.counts:
            return "module"
        if self.program.has_adapters:
            return "adapters"
        if self.architecture.mixture is not None:
            return "mixture"
        return "long" if self.sequence_length >= LONG else "dense"

    @cached_property
    def storage(self) -> Storage:
        """Return the recipe's storage with the optimizer's states."""
        return self.recipe.storage.keeping(OPTIMIZER_STATES[self.optimizer])

    @cached_property
    def bytes_per_param(self) -> float:
        """Return the bytes per parameter that trains of weight, gradient and the optimizer's
        states, for matrices.
        """
        return self.storage.bytes_per_param

    @cached_property
    def widths(self) -> Widths:
        """Return the bytes per element of the model's tensors."""
        return widths_of(self.recipe, self.gathered, self.program)

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
    def width(self) -> float:
        """Return the bytes of a number between layers."""
        return bytes_per_number(self.recipe.dtype)

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
    def trained_parameters(self) -> int:
        """Count the parameters that train, adapters included."""
        a = self.architecture
        program = self.program
        if a.counts:
            return a.counts.trained
        trained = sum(matmul.num_elements for matmul in adapters_of(a, program))
        for weight in chain.from_iterable(a.weights.values()):
            if program.part_of(weight).trains:
                trained += weight.num_parameters
        is_tied_only = a.tie_embeddings and not program.part("embeddings").trains
        if is_tied_only and program.part("head").trains:
            trained += a.head.num_elements
        return trained

    @cached_property
    def weight_bytes(self) -> float:
        """Return the mean bytes of an unsharded weight in the layers, as its matmul reads it."""
        visible = bytes_per_number(self.gathered or self.recipe.storage.visible)
        if self.program.trains_all or self.architecture.counts:
            return visible
        total = 0.0
        elements = 0
        for matmul in self.architecture.layer_matmuls:
            part = self.program.part_of(matmul)
            total += matmul.num_elements * (part.bytes or visible)
            elements += matmul.num_elements
        return total / elements
