"""Signs in the samples of the gauges: which tensors, how many, and how large beside the others.

A sign here compares a tensor with others, with a setting, or with what its arithmetic makes of ordinary values: a norm bounds its
output, an update has the size of its rate, updates make all weights grow by similar factors, and a format ends somewhere. What
one tensor's own metric says by itself is left to a detector and :mod:`~narrowgauge.analysis.diagnosis.signs.event_signs`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from statistics import fmean, median

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.signs.event_signs import GAUGES, first_of
from narrowgauge.analysis.diagnosis.signs.sign import ABSENT, UNKNOWN, Observation, Sign, earliest, present
from narrowgauge.analysis.diagnosis.signs.step_signs import BEFORE, level_of
from narrowgauge.analysis.monitor.detectors import DETECTORS, MAX_BIAS
from narrowgauge.runs.schema import FIRST_EXPONENT
from narrowgauge.spec.significance import MIN_EDQ

Samples = dict[str, list[tuple[int, float]]]

FEWEST_STEPS = 60
"""The fewest steps after which weights that hardly moved are a sign."""
FEWEST = 3
"""The fewest samples from which a tensor's level is known."""
SHOCK = 10.0
"""Factor over its own level, and over the growth of all other gradients, of an embedding's gradient."""
MOST = 0.8
"""Where this share of all parameters is dead, the reason is not theirs."""
NEAR = 2.0**14
"""Largest magnitude from which a quarter of float16's range is used."""
LARGE_UPDATE = 0.1
"""Rms of a weight's change in one step over its rms: at this rate the weight is replaced in ten steps."""
SMALL_UPDATES = 0.15
"""Rms of a matrix's changes, added up over all steps, over its own rms; healthy runs of 60 steps reach 0.42 and more."""
WIDE_BLOCKS = 18.0
"""Binary exponents between a tensor's lowest and highest block scale."""
ZERO_BLOCK = -100.0


def _block_of(tensor: str) -> str:
    """The attention or the MLP that a tensor belongs to: ``model.layers.1.mlp``; empty outside of layers."""
    parts = tensor.rpartition(":")[2].removesuffix(".weight").removesuffix(".bias").split(".")
    return ".".join(parts[:-1]) if "layers" in parts or "h" in parts or "blocks" in parts else ""


def _dead(evidence: Evidence) -> dict[str, int]:
    """Parameters whose gradient is zero in all of the last samples, each with the step from which it is."""
    found = {}
    for name, samples in evidence.metric("tensors", "rms", "grad").items():
        if len(samples) < FEWEST or any(value != 0.0 for _, value in samples[-FEWEST:]):
            continue
        alive = [k for k, (_, value) in enumerate(samples) if value != 0.0]
        found[name.partition(":")[2]] = samples[alive[-1] + 1 if alive else 0][0]
    return found


def _dead_of_some(evidence: Evidence) -> dict[str, int]:
    """The dead parameters; none where nearly all are dead, which is no fault of a layer."""
    dead = _dead(evidence)
    return {} if len(dead) >= MOST * len(evidence.metric("tensors", "rms", "grad")) else dead


def _layer_dead(evidence: Evidence) -> Observation:
    blocks: dict[str, list[int]] = {}
    for name, step in _dead_of_some(evidence).items():
        if block := _block_of(name):
            blocks.setdefault(block, []).append(step)
    found = [(min(steps), block, float(len(steps))) for block, steps in blocks.items() if len(steps) > 1]
    return earliest(found, "all {value:.0f} gradients of {tensor} are zero", 2.0)


def _one_dead(evidence: Evidence) -> Observation:
    dead = _dead_of_some(evidence)
    blocks = [_block_of(name) for name in dead]
    alone = [(step, name) for name, step in dead.items() if not _block_of(name) or blocks.count(_block_of(name)) == 1]
    said = "the gradient of {tensor} alone is zero, and those beside it are not"
    return earliest(((step, name, None) for step, name in alone), said)


def _all_dead(evidence: Evidence) -> Observation:
    samples, dead = evidence.metric("tensors", "rms", "grad"), _dead(evidence)
    if not samples or len(dead) < MOST * len(samples):
        return ABSENT
    said = f"the gradients of {len(dead)} of {len(samples)} parameters are zero"
    return present(min(dead.values()), said, None, float(len(dead)))


