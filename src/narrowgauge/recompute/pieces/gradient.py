"""The gradient of a step, computed again from what arrived at the model's outputs, and what was done to it before the update.

Two differences are explained alike: what the backward passes left against the same passes taken again, and what the optimizer
received against what the backward passes left. Each is fitted, for every parameter, as a sum of known terms: the gradient of
each micro-batch, that of the step before, the weight.

A factor that all parameters share and that is below 1 is clipping, which :mod:`narrowgauge.recompute.pieces.clipping` judges.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from narrowgauge.recompute.capture import ForwardCall, ParameterSample, StepCapture, spread_on_cpu
from narrowgauge.recompute.fitting import fitted, near
from narrowgauge.recompute.passes_again import (
    MOST_PARAMETERS,
    NotAgain,
    PassAgain,
    Tensors,
    chosen_parameters,
    moved_by_half_a_spacing,
    parameters_of,
    reached,
)
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, PieceResult, joined, not_checked
from narrowgauge.recompute.pieces.update import narrower_format

PIECE = "gradient"
_MOST_CALLS = 16
_MARGIN = 4.0
_OTHER_WEIGHTS = 3
"""Different weights of micro-batches, so many of which no loop gives."""
_OF_NORMS = 2e-3
"""The relative difference of norms that are one limit."""
_LEAST_KEPT = 0.02
"""Of the last step's gradient: less, or a negative share, is what another term has of its direction."""
_OF_SOME = 4.0
"""Spacings of the format of a pass by which gradients may differ whose envelope was measured with some parameters alone."""


def check_backward(step: StepCapture, model: nn.Module) -> list[PieceResult]:
    """Compare what the backward passes left with the same passes taken again.

    Args:
        step: before its update, with its forward passes.
        model: unwrapped, with the weights of before the update.

    Cost: twice the forward and backward passes of the step; two copies of the parameters and two of their gradients, of a
        large model those of :func:`narrowgauge.recompute.passes_again.chosen_parameters`.
    """
    if "calls" in step.missing:
        return [not_checked(PIECE, step.missing["calls"], step.step)]
    calls = [call for call in step.calls if call.has_gradients]
    if not calls:
        return [not_checked(PIECE, "no backward pass through the model's own outputs was seen", step.step)]
    if why := next(filter(None, (call.why_not_again for call in calls)), ""):
        return [not_checked(PIECE, why, step.step)]
    if len(calls) > _MOST_CALLS:
        return [not_checked(PIECE, f"{len(calls)} micro-batches, and {_MOST_CALLS} at most are taken again", step.step)]
    names = chosen_parameters(model, step.step)
    parameters = parameters_of(model, names)
    if not any(p.requires_grad for p in parameters.values()):
        why = f"every parameter that is trained has more than {MOST_PARAMETERS >> 20} × 2^20 elements"
        return [not_checked(PIECE, why, step.step)]
    try:
        passes, spreads = _passes_again(model, parameters, calls)
    except NotAgain as reason:
        return [not_checked(PIECE, str(reason), step.step)]
    known_to = max((each.cross_entropy.error for each in calls if each.cross_entropy is not None), default=0.0)
    if is_some := sum(1 for _ in model.parameters()) > len(names):
        # Those that were not moved round too, where the run sums in another order than these passes.
        known_to += _OF_SOME * max(_spacing_of_passes(calls, parameters))
    results: list[PieceResult] = []
    unused = [name for name in passes[0] if all(found[name] is None for found in passes)]
    unused = [name for name in unused if name in step.parameters]
    if unused:
        # A module may hold a parameter by other ways than its name, which no copy replaces.
        unused = [name for name in unused if name not in reached(model, calls[0], unused)]
        results.extend(_unused(step, name) for name in unused)
    for name, sample in step.parameters.items():
        terms = [found.get(name) for found in passes]
        if name not in passes[0]:
            continue
        results.append(_of_parameter(step, sample, terms, spreads.get(name), known_to))
    judged = _gathered(step, results, "backward")
    if is_some:
        why = f"of so large a model {len(names)} parameters were computed again, and others are in other steps"
        judged.append(not_checked(PIECE, why, step.step))
    return judged


