"""Detectors: what a run watches itself for, one row per symptom.

A detector reads one figure of each row of a run's record (of ``steps.jsonl`` or ``gauges.jsonl``), compares it with a
limit, and trips when the limit is crossed so many readings in a row. The limit is a number, or a factor over the figure's
own past, where no number fits all models. A tripped detector is silent until the figure has stayed well on the good side for
some readings: so a trouble is told once, and told again only if it comes back. The rows of the table are what
:class:`~narrowgauge.monitor.alarms.Alarms`, the docs and ``narrowgauge show`` all read.

Thresholds are the published ones where there are any. They are narrowed by a condition (``only``) where a published
threshold would cry at healthy runs: at int8 or four bits a healthy cast makes half of a tensor zero (measured: up to 74 % of
the inputs of down_proj under mxfp4), yet its signal to noise stays above 12 dB, since what it drops is small.
"""

from __future__ import annotations

from narrowgauge.monitor.conditions import Detector
from narrowgauge.spec.significance import MIN_EDQ

SERIOUS: dict[str, str] = {
    "lost_updates": "training slows or stops, and the loss curve does not show why",
    "frozen_moments": "step sizes no longer follow the gradients; they shrink or grow for the rest of the run",
    "underflow": "a matmul sees mostly noise",
    "overflow": "a matmul sees its largest values cut off, and mostly noise",
    "attention": "attention that looks at one place only does not come back by itself",
    "loss_scale": "gradients overflow again and again: the loss follows some tens of steps later (GLM-130B: 30)",
    "loss_spike": "the model may not recover, and a checkpoint from before will not be kept for ever",
    "loss_climb": "the run loses what it has learned, and a checkpoint from before will not be kept for ever",
    "dead_layer": "a part of the model takes memory and time and learns nothing",
    "nonfinite": "every step from here on may be lost",
}
"""The kinds of alarm to wake a person for, each with the reason. The others (noise, outliers, logits, gradient_spike,
growth) say what may become serious, or what costs a little; healthy runs with small batches have gradient spikes."""

_GRADIENTS = ("output_grad", "grad")
_WORTMAN = "Wortsman et al. 2023, Small-scale proxies for large-scale Transformer training instabilities (2309.14322)"
_KEEP = 'leave the layer wide: in a recipe file [[override]] pattern = "{module}", compute = "bfloat16"'
_DECAY = "Check that weight decay reaches '{module}', or lower the learning rate: an update moves a larger weight less."
_FIRST = (
    "See where the first arose (a run tells it; in your own loop ng.first_bad_value), and go back to a good checkpoint."
)
_BACK = "go back to a checkpoint, lower the learning rate, or skip such batches with --on-spike skip"

