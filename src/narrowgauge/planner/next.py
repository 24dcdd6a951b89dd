"""Tell one measured run, and get the next: of another size, length, batch, precision or number of
chips.

Two numbers of the measured run correct the plan of the next one::

    rate = planned rate of the next x (measured rate / planned rate of the run) ** TRUST
    peak = counted tensors of the next + HALF * (measured peak - counted tensors of the run)

Both are shrunk, because a part of every difference is the run's own. The numbers and the intervals
are of pairs of published runs (``benchmarks/published_runs.py --next``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.errors import ERRORS, Ends
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import read_layout
from narrowgauge.planner.plan import plan
from narrowgauge.planner.units import layout_text
from narrowgauge.runs.record import read_run
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.tables import Row
from narrowgauge.spec.toml import read_file
from narrowgauge.spec.values import require_number

TRUST = 0.8
HALF = 0.5
_KEPT = ("tensor", "pipeline", "interleave", "context", "expert", "zero", "accumulation_dtype")
_OF_STEP = ("micro_batch", "recompute")
BEYOND = "length beyond 4 times"


def difference_of(run: Estimate, job: Estimate) -> str:
    """Name what differs most between two jobs: a row of ``next`` in ``data/errors.toml``."""
    longer = job.sequence_length / run.sequence_length
    longer = max(longer, 1 / longer)
    chips = job.num_chips / run.num_chips
    if job.kind == "mixture":
        return "mixture"
    if longer > 4:
        return BEYOND
    if longer > 1:
        return "length to 4 times"
    if job.architecture.num_parameters != run.architecture.num_parameters:
        return "another size"
    if max(chips, 1 / chips) > 16:
        return "chips beyond 16 times"
    return "layout, batch, precision, chips to 16 times"


@dataclass(frozen=True)
class Next:
    """Hold the plan of a run, as measured runs correct it.

    Args:
        job: its plan, before it is corrected.
        difference: what differs most from the run that corrects it.
        tokens_per_second: of all chips.
        peak_gb: of the fullest chip, as the measured run counts it, in 10^9 bytes.
        is_same_layout: whether it has the layout of the measured run.
    """

    job: Estimate
    difference: str
    tokens_per_second: float
    peak_gb: float
    is_same_layout: bool

    @property
    def rate_interval(self) -> Ends:
        """Return the 80 % interval of the tokens per second."""
        wider = 1 + ERRORS["next"][self.difference]
        return self.tokens_per_second / wider, self.tokens_per_second * wider

    @property
    def peak_interval(self) -> Ends:
        """Return the 80 % interval of the peak."""
        wider = 1 + ERRORS["next"]["memory"]
        return self.peak_gb / wider, self.peak_gb * wider

    @property
    def asks_for(self) -> str:
        """Return the line that asks for a second measured run."""
        if self.difference in ("mixture", BEYOND, "length to 4 times"):
            return "A second measured run of this length and kind makes the interval smaller: others = […]."
        return "A second measured run makes the interval smaller: others = [{ chips = …, tokens_per_second = … }]."

    @property
    def fits(self) -> str:
        """Return ``"yes"``, ``"barely"`` (the end of the interval does not fit) or ``"no"``."""
        room = (self.job.chip.memory_bytes - self.job.outside_bytes) / 1e9
        if self.peak_gb > room:
            return "no"
        return "yes" if self.peak_interval[1] <= room else "barely"

    def row(self) -> Row:
        """Return plain values, for JSON."""
        row = self.job.row()
        row |= {"tokens_per_second": self.tokens_per_second, "rate_interval": self.rate_interval}
        row |= {"peak_gb": self.peak_gb, "peak_interval": self.peak_interval, "fits": self.fits}
        return {**row, "difference": self.difference, "is_same_layout": self.is_same_layout}

    def __str__(self) -> str:
        slow, fast = self.rate_interval
        low, high = self.peak_interval
        layout = layout_text(self.job.layout)
        where = "the run's layout" if self.is_same_layout else "the fastest layout that fits"
        return (
            f"next  {described(self.job)}\n"
            f"      {self.tokens_per_second:,.0f} tokens/s, 80 % {slow:,.0f}–{fast:,.0f} ({self.difference})\n"
            f"      {self.peak_gb:.1f} GB a chip, 80 % {low:.1f}–{high:.1f}; fits: {self.fits}\n"
            f"      {layout} ({where})"
        )


class MeasuredRun:
    """A run that was measured, asked as of :func:`narrowgauge.plan`.

    Args:
        model, asked: the question, as of :func:`narrowgauge.plan`.
        tokens_per_second: of all chips.
        peak_gb: memory that the framework's allocator printed for the fullest chip, in 10^9 bytes.
        others: further measured runs. The one that differs least from a plan corrects it.

    Example:
        >>> run = MeasuredRun("llama-8b", chip="H100-SXM", chips=8, tokens_per_second=53_336)
        >>> run.next(chips=16).difference
        'layout, batch, precision, chips to 16 times'
    """

    def __init__(
        self,
        model: Any,
        *,
        tokens_per_second: float,
        peak_gb: float | None = None,
        others: tuple[MeasuredRun, ...] = (),
        **asked: Any,
    ) -> None:
        require_number("tokens_per_second", tokens_per_second, is_open=True)
        if peak_gb is not None:
            require_number("peak_gb", peak_gb, is_open=True)
        self.asked = {"model": model, "chips": 1, **asked}
        self.tokens_per_second = tokens_per_second
        self.peak_gb = peak_gb
        self.others = others
        if self.job.mfu * self.factor ** (1 / TRUST) > 1:
            raise DataError(
                f"Cannot plan from a run of {tokens_per_second:,.0f} tokens/s because that is more "
                f"than the peak of {self.job.cluster.name}.",
                "Name the tokens per second of all chips.",
            )

    @cached_property
    def job(self) -> Estimate:
        """Return the plan of the measured run."""
        job: Estimate = plan(**self.asked, advise=False).best
        return job

    @cached_property
    def factor(self) -> float:
        """Return the factor on the planned rate of the next run."""
        return math.pow(self.tokens_per_second / self.job.tokens_per_second, TRUST)

    @property
    def extra_gb(self) -> float:
        """Return what is added to the counted memory of the next run."""
        if self.peak_gb is None:
            return 0.0
        return HALF * (self.peak_gb - self.job.allocated_bytes / 1e9)

    def next(self, **changes: Any) -> Next:
        """Plan another run, in this one's layout if it fits, else in the fastest that does. What
        ``changes`` do not name is this run's.
        """
        asked = {**self.asked, **changes}
        is_counted = "micro_batches" in read_layout(changes.get("layout", ""))
        if "tokens_per_step" not in changes and not is_counted:
            more = asked["chips"] / self.asked["chips"]
            length = asked.get("sequence_length") or self.job.sequence_length
            least = length * max(1, round(self.job.layout.num_replicas * more))
            asked["tokens_per_step"] = max(self.job.tokens_per_step * more, least)
        job = None
        is_same = False
        for layout, is_kept in self._layouts(changes):
            try:
                job = plan(**{**asked, "layout": layout}, advise=False).best
            except NarrowgaugeError:
                if not layout or "layout" in changes:
                    raise
                continue  # it does not divide the model or the chips
            is_same = is_kept
            told = job.allocated_bytes + 1e9 * self.extra_gb + job.outside_bytes
            if told <= job.chip.memory_bytes:
                break
        assert job is not None
        nearest = min((self, *self.others), key=lambda run: run.distance(job))
        difference = difference_of(nearest.job, job)
        rate = job.tokens_per_second * (1.0 if difference == BEYOND else nearest.factor)
        peak = job.allocated_bytes / 1e9 + nearest.extra_gb
        return Next(job, difference, rate, peak, is_same)

    def distance(self, job: Estimate) -> float:
        """Return how much a job differs from this run: the width of the interval."""
        return float(ERRORS["next"][difference_of(self.job, job)])

    def _layouts(self, changes: dict[str, Any]) -> Iterator[tuple[Any, bool]]:
        """Yield the layouts to try: this run's with its batch, without it, and any."""
        if "layout" in changes:
            yield changes["layout"], False
            return
        if self.asked.get("layout"):
            kept = {name: getattr(self.job.layout, name) for name in _KEPT}
            step = {name: getattr(self.job.layout, name) for name in _OF_STEP}
            yield {**kept, **step}, True
            yield kept, True
        yield {}, False

    def __str__(self) -> str:
        text = (
            f"run   {described(self.job)}\n      {self.tokens_per_second:,.0f} tokens/s measured, "
            f"{self.job.tokens_per_second:,.0f} planned"
        )
        if self.peak_gb is not None:
            counted = self.job.allocated_bytes / 1e9
            text += f"; {self.peak_gb:.1f} GB measured, {counted:.1f} counted"
        return text