def _passes_again(
    model: nn.Module, parameters: Tensors, calls: Sequence[ForwardCall]
) -> tuple[list[dict[str, Tensor | None]], Tensors]:
    """Samples of the gradients of each pass, float64, and of how far they all move by half a spacing of the parameters."""
    passes: list[dict[str, Tensor | None]] = []
    spreads: Tensors = {}
    moved = moved_by_half_a_spacing(parameters)
    for call in calls:
        again = PassAgain(model, call)
        found, other = again.gradients(parameters), again.gradients(moved)
        passes.append({name: None if g is None else spread_on_cpu(g).double() for name, g in found.items()})
        for name, g in other.items():
            now = passes[-1][name]
            if g is not None and now is not None:
                apart = spread_on_cpu(g).double() - now
                spreads[name] = spreads[name] + apart if name in spreads else apart
        del found, other
    return passes, spreads


def _spacing_of_passes(calls: Sequence[ForwardCall], parameters: Tensors) -> Iterator[float]:
    """The spacings at 1 of the formats in which passes compute."""
    for call in calls:
        formats = (
            {p.dtype for p in parameters.values() if p.is_floating_point()}
            if call.autocast is None
            else {call.autocast}
        )
        yield from (torch.finfo(each).eps for each in formats)


def _unused(step: StepCapture, name: str) -> PieceResult:
    computed = step.parameters[name].computed
    cause = "unused" if computed is None or not computed.any() else "not-in-graph"
    return PieceResult(PIECE, DEPARTS, (name,), 1.0, 0.0, cause, step=step.step)


def _gathered(step: StepCapture, results: Sequence[PieceResult], when: str) -> list[PieceResult]:
    if not results:
        return [not_checked(PIECE, "no parameter had a gradient", step.step)]
    departs = [each for each in results if each.status == DEPARTS]
    if departs:
        weights = {each.values["factors"] for each in departs if each.cause == "micro-batches-weighted"}
        if len(weights) >= _OTHER_WEIGHTS:  # a loop weights its micro-batches alike for all parameters
            departs = [
                replace(each, cause="", values={}) if each.cause == "micro-batches-weighted" else each
                for each in departs
            ]
        return joined((replace(each, values={**each.values, "when": when}) for each in departs), len(results))
    most = max(results, key=lambda each: each.difference)
    return [PieceResult(PIECE, EQUAL, (), most.difference, most.envelope, values={"when": when}, step=step.step)]


def _of_parameter(
    step: StepCapture, sample: ParameterSample, terms: Sequence[Tensor | None], apart: Tensor | None, known_to: float
) -> PieceResult:
    """Compare one parameter's gradient.

    Args:
        terms: that of each pass, taken again.
        apart: how far they move by rounding, together.
        known_to: the relative error of what began at the outputs, and of what was not moved.
    """
    result = PieceResult(PIECE, EQUAL, (sample.name,), step=step.step)
    known = [t for t in terms if t is not None]
    if sample.computed is None or not known:
        if sample.computed is None and any(bool(t.any()) for t in known):
            return replace(result, status=DEPARTS, difference=1.0, cause="gradient-missing")
        return result
    expected, actual = sum(known[1:], known[0]), sample.computed.double()
    if not bool(actual.isfinite().all()) or not bool(expected.isfinite().all()):
        return result
    length = max(float(expected.norm()), 1e-300)
    spacing = torch.finfo(sample.computed.dtype).eps * length * max(1, len(known))
    envelope = _MARGIN * (0.0 if apart is None else float(apart.norm())) + 4 * spacing + known_to * length
    distance = float((actual - expected).norm())
    result = replace(result, difference=distance / length, envelope=envelope / length)
    if distance <= envelope:
        return result
    cause, values = _cause(sample, known, expected, actual, envelope, step)
    return replace(result, status=DEPARTS, cause=cause, values=values)


