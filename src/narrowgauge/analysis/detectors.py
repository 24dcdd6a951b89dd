"""Detectors: their fields, and a table with one detector per symptom.

A detector reads one metric of each row of ``steps.jsonl`` or ``gauges.jsonl``, and compares it with
a limit. It trips after a number of consecutive values beyond the limit. The limit is a number.
Where no number fits all models, it is a factor over earlier values. A condition reads other metrics
of the same tensor. A tripped detector is silent until the metric has recovered, so each occurrence
raises one event. :class:`~narrowgauge.analysis.alarms.Alarms` and the documentation read this
table. Its rows are in ``data/detectors.toml``.

Thresholds are published numbers where there are any. Some published thresholds raise alarms in
healthy runs. A condition restricts these. For example, a healthy cast to int8 or four bits rounds
half of a tensor to zero (measured: up to 74 % of the inputs of down_proj under mxfp4). Its
signal-to-noise ratio still stays above 12 dB, since the zeroed values are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from narrowgauge.analysis.thresholds import MIN_SQNR_DB
from narrowgauge.spec.toml import load_data

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Detector:
    """Describe one detector: its metric, its limit, and its advice.

    Args:
        kind: kind of its events, a key of :data:`narrowgauge.runs.events.KINDS`; without one in the
            table, its name.
        stage: one of :data:`narrowgauge.analysis.reading.STAGES`. A stage of the tensor's kind
            takes precedence.
        metric: ``table.metric`` of a row of ``gauges.jsonl``, or ``steps.metric``. One step metric
            needs several rows: ``halvings`` (of the loss scale, over ``window`` steps).
        threshold: limit of the metric. If ``relative``, a factor over a baseline of earlier values.
        message: text after the tensor's name.
        advice: next action. ``{module}`` is the tensor's module. ``{storage}`` is a storage that
            keeps updates. ``{compute}`` is a compute with more range.
        side: ``above`` trips at or above the threshold, ``below`` at or below it.
        consecutive: number of consecutive values beyond the limit before it trips.
        recovery: number of consecutive values on the good side of ``clears`` before it recovers.
        clears: factor of the limit.
        window: number of values for a step metric, or for the baseline of a relative threshold.
        lowest: use the lowest median of ``window`` values so far (for slow growth), not the latest
            (for a jump).
        floor: minimum of the baseline. Every healthy tensor may reach it.
        tensors: kinds of tensors; empty for all kinds of the table.
        condition: a key of :data:`CONDITIONS`.
    """

    name: str
    kind: str
    stage: str
    metric: str
    threshold: float
    message: str
    advice: str
    source: str
    side: Literal["above", "below"] = "above"
    consecutive: int = 1
    recovery: int = 3
    clears: float = 0.5
    window: int = 0
    relative: bool = False
    lowest: bool = False
    floor: float = 0.0
    tensors: Sequence[str] = ()
    condition: str = ""

    @property
    def table(self) -> str:
        return self.metric.partition(".")[0]

    @property
    def field(self) -> str:
        return self.metric.partition(".")[2]

    def applies(self, metrics: Metrics) -> bool:
        """Return whether the condition holds, or there is none."""
        return not self.condition or CONDITIONS[self.condition](metrics)

    def limit(self, baseline: float | None) -> float | None:
        """Return the limit.

        Return ``None`` for a relative threshold with an unknown or zero baseline.
        """
        if not self.relative:
            return self.threshold
        if baseline is None or max(baseline, self.floor) <= 0:
            return None
        return self.threshold * max(baseline, self.floor)

    def trips(self, value: float, limit: float) -> bool:
        """Return whether a value is beyond the limit."""
        return value >= limit if self.side == "above" else value <= limit

    def recovers(self, value: float, limit: float) -> bool:
        """Return whether a value is well on the good side of the limit."""
        good = self.clears * limit
        return value < good if self.side == "above" else value > good

    def excess(self, value: float, limit: float) -> float:
        """Return how far a value is beyond the limit, to find the worst of many.

        At least 1 if it trips.
        """
        if self.side == "below":
            value, limit = limit, value
        return value / limit if math.isfinite(value) and limit > 0 else math.inf


def _is_drowned(metrics: Metrics) -> bool:
    """Return whether rounding error dominates the operand."""
    sqnr = metrics.get("sqnr_db")
    return sqnr is not None and sqnr < MIN_SQNR_DB


def _is_cast(metrics: Metrics) -> bool:
    """Return whether a low-precision cast feeds this tensor to its matmul."""
    return metrics.get("sqnr_db") is not None


CONDITIONS: dict[str, Callable[[Metrics], bool]] = {"drowned": _is_drowned, "cast": _is_cast}
"""Conditions on the other metrics of a tensor."""


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


DETECTORS: dict[str, Detector] = {
    name: Detector(name, **{"kind": name.replace("-", "_"), **row})
    for name, row in load_data("detectors", "analysis").items()
}
"""All detectors by name. :class:`~narrowgauge.analysis.spikes.SpikeJudge` judges spikes.

Their threshold is its z.
"""

KINDS_OF_ALARMS = {"lost_updates", *(detector.kind for detector in DETECTORS.values())}
"""Kinds of events that the optimizer's audit and detectors raise."""
