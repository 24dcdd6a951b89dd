"""Counts of steps other than the right one, by which Adam's correction of bias goes wrong.

A count is wrong in one of three ways. The step was corrected by another count than the optimizer keeps: then the step is the
rule's with that count, which is looked for among all earlier ones (it began anew some steps ago) and among those that a counter
has which several parts of a step share. The optimizer's own count moved by more or less than one. Or that count began anew and
the moments did not: after the first step the square of the first moment is everywhere the same multiple of the second, and later
it is not, so the moments themselves tell whether they hold one gradient.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.recompute.capture import ParameterSample, StepCapture
from narrowgauge.recompute.piece_results import DEPARTS, Alternative, PieceResult
from narrowgauge.recompute.rules.definitions import Values, adam_step, definition_of

PIECE = "update"
COUNT = "step-count"
COUNTS = (COUNT, "count-shared", "correction-other")
_MOST_COUNTS = 1 << 12
_ELEMENTS = 512
"""Elements by which counts are ranked; the nearest few are compared in all of them."""
_NEAREST = 9
_SHARP = 0.01
"""The part of a count to which one must be determined, so that a factor on the step hits none by chance."""
_FEW, _LEAST = 8, 1e-30
_ONE_GRADIENT, _OLDER = 0.01, 0.5


def shared_counts(
    number: int, group: tuple[int, int], place: tuple[int, int], micro_batches: int
) -> tuple[tuple[str, int], ...]:
    """What a counter says at a parameter's step that is raised more than once in each step, by what raises it.

    Args:
        number: the right count.
        group, place: the index of the parameter's group and its own among all parameters, each with the number of all.
        micro_batches: forward passes of a step.

    Example:
        >>> shared_counts(3, (1, 2), (4, 5), 1)
        (('group', 6), ('parameter', 15))
    """
    found = {"group": (number - 1) * group[1] + group[0] + 1, "parameter": (number - 1) * place[1] + place[0] + 1}
    found["micro-batch"] = number * micro_batches
    return tuple((by, count) for by, count in found.items() if count not in (number - 1, number, number + 1))


# ── the step was corrected by another count ───────────────────────────────────────────────────────────────────────────


def counts_that_agree(
    sample: ParameterSample, known: Values, change: Tensor, rate: float, tolerance: float
) -> tuple[Alternative, ...]:
    """The counts with which Adam's step agrees: all earlier ones, and the next.

    Args:
        known: the inputs of the rule and its new states, float64.
        change: of the weight, without decay, float64.
        tolerance: the length to which they must agree.
    Returns:
        Each with its count as value, and as error the part of a count to which it is determined.
    """
    others = [*range(1, min(sample.number, _MOST_COUNTS)), sample.number + 1]
    first, second = known["new_exp_avg"], known["new_exp_avg_sq"]

    def rest(count: int, every: int = 1) -> float:
        step = adam_step(sample, first[::every], second[::every], count, count)
        return float((change[::every] + rate * step).norm())

    every = max(1, change.numel() // _ELEMENTS)
    nearest = sorted(others, key=lambda count: rest(count, every))[:_NEAREST]
    # The right count is a neighbour too: the nearest of few may be far from the next.
    rests = {count: rest(count) for count in {*nearest, sample.number}}
    found = []
    for count in nearest:
        if rests[count] <= tolerance:
            next_best = min(distance for other, distance in rests.items() if other != count)
            values = {"count": count, "wanted": sample.number}
            found.append(Alternative(COUNT, values, error=tolerance / max(next_best, 1e-300)))
    return tuple(found)


def by_shared_variant(step: StepCapture, departs: Sequence[PieceResult]) -> list[PieceResult]:
    """Results of weights, named by the one variant of the rule with which all of them agree, or those of a group, or one alone.

    A factor on the step agrees with some count if counts are many enough, so one of them must know the count to a hundredth.
    Other variants must be the name of half of them already.

    Args:
        departs: of one parameter each; those of weights have the variants that they are near as alternatives.
    """
    results = list(departs)
    samples = [step.parameters[each.where[0]] for each in results]
    # What a storage rounds is compared by likelihood, with the neighbouring counts alone.
    is_exact = ["state" not in each.values and not of.roundings for each, of in zip(results, samples, strict=True)]
    weights = [place for place, is_one in enumerate(is_exact) if is_one]
    of_group: dict[int, list[int]] = {}
    for place in weights:
        of_group.setdefault(samples[place].group, []).append(place)
    named: set[int] = set()
    for places in (weights, *of_group.values(), *([place] for place in weights)):
        members = [results[place] for place in places]
        if not named.intersection(places) and (found := _shared(members)):
            for place, alternative in zip(places, found, strict=True):
                results[place] = replace(results[place], cause=alternative.cause, values=alternative.values)
            named.update(places)
    return [replace(each, alternatives=()) if is_one else each for each, is_one in zip(results, is_exact, strict=True)]


def _shared(members: Sequence[PieceResult]) -> list[Alternative]:
    """The one alternative that all members have, as each has it; empty where there is none."""
    own = [{each.fixed: each for each in reversed(member.alternatives)} for member in members]
    common = set(own[0]).intersection(*own[1:]) if own else set()
    sharp = [kind for kind in common if min(found[kind].error for found in own) <= _SHARP]
    if len(sharp) == 1:
        return [found[sharp[0]] for found in own]
    names = [Alternative(member.cause, member.values).fixed for member in members]
    usual = [kind for kind in common if 2 * names.count(kind) >= len(names)]
    return [found[usual[0]] for found in own] if len(usual) == 1 else []


# ── the optimizer's own count ─────────────────────────────────────────────────────────────────────────────────────────


def check_counts(step: StepCapture) -> list[PieceResult]:
    """Compare the optimizer's own counts with one step, and with what its moments hold.

    Args:
        step: with weights and states after the update.
    Returns:
        A result for each parameter whose count is not right.
    """
    samples = [each for each in step.parameters.values() if definition_of(step, each).is_counted and _was_stepped(each)]
    return [*_of_moves(step, samples), *_of_moments(step, samples)]


def _was_stepped(sample: ParameterSample) -> bool:
    """Whether a step was taken with a gradient of numbers, which a framework may leave out otherwise."""
    gradient, after = sample.gradient, sample.weight_after
    return (
        gradient is not None
        and after is not None
        and sample.listed == 1
        and gradient.numel() > 0
        and bool(gradient.isfinite().all())
        and not after.equal(sample.weight)
        and bool(after.isfinite().all())
    )


def _departs(step: StepCapture, sample: ParameterSample, cause: str, **values: object) -> PieceResult:
    return PieceResult(PIECE, DEPARTS, (sample.name,), 1.0, 0.0, cause, values, step.step)


def _of_moves(step: StepCapture, samples: Sequence[ParameterSample]) -> Iterator[PieceResult]:
    for sample in samples:
        if sample.number and sample.number != sample.number_before + 1:
            yield _departs(step, sample, "count-moved", before=sample.number_before, after=sample.number)


def _of_moments(step: StepCapture, samples: Sequence[ParameterSample]) -> Iterator[PieceResult]:
    held = {id(sample): _is_of_one_gradient(sample) for sample in samples}
    for sample in samples:
        is_begun = any(bool(state.any()) for state in sample.states.values())
        is_older = sample.number == 2 and held[id(sample)] is False
        if is_older or (sample.number == 1 and is_begun):
            yield _departs(step, sample, "count-anew", count=sample.number)
    # A gradient of zero may come before the first other one: of some parameters, as of low-rank adapters, but not of all.
    told = [sample for sample in samples if held[id(sample)] is not None]
    if told and all(held[id(sample)] and sample.number > 2 for sample in told):
        for sample in told:
            yield _departs(step, sample, COUNT, count=sample.number, wanted=2)


def _is_of_one_gradient(sample: ParameterSample) -> bool | None:
    """Whether the moments before the step hold a single gradient; ``None`` where they do not tell."""
    first, second = sample.states.get("exp_avg"), sample.states.get("exp_avg_sq")
    if first is None or second is None or sample.roundings:
        return None
    tells = (second > _LEAST) & (first != 0)  # a first moment that something zeroes holds no gradient at all
    if int(tells.sum()) < _FEW:
        return None
    ratio = first[tells].double().square() / second[tells].double()
    slack = 16 * max(torch.finfo(first.dtype).eps, torch.finfo(second.dtype).eps)
    apart = float(((ratio / ratio.median() - 1).abs() > slack).double().mean())
    return True if apart < _ONE_GRADIENT else False if apart > _OLDER else None
