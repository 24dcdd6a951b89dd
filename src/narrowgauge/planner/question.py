"""Questions and options: what is asked, and one recipe in one layout on one cluster with all that a plan says about it.

An option holds the terms of its memory and of its step. Everything else that is printed follows from them, so that a table, a
page and JSON cannot disagree.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.planner.formatting import bytes_text
from narrowgauge.planner.inputs.architectures import Architecture
from narrowgauge.planner.inputs.clusters import Cluster
from narrowgauge.planner.inputs.efficiency import RESTARTS, Shares, software_of
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.memory.activations import COUNTED, LayerCounter
from narrowgauge.planner.terms import Terms
from narrowgauge.runs.finding import Finding
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.tables import Row

MEMORY_GROUPS = ("weights", "gradients", "optimizer", "activations", "logits", "buffers", "overhead")
STEP_GROUPS = (
    "matmuls", "casts", "attention", "elementwise", "loss", "optimizer", "communication", "bubble", "waiting", "data",
    "checkpoints", "faults",
)  # fmt: skip
PARALLELISM = (
    "data", "shard", "zero", "tensor", "pipeline", "interleave", "context", "expert", "micro_batch", "micro_batches",
    "recompute", "offload", "sequence_parallel", "expert_tensor", "accumulation_dtype",
    "keeps_gradients",
)  # fmt: skip
OURS = "narrowgauge"
""":attr:`Option.runs_with` of a layout that this project's trainer runs."""
_JOULES_PER_KILOWATT_HOUR = 3.6e6
_COMMON_STORAGES = ("float32", "master", "no-master", "naive")
_SECONDS_PER_DAY = 86_400
NODE_POWER = (1.38, 1.0, 1.5)
"""A node's power in training over the printed power of its chips, ``(usual, least, most)``: processors, memory, network and fans
come on top, and chips draw less than printed. Nodes of eight H100 drew 76 % of their 10.2 kW in demanding training (7.75 kW for
5.6 kW of chips; Newkirk et al., arXiv 2506.14551), and 8.4 kW at most (Latif et al., arXiv 2412.08602). Cooling of the building
is left out."""
NODE_POWER_SOURCE = "arXiv 2506.14551, 2412.08602: nodes of 8 H100 in training; without the building's cooling"


