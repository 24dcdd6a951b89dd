"""Plan the next run from one that was measured: of another size, length, batch, precision or number
of chips.

Two numbers of the measured run correct the plan of the next one::

    rate = planned rate of the next x (measured rate / planned rate of the run) ** TRUST
    peak = counted tensors of the next + (measured peak - counted tensors of the run)

The rate's is shrunk, because a part of the difference is the run's own. If nothing differs, the
answer is what was measured. TRUST and the intervals are of pairs of published runs
(``benchmarks/published_runs.py --next``). No pair crosses chips, programs, update rules, adapters or
their base: there the plan stands as it is, without an interval.
"""

import contextlib
import math
import operator
from dataclasses import asdict
from typing import Any, NamedTuple

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.estimate import ERRORS, Ends, Estimate
from narrowgauge.planner.memory import outside_bytes
from narrowgauge.planner.model import read_model
from narrowgauge.planner.plan import answers
from narrowgauge.spec.require import require_number
from narrowgauge.spec.tables import Row

TRUST = 0.8
SAME = "nothing differs: this is the run you gave"
BEYOND = "length beyond 4 times"
OTHER = "another chip, program, rule or training: no interval"
_TRUSTS = {SAME: 1.0, BEYOND: 0.0, OTHER: 0.0}
_ASSUMED = {
    "chips": "cluster.chips",
    "sequence_length": "sequence_length",
    "recipes": "recipe.name",
    "program": "program.name",
    "layout": "layout",
}
"""What a question may leave out, and where its plan has it."""
MOST_OF_ONE = 0.25
"""Measured over planned rate below which a rate that suits one chip is taken for one chip's."""


def _loop_of(job: Estimate) -> tuple[Any, ...]:
    """Return what no pair of published runs differs in."""
    tuning = job.tuning.lora > 0, job.tuning.base, job.tuning.experts
    return job.architecture.num_experts > 0, job.chip.name, job.program, job.optimizer, tuning


def difference_of(run: Estimate, job: Estimate) -> str:
    """Name what differs most between two jobs: a row of ``next`` in ``data/errors.toml``."""
    longer = abs(math.log2(job.sequence_length / run.sequence_length))
    if run == job:
        return SAME
    if _loop_of(run) != _loop_of(job):
        return OTHER
    if job.architecture.num_experts:
        return "mixture"
    if longer:
        return BEYOND if longer > 2 else "length to 4 times"
    return "size, layout, batch, precision, chips"


def _around(value: float, difference: str) -> Ends:
    """Return the 80 % interval of a plan that differs so from a measured run."""
    wider = 1 + ERRORS["next"][difference]
    return value / wider, value * wider


def _reservable_gb(job: Estimate) -> float:
    """Return the memory of a chip that the framework's allocator can reserve, in 10^9 bytes."""
    return (job.chip.memory_bytes - outside_bytes(job.cluster.chips)) / 1e9


def _described(job: Estimate) -> str:
    words = job.architecture.name, job.cluster.name, f"{job.sequence_length:,} tokens"
    return ", ".join((*words, job.recipe.name, job.program.name))


class NextRun(NamedTuple):
    """Hold the plan of a run, as a measured run corrects it.

    ``job`` is its plan before that, and ``difference`` what differs most from the measured run. The
    rate is of all chips, the peak of the fullest chip as the measured run counts it, in
    10^9 bytes. The intervals hold 80 %; without pairs of published runs there are none.
    """

    job: Estimate
    difference: str
    tokens_per_second: float
    rate_interval: Ends | None
    peak_gb: float
    peak_interval: Ends | None
    fits: str

    def row(self) -> Row:
        """Return plain values, for JSON."""
        return {**self.job.row(), **self._asdict(), "job": _described(self.job)}

    def __str__(self) -> str:
        if self.difference == SAME:
            return f"next  {SAME}, at {self.tokens_per_second:,.0f} tokens/s"
        rates = peaks = ""
        if self.rate_interval and self.peak_interval:
            rates = ", 80 % {:,.0f}–{:,.0f}".format(*self.rate_interval)
            peaks = ", 80 % {:.1f}–{:.1f}".format(*self.peak_interval)
        return (
            f"next  {_described(self.job)}\n"
            f"      {self.tokens_per_second:,.0f} tokens/s{rates} ({self.difference})\n"
            f"      {self.peak_gb:.1f} GB a chip{peaks}; fits: {self.fits}\n"
            f"      {self.job.layout}"
        )


