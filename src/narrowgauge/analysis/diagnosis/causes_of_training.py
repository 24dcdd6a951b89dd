"""Causes in the training around the arithmetic: rates, data, parts of the model, ranks, resumes, and where time goes."""

from __future__ import annotations

from narrowgauge.analysis.diagnosis import possible
from narrowgauge.analysis.diagnosis.predictions import Cause

_BROKEN = {"values-not-finite": 0.5, "gradients-not-finite": 0.3, "norm-not-finite": 0.3, "loss-not-finite": 0.4}
"""What may follow anything that destroys values."""
_SPIKE = {"loss-spikes": 0.9, "gradient-spikes": 0.5}
_WORTMAN = "Wortsman et al. 2023 (2309.14322)"

CAUSES_OF_TRAINING: tuple[Cause, ...] = (
    Cause(
        "attention-growth", "attention logits grow",
        "queries and keys grow together, attention settles on one position, and the gradient norm spikes",
        "Normalize queries and keys (QK-norm) or cap the logits, and lower the learning rate.",
        _WORTMAN + "; Zhai et al. 2023 (2303.06296)",
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
        "Nothing, if it is rare; --on-spike skip leaves such steps out. A lower learning rate or beta2 = 0.95 makes them rarer.",
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
            "parameter-does-not-move": 0.8,
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
        {"ranks-hold-other-values": 0.95}, possible.on_ranks,
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
            "spike-recovers-slowly": 0.4, "spike-of-one-batch": 0.25, "gradient-vanishes": 0.2, "all-gradients-are-zero": 0.4,
            "gradient-is-zero": 0.1, "replay-parts": 0.8,
        },
        replay="the step computed again differs from what was recorded",
    ),
    Cause(
        "software-change", "other software since a resume",
        "a kernel or a library rounds differently: the curve moves where the run was resumed",
        "Resume with the versions in run.toml, and compare the two with narrowgauge diagnose RUN OTHER.",
        "OPT-175B's logbook: Megatron 2.4 to 2.6 by accident",
        {"software-changed": 0.95, "level-moves-at-resume": 0.4, "loss-spikes": 0.2, "spike-at-resume": 0.4},
        possible.was_resumed, required=("level-moves-at-resume", "spike-at-resume"), notes=("software-changed",),
    ),
    Cause(
        "resume-changed", "a resume changed something",
        "settings, states or data are not those from before the resume, and the loss goes on at another level",
        "Compare run.toml with the checkpoint's settings; resume without --accept-changes.",
        "the run's own notes",
        {
            "settings-changed": 0.45, "level-moves-at-resume": 0.45, "checkpoint-was-damaged": 0.1, "loss-spikes": 0.3,
            "spike-at-resume": 0.9, "rate-moves-at-resume": 0.4, "rate-jumps": 0.3, "batches-repeat": 0.3,
            "repeats-begin-at-resume": 0.95,
        },
        possible.was_resumed,
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
        "learning-rate-too-high", "the learning rate is too high",
        "updates overshoot: the gradient norm spikes again and again, weights grow, the loss jumps or stops falling",
        "Lower --lr by three to ten times, with a longer --warmup-steps.",
        _WORTMAN,
        {
            "rate-is-high": 0.75, "rate-jumps": 0.3, "updates-are-large": 0.3, "loss-spikes": 0.4, "gradient-spikes": 0.4,
            "repeated-spikes": 0.3, "spike-stays": 0.4, "spike-recovers-slowly": 0.4, "spike-of-one-batch": 0.1,
            "weights-grow": 0.3, "loss-climbs": 0.1, "loss-does-not-fall": 0.2, "gradient-norm-grows": 0.15,
            "attention-logits-grow": 0.05, "attention-collapses": 0.08, "logits-drift": 0.1, "input-jumps": 0.1,
            "weight-jumps": 0.1, "gradient-leads-spike": 0.3, "gradient-bursts": 0.1, "learns-nothing": 0.3,
            "gradient-stays-raised": 0.6, "rate-bursts": 0.04,
            **dict.fromkeys(_BROKEN, 0.1),
        },
        prior=2.0,
    ),
    Cause(
        "learning-rate-too-low", "the learning rate is too low",
        "weights hardly move, or by less than the storage resolves, so that it adds more noise than update",
        "Raise --lr; where updates drown in rounding noise, storage '{cure}' helps too.",
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
        "Look at the data of the step in question; --on-spike skip leaves such batches out.",
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
        "slow-rank", "one rank is slow",
        "all ranks wait for it in every step",
        "Look for other programs, throttled clocks and slow links on its machine, and for layers or data that only it has.",
        "Llama 3 (2407.21783), section 3.3.4",
        {"rank-is-late": 0.95, "ranks-wait": 0.6, "steps-slow-down": 0.3}, possible.on_ranks, spreads=False,
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
"""Those causes, a row each."""
