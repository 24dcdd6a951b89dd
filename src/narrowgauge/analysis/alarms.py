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

from narrowgauge.analysis.detectors import DETECTORS, Detector, Facts, Metrics
from narrowgauge.analysis.reading import STAGE_OF
from narrowgauge.analysis.spikes import SpikeJudge
from narrowgauge.analysis.thresholds import FEWEST_VALUES, SETTLING_STEPS
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import METRICS, Row, gauge_metrics, number
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe

# Forward before backward: among equally bad tensors, name the tensor that was computed first.
_ORDER = ("weight", "input", "output", "output_grad", "grad")


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
        self.num_bad = self.num_bad + 1 if trips else 0
        self.num_good = self.num_good + 1 if recovers else 0
        begins = not self.is_active and self.num_bad >= detector.consecutive
        self.is_active = begins or (self.is_active and self.num_good < detector.recovery)
        return begins

    def baseline(self, detector: Detector) -> float | None:
        """Return the median of earlier values, or the lowest median so far."""
        if detector.lowest:
            return self.lowest
        return median(self.recent) if len(self.recent) >= FEWEST_VALUES else None

    def remember(self, detector: Detector, value: float) -> None:
        self.recent.append(value)
        if detector.lowest and len(self.recent) == detector.window:
            middle = median(self.recent)
            self.lowest = middle if self.lowest is None else min(self.lowest, middle)


@dataclass(frozen=True)
class _Trip:
    """A detector that became active."""

    detector: Detector
    tensor: str | None
    value: float
    limit: float
    spike: str = ""

    @property
    def rank(self) -> tuple[float, int]:
        """Return a sort key: worse trips come first."""
        kind = (self.tensor or "").partition(":")[0]
        order = _ORDER.index(kind) if kind in _ORDER else len(_ORDER)
        # One non-finite value is as bad as many, so the first tensor with one is the worst.
        excess = (
            1.0
            if self.detector.kind == "nonfinite"
            else self.detector.excess(self.value, self.limit)
        )
        return -excess, order