def _cause(
    sample: ParameterSample,
    terms: Sequence[Tensor],
    expected: Tensor,
    actual: Tensor,
    envelope: float,
    step: StepCapture,
    common: float = 1.0,
) -> tuple[str, dict[str, object]]:
    if not actual.any():
        return "gradient-zero", {}
    (factor,), rest = fitted(actual, [expected])
    length, distance = float(actual.norm()), float((actual - expected).norm())
    # Where rounding may be as large as what is to be explained, sums of any terms agree.
    most = 0.5 * min(length, distance)
    tolerance = min(max(2 * envelope * max(1.0, abs(factor)), 1e-5 * length), most)
    if rest <= tolerance:
        return "gradient-scaled", {"factor": factor, **what_it_equals(factor, step, len(terms))}
    if len(terms) > 1:
        factors, rest = fitted(actual, terms)
        if rest <= tolerance:
            absent = [place for place, f in enumerate(factors, 1) if abs(f) < 1e-3]
            if absent and all(near(f, 1.0) for f in factors if abs(f) >= 1e-3):
                return "micro-batch-missing", {"missing": ", ".join(map(str, absent)), "of": len(terms)}
            return "micro-batches-weighted", {"factors": ", ".join(f"{f:.3g}" for f in factors)}
    if sample.previous is not None:
        last = sample.previous.double()
        (factor, share), rest = fitted(actual, [expected, last])
        if rest <= tolerance and share >= _LEAST_KEPT:
            return _of_last(factor, share)
    (factor, taken), rest = fitted(actual, [expected, sample.weight.double()])
    if rest <= tolerance and taken > 0:
        return "decay-in-gradient", {"value": taken}
    sums = terms if len(terms) > 1 else ()
    narrow = narrower_format(actual, expected, sample.dtype, common, sums)
    if narrow is None and sums:  # rounded between the passes, and not after the last
        narrow = narrower_format(actual - terms[-1], expected - terms[-1], sample.dtype, 1.0, sums)
    if narrow is not None:
        return "gradient-narrow", {"format": narrow}
    gone = (actual == 0) & (expected != 0)
    if bool(gone.any()) and float((actual - expected)[~gone].norm()) <= tolerance:
        largest, middle = float(expected[gone].abs().max()), float(expected[expected != 0].abs().median())
        share = float(gone.double().mean())
        return (
            ("gradient-underflow", {"share": share, "below": largest})
            if largest < middle
            else ("part", {"share": share})
        )
    if sample.previous is not None:
        # What was kept of the steps before the last one is in neither term: this one need not agree to rounding.
        (factor, share), rest = fitted(actual, [expected, sample.previous.double()])
        if rest <= 0.1 * distance and share >= _LEAST_KEPT:
            return _of_last(factor, share)
    is_apart = (actual - expected).abs() > 1e-3 * expected.abs().clamp_min(1e-30)
    apart, rest = float(is_apart.double().mean()), float((actual - expected)[~is_apart].norm())
    # A small term on all elements leaves some that are nearly right, and none that is so to rounding.
    return ("part", {"share": apart}) if 0 < apart < 0.9 and rest <= tolerance else ("", {})


def _of_last(factor: float, share: float) -> tuple[str, dict[str, object]]:
    if abs(factor) < 1e-3:
        return "gradient-stale", {"share": 1.0}
    return "gradient-kept", {"share": share, "factor": factor}


def what_it_equals(factor: float, step: StepCapture, micro_batches: int | None = None) -> dict[str, object]:
    """A quantity of the run that a factor equals, by name; nothing where it equals none, or several.

    A count that is one too large is a quantity too.

    Args:
        step: whose micro-batches, ranks and loss scale they are.
        micro_batches: as counted otherwise.
    Example:
        >>> what_it_equals(0.8, StepCapture(1, "adamw", ranks=4))
        {'equals': 'ranks / (ranks + 1)'}
    """
    known = {"loss scale": step.loss_scale, "1 / loss scale": 1 / step.loss_scale}
    counts = {"micro-batches": micro_batches or len(step.calls) or 1, "ranks": step.ranks}
    if min(counts.values()) > 1:
        counts["(micro-batches × ranks)"] = math.prod(counts.values())
    for name, count in counts.items():
        known |= {name: float(count), f"1 / {name}": 1 / count}
        if count > 1:
            known |= {f"{name} / ({name} + 1)": count / (count + 1), f"({name} + 1) / {name}": (count + 1) / count}
    found = [name for name, value in known.items() if value != 1.0 and near(factor, value, 1e-4)]
    return {"equals": found[0]} if len(found) == 1 else {}


# ── between the backward passes and the update ────────────────────────────────────────────────────────────────────────


def factor_after_backward(step: StepCapture) -> tuple[float | None, dict[str, float]]:
    """The factor by which all gradients were multiplied after the backward passes, and that of each parameter.

    ``None`` where most of them share none. A parameter whose gradient changed otherwise has no factor.
    """
    factors = {}
    for name, sample in step.parameters.items():
        now, then = sample.gradient, sample.computed
        if now is None or then is None or not then.any():
            continue
        (factor,), rest = fitted(now.double(), [then.double()])
        if rest <= (4 * sample.gradient_eps + 1e-5) * float(now.double().norm()):
            factors[name] = factor
    if not factors:
        return None, factors
    # Those that nothing changed are the measure of the others, even where they are few.
    plain = 1.0 / step.loss_scale
    if sum(_is_factor(step.parameters[name], f, plain, 1e-5) for name, f in factors.items()) * 4 > len(factors):
        return plain, factors
    middle = statistics.median_low(sorted(factors.values()))
    alike = sum(_is_factor(step.parameters[name], f, middle) for name, f in factors.items())
    return (middle if alike * 2 > len(factors) else None), factors


