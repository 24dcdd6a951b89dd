"""Features: the metrics that detectors read, taken from the rows of a run.

Most are columns of the rows. Some follow from several metrics (an EDQ of NaN means that no update was intended) or from
several rows: how often the loss scale was halved recently, which share of the steps was skipped, and how far the loss and the
gradient norm have climbed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from narrowgauge.analysis.monitor.change_points import DriftJudge
from narrowgauge.analysis.monitor.conditions import Metrics
from narrowgauge.analysis.monitor.detectors import DETECTORS
from narrowgauge.analysis.monitor.spikes import Spike
from narrowgauge.runs.schema import METRICS, Row

SETTLING_STEPS = 100
"""Steps at the beginning while the loss scale settles: halvings and skips are not counted."""


@dataclass
class StepMetrics:
    """Computes the metrics of steps, with the state of earlier steps that they need."""

    scales: deque[float] = field(default_factory=lambda: deque(maxlen=DETECTORS["scale-halvings"].window + 1))
    skips: deque[bool] = field(default_factory=lambda: deque(maxlen=DETECTORS["scale-skips"].window))
    losses: DriftJudge = field(default_factory=DriftJudge)
    norms: DriftJudge = field(default_factory=DriftJudge)

    def metrics(self, row: Row, spikes: Sequence[Spike | None] = (None, None)) -> Metrics:
        """The metrics of one step, except for spikes.

        Args:
            row: of ``steps.jsonl``.
            spikes: of its loss and its gradient norm; a spike does not count for a climb.
        """
        return {**self._drifts(row, *spikes), **self._failures(row)}

    def _drifts(self, row: Row, loss_spike: Spike | None, norm_spike: Spike | None) -> Metrics:
        """The climb of the loss, in nats, and of the gradient norm, as a factor, at the end of each block of steps."""
        loss, norm = number(row.get("loss")), number(row.get("grad_norm"))
        climb = growth = None
        if loss_spike is None and loss is not None and math.isfinite(loss):
            climb = self.losses.add(loss)
        if norm_spike is None and norm is not None and math.isfinite(norm) and norm > 0:
            growth = self.norms.add(math.log(norm))
        return {"climb": climb, "growth": None if growth is None else math.exp(min(growth, 700.0))}

    def _failures(self, row: Row) -> Metrics:
        loss, norm, scale = number(row.get("loss")), number(row.get("grad_norm")), number(row.get("loss_scale"))
        searching = scale is not None and bool(row.get("skipped"))
        wrong = not is_finite(loss) or not (searching or is_finite(norm))
        if scale is None:
            return {"nonfinite": float(wrong)}
        if row.get("step", 0) > SETTLING_STEPS:
            self.scales.append(scale)
            self.skips.append(bool(row.get("skipped")))
        enough = len(self.skips) == self.skips.maxlen
        return {
            "nonfinite": float(wrong),
            "loss_scale": scale,
            "halvings": halvings(self.scales),
            "skipped": sum(self.skips) / len(self.skips) if enough else None,
        }


def halvings(scales: Iterable[float]) -> float:
    """How often a loss scale was halved.

    Args:
        scales: of consecutive steps.
    Returns:
        The binary logarithm of the product of its decreases; increases do not count.
    Example:
        >>> halvings([8.0, 4.0, 4.0, 8.0, 2.0])
        3.0
    """
    return sum(math.log2(before / after) for before, after in pairwise(scales) if before > after > 0)


def gauge_metrics(row: Row) -> Iterator[tuple[str, str | None, dict[str, float | None]]]:
    """The metrics of every tensor in a row of ``gauges.jsonl``: table, tensor, and values by name."""
    for table, names in METRICS.items():
        for name, values in (row.get(table) or {}).items():
            metrics: dict[str, float | None] = dict(zip(names, map(number, values), strict=False))
            if table == "updates" and (edq := metrics.get("edq")) is not None:
                metrics["intended"] = 0.0 if math.isnan(edq) else 1.0
            if table == "attention":
                metrics["nonfinite"] = float(not is_finite(metrics.get("max_logit")))
            yield table, name, metrics
    logits = {name: number(value) for name, value in (row.get("logits") or {}).items()}
    if logits:
        log_z = logits.get("log_z")
        distance = None if log_z is None else abs(log_z)
        yield (
            "logits",
            None,
            {**logits, "log_z": distance, "nonfinite": float(not all(map(is_finite, logits.values())))},
        )


def number(value: Any) -> float | None:
    """A number as a float; ``None`` for anything else."""
    return float(value) if isinstance(value, (int, float)) else None


def is_finite(value: float | None) -> bool:
    """Whether a value is neither NaN nor infinite; a missing one is finite."""
    return value is None or math.isfinite(value)
