"""Signs in the samples of the gauges: which tensors, how many, and how large beside the others.

A sign here compares a tensor with others or with a setting; what one tensor's own metric says by itself is a detector's and in
:mod:`~narrowgauge.analysis.diagnosis.signs_of_events`.
"""

from __future__ import annotations

import math
from statistics import fmean, median

from narrowgauge.analysis.diagnosis import possible
from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.observations import ABSENT, UNKNOWN, Observation, Sign, present
from narrowgauge.analysis.diagnosis.signs_of_events import GAUGES
from narrowgauge.analysis.monitor.conditions import MAX_BIAS
from narrowgauge.analysis.monitor.detectors import DETECTORS

Samples = dict[str, list[tuple[int, float]]]

FEWEST_STEPS = 60
"""Steps from which it says something that weights hardly moved."""
FEWEST = 3
"""Samples from which a tensor's level is known."""
SHOCK = 10.0
"""Factor over its own level, and over the growth of all other gradients, of an embedding's gradient."""
MOST = 0.8
"""Share of all parameters that are dead together for a reason that is not theirs."""
NEAR = 2.0**14
"""Largest magnitude from which a quarter of float16's range is used."""
LARGE_UPDATE = 0.1
"""Rms of a weight's change over its rms in one step, from which the weight is new in ten steps."""
SMALL_UPDATES = 0.15
"""Rms of a matrix's changes, added up over all steps, over its own rms; healthy runs of 60 steps reach 0.42 and more."""
WIDE_BLOCKS = 18.0
"""Binary exponents between a tensor's lowest and highest block scale."""
ZERO_BLOCK = -100.0
_FORMAT_OF = "block_scales"


def _block_of(tensor: str) -> str:
    """The attention or the MLP that a tensor belongs to: ``model.layers.1.mlp``; empty outside of layers."""
    parts = tensor.rpartition(":")[2].removesuffix(".weight").removesuffix(".bias").split(".")
    return ".".join(parts[:-1]) if "layers" in parts or "h" in parts or "blocks" in parts else ""


def _dead(evidence: Evidence) -> dict[str, int]:
    """Parameters whose gradient is zero in the last samples although it was not always, or never was, with the step since."""
    found = {}
    for name, samples in evidence.metric("tensors", "rms", "grad").items():
        if len(samples) < FEWEST or any(value != 0.0 for _, value in samples[-FEWEST:]):
            continue
        alive = [k for k, (_, value) in enumerate(samples) if value != 0.0]
        found[name.partition(":")[2]] = samples[alive[-1] + 1 if alive else 0][0]
    return found


def _dead_of_some(evidence: Evidence) -> dict[str, int]:
    """The dead parameters; none where nearly all are, which is no fault of a layer."""
    dead = _dead(evidence)
    return {} if len(dead) >= MOST * len(evidence.metric("tensors", "rms", "grad")) else dead


def _layer_dead(evidence: Evidence) -> Observation:
    dead = _dead_of_some(evidence)
    blocks: dict[str, list[int]] = {}
    for name, step in dead.items():
        if block := _block_of(name):
            blocks.setdefault(block, []).append(step)
    found = [(min(steps), block, len(steps)) for block, steps in blocks.items() if len(steps) > 1]
    if not found:
        return ABSENT
    step, block, count = min(found)
    return present(step, f"all {count} gradients of {block} are zero", block, float(count), 2.0)


def _one_dead(evidence: Evidence) -> Observation:
    dead = _dead_of_some(evidence)
    blocks = [_block_of(name) for name in dead]
    alone = [(step, name) for name, step in dead.items() if not _block_of(name) or blocks.count(_block_of(name)) == 1]
    if not alone:
        return ABSENT
    step, name = min(alone)
    return present(step, f"the gradient of {name} alone is zero, and those beside it are not", name)


def _all_dead(evidence: Evidence) -> Observation:
    samples, dead = evidence.metric("tensors", "rms", "grad"), _dead(evidence)
    if not samples or len(dead) < MOST * len(samples):
        return ABSENT
    return present(
        min(dead.values()),
        f"the gradients of {len(dead)} of {len(samples)} parameters are zero",
        None,
        float(len(dead)),
    )


