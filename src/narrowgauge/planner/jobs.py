"""Jobs: a model trained in one recipe and layout on one cluster, with the memory and the time that follow."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.efficiency import RESTARTS, Efficiency, efficiency_of, error_of
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.memory import memory_terms
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.roofline import bytes_per_number, bytes_seconds
from narrowgauge.planner.step_time import step_terms
from narrowgauge.planner.terms import Terms
from narrowgauge.planner.units import bytes_text
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row

Attention = Literal["flash", "eager"]
Ends = tuple[float, float]
"""The ends of an 80 % interval."""
OURS = "narrowgauge"
""":attr:`Job.runs_with` of a layout that this project's trainer runs."""
_COMMON_STORAGES = ("float32", "master", "no-master", "naive")
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True)
class Job:
    """Describe a training job. Its memory and time are those of its worst rank.

    Args:
        architecture: if only its number of parameters is known, the job has a state, and no time.
        cluster: has at least as many chips as the layout has ranks; None for a state without a known chip.
        shares: efficiencies; None for the published ones.
        attention: ``"flash"`` for fused kernels that skip masked scores, ``"eager"`` for matmuls around a softmax.

    Example:
        >>> from narrowgauge.planner.clusters import cluster_of
        >>> from narrowgauge.planner.model import of_size
        >>> from narrowgauge.spec.notation import parse
        >>> job = Job(of_size(2.5 * 2**30), parse("bfloat16/word"), Layout(), cluster_of("RTX-4090", 1))
        >>> job.fits, job.headroom_bytes == 4 * 2**30
        (True, True)
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    cluster: Cluster | None = None
    sequence_length: int = 0
    shares: Efficiency | None = None
    attention: Attention = "flash"

    @property
    def hardware(self) -> Cluster:
        """Return the cluster, which a job with a time has."""
        assert self.cluster is not None
        return self.cluster

    @property
    def chip(self) -> Chip:
        return self.hardware.chip

    @property
    def efficiency(self) -> Efficiency:
        return self.shares or efficiency_of(self.chip, self.hardware.software)

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

    def moved(self, num_bytes: float) -> float:
        """Return the seconds to read or write ``num_bytes`` of the chip's memory."""
        return bytes_seconds(num_bytes, self.chip, self.efficiency)

    # memory

    @cached_property
    def memory(self) -> Terms:
        """Return the bytes of the worst rank at its worst moment."""
        return memory_terms(self.architecture, self.recipe, self.layout, self.sequence_length)

    @property
    def headroom_bytes(self) -> float | None:
        """Return the free bytes of the worst rank; negative if it does not fit, None without a chip."""
        return None if self.cluster is None else self.cluster.memory_bytes - self.memory.total

    @property
    def fits(self) -> bool | None:
        """Tell whether it fits; None without a chip."""
        return None if self.headroom_bytes is None else self.headroom_bytes >= 0

    @property
    def is_certain(self) -> bool | None:
        """Tell whether the whole memory interval lies on one side of the chip's capacity; None without a chip."""
        low, high = self.memory.interval
        return None if self.cluster is None else not low <= self.cluster.memory_bytes < high

    @property
    def resuming_bytes(self) -> float:
        """Return the memory while a checkpoint loads into allocated states: they exist twice."""
        groups = self.memory.groups
        return groups.get("weights", 0.0) + 2 * groups.get("optimizer", 0.0) + groups.get("overhead", 0.0)

    @property
    def why_not(self) -> str:
        """Say why it does not fit, in one clause; empty if it does."""
        if self.fits is not False:
            return ""
        largest = largest_group(self.memory)
        return (
            f"too large by {bytes_text(-(self.headroom_bytes or 0.0))}: {bytes_text(self.memory.total)} on a chip of "
            f"{bytes_text(self.hardware.memory_bytes)} ({largest} {bytes_text(self.memory.groups[largest])})"
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
        """Return the model's operations per second over the chips' peak (model FLOPs utilization)."""
        operations = self.tokens_per_second * self.architecture.flops_per_token(self.sequence_length)
        return operations / self.hardware.peak_flops_per_second

    @property
    def limited_by(self) -> str:
        """Name the largest group: of memory if it does not fit, else of the step."""
        return f"memory: {largest_group(self.memory)}" if self.fits is False else largest_group(self.step)

    def days(self, num_tokens: float) -> float:
        """Return the days for ``num_tokens`` tokens."""
        return num_tokens / self.tokens_per_second / _SECONDS_PER_DAY

    def cost(self, num_tokens: float) -> float | None:
        """Return the dollars for ``num_tokens`` tokens; None without a price."""
        price = self.hardware.dollars_per_hour
        return None if price is None else self.days(num_tokens) * 24 * self.hardware.chips * price

    @property
    def _error(self) -> Ends:
        """Return the ends of measured over planned seconds."""
        has_mixture, has_software = self.architecture.mixture is not None, bool(self.hardware.software)
        return error_of(has_mixture=has_mixture, has_software=has_software)

    @property
    def rate_interval(self) -> Ends:
        """Return the 80 % interval of the tokens per second."""
        low, high = self._error
        return self.tokens_per_second / high, self.tokens_per_second / low

    def days_interval(self, num_tokens: float) -> Ends:
        """Return the 80 % interval of the days. Its high end allows for restarts."""
        days, (low, high) = self.days(num_tokens), self._error
        return days * low, days * high * (1 + RESTARTS)

    @property
    def runs_with(self) -> str:
        """Name the software that runs it: this project's trainer, or libraries with more layouts."""
        if self.layout.is_fsdp:
            return OURS
        if self.recipe.storage.name in _COMMON_STORAGES:
            return "Megatron-LM or torchtitan"
        return f"torchtitan and ng.AdamW(storage={self.recipe.storage.name!r})"

    def row(self, num_tokens: float | None = None) -> Row:
        """Return JSON values in bytes, seconds and fractions. ``num_tokens`` of the whole run add days and cost."""
        row = {
            "recipe": self.recipe.title,
            "bytes_per_param": self.recipe.bytes_per_param,
            "cluster": "" if self.cluster is None else self.cluster.name,
            "chips": self.num_chips,
            "parallelism": dataclasses.asdict(self.layout),
            "fits": self.fits,
            "fits_is_certain": self.is_certain,
            "why_not": self.why_not,
            "memory_bytes": {**self.memory.groups, "total": self.memory.total},
            "memory_interval": self.memory.interval,
            "headroom_bytes": self.headroom_bytes,
            "resuming_bytes": self.resuming_bytes,
        }
        if not self.architecture.has_shape:
            return row
        return row | {
            "runs_with": self.runs_with,
            "sequence_length": self.sequence_length,
            "tokens_per_step": self.tokens_per_step,
            "step_seconds": {**self.step.groups, "total": self.step.total},
            "tokens_per_second": self.tokens_per_second,
            "tokens_per_second_interval": self.rate_interval,
            "mfu": self.mfu,
            "days": None if num_tokens is None else self.days(num_tokens),
            "days_interval": None if num_tokens is None else self.days_interval(num_tokens),
            "cost": None if num_tokens is None else self.cost(num_tokens),
            "dollars_per_token": self.cost(1.0),
            "limited_by": self.limited_by,
        }


def largest_group(terms: Terms) -> str:
    groups = terms.groups
    return max(groups, key=lambda group: groups[group])
