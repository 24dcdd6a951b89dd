"""What a detector is: a metric, a limit and a condition, all pure functions.

The table of detectors is :mod:`narrowgauge.analysis.monitor.detectors`. A detector trips when its metric crosses the limit,
and recovers when the metric is well within it again. The limit is a number, or a factor over earlier values of the metric
where no number fits all models. A condition reads the other metrics of the same tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from narrowgauge.spec.storages import Storage

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Facts:
    """What detectors know of a run before it begins.

    Args:
        compute: the name of its compute, or empty.
        storage: its storage, or ``None`` where the recipe is not known.
        scales_loss: the loss is scaled dynamically, so that gradients overflow now and then.
        is_audited: the optimizer's audit raises ``lost_updates`` itself, with a confidence bound.
    """

    compute: str = ""
    storage: Storage | None = None
    scales_loss: bool = False
    is_audited: bool = False

    @property
    def dithers_weights(self) -> bool:
        """Whether weights are known to be rounded stochastically: then nothing is lost on average."""
        return self.storage is not None and self.storage.weight.rounding == "stochastic"

    @property
    def rounds_second_moments(self) -> bool:
        """Whether second moments are known to be rounded to nearest: only those freeze."""
        return self.storage is not None and self.storage.exp_avg_sq.rounding == "nearest"


@dataclass(frozen=True, slots=True)
class Detector:
    """One detector: what it reads, when it trips, and what to do.

    Args:
        name: its key in the table of detectors.
        kind: of the event it raises, a key of :data:`narrowgauge.runs.events.KINDS`.
        metric: as ``table.metric`` of a row of ``gauges.jsonl``, or ``steps.metric``, where the metric may be computed from
            several rows (``halvings``: of the loss scale, over ``window`` steps; ``skipped``: share of them; ``climb``: of the
            loss, in nats; ``growth``: of the gradient norm, a factor).
        threshold: the value that trips it; where ``relative``, a factor over earlier values of the metric.
        message: what it means, to follow the tensor's name.
        advice: what to do; ``{module}``, ``{cure}`` and ``{safer}`` stand for the tensor's module, the storage that keeps
            updates, and a compute with more range.
        source: where symptom and threshold come from.
        side: trips at values of at least the threshold (``above``) or at most (``below``).
        consecutive: values in a row beyond the limit before it trips.
        recovery: values in a row on the good side of ``clears`` before it recovers.
        clears: a share of the limit.
        window: values from which a metric of steps, or the baseline of a relative threshold, is taken.
        relative: the threshold is a factor over a baseline of earlier values.
        lowest: the baseline is the lowest median of ``window`` values so far (for slow growth), not the latest (for a jump).
        floor: the least baseline: what every healthy tensor may reach.
        tensors: kinds of tensors it applies to; all of the table if empty.
        condition: a key of :data:`CONDITIONS`.
    """

    name: str
    kind: str
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
    tensors: tuple[str, ...] = ()
    condition: str = ""

    @property
    def table(self) -> str:
        """The table that holds the metric."""
        return self.metric.partition(".")[0]

    @property
    def field(self) -> str:
        """The metric's name in that table."""
        return self.metric.partition(".")[2]

    def limit(self, baseline: float | None) -> float | None:
        """The value that trips it.

        Args:
            baseline: of a relative threshold; ``None`` where it has none yet.
        Returns:
            The limit; ``None`` without a baseline, or where the baseline is zero.
        Example:
            >>> grows = Detector("a", "outliers", "tensors.outlier", 4.0, "", "", "", relative=True, floor=16.0)
            >>> grows.limit(None), grows.limit(3.0), grows.limit(20.0)
            (None, 64.0, 80.0)
        """
        if not self.relative:
            return self.threshold
        least = 0.0 if baseline is None else max(baseline, self.floor)
        return self.threshold * least if baseline is not None and least > 0 else None

    def trips(self, value: float, limit: float) -> bool:
        """Whether a value crosses the limit.

        Example:
            >>> low = Detector("a", "lost_updates", "updates.edq", 0.9, "", "", "", side="below", clears=1.05)
            >>> low.trips(0.9, 0.9), low.trips(0.91, 0.9)
            (True, False)
        """
        return value >= limit if self.side == "above" else value <= limit

    def recovers(self, value: float, limit: float) -> bool:
        """Whether a value is well on the good side of the limit."""
        good = self.clears * limit
        return value < good if self.side == "above" else value > good

    def excess(self, value: float, limit: float) -> float:
        """How far beyond the limit a value is, to find the worst of many; at least 1 where it trips."""
        over, under = (value, limit) if self.side == "above" else (limit, value)
        return math.inf if not math.isfinite(over) or under <= 0 else over / under


MIN_SQNR_DB = 8.0
"""Below it, rounding error is more than a sixth of an operand's energy. Healthy casts stay above 12 (four bits, stochastic)."""
MAX_BIAS = 1.5
"""Factor between second moments and their exact shadow. Unbiased codes of three mantissa bits stay within 1.25."""


def _is_off(bias: float | None) -> bool:
    return bias is not None and not 1 / MAX_BIAS < bias < MAX_BIAS


CONDITIONS: dict[str, tuple[str, Callable[[Metrics, Facts], bool]]] = {
    "rounded": (
        "updates are rounded to nearest, so that the noise is at most 1, and the optimizer's audit does not raise the event: "
        "with stochastic rounding the EDQ of a small tensor is uncertain, and the audit knows its error",
        lambda metrics, facts: (
            (metrics.get("noise") or 0.0) <= 1.05 and not facts.dithers_weights and not facts.is_audited
        ),
    ),
    "frozen": (
        f"second moments are rounded to nearest, or differ from their exact shadow by a factor of {MAX_BIAS}: stochastically "
        "rounded moments move seldom, but are right on average",
        lambda metrics, facts: facts.rounds_second_moments or _is_off(metrics.get("bias")),
    ),
    "drowned": (
        f"the cast's signal-to-noise ratio is below {MIN_SQNR_DB:g} dB",
        lambda metrics, facts: (sqnr := metrics.get("sqnr_db")) is not None and sqnr < MIN_SQNR_DB,
    ),
    "cast": (
        "the tensor enters its matmul through a narrow cast",
        lambda metrics, facts: metrics.get("sqnr_db") is not None,
    ),
    "unscaled": (
        "the loss is not scaled: where it is, gradients overflow now and then while the scale is adjusted",
        lambda metrics, facts: not facts.scales_loss,
    ),
    "scaled": ("the loss is scaled", lambda metrics, facts: facts.scales_loss),
}
"""Conditions on the other metrics of a tensor, each as text and as a function."""