def _growth(samples: list[tuple[int, float]], place: int) -> float | None:
    """A sample over the median of those before it."""
    before = [value for _, value in samples[max(0, place - 10) : place] if math.isfinite(value)]
    level = median(before) if len(before) >= FEWEST else 0.0
    return samples[place][1] / level if level > 0 and math.isfinite(samples[place][1]) else None


def _embedding_shock(evidence: Evidence) -> Observation:
    grads = evidence.metric("tensors", "rms", "grad")
    embedding = next((name for name in grads if "embed" in name or "wte" in name), None)
    if embedding is None or len(grads) < FEWEST:
        return UNKNOWN
    for place, (step, value) in enumerate(grads[embedding]):
        own = _growth(grads[embedding], place)
        if own is None or own < SHOCK:
            continue
        others = [
            growth
            for name, samples in grads.items()
            if name != embedding and place < len(samples) and (growth := _growth(samples, place)) is not None
        ]
        if others and own > SHOCK * median(others):
            said = f"the embedding's gradient is {own:.0f} times its level at step {step}, the others' {median(others):.1f} times"
            return present(step, said, embedding.partition(":")[2], value, value * SHOCK / own)
    return ABSENT


def _near_maximum(evidence: Evidence) -> Observation:
    found = [
        (step, name, value)
        for name, samples in evidence.metric("tensors", "amax").items()
        if name.startswith(("input:", "output:"))
        for step, value in samples
        if value >= NEAR
    ]
    if not found:
        return ABSENT
    step, name, value = min(found)
    return present(step, f"{name} reaches {value:.3g}, and float16 ends at 65504", name, value, NEAR)


def _large_updates(evidence: Evidence) -> Observation:
    steps: dict[int, list[float]] = {}
    for samples in evidence.metric("updates", "update_to_weight").values():
        for step, value in samples:
            steps.setdefault(step, []).append(value)
    found = [(step, median(values)) for step, values in steps.items() if median(values) >= LARGE_UPDATE]
    if len(found) < 2:
        return ABSENT
    step, value = min(found)
    return present(
        step, f"half of all weights change by {value:.0%} or more of their size in one step", None, value, LARGE_UPDATE
    )


def _hardly_move(evidence: Evidence) -> Observation:
    """Where all steps together change half of the matrices by less than a twentieth, were they all in one direction."""
    num_steps = evidence.steps[-1] - evidence.steps[0] + 1 if evidence.steps else 0
    if num_steps < FEWEST_STEPS or evidence.starts_trained:  # fine-tuning is meant to change little
        return UNKNOWN
    matrices = {
        name: fmean(value for _, value in samples)  # where the first steps moved them, they did move
        for name, samples in evidence.metric("updates", "update_to_weight").items()
        if "norm" not in name and not name.endswith(".bias") and len(samples) >= FEWEST
        if all(math.isfinite(value) for _, value in samples)
    }
    if not matrices:
        return UNKNOWN
    moved = median(matrices.values()) * num_steps
    if moved >= SMALL_UPDATES:
        return ABSENT
    said = f"{num_steps} steps change half of the weights by {moved:.1%} of their size at most"
    return present(None, said, None, moved, SMALL_UPDATES)


def _at_floor(evidence: Evidence) -> Observation:
    """Second moments that stay above their exact shadow although their format could follow it: they are at its floor."""
    if evidence.recipe is None or possible.cannot_decay(evidence):
        return UNKNOWN
    frozen = evidence.metric("moments", "frozen_fraction")
    found = [
        (step, name, value)
        for name, samples in evidence.metric("moments", "bias").items()
        for step, value in samples
        if value >= MAX_BIAS and dict(frozen.get(name, [])).get(step, 0.0) >= DETECTORS["frozen-moments"].threshold
    ]
    if not found:
        return ABSENT
    step, name, value = min(found)
    said = f"the second moments of {name} do not move, and are {value:.1f} times what float32 would hold"
    return present(step, said, name, value, MAX_BIAS)