def _is_factor(sample: ParameterSample, factor: float, expected: float, within: float = 1e-4) -> bool:
    """Whether a fitted factor is the expected one, with what rounding the product to the gradient's format leaves of it.

    The factor is a mean of the elements' own, weighted with their squares: of n equal ones rounding leaves 1/√n.
    """
    squares = torch.zeros(1, dtype=torch.float64) if sample.gradient is None else sample.gradient.double().square()
    share = float(squares.norm() / squares.sum().clamp_min(1e-300))
    return near(factor, expected, within + 4 * sample.gradient_eps * share)


def is_own_multiple(step: StepCapture) -> bool:
    """Whether all gradients that the optimizer receives are one multiple of what this process computed itself."""
    common, factors = factor_after_backward(step)
    with_both = [s for s in step.parameters.values() if s.gradient is not None and s.computed is not None]
    is_alike = common is not None and all(
        _is_factor(step.parameters[name], factor, common) for name, factor in factors.items()
    )
    return is_alike and len(factors) == sum(bool(s.computed.any()) for s in with_both if s.computed is not None)


def limit_of_values(step: StepCapture) -> float | None:
    """The limit at which values of the gradients were cut, as ``clip_grad_value_`` does; ``None`` if none was."""
    limits = []
    for sample in step.parameters.values():
        now, then = sample.gradient, sample.computed
        if now is None or then is None or now.equal(then):
            continue
        limits.append(float(now.abs().max()))
        if not limits[-1] or not now.equal(then.clamp(-limits[-1], limits[-1])):
            return None
    return max(limits) if limits and max(limits) - min(limits) <= 1e-5 * max(limits) else None


@dataclass(frozen=True)
class ClippedParts:
    """Parts of the parameters that were clipped by a norm of their own.

    Args:
        limit: the norm that was left in each.
        parts: the names of the parameters of each.
    """

    limit: float
    parts: tuple[tuple[str, ...], ...]

    @property
    def names(self) -> set[str]:
        """Of all of them."""
        return {name for part in self.parts for name in part}

    @property
    def is_each(self) -> bool:
        """Whether each part is one parameter."""
        return all(len(part) == 1 for part in self.parts)


def clipped_parts(step: StepCapture, limit: float | None = None) -> ClippedParts | None:
    """The parts of the parameters that were multiplied by a factor each, which leaves the same norm in them.

    Args:
        limit: the declared one. Without, or where another was used, two parts must have the norm alike.
    """
    squares: dict[str, float] = {}
    factors = {name: factor * step.loss_scale for name, factor in factor_after_backward(step)[1].items()}
    for name in factors:
        if (found := step.parameters[name].computed_squares) is None:
            return None
        squares[name] = float(found) / step.loss_scale**2
    if not factors or near(max(factors.values()), min(factors.values()), 1e-3):
        return None
    alone = [(name,) for name in factors]
    return (
        _clipped_alike(factors, squares, alone, None)
        or _clipped_alike(factors, squares, _of_factors(factors), limit)
        or _clipped_alike(factors, squares, alone, limit)
    )


def _of_factors(factors: Mapping[str, float]) -> list[tuple[str, ...]]:
    """The names that share a factor, for each factor."""
    parts: list[tuple[str, ...]] = []
    for name in sorted(factors, key=lambda name: factors[name]):
        if parts and near(factors[name], factors[parts[-1][0]], 1e-4):
            parts[-1] += (name,)
        else:
            parts.append((name,))
    return parts


def _clipped_alike(
    factors: Mapping[str, float], squares: Mapping[str, float], parts: Sequence[tuple[str, ...]], limit: float | None
) -> ClippedParts | None:
    norms = [factors[part[0]] * math.sqrt(sum(squares[name] for name in part)) for part in parts]
    clipped = [(part, norm) for part, norm in zip(parts, norms, strict=True) if factors[part[0]] < 1 - 1e-4]
    if not clipped:
        return None
    is_declared = limit is not None and all(near(norm, limit, _OF_NORMS) for _, norm in clipped)
    left = limit if is_declared and limit is not None else max(norm for _, norm in clipped)
    is_alike = is_declared or (len(clipped) > 1 and all(near(norm, left, _OF_NORMS) for _, norm in clipped))
    if not is_alike or max(norms) > (1 + _OF_NORMS) * left:
        return None
    return ClippedParts(left, tuple(part for part, _ in clipped))


