"""Clipping: the factor by which gradients were multiplied before the update, and the norm that it was made of.

Clipping to a limit leaves a gradient whose norm is that limit. Where the limit is declared, the factor is computed again;
where it is not, it is the norm that was left in the clipped steps seen before, if two of them agree. Where a norm over
something else gives a limit that holds, that is the cause.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from narrowgauge.recompute.capture import StepCapture
from narrowgauge.recompute.fitting import near
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, PieceResult, not_checked
from narrowgauge.recompute.pieces.gradient import clipped_parts, factor_after_backward, limit_of_values, what_it_equals

PIECE = "clip"
_TOLERANCE = 2e-3
"""Of a limit, where gradients are float32."""
_ABOVE = 3
"""Steps above the limit after which nothing clips: another norm is above it sooner or later."""
_OF_SCALE, _LEAST_SCALE = 0.02, 16.0
"""Within which a factor of the loss is that of the gradients, or a power of two; the least that is taken for a loss scale."""
_MOST_DIVIDED = 1 << 10
"""The largest count by which a loop divides."""


def _tolerance(step: StepCapture) -> float:
    """Of a limit: norms and factors are computed in the format of the gradients, norm by norm."""
    return _TOLERANCE + 2 * max((s.gradient_eps for s in step.parameters.values()), default=0.0)


@dataclass
class ClipHistory:
    """What clipped steps left: by the norm that would explain it, the limit of each step.

    ``above`` counts the last steps that were not clipped although their norm was above the limit.
    """

    above: int = 0
    limits: list[dict[str, float]] = field(default_factory=list)
    factors: list[float] = field(default_factory=list)


def scaled_by_hand(step: StepCapture, loss: Sequence[PieceResult]) -> float:
    """The factor that a loop itself gave its loss, and took from the gradients again before the update; 1 where it did not.

    While the gradients are clipped, any factor of the loss may have been taken from them: then it is one where it is a large
    power of two, as loss scales are.

    Args:
        step: with gradients before and after.
        loss: what the loss showed.
    """
    found = next((float(each.values["factor"]) for each in loss if each.cause == "loss-scaled"), 1.0)
    common, _ = factor_after_backward(step)
    if common is None or common <= 0 or found <= 1:
        return 1.0
    if near(common * step.loss_scale * found, 1.0, _OF_SCALE):
        return 1 / (common * step.loss_scale)
    power = 2.0 ** round(math.log2(found))
    is_scale = power >= _LEAST_SCALE and near(found, power, _OF_SCALE)
    return power if is_scale and common * step.loss_scale * power < 1 else 1.0


def check_clip(step: StepCapture, history: ClipHistory, limit: float | None = None) -> list[PieceResult]:
    """Compute the factor of clipping again.

    Args:
        step: with gradients before and after it.
        history: of the steps seen before; this one is added.
        limit: the declared limit.
    """
    tolerance = _tolerance(step)
    if (by_own := _by_own_parts(step, limit)) is not None:
        return [by_own]
    common, _ = factor_after_backward(step)
    if any(s.computed is not None and s.computed_squares is None for s in step.parameters.values()):
        return [not_checked(PIECE, "parameters are sharded, and norms need all ranks", step.step)]
    if step.outside:
        return [not_checked(PIECE, "gradients that the optimizer does not have may be in the norm", step.step)]
    if (cut := limit_of_values(step)) is not None:
        status, cause = (EQUAL, "") if limit is None else (DEPARTS, "clip-values")
        return [PieceResult(PIECE, status, (), 0.0, 0.0, cause, {"limit": cut}, step.step)]
    if (clipped := clipped_parts(step, limit)) is not None:
        history.above = 0
        left, names = {"limit": clipped.limit}, tuple(name for name in step.parameters if name in clipped.names)
        cause, given = ("clip-each", left) if clipped.is_each else ("clip-norm", {**left, "over": "parts"})
        return [PieceResult(PIECE, DEPARTS, names, 1.0, tolerance, cause, given, step.step)]
    if common is None:
        return [not_checked(PIECE, "gradients share no factor after the backward pass", step.step)]
    factor = common * step.loss_scale
    norms = _norms(step)
    if not norms or not all(map(math.isfinite, norms.values())):
        return [not_checked(PIECE, "gradients are not finite", step.step)]
    whole = norms["all"]
    if limit is not None:
        return [_against(step, factor, norms, limit, history)]
    if near(factor, 1.0, 1e-4):
        known = [limits["all"] for limits in history.limits]
        if len(known) > 1 and max(known) - min(known) <= tolerance * max(known) and whole > 1.01 * max(known):
            given = {"norm": whole, "limit": max(known)}
            return [
                PieceResult(PIECE, DEPARTS, (), whole / max(known) - 1, tolerance, "clip-missing", given, step.step)
            ]
        return [PieceResult(PIECE, EQUAL, (), step=step.step)]
    equals = what_it_equals(common, step)
    if factor > 1 + 1e-4 or equals:
        values: dict[str, object] = {"factor": factor, **equals, "when": "after backward"}
        return [PieceResult("gradient", DEPARTS, (), abs(factor - 1), 1e-4, "gradient-scaled", values, step.step)]
    earlier, seen = list(history.limits), list(history.factors)
    history.limits.append({name: factor * norm for name, norm in norms.items()})
    history.factors.append(factor)
    return [_against_earlier(step, factor, history.limits[-1], earlier, seen)]


def _by_own_parts(step: StepCapture, limit: float | None) -> PieceResult | None:
    """Whether each rank clipped what it holds by the norm of that: ranks differ in the factor, and agree in what is left."""
    tolerance = _tolerance(step)
    ranks = [(norm / step.loss_scale, f * step.loss_scale) for norm, f in step.norms_of_ranks if math.isfinite(f)]
    left = [norm * factor for norm, factor in ranks if factor < 1 - 1e-4]
    if not left or near(max(f for _, f in ranks), min(f for _, f in ranks), 1e-3):
        return None
    found = max(left) if limit is None else limit
    if not all(
        near(norm * f, found, tolerance) if f < 1 - 1e-4 else norm <= found * (1 + tolerance) for norm, f in ranks
    ):
        return None
    values: dict[str, object] = {"limit": found, "over": "shard"}
    return PieceResult(PIECE, DEPARTS, (), 1.0, tolerance, "clip-norm", values, step.step)


def _norms(step: StepCapture) -> dict[str, float]:
    """The norm before clipping, over all gradients and over what is taken by mistake; of a loss scale of 1."""
    squares = {
        name: float(s.computed_squares) / step.loss_scale**2
        for name, s in step.parameters.items()
        if s.computed_squares is not None and s.gradient is not None
    }
    if not squares:
        return {}
    whole = math.sqrt(sum(squares.values()))
    matrices = {n: v for n, v in squares.items() if len(step.parameters[n].shape) > 1}
    largest = max(squares, key=lambda name: squares[name])
    count = sum(math.prod(step.parameters[n].shape) for n in squares)
    found = {
        "all": whole,
        "sum-of-norms": sum(map(math.sqrt, squares.values())),
        "largest": math.sqrt(squares[largest]),
        "matrices": math.sqrt(sum(matrices.values())),
        "vectors": math.sqrt(sum(v for n, v in squares.items() if n not in matrices)),
        "without-largest": math.sqrt(sum(v for n, v in squares.items() if n != largest)),
        "squares": whole**2,
        "mean": whole / math.sqrt(count),
        "first": math.sqrt(next(iter(squares.values()))),
        "last": math.sqrt(list(squares.values())[-1]),
    }
    if step.loss_scale != 1.0:
        found["scaled"] = whole * step.loss_scale
    return {name: norm for name, norm in found.items() if norm > 0}


def _against(
    step: StepCapture, factor: float, norms: dict[str, float], limit: float, history: ClipHistory
) -> PieceResult:
    """Against the declared limit."""
    tolerance = _tolerance(step)
    wanted = {name: min(1.0, limit / (norm + 1e-6)) for name, norm in norms.items()}
    apart = abs(factor / wanted["all"] - 1)
    result = PieceResult(PIECE, EQUAL, (), apart, tolerance, step=step.step)
    if apart <= tolerance:
        return result
    values: dict[str, object] = {"factor": factor, "wanted": wanted["all"], "norm": norms["all"], "limit": limit}
    history.above = history.above + 1 if near(factor, 1.0, 1e-4) else 0
    if history.above:
        if norms["largest"] <= limit and history.above < _ABOVE:
            return not_checked(
                PIECE, "the norm of all is above the limit; that of a part of them need not be", step.step
            )
        return PieceResult(PIECE, DEPARTS, (), apart, tolerance, "clip-missing", values, step.step)
    if 0 < factor < 1 and _is_round(1 / factor):
        given: dict[str, object] = {"factor": factor, "when": "after backward", **what_it_equals(factor, step)}
        return PieceResult("gradient", DEPARTS, (), abs(factor - 1), 1e-5, "gradient-scaled", given, step.step)
    over = [name for name, f in wanted.items() if f < 1 and abs(factor / f - 1) <= tolerance]
    if over:
        return PieceResult(PIECE, DEPARTS, (), apart, tolerance, "clip-norm", {**values, "over": over[0]}, step.step)
    values["left"] = factor * norms["all"]
    return PieceResult(PIECE, DEPARTS, (), apart, tolerance, "clip-limit", values, step.step)


def _is_round(number: float) -> bool:
    """Whether a divisor is a count or a power of two, as no limit over a norm is but by chance."""
    is_count = near(number, round(number), 1e-6) and number <= _MOST_DIVIDED
    return is_count or near(math.log2(number), round(math.log2(number)), 1e-7)


def _against_earlier(
    step: StepCapture, factor: float, limits: dict[str, float], earlier: list[dict[str, float]], seen: list[float]
) -> PieceResult:
    """Against the limits that clipped steps seen before had."""
    tolerance = _tolerance(step)
    if not earlier:
        return not_checked(PIECE, "one clipped step was seen, and ng.task(max_grad_norm=…) says no limit", step.step)

    def holds(name: str) -> bool:
        return all(name in past and near(limits[name], past[name], tolerance) for past in earlier)

    if holds("all"):
        return PieceResult(PIECE, EQUAL, (), abs(limits["all"] / earlier[-1]["all"] - 1), tolerance, step=step.step)
    apart = abs(limits["all"] / earlier[-1]["all"] - 1)
    if all(near(factor, past, 1e-4) for past in seen):
        values = {"factor": factor, "when": "after backward"}
        return PieceResult("gradient", DEPARTS, (), abs(factor - 1), 1e-4, "gradient-scaled", values, step.step)
    over = [name for name in limits if holds(name)]
    if over and len(earlier) > 1:
        values = {"factor": factor, "over": over[0], "limit": limits[over[0]], "norm": limits["all"] / factor}
        return PieceResult(PIECE, DEPARTS, (), apart, tolerance, "clip-norm", values, step.step)
    if over:
        return not_checked(PIECE, "two clipped steps do not say over what the norm is taken", step.step)
    return PieceResult(PIECE, DEPARTS, (), apart, tolerance, "", {"factor": factor}, step.step)