def _growth(samples: list[tuple[int, float]], place: int) -> float | None:
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
    return earliest(found, "{tensor} reaches {value:.3g}, and float16 ends at 65504", NEAR)


def _medians(samples: Samples) -> list[tuple[int, str, float]]:
    """For each step the median over all tensors that were sampled in it."""
    steps: dict[int, list[float]] = {}
    for values in samples.values():
        for step, value in values:
            steps.setdefault(step, []).append(value)
    return [(step, "", median(values)) for step, values in steps.items()]


def _large_updates(evidence: Evidence) -> Observation:
    medians = _medians(evidence.metric("updates", "update_to_weight"))
    found = [row for row in medians if row[2] >= LARGE_UPDATE]
    said = "half of all weights change by {value:.0%} or more of their size in one step"
    return earliest(found, said, LARGE_UPDATE, least=2)


def _hardly_move(evidence: Evidence) -> Observation:
    """Whether all steps together, even all in one direction, change half of the matrices by less than :data:`SMALL_UPDATES`."""
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
    if evidence.recipe is None or evidence.cannot_decay():
        return UNKNOWN
    frozen = evidence.metric("moments", "frozen_fraction")
    found = [
        (step, name, value)
        for name, samples in evidence.metric("moments", "bias").items()
        for step, value in samples
        if value >= MAX_BIAS and dict(frozen.get(name, [])).get(step, 0.0) >= DETECTORS["frozen-moments"].threshold
    ]
    said = "the second moments of {tensor} do not move, and are {value:.1f} times what float32 would hold"
    return earliest(found, said, MAX_BIAS)


