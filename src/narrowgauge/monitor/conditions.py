"""How one detector decides: a figure, a limit, and a condition, all pure functions.

The table is :mod:`narrowgauge.monitor.detectors`; here is what a row of it is. A figure trips a detector when it
crosses the limit, and is over when it lies well on the good side. The limit is a number, or a factor over the figure's own
past, where no number fits all models. A condition looks at the other figures of the same tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from narrowgauge.spec.storages import Storage

Figures = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Facts:
    """What alarms know of a run before it begins.

    Args:
        compute: the name of its compute row, or nothing.
        storage: its storage row, or ``None`` where the recipe is not known.
        scales_loss: whether a loss scale is searched for, which makes gradients overflow now and then.
    """

    compute: str = ""
    storage: Storage | None = None
    scales_loss: bool = False

    @property
    def dithers_weights(self) -> bool:
        """Whether weights are known to be rounded stochastically: then nothing is lost on average."""
        return self.storage is not None and self.storage.weight.rounding == "stochastic"

    @property
    def rounds_second_moments(self) -> bool:
        """Whether second moments are known to be rounded to the nearest: only those freeze."""
        return self.storage is not None and self.storage.exp_avg_sq.rounding == "nearest"


@dataclass(frozen=True, slots=True)
class Detector:
    """One symptom: where it is read, when it is one, and what to do.

    Args:
        name: of the row.
        kind: of the event it raises, a key of :data:`narrowgauge.runs.events.KINDS`.
        reads: the figure, as ``table.field`` of a row of ``gauges.jsonl``, or ``steps.field``, where the field may be worked
            out from several rows (``halvings``: of the loss scale, over ``window`` steps; ``skipped``: share of them;
            ``climb``: of the loss, in nats; ``growth``: of the gradient norm, a factor).
        threshold: the figure that trips it; where ``past`` is ``True`` a factor over the figure's own past.
        says: what it means when it trips, to follow the tensor's name.
        advice: what to do; ``{module}``, ``{cure}`` and ``{safer}`` stand for the tensor's module, the storage that keeps
            updates, and a compute with more range.
        source: where symptom and threshold come from.
        side: trips at figures of at least the threshold (``above``) or at most (``below``).
        readings: in a row, to trip.
        calm: readings in a row beyond ``clears``, to be over.
        clears: as a share of the threshold.
        window: readings that a figure of steps, or the past, is taken from.
        past: whether the threshold is a factor.
        lowest: compare with the lowest median of ``window`` readings ever seen (a slow growth), not with the latest (a jump).
        floor: the least past a factor is taken of: what every healthy tensor may reach.
        tensors: kinds of tensors it applies to; all of the table if empty.
        only: a key of :data:`CONDITIONS`.
    """

    name: str
    kind: str
    reads: str
    threshold: float
    says: str
    advice: str
    source: str
    side: Literal["above", "below"] = "above"
    readings: int = 1
    calm: int = 3
    clears: float = 0.5
    window: int = 0
    past: bool = False
    lowest: bool = False
    floor: float = 0.0
    tensors: tuple[str, ...] = ()
    only: str = ""

    @property
    def table(self) -> str:
        """The table it reads."""
        return self.reads.partition(".")[0]

    @property
    def field(self) -> str:
        """The figure it reads of that table."""
        return self.reads.partition(".")[2]

    def limit(self, past: float | None) -> float | None:
        """The figure that trips it.

        Args:
            past: what its own past says, where it needs one and knows one.
        Returns:
            The limit; ``None`` while too little is known, and where the past is nothing but zero.
        Example:
            >>> grows = Detector("a", "outliers", "tensors.outlier", 4.0, "", "", "", past=True, floor=16.0)
            >>> grows.limit(None), grows.limit(3.0), grows.limit(20.0)
            (None, 64.0, 80.0)
        """
        if not self.past:
            return self.threshold
        known = 0.0 if past is None else max(past, self.floor)
        return self.threshold * known if past is not None and known > 0 else None

    def trips(self, value: float, limit: float) -> bool:
        """Whether a figure crosses the limit.

        Example:
            >>> low = Detector("a", "lost_updates", "updates.edq", 0.9, "", "", "", side="below", clears=1.05)
            >>> low.trips(0.9, 0.9), low.trips(0.91, 0.9)
            (True, False)
        """
        return value >= limit if self.side == "above" else value <= limit

    def recovers(self, value: float, limit: float) -> bool:
        """Whether a figure is well on the good side of the limit."""
        good = self.clears * limit
        return value < good if self.side == "above" else value > good

    def excess(self, value: float, limit: float) -> float:
        """How far beyond the limit a figure is, to find the worst of many; at least 1 where it trips."""
        over, under = (value, limit) if self.side == "above" else (limit, value)
        return math.inf if not math.isfinite(over) or under <= 0 else over / under


MIN_SQNR_DB = 8.0
"""Below it, more than a sixth of an operand's energy is rounding error. Healthy casts stay above 12 (four bits, stochastic)."""
MAX_BIAS = 1.5
"""Factor that a row's second moments are off their shadow. Unbiased codes of three mantissa bits stay within 1.25."""


def _is_off(bias: float | None) -> bool:
    return bias is not None and not 1 / MAX_BIAS < bias < MAX_BIAS


CONDITIONS: dict[str, tuple[str, Callable[[Figures, Facts], bool]]] = {
    "rounded": (
        "updates are rounded to the nearest, so that the noise is at most 1: with stochastic rounding the EDQ of a small "
        "tensor is uncertain, and the optimizer's own audit, which knows by how much, judges it",
        lambda figures, facts: (figures.get("noise") or 0.0) <= 1.05 and not facts.dithers_weights,
    ),
    "frozen": (
        f"second moments are rounded to the nearest, or the row is off its exact shadow by a factor of {MAX_BIAS}: "
        "stochastic ones move seldom, but are right on average",
        lambda figures, facts: facts.rounds_second_moments or _is_off(figures.get("bias")),
    ),
    "drowned": (
        f"the cast's signal to noise is below {MIN_SQNR_DB:g} dB",
        lambda figures, facts: (sqnr := figures.get("sqnr_db")) is not None and sqnr < MIN_SQNR_DB,
    ),
    "cast": (
        "the tensor enters its matmul through a narrow cast",
        lambda figures, facts: figures.get("sqnr_db") is not None,
    ),
    "unscaled": (
        "the loss is not scaled: where it is, gradients overflow while the scale is searched for",
        lambda figures, facts: not facts.scales_loss,
    ),
    "scaled": ("the loss is scaled", lambda figures, facts: facts.scales_loss),
}
"""Conditions that a detector's figures must fulfil, each in words and as a function."""
