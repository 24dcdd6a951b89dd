"""Options: one recipe in one layout on one cluster, with its whole plan.

An option holds the terms of its memory and of its step. Everything printed follows from them. So a table, a page and JSON
always agree.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.efficiency import RESTARTS, error_of
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.terms import Terms
from narrowgauge.planner.units import bytes_text
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row

MEMORY_GROUPS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
STEP_GROUPS = (
    "matmuls", "casts", "attention", "elementwise", "loss", "optimizer", "communication", "bubble", "waiting", "checkpoints",
    "faults",
)  # fmt: skip
OURS = "narrowgauge"
""":attr:`Option.runs_with` of a layout that this project's trainer runs."""
_COMMON_STORAGES = ("float32", "master", "no-master", "naive")
_SECONDS_PER_DAY = 86_400


@dataclass(frozen=True, slots=True)
class Option:
    """Describe one way to run a job.

    Args:
        memory: bytes of the worst rank, in groups of ``MEMORY_GROUPS``.
        cluster: None for a state without a known chip.
        step: seconds of an optimizer step, in groups of ``STEP_GROUPS``; None for the state alone.
        why_not: reason why it cannot run, other than memory; empty if it can.
        advice: the smallest change that makes it possible; empty if it fits.

    Example:
        >>> from narrowgauge.planner.clusters import cluster_of
        >>> from narrowgauge.planner.model import of_size
        >>> from narrowgauge.planner.terms import Term
        >>> from narrowgauge.spec.notation import parse
        >>> memory = Terms((Term("weights", "weights", 20 * 2**30, "10e9 × 2 B"),))
        >>> option = Option(of_size(10e9), parse("bfloat16/word"), Layout(), memory, cluster_of("RTX-4090", 1))
        >>> option.fits, option.headroom_bytes == 4 * 2**30
        (True, True)
    """

    architecture: Architecture
    recipe: Recipe
    layout: Layout
    memory: Terms
    cluster: Cluster | None = None
    step: Terms | None = None
    sequence_length: int = 0
    why_not: str = ""
    advice: str = ""

    @property
    def place(self) -> str:
        """Return the cluster's name; empty without one."""
        return "" if self.cluster is None else self.cluster.name

    @property
    def capacity_bytes(self) -> float | None:
        """Return the usable bytes of the smallest chip; None without a chip."""
        return None if self.cluster is None else self.cluster.memory_bytes

    @property
    def headroom_bytes(self) -> float | None:
        """Return the free bytes of the worst rank; negative if it does not fit, None without a chip."""
        return None if self.cluster is None else self.cluster.memory_bytes - self.memory.total

    @property
    def fits(self) -> bool | None:
        """Tell whether it can run; None without a chip."""
        if self.why_not:
            return False
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
    def reason(self) -> str:
        """Say why it cannot run, in one clause; empty if it can."""
        if self.fits is not False or self.why_not or self.headroom_bytes is None:
            return self.why_not
        largest = largest_group(self.memory)
        return (
            f"too large by {bytes_text(-self.headroom_bytes)}: {bytes_text(self.memory.total)} on a chip of "
            f"{bytes_text(self.capacity_bytes or 0.0)} ({largest} {bytes_text(self.memory.groups[largest])})"
        )

    @property
    def num_chips(self) -> int:
        return self.layout.num_ranks

    @property
    def tokens_per_step(self) -> int:
        """Count the tokens of an optimizer step, over all ranks."""
        return self.layout.num_sequences * self.sequence_length

    @property
    def tokens_per_second(self) -> float | None:
        """Return the tokens per second of the whole job."""
        return None if self.step is None else self.tokens_per_step / self.step.total

    @property
    def mfu(self) -> float | None:
        """Return the model's operations per second over the chips' peak (model FLOPs utilization)."""
        rate = self.tokens_per_second
        if rate is None or self.cluster is None:
            return None
        return rate * self.architecture.flops_per_token(self.sequence_length) / self.cluster.peak_flops_per_second

    def days(self, num_tokens: float | None) -> float | None:
        """Return the days for ``num_tokens`` tokens."""
        rate = self.tokens_per_second
        return None if rate is None or num_tokens is None else num_tokens / rate / _SECONDS_PER_DAY

    def cost(self, num_tokens: float | None) -> float | None:
        """Return the dollars for ``num_tokens`` tokens; None without a price."""
        days, price = self.days(num_tokens), None if self.cluster is None else self.cluster.dollars_per_hour
        return None if days is None or price is None else days * 24 * price

    @property
    def restarts(self) -> float:
        """Return the restart time at the high end of a run's days, as a fraction of its steps; 0 if it is a term."""
        return 0.0 if self.step is None or "faults" in self.step.groups else RESTARTS

    @property
    def limited_by(self) -> str:
        """Name the largest group: of memory if it does not fit, else of the step."""
        if self.why_not:
            return "layout"
        if self.fits is False or self.step is None:
            return f"memory: {largest_group(self.memory)}"
        return largest_group(self.step)

    @property
    def runs_with(self) -> str:
        """Name the software that runs it: this project's trainer, or libraries with more layouts."""
        if self.layout.runs_here:
            return OURS
        if self.recipe.storage.name in _COMMON_STORAGES:
            return "Megatron-LM or torchtitan"
        return f"torchtitan and ng.AdamW(storage={self.recipe.storage.name!r})"

    def confidence(self, num_tokens: float | None = None) -> dict[str, Any]:
        """Return the 80 % intervals ``[low, high]``, and whether it certainly fits. ``num_tokens`` of the run add days."""
        rate, days = self.tokens_per_second, self.days(num_tokens)
        has_software = self.cluster is not None and all(group.software for group in self.cluster.groups)
        low, high = error_of(has_mixture=self.architecture.mixture is not None, has_software=has_software)
        return {
            "share": 0.8,
            "memory_bytes": list(self.memory.interval),
            "tokens_per_second": None if rate is None else [rate / high, rate / low],
            "days": None if days is None else [days * low, days * high * (1 + self.restarts)],
            "restarts": self.restarts,
            "fits_is_certain": self.is_certain,
        }

    def row(self, num_tokens: float | None = None) -> Row:
        """Return JSON values in bytes, seconds and fractions. ``num_tokens`` of the whole run add days and cost."""
        parallelism = dataclasses.asdict(self.layout)
        del parallelism["sequence_parallel"]
        return {
            "recipe": self.recipe.title,
            "bytes_per_param": self.recipe.bytes_per_param,
            "cluster": self.place,
            "chips": self.num_chips,
            "parallelism": parallelism,
            "runs_with": self.runs_with,
            "fits": self.fits,
            "why_not": self.reason,
            "advice": self.advice,
            "memory_bytes": {**dict.fromkeys(MEMORY_GROUPS, 0.0), **self.memory.groups, "total": self.memory.total},
            "headroom_bytes": self.headroom_bytes,
            "resuming_bytes": self.resuming_bytes,
            "sequence_length": self.sequence_length,
            "tokens_per_step": self.tokens_per_step,
            "step_seconds": None if self.step is None else {**self.step.groups, "total": self.step.total},
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "days": self.days(num_tokens),
            "cost": self.cost(num_tokens),
            "dollars_per_token": self.cost(1.0),
            "limited_by": self.limited_by,
            "confidence": self.confidence(num_tokens),
        }