def _below_eps(evidence: Evidence) -> Observation:
    if evidence.rule is None or evidence.rule.is_matrix:
        return UNKNOWN  # epsilon is AdamW's
    eps = evidence.number_of("eps") or 0.0
    grads = evidence.metric("tensors", "rms", "grad")
    medians = _medians({name: [row for row in samples if row[1] > 0] for name, samples in grads.items()})
    found = [row for row in medians if row[2] <= eps]
    said = f"half of all gradients have an rms below eps = {eps:g} (their median is {{value:.2g}})"
    return earliest(found, said, eps, least=max(2, len(medians) // 2))


def _wide_blocks(evidence: Evidence) -> Observation:
    for row in evidence.gauges:
        for name, scales in (row.get("block_scales") or {}).items():
            # A block of zeros has the lowest scale that there is, which says nothing.
            if not scales or len(scales) != 3 or None in scales or scales[0] <= ZERO_BLOCK:
                continue
            if scales[2] - scales[0] >= WIDE_BLOCKS:
                said = f"the block scales of {name} span 2^{scales[2] - scales[0]:.0f}"
                return present(row["step"], said, name, scales[2] - scales[0], WIDE_BLOCKS)
    return ABSENT


def _grads_finite(evidence: Evidence) -> Observation:
    """Gradients that are not finite in a sample while all inputs are."""
    bad = [
        (step, name, None)
        for name, samples in evidence.metric("tensors", "nonfinite").items()
        if name.startswith(("grad:", "output_grad:"))
        for step, value in samples
        if value
    ]
    inputs = evidence.metric("tensors", "nonfinite", "input").values()
    if any(value for samples in inputs for _, value in samples):
        return ABSENT
    return earliest(bad, "{tensor} is not finite while every input is")


_RMS, _UPDATE = ("tensors.rms",), ("updates.update_to_weight",)

SIGNS_OF_GAUGES: tuple[Sign, ...] = (
    Sign(
        "layer-is-dead", "all gradients of an attention or an MLP are zero", _RMS, 0.1, _layer_dead, GAUGES,
        "gradient-is-zero",
    ),
    Sign(
        "one-parameter-is-dead", "one parameter's gradient is zero, and those beside it are not", _RMS, 0.3, _one_dead,
        GAUGES, "gradient-is-zero",
    ),
    Sign("all-gradients-are-zero", "nearly every gradient is zero", _RMS, 0.1, _all_dead, GAUGES, "gradient-is-zero"),
    Sign(
        "embedding-gradient-jumps", "the embedding's gradient grows far beyond all others", _RMS, 0.003, _embedding_shock,
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
        "gradients-below-eps", "most gradients are smaller than AdamW's epsilon", (*_RMS, "config.eps"), 0.003, _below_eps,
        GAUGES,
    ),
    Sign(
        "block-scales-span", "the scales of a tensor's blocks span more than a narrow format", ("run.blocks",), 0.02,
        _wide_blocks, GAUGES,
    ),
)  # fmt: skip


# ── the shape of what layers hold ────────────────────────────────────────────────────────────────────────────────────────

DOMINATES = 0.85
"""Share of the square root of the hidden size, which is what a norm gives where one channel is all of its input."""
FED_BY_NORM = (
    "q_proj",
    "k_proj",
    "v_proj",
    "qkv_proj",
    "c_attn",
    "gate_proj",
    "up_proj",
    "gate_up_proj",
    "c_fc",
    "lm_head",
)
"""Layers whose input is a norm's output."""
AFTER_GATE = ("down_proj", "w2", "fc2", "mlp.c_proj")
"""Layers whose input is the output of a gate or an activation."""
QUERY_KEY = ("q_proj", "k_proj")
GROWN = 2.0
"""Factor by which queries' and keys' weights outgrow all other matrices; healthy ones stay within 1.3."""
MOVED = 3.0
"""Nats by which log Z leaves its first level; the softmax, and so the loss, need not change."""
SMALL_UPDATE = 0.05
"""Rms of an update over its learning rate, which AdamW keeps between a fifth and one."""
ALONE_SHOCK = 12.0
"""Factor of the embedding's gradient over its largest of ten steps, while others stay; healthy ones reach 13 once, not thrice."""
PILED, EDGE = 0.2, -21 - FIRST_EXPONENT
"""Share of the nonzero gradients in the last three binades of float16, 2^-24 to 2^-21: what is smaller is zero."""
SPREAD = 3.0
"""Binary exponents between a tensor's highest block scale and its median one."""
FEW_ZEROS = 0.01
"""The largest share of a tensor that blocks of eight bits round to zero."""
DROWNS = 10.0
"""Energy of one feature over that of all others together; healthy inputs of 24 features reached 3.1."""


def _values(evidence: Evidence, metric: str, kind: str) -> dict[str, dict[int, float]]:
    return {name: dict(found) for name, found in evidence.metric("tensors", metric, kind).items()}


def _largest_gain(evidence: Evidence) -> dict[int, float]:
    found: dict[int, float] = {}
    for name, samples in evidence.metric("tensors", "amax", "weight").items():
        if "norm" in name or ".ln_" in name:
            for step, value in samples:
                found[step] = max(found.get(step, 0.0), value)
    return found


def _dominated(evidence: Evidence) -> list[tuple[int, str, float]]:
    """Inputs that one channel fills in the last samples: since when, which, and its share of the most that a norm can give."""
    size, gains = evidence.hidden_size, _largest_gain(evidence)
    if size is None or not gains:
        return []
    found = []
    for name, samples in evidence.metric("tensors", "amax", "input").items():
        if not name.endswith(FED_BY_NORM):
            continue
        shares = [(step, value / (math.sqrt(size) * max(1.0, gains.get(step, 1.0)))) for step, value in samples]
        first = next((k for k in range(len(shares)) if all(share >= DOMINATES for _, share in shares[k:])), len(shares))
        if len(shares) - first >= FEWEST:
            found.append((shares[first][0], name, median(share for _, share in shares[first:])))
    return found


def _massive(evidence: Evidence) -> Observation:
    if evidence.hidden_size is None:
        return UNKNOWN
    said = (
        "one channel is nearly all of some tokens in {tensor} and {others} more ({value:.0%} of what a norm can give)"
    )
    return earliest(_dominated(evidence), said, DOMINATES, least=2)


def _massive_in_narrow(evidence: Evidence) -> Observation:
    if not evidence.is_narrow():
        return ABSENT
    narrow = evidence.metric("tensors", "sqnr_db")
    found = [(step, name, None) for step, name, _ in _dominated(evidence) if narrow.get(name)]
    return earliest(found, "the cast of {tensor} shares one scale between such a channel and all others")


def _growth_of(samples: Samples) -> dict[str, list[tuple[int, float]]]:
    return {
        name: [(step, value / values[0][1]) for step, value in values]
        for name, values in samples.items()
        if len(values) >= FEWEST and values[0][1] > 0 and "norm" not in name and not name.endswith(".bias")
    }


def _queries_grow(evidence: Evidence) -> Observation:
    """The weights that only attention's logits hold in check grow, and all others do not."""
    growth = _growth_of(evidence.metric("tensors", "rms", "weight"))
    own = {name: rows for name, rows in growth.items() if name.removesuffix(".weight").endswith(QUERY_KEY)}
    others = [dict(rows) for name, rows in growth.items() if name not in own]
    if not own or len(others) < FEWEST:
        return UNKNOWN
    found = []
    for name, rows in own.items():
        beyond = [(step, value / median(row.get(step, 1.0) for row in others)) for step, value in rows]
        if all(factor >= GROWN for _, factor in beyond[-2:]):
            found.append((next(step for step, factor in beyond if factor >= GROWN), name, beyond[-1][1]))
    said = "{tensor} and {others} more weights of queries and keys grew {value:.1f} times as much as other matrices"
    return earliest(found, said, GROWN, least=2)


def _sharpens(evidence: Evidence) -> Observation:
    """Attention that quickly becomes more certain in one layer: its entropy falls to less than half of what it was."""
    found = []
    for name, samples in evidence.metric("attention", "entropy").items():
        if len(samples) < FEWEST:
            continue
        first = samples[0][1]
        fallen = [step for step, value in samples if value < 0.5 * first]
        if fallen and all(value < 0.5 * first for _, value in samples[-1:]):
            found.append((fallen[0], name, samples[-1][1] / first))
    return earliest(found, "the entropy of {tensor} fell to {value:.0%} of what it was at first", 0.5)


def _logits_move(evidence: Evidence) -> Observation:
    samples = [
        (int(row["step"]), float(value))
        for row in evidence.gauges
        if isinstance(value := (row.get("logits") or {}).get("log_z"), (int, float)) and math.isfinite(value)
    ]
    if len(samples) < FEWEST + 1 or evidence.is_unit_scaled():  # whose head has a scale of its own
        return UNKNOWN
    first = samples[0][1] if len(samples) < 3 * FEWEST else median(value for _, value in samples[:FEWEST])
    off = [step for step, value in samples if abs(value - first) >= MOVED]
    if not all(abs(value - first) >= MOVED for _, value in samples[-2:]):
        return ABSENT
    said = f"log Z went from {first:.1f} to {samples[-1][1]:.1f}"
    return present(off[0], said, None, samples[-1][1] - first, MOVED)


def _below_rate(evidence: Evidence) -> Observation:
    """Updates far smaller than their rate: what divides them is not the gradient's own size."""
    rates = dict(zip(evidence.steps, evidence.column("lr"), strict=True))
    sizes, stored = (
        _values(evidence, "rms", "weight"),
        {n: dict(v) for n, v in evidence.metric("updates", "edq").items()},
    )
    ratios: dict[int, list[float]] = {}
    for name, samples in evidence.metric("updates", "update_to_weight").items():
        for step, value in samples:
            rate, size = rates.get(step), sizes.get(f"weight:{name}", {}).get(step)
            if rate and size and "norm" not in name and stored.get(name, {}).get(step, 1.0) >= MIN_EDQ:
                ratios.setdefault(step, []).append(value * size / rate)
    if evidence.rule is None or evidence.rule.name not in ("adamw", "adam"):
        return UNKNOWN
    if len(ratios) < 2 or evidence.is_unit_scaled():  # whose rates are those of each tensor
        return UNKNOWN
    levels = [(step, "", median(values)) for step, values in ratios.items()]
    low = [row for row in levels if row[2] <= SMALL_UPDATE]
    said = "updates are {value:.2g} of their learning rate, and AdamW's are a fifth to one where epsilon is small"
    return earliest(low, said, SMALL_UPDATE, least=max(2, 0.8 * len(levels)))


def _embedding_jumps(evidence: Evidence) -> Observation:
    """Steps in which the embedding's gradient leaves its level and the others do not; a single one is due to its batch."""
    rest: list[float | None] = []
    calm: list[float] = []
    found: list[tuple[int, float, float]] = []
    for row, (own, whole) in enumerate(
        zip(evidence.column("embedding_grad_norm"), evidence.column("grad_norm"), strict=True)
    ):
        known = own is not None and whole is not None and whole < math.inf
        rest.append(math.sqrt(max(0.0, whole * whole - own * own)) if known else None)  # type: ignore[operator]
        if own is None or not own < math.inf:
            continue
        now, highest = rest[-1], max(calm[-10:], default=math.inf)
        if len(calm) < 10 or now is None or own <= ALONE_SHOCK * highest:
            calm.append(own)
            continue
        level = level_of(rest[max(0, row - BEFORE) : row])
        # The embedding alone: the others neither jump with it, nor are they larger than it anyway.
        if level is not None and now <= ALONE_SHOCK / 2 * level and own > now:
            found.append((evidence.steps[row], own, own / highest))
    if len(found) < FEWEST:
        return ABSENT
    step, value, factor = found[0]
    said = f"the embedding's gradient was {factor:.0f} times its largest before at step {step}, and the others' was not"
    return present(step, f"{said}; so it was at {len(found) - 1} more", None, value, value / factor * ALONE_SHOCK)


def _piled(evidence: Evidence) -> Observation:
    """Whether many gradients lie at the left edge of their histogram, where float16 ends, or none is left."""
    if not evidence.in_float16() or evidence.recipe is None:
        return UNKNOWN
    was_any = False
    for row in evidence.gauges:
        counts = (row.get("histograms") or {}).get("output_grad")
        total = sum(counts) if counts else 0
        if counts is None or not (total or was_any):
            continue
        share = sum(counts[:EDGE]) / total if total else 1.0
        if share >= PILED:
            said = f"{share:.0%} of all gradients that are not zero are below 2^-21, and what is below 2^-25 is zero in float16"
            return present(int(row["step"]), said if total else "every gradient is zero in float16", None, share, PILED)
        was_any = True
    return ABSENT


def _risen(series: Samples, limit_of: Callable[[float], float]) -> list[tuple[int, str, float]]:
    """The tensors that rose to the limit of their first value and stay: the step at which each did, its name and last value."""
    found = []
    for name, samples in series.items():
        limit = limit_of(samples[0][1])
        if len(samples) >= FEWEST and all(value >= limit for _, value in samples[-2:]):
            found.append((next(step for step, value in samples if value >= limit), name, samples[-1][1]))
    return found


def _blocks_spread(evidence: Evidence) -> Observation:
    """Single blocks whose scale leaves that of most others, where it did not at first; blocks of zeros have none."""
    series: Samples = {}
    for row in evidence.gauges:
        for name, scales in (row.get("block_scales") or {}).items():
            if name.startswith(("input:", "weight:")) and scales and len(scales) == 3 and None not in scales:
                series.setdefault(name, []).append((int(row["step"]), scales[2] - scales[1]))
    said = "blocks of {tensor} have scales up to 2^{value:.0f} times the median one"
    return earliest(_risen(series, lambda first: first + SPREAD), said, SPREAD)


def _blocks_lose(evidence: Evidence) -> Observation:
    """More of a tensor is rounded to zero in its blocks than at first, however little of its energy that is."""
    if not evidence.in_blocks() or evidence.recipe is None:
        return UNKNOWN
    # Where many values are zero from the beginning, as in four bits, more of them say nothing.
    series = {
        name: samples for name, samples in evidence.metric("tensors", "underflow").items() if samples[0][1] < FEW_ZEROS
    }
    found = _risen(series, lambda first: max(DETECTORS["underflow"].threshold, 3 * first))
    return earliest(found, "blocks of {tensor} round {value:.0%} of their values to zero, and did not at first")


def _feature_drowns(evidence: Evidence) -> Observation:
    """After a gate, one feature with far more energy than all others, where it had less at first."""
    ratios = evidence.metric("tensors", "top_to_rest", "input")
    series = {name: samples for name, samples in ratios.items() if name.endswith(AFTER_GATE)}
    said = "one feature of {tensor} has {value:.0f} times the energy of all others together"
    return earliest(_risen(series, lambda first: max(DROWNS, 4 * first)), said, DROWNS)


def _gradient_flows_past(evidence: Evidence) -> Observation:
    """Frozen weights: they have no gradient, and their outputs have one. In a dead block only the last output has one."""
    grads, outputs = _values(evidence, "rms", "grad"), _values(evidence, "rms", "output_grad")
    zero: list[tuple[int, str, bool]] = []
    for name, samples in grads.items():
        steps, module = [step for step, value in samples.items() if value == 0.0], name.removesuffix(".weight")[5:]
        passed = outputs.get(f"output_grad:{module}", {})
        if len(steps) >= FEWEST and steps[-1] == max(samples) and passed:
            zero.append((steps[0], name, all(passed.get(step, 0.0) > 0 for step in steps[-FEWEST:])))
    flows = [one for one in zero if one[2]]
    if not zero or 2 * len(flows) <= len(zero):
        return ABSENT if zero else UNKNOWN
    step, name, _ = min(flows)
    return present(step, f"the gradient of {name[5:]} is zero and that of its output is not", name)


def _first_in_forward(evidence: Evidence) -> Observation:
    return first_of(event for event in evidence.events.get("first_bad_value", []) if event.get("phase") == "forward")


UNDEFINED = frozenset({
    "acos", "acosh", "asin", "atanh", "div", "erfinv", "log", "log10", "log1p", "log2", "logit", "mean", "pow", "reciprocal",
    "rsqrt", "sqrt", "std", "true_divide", "var", "xlogy", "nll_loss_forward", "nll_loss2d_forward", "_softmax", "_log_softmax",
})  # fmt: skip
"""Operations that have no finite result for some finite operands: a zero, a negative number, or no element at all."""


def _operation_is_undefined(evidence: Evidence) -> Observation:
    """The search for the first bad value found an operation that is not defined for what it was given.

    The operands are finite, since the value is the first that is not. Sums and products that overflow are not of these: what made
    their operands so large came before.
    """
    for event in evidence.events.get("first_bad_value", []):
        name = str(event.get("operation") or "").removeprefix("aten.").partition(".")[0].rstrip("_")
        if name in UNDEFINED or f"{name}_" in UNDEFINED:
            module = event.get("tensor")
            where = f" in {module}" if isinstance(module, str) and module else ""
            said = (
                f"{event['operation']}{where} made the first value that is not finite, from operands that were finite"
            )
            return replace(first_of([event]), sentence=said)
    return ABSENT


SIGNS_OF_LAYERS: tuple[Sign, ...] = (
    Sign(
        "channels-dominate", "one channel is nearly all of some tokens, in what norms give to layers", ("tensors.amax",), 0.01,
        _massive, GAUGES,
    ),
    Sign(
        "dominated-casts", "such a channel shares the scale of a narrow cast with all others", ("tensors.amax",), 0.3,
        _massive_in_narrow, GAUGES, given="channels-dominate",
    ),
    Sign(
        "queries-and-keys-grow", "weights of queries and keys grow, and other matrices do not", _RMS, 0.01, _queries_grow,
        GAUGES,
    ),
    Sign(
        "attention-sharpens", "the entropy of an attention falls below half of what it was", ("attention.entropy",), 0.05,
        _sharpens, GAUGES,
    ),
    Sign(
        "logits-move", "log Z leaves its first level by three nats", ("logits.log_z",), 0.005, _logits_move, GAUGES,
        per_step=2e-5,
    ),
    Sign(
        "updates-below-rate", "updates are far smaller than their learning rate", ("updates.update_to_weight", "config.eps"),
        0.005,
        _below_rate, GAUGES,
    ),
    Sign(
        "embedding-gradient-alone", "the embedding's gradient jumps, and no other's", ("steps.embedding_grad_norm",
        "steps.grad_norm"),
        0.003, _embedding_jumps, "{embedding_grad_norm}", per_step=1e-6,
    ),
    Sign("gradients-at-edge", "much of all gradients lies where float16 ends", ("run.histograms",), 0.003, _piled, GAUGES),
    Sign(
        "blocks-round-to-zero", "blocks round much more of a tensor to zero than at first", ("tensors.underflow",), 0.005,
        _blocks_lose, GAUGES,
    ),
    Sign(
        "block-scales-spread", "scales of single blocks leave those of most others", ("run.blocks",), 0.004, _blocks_spread,
        GAUGES, per_step=1e-5,
    ),
    Sign(
        "feature-drowns-others", "one feature after a gate has far more energy than all others", ("tensors.top_to_rest",), 0.005,
        _feature_drowns, GAUGES,
    ),
    Sign(
        "gradient-flows-past", "a weight's gradient is zero, and its output's is not", (*_RMS, "events.dead_layer"), 0.05,
        _gradient_flows_past, GAUGES, given="gradient-is-zero",
    ),
    Sign(
        "first-in-forward", "the first value that is not finite came in the forward pass", ("run.ours",), 0.002,
        _first_in_forward,
    ),
    Sign(
        "operation-is-undefined", "an operation has no finite result for the finite operands that it was given",
        ("events.first_bad_value",), 0.0005, _operation_is_undefined, "ng.gauges.first_bad_value(model, step)",
    ),
)  # fmt: skip