def described(job: Estimate) -> str:
    """Return the model, the chips, the length, the recipe and the program of a job."""
    return (
        f"{job.architecture.name}, {job.cluster.name}, {job.sequence_length:,} tokens, "
        f"{job.recipe.name}, {job.program.text}"
    )


def read_changes(words: Iterable[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE`` of a command line.

    Example:
        >>> read_changes(["chips=128", "recipes=float8-row/word", "sequence-length=16384"])
        {'chips': 128, 'recipes': 'float8-row/word', 'sequence_length': 16384}
    """
    changes: dict[str, Any] = {}
    for word in words:
        name, equals, value = word.partition("=")
        if not equals:
            raise DataError(f"Cannot read {word!r} as a change.", "Write NAME=VALUE: chips=128.")
        key = name.strip().replace("-", "_")
        changes[{"recipe": "recipes"}.get(key, key)] = int(value) if value.isdecimal() else value
    return changes


def read_measured(path: Path) -> MeasuredRun:
    """Read a measured run: a run folder, or a TOML file with the arguments of :class:`MeasuredRun`.

    In a file ``log`` may name a run folder or the log of another program instead of
    ``tokens_per_second``, and ``others`` may list further measured runs, each with what differs.
    """
    asked: dict[str, Any] = {}
    others: list[dict[str, Any]] = []
    log = path
    if path.suffix == ".toml":
        asked = read_file(path, "measured run", "Write model = 'llama-8b'.")
        others = asked.pop("others", [])
        log = path.parent / asked.pop("log", "")
    if "tokens_per_second" not in asked:
        asked = {**_of_log(log), **asked}
    for name in ("model", "chip", "tokens_per_second"):
        if name not in asked and not (name == "chip" and "cluster" in asked):
            raise DataError(
                f"Cannot plan from {path} because it does not say its {name}.",
                f"Write a file with {name} = … and log = '{path}', and name that.",
            )
    further = tuple(MeasuredRun(**{**asked, **other}) for other in others)
    return MeasuredRun(**asked, others=further)


def _of_log(path: Path) -> dict[str, Any]:
    """Return what a run folder, or the log of another program, says of a run."""
    run = read_run(path)
    rates = [row["tokens_per_second"] for row in run.steps if row.get("tokens_per_second")]
    peaks = [row["peak_memory_bytes"] for row in run.steps if row.get("peak_memory_bytes")]
    asked: dict[str, Any] = {}
    if rates:
        asked["tokens_per_second"] = median(rates)
    if peaks:
        asked["peak_gb"] = max(peaks) / 1e9
    if run.is_foreign:
        return asked
    machine = run.run.get("machine", {})
    for name, chip in CHIPS.items():
        if chip.device and chip.device == machine.get("device"):
            asked["chip"] = name
    asked["chips"] = machine.get("ranks", 1)
    config = run.config
    for name, setting in (("model", "model"), ("sequence_length", "sequence_length")):
        if setting in config:
            asked[name] = config[setting]
    if "recipe" in config:
        asked["recipes"] = config["recipe"]
    batches = config.get("gradient_accumulation_steps", 1)
    if "batch_size" in config:
        size = config["batch_size"] // batches
        count = batches // asked["chips"]
        layout = f"fsdp2,micro_batch={max(1, size)},micro_batches={max(1, count)},recompute=none"
        asked |= {"layout": layout, "program": "narrowgauge"}
    return asked