class Alarms:
    """Run all detectors over the rows of a run.

    Invariant: the events depend only on the arguments and on the rows, in their order. Rows of
    steps and rows of gauges are independent, so their interleaving does not matter.

    Args:
        recipe: recipe of the run, as for :func:`narrowgauge.prepare`; ``None`` if unknown.
        is_audited: the optimizer's audit raises ``lost_updates`` for this run. Then detectors do
            not.

    Cost: about 35 µs per step, and 20 µs per tensor of a row of gauges.

    Example:
        >>> import narrowgauge as ng
        >>> alarms = ng.analysis.Alarms("bfloat16/naive")
        >>> for step in (20, 40, 60):
        ...     events = alarms.on_gauges({"step": step, "updates": {"model.norm.weight": [0.2, 0.9, 0.8, 0.8, 0, 0]}})
        >>> print(events[0].message, "|", events[0].advice)
        model.norm.weight stores only 20% of its update (threshold 90%); the rest is rounded away | Use storage 'word', which
        keeps what this one rounds away.
    """

    def __init__(
        self, recipe: str | Path | Recipe | None = None, *, is_audited: bool = False
    ) -> None:
        parsed = None if recipe is None else parse(recipe)
        scales_loss = parsed is not None and any(compute.scales_loss for compute in parsed.computes)
        self.facts = Facts(parsed, scales_loss, is_audited)
        self.judge = SpikeJudge()
        """Judges spikes against all steps so far."""
        self._loss_scales: deque[float] = deque(maxlen=DETECTORS["scale-halvings"].window + 1)
        self._states: dict[tuple[str, str | None], _State] = {}

    def read(self, steps: Iterable[Row], gauges: Iterable[Row]) -> list[Event]:
        """Read the rows of ``steps.jsonl`` and ``gauges.jsonl``, and return their events."""
        events = [event for row in steps for event in self.on_step(row)]
        return events + [event for row in gauges for event in self.on_gauges(row)]

    def on_step(self, row: Row) -> list[Event]:
        """Read a row of ``steps.jsonl``, and return the events that it raises.

        Pass rows in the order of their steps.
        """
        loss = number(row.get("loss"))
        norm = number(row.get("grad_norm"))
        loss = math.nan if loss is None else loss
        trips = self._trips("steps", None, self._step_metrics(row))
        spikes = {"loss-spike": self.judge.loss(loss), "gradient-spike": self.judge.norm(norm)}
        for name, spike in spikes.items():
            begins = self._state(DETECTORS[name], None).update(
                DETECTORS[name], spike is not None, spike is None
            )
            if begins and spike is not None:
                trips.append(
                    _Trip(DETECTORS[name], None, spike.value, spike.threshold, spike.message)
                )
        self.judge.add(loss, norm, spiked=any(spikes.values()))
        return self._events(int(row.get("step", 0)), trips)

    def _step_metrics(self, row: Row) -> Metrics:
        """Return the metrics of one step."""
        loss, norm, scale = (number(row.get(name)) for name in ("loss", "grad_norm", "loss_scale"))
        # Gradients overflow while the run searches for a loss scale.
        is_searching = scale is not None and bool(row.get("skipped"))
        values = [value for value in (loss, None if is_searching else norm) if value is not None]
        is_wrong = not all(map(math.isfinite, values))
        metrics: dict[str, float | None] = {
            "nonfinite": float(is_wrong),
        }
        if scale is not None:
            if row.get("step", 0) > SETTLING_STEPS:
                self._loss_scales.append(scale)
            falls = [
                math.log2(before / after)
                for before, after in pairwise(self._loss_scales)
                if before > after > 0
            ]
            metrics |= {"loss_scale": scale, "halvings": sum(falls, 0.0)}
        return metrics

    def on_gauges(self, row: Row) -> list[Event]:
        """Read a row of ``gauges.jsonl``, and return its events: at most one per kind, for the
        worst tensor.

        Args:
            row: the new row (see :data:`narrowgauge.runs.schema.GAUGE`). Pass rows in the order of
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
        for detector in _BY_TABLE.get(table, ()):
            value = metrics.get(detector.field)
            is_read = not detector.tensors or (name or "").partition(":")[0] in detector.tensors
            if is_read and value is not None and not math.isnan(value):
                trips += self._read(detector, name, value, metrics)
        return trips

    def _state(self, detector: Detector, name: str | None) -> _State:
        key = (detector.name, name)
        if key not in self._states:
            self._states[key] = _State(deque(maxlen=detector.window if detector.relative else 0))
        return self._states[key]

    def _read(
        self, detector: Detector, name: str | None, value: float, metrics: Metrics
    ) -> list[_Trip]:
        """Pass one value to one detector. Return the trip that begins with it, or an empty list."""
        state = self._state(detector, name)
        limit = detector.limit(state.baseline(detector))
        if detector.relative:
            state.remember(detector, value)
        if limit is None:
            return []
        applies = detector.applies(metrics, self.facts)
        trips = applies and detector.trips(value, limit)
        recovers = not applies or detector.recovers(value, limit)
        begins = state.update(detector, trips, recovers)
        return (
            [_Trip(detector, name, value, limit)]
            if begins and not self._is_known(detector, name)
            else []
        )

    def _is_known(self, detector: Detector, name: str | None) -> bool:
        """Return whether another detector is active for the same tensor and kind of event."""
        rivals = (
            row.name
            for row in DETECTORS.values()
            if row.kind == detector.kind and row is not detector
        )
        return any(
            (rival, name) in self._states and self._states[rival, name].is_active
            for rival in rivals
        )

    def _events(self, step: int, trips: list[_Trip]) -> list[Event]:
        by_kind: dict[str, list[_Trip]] = {}
        for trip in trips:
            by_kind.setdefault(trip.detector.kind, []).append(trip)
        return [
            self._event(step, min(group, key=lambda trip: trip.rank), group)
            for group in by_kind.values()
        ]

    def _event(self, step: int, worst: _Trip, group: list[_Trip]) -> Event:
        detector = worst.detector
        name = worst.tensor
        num_others = len({trip.tensor for trip in group}) - 1
        more = (
            f"; the same holds for {num_others} more tensor{'s' if num_others > 1 else ''}"
            if num_others
            else ""
        )
        recipe = self.facts.recipe
        parameter = (name or "").rpartition(":")[2]
        values: dict[str, object] = {
            "value": worst.value, "limit": worst.limit, "spike": worst.spike, "tensor": name or "the tensor",
            # as a recipe's pattern names it
            "module": parameter.removesuffix(".weight").removesuffix(".bias") or "the layer",
            "storage": recipe.storage.fallback if recipe else "word",
            "compute": recipe.compute.fallback if recipe else "bfloat16",
        }  # fmt: skip
        message = f"{name or ''} {detector.message}{more}".strip().format(**values)
        return Event(
            detector.kind, step, message, name or None, worst.value, worst.limit, detector.advice.format(**values),
            detector=detector.name, stage=STAGE_OF.get((name or "").partition(":")[0], detector.stage),
        )  # fmt: skip


_BY_TABLE: dict[str, tuple[Detector, ...]] = {
    table: tuple(row for row in DETECTORS.values() if row.table == table)
    for table in (*METRICS, "steps")
}