_ROWS = (
    Detector(
        "lost-updates", "lost_updates", "updates.edq", MIN_EDQ, side="below", clears=1.05, readings=3, only="rounded",
        says="takes only {value:.0%} of its update; the rest is rounded away",
        advice="Use storage '{cure}', which keeps what this one rounds away.",
        source="EDQ: Yu et al. 2024, Collage (2405.03637); threshold as in the optimizer's audit",
    ),
    Detector(
        "noise", "noise", "updates.noise", 10.0, readings=3,
        says="gets {value:.0f} times as much rounding noise as update",
        advice="Use storage '{cure}', or a larger learning rate: the noise is that of the stored weight's last bit.",
        source="measured: bfloat16 weights rounded stochastically read 20 at small learning rates, all others below 1",
    ),
    Detector(
        "frozen-moments", "frozen_moments", "moments.frozen_fraction", 0.5, readings=3, only="frozen",
        says="has second moments of which {value:.0%} do not move any more",
        advice="Use a storage with longer second moments, such as '{cure}', or a smaller beta2 (0.95).",
        source="bfloat16 takes no change under 2^-9, and beta2 = 0.999 changes a second moment by at most 2^-10 downward",
    ),
    Detector(
        "underflow", "underflow", "tensors.underflow", 0.05, readings=2, only="drowned",
        says="loses {value:.0%} of its values to zero in its cast, and with them most of its signal",
        advice="Use compute '{safer}', or " + _KEEP + ".",
        source="Micikevicius et al. 2018 (1710.03740): a speech model whose fp16 gradients were zero to 5 % lost accuracy",
    ),
    Detector(
        "overflow", "overflow", "tensors.overflow", 1e-3, only="drowned",
        says="has {value:.2%} of its values beyond the end of its cast",
        advice="Use compute '{safer}', whose scales are current, or " + _KEEP + ".",
        source="delayed scales are stale after a jump; Peng et al. 2023, FP8-LM (2310.18313)",
    ),
    Detector(
        "growing-outliers", "outliers", "tensors.outlier", 4.0, past=True, lowest=True, floor=16.0, window=10, readings=3,
        tensors=("input",), only="cast",
        says="has a largest value {value:.0f} times its rms",
        advice="Use compute '{safer}', whose scales are shared by fewer values, or " + _KEEP + ".",
        source="Fishman et al. 2024 (2409.12517): inputs of down_proj after SwiGLU in fp8; healthy inputs reached 39",
    ),
    Detector(
        "growing-feature", "outliers", "tensors.top_feature", 4.0, past=True, lowest=True, floor=5.0, window=10, readings=3,
        tensors=("input",), only="cast",
        says="has one feature with {value:.0f} times the rms of all",
        advice="Use compute '{safer}', whose scales are shared by fewer values, or " + _KEEP + ".",
        source="Fishman et al. 2024 (2409.12517): few channels, whose two weights align; healthy inputs reached 11",
    ),
    Detector(
        "drowning-feature", "outliers", "tensors.top_to_rest", 4.0, past=True, lowest=True, floor=2.5, window=10, readings=3,
        tensors=("input",), only="cast",
        says="has one feature with {value:.0f} times the energy of all others together",
        advice="Use compute '{safer}', whose scales are shared by fewer values, or " + _KEEP + ".",
        source="as growing-feature, for layers of fewer than 440 features; healthy inputs of 24 features reached 3.1",
    ),
    Detector(
        "weight-jump", "outliers", "tensors.amax", 8.0, past=True, window=5, tensors=("weight",),
        says="has a largest value of {value:.3g}, far above its last readings",
        advice="No update does that: go back to a checkpoint, and check the memory of this machine if it happens again.",
        source="a flipped exponent bit; ours: healthy weights less than double between readings",
    ),
    Detector(
        "input-jump", "outliers", "tensors.amax", 64.0, past=True, window=5, tensors=("input",),
        says="has a largest value of {value:.3g}, far above its last readings",
        advice="Look at the weights of the layers before '{module}', and " + _BACK + ".",
        source="ours: inputs of healthy runs jump by up to 13 in the first steps",
    ),
    Detector(
        "weight-surge", "outliers", "tensors.amax", 4.0, past=True, floor=0.1, window=20, readings=3, tensors=("weight",),
        says="has a largest value of {value:.3g}, and it grows from reading to reading",
        advice=_DECAY,
        source="ours: healthy weights grow to 2.9 times the median of 20 readings, in warm-ups; at 30 times the best rate to 5.5",
    ),
    Detector(
        "weight-growth", "growth", "tensors.rms", 4.0, past=True, lowest=True, floor=0.04, window=50, readings=3,
        tensors=("weight",),
        says="has grown to an rms of {value:.3g}",
        advice=_DECAY,
        source="Kosson et al. 2023, Rotational Equilibrium (2305.17212): decay lets it settle; measured: 2.6 with, 4.9 without",
    ),
    Detector(
        "weight-peak", "outliers", "tensors.amax", 8.0, past=True, lowest=True, floor=0.25, window=50, readings=3,
        tensors=("weight",),
        says="has grown to a largest value of {value:.3g}",
        advice=_DECAY,
        source="as weight-growth; measured: 3.7 with weight decay, 7.2 without",
    ),
    Detector(
        "attention-logits", "attention", "attention.max_logit", 1e4,
        says="has attention logits up to {value:.3g}",
        advice="Normalize queries and keys (QK-norm) or cap the logits, and lower the learning rate.",
        source=_WORTMAN + ": runs whose logits passed 1e4 diverged",
    ),
    Detector(
        "attention-growth", "attention", "attention.max_logit", 5.0, past=True, lowest=True, floor=20.0, window=20, readings=3,
        says="has attention logits up to {value:.3g}, and they grow",
        advice="Normalize queries and keys (QK-norm) or cap the logits, and lower the learning rate.",
        source=_WORTMAN + "; Kimi K2 (2507.20534) caps at 100; healthy small runs reached 27",
    ),
    Detector(
        "attention-entropy", "attention", "attention.entropy", 0.05, side="below", clears=2.0, readings=3,
        says="attends to one place only: its entropy is {value:.3f} of an even attention's",
        advice="Normalize queries and keys (QK-norm), and lower the learning rate.",
        source="Zhai et al. 2023, Stabilizing Transformer training by preventing attention entropy collapse (2303.06296)",
    ),
    Detector(
        "logit-drift", "logits", "logits.log_z", 3.0, past=True, lowest=True, floor=10.0, window=10, readings=3,
        says="the logits drift: the logarithm of their partition function is {value:.3g} away from zero",
        advice="Add a z-loss (1e-4 of its square), and keep 'lm_head' in bfloat16 or float32.",
        source="Chowdhery et al. 2022, PaLM (2204.02311), section 5; " + _WORTMAN,
    ),
    Detector(
        "dead-gradient", "dead_layer", "tensors.rms", 0.0, side="below", readings=3, tensors=_GRADIENTS,
        says="is zero everywhere: the layer learns nothing",
        advice="Look for a zero before '{module}' (a gate, a mask, a saturated cast); freeze the layer if that is meant.",
        source="OPT-175B logbook: position embeddings with nearly no gradient never moved, and nothing said so",
    ),
    Detector(
        "dead-update", "dead_layer", "updates.intended", 0.0, side="below", readings=3,
        says="was not to be changed by any audited step",
        advice="Check its learning rate and its gradient; freeze the parameter if that is meant.",
        source="as dead-gradient; an EDQ of nothing intended is NaN",
    ),
    Detector(
        "nonfinite", "nonfinite", "tensors.nonfinite", 1.0, tensors=("weight", "input", "output"),
        says="holds {value:.0f} values that are not finite",
        advice=_FIRST,
        source="isfinite",
    ),
    Detector(
        "nonfinite-gradient", "nonfinite", "tensors.nonfinite", 1.0, tensors=_GRADIENTS, only="unscaled",
        says="holds {value:.0f} values that are not finite",
        advice=_FIRST,
        source="isfinite",
    ),
    Detector(
        "nonfinite-scaled", "nonfinite", "tensors.nonfinite", 1.0, tensors=_GRADIENTS, only="scaled", readings=3,
        says="holds {value:.0f} values that are not finite, sample after sample",
        advice="The loss scale does not cure it: use compute '{safer}', which needs none.",
        source="Micikevicius et al. 2018 (1710.03740): single overflows are how a loss scale is found",
    ),
    Detector(
        "nonfinite-logits", "nonfinite", "logits.nonfinite", 1.0,
        says="the logits are not finite",
        advice=_FIRST,
        source="isfinite",
    ),
    Detector(
        "nonfinite-attention", "nonfinite", "attention.nonfinite", 1.0,
        says="has attention logits that are not finite",
        advice=_FIRST,
        source="isfinite",
    ),
    Detector(
        "nonfinite-step", "nonfinite", "steps.nonfinite", 1.0, calm=10,
        says="the loss or the gradient norm is not finite",
        advice=_FIRST,
        source="isfinite; a step that a loss scale overflowed and skipped is none",
    ),
    Detector(
        "scale-halvings", "loss_scale", "steps.halvings", 3.0, window=100, calm=100,
        says="the loss scale was halved {value:.0f} times within 100 steps",
        advice="Lower the learning rate, or use compute '{safer}', which needs no loss scale.",
        source="OPT-175B and BLOOM-104B logbooks; GLM-130B's fell 30 steps before its loss blew up",
    ),
    Detector(
        "scale-floor", "loss_scale", "steps.loss_scale", 1.0, side="below", clears=2.0, calm=100,
        says="the loss scale is {value:g}: it has reached its floor",
        advice="Something else overflows: use compute '{safer}', and go back to a checkpoint.",
        source="OPT-175B logbook: the loss scale at its minimum; torch.amp.GradScaler has no floor and reaches zero",
    ),
    Detector(
        "scale-skips", "loss_scale", "steps.skipped", 0.05, window=200, calm=100,
        says="{value:.0%} of the last 200 steps were skipped",
        advice="Lower the learning rate, or use compute '{safer}', which needs no loss scale.",
        source="a search that has settled skips one step in 2,000",
    ),
    Detector(
        "loss-spike", "loss_spike", "steps.loss", 8.0, window=100, calm=10,
        says="{spike}",
        advice="If it does not come down by itself in some tens of steps, " + _BACK + ".",
        source="robust z-score, see SpikeJudge; PaLM went back 100 steps and skipped 200 to 500 batches",
    ),
    Detector(
        "gradient-spike", "gradient_spike", "steps.grad_norm", 8.0, window=100, calm=10,
        says="{spike}",
        advice="Clipping (--max-grad-norm) bounds its harm. If the loss follows, " + _BACK + ".",
        source="robust z-score of the logarithm; BLOOM-176B's norm rose two steps before its loss",
    ),
    Detector(
        "loss-climb", "loss_climb", "steps.climb", 0.1, calm=5,
        says="the loss climbs: it is at least {value:.2f} nats above the lowest it has been",
        advice="Unless its data changed, go back to a checkpoint from before the climb, and lower the learning rate.",
        source="a lower bound, see DriftJudge; BLOOM-104B's loss went from 6.4 to 14 near step 7,000 (chronicles of tr8)",
    ),
    Detector(
        "gradient-growth", "growth", "steps.growth", 5.0, calm=5,
        says="the gradient norm grows: it is at least {value:.1f} times the lowest it has been",
        advice="Look at the weights and the attention logits for what grows with it; a lower learning rate stops it.",
        source="a lower bound, see DriftJudge; OLMo 2 (2501.00656) tells of a growing norm, and spikes, in the model before it",
    ),
)  # fmt: skip

DETECTORS: dict[str, Detector] = {row.name: row for row in _ROWS}
"""Everything a run watches itself for, by name. The spike rows are judged by
:class:`~narrowgauge.monitor.spikes.SpikeJudge`; their threshold is its z."""

SAFER: dict[str, str] = {
    "float16": "bfloat16",
    "float16-throughout": "bfloat16",
    "float8-tensor": "float8-row",
    "float8-delayed": "float8-row",
    "float8-tensor-e5m2": "float8-row-e5m2",
    "float8-delayed-e5m2": "float8-row-e5m2",
    "float8-row": "float8-block",
    "float8-row-e5m2": "float8-block-e5m2",
    "float8-block": "bfloat16",
    "float8-block-e5m2": "bfloat16",
    "int8-row": "bfloat16",
    "int8-outlier": "bfloat16",
    "mxfp8": "bfloat16",
    "mxfp6": "mxfp8",
    "mxfp4": "mxfp8",
    "nvfp4": "mxfp8",
    "scalify": "float8-row",
    "scalify-float16": "bfloat16",
    "unit": "float8-row",
}
"""To each compute the next one with more range or with scales for fewer values; ``bfloat16`` to those not listed."""
