"""Tell one measured run, and get the next: of another size, length, batch, precision or number of
chips.

Two numbers of the measured run correct the plan of the next one::

    rate = planned rate of the next x (measured rate / planned rate of the run) ** TRUST
    peak = counted tensors of the next + HALF * (measured peak - counted tensors of the run)

Both are shrunk, because a part of every difference is the run's own. If nothing differs, the answer
is what was measured. The numbers and the intervals are of pairs of published runs
(``benchmarks/published_runs.py --next``).
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from narrowgauge.errors import DataError, NarrowgaugeError
from narrowgauge.planner.estimate import ERRORS, Ends, Estimate
from narrowgauge.planner.layouts import read_values
from narrowgauge.planner.memory import outside_bytes
from narrowgauge.planner.plan import machines_of, plan
from narrowgauge.runs.record import read_run
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.tables import Row
from narrowgauge.spec.toml import read_file
from narrowgauge.spec.values import require_number

TRUST = 0.8
HALF = 0.5
SAME = "nothing differs: this is the run you gave"
BEYOND = "length beyond 4 times"
_TRUSTS = {SAME: 1.0, BEYOND: 0.0}
_SHAPE = ("tensor", "pipeline", "interleave", "context", "expert", "zero", "accumulation_dtype")
_NUMBERS = ("chips", "sequence_length", "tokens_per_step", "tokens_per_second", "peak_gb", "lora")
_ADVICE = (
    "Name a run folder or a TOML file, or write the run in quotes: "
    "'model=llama-8b chip=H100-SXM chips=8 tokens_per_second=53336'."
)


def difference_of(run: Estimate, job: Estimate) -> str:
    """Name what differs most between two jobs: a row of ``next`` in ``data/errors.toml``."""
    longer = abs(math.log2(job.sequence_length / run.sequence_length))
    if run == job:
        return SAME
    if job.kind == "mixture":
        return "mixture"
    if longer:
        return BEYOND if longer > 2 else "length to 4 times"
    if job.architecture.num_parameters != run.architecture.num_parameters:
        return "another size"
    if abs(math.log2(job.cluster.chips / run.cluster.chips)) > 4:
        return "chips beyond 16 times"
    return "layout, batch, precision, chips to 16 times"


def _around(value: float, difference: str) -> Ends:
    """Return the 80 % interval of a plan that differs so from a measured run."""
    wider = 1 + ERRORS["next"][difference]
    return value / wider, value * wider


def _reservable_gb(job: Estimate) -> float:
    """Return the memory of a chip that the framework's allocator can reserve, in 10^9 bytes."""
    return (job.chip.memory_bytes - outside_bytes(job.cluster.chips)) / 1e9


def _described(job: Estimate) -> str:
    words = job.architecture.name, job.cluster.name, f"{job.sequence_length:,} tokens"
    return ", ".join((*words, job.recipe.name, job.program.text))


class Next(NamedTuple):
    """Hold the plan of a run, as a measured run corrects it.

    ``job`` is its plan before that, and ``difference`` what differs most from the measured run. The
    rate is of all chips, the peak of the fullest chip as the measured run counts it, in
    10^9 bytes; the intervals hold 80 %.
    """

    job: Estimate
    difference: str
    tokens_per_second: float
    rate_interval: Ends
    peak_gb: float
    peak_interval: Ends
    fits: str

    def row(self) -> Row:
        """Return plain values, for JSON."""
        row = self._asdict()
        return {**row.pop("job").row(), **row}

    def __str__(self) -> str:
        slow, fast = self.rate_interval
        low, high = self.peak_interval
        if self.difference == SAME:
            return f"next  {SAME}, at {self.tokens_per_second:,.0f} tokens/s"
        return (
            f"next  {_described(self.job)}\n"
            f"      {self.tokens_per_second:,.0f} tokens/s, 80 % {slow:,.0f}–{fast:,.0f} ({self.difference})\n"
            f"      {self.peak_gb:.1f} GB a chip, 80 % {low:.1f}–{high:.1f}; fits: {self.fits}\n"
            f"      {self.job.layout}"
        )