def _are_of_groups(step: StepCapture, factors: Mapping[str, float]) -> bool:
    """Whether each group of the optimizer has one factor, none of which is above 1, and two have different ones."""
    of_group: dict[int, list[float]] = {}
    for name, factor in factors.items():
        of_group.setdefault(step.parameters[name].group, []).append(factor * step.loss_scale)
    own = [sorted(each) for each in of_group.values()]
    return (
        all(near(each[0], each[-1], 1e-4) for each in own)
        and max((each[-1] for each in own), default=2.0) <= 1 + 1e-4
        and not near(max(each[0] for each in own), min(each[0] for each in own), 1e-3)
    )


def _nearest_factor(step: StepCapture) -> float | None:
    """The factor that most gradients nearly share, whatever else was done to them; that of unscaling, if it is near."""
    factors = []
    for sample in step.parameters.values():
        now, then = sample.gradient, sample.computed
        if now is not None and then is not None and then.any():
            factors.append(fitted(now.double(), [then.double()])[0][0])
    if not factors:
        return None
    middle = statistics.median_low(sorted(factors))
    if near(middle * step.loss_scale, 1.0, 0.02):
        return 1.0 / step.loss_scale
    return middle if sum(near(f, middle, 0.02) for f in factors) * 2 > len(factors) else None


def _taken_away(step: StepCapture) -> list[PieceResult]:
    """Parameters whose gradient was computed and is gone; all of them where something else steps them, which is no fault."""
    computed = {name: s for name, s in step.parameters.items() if s.computed is not None and bool(s.computed.any())}
    gone = [name for name, sample in computed.items() if sample.gradient is None and sample.requires_grad]
    if 2 * len(gone) > len(computed):
        return []
    return [PieceResult(PIECE, DEPARTS, (name,), 1.0, 0.0, "gradient-removed", step=step.step) for name in gone]


def check_after_backward(step: StepCapture, limit: float | None = None) -> list[PieceResult]:
    """Compare what the optimizer received with what the backward passes left, apart from a factor that all share.

    Clipping of single values and of parts of the parameters is left to :mod:`narrowgauge.recompute.pieces.clipping`.

    Args:
        limit: the declared limit of the norm.
    """
    common, factors = factor_after_backward(step)
    compared = {n: s for n, s in step.parameters.items() if s.gradient is not None and s.computed is not None}
    if not compared or limit_of_values(step) is not None or clipped_parts(step, limit) is not None:
        return []
    if limit is None and _are_of_groups(step, factors):
        why = "each group of the optimizer has a factor of its own, as where it is clipped alone"
        return [not_checked(PIECE, why, step.step)]
    common = _nearest_factor(step) if common is None else common
    is_guess = common is None
    if common is None:
        common = 1.0 / step.loss_scale
    results = []
    for name, sample in compared.items():
        assert sample.gradient is not None and sample.computed is not None
        expected, actual = common * sample.computed.double(), sample.gradient.double()
        length = max(float(expected.norm()), 1e-300)
        result = PieceResult(PIECE, EQUAL, (name,), step=step.step)
        is_factor = name in factors and _is_factor(sample, factors[name], common)
        if is_factor or torch.equal(actual, expected) or not bool(actual.isfinite().all()):
            results.append(result)
            continue
        distance = float((actual - expected).norm())
        envelope = 4 * sample.gradient_eps * length
        cause, values = _cause(sample, [expected], expected, actual, envelope, step, common)
        results.append(
            replace(
                result,
                status=DEPARTS,
                difference=distance / length,
                envelope=envelope / length,
                cause=cause,
                values=values,
            )
        )
    results.extend(_taken_away(step))
    departs = [each for each in results if each.status == DEPARTS]
    if len(departs) * 4 > len(results) and not near(common * step.loss_scale, 1.0, 1e-4):
        # Two parts of the parameters were multiplied by two factors, and nothing says which of them is right.
        most = max(departs, key=lambda each: each.difference)
        return [replace(most, where=(), cause="", values={"when": "after backward"})]
    if is_guess and not all(each.cause in ("gradient-stale", "gradient-kept") for each in departs):
        return [not_checked(PIECE, "gradients share no factor after the backward pass", step.step)]
    return _gathered(step, results, "after backward") if departs else []
