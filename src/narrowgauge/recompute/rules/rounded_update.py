"""The update of values that a storage rounds, computed again: with which step they agree, by :mod:`stored_values`.

What was decoded before the step is the rule's input, in float64; what was decoded after it is compared with the rule's result as
the storage rounds that. A storage that loses a step is told from a step that was not taken: only where rounding to the
nearest would have moved the weights and they did not move are they frozen.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.recompute.capture import ParameterSample, StepCapture
from narrowgauge.recompute.fitting import CLOSE, near
from narrowgauge.recompute.piece_results import DEPARTS, EQUAL, NOT_CHECKED, Alternative, PieceResult, not_checked
from narrowgauge.recompute.rules.definitions import SGD, Values, decay_of, definition_of, new_term
from narrowgauge.recompute.stored_values import Assumption, Rounding, StoredValues, judged, shared, told_apart

LOST = "lost-in-format"
"""The cause of what a storage loses by its nature: no departure from the rule."""
_OPERATIONS = 12
"""Roundings of a step of Adam, about: what the arithmetic may take a change away, in its own units."""
_ROUNDINGS_OF_MATRIX = 3.0
"""Of the rounding of a matrix's products, what it may take an element away."""
_COARSEST = 2.0**-8
"""The coarsest arithmetic that is followed: bfloat16's."""


def compare_rounded_state(
    step: StepCapture, sample: ParameterSample, name: str, given: Values, now: Tensor, rounding: Rounding
) -> Iterator[PieceResult]:
    """Compare a state that its storage rounds with what the rule makes of it.

    Args:
        given: the inputs of the rule, float64.
        now: the decoded state after the step.
        rounding: of the state.
    """
    definition = definition_of(step, sample)
    kept, taken = definition.factors(sample)[name]
    before, gradient = given[name], definition.gradient(sample, given)
    term = new_term(name, gradient)
    own = kept * before + taken * term
    moved = (taken * term).abs().maximum((now.double() - before).abs())
    slack = rounding.carried * (kept * before).abs() + 4 * rounding.unit * moved
    others = [
        Assumption("state-zero", torch.zeros_like(before)),
        Assumption("gradient-scaled", kept * before, taken * term, name="factor", is_square=name == "exp_avg_sq"),
    ]
    if before.any():
        others += [Assumption("state-frozen", before), Assumption("state-lost", taken * term)]
        if definition is not SGD:
            others.append(Assumption("beta", term, before - term, (("wanted", kept),), "value"))
    if sample.previous is not None:
        stale = kept * before + taken * new_term(name, sample.previous.double())
        others.append(Assumption("gradient-stale", stale, given=(("share", 1.0),)))
    if name != "exp_avg_sq":
        others.append(Assumption("decay-in-gradient", own, taken * given["weight"], name="value"))
    yield from _results(step, sample, name, StoredValues(now.double(), before, own, rounding, slack), others)


def compare_rounded_weight(
    step: StepCapture, sample: ParameterSample, known: Values, after: Tensor, rounding: Rounding
) -> Iterator[PieceResult]:
    """Compare a weight that its storage rounds with what the rule makes of it.

    Args:
        known: the inputs of the rule and its new states (``new_exp_avg``), float64.
        after: the decoded weight after the step.
        rounding: of the weight.
    """
    definition, weight = definition_of(step, sample), known["weight"]
    rate, decay = float(sample.settings["lr"]), decay_of(sample)
    drop = -rate * definition.weight_decay(sample) * weight
    variants = list(definition.with_variants(sample, known))
    change = -rate * variants[0].step
    own = weight + change + drop
    moved = (change.abs() + drop.abs()).maximum((after.double() - weight).abs())
    slack = rounding.carried * weight.abs() + _OPERATIONS * rounding.unit * moved + rounding.read * drop.abs()
    if "new_exp_avg_sq" in known:
        # Where the terms of the mean cancel, their rounding is large beside it.
        kept, taken = definition.factors(sample)["exp_avg"]
        terms = (kept * known["exp_avg"]).abs() + (taken * definition.gradient(sample, known)).abs()
        share = (change / known["new_exp_avg"]).abs().nan_to_num(0.0, 0.0, 0.0)
        slack = slack + 4 * rounding.unit * terms * share
    if definition.unrounded is not None:
        apart = variants[0].step - definition.unrounded.direction(sample, known)
        slack = slack + _ROUNDINGS_OF_MATRIX * rate * apart.square().mean().sqrt()
    others = [
        Assumption(each.cause, weight - rate * each.step + drop, given=each.values) for each in variants if each.cause
    ]
    others += [
        Assumption("frozen", weight),
        Assumption("sign", weight - change + drop),
        Assumption("rate", weight, change + drop, (("rate", rate),), "factor"),
        Assumption("weights-scaled", torch.zeros_like(own), own, name="factor"),
    ]
    if definition.decouples(sample):
        others.append(Assumption("decay", weight + change, -rate * weight, (("wanted", decay),), "value"))
    if drop.any():
        others += [
            Assumption("decay-lost", weight + change),
            Assumption("step-lost", weight + drop),
            Assumption("step-scaled", weight + drop, change, name="factor"),
        ]
    yield from _results(step, sample, "weight", StoredValues(after.double(), weight, own, rounding, slack), others)


