"""The table of causes: why a run went wrong, one entry per cause.

Detectors say what happens, causes say why. A cause predicts signs, each with the probability that a run with this cause shows it;
a sign that it does not list shows as often as in healthy runs. A cause that no record can show has an entry too, which names the
measurement that confirms it. The command, the documentation, the tests and the report page read this table.

Probabilities are rough on purpose (0.95 nearly always, 0.8 usually, 0.5 often, 0.2 sometimes): what decides is which of two
causes predicts a sign at all.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.loop_terms import in_terms_of
from narrowgauge.spec.tables import Column, Row, Table, name_columns, text_columns

HEALTHY = "healthy"
"""The null cause."""
UNKNOWN_CAUSE = "unknown"
"""The cause of what no other one explains: it is never named, and stands against all that are."""
Applies = Callable[[Evidence], bool]


@dataclass(frozen=True, slots=True)
class Cause:
    """One reason for a run to go wrong.

    Args:
        remedy: what to do; ``{module}``, ``{storage}`` and ``{compute}`` stand for the module where it shows, the storage that
            keeps updates, and a compute with more range; terms of the loop are in braces, too.
        predicts: by sign: how likely a run with this cause shows it.
        applies: whether a run can have it at all.
        prior: how often it occurs, relative to the other causes, before anything is known.
        replay: what a replay of the step would show.
        measure: the measurement that confirms it, where no sign of a record does.
        required: signs of which at least one must be present for the cause to be considered; none: any sign will do.
        notes: signs that are mentioned where none of the required ones is present: a setting without an effect.
        spreads: whether signs that show later may be its consequences; a cause that only slows learning has none.
    """

    name: str
    title: str
    effect: str
    remedy: str
    source: str
    predicts: Mapping[str, float] = field(default_factory=dict)
    applies: Applies = lambda evidence: True
    prior: float = 1.0
    replay: str = ""
    measure: str = ""
    required: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    spreads: bool = True


# ── causes in the arithmetic: formats that end too early, sums that round, casts that lose small values ──────────────────

_WIDE = (
    "leave '{module}' wide ([[override]] pattern = \"{module}\", compute = \"bfloat16\"), or take compute '{compute}'"
)
_BROKEN = {"values-not-finite": 0.5, "gradients-not-finite": 0.3, "norm-not-finite": 0.3, "loss-not-finite": 0.4}
"""Signs that may follow anything that destroys values."""
_WORTSMAN = "Wortsman et al. 2023 (2309.14322)"

CAUSES_OF_ARITHMETIC: tuple[Cause, ...] = (
    Cause(
        "fp16-overflow", "values exceed float16",
        "activations pass 65504, the loss is NaN or infinite, and no loss scale helps",
        "{use_bfloat16}, or {keep_wide}.",
        "Micikevicius et al. 2018 (1710.03740); BLOOM-104B, chronicles of tr8",
        {
            "near-float16-maximum": 0.45, "first-in-forward": 0.6, "loss-not-finite": 0.85, "norm-not-finite": 0.2,
            "values-not-finite": 0.5, "input-jumps": 0.3, "gradients-not-finite": 0.3, "loss-scale-falls": 0.5,
            "loss-scale-at-floor": 0.4, "loss-spikes": 0.2, "channels-dominate": 0.3, "gradients-overflow-alone": 0.2,
            "gradient-spikes": 0.3, "one-step-not-finite": 0.2, "finite-in-float32": 0.9,
        },
        Evidence.in_float16, replay="the first operation whose result is infinite, and that it is finite in float32",
    ),
    Cause(
        "gradient-underflow", "gradients are rounded to zero",
        "gradients below a format's smallest value are lost, and layers learn from the largest ones alone",
        f"Raise the loss scale, take gradients with more range (float8_e5m2), {_WIDE}.",
        "Micikevicius et al. 2018 (1710.03740): 5 % of zero gradients cost accuracy",
        {
            "gradients-at-edge": 0.85, "gradients-underflow": 0.49, "scale-falls-alone": 0.4, "gradient-is-zero": 0.3,
            "moments-freeze": 0.3, "second-moments-at-floor": 0.5, "updates-below-rate": 0.3, "gradient-vanishes": 0.2,
            "loss-scale-at-floor": 0.2,
            "all-gradients-are-zero": 0.4, "loss-does-not-fall": 0.15, "parameter-does-not-move": 0.1, "layer-is-dead": 0.3,
            "one-parameter-is-dead": 0.3, "casts-lose-gradients": 0.6,
        },
        Evidence.narrows_gradients, replay="the same gradients in float32 are not zero",
        required=(
            "gradients-at-edge", "gradients-underflow", "scale-falls-alone", "loss-scale-at-floor", "gradient-vanishes",
            "all-gradients-are-zero",
        ),
    ),
    Cause(
        "loss-scale-collapse", "gradients overflow at any loss scale",
        "the scale is halved until most steps are skipped; tens of steps later the loss diverges",
        "Lower the learning rate, and {use_bfloat16}, which needs no loss scale.",
        "OPT-175B's logbook; GLM-130B: 30 steps of warning",
        {
            "loss-scale-falls": 0.95, "loss-rises-with-scale": 0.1, "gradients-overflow-alone": 0.7,
            "gradients-not-finite": 0.5, "loss-scale-at-floor": 0.4,
            "gradient-spikes": 0.3, "norm-not-finite": 0.4, "loss-does-not-fall": 0.2, "finite-in-float32": 0.8,
        },
        Evidence.scales_loss, replay="gradients of the step are finite in float32",
    ),
    Cause(
        "lost-updates", "the storage rounds updates away",
        "weights stop where an update is smaller than half their spacing; the loss falls slower or stops",
        "Take storage '{storage}', which keeps what this one rounds away (master, exact and split do too).",
        "Yu et al. 2024, Collage (2405.03637); measured: naive stores 0.15 % of its updates at lr 1e-5",
        {
            "updates-lost": 0.95, "step-loses-updates": 0.9, "weights-hardly-move": 0.45, "rate-is-low": 0.45,
            "moments-freeze": 0.05, "loss-does-not-fall": 0.15, "learns-nothing": 0.2,
        },
        Evidence.rounds_weights, spreads=False,
    ),
    Cause(
        "frozen-moments", "second moments no longer follow",
        "with beta2 near 1 a second moment in few bits cannot decrease; step sizes stay those of the past",
        "Take storage '{storage}', or a smaller beta2 (0.95).",
        "bfloat16 keeps no relative change below 2^-9, and beta2 = 0.999 lowers a moment by at most 2^-10",
        {"moments-freeze": 0.95, "gradient-norm-steps": 0.3, "gradient-vanishes": 0.2, "updates-lost": 0.5},
        Evidence.cannot_decay, required=("moments-freeze",), spreads=False,
    ),
    Cause(
        "narrow-accumulation", "micro-batches are summed in few bits",
        "the sum stops growing while addends are added: small gradients are lost, always in the same direction",
        "{sum_wide}.",
        "a bfloat16 sum of equal gradients stops at 256 of them; Micikevicius et al. 2018",
        {"accumulates-in-bfloat16": 1.0, "loss-does-not-fall": 0.2, "accumulation-rounds": 0.8},
        Evidence.accumulates, replay="the same gradients summed in float32 differ by more than a rounding",
        required=("loss-does-not-fall",), notes=("accumulates-in-bfloat16", "accumulation-rounds"), spreads=False,
    ),
    Cause(
        "narrow-all-reduce", "gradients of ranks are summed in few bits",
        "every addition rounds; the error grows with the number of ranks, and the curve moves with it",
        "Take reduction 'float32' or 'reproducible' as the third part of the recipe.",
        "numerics, A3: 1.8e-3 to 3.9e-3 at up to 8 ranks in bfloat16",
        {"reduces-narrowly": 1.0, "loss-does-not-fall": 0.2}, Evidence.on_ranks,
        replay="the same gradients summed in float32 differ by more than a rounding",
        required=("loss-does-not-fall",), notes=("reduces-narrowly",), spreads=False,
    ),
    Cause(
        "average-rounding", "the average's factor is rounded",
        "1 / ranks is no bfloat16 unless the ranks are a power of two: all gradients are off by up to 0.2 %",
        "Take reduction 'float32' or 'reproducible', or a power of two of ranks.",
        "numerics, A3",
        {"averages-in-bfloat16": 1.0, "loss-does-not-fall": 0.05}, Evidence.on_ranks, prior=0.3,
        measure="the ratio of a bucket's average to its sum over the ranks, in float32",
        required=("loss-does-not-fall",), notes=("averages-in-bfloat16",), spreads=False,
    ),
    Cause(
        "eps-underflow", "epsilon or second moments below the format",
        "second moments of small gradients stay at the format's smallest value, or are zero and so is epsilon: steps are too "
        "short, or without a limit, or NaN",
        "Take storage '{storage}', or one with float32 states ({eps} 1e-8); where every operation is in float16, {eps} 1e-4.",
        "numerics, §C2 8: float16 Adam gives NaN in its first step",
        {
            "eps-rounds-to-zero": 0.45, "second-moments-at-floor": 0.9, "moments-freeze": 0.45, "updates-below-rate": 0.45,
            "updates-lost": 0.3, "gradient-norm-steps": 0.2, "gradient-vanishes": 0.2, **_BROKEN,
        },
        required=("eps-rounds-to-zero", "second-moments-at-floor"),
    ),
    Cause(
        "eps-too-large", "AdamW's epsilon exceeds the gradients",
        "updates shrink with the gradients: early layers of large models hardly learn",
        "Lower {eps} (1e-15 for large models).",
        _WORTSMAN,
        {
            "updates-below-rate": 0.9, "gradients-below-eps": 0.9, "weights-hardly-move": 0.3, "loss-does-not-fall": 0.2,
            "updates-lost": 0.3, "learns-nothing": 0.4,
        }, required=("gradients-below-eps", "updates-below-rate"), spreads=False,
    ),
    Cause(
        "fp16-divergence", "float16 diverges",
        "the loss scale falls for thousands of steps, the loss spikes, climbs and ends in NaN",
        "Go back to a checkpoint and {use_bfloat16}.",
        "BLOOM-104B, chronicles of tr8: the scale turned 2,000 steps before the loss",
        {
            "loss-scale-falls": 0.9, "loss-rises-with-scale": 0.7, "loss-spikes": 0.8,
            "gradients-overflow-alone": 0.6, "gradient-spikes": 0.6,
            "spike-stays": 0.4, "spike-of-one-batch": 0.1, "spike-recovers-slowly": 0.3, "gradient-leads-spike": 0.5,
            "repeated-spikes": 0.4, "norm-not-finite": 0.3, "loss-climbs": 0.3, "gradient-norm-grows": 0.2,
            "loss-does-not-fall": 0.3, "loss-ends-high": 0.4, "loss-not-finite": 0.4,
            "first-in-forward": 0.3, "values-not-finite": 0.3,
            "input-jumps": 0.3,
        },
        Evidence.scales_loss,
    ),
    Cause(
        "glu-outliers", "outliers after the gate",
        "the two weights of few channels of a SwiGLU align, and a narrow cast of the product loses all others",
        f"transforms.smooth_swiglu, or {_WIDE}.",
        "Fishman et al. 2024 (2409.12517): after 200 billion tokens in float8",
        {"feature-drowns-others": 0.85, "gate-outliers": 0.45, "operands-underflow": 0.4, "operands-saturate": 0.2,
        "loss-spikes": 0.2},
        Evidence.is_narrow,
    ),
    Cause(
        "massive-activations", "few channels are massive",
        "few channels are a thousand times the others in every input; a scale per tensor rounds the others to zero",
        "Take a compute with a scale per row or block ('{compute}'), or leave '{module}' wide.",
        "Sun et al. 2024, Massive activations (2402.17762)",
        {"channels-dominate": 0.9, "dominated-casts": 0.9, "channel-outliers": 0.3, "operands-underflow": 0.3},
        required=("dominated-casts",), notes=("channels-dominate",), spreads=False,
    ),
    Cause(
        "attention-rounding", "attention rounds in one direction",
        "rows of attention with several equal maxima add errors of one sign; weights grow for thousands of steps",
        "Take the fixed kernel (a maximum of beta times the row's), or attention in float32.",
        "2510.04212",
        {"attention-rounds": 0.9}, prior=0.05,
        measure="rows of attention with more than one maximum, and the mean signed error of its output against float32",
    ),
    Cause(
        "stale-scales", "delayed scales are stale",
        "after a jump, values exceed a scale taken from earlier steps, and saturate",
        "Take compute '{compute}', whose scales are current.",
        "Fishman et al. 2024 (2409.12517); TransformerEngine's delayed scaling clips what exceeds a scale from earlier steps",
        {"operands-saturate": 0.7, "scales-are-exceeded": 0.9, "loss-spikes": 0.3, "gradient-spikes": 0.4, "input-jumps": 0.2},
        Evidence.is_delayed,
    ),
    Cause(
        "block-range", "a block's range exceeds its format",
        "one large value in a block sets its scale, and its small neighbours are rounded to zero",
        f"Smaller blocks, mxfp8 instead of four bits, {_WIDE}.",
        "TransformerEngine's max_blockwise_dynamic_range",
        {
            "blocks-round-to-zero": 0.49, "block-scales-spread": 0.49, "block-scales-span": 0.3, "operands-underflow": 0.45,
            "gradients-underflow": 0.3, "casts-lose-gradients": 0.4,
        },
        Evidence.in_blocks,
    ),
    Cause(
        "cast-inputs", "float32 inputs were cast",
        "tables that need float32, such as rotary angles, enter the model in bfloat16, and late positions blur",
        "FSDP2: cast_forward_inputs=False; keep buffers in float32.",
        "torchtitan, bitwise_parity.md",
        {"own-casts-round": 0.9}, prior=0.1,
        measure="narrowgauge diagnose RUN OTHER with a run on one process: the first tensor that differs",
    ),
    Cause(
        "sampler-mismatch", "trainer and sampler compute differently",
        "in reinforcement learning the two disagree on log-probabilities, and the ratio of policies is wrong from step 0",
        "The same kernels and float16 on both sides.",
        "2510.26788",
        {}, prior=0.02,
        measure="the divergence between the trainer's and the sampler's log-probabilities at step 0",
    ),
)  # fmt: skip

# ── causes in the training around it: rates, data, parts of the model, ranks, resumes, time ──────────────────────────────

_SPIKE = {"loss-spikes": 0.9, "gradient-spikes": 0.5}

CAUSES_OF_TRAINING: tuple[Cause, ...] = (
    Cause(
        "attention-growth", "attention logits grow",
        "queries and keys grow together, attention settles on one position, and the gradient norm spikes",
        "Normalize queries and keys (QK-norm) or cap the logits, and lower the learning rate.",
        _WORTSMAN + "; Zhai et al. 2023 (2303.06296)",
        {
            "queries-and-keys-grow": 0.7, "attention-sharpens": 0.45, "attention-logits-grow": 0.45,
            "attention-collapses": 0.45, "weights-grow": 0.3, "gradient-spikes": 0.2,
            "loss-spikes": 0.2, "gradient-norm-grows": 0.1, "gradient-leads-spike": 0.4, "repeated-spikes": 0.1,
        },
    ),
    Cause(
        "logit-drift", "the model's logits drift",
        "log Z leaves zero, and a head in few bits loses what distinguishes tokens",
        "Add a z-loss (1e-4 of log Z squared), and keep 'lm_head' in bfloat16 or float32.",
        "Chowdhery et al. 2022, PaLM (2204.02311), section 5",
        {"logits-move": 0.95, "logits-drift": 0.45, "weights-grow": 0.2, "loss-climbs": 0.1},
    ),
    Cause(
        "recovering-spike", "an unstable step, from which the run recovers",
        "the gradient norm rises, some steps later the loss, and it takes tens of steps to come back",
        "Nothing, if it is rare; {leave_out} such steps out. A lower learning rate or beta2 = 0.95 makes them rarer.",
        "BLOOM-176B, chronicles of tr11: gradient norm 0.2 to 960 in six steps, loss back after 30",
        {
            **_SPIKE, "spike-recovers-slowly": 0.8, "spike-of-one-batch": 0.15, "gradient-leads-spike": 0.7,
            "gradient-stays-raised": 0.7, "rate-bursts": 0.45, "spike-stays": 0.02,
        },
        prior=1.5,
    ),
    Cause(
        "embedding-shock", "the embedding's gradient jumps",
        "rare tokens give the embedding a gradient far above all others, and a spike follows",
        "Shrink the embedding's gradient (GLM: 0.1 of it), or add a norm after the embedding.",
        "GLM-130B (2210.02414); BLOOM's embedding norm",
        {
            "embedding-gradient-alone": 0.9, "embedding-gradient-jumps": 0.45, "gradient-bursts": 0.45,
            "gradient-spikes": 0.45, "repeated-spikes": 0.5,
            "loss-spikes": 0.2, "gradient-leads-spike": 0.7,
        },
    ),
    Cause(
        "frozen-parameter", "one parameter does not learn",
        "its gradient is zero or nearly so, from its initial values, a mask, or since it is detached",
        "Look at how '{module}' is used and initialized; freeze it if that is intended.",
        "OPT-175B's logbook: position embeddings that never moved, unnoticed",
        {
            "gradient-is-zero": 0.9, "gradient-flows-past": 0.9, "one-parameter-is-dead": 0.45, "layer-is-dead": 0.3,
            "parameter-does-not-move": 0.8, "weight-stands-still": 0.9,
        }, spreads=False,
    ),
    Cause(
        "dead-layer", "a layer learns nothing",
        "all gradients of an attention or an MLP are zero: it takes memory and time",
        "Look for a zero before '{module}': a gate, a mask, a saturated cast, an output multiplied by zero.",
        "as frozen-parameter",
        {
            "layer-is-dead": 0.95, "one-parameter-is-dead": 0.45, "gradient-is-zero": 0.9, "parameter-does-not-move": 0.7,
            "gradient-flows-past": 0.02,
            "loss-spikes": 0.2,
        },
    ),
    Cause(
        "rank-divergence", "copies on ranks drift apart",
        "replicated weights differ between ranks, from an update that not all of them made alike",
        "Go back to the last checkpoint, and look at what one rank alone does: clipping, data, randomness.",
        "BLOOM-176B, chronicles of tr11: gradients of ranks above 0 were not clipped",
        {"ranks-hold-other-values": 0.95}, Evidence.on_ranks,
        replay="the update of the step on every rank, and the first tensor that differs",
    ),
    Cause(
        "silent-corruption", "memory or arithmetic is damaged",
        "a bit flips: a weight jumps, a spike comes from nowhere, or ranks disagree on the same micro-batch",
        "Go back to the last checkpoint; take the machine out if it happens again, and test its memory.",
        "Dixit et al. 2021 (2102.11245); Llama 3: six in 54 days",
        {
            "computes-other-values": 0.5, "weight-jumps": 0.85, "input-jumps": 0.3, "loss-spikes": 0.3, "gradient-spikes": 0.3,
            "values-not-finite": 0.2, "ranks-hold-other-values": 0.2, "checkpoint-was-damaged": 0.1, "spike-stays": 0.4,
            "spike-recovers-slowly": 0.4, "spike-of-one-batch": 0.25, "gradient-vanishes": 0.2, "loss-ends-high": 0.3,
            "all-gradients-are-zero": 0.4,
            "gradient-is-zero": 0.1, "replay-parts": 0.8,
        },
        replay="the step computed again differs from what was recorded",
    ),
    Cause(
        "software-change", "other software since a resume",
        "a kernel or a library rounds differently: the curve moves where the run was resumed",
        "Resume with the versions in run.toml, and compare the two with narrowgauge diagnose RUN OTHER.",
        "OPT-175B's update at 56 %: Megatron 2.4 to 2.6 by accident, and activations took another course",
        {"software-changed": 0.95, "level-moves-at-resume": 0.4, "loss-spikes": 0.2, "spike-at-resume": 0.4},
        Evidence.was_resumed, required=("level-moves-at-resume", "spike-at-resume"), notes=("software-changed",),
    ),
    Cause(
        "resume-changed", "a resume changed something",
        "settings, states or data are not those from before the resume, and the loss goes on at another level",
        "Compare run.toml with the checkpoint's settings{refuse_changes}.",
        "the run's own notes",
        {
            "settings-changed": 0.45, "level-moves-at-resume": 0.45, "checkpoint-was-damaged": 0.1, "loss-spikes": 0.3,
            "spike-at-resume": 0.9, "rate-moves-at-resume": 0.4, "rate-jumps": 0.3, "batches-repeat": 0.3,
            "repeats-begin-at-resume": 0.95,
        },
        Evidence.was_resumed,
        required=("level-moves-at-resume", "spike-at-resume", "rate-moves-at-resume", "repeats-begin-at-resume"),
        notes=("settings-changed",),
    ),
    Cause(
        "micro-batch-normalization", "the loss is averaged per micro-batch",
        "a mean of means is not the mean over tokens: gradients depend on how the batch is split; so it is with a loss that is "
        "normalized per batch wrongly (batch-normalization)",
        "Divide the summed loss by the tokens of the whole step, as narrowgauge.GradientAccumulator's example does.",
        "numerics, §C2 25",
        {
            "loss-and-gradient-vary-together": 0.9, "loss-is-erratic": 0.45, "loss-spikes": 0.4, "gradient-spikes": 0.3,
            "spike-of-one-batch": 0.8, "gradient-stays-raised": 0.2, "repeated-spikes": 0.3, "loss-does-not-fall": 0.3,
            "learns-nothing": 0.3, "loss-climbs": 0.1, "loss-drops": 0.1,
        },
        measure="the same step with another number of micro-batches: a constant factor between gradients",
        required=("loss-and-gradient-vary-together", "loss-is-erratic"), spreads=False,
    ),
    Cause(
        "undefined-operation", "an operation is not defined for what it was given",
        "a logarithm or a root of zero, a division by a count of zero, a softmax over nothing: the loss or a gradient is NaN",
        "Look at the operation that is named and at its operands; bound them away from where it ends (a smallest value, a count "
        "of at least one), or leave such a batch out.",
        "the search for the first bad value: ng.gauges.first_bad_value",
        {
            "operation-is-undefined": 0.98, "loss-not-finite": 0.8, "norm-not-finite": 0.4, "gradients-not-finite": 0.4,
            "one-step-not-finite": 0.4, "first-in-forward": 0.6, "values-not-finite": 0.3,
        },
        required=("operation-is-undefined",),
    ),
    Cause(
        "learning-rate-too-high", "the learning rate is too high",
        "updates overshoot: the gradient norm spikes again and again, weights grow, the loss jumps or stops falling",
        "Lower {lr} by three to ten times, with a longer {warmup}.",
        _WORTSMAN,
        {
            "rate-is-high": 0.75, "rate-jumps": 0.3, "updates-are-large": 0.3, "loss-spikes": 0.4, "gradient-spikes": 0.4,
            "repeated-spikes": 0.3, "spike-stays": 0.4, "spike-recovers-slowly": 0.4, "spike-of-one-batch": 0.1,
            "weights-grow": 0.3, "loss-climbs": 0.1, "loss-does-not-fall": 0.2, "loss-ends-high": 0.2,
            "gradient-norm-grows": 0.15,
            # Attention that grows may be a consequence of such a rate.
            "queries-and-keys-grow": 0.2, "attention-sharpens": 0.15, "attention-logits-grow": 0.15, "attention-collapses": 0.15,
            "logits-drift": 0.1, "input-jumps": 0.1,
            "weight-jumps": 0.1, "gradient-leads-spike": 0.3, "gradient-bursts": 0.1, "learns-nothing": 0.3,
            "gradient-stays-raised": 0.6, "rate-bursts": 0.04,
            **dict.fromkeys(_BROKEN, 0.1),
        },
        prior=2.0,
        # A rate that is unusual and does no harm is one: prompts and heads that are trained alone take such rates.
        required=(
            "loss-spikes", "gradient-spikes", "repeated-spikes", "spike-stays", "spike-recovers-slowly", "weights-grow",
            "loss-climbs", "loss-does-not-fall", "loss-ends-high", "gradient-norm-grows", "learns-nothing", "rate-jumps",
            "gradient-stays-raised", "gradient-bursts", "queries-and-keys-grow", "attention-sharpens", "attention-logits-grow",
            "attention-collapses", "logits-drift", "input-jumps", "weight-jumps", "updates-are-large", *_BROKEN,
        ),
        notes=("rate-is-high",),
    ),
    Cause(
        "learning-rate-too-low", "the learning rate is too low",
        "weights hardly move, or by less than the storage resolves, so that it adds more noise than update",
        "Raise {lr}; where updates drown in rounding noise, storage '{storage}' helps too.",
        "measured: bfloat16 weights rounded stochastically get 20 times as much noise as update at lr 1e-5",
        {
            "rate-is-low": 0.9, "weights-hardly-move": 0.6, "learns-nothing": 0.45, "rounding-noise": 0.45,
            "loss-does-not-fall": 0.2,
        },
        prior=0.5, spreads=False,
    ),
    Cause(
        "repeated-data", "repeated data",
        "a shard is read twice, or the reader begins anew: the training loss falls, and the validation loss does not",
        "Look at the reader's position after a resume, and at duplicates among the shards.",
        "the run's fingerprints of batches",
        {"batches-repeat": 0.97, "run-was-resumed": 0.3, "loss-drops": 0.3, "validation-parts-from-training": 0.45,
         "repeats-begin-at-resume": 0.05}, spreads=False,
    ),
    Cause(
        "bad-data", "a corrupted batch",
        "one batch of damaged or foreign text makes the loss jump; the next one is as before",
        "Look at the data of the step in question; {leave_out} such batches out.",
        "PaLM (2204.02311), section 5.1",
        {
            "tokens-are-unusual": 0.45, "embedding-gradient-alone": 0.2, "loss-follows-tokens": 0.95, "loss-spikes": 0.6,
            "gradient-spikes": 0.3,
            "spike-of-one-batch": 0.95, "spike-recovers-slowly": 0.3, "gradient-stays-raised": 0.1, "gradient-leads-spike": 0.05,
            "spike-stays": 0.05, "one-step-not-finite": 0.9, "norm-not-finite": 0.1, "loss-not-finite": 0.2, "loss-climbs": 0.3,
        },
        prior=2.0,
    ),
    Cause(
        "other-data", "other data from some step on",
        "the tokens have other frequencies from one step on, and the loss rises with them: another source, mixture or "
        "tokenizer",
        "Look at what the reader gives from that step on: shards, the weights of a mixture, the tokenizer. A change on purpose "
        "needs nothing.",
        "the unigram loss of each step",
        {"tokens-change": 0.95, "loss-moves-with-tokens": 0.95, "loss-spikes": 0.4, "spike-stays": 0.7, "loss-climbs": 0.2,
         "loss-ends-high": 0.45, "gradient-spikes": 0.2, "validation-parts-from-training": 0.2},
        required=("loss-moves-with-tokens",), notes=("tokens-change",), spreads=False,
    ),
    Cause(
        "slow-rank", "one rank is slow",
        "all ranks wait for it in every step",
        "Look for other programs, throttled clocks and slow links on its machine, and for layers or data that only it has.",
        "Llama 3 (2407.21783), section 3.3.4",
        {"rank-is-late": 0.95, "ranks-wait": 0.6, "steps-slow-down": 0.3}, Evidence.on_ranks, spreads=False,
    ),
    Cause(
        "slow-data-loader", "the data come too slowly",
        "steps wait for their batch",
        "Tokenize before the run, more readers, data on a local disk.",
        "data_seconds of each step",
        {"data-is-slow": 0.97, "steps-slow-down": 0.1}, spreads=False,
    ),
    Cause(
        "throttling", "the machine is slower: throttling or other programs",
        "clocks fall with heat or other programs come: all steps take longer than they did",
        "Look at clocks, temperatures and other programs on the machine.",
        "seconds of each step, less data and waiting",
        {"computing-slows-down": 0.9, "steps-slow-down": 0.8},
        measure="the clocks, the temperature and the load of the machine, step by step", spreads=False,
    ),
)  # fmt: skip

# ── all of them ──────────────────────────────────────────────────────────────────────────────────────────────────────────

_NOTHING = (
    Cause(
        HEALTHY, "nothing is wrong", "the run trains as its settings let it", "Nothing to do.",
        "the base rates of the signs", prior=40.0,
    ),
    Cause(
        UNKNOWN_CAUSE, "something that no cause of this table explains",
        "the record shows that something is wrong, and no other row predicts what it shows",
        "Look at where it begins: the first sign, its step and its tensor.",
        "an open world: a list of causes is never whole",
        # What any fault may show, and no more.
        {
            "loss-spikes": 0.3, "spike-stays": 0.3, "spike-recovers-slowly": 0.3, "spike-of-one-batch": 0.3,
            "gradient-leads-spike": 0.3, "gradient-stays-raised": 0.3, "gradient-spikes": 0.15, "repeated-spikes": 0.1,
            "loss-climbs": 0.3, "loss-does-not-fall": 0.3, "loss-ends-high": 0.3, "loss-not-finite": 0.3,
            "one-step-not-finite": 0.3, "norm-not-finite": 0.3, "values-not-finite": 0.2, "gradients-not-finite": 0.2,
            "gradient-norm-grows": 0.1, "gradient-vanishes": 0.2, "gradient-norm-steps": 0.2, "gradient-bursts": 0.1,
            "loss-is-erratic": 0.2, "learns-nothing": 0.2,
        },
        prior=0.5,
    ),
)  # fmt: skip

CAUSES: dict[str, Cause] = {row.name: row for row in (*_NOTHING, *CAUSES_OF_ARITHMETIC, *CAUSES_OF_TRAINING)}
"""All causes by name; :data:`HEALTHY` and :data:`UNKNOWN_CAUSE` are the first."""


# ── as rows, for the terminal, JSON and the documentation ────────────────────────────────────────────────────────────────

_WORDS = {"module": "MODULE", "tensor": "TENSOR", "storage": "STORAGE", "compute": "COMPUTE"}


def cause_rows() -> list[Row]:
    """The table of causes as plain values.

    Example:
        >>> [row["title"] for row in cause_rows() if row["name"] == "dead-layer"]
        ['a layer learns nothing']
    """
    return [_cause_row(cause) for cause in CAUSES.values()]


def _cause_row(cause: Cause) -> Row:
    return {
        "name": cause.name,
        "title": cause.title,
        "effect": cause.effect,
        "predicts": dict(sorted(cause.predicts.items(), key=lambda item: -item[1])),
        "remedy": in_terms_of("trainer", cause.remedy).format(**_WORDS),
        "source": cause.source,
        "prior": cause.prior,
        "replay": cause.replay,
        "measure": cause.measure,
        "required": list(cause.required),
        "notes": list(cause.notes),
    }


def cause_table() -> Table:
    columns = (
        *name_columns(cause="name"),
        *text_columns(what_it_does="effect"),
        Column("signs, the likeliest first", _signs),
        *text_columns(what_to_do="remedy", source="source"),
    )
    return Table(columns, cause_rows())


def _signs(row: Row) -> str:
    if row["predicts"]:
        return ", ".join(f"{sign} {chance:.0%}" for sign, chance in row["predicts"].items())
    return f"none of a record; told by: {row['measure']}" if row["measure"] else ""