class MeasuredRun:
    """A run that was measured, asked as of :func:`narrowgauge.plan`.

    Args:
        model, asked: the question, as of :func:`narrowgauge.plan`: one machine and one recipe,
            ``bfloat16/master`` by default.
        tokens_per_second: of all chips; or name ``tokens_per_second_per_chip``.
        peak_gb: memory that the framework's allocator printed for the fullest chip, in 10^9 bytes;
            0 if it is not known.

    Example:
        >>> run = MeasuredRun("llama-8b", chip="H100-SXM", chips=8, tokens_per_second=53_336)
        >>> run.next(chips=16).difference
        'size, layout, batch, precision, chips'
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens_per_second: float = 0.0,
        tokens_per_second_per_chip: float = 0.0,
        peak_gb: float = 0.0,
        **asked: Any,
    ) -> None:
        require_number("tokens_per_second", tokens_per_second)
        require_number("tokens_per_second_per_chip", tokens_per_second_per_chip)
        if bool(tokens_per_second) == bool(tokens_per_second_per_chip):
            raise DataError(
                "Cannot plan from a run without one rate.",
                "Name tokens_per_second of all chips, or tokens_per_second_per_chip.",
            )
        self.asked = {"model": model, **asked}
        self.job = self._job(self.asked)
        self.tokens_per_second = (
            tokens_per_second or tokens_per_second_per_chip * self.job.cluster.chips
        )
        self.peak_gb = peak_gb
        self.counted_gb = self.job.allocated_bytes / 1e9
        self.ratio = self.tokens_per_second / self.job.tokens_per_second
        self._refuse_implausible()

    def _job(self, asked: dict[str, Any]) -> Estimate:
        """Return the plan of the run: what it does not name is not searched, but its layout."""
        asked = {**asked, "recipes": asked.get("recipes") or "bfloat16/master"}
        jobs, left_out = answers(read_model(asked.pop("model")), **asked)
        if len(jobs) + len(left_out) > 1:
            raise DataError(
                f"Cannot plan from a run with recipes = {asked['recipes']!r} because a run has one.",
                "Name one, and ask for each next run.",
            )
        return jobs[0]

    def _refuse_implausible(self) -> None:
        """Refuse a rate and a peak that no such machine reaches."""
        require_number("peak_gb of a chip", self.peak_gb, below=self.job.chip.memory_bytes / 1e9)
        chips = self.job.cluster.chips
        name = self.job.cluster.name
        if self.job.mfu * self.ratio > 1:
            raise DataError(
                f"Cannot plan from {self.tokens_per_second:,.0f} tokens/s: that is more than the peak of {name}.",
                "Name the tokens per second of all chips.",
            )
        if self.ratio < MOST_OF_ONE and 0.4 < self.ratio * chips < 1.3:
            raise DataError(
                f"Cannot plan from {self.tokens_per_second:,.0f} tokens/s of {name}: that is the rate "
                f"of one chip ({self.job.tokens_per_second:,.0f} are planned for all).",
                "Name it tokens_per_second_per_chip.",
            )

    @property
    def assumed(self) -> dict[str, str]:
        """Return what the question did not name, as it was planned."""
        values = {}
        for name, place in _ASSUMED.items():
            if not self.asked.get(name):
                values[name] = str(operator.attrgetter(place)(self.job))
        return values

    def next(self, **changes: Any) -> NextRun:
        """Plan another run, in this one's layout if it fits, else in the fastest that does. What
        ``changes`` do not name is this run's.
        """
        job = self.job
        if {**self.asked, **changes} != self.asked:
            job = self._planned(changes)
        difference = difference_of(self.job, job)
        rate = job.tokens_per_second * math.pow(self.ratio, _TRUSTS.get(difference, TRUST))
        peak = self.peak_of(job)
        room = _reservable_gb(job)
        rates = peaks = None
        if difference != OTHER:
            rates = _around(rate, difference)
            peaks = _around(peak, "memory")
        fits = "barely" if peak <= room else "no"
        if peaks and peaks[1] <= room:
            fits = "yes"
        return NextRun(job, difference, rate, rates, peak, peaks, fits)

    def peak_of(self, job: Estimate) -> float:
        """Return the peak of a job in 10^9 bytes, as this run's was counted."""
        counted = job.allocated_bytes / 1e9
        if not self.peak_gb or difference_of(self.job, job) == OTHER:
            return counted
        return counted + self.peak_gb - self.counted_gb

    def _planned(self, changes: dict[str, Any]) -> Estimate:
        """Return a plan in this run's layout, if that is known and fits; else in the fastest."""
        asked = {**self.asked, **changes}
        layout = self.job.layout
        if "tokens_per_step" not in changes:  # as many a chip, and a sequence a replica
            length = asked.get("sequence_length") or self.job.sequence_length
            chips = asked.get("chips", 1)
            for name, value in {"sequence_length": length, "chips": chips}.items():
                require_number(name, value, 1, is_whole=True)
            least = max(self.job.tokens_per_step, length * layout.num_replicas)
            asked["tokens_per_step"] = max(length, least * chips / self.job.cluster.chips)
        if self.asked.get("layout") and "layout" not in changes:
            asked["layout"] = {}
            fields = asdict(layout)
            for name in ("data", "shard", "micro_batches"):
                del fields[name]
            with contextlib.suppress(NarrowgaugeError):  # it does not divide model or chips
                job = self._job({**asked, "layout": fields})
                if self.peak_of(job) <= _reservable_gb(job):
                    return job
        return self._job(asked)

    def __str__(self) -> str:
        text = (
            f"run   {_described(self.job)}\n      {self.tokens_per_second:,.0f} tokens/s measured, "
            f"{self.job.tokens_per_second:,.0f} planned"
        )
        if self.peak_gb:
            text += f"; {self.peak_gb:.1f} GB measured, {self.counted_gb:.1f} counted"
        if self.assumed:
            words = (f"{name}={value}" for name, value in self.assumed.items())
            text += f"\n      assumed: {', '.join(words)}"
        return text