def _results(
    step: StepCapture, sample: ParameterSample, name: str, stored: StoredValues, others: list[Assumption]
) -> Iterator[PieceResult]:
    rounding, storage = stored.rounding, stored.rounding.storage
    if rounding.unit > _COARSEST:
        why = f"storage '{storage.name}' rounds every operation to {rounding.code.mantissa_bits + 1} bits"
        yield replace(not_checked("update", why, step.step), where=(sample.name,))
        return
    verdict = judged(stored, others)
    length = max(float((stored.own - (stored.before if name == "weight" else 0.0)).norm()), 1e-300)
    distance = float((stored.stored - stored.own).norm())
    state: dict[str, object] = {} if name == "weight" else {"state": name}
    result = PieceResult("update", EQUAL, (sample.name,), distance / length, stored.envelope / length, step=step.step)
    if not verdict.is_equal:
        result = replace(result, status=DEPARTS, values=state, alternatives=verdict.alternatives)
        first = verdict.alternatives[0] if verdict.is_exact else told_apart(verdict.alternatives)
        yield _named(result, first)
        return
    if not verdict.is_telling and name == "weight":
        yield replace(
            result, status=NOT_CHECKED, values={"why": f"storage '{storage.name}' keeps too little of a step"}
        )
    else:
        yield result
    if (share := stored.lost()) > 0:
        values = {"what": name, "storage": storage.name, "fallback": storage.fallback}
        lost = replace(result, status=DEPARTS, difference=share, cause=LOST, values=values)
        yield lost


def _named(result: PieceResult, alternative: Alternative | None) -> PieceResult:
    if alternative is None:
        return result
    state = {name: value for name, value in result.values.items() if name == "state"}
    return replace(result, cause=alternative.cause, values={**state, **alternative.values})


def by_shared_cause(departs: Sequence[PieceResult]) -> list[PieceResult]:
    """Results of several parameters, each named by the one cause with which all of them agree, where there is one.

    Rounding may leave several causes for one parameter, and one for all. Those that are not rounded, as vectors that a storage
    keeps in float32, have one already.
    """
    groups: dict[object, list[int]] = {}
    exact: dict[object, list[PieceResult]] = {}
    for place, each in enumerate(departs):
        state = each.values.get("state")
        if each.alternatives:
            groups.setdefault(state, []).append(place)
        elif each.cause != LOST:
            exact.setdefault(state, []).append(each)
    results = list(departs)
    for state, places in groups.items():
        members = [departs[place].alternatives for place in places]
        found = _of_exact(members, exact.get(state, [])) or shared(members) or []
        for place, alternative in zip(places, found, strict=False):
            if alternative is not None:
                results[place] = _named(departs[place], alternative)
    return results


def _of_exact(members: Sequence[Sequence[Alternative]], exact: Sequence[PieceResult]) -> list[Alternative | None]:
    """The alternative of each member that is the one cause of what was not rounded; empty where fewer than half have it."""
    if len({each.cause for each in exact}) != 1:
        return []
    found = [next((each for each in own if _is_of(each, exact[0])), None) for own in members]
    return found if 2 * sum(each is not None for each in found) >= len(found) else []


def _is_of(alternative: Alternative, exact: PieceResult) -> bool:
    if alternative.cause != exact.cause:
        return False
    free, values = alternative.free, alternative.values
    if free and not near(values[free], exact.values[free], CLOSE + alternative.error / max(abs(values[free]), 1e-300)):
        return False
    return all(exact.values.get(name) == value for name, value in values.items() if name != free)
