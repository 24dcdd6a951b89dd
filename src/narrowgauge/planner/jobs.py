"""Jobs: a model trained in one recipe and layout on one cluster, with the memory and the time that follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.efficiency import (
    MOST_RESTARTS,
    RESTARTS,
    Efficiency,
    efficiency_of,
    error_of,
)
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.memory import memory_terms
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.model_state import OPTIMIZER_STATES
from narrowgauge.planner.program import DEFAULT, Program, adapters_of
from narrowgauge.planner.roofline import bytes_per_number, bytes_seconds
from narrowgauge.planner.step_time import step_terms
from narrowgauge.planner.terms import Terms
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row

Ends = tuple[float, float]
"""The ends of an 80 % interval."""
SECONDS_PER_DAY = 86_400
_ROW = ("num_chips", "fits", "is_certain", "headroom_bytes", "resuming_bytes", "sequence_length", "tokens_per_step",
        "tokens_per_second", "rate_interval", "mfu", "limited_by")  # fmt: skip


@dataclass(frozen=True)
class Job:
    """Describe a training job. Its memory and time are those of its worst rank.

    Args:
        cluster: has at least as many chips as the layout has ranks.
        shares: efficiencies; None for the published ones.
        program: the training loop.
        optimizer: a rule of ``narrowgauge show rules`` but ``"sgd"``, for its states.
        faster: a much faster layout that may run out of memory; None if there is none.
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster
    sequence_length: int
    shares: Efficiency | None = None
    program: Program = DEFAULT
    optimizer: str = "adamw"
    faster: Job | None = None

    @property
    def chip(self) -> Chip:
        return self.cluster.chip

    @property
    def efficiency(self) -> Efficiency:
        return self.shares or efficiency_of(self.chip, self.software)

    @property
    def software(self) -> str:
        """Return the row of measured speed: the cluster's, or the program's."""
        return self.cluster.software or self.program.software

    @cached_property
    def bytes_per_param(self) -> float:
        """Return the bytes per parameter that trains of weight, gradient and the optimizer's states, for matrices."""
        return self.recipe.storage.keeping(OPTIMIZER_STATES[self.optimizer]).bytes_per_param

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

    @property
    def gathered(self) -> str:
        """Return the dtype in which FSDP's mixed precision gathers float32 shards; empty for autocast and 16-bit weights."""
        is_sharded = self.layout.zero >= 2 and self.layout.num_sharing > 1
        return (
            self.program.gathered if is_sharded and self.recipe.storage.visible == "float32" else ""
        )

    @cached_property
    def trained_parameters(self) -> int:
        """Count the parameters that train: all, or the adapters'."""
        adapters = sum(
            matmul.num_elements for matmul in adapters_of(self.architecture, self.program)
        )
        counts = self.architecture.counts
        return (
            adapters
            if self.program.lora
            else counts.trained
            if counts
            else self.architecture.num_parameters
        )

    def moved(self, num_bytes: float) -> float:
        """Return the seconds to read or write ``num_bytes`` of the chip's memory."""
        return bytes_seconds(num_bytes, self.chip, self.efficiency)

    # memory

    @cached_property
    def memory(self) -> Terms:
        """Return the bytes of the worst rank at its worst moment."""
        return memory_terms(self)

    @property
    def headroom_bytes(self) -> float:
        """Return the free bytes of the worst rank; negative if it does not fit."""
        return self.chip.memory_bytes - self.memory.total

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0

    @property
    def is_certain(self) -> bool:
        """Tell whether the whole memory interval lies on one side of the chip's capacity."""
        low, high = self.memory.interval
        return not low <= self.chip.memory_bytes < high

    @property
    def resuming_bytes(self) -> float:
        """Return the memory while a checkpoint loads into allocated states: they exist twice."""
        groups = self.memory.groups
        return (
            groups.get("weights", 0.0)
            + 2 * groups.get("optimizer", 0.0)
            + groups.get("overhead", 0.0)
        )

    # time

    @cached_property
    def step(self) -> Terms:
        """Return the seconds of an optimizer step. Raise for jobs that cannot run: see :func:`step_terms`."""
        return step_terms(self)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of the whole job."""
        return self.tokens_per_step / self.step.total

    @property
    def mfu(self) -> float:
        """Return the model's operations per second over the peak of dense 16-bit matmuls (model FLOPs utilization)."""
        operations = self.architecture.flops_per_token(self.sequence_length)
        if self.program.lora:  # frozen weights have no gradients
            operations -= sum(matmul.flops_per_token for matmul in self.architecture.matmuls)
            operations += sum(
                3 * matmul.flops_per_token
                for matmul in adapters_of(self.architecture, self.program)
            )
        return self.tokens_per_second * operations / (self.cluster.chips * self.chip.peak_flops)

    @property
    def limited_by(self) -> str:
        """Name the largest group: of memory if it does not fit, else of the step."""
        groups = self.step.groups if self.fits else self.memory.groups
        largest = max(groups, key=lambda group: groups[group])
        return largest if self.fits else f"memory: {largest}"

    def days(self, num_tokens: float) -> float:
        """Return the days of a whole run over ``num_tokens`` tokens: its steps, and the usual restarts."""
        return num_tokens / self.tokens_per_second / SECONDS_PER_DAY * (1 + RESTARTS)

    @property
    def _error(self) -> Ends:
        """Return the ends of measured over planned seconds."""
        return error_of(
            has_mixture=self.architecture.mixture is not None, has_software=bool(self.software)
        )[1:]

    @property
    def rate_interval(self) -> Ends:
        """Return the 80 % interval of the tokens per second."""
        low, high = self._error
        return self.tokens_per_second / high, self.tokens_per_second / low

    def days_interval(self, num_tokens: float) -> Ends:
        """Return the 80 % interval of the days: without restarts at its low end, with most at its high end."""
        steps, (low, high) = self.days(num_tokens) / (1 + RESTARTS), self._error
        return steps * low, steps * high * (1 + MOST_RESTARTS)

    def row(self, num_tokens: float | None = None) -> Row:
        """Return JSON values in bytes, seconds and fractions. ``num_tokens`` of the whole run add days."""
        row = {name: getattr(self, name) for name in _ROW}
        row |= {
            "recipe": self.recipe.title,
            "bytes_per_param": self.bytes_per_param,
            "cluster": self.cluster.name,
        }
        row |= {"layout": dataclasses.asdict(self.layout), "memory_interval": self.memory.interval}
        for name, terms in (("memory_bytes", self.memory), ("step_seconds", self.step)):
            row[name] = {**terms.groups, "total": terms.total}
        if num_tokens is not None:
            row |= {"days": self.days(num_tokens), "days_interval": self.days_interval(num_tokens)}
        return row