class MeasuredRun:
    """A run that was measured, asked as of :func:`narrowgauge.plan`.

    Args:
        model, asked: the question, as of :func:`narrowgauge.plan`.
        tokens_per_second: of all chips.
        peak_gb: memory that the framework's allocator printed for the fullest chip, in 10^9 bytes;
            0 if it is not known.

    Example:
        >>> run = MeasuredRun("llama-8b", chip="H100-SXM", chips=8, tokens_per_second=53_336)
        >>> run.next(chips=16).difference
        'layout, batch, precision, chips to 16 times'
    """

    def __init__(
        self, model: Any, *, tokens_per_second: float, peak_gb: float = 0.0, **asked: Any
    ) -> None:
        require_number("tokens_per_second", tokens_per_second, is_open=True)
        require_number("peak_gb", peak_gb)
        self.asked = {"model": model, **asked}
        self.tokens_per_second = tokens_per_second
        self.peak_gb = peak_gb
        self.job = plan(**self.asked, advise=False).best
        self.counted_gb = self.job.allocated_bytes / 1e9
        self.ratio = tokens_per_second / self.job.tokens_per_second
        if self.job.mfu * self.ratio > 1:
            raise DataError(
                f"Cannot plan from {tokens_per_second:,.0f} tokens/s: that is more than the peak of "
                f"{self.job.cluster.name}.",
                "Name the tokens per second of all chips.",
            )

    @property
    def assumed(self) -> dict[str, str]:
        """Return what the question did not name, as it was planned."""
        job = self.job
        values = {
            "sequence_length": job.sequence_length,
            "recipes": job.recipe.name,
            "program": job.program.name,
            "layout": job.layout,
        }
        return {name: str(value) for name, value in values.items() if not self.asked.get(name)}

    def next(self, **changes: Any) -> Next:
        """Plan another run, in this one's layout if it fits, else in the fastest that does. What
        ``changes`` do not name is this run's.
        """
        is_same = changes.items() <= self.asked.items()
        job = self.job if is_same else self._planned(changes)
        difference = difference_of(self.job, job)
        rate = job.tokens_per_second * math.pow(self.ratio, _TRUSTS.get(difference, TRUST))
        peak = self.peak_of(job)
        peaks = _around(peak, "memory")
        fits = "no"
        if peak <= _reservable_gb(job):
            fits = "yes" if peaks[1] <= _reservable_gb(job) else "barely"
        return Next(job, difference, rate, _around(rate, difference), peak, peaks, fits)

    def peak_of(self, job: Estimate) -> float:
        """Return the peak of a job in 10^9 bytes, as this run's was counted."""
        counted = job.allocated_bytes / 1e9
        if not self.peak_gb:
            return counted
        share = 1.0 if job == self.job else HALF
        return counted + share * (self.peak_gb - self.counted_gb)

    def _planned(self, changes: dict[str, Any]) -> Estimate:
        """Return a plan in this run's layout, if that is known and fits; else in the fastest."""
        asked = {"layout": {}, **self.asked, **changes}
        layout = self.job.layout
        if "tokens_per_step" not in changes:  # as many a chip, and a sequence a replica
            names = "cluster", "chip", "chips"
            machine = next(machines_of(*(asked.get(name, ()) for name in names)))
            length: int = asked.get("sequence_length") or self.job.sequence_length
            least = max(self.job.tokens_per_step, length * layout.num_replicas)
            asked["tokens_per_step"] = max(length, least * machine.chips / self.job.cluster.chips)
        if self.asked.get("layout") and "layout" not in changes:
            shape = {name: getattr(layout, name) for name in _SHAPE}
            batch = {"micro_batch": layout.micro_batch, "recompute": layout.recompute}
            for fields in ({**shape, **batch}, shape):
                with contextlib.suppress(NarrowgaugeError):  # it does not divide model or chips
                    job = plan(**{**asked, "layout": fields}, advise=False).best
                    if self.peak_of(job) <= _reservable_gb(job):
                        return job
            asked["layout"] = {}
        return plan(**asked, advise=False).best

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


def read_question(words: Iterable[str]) -> dict[str, Any]:
    """Read ``NAME=VALUE``: arguments of :class:`MeasuredRun`."""
    asked = read_values(words)
    return {name: value if name in _NUMBERS else str(value) for name, value in asked.items()}


def read_measured(text: str) -> MeasuredRun:
    """Read a measured run: a run folder, a TOML file with the arguments of :class:`MeasuredRun`, or
    these arguments themselves, ``NAME=VALUE`` between spaces.

    In a file ``log`` may name a run folder or the log of another program instead of
    ``tokens_per_second``.
    """
    path = Path(text)
    asked: dict[str, Any] = {}
    if path.suffix == ".toml" and path.exists():
        asked = read_file(path, "measured run", _ADVICE)
        path = path.parent / asked.pop("log", "")
    elif "=" in text:
        asked = read_question(text.split())
    elif not path.exists():
        raise DataError(f"Cannot plan from {text} because it is not there.", _ADVICE)
    if "tokens_per_second" not in asked and path.exists():
        asked = {**_of_log(path), **asked}
    for name in ("model", "tokens_per_second"):
        if not asked.get(name):
            raise DataError(f"Cannot plan from {text} because it does not say its {name}.", _ADVICE)
    return MeasuredRun(**asked)


def _of_log(path: Path) -> dict[str, Any]:
    """Return what a run folder, or the log of another program, says of a run."""
    run = read_run(path)
    rates = [row["tokens_per_second"] for row in run.steps if row.get("tokens_per_second")]
    peaks = [row["peak_memory_bytes"] for row in run.steps if row.get("peak_memory_bytes")]
    asked: dict[str, Any] = {"peak_gb": max(peaks, default=0) / 1e9}
    if rates:
        asked["tokens_per_second"] = median(rates)
    if run.is_foreign:
        return asked
    config = run.config
    machine = run.run.get("machine", {})
    asked["chips"] = machine.get("ranks", 1)
    for name, chip in CHIPS.items():
        if chip.device and chip.device == machine.get("device"):
            asked["chip"] = name
    if "gradient_accumulation_steps" in config:  # of narrowgauge train
        batches = config["gradient_accumulation_steps"]
        batch = config["batch_size"] // batches, max(1, batches // asked["chips"])
        asked["layout"] = "fsdp2,micro_batch={},micro_batches={},recompute=none".format(*batch)
        asked["program"] = "narrowgauge"
        asked["recipes"] = config["recipe"]
        for name in ("model", "sequence_length"):
            asked[name] = config[name]
    return asked
