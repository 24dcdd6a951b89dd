"""Detectors: their fields, and a table with one detector per symptom.

A detector reads one metric of each row of ``steps.jsonl`` or ``gauges.jsonl``, and compares it with
a limit. It trips after a number of consecutive values beyond the limit. The limit is a number.
Where no number fits all models, it is a factor over earlier values. A tripped detector is silent
until the metric has recovered, so each occurrence raises one event.
:class:`~narrowgauge.analysis.alarms.Alarms` and the documentation read this table. Its rows are in
``data/detectors.toml``.

Thresholds are published numbers where there are any. Some published thresholds raise alarms in
healthy runs. So some detectors read casts alone, or noisy ones. For example, a healthy cast to int8
or four bits rounds half of a tensor to zero (measured: up to 74 % of the inputs of down_proj under
mxfp4). Its signal-to-noise ratio still stays above 12 dB, since the zeroed values are small.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from narrowgauge.spec.toml import load_data

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Detector:
    """Describe one detector: its metric, its limit, and its advice.

    Args:
        stage: one of :data:`narrowgauge.analysis.reading.STAGES`. A stage of the tensor's kind
            takes precedence.
        metric: ``table.metric`` of a row of ``gauges.jsonl``, or ``steps.metric``. One step metric
            needs several rows: ``halvings`` (of the loss scale, over ``window`` steps).
        threshold: limit of the metric. If ``relative``, a factor over the lowest median of
            ``window`` values so far.
        message: text after the tensor's name.
        advice: next action. ``{module}`` is the tensor's module. ``{storage}`` is a storage that
            keeps updates. ``{compute}`` is a compute with more range.
        side: ``above`` trips at or above the threshold, ``below`` at or below it.
        consecutive: number of consecutive values beyond the limit before it trips.
        recovery: number of consecutive values on the good side of ``clears`` before it recovers.
        clears: factor of the limit.
        window: number of values for a step metric, or for a median.
        floor: least such median. Every healthy tensor may reach it.
        tensors: kinds of tensors; empty for all kinds of the table.
        max_sqnr_db: largest signal-to-noise ratio of the tensor's cast; a tensor without a cast
            does not trip then.
    """

    name: str
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
    floor: float = 0.0
    tensors: Sequence[str] = ()
    max_sqnr_db: float | None = None

    @property
    def table(self) -> str:
        return self.metric.partition(".")[0]

    @property
    def field(self) -> str:
        return self.metric.partition(".")[2]

    def applies(self, metrics: Metrics) -> bool:
        """Return whether the tensor's cast is as noisy as the detector asks."""
        sqnr = metrics.get("sqnr_db")
        return self.max_sqnr_db is None or (sqnr is not None and sqnr <= self.max_sqnr_db)

    def limit(self, lowest: float | None) -> float | None:
        """Return the limit; ``None`` for a relative threshold without a median."""
        if not self.relative:
            return self.threshold
        if lowest is None:
            return None
        return self.threshold * max(lowest, self.floor)

    def trips(self, value: float, limit: float) -> bool:
        """Return whether a value is beyond the limit."""
        if self.side == "above":
            return value >= limit
        return value <= limit

    def recovers(self, value: float, limit: float) -> bool:
        """Return whether a value is well on the good side of the limit."""
        good = self.clears * limit
        if self.side == "above":
            return value < good
        return value > good

    def excess(self, value: float, limit: float) -> float:
        """Return how far a value is beyond the limit, to find the worst of many.

        At least 1 if it trips.
        """
        if self.side == "below":
            value, limit = limit, value
        return value / limit if math.isfinite(value) and limit > 0 else math.inf


# ── the table ─────────────────────────────────────────────────────────────────────────────────────


DETECTORS: dict[str, Detector] = {
    name: Detector(name, **row) for name, row in load_data("detectors", "analysis").items()
}
"""All detectors by name. :class:`~narrowgauge.analysis.spikes.SpikeJudge` judges spikes.

Their threshold is its z.
"""
