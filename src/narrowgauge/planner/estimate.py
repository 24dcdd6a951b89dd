"""Estimates: the memory and the time of a job, with the intervals of published runs."""

from dataclasses import asdict, dataclass
from functools import cached_property

from narrowgauge.planner.job import Job
from narrowgauge.planner.memory import host_bytes, memory_of
from narrowgauge.planner.step_time import step_of
from narrowgauge.spec.tables import Row
from narrowgauge.spec.toml import load_data

ERRORS = load_data("errors", "planner")
"""Ends of the 80 % intervals of measured over planned values, of published runs that were asked by
name; and ``next``, the half widths by what differs between two runs.
"""
Ends = tuple[float, float]
"""The ends of an 80 % interval."""
SECONDS_PER_DAY = 86_400
RESTARTS = 0.10
MOST_RESTARTS = 0.25
"""Extra time of a whole run over its steps, and at the high end of its interval: failures,
restarts, repeated work, evaluations. BLOOM took 11 % more GPU-hours than its steps (arXiv
2211.05100), Llama 3's 405B 8 % more (2407.21783, table 4), MegaScale less than 10 % (2402.15627),
Llama 2's 7B and 13B about a third more (2307.09288, table 2).
"""
_ROW = ("fits", "headroom_bytes", "allocated_bytes", "host_bytes", "sequence_length", "tokens_per_step",
        "tokens_per_second", "rate_interval", "memory_interval", "mfu")  # fmt: skip


@dataclass(frozen=True)
class Estimate(Job):
    """Compute the memory and the time of a job."""

    memory = cached_property(memory_of)
    step = cached_property(step_of)
    host_bytes = cached_property(host_bytes)

    @cached_property
    def step_seconds(self) -> float:
        return sum(self.step.values())

    @cached_property
    def peak_bytes(self) -> float:
        return sum(self.memory.values())

    @property
    def headroom_bytes(self) -> float:
        """Return the free bytes of the worst rank; negative if it does not fit."""
        return self.chip.memory_bytes - self.peak_bytes

    @property
    def fits(self) -> bool:
        return self.headroom_bytes >= 0 and self.host_bytes <= self.cluster.host_memory_bytes

    @property
    def allocated_bytes(self) -> float:
        """Return the bytes of the tensors: what ``torch.cuda.max_memory_allocated`` prints."""
        return self.peak_bytes - self.memory["overhead"]

    def _ends(self, quantity: str, value: float) -> Ends:
        """Return the 80 % interval of a planned value."""
        low, high = ERRORS[quantity][self.kind]["ends"]
        return value * low, value * high

    @property
    def memory_interval(self) -> Ends:
        """Return the 80 % interval of the memory."""
        return self._ends("memory", self.peak_bytes)

    @property
    def has_room(self) -> bool:
        """Tell whether the high end of the memory interval fits, too."""
        return self.fits and self.memory_interval[1] <= self.chip.memory_bytes

    @property
    def tokens_per_second(self) -> float:
        """Return the tokens per second of the whole job."""
        return self.tokens_per_step / self.step_seconds

    @property
    def rate_interval(self) -> Ends:
        """Return the 80 % interval of the tokens per second."""
        return self._ends("speed", self.tokens_per_second)

    @property
    def mfu(self) -> float:
        """Return the model's operations per second over the peak of dense 16-bit matmuls (model
        FLOPs utilization). Frozen weights have no gradients.
        """
        operations = self.architecture.flops_per_token(self.sequence_length)
        if self.tuning.lora:
            operations -= sum(matmul.flops_per_token for matmul in self.architecture.matmuls)
        for matmul in self.tuning.adapters(self.architecture):
            operations += 3 * matmul.flops_per_token
        return self.tokens_per_second * operations / (self.cluster.chips * self.chip.peak_flops)

    def days(self, num_tokens: float) -> float:
        """Return the days of a whole run: its steps, and the usual restarts."""
        return num_tokens / self.tokens_per_second / SECONDS_PER_DAY * (1 + RESTARTS)

    def days_interval(self, num_tokens: float) -> Ends:
        """Return the 80 % interval of the days: without restarts at its low end, with most at its
        high end.
        """
        slow, fast = (num_tokens / rate / SECONDS_PER_DAY for rate in self.rate_interval)
        return fast, slow * (1 + MOST_RESTARTS)

    def row(self, num_tokens: float | None = None) -> Row:
        """Return JSON values in bytes, seconds and fractions; ``num_tokens`` of the whole run add
        days.
        """
        row = {name: getattr(self, name) for name in _ROW}
        for name in ("recipe", "cluster", "program"):
            row[name] = getattr(self, name).name
        row["layout"] = asdict(self.layout)
        row["memory_bytes"] = self.memory | {"total": self.peak_bytes}
        row["step_seconds"] = self.step | {"total": self.step_seconds}
        if num_tokens is not None:
            row["days"] = self.days(num_tokens)
            row["days_interval"] = self.days_interval(num_tokens)
        return row
