"""Detectors: what one is, and the table of them, one entry per symptom.

A detector reads one metric of each row of a run's record (``steps.jsonl`` or ``gauges.jsonl``), compares it with a limit, and
trips after a number of consecutive values beyond it. The limit is a number, or a factor over earlier values where no number
fits all models; a condition reads the other metrics of the same tensor. A tripped detector is silent until the metric has
recovered, so each occurrence raises one event. :class:`~narrowgauge.analysis.alarms.Alarms` and the documentation
read this table.

Thresholds are published ones where there are any. A condition narrows them where a published threshold would raise alarms in
healthy runs: in int8 or four bits a healthy cast rounds half of a tensor to zero (measured: up to 74 % of the inputs of
down_proj under mxfp4), yet its signal-to-noise ratio stays above 12 dB, since the zeroed values are small.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal, NamedTuple

from narrowgauge.spec.computes import fallback_of
from narrowgauge.spec.significance import MAX_LOST_DECAY, MIN_EDQ
from narrowgauge.spec.storages import Storage

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
        return self.metric.partition(".")[0]

    @property
    def field(self) -> str:
        return self.metric.partition(".")[2]

    def applies(self, metrics: Metrics, facts: Facts) -> bool:
        """Return whether its condition holds, or it has none."""
        return not self.condition or CONDITIONS[self.condition].holds(metrics, facts)

    def limit(self, baseline: float | None) -> float | None:
        """Return the value that trips it; ``None`` for a relative threshold whose baseline is unknown or zero.

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
        """Return whether a value crosses the limit.

        Example:
            >>> low = Detector("a", "lost_updates", "updates.edq", 0.9, "", "", "", side="below", clears=1.05)
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


def _is_off(bias: float | None) -> bool:
    return bias is not None and not 1 / MAX_BIAS < bias < MAX_BIAS


class Condition(NamedTuple):
    """A condition on the other metrics of a tensor, or on the run."""

    text: str
    holds: Callable[[Metrics, Facts], bool]


CONDITIONS: dict[str, Condition] = {
    "rounded": Condition(
        "updates are rounded to nearest, so that the noise is at most 1, and the optimizer's audit does not raise the event: "
        "with stochastic rounding the EDQ of a small tensor is uncertain, and the audit knows its error",
        lambda metrics, facts: (
            (metrics.get("noise") or 0.0) <= 1.05 and not facts.dithers_weights and not facts.is_audited
        ),
    ),
    "frozen": Condition(
        f"second moments are rounded to nearest, or differ from their exact shadow by a factor of {MAX_BIAS}: stochastically "
        "rounded moments move seldom, but are right on average",
        lambda metrics, facts: facts.rounds_second_moments or _is_off(metrics.get("bias")),
    ),
    "bare": Condition(
        "nothing keeps what rounding takes from a weight: no tail, master copy or low part, and no stochastic rounding. Most of "
        f"the intended changes are lost, and the EDQ is still {MIN_EDQ} or more: below, lost_updates is raised",
        lambda metrics, facts: (
            not facts.keeps_remainders
            and (metrics.get("lost_fraction") or 0.0) >= MAX_UNCHANGED
            and (metrics.get("edq") or 0.0) >= MIN_EDQ
        ),
    ),
    "drowned": Condition(
        f"the cast's signal-to-noise ratio is below {MIN_SQNR_DB:g} dB",
        lambda metrics, facts: (sqnr := metrics.get("sqnr_db")) is not None and sqnr < MIN_SQNR_DB,
    ),
    "cast": Condition(
        "the tensor enters its matmul through a narrow cast",
        lambda metrics, facts: metrics.get("sqnr_db") is not None,
    ),
    "unscaled": Condition(
        "the loss is not scaled: where it is, gradients overflow now and then while the scale is adjusted",
        lambda metrics, facts: not facts.scales_loss,
    ),
    "scaled": Condition("the loss is scaled", lambda metrics, facts: facts.scales_loss),
}


# ── the table ────────────────────────────────────────────────────────────────────────────────────────────────────────────

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

_GRADIENTS = ("output_grad", "grad")
_WORTSMAN = "Wortsman et al. 2023, Small-scale proxies for large-scale Transformer training instabilities (2309.14322)"
_KEEP = 'leave the layer wide: in a recipe file [[override]] pattern = "{module}", compute = "bfloat16"'
_DECAY = "Check that weight decay reaches '{module}', or lower the learning rate: an update moves a larger weight less."
_FIRST = (
    "Find the operation that made the first (event first_bad_value; ng.gauges.first_bad_value in your own loop), and go back to "
    "a good checkpoint."
)
_BACK = "go back to a checkpoint, lower the learning rate, or skip such batches with --on-spike skip"

_ROWS = (
    Detector(
        "lost-updates", "lost_updates", "updates.edq", MIN_EDQ, side="below", clears=1.05, consecutive=3, condition="rounded",
        message="stores only {value:.0%} of its update (threshold {limit:.0%}); the rest is rounded away",
        advice="Use storage '{storage}', which keeps what this one rounds away.",
        source="EDQ: Yu et al. 2024, Collage (2405.03637); threshold as in the optimizer's audit",
    ),
    Detector(
        "unchanged-weights", "unchanged_weights", "updates.imprecision_share", MAX_UNCHANGED, consecutive=3, condition="bare",
        message="leaves {value:.0%} of its weights unchanged (threshold {limit:.0%}), and nothing keeps what they did not take",
        advice="Use storage '{storage}', which keeps what this one rounds away; a smaller learning rate loses more.",
        source="imprecision percentage: Yu et al. 2024, Collage (2405.03637), section 3.2; threshold: the majority",
    ),
    Detector(
        "lost-decay", "lost_decay", "updates.lost_decay", MAX_LOST_DECAY, consecutive=3,
        message="loses {value:.0%} of its weight decay (threshold {limit:.0%}); rounding takes it even where updates survive",
        advice="Use storage '{storage}', which keeps it: weights that do not decay grow, and updates move them less.",
        source="Yu et al. 2024, Collage (2405.03637), section 4: decay vanishes in bfloat16; threshold: the larger part",
    ),
    Detector(
        "noise", "noise", "updates.noise", 10.0, consecutive=3,
        message="gets {value:.0f} times as much rounding noise as update (threshold {limit:g})",
        advice="Use storage '{storage}', or a larger learning rate: the noise comes from the stored weight's last bit.",
        source="measured: bfloat16 weights rounded stochastically reach 20 at small learning rates, all others stay below 1",
    ),
    Detector(
        "frozen-moments", "frozen_moments", "moments.frozen_fraction", 0.5, consecutive=3, condition="frozen",
        message="has frozen second moments: {value:.0%} no longer change (threshold {limit:.0%})",
        advice="Use a storage with longer second moments, such as '{storage}', or a smaller beta2 (0.95).",
        source="bfloat16 stores no relative change below 2^-9, and beta2 = 0.999 lowers a second moment by at most 2^-10",
    ),
    Detector(
        "underflow", "underflow", "tensors.underflow", 0.05, consecutive=2, condition="drowned",
        message="underflows: its cast rounds {value:.0%} of its values to zero (threshold {limit:.0%}), and most of its signal",
        advice="Use compute '{compute}', or " + _KEEP + ".",
        source="Micikevicius et al. 2018 (1710.03740): a speech model whose fp16 gradients were zero to 5 % lost accuracy",
    ),
    Detector(
        "overflow", "overflow", "tensors.overflow", 1e-3, condition="drowned",
        message="overflows: {value:.2%} of its values saturate in its cast (threshold {limit:.2%})",
        advice="Use compute '{compute}', whose scales are current, or " + _KEEP + ".",
        source="TransformerEngine: delayed scales are of earlier steps, and what exceeds one is clipped",
    ),
    Detector(
        "growing-outliers", "outliers", "tensors.outlier", 4.0, relative=True, lowest=True, floor=16.0, window=10,
        consecutive=3, tensors=("input",), condition="cast",
        message="has outliers: its amax is {value:.0f} times its rms (threshold {limit:.0f})",
        advice="Use compute '{compute}', whose scales are finer-grained, or " + _KEEP + ".",
        source="Fishman et al. 2024 (2409.12517): inputs of down_proj after SwiGLU in fp8; healthy inputs reached 39",
    ),
    Detector(
        "weight-jump", "outliers", "tensors.amax", 8.0, relative=True, window=5, tensors=("weight",),
        message="has an amax of {value:.3g}, far above its recent values (threshold {limit:.3g})",
        advice="No update does that: go back to a checkpoint, and test the memory of this machine if it happens again.",
        source="a flipped exponent bit; measured: healthy weights less than double between samples",
    ),
    Detector(
        "weight-growth", "growth", "tensors.rms", 4.0, relative=True, lowest=True, floor=0.04, window=50, consecutive=3,
        tensors=("weight",),
        message="has grown to an rms of {value:.3g} (threshold {limit:.3g})",
        advice=_DECAY,
        source="Kosson et al. 2023, Rotational Equilibrium (2305.17212): decay lets it settle; measured: 2.6 with, 4.9 without",
    ),
    Detector(
        "attention-logits", "attention", "attention.max_logit", 1e4,
        message="has attention logits up to {value:.3g} (threshold {limit:.3g})",
        advice="Normalize queries and keys (QK-norm) or cap the logits, and lower the learning rate.",
        source=_WORTSMAN + ": runs whose logits passed 1e4 diverged",
    ),
    Detector(
        "attention-growth", "attention", "attention.max_logit", 5.0, relative=True, lowest=True, floor=20.0, window=20,
        consecutive=3,
        message="has growing attention logits, now up to {value:.3g} (threshold {limit:.3g})",
        advice="Normalize queries and keys (QK-norm) or cap the logits, and lower the learning rate.",
        source=_WORTSMAN + "; Kimi K2 (2507.20534) caps at 100; healthy small runs reached 27",
    ),
    Detector(
        "attention-entropy", "attention", "attention.entropy", 0.05, side="below", clears=2.0, consecutive=3,
        message="attends to one position only: its entropy is {value:.3f} of uniform attention (threshold {limit:.3f})",
        advice="Normalize queries and keys (QK-norm), and lower the learning rate.",
        source="Zhai et al. 2023, Stabilizing Transformer training by preventing attention entropy collapse (2303.06296)",
    ),
    Detector(
        "logit-drift", "logits", "logits.log_z", 3.0, relative=True, lowest=True, floor=10.0, window=10, consecutive=3,
        message="the logits drift: log Z is {value:.3g} away from zero (threshold {limit:.3g})",
        advice="Add a z-loss (1e-4 of its square), and keep 'lm_head' in bfloat16 or float32.",
        source="Chowdhery et al. 2022, PaLM (2204.02311), section 5; " + _WORTSMAN,
    ),
    Detector(
        "dead-gradient", "dead_layer", "tensors.rms", 0.0, side="below", consecutive=3, tensors=_GRADIENTS,
        message="is zero everywhere, so the layer learns nothing",
        advice="Look for a zero before '{module}' (a gate, a mask, a saturated cast); freeze the layer if that is intended.",
        source="OPT-175B logbook: position embeddings with almost no gradient never moved, unnoticed",
    ),
    Detector(
        "nonfinite", "nonfinite", "tensors.nonfinite", 1.0, tensors=("weight", "input", "output"),
        message="holds {value:.0f} values that are not finite",
        advice=_FIRST,
        source="isfinite",
    ),
    Detector(
        "nonfinite-gradient", "nonfinite", "tensors.nonfinite", 1.0, tensors=_GRADIENTS, condition="unscaled",
        message="holds {value:.0f} values that are not finite",
        advice=_FIRST,
        source="isfinite",
    ),
    Detector(
        "nonfinite-scaled", "nonfinite", "tensors.nonfinite", 1.0, tensors=_GRADIENTS, condition="scaled", consecutive=3,
        message="holds {value:.0f} values that are not finite, in every sample",
        advice="Lowering the loss scale does not help: use compute '{compute}', which needs none.",
        source="Micikevicius et al. 2018 (1710.03740): single overflows are how a loss scale is found",
    ),
    Detector(
        "nonfinite-step", "nonfinite", "steps.nonfinite", 1.0, recovery=10,
        message="the loss or the gradient norm is not finite",
        advice=_FIRST,
        source="isfinite; not a step that the loss scaler skipped",
    ),
    Detector(
        "scale-halvings", "loss_scale", "steps.halvings", 3.0, window=100, recovery=100,
        message="the loss scale was halved {value:.0f} times within 100 steps (threshold {limit:g})",
        advice="Lower the learning rate, or use compute '{compute}', which needs no loss scale.",
        source="OPT-175B and BLOOM-104B logbooks; GLM-130B's fell 30 steps before its loss blew up",
    ),
    Detector(
        "scale-floor", "loss_scale", "steps.loss_scale", 1.0, side="below", clears=2.0, recovery=100,
        message="the loss scale has reached its floor, {value:g}",
        advice="Something else overflows: use compute '{compute}', and go back to a checkpoint.",
        source="OPT-175B logbook: the loss scale at its minimum; torch.amp.GradScaler has no floor and reaches zero",
    ),
    Detector(
        "loss-spike", "loss_spike", "steps.loss", 8.0, window=100, recovery=10,
        message="{spike}",
        advice="If it does not recover within some tens of steps, " + _BACK + ".",
        source="robust z-score, see SpikeJudge; PaLM went back 100 steps and skipped 200 to 500 batches",
    ),
    Detector(
        "gradient-spike", "gradient_spike", "steps.grad_norm", 8.0, window=100, recovery=10,
        message="{spike}",
        advice="Gradient clipping (--max-grad-norm) limits the damage. If the loss rises too, " + _BACK + ".",
        source="robust z-score of the logarithm; BLOOM-176B's norm rose two steps before its loss",
    ),
    Detector(
        "loss-climb", "loss_climb", "steps.climb", 0.1, recovery=5,
        message="the loss climbs: it is at least {value:.2f} nats above its lowest level (threshold {limit:g})",
        advice="Unless its data changed, go back to a checkpoint from before the climb, and lower the learning rate.",
        source="a lower bound, see DriftJudge; BLOOM-104B's loss went from 6.4 to 14 near step 7,000 (chronicles of tr8)",
    ),
    Detector(
        "gradient-growth", "growth", "steps.growth", 5.0, recovery=5,
        message="the gradient norm grows: it is at least {value:.1f} times its lowest level (threshold {limit:g})",
        advice="Check which weights or attention logits grow with it; lower the learning rate.",
        source="a lower bound, see DriftJudge; OLMo 2 (2501.00656) reports a growing norm, and spikes, in its predecessor",
    ),
)  # fmt: skip

DETECTORS: dict[str, Detector] = {row.name: row for row in _ROWS}
"""All detectors by name. Spikes are judged by :class:`~narrowgauge.analysis.spikes.SpikeJudge`; their
threshold is its z."""


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
