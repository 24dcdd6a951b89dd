"""A step of a training loop as plain numbers: what the hooks measure, what a record holds, and what
the laws read.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import asdict, dataclass, field
from typing import Any

from narrowgauge.runs.schema import Row, gauge_metrics, number

Metrics = dict[str, dict[str, float | None]]
"""Metrics of each tensor, by name."""


@dataclass(frozen=True)
class Step:
    """Hold the numbers of one step. What was not measured is ``None`` or empty, and its laws are silent.

    Args:
        step: optimizer steps done.
        loss: of the step, of this rank.
        rate: the largest learning rate of all groups.
        grad_norm: of all gradients before a clip, as the loop or the optimizer gives it.
        skipped: the update was not applied.
        limit: norm to which the loop clips, as it was declared.
        arrived: norm of the gradients that reach the update.
        zero: tensors whose gradient is exactly zero or missing.
        bad: tensors whose gradient is not finite, in the order of backward.
        bad_weight: a weight of the model that was not finite before the step.
        kept: backward began with the gradient of the step before.
        stored: of the tensors whose turn it is, the fraction of the update that their formats stored.
        largest: largest change of a sampled weight beyond one rounding; ``largest_in`` is its tensor.
        apart, unsummed: tensors whose weights, and whose gradients, differ between ranks.
        utilization: share of the device's time, in logs of other programs.
        gauges: a sample of the gauges: metrics by table and tensor.
    """

    step: int
    loss: float | None = None
    rate: float | None = None
    grad_norm: float | None = None
    skipped: float | None = None
    loss_scale: float | None = None
    tokens_per_second: float | None = None
    seconds: float | None = None
    utilization: float | None = None
    limit: float | None = None
    arrived: float | None = None
    zero: list[str] = field(default_factory=list)
    bad: list[str] = field(default_factory=list)
    bad_weight: str = ""
    kept: float | None = None
    stored: dict[str, float] = field(default_factory=dict)
    largest: float | None = None
    largest_in: str = ""
    apart: list[str] = field(default_factory=list)
    unsummed: list[str] = field(default_factory=list)
    gauges: dict[str, Metrics] = field(default_factory=dict)

    @classmethod
    def of(cls, row: Row) -> Step:
        """Return the step of a row of ``steps.jsonl`` or of another program's log."""
        values: dict[str, Any] = {}
        for name, nothing in _NOTHING.items():
            value = row.get(name)
            if nothing is None:
                values[name] = number(value)
            elif isinstance(value, type(nothing)):
                values[name] = value
        return cls(row["step"], **values)

    @classmethod
    def of_gauges(cls, row: Row) -> Step:
        """Return a row of ``gauges.jsonl`` as a step, which no other law counts."""
        tables: dict[str, Metrics] = {}
        for table, name, metrics in gauge_metrics(row):
            tables.setdefault(table, {})[name] = metrics
        return cls(row["step"], gauges=tables)


Tell = Callable[..., None]
"""Takes a reading: its kind, tensors, value, expected and bound, and its step if it is not the current."""
Law = Generator[None, Step, None]
"""Takes steps, in their order, and gives the readings of each."""
_NOTHING = asdict(Step(0))
del _NOTHING["step"]
