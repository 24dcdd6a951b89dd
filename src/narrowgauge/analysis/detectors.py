"""Detectors: what one is, and the table of them, one entry per symptom.

A detector reads one metric of each row of a run's record (``steps.jsonl`` or ``gauges.jsonl``), compares it with a limit, and
trips after a number of consecutive values beyond it. The limit is a number, or a factor over earlier values where no number
fits all models; a condition reads the other metrics of the same tensor. A tripped detector is silent until the metric has
recovered, so each occurrence raises one event. :class:`~narrowgauge.analysis.alarms.Alarms` and the documentation
read this table, whose rows are in ``detectors.toml``.

Thresholds are published ones where there are any. A condition narrows them where a published threshold would raise alarms in
healthy runs: in int8 or four bits a healthy cast rounds half of a tensor to zero (measured: up to 74 % of the inputs of
down_proj under mxfp4), yet its signal-to-noise ratio stays above 12 dB, since the zeroed values are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Literal

from narrowgauge.spec.computes import fallback_of
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.toml import load_toml

Metrics = Mapping[str, float | None]


@dataclass(frozen=True, slots=True)
class Facts:
    """What detectors know of a run before it begins.

    Args:
        compute, storage: its compute's name, and its storage; empty and ``None`` where the recipe is not known.
        scales_loss: the loss is scaled dynamically, so that gradients overflow now and then.
        is_audited: the optimizer's audit raises ``lost_updates`` itself, with a confidence bound.
    """

    compute: str = ""
    storage: Storage | None = None
    scales_loss: bool = False
    is_audited: bool = False

    @property
    def dithers_weights(self) -> bool:
        """Return whether weights are known to be rounded stochastically: then nothing is lost on average."""
        return self.storage is not None and self.storage.weight.rounding == "stochastic"

    @property
    def keeps_remainders(self) -> bool:
        """Return whether what rounding takes from a weight is known to be kept, beside it or on average."""
        return self.storage is not None and (bool(self.storage.beside) or self.dithers_weights)

    @property
    def rounds_second_moments(self) -> bool:
        """Return whether second moments are known to be rounded to nearest: only those freeze."""
        return self.storage is not None and self.storage.exp_avg_sq.rounding == "nearest"


@dataclass(frozen=True, slots=True)
class Detector:
    """One detector: what it reads, when it trips, and what to do.

    Args:
        kind: of the event it raises, a key of :data:`narrowgauge.runs.events.KINDS`.
        stage: of a step, a key of :data:`narrowgauge.analysis.reading.STAGES`; that of the tensor's kind where it has one.
        metric: as ``table.metric`` of a row of ``gauges.jsonl``, or ``steps.metric``, where the metric may be computed from
            several rows (``halvings``: of the loss scale, over ``window`` steps; ``skipped``: share of them; ``climb``: of the
            loss, in nats; ``growth``: of the gradient norm, a factor).
        threshold: the value that trips it; where ``relative``, a factor over a baseline of earlier values of the metric.
        message: what it means, to follow the tensor's name.
        advice: what to do; ``{module}``, ``{storage}`` and ``{compute}`` stand for the tensor's module, the storage that keeps
            updates, and a compute with more range.
        side: trips at values of at least the threshold (``above``) or at most (``below``).
        consecutive: values in a row beyond the limit before it trips.
        recovery: values in a row on the good side of ``clears`` before it recovers.
        clears: a share of the limit.
        window: values from which a metric of steps, or the baseline of a relative threshold, is taken.
        lowest: the baseline is the lowest median of ``window`` values so far (for slow growth), not the latest (for a jump).
        floor: the least baseline: what every healthy tensor may reach.
        tensors: kinds of tensors it applies to; all of the table if empty.
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

    def applies(self, metrics: Metrics, facts: Facts) -> bool:
        """Return whether its condition holds, or it has none."""
        return not self.condition or CONDITIONS[self.condition](metrics, facts)

    def limit(self, baseline: float | None) -> float | None:
        """Return the value that trips it; ``None`` for a relative threshold whose baseline is unknown or zero.

        Example:
            >>> grows = Detector("a", "outliers", "forward", "tensors.outlier", 4.0, "", "", "", relative=True, floor=16.0)
            >>> grows.limit(None), grows.limit(3.0), grows.limit(20.0)
            (None, 64.0, 80.0)
        """
        if not self.relative:
            return self.threshold
        least = 0.0 if baseline is None else max(baseline, self.floor)
        return self.threshold * least if baseline is not None and least > 0 else None

    def trips(self, value: float, limit: float) -> bool:
        """Return whether a value crosses the limit.

        Example:
            >>> low = Detector("a", "lost_updates", "storage", "updates.edq", 0.9, "", "", "", side="below", clears=1.05)
            >>> low.trips(0.9, 0.9), low.trips(0.91, 0.9)
            (True, False)
        """
        return value >= limit if self.side == "above" else value <= limit

    def recovers(self, value: float, limit: float) -> bool:
        """Return whether a value is well on the good side of the limit."""
        good = self.clears * limit
        return value < good if self.side == "above" else value > good

    def excess(self, value: float, limit: float) -> float:
        """Return how far beyond the limit a value is, to find the worst of many; at least 1 where it trips."""
        over, under = (value, limit) if self.side == "above" else (limit, value)
        return math.inf if not math.isfinite(over) or under <= 0 else over / under


