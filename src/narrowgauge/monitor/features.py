"""Symptoms: the figures that detectors read, taken from the rows of a run.

Most stand in the rows as they are. Some follow from several figures (an EDQ of NaN means that nothing was intended) or
from several rows: how often the loss scale was halved lately, which share of the steps was skipped, and how far the loss and
the gradient norm have climbed.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from narrowgauge.monitor.change_points import DriftJudge
from narrowgauge.monitor.conditions import Figures
from narrowgauge.monitor.detectors import DETECTORS
from narrowgauge.monitor.spikes import Spike
from narrowgauge.runs.schema import METRICS, Row

SETTLING_STEPS = 100
"""Steps at the beginning in which a loss scale is still being found: halvings and skips are not counted."""


@dataclass
class StepFigures:
    """Works out the figures of steps: what they need to know of the steps before."""

    scales: deque[float] = field(default_factory=lambda: deque(maxlen=DETECTORS["scale-halvings"].window + 1))
    skips: deque[bool] = field(default_factory=lambda: deque(maxlen=DETECTORS["scale-skips"].window))
    losses: DriftJudge = field(default_factory=DriftJudge)
    norms: DriftJudge = field(default_factory=DriftJudge)

    def figures(self, row: Row, spikes: Sequence[Spike | None] = (None, None)) -> Figures:
        """The figures of one step, the spikes aside.

        Args:
            row: of ``steps.jsonl``.
            spikes: whether its loss and its gradient norm were judged spikes: then they do not count for a climb.
        """
        return {**self._drifts(row, *spikes), **self._failures(row)}

    def _drifts(self, row: Row, loss_spike: Spike | None, norm_spike: Spike | None) -> Figures:
        """How far the loss has climbed, in nats, and the gradient norm, as a factor; at the end of each block of steps."""
        loss, norm = number(row.get("loss")), number(row.get("grad_norm"))
        climb = growth = None
        if loss_spike is None and loss is not None and math.isfinite(loss):
            climb = self.losses.add(loss)
        if norm_spike is None and norm is not None and math.isfinite(norm) and norm > 0:
            growth = self.norms.add(math.log(norm))
        return {"climb": climb, "growth": None if growth is None else math.exp(min(growth, 700.0))}

    def _failures(self, row: Row) -> Figures:
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
        The binary logarithm of all its falls together; rises do not count.
    Example:
        >>> halvings([8.0, 4.0, 4.0, 8.0, 2.0])
        3.0
    """
    return sum(math.log2(before / after) for before, after in pairwise(scales) if before > after > 0)


def gauge_figures(row: Row) -> Iterator[tuple[str, str | None, dict[str, float | None]]]:
    """Every table's figures of every tensor, by field."""
    for table, names in METRICS.items():
        for name, values in (row.get(table) or {}).items():
            figures: dict[str, float | None] = dict(zip(names, map(number, values), strict=False))
            if table == "updates" and (edq := figures.get("edq")) is not None:
                figures["intended"] = 0.0 if math.isnan(edq) else 1.0
            if table == "attention":
                figures["nonfinite"] = float(not is_finite(figures.get("max_logit")))
            yield table, name, figures
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
    """A figure as a float; ``None`` for what is none."""
    return float(value) if isinstance(value, (int, float)) else None


def is_finite(value: float | None) -> bool:
    """Whether a figure is no NaN and not infinite; one that is missing is neither."""
    return value is None or math.isfinite(value)