def largest_group(terms: Terms) -> str:
    groups = terms.groups
    return max(groups, key=lambda group: groups[group], default="nothing")


@dataclass(frozen=True, slots=True)
class Question:
    """Hold the question: the arguments of :func:`narrowgauge.planner.plan.plan`, with defaults filled in.

    ``model`` is the model's name in the question, ``fixed`` are fields of the layout. Without ``recipes``, the usual ones are
    compared. Without ``clusters``, only the state is planned.
    """

    architecture: Architecture
    model: str
    clusters: tuple[Cluster, ...] = ()
    sequence_length: int = 0
    num_tokens: float | None = None
    minimize: str = "days"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_step: int | None = None
    deadline_days: float | None = None
    budget: float | None = None
    largest: str = ""
    optimizer: str = "adamw"
    recipes: tuple[Recipe, ...] | Literal["all"] = ()

    @property
    def is_bounded(self) -> bool:
        """Tell whether there is a deadline or a budget."""
        return self.deadline_days is not None or self.budget is not None

    def meets(self, option: Option) -> bool:
        """Tell whether an option fits, and meets the deadline and the budget."""
        days, cost = option.days(self.num_tokens), option.cost(self.num_tokens)
        if not option.fits or days is None:
            return False
        is_in_time = self.deadline_days is None or days <= self.deadline_days
        return is_in_time and (self.budget is None or (cost is not None and cost <= self.budget))

    def row(self) -> Row:
        """Return plain values, for JSON."""
        a = self.architecture
        return {
            "model": self.model,
            "num_parameters": a.num_parameters,
            "num_active_parameters": a.num_active_parameters,
            "num_trained_parameters": a.num_trained_parameters,
            "clusters": [
                {"name": c.name, "chips": c.num_chips, "software": [group.software or "assumed" for group in c.groups]}
                for c in self.clusters
            ],
            "sequence_length": self.sequence_length or None,
            "tokens": self.num_tokens,
            "minimize": self.minimize,
            "layout": dict(self.fixed),
            "deadline_days": self.deadline_days,
            "budget": self.budget,
            "largest": self.largest or None,
            "optimizer": self.optimizer,
            "adapters": None if a.adapters is None else {"rank": a.adapters.rank, "base": a.adapters.base},
        }
