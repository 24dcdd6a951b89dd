"""Causes in the arithmetic: formats that end too early, sums that round, and casts that lose what is small."""

from __future__ import annotations

from narrowgauge.analysis.diagnosis import possible
from narrowgauge.analysis.diagnosis.predictions import Cause

_WIDE = "leave '{module}' wide ([[override]] pattern = \"{module}\", compute = \"bfloat16\"), or take compute '{safer}'"
_BROKEN = {"values-not-finite": 0.5, "gradients-not-finite": 0.3, "norm-not-finite": 0.3, "loss-not-finite": 0.4}
"""What may follow anything that destroys values."""
_WORTMAN = "Wortsman et al. 2023 (2309.14322)"

CAUSES_OF_ARITHMETIC: tuple[Cause, ...] = (
    Cause(
        "fp16-overflow", "values exceed float16",
        "activations pass 65504, the loss is NaN or infinite, and no loss scale helps",
        "Take compute 'bfloat16', or keep '{module}' in float32 (keep = [\"{module}\"] in a recipe file).",
        "Micikevicius et al. 2018 (1710.03740); BLOOM-104B, chronicles of tr8",
        {
            "near-float16-maximum": 0.45, "first-in-forward": 0.6, "loss-not-finite": 0.85, "norm-not-finite": 0.2,
            "values-not-finite": 0.5, "input-jumps": 0.3, "gradients-not-finite": 0.3, "loss-scale-falls": 0.5,
            "loss-scale-at-floor": 0.4, "loss-spikes": 0.2, "channels-dominate": 0.3, "gradients-overflow-alone": 0.2,
            "gradient-spikes": 0.3, "one-step-not-finite": 0.2, "finite-in-float32": 0.9,
        },
        possible.in_float16, replay="the first operation whose result is infinite, and that it is finite in float32",
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
        lambda evidence: possible.is_narrow(evidence) or possible.in_float16(evidence),
        replay="the same gradients in float32 are not zero",
        required=(
            "gradients-at-edge", "gradients-underflow", "scale-falls-alone", "loss-scale-at-floor", "gradient-vanishes",
            "all-gradients-are-zero",
        ),
    ),
    Cause(
        "loss-scale-collapse", "gradients overflow at any loss scale",
        "the scale is halved until most steps are skipped; tens of steps later the loss diverges",
        "Lower the learning rate, and take compute 'bfloat16', which needs no loss scale.",
        "OPT-175B's logbook; GLM-130B: 30 steps of warning",
        {
            "loss-scale-falls": 0.95, "loss-rises-with-scale": 0.1, "gradients-overflow-alone": 0.7,
            "gradients-not-finite": 0.5, "loss-scale-at-floor": 0.4,
            "gradient-spikes": 0.3, "norm-not-finite": 0.4, "loss-does-not-fall": 0.2, "finite-in-float32": 0.8,
        },
        possible.scales_loss, replay="gradients of the step are finite in float32",
    ),
    Cause(
        "lost-updates", "the storage rounds updates away",
        "weights stop where an update is smaller than half their spacing; the loss falls slower or stops",
        "Take storage '{cure}', which keeps what this one rounds away (master, exact and split do too).",
        "Yu et al. 2024, Collage (2405.03637); measured: naive stores 0.15 % of its updates at lr 1e-5",
        {
            "updates-lost": 0.95, "step-loses-updates": 0.9, "weights-hardly-move": 0.45, "rate-is-low": 0.45,
            "moments-freeze": 0.05, "loss-does-not-fall": 0.15, "learns-nothing": 0.2,
        },
        possible.rounds_weights, spreads=False,
    ),
    Cause(
        "frozen-moments", "second moments no longer follow",
        "with beta2 near 1 a second moment in few bits cannot decrease; step sizes stay those of the past",
        "Take storage '{cure}', or a smaller beta2 (0.95).",
        "bfloat16 keeps no relative change below 2^-9, and beta2 = 0.999 lowers a moment by at most 2^-10",
        {"moments-freeze": 0.95, "gradient-norm-steps": 0.3, "gradient-vanishes": 0.2, "updates-lost": 0.5},
        possible.cannot_decay, required=("moments-freeze",), spreads=False,
    ),
    Cause(
        "narrow-accumulation", "micro-batches are summed in bfloat16",
        "the sum stops growing while addends are added: small gradients are lost, always in the same direction",
        "--accumulation-dtype float32, or kahan for the same bytes.",
        "a bfloat16 sum of equal gradients stops at 256 of them; Micikevicius et al. 2018",
        {"accumulates-in-bfloat16": 1.0, "loss-does-not-fall": 0.2, "accumulation-rounds": 0.8},
        possible.accumulates, replay="the same gradients summed in float32 differ by more than a rounding",
        required=("loss-does-not-fall",), notes=("accumulates-in-bfloat16", "accumulation-rounds"), spreads=False,
    ),
    Cause(
        "narrow-all-reduce", "gradients of ranks are summed in few bits",
        "every addition rounds; the error grows with the number of ranks, and the curve moves with it",
        "Take reduction 'float32' or 'reproducible' as the third part of the recipe.",
        "numerics, A3: 1.8e-3 to 3.9e-3 at up to 8 ranks in bfloat16",
        {"reduces-narrowly": 1.0, "loss-does-not-fall": 0.2}, possible.on_ranks,
        replay="the same gradients summed in float32 differ by more than a rounding",
        required=("loss-does-not-fall",), notes=("reduces-narrowly",), spreads=False,
    ),
    Cause(
        "average-rounding", "the average's factor is rounded",
        "1 / ranks is no bfloat16 unless the ranks are a power of two: all gradients are off by up to 0.2 %",
        "Take reduction 'float32' or 'reproducible', or a power of two of ranks.",
        "numerics, A3",
        {"averages-in-bfloat16": 1.0, "loss-does-not-fall": 0.05}, possible.on_ranks, prior=0.3,
        measure="the ratio of a bucket's average to its sum over the ranks, in float32",
        required=("loss-does-not-fall",), notes=("averages-in-bfloat16",), spreads=False,
    ),
    Cause(
        "eps-underflow", "epsilon or second moments below the format",
        "second moments of small gradients stay at the format's smallest value, or are zero and so is epsilon: steps are too "
        "short, or without a limit, or NaN",
        "Take storage '{cure}', or one with float32 states (--eps 1e-8); where every operation is in float16, --eps 1e-4.",
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
        "Lower --eps (1e-15 for large models).",
        _WORTMAN,
        {
            "updates-below-rate": 0.9, "gradients-below-eps": 0.9, "weights-hardly-move": 0.3, "loss-does-not-fall": 0.2,
            "updates-lost": 0.3, "learns-nothing": 0.4,
        }, required=("gradients-below-eps", "updates-below-rate"), spreads=False,
    ),
    Cause(
        "fp16-divergence", "float16 diverges",
        "the loss scale falls for thousands of steps, the loss spikes, climbs and ends in NaN",
        "Go back to a checkpoint and take compute 'bfloat16'.",
        "BLOOM-104B, chronicles of tr8: the scale turned 2,000 steps before the loss",
        {
            "loss-scale-falls": 0.9, "loss-rises-with-scale": 0.7, "loss-spikes": 0.8,
            "gradients-overflow-alone": 0.6, "gradient-spikes": 0.6,
            "spike-stays": 0.4, "spike-of-one-batch": 0.1, "spike-recovers-slowly": 0.3, "gradient-leads-spike": 0.5,
            "repeated-spikes": 0.4, "norm-not-finite": 0.3, "loss-climbs": 0.3, "gradient-norm-grows": 0.2,
            "loss-does-not-fall": 0.3, "loss-not-finite": 0.4, "first-in-forward": 0.3, "values-not-finite": 0.3,
            "input-jumps": 0.3,
        },
        possible.scales_loss,
    ),
    Cause(
        "glu-outliers", "outliers after the gate",
        "the two weights of few channels of a SwiGLU align, and a narrow cast of the product loses all others",
        f"transforms.smooth_swiglu, or {_WIDE}.",
        "Fishman et al. 2024 (2409.12517): after 200 billion tokens in float8",
        {"feature-drowns-others": 0.85, "gate-outliers": 0.45, "operands-underflow": 0.4, "operands-saturate": 0.2,
        "loss-spikes": 0.2},
        possible.is_narrow,
    ),
    Cause(
        "massive-activations", "few channels are massive",
        "few channels are a thousand times the others in every input; a scale per tensor rounds the others to zero",
        "Take a compute with a scale per row or block ('{safer}'), or leave '{module}' wide.",
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
        "Take compute '{safer}', whose scales are current.",
        "Peng et al. 2023, FP8-LM (2310.18313)",
        {"operands-saturate": 0.7, "scales-are-exceeded": 0.9, "loss-spikes": 0.3, "gradient-spikes": 0.4, "input-jumps": 0.2},
        possible.is_delayed,
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
        possible.in_blocks,
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
"""Those causes, a row each."""