@dataclass(frozen=True, slots=True)
class Option:
    """One way to run a job.

    Args:
        memory: bytes of the worst rank, in groups of ``MEMORY_GROUPS``.
        capacity_bytes: what the job may use on the smallest chip; None if no chip is known.
        step: seconds of an optimizer step, in groups of ``STEP_GROUPS``; None if it is not known.
        flops_per_token: of forward and backward, without recomputation.
        peak_flops_per_second: of all chips together, for dense bfloat16 matmuls; what MFU is a share of.
        dollars_per_hour, watts: of all chips together, the power as printed; None if unknown.
        cluster: its name.
        why_not: why it cannot run, if memory is not the reason; empty if it can.
        advice: the smallest change that would make it possible; empty if it fits.

    Example:
        >>> from narrowgauge.planner.terms import Term
        >>> from narrowgauge.spec.notation import parse
        >>> memory = Terms((Term("weights", "weights", 20e9, "10e9 × 2 B"),))
        >>> option = Option(parse("bfloat16/word"), Layout(), memory, capacity_bytes=24e9)
        >>> option.fits, option.headroom_bytes
        (True, 4000000000.0)
    """

    recipe: Recipe
    layout: Layout
    memory: Terms
    capacity_bytes: float | None = None
    step: Terms | None = None
    sequence_length: int = 0
    flops_per_token: float = 0.0
    peak_flops_per_second: float = 0.0
    dollars_per_hour: float | None = None
    cluster: str = ""
    why_not: str = ""
    advice: str = ""
    watts: float | None = None

    @property
    def headroom_bytes(self) -> float | None:
        """What the worst rank leaves free; negative if it does not fit, None without a chip."""
        return None if self.capacity_bytes is None else self.capacity_bytes - self.memory.total

    @property
    def fits(self) -> bool | None:
        """Whether it can run; None without a chip."""
        if self.why_not or self.headroom_bytes is None:
            return False if self.why_not else None
        return self.headroom_bytes >= 0

    @property
    def is_counted(self) -> bool:
        """Whether activations were counted in the model's own modules, not computed by a formula."""
        return any(term.source == COUNTED for term in self.memory)

    @property
    def is_certain(self) -> bool | None:
        """Whether the whole interval of its memory lies on one side of what the chip has; None without a chip."""
        if self.capacity_bytes is None:
            return None
        low, high = self.memory.interval
        return not low <= self.capacity_bytes < high

    @property
    def reason(self) -> str:
        """Why it cannot run, in one clause; empty if it can."""
        if self.fits is not False or self.why_not:
            return self.why_not
        assert self.capacity_bytes is not None
        largest = _largest(self.memory)
        return (
            f"needs {bytes_text(self.memory.total)} on a chip of {bytes_text(self.capacity_bytes)} "
            f"({largest} {bytes_text(self.memory.groups[largest])})"
        )

    @property
    def finding(self) -> Finding | None:
        """Why it cannot run, and the smallest change that would make it possible; ``None`` if it can, or without a chip."""
        if self.fits is not False:
            return None
        used, capacity = self.memory.total, self.capacity_bytes
        return Finding(
            "does-not-fit", self.reason, self.advice, severity="error", value=used, threshold=capacity, unit="bytes"
        )

    @property
    def num_chips(self) -> int:
        return self.layout.num_ranks

    @property
    def tokens_per_step(self) -> int:
        """Tokens of an optimizer step, over all ranks."""
        return self.layout.num_sequences * self.sequence_length

    @property
    def tokens_per_second(self) -> float | None:
        """Tokens per second of the whole job."""
        return None if self.step is None else self.tokens_per_step / self.step.total

    @property
    def mfu(self) -> float | None:
        """The model's operations per second as a share of the chips' peak (model FLOPs utilization)."""
        rate = self.tokens_per_second
        return (
            None
            if rate is None or not self.peak_flops_per_second
            else rate * self.flops_per_token / self.peak_flops_per_second
        )

    def days(self, num_tokens: float) -> float | None:
        """Days for that many tokens."""
        rate = self.tokens_per_second
        return None if rate is None else num_tokens / rate / _SECONDS_PER_DAY

    @property
    def restarts(self) -> float:
        """Time for restarts in the high end of a run's days, as a share of its steps; 0 where failures are among the terms."""
        return 0.0 if self.step is None or "faults" in self.step.groups else RESTARTS

    def cost(self, num_tokens: float) -> float | None:
        """Dollars for that many tokens; None without a price."""
        days = self.days(num_tokens)
        return None if days is None or self.dollars_per_hour is None else days * 24 * self.dollars_per_hour

    @property
    def dollars_per_token(self) -> float | None:
        return self.cost(1.0)

    @property
    def joules_per_token(self) -> float | None:
        """Energy of the nodes for one token, by ``NODE_POWER``; None where the chips' power is not known."""
        rate = self.tokens_per_second
        return None if rate is None or self.watts is None else NODE_POWER[0] * self.watts / rate

    def kilowatt_hours(self, num_tokens: float) -> float | None:
        """Energy of the nodes for that many tokens; None where the chips' power is not known."""
        each = self.joules_per_token
        return None if each is None else num_tokens * each / _JOULES_PER_KILOWATT_HOUR

    @property
    def limited_by(self) -> str:
        """The largest group: of the memory if it does not fit, else of the step."""
        if self.why_not:
            return "layout"
        if self.fits is False or self.step is None:
            return f"memory: {_largest(self.memory)}"
        return _largest(self.step)

    @property
    def runs_with(self) -> str:
        """What runs it: this project's trainer, or libraries with more layouts, which lack its own storages and computes."""
        if self.layout.runs_here:
            return OURS
        is_common = self.recipe.storage.name in _COMMON_STORAGES
        return (
            "Megatron-LM or torchtitan"
            if is_common
            else f"torchtitan and ng.AdamW(storage={self.recipe.storage.name!r})"
        )

    def row(self, num_tokens: float | None = None) -> dict[str, Any]:
        """Plain values in bytes, seconds and shares, for JSON; ``num_tokens`` of the whole run give days and cost."""
        days = None if num_tokens is None else self.days(num_tokens)
        return {
            "recipe": self.recipe.title,
            "bytes_per_param": self.recipe.bytes_per_param,
            "cluster": self.cluster,
            "chips": self.num_chips,
            "parallelism": {name: getattr(self.layout, name) for name in PARALLELISM},
            "runs_with": self.runs_with,
            "fits": self.fits,
            "why_not": self.reason,
            "advice": self.advice,
            "memory_bytes": {**dict.fromkeys(MEMORY_GROUPS, 0.0), **self.memory.groups, "total": self.memory.total},
            "activations_from": "count" if self.is_counted else "formula",
            "headroom_bytes": self.headroom_bytes,
            "sequence_length": self.sequence_length,
            "tokens_per_step": self.tokens_per_step,
            "step_seconds": None if self.step is None else {**self.step.groups, "total": self.step.total},
            "tokens_per_second": self.tokens_per_second,
            "mfu": self.mfu,
            "days": days,
            "cost": None if num_tokens is None else self.cost(num_tokens),
            "dollars_per_token": self.dollars_per_token,
            "kilowatt_hours": None if num_tokens is None else self.kilowatt_hours(num_tokens),
            "joules_per_token": self.joules_per_token,
            "limited_by": self.limited_by,
            "confidence": self.confidence(num_tokens),
        }

    def confidence(self, num_tokens: float | None = None) -> dict[str, Any]:
        """The 80 % intervals ``[low, high]``, and whether it surely fits; ``num_tokens`` of the whole run give days."""
        rates: list[float] | None = None
        days: list[float] | None = None
        joules: list[float] | None = None
        if self.step is not None:
            fast, slow = self.step.interval
            rates = [self.tokens_per_step / slow, self.tokens_per_step / fast]
            if num_tokens is not None:
                fastest, slowest = (num_tokens / rate / _SECONDS_PER_DAY for rate in reversed(rates))
                days = [fastest, slowest * (1 + self.restarts)]
            if self.watts is not None:
                joules = [NODE_POWER[1] * self.watts / rates[1], NODE_POWER[2] * self.watts / rates[0]]
        return {
            "share": 0.8,
            "memory_bytes": list(self.memory.interval),
            "tokens_per_second": rates,
            "days": days,
            "restarts": self.restarts,
            "joules_per_token": joules,
            "fits_is_certain": self.is_certain,
        }


