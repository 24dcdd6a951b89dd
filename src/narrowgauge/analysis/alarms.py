"""Alarms: run all detectors over the rows of a run, and raise events.

:class:`Alarms` takes every row of ``steps.jsonl`` and ``gauges.jsonl`` and returns the events that
the row raises. It reads nothing else: no model, no clock, no random numbers. So the detectors can
also run over a finished run. A resumed run restores their state from its own rows. A rollback
deletes rows, and restores the state from the remaining rows.

Each occurrence raises one event. A tensor raises the same kind of event again only after it has
recovered. Many tensors may trip in one row. Then one event names the worst tensor and counts the
others.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median

from narrowgauge.analysis.detectors import DETECTORS, Detector, Metrics
from narrowgauge.analysis.reading import STAGE_OF, Reading
from narrowgauge.analysis.spikes import SpikeJudge
from narrowgauge.analysis.thresholds import SETTLING_STEPS
from narrowgauge.runs.finding import counted, sentences
from narrowgauge.runs.schema import METRICS, Row, gauge_metrics, number
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe


@dataclass
class _State:
    """The state of one detector for one tensor."""

    recent: deque[float]
    lowest: float | None = None
    num_bad: int = 0
    num_good: int = 0
    is_active: bool = False

    def update(self, detector: Detector, trips: bool, recovers: bool) -> bool:
        """Count one value. Return whether this value makes the detector active."""
        self.num_bad += 1
        self.num_good += 1
        if not trips:
            self.num_bad = 0
        if not recovers:
            self.num_good = 0
        begins = not self.is_active and self.num_bad >= detector.consecutive
        self.is_active = begins or (self.is_active and self.num_good < detector.recovery)
        return begins

    def remember(self, value: float) -> None:
        """Remember a value, and the lowest median of full windows so far."""
        self.recent.append(value)
        if len(self.recent) == self.recent.maxlen:
            middle = median(self.recent)
            if self.lowest is None or middle < self.lowest:
                self.lowest = middle


@dataclass(frozen=True)
class _Trip:
    """A detector that became active."""

    detector: Detector
    tensor: str | None
    value: float
    limit: float
    spike: str = ""

    @property
    def excess(self) -> float:
        """Return how bad it is. One value that is not finite is as bad as many."""
        if self.detector.field == "nonfinite":
            return 1.0
        return self.detector.excess(self.value, self.limit)


class Alarms:
    """Run all detectors over the rows of a run.

    Invariant: the events depend only on the arguments and on the rows, in their order. Rows of
    steps and rows of gauges are independent, so their interleaving does not matter.

    Args:
        recipe: recipe of the run, as for :func:`narrowgauge.prepare`; ``None`` if unknown.

    Cost: about 35 µs per step, and 20 µs per tensor of a row of gauges.

    Example:
        >>> import narrowgauge as ng
        >>> alarms = ng.analysis.Alarms("bfloat16/naive")
        >>> events = alarms.on_gauges({"step": 20, "attention": {"layers.0.attn": [250.0]}})
        >>> print(events[0].advice.partition(". ")[0])
        layers.0.attn has attention logits up to 250 (threshold 100)
    """

    def __init__(self, recipe: str | Path | Recipe | None = None) -> None:
        self.recipe = None if recipe is None else parse(recipe)
        self.judge = SpikeJudge()
        """Judges spikes against all steps so far."""
        self._loss_scales: deque[float] = deque(maxlen=DETECTORS["scale-halvings"].window + 1)
        self._states: dict[tuple[str, str | None], _State] = {}

    def read(self, steps: Iterable[Row], gauges: Iterable[Row]) -> list[Reading]:
        """Read the rows of ``steps.jsonl`` and ``gauges.jsonl``, and return their events."""
        events = []
        for row in steps:
            events += self.on_step(row)
        for row in gauges:
            events += self.on_gauges(row)
        return events

    def on_step(self, row: Row) -> list[Reading]:
        """Read a row of ``steps.jsonl``, and return the events that it raises.

        Pass rows in the order of their steps.
        """
        loss = number(row.get("loss"))
        norm = number(row.get("grad_norm"))
        trips = self._trips("steps", None, self._step_metrics(row, loss, norm))
        if loss is None:
            loss = math.nan
        spikes = {"loss-spike": self.judge.loss(loss), "gradient-spike": self.judge.norm(norm)}
        for name, spike in spikes.items():
            detector = DETECTORS[name]
            begins = self._state(detector, None).update(detector, spike is not None, spike is None)
            if begins and spike is not None:
                trips.append(_Trip(detector, None, spike.value, spike.threshold, spike.message))
        self.judge.add(loss, norm, spiked=any(spikes.values()))
        return self._events(int(row.get("step", 0)), trips)

    def _step_metrics(self, row: Row, loss: float | None, norm: float | None) -> Metrics:
        """Return the metrics of one step."""
        scale = number(row.get("loss_scale"))
        # Gradients overflow while the run searches for a loss scale.
        is_searching = scale is not None and bool(row.get("skipped"))
        is_wrong = loss is not None and not math.isfinite(loss)
        if norm is not None and not is_searching:
            is_wrong = is_wrong or not math.isfinite(norm)
        metrics: dict[str, float | None] = {"nonfinite": float(is_wrong)}
        if scale is None:
            return metrics
        if row.get("step", 0) > SETTLING_STEPS:
            self._loss_scales.append(scale)
        halvings = 0.0
        for before, after in pairwise(self._loss_scales):
            if before > after > 0:
                halvings += math.log2(before / after)
        return metrics | {"loss_scale": scale, "halvings": halvings}

    def on_gauges(self, row: Row) -> list[Reading]:
        """Read a row of ``gauges.jsonl``, and return its events: at most one per detector, for the
        worst tensor.

        Args:
            row: the new row of ``gauges.jsonl``. Pass rows in the order of
                their steps.
        """
        trips: list[_Trip] = []
        for table, name, metrics in gauge_metrics(row):
            trips += self._trips(table, name, metrics)
        return self._events(int(row.get("step", 0)), trips)

    def _trips(self, table: str, name: str | None, metrics: Metrics) -> list[_Trip]:
        """Pass the metrics of one tensor to the detectors of its table.

        Return the trips that begin.
        """
        trips = []
        kind = (name or "").partition(":")[0]
        for detector in _BY_TABLE.get(table, ()):
            value = metrics.get(detector.field)
            is_read = not detector.tensors or kind in detector.tensors
            if not is_read or value is None or math.isnan(value):
                continue
            state = self._state(detector, name)
            limit = detector.limit(state.lowest)
            if detector.relative:
                state.remember(value)
            if limit is None:
                continue
            applies = detector.applies(metrics)
            is_beyond = applies and detector.trips(value, limit)
            recovers = not applies or detector.recovers(value, limit)
            if state.update(detector, is_beyond, recovers):
                trips.append(_Trip(detector, name, value, limit))
        return trips

    def _state(self, detector: Detector, name: str | None) -> _State:
        key = (detector.name, name)
        if key not in self._states:
            self._states[key] = _State(deque(maxlen=detector.window))
        return self._states[key]

    def _events(self, step: int, trips: list[_Trip]) -> list[Reading]:
        groups: dict[str, list[_Trip]] = {}
        for trip in trips:
            groups.setdefault(trip.detector.name, []).append(trip)
        return [self._event(step, group) for group in groups.values()]

    def _event(self, step: int, group: list[_Trip]) -> Reading:
        # Of equally bad tensors a weight comes first: what is computed from it is as bad.
        worst = max(group, key=lambda t: (t.excess, (t.tensor or "").startswith("weight:")))
        detector = worst.detector
        name = worst.tensor or ""
        kind, _, parameter = name.rpartition(":")
        module = parameter.removesuffix(".weight").removesuffix(".bias")
        values: dict[str, object] = {
            "value": worst.value,
            "limit": worst.limit,
            "spike": worst.spike,
            "module": module or "the layer",  # as a recipe's pattern names it
            "storage": "word",
            "compute": "bfloat16",
        }
        if self.recipe is not None:
            values["storage"] = self.recipe.storage.fallback
            values["compute"] = self.recipe.compute.fallback
        message = f"{name} {detector.message}".strip().format(**values)
        num_others = len({trip.tensor for trip in group}) - 1
        if num_others:
            message += f"; the same holds for {counted(num_others, 'more tensor')}"
        stage = STAGE_OF.get(kind, detector.stage)
        advice = sentences(message, detector.advice.format(**values))
        return Reading(step, stage, name, detector.name, worst.value, None, worst.limit, advice)


_BY_TABLE: dict[str, list[Detector]] = {table: [] for table in (*METRICS, "steps")}
for _detector in DETECTORS.values():
    _BY_TABLE[_detector.table].append(_detector)
