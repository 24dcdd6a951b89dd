"""Estimates: the memory and the time of an ask, with the intervals of published runs."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import cached_property

from narrowgauge.planner.ask import Ask
from narrowgauge.planner.errors import Ends, error_of
from narrowgauge.planner.memory import OUTSIDE, host_bytes, memory_terms
from narrowgauge.planner.program import adapters_of
from narrowgauge.planner.step_time import step_terms
from narrowgauge.planner.terms import Terms
from narrowgauge.spec.tables import Row
from narrowgauge.spec.toml import load_data

_LOSSES: dict[str, list[float]] = load_data("losses", "planner")
SECONDS_PER_DAY = 86_400
RESTARTS = 0.10
MOST_RESTARTS = 0.25
"""Extra time of a whole run over its steps, and at the high end of its interval: failures,
restarts, repeated work, evaluations. BLOOM took 11 % more GPU-hours than its steps (arXiv
2211.05100 and the project's log). Llama 3's 405B took 8 % more than its steps at the printed 400
TFLOP/s (arXiv 2407.21783, table 4; 30.84 million GPU-hours). MegaScale lost less than 10 %
(2402.15627). Llama 2's 7B and 13B took about a third more than the steps of such models (arXiv
2307.09288, table 2).
"""
UNCHECKED = 1.15
"""Factor on the memory of a kind that no published peak checks, above which a layout is not
preferred.
"""
_ROW = ("num_chips", "fits", "headroom_bytes", "allocated_bytes", "host_bytes", "sequence_length",
        "tokens_per_step", "tokens_per_second", "rate_interval", "memory_interval", "mfu", "limited_by",
        "measured_loss")  # fmt: skip


@dataclass(frozen=True)
class Estimate(Ask):
    """Compute the memory and the time of an ask."""

    # memory

    @cached_property
    def memory(self) -> Terms:
        """Return the bytes of the worst rank at its worst moment."""
        return memory_terms(self)

    @cached_property
    def host_bytes(self) -> float:
        """Return the bytes that a node's host holds for its chips."""
        return host_bytes(self)

    @property
    def headroom_bytes(self) -> float:
        """Return the free bytes of the worst rank; negative if it does not fit."""
        return self.chip.memory_bytes - self.memory.total

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0 and self.host_bytes <= self.cluster.host_memory_bytes

    @property
    def reserved_bytes(self) -> float:
        """Return what the framework's allocator reserves: no driver, no collectives."""
        return self.memory.total - self.memory.of(*OUTSIDE)

    @property
    def allocated_bytes(self) -> float:
        """Return the bytes of the tensors: what ``torch.cuda.max_memory_allocated`` prints."""
        return self.reserved_bytes - self.memory.of("fragmentation")

    @property
    def memory_interval(self) -> Ends | None:
        """Return the 80 % interval of the memory; None if no run of this kind printed its peak."""
        error = error_of("memory", self.kind, self.chip)
        if error is None:
            return None
        reserved = self.reserved_bytes
        outside = self.memory.total - reserved
        return reserved * error[0] + outside, reserved * error[1] + outside

    @property
    def has_room(self) -> bool:
        """Tell whether the high end of the memory interval fits, too."""
        ends = self.memory_interval or (0.0, self.memory.total * UNCHECKED)
        return self.fits and ends[1] <= self.chip.memory_bytes

    # time

    @cached_property
    def step(self) -> Terms:
        """Return the seconds of an optimizer step.

        Raise for jobs that cannot run: see :func:`step_terms`.
        """
        return step_terms(self)

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of the whole job."""
        return self.tokens_per_step / self.step.total

    @property
    def mfu(self) -> float:
        """Return the model's operations per second over the peak of dense 16-bit matmuls (model
        FLOPs utilization).
        """
        operations = self.architecture.flops_per_token(self.sequence_length)
        if not self.program.trains_all:
            # Frozen weights have no gradients.
            for matmul in self.architecture.matmuls:
                if not self.program.part_of(matmul).trains:
                    operations -= matmul.flops_per_token
            for matmul in adapters_of(self.architecture, self.program):
                operations += 3 * matmul.flops_per_token
        return self.tokens_per_second * operations / (self.cluster.chips * self.chip.peak_flops)

    @property
    def limited_by(self) -> str:
        """Name the largest group: of memory if it does not fit, else of the step."""
        if self.fits:
            return self.step.largest_group
        return f"memory: {self.memory.largest_group}"

    @property
    def rate_interval(self) -> Ends | None:
        """Return the 80 % interval of the tokens per second; None if no run of this kind was
        published.
        """
        error = error_of("speed", self.kind, self.chip)
        if error is None:
            return None
        return self.tokens_per_second / error[1], self.tokens_per_second / error[0]

    @property
    def measured_loss(self) -> list[float] | None:
        """Return the validation loss of the recipe less that of ``bfloat16/master`` in nats, and
        half its 95 % interval: of llama-1m, not of this model. None if it was not measured so, or
        if the plan does not train all weights by AdamW.
        """
        recipe = self.recipe
        is_measured = self.optimizer == "adamw" and self.program.trains_all
        if not is_measured or recipe.overrides:
            return None
        return _LOSSES.get(f"{recipe.compute.name}/{recipe.storage.short_name}")

    def days(self, num_tokens: float) -> float:
        """Return the days of a whole run over ``num_tokens`` tokens: its steps, and the usual
        restarts.
        """
        return num_tokens / self.tokens_per_second / SECONDS_PER_DAY * (1 + RESTARTS)

    def days_interval(self, num_tokens: float) -> Ends | None:
        """Return the 80 % interval of the days: without restarts at its low end, with most at its
        high end.
        """
        if self.rate_interval is None:
            return None
        slow, fast = (rate * SECONDS_PER_DAY for rate in self.rate_interval)
        return num_tokens / fast, num_tokens / slow * (1 + MOST_RESTARTS)

    def row(self, num_tokens: float | None = None) -> Row:
        """Return JSON values in bytes, seconds and fractions.

        ``num_tokens`` of the whole run add days.
        """
        row = {name: getattr(self, name) for name in _ROW}
        row["recipe"] = self.recipe.title
        row["bytes_per_param"] = self.bytes_per_param
        row["cluster"] = self.cluster.name
        row["program"] = self.program.name
        row["layout"] = dataclasses.asdict(self.layout)
        for name, terms in (("memory_bytes", self.memory), ("step_seconds", self.step)):
            row[name] = {**terms.groups, "total": terms.total}
        if num_tokens is not None:
            row["days"] = self.days(num_tokens)
            row["days_interval"] = self.days_interval(num_tokens)
        return row
