"""Signs that a replay of one step shows and the record itself does not: unknown until a step was replayed."""

from __future__ import annotations

from narrowgauge.analysis.diagnosis.evidence import Evidence
from narrowgauge.analysis.diagnosis.replay_findings import SHARE, ReplayedStep
from narrowgauge.analysis.diagnosis.signs.sign import ABSENT, UNKNOWN, Observation, Sign, present

LARGE = 0.25
"""Relative difference of a gradient to float32's beyond rounding: healthy runs in four bits differ by 0.07."""
_LOST = 0.5
_OPERANDS = ("inputs", "weights", "output-gradients")
_NEEDS = "narrowgauge diagnose RUN --replay STEP"


def _step(evidence: Evidence) -> ReplayedStep:
    assert evidence.replay is not None, "signs of replays are looked for where there is one"
    return evidence.replay


def _parts(evidence: Evidence) -> Observation:
    """Where another machine, software or order of sums may explain the difference, it is no sign of damage."""
    found = _step(evidence)
    if found.mismatch is None:
        return ABSENT if found.is_compared else UNKNOWN
    return UNKNOWN if found.reasons else present(found.mismatch.step, found.mismatch.message)


def _is_finite(evidence: Evidence) -> Observation:
    found = _step(evidence)
    as_run, wide = found.variant("as-run"), found.variant("float32")
    if as_run is None or wide is None or as_run.is_finite:
        return UNKNOWN
    if not wide.is_finite:
        return ABSENT
    widened = f", and with '{found.cause.name}' alone widened" if found.cause else ""
    return present(found.step, f"the step is finite in float32{widened}")


def _dominates(evidence: Evidence, name: str, said: str, at_least: float = 0.0) -> Observation:
    """Whether widening one place removes most of the gradient's difference to float32."""
    found = _step(evidence)
    share, difference = found.share_of(name), found.difference or 0.0
    if share < SHARE or difference < at_least:
        return ABSENT
    as_run = found.variant("as-run")
    tensor = next(iter((as_run.tensors if as_run is not None else None) or {}), None)
    said = f"{said}: {share:.0%} of the gradient's difference to float32, {difference:.1e}"
    return present(found.step, said, tensor, share, SHARE)


def _loses_updates(evidence: Evidence) -> Observation:
    """Only where the run's own audit has not measured it."""
    found = _step(evidence)
    if found.lost_share is None or evidence.has("steps.edq") or evidence.has("updates.edq"):
        return UNKNOWN
    if found.lost_share < _LOST:
        return ABSENT
    tensor = next(iter(found.losses or {}), None)
    said = f"the storage rounds {found.lost_share:.0%} of the updates away"
    return present(found.step, said, tensor, found.lost_share, _LOST)


def _casts_lose(evidence: Evidence) -> Observation:
    rows = [_dominates(evidence, name, f"casts of {name}", LARGE) for name in _OPERANDS]
    return next((row for row in rows if row.state == "present"), ABSENT)


SIGNS_OF_REPLAYS: tuple[Sign, ...] = (
    Sign("replay-parts", "a step computed again is not what was recorded", ("replay.step",), 0.0005, _parts, _NEEDS),
    Sign("finite-in-float32", "a step that is not finite is finite in float32", ("replay.variants",), 0.05, _is_finite, _NEEDS),
    Sign(
        "attention-rounds", "most of a step's difference to float32 is from attention", ("replay.variants",), 0.02,
        lambda evidence: _dominates(evidence, "attention", "roundings in attention"), _NEEDS,
    ),
    Sign(
        "accumulation-rounds", "most of a step's difference to float32 is from the sum over micro-batches",
        ("replay.variants",), 0.01, lambda evidence: _dominates(evidence, "accumulation", "the sum over micro-batches"), _NEEDS,
    ),
    Sign(
        "own-casts-round", "most of a step's difference to float32 is from casts that no recipe asked for",
        ("replay.variants",), 0.0005, lambda evidence: _dominates(evidence, "own-casts", "casts in the model's own code"), _NEEDS,
    ),
    Sign(
        "casts-lose-gradients", "casts of a matmul's operands change a quarter of the gradient or more", ("replay.variants",),
        0.01, _casts_lose, _NEEDS,
    ),
    Sign(
        "step-loses-updates", "half of a step's updates are rounded away or more", ("replay.variants",), 0.01, _loses_updates,
        _NEEDS,
    ),
)  # fmt: skip
