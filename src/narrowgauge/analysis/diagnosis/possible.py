"""Where a cause is possible at all: questions about a run's recipe and settings.

Where the record does not name the recipe, all of them may be: nothing is ruled out by not knowing.
"""

from __future__ import annotations

from narrowgauge.analysis.diagnosis.evidence import Evidence


def in_float16(evidence: Evidence) -> bool:
    """Whether anything is computed in float16."""
    return evidence.recipe is None or any("float16" in (c.dtype, c.name) for c in evidence.recipe.computes)


def scales_loss(evidence: Evidence) -> bool:
    """Whether the loss is scaled dynamically."""
    return evidence.has("steps.loss_scale") or (evidence.recipe is None and in_float16(evidence))


def is_narrow(evidence: Evidence) -> bool:
    """Whether an operand of a matmul has fewer than 16 bits."""
    return evidence.recipe is None or any(
        not cast.is_wide for c in evidence.recipe.computes for cast in c.casts.values()
    )


def is_delayed(evidence: Evidence) -> bool:
    """Whether scales are taken from earlier steps."""
    return evidence.recipe is None or any(compute.is_delayed for compute in evidence.recipe.computes)


def in_blocks(evidence: Evidence) -> bool:
    """Whether scales are those of blocks."""
    if evidence.recipe is None:
        return True
    return any(cast.block is not None for c in evidence.recipe.computes for cast in c.casts.values())


def rounds_weights(evidence: Evidence) -> bool:
    """Whether stored weights are rounded to nearest."""
    return evidence.recipe is None or evidence.recipe.storage.weight.rounding == "nearest"


def cannot_decay(evidence: Evidence) -> bool:
    """Whether second moments are rounded to nearest, and beta2 lowers them by less than half their spacing."""
    beta2 = evidence.number_of("beta2")
    if evidence.recipe is None or evidence.recipe.storage.exp_avg_sq.rounding != "nearest":
        return evidence.recipe is None
    code = evidence.recipe.storage.exp_avg_sq
    mantissa_bits = code.parts * (code.mantissa_bits + 1) - 1
    return beta2 is None or 1 - beta2 < 2.0 ** -(mantissa_bits + 1)


def is_unit_scaled(evidence: Evidence) -> bool:
    """Whether the model is known to be unit-scaled, where each tensor has a scale and a rate of its own."""
    return evidence.recipe is not None and evidence.recipe.compute.transform == "unit"


def on_ranks(evidence: Evidence) -> bool:
    """Whether several processes train together."""
    return evidence.num_ranks > 1


def accumulates(evidence: Evidence) -> bool:
    """Whether a step has several micro-batches, or may have."""
    return (evidence.number_of("gradient_accumulation_steps") or 2) > 1


def was_resumed(evidence: Evidence) -> bool:
    """Whether the run was resumed."""
    return bool(evidence.events.get("resume"))