@dataclass(frozen=True, slots=True)
class Question:
    """What was asked.

    Args:
        model: the name by which it was asked for.
        clusters: to run on; none asks for the state alone.
        num_tokens: of the whole run; None if not asked.
        minimize: an objective of :data:`narrowgauge.planner.plan.OBJECTIVES`.
        fixed: fields of the layout that were asked for.
        shares: of the chips' printed rates; None for the published ones.
        counted: what a layer keeps, counted in the model's own modules; None for the formulas.
        tokens_per_step: None if not asked.
        deadline_days, budget: limits in days and dollars; None for no limit.
        largest: ``"context"`` or ``"batch"`` where the largest that fits is asked for; empty if not.
    """

    architecture: Architecture
    model: str
    clusters: tuple[Cluster, ...] = ()
    sequence_length: int = 0
    num_tokens: float | None = None
    minimize: str = "days"
    fixed: Mapping[str, Any] = field(default_factory=dict)
    shares: Shares | None = None
    counted: LayerCounter | None = None
    tokens_per_step: int | None = None
    deadline_days: float | None = None
    budget: float | None = None
    is_deadline_assumed: bool = False
    largest: str = ""
    optimizer: str = "adamw"

    @property
    def is_bounded(self) -> bool:
        """Whether there is a deadline or a budget."""
        return self.deadline_days is not None or self.budget is not None

    def meets(self, option: Option) -> bool:
        """Whether an option fits and ends within the deadline and the budget.

        Example:
            >>> from narrowgauge.planner.plan import plan
            >>> found = plan("llama-8b", recipes=["bfloat16/word"], chip="H100-SXM", chips=64, tokens=1e11, days=3)
            >>> found.question.meets(found.best)
            True
        """
        days = None if self.num_tokens is None else option.days(self.num_tokens)
        if not option.fits or days is None:
            return False
        cost = None if self.num_tokens is None or self.budget is None else option.cost(self.num_tokens)
        is_in_time = self.deadline_days is None or days <= self.deadline_days
        return is_in_time and (self.budget is None or (cost is not None and cost <= self.budget))

    def software_rows(self, cluster: Cluster) -> list[Row]:
        """The software whose speed is planned on each group of nodes; empty where the machine itself was measured."""
        if self.shares is not None:
            return []
        return [software_of(group.chip, group.software).row() for group in cluster.groups]

    def row(self) -> Row:
        """Plain values, for JSON."""
        adapters = self.architecture.adapters
        return {
            "model": self.model,
            "num_parameters": self.architecture.num_parameters,
            "num_active_parameters": self.architecture.num_active_parameters,
            "num_trained_parameters": self.architecture.num_trained_parameters,
            "clusters": [
                {"name": cluster.name, "chips": cluster.num_chips, "software": self.software_rows(cluster)}
                for cluster in self.clusters
            ],
            "sequence_length": self.sequence_length or None,
            "tokens": self.num_tokens,
            "minimize": self.minimize,
            "layout": dict(self.fixed),
            "deadline_days": self.deadline_days,
            "budget": self.budget,
            "largest": self.largest or None,
            "optimizer": self.optimizer,
            "adapters": None if adapters is None else {"rank": adapters.rank, "base": adapters.base},
        }


def _largest(terms: Terms) -> str:
    groups = terms.groups
    return max(groups, key=lambda group: groups[group], default="nothing")