def _below_eps(evidence: Evidence) -> Observation:
    eps = evidence.number_of("eps") or 0.0
    steps: dict[int, list[float]] = {}
    for samples in evidence.metric("tensors", "rms", "grad").values():
        for step, value in samples:
            if value > 0:
                steps.setdefault(step, []).append(value)
    found = [(step, median(values)) for step, values in steps.items() if median(values) <= eps]
    if len(found) < max(2, len(steps) // 2):
        return ABSENT
    step, value = min(found)
    return present(
        step, f"half of all gradients have an rms below eps = {eps:g} (their median is {value:.2g})", None, value, eps
    )


def _wide_blocks(evidence: Evidence) -> Observation:
    for row in evidence.gauges:
        for name, scales in (row.get(_FORMAT_OF) or {}).items():
            # A block of zeros has the lowest scale that there is, which says nothing.
            if not scales or len(scales) != 3 or None in scales or scales[0] <= ZERO_BLOCK:
                continue
            if scales[2] - scales[0] >= WIDE_BLOCKS:
                said = f"the block scales of {name} span 2^{scales[2] - scales[0]:.0f}"
                return present(row["step"], said, name, scales[2] - scales[0], WIDE_BLOCKS)
    return ABSENT


def _grads_finite(evidence: Evidence) -> Observation:
    """Where gradients hold values that are not finite in a sample while all inputs are finite."""
    bad = [
        (step, name)
        for name, samples in evidence.metric("tensors", "nonfinite").items()
        if name.startswith(("grad:", "output_grad:"))
        for step, value in samples
        if value
    ]
    inputs = evidence.metric("tensors", "nonfinite", "input").values()
    if not bad or any(value for samples in inputs for _, value in samples):
        return ABSENT
    step, name = min(bad)
    return present(step, f"{name} is not finite while every input is", name)


_GRAD, _UPDATE = ("tensors.rms",), ("updates.update_to_weight",)

SIGNS_OF_GAUGES: tuple[Sign, ...] = (
    Sign(
        "layer-is-dead", "all gradients of an attention or an MLP are zero", _GRAD, 0.1, _layer_dead, GAUGES,
        "gradient-is-zero",
    ),
    Sign(
        "one-parameter-is-dead", "one parameter's gradient is zero, and those beside it are not", _GRAD, 0.3, _one_dead,
        GAUGES, "gradient-is-zero",
    ),
    Sign("all-gradients-are-zero", "nearly every gradient is zero", _GRAD, 0.1, _all_dead, GAUGES, "gradient-is-zero"),
    Sign(
        "embedding-gradient-jumps", "the embedding's gradient grows far beyond all others", _GRAD, 0.003, _embedding_shock,
        GAUGES,
    ),
    Sign("near-float16-maximum", "inputs of layers use most of float16's range", ("tensors.amax",), 0.005, _near_maximum, GAUGES),
    Sign(
        "gradients-overflow-alone", "gradients are not finite while all inputs are", ("tensors.nonfinite",), 0.01,
        _grads_finite, GAUGES,
    ),
    Sign(
        "second-moments-at-floor", "second moments are stuck above their true value, and beta2 is not why",
        ("moments.bias", "events.frozen_moments"), 0.05, _at_floor, GAUGES, given="moments-freeze",
    ),
    Sign("updates-are-large", "half of all weights change by a tenth in a step", _UPDATE, 0.01, _large_updates, GAUGES),
    Sign("weights-hardly-move", "all steps together hardly change the weights", _UPDATE, 0.01, _hardly_move, GAUGES),
    Sign(
        "gradients-below-eps", "most gradients are smaller than AdamW's epsilon", (*_GRAD, "config.eps"), 0.003, _below_eps,
        GAUGES,
    ),
    Sign(
        "block-scales-span", "the scales of a tensor's blocks span more than a narrow format", ("run.blocks",), 0.02,
        _wide_blocks, GAUGES,
    ),
)  # fmt: skip
"""The signs in the samples of the gauges."""