MIN_SQNR_DB = 8.0
"""Below it, rounding error is more than a sixth of an operand's energy. Healthy casts stay above 12 (four bits, stochastic)."""
MAX_UNCHANGED = 0.5
"""Share of weights that stand still in a step: the majority. Normally distributed updates of weights in one binade still read
an EDQ of 1.00 there."""
MAX_BIAS = 1.5
"""Factor between second moments and their exact shadow. Unbiased codes of three mantissa bits stay within 1.25."""


def is_off(bias: float | None) -> bool:
    """Return whether second moments differ from their exact shadow by :data:`MAX_BIAS`."""
    return bias is not None and not 1 / MAX_BIAS < bias < MAX_BIAS


CONDITIONS: dict[str, Callable[[Metrics, Facts], bool]] = {
    # Updates are rounded to nearest, so that the noise is at most 1, and the optimizer's audit does not raise the event. With
    # stochastic rounding the EDQ of a small tensor is uncertain, and the audit knows its error.
    "rounded": lambda metrics, facts: (
        (metrics.get("noise") or 0.0) <= 1.05 and not facts.dithers_weights and not facts.is_audited
    ),
    # Second moments are rounded to nearest, or differ from their exact shadow. Stochastically rounded moments move seldom, but
    # are right on average.
    "frozen": lambda metrics, facts: facts.rounds_second_moments or is_off(metrics.get("bias")),
    # Nothing keeps what rounding takes from a weight: no tail, master copy or low part, and no stochastic rounding. Most of the
    # intended changes are lost, and the EDQ is still good: below MIN_EDQ, lost_updates is raised.
    "bare": lambda metrics, facts: (
        not facts.keeps_remainders
        and (metrics.get("lost_fraction") or 0.0) >= MAX_UNCHANGED
        and (metrics.get("edq") or 0.0) >= MIN_EDQ
    ),
    # Most of the operand is rounding error.
    "drowned": lambda metrics, facts: (sqnr := metrics.get("sqnr_db")) is not None and sqnr < MIN_SQNR_DB,
    # The tensor enters its matmul through a narrow cast.
    "cast": lambda metrics, facts: metrics.get("sqnr_db") is not None,
    # Where the loss is scaled, gradients overflow now and then while the scale is adjusted.
    "unscaled": lambda metrics, facts: not facts.scales_loss,
    "scaled": lambda metrics, facts: facts.scales_loss,
}
"""Conditions on the other metrics of a tensor, and on the run."""


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _read() -> dict[str, Detector]:
    rows = load_toml(files("narrowgauge.analysis").joinpath("detectors.toml").read_text(encoding="utf-8"))
    return {name: Detector(name, **row) for name, row in rows.items()}


DETECTORS: dict[str, Detector] = _read()
"""All detectors by name. Spikes are judged by :class:`~narrowgauge.analysis.spikes.SpikeJudge`; their
threshold is its z."""

SERIOUS: dict[str, str] = {
    "lost_updates": "training slows or stops, and the loss curve does not show why",
    "frozen_moments": "step sizes no longer follow the gradients; they shrink or grow for the rest of the run",
    "underflow": "the operand of a matmul is mostly rounding noise",
    "overflow": "the operand of a matmul is saturated, and mostly rounding noise",
    "attention": "collapsed attention does not recover by itself",
    "loss_scale": "gradients overflow repeatedly; the loss diverges some tens of steps later (GLM-130B: 30)",
    "loss_spike": "the model may not recover, and checkpoints from before the spike will be deleted",
    "loss_climb": "the model loses what it has learned, and checkpoints from before the climb will be deleted",
    "dead_layer": "a part of the model takes memory and time and learns nothing",
    "nonfinite": "every step from here on may be lost",
}
"""The kinds of event that need immediate attention, each with the reason. The others (unchanged_weights, lost_decay, noise,
outliers, logits, gradient_spike, growth) may become serious, or cost little; healthy runs with small batches have gradient
spikes."""


def module_of(tensor: str) -> str:
    """The module of a tensor called ``KIND:MODULE``, ``KIND:PARAMETER`` or ``PARAMETER``, as a recipe's pattern names it."""
    name = tensor.rpartition(":")[2]
    module, _, last = name.rpartition(".")
    return module if module and last in ("weight", "bias") else name


def advice_values(tensor: str | None, storage: Storage | None, compute: str) -> dict[str, str]:
    """Return what the names in braces of an advice stand for: the advice of detectors.

    Example:
        >>> advice_values("input:model.layers.0.mlp.down_proj", None, "float8-row")["compute"]
        'float8-block'
    """
    return {
        "tensor": tensor or "the tensor",
        "module": module_of(tensor or "") or "the layer",
        "storage": storage.fallback if storage is not None else "word",
        "compute": fallback_of(compute),
    }
