"""The update of an optimizer, computed again from the gradient, the states and the settings that it had.

Each parameter is compared alone. Its states come first: the weight that they make is then computed from the states as the
rule defines them, or, where those depart, from the states as they are; so a fault of a moment is not reported as one of the
weight too. Where the weight departs, it is fitted as ``weight − a·step − c·weight`` for the step of the rule and of its
variants (epsilon, no bias correction, another count of steps), and the variant with the fewest free numbers that agrees to
rounding is reported. A variant that all parameters or all of a group agree with is the name of each of them.

The envelope of rounding is measured: the rule in the formats of the tensors, and with every input moved by half a spacing of
its format, against the rule in float64.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from narrowgauge.recompute.capture import ParameterSample, StepCapture, random_signs
from narrowgauge.recompute.fitting import fitted, near
from narrowgauge.recompute.piece_results import (
    DEPARTS,
    EQUAL,
    NOT_CHECKED,
    Alternative,
    PieceResult,
    joined,
    not_checked,
)
from narrowgauge.recompute.rules.definitions import (
    SGD,
    UNSEEN,
    Definition,
    Rule,
    Values,
    Variant,
    decay_of,
    definition_of,
    inputs_of,
    new_term,
)
from narrowgauge.recompute.rules.other_counts import COUNTS, by_shared_variant, check_counts, counts_that_agree
from narrowgauge.recompute.rules.rounded_update import (
    LOST,
    by_shared_cause,
    compare_rounded_state,
    compare_rounded_weight,
)
from narrowgauge.recompute.stored_values import lost_share

PIECE = "update"
_MARGIN = 3.0
"""The envelope over the largest distance that was measured."""
NARROWER = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
_FREE = ("", "rate", "decay", "step", "both")
"""The numbers that are free in a fit of a weight: the fewest that agree are the answer."""
_CAUSE = 1.5
"""Envelopes that a cause may leave unexplained: one was measured, and the run drew another."""
_OF_GROUPS = ("eps", "eps-inside-root", "eps-before-correction")
"""Causes that a whole group of parameters has, or none of it."""
_EXACT = ("frozen", "weight-narrow", "weights-scaled", "sign", "step-lost")
"""Causes that no variant of the rule is. Others may be one: a count that began anew is a factor where eps is small."""


def check_update(step: StepCapture) -> list[PieceResult]:
    """Compute the update of every sampled parameter again.

    Args:
        step: with weights and states after the update.
    Returns:
        One result if all are equal; otherwise one for each cause, with the parameters that it is about.
    """
    if not step.rule:
        return [not_checked(PIECE, "the optimizer's rule has no definition here", step.step)]
    if any(sample.settings.get("amsgrad") for sample in step.parameters.values()):
        return [not_checked(PIECE, "amsgrad divides by the largest second moment so far, which is not kept", step.step)]
    found = [each for sample in step.parameters.values() for each in _of_parameter(step, sample.whole or sample)]
    if not found:
        return [not_checked(PIECE, "no parameter had a gradient", step.step)]
    departs = by_shared_cause(by_shared_variant(step, [each for each in found if each.status == DEPARTS]))
    departs = _rates_of_groups(step, _settings_of_groups(step, departs))
    departs += check_counts(step)
    equal = [each for each in found if each.status == EQUAL]
    unknown = joined((each for each in found if each.status == NOT_CHECKED), len({each.where for each in found}))
    if departs:
        kept = _without_hidden(step, _without_rounded(step, departs))
        return [*joined(kept, len({each.where for each in found}) - (len(departs) - len(kept))), *unknown]
    return [*([_worst(equal, step.step)] if equal else []), *unknown]


def _settings_of_groups(step: StepCapture, departs: Sequence[PieceResult]) -> list[PieceResult]:
    """Results without the causes that are settings of a group, where not all of a group's weights that depart have the one.

    Where a step is another function of the moments altogether, each parameter is near another epsilon by chance.
    """
    of_group: dict[int, set[tuple[object, ...]]] = {}
    for each in departs:
        if "state" not in each.values:
            cause = (each.cause, *sorted(each.values.items())) if each.cause in _OF_GROUPS else ()
            of_group.setdefault(step.parameters[each.where[0]].group, set()).add(cause)
    return [
        replace(each, cause="", values={})
        if each.cause in _OF_GROUPS and len(of_group[step.parameters[each.where[0]].group]) > 1
        else each
        for each in departs
    ]


def _rates_of_groups(step: StepCapture, departs: Sequence[PieceResult]) -> list[PieceResult]:
    """Results in which a factor on a group's steps is named by the one other group whose rate makes it."""
    rates = {sample.group: float(sample.settings["lr"]) for sample in step.parameters.values()}

    def named(each: PieceResult) -> PieceResult:
        if each.cause not in ("rate", "step-scaled"):
            return each
        group, factor = step.parameters[each.where[0]].group, float(str(each.values["factor"]))
        others = [other for other, rate in rates.items() if other != group and near(factor * rates[group], rate, 1e-3)]
        if not others or near(factor, 1.0, 1e-2):
            return each
        values = {"rate": rates[group], "other": rates[others[0]], "group": group, "of": others[0]}
        return replace(each, cause="rate-of-other-group", values=values)

    return [named(each) for each in departs]


def check_frozen(step: StepCapture) -> list[PieceResult]:
    """Name the parameters that do not require a gradient and were changed all the same."""
    moved = [
        name
        for name, sample in step.parameters.items()
        if not sample.requires_grad and sample.weight_after is not None and not sample.weight_after.equal(sample.weight)
    ]
    return [PieceResult(PIECE, DEPARTS, tuple(moved), 1.0, 0.0, "frozen-moves", step=step.step)] if moved else []


def _without_rounded(step: StepCapture, departs: Sequence[PieceResult]) -> list[PieceResult]:
    """Without weights that stood still because all were rounded to a narrower format, as gains of 1 do."""
    formats = [getattr(torch, each.values["format"]) for each in departs if each.cause == "weight-narrow"]

    def is_rounded(each: PieceResult) -> bool:
        after = step.parameters[each.where[0]].weight_after
        return (
            each.cause == "frozen" and after is not None and bool((after.to(formats[0]).to(after.dtype) == after).all())
        )

    return [each for each in departs if not formats or not is_rounded(each)]


def _without_hidden(step: StepCapture, departs: Sequence[PieceResult]) -> list[PieceResult]:
    """Without matrices in which rounding hides all but a rest of a departure that other weights of their group name."""
    named = {step.parameters[each.where[0]].group for each in departs if each.cause and "state" not in each.values}

    def is_hidden(each: PieceResult) -> bool:
        sample = step.parameters[each.where[0]]
        is_rounded = definition_of(step, sample).unrounded is not None
        return not each.cause and is_rounded and sample.group in named and each.difference <= _CAUSE * each.envelope

    return [each for each in departs if not is_hidden(each)]


def _worst(found: Sequence[PieceResult], step: int) -> PieceResult:
    most = max(found, key=lambda each: each.difference / max(each.envelope, 1e-300))
    return PieceResult(PIECE, EQUAL, (), most.difference, most.envelope, step=step)


# ── one parameter ─────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_parameter(step: StepCapture, sample: ParameterSample) -> Iterator[PieceResult]:
    after = sample.weight_after
    if after is None or sample.weight.numel() == 0:
        return
    if sample.gradient is None:
        return
    given, definition = inputs_of(step, sample), definition_of(step, sample)
    if not all(bool(t.isfinite().all()) for t in given.values()) or not bool(after.isfinite().all()):
        return
    if sample.listed > 1:
        values: dict[str, object] = {"times": sample.listed}
        yield PieceResult(PIECE, DEPARTS, (sample.name,), 1.0, 0.0, "listed-often", values, step.step)
        return
    told = definition.told(sample, given)
    if not bool(told.any()):
        return
    if not bool(told.all()):
        sample = sample.at(told)
        given, after = inputs_of(step, sample), after[told]
    states: Values = {}
    of_states: list[PieceResult] = []
    is_departed = False
    for name, rule in definition.state_rules(sample).items():
        now = sample.states_after.get(name)
        if now is None:  # of a parameter that the optimizer has never stepped
            states[name] = rule(given)
            continue
        if (rounding := sample.roundings.get(name)) is not None:
            results = list(compare_rounded_state(step, sample, name, given, now, rounding))
        else:
            results = [_compare_state(step, sample, name, rule, given, now)]
        is_other = any(each.status == DEPARTS and each.cause != LOST for each in results)
        states[name] = now.double() if is_other else rule(given)
        is_departed |= is_other
        of_states += results
    yield from _of_one_gradient(sample, definition, of_states)
    if is_departed:  # its corrections belong to other states
        return
    if definition.unrounded is not None and sample.weight.numel() != math.prod(sample.shape):
        why = "the step of a matrix needs all of it, and it is sharded or too large to be computed again"
        yield replace(not_checked(PIECE, why, step.step), where=(sample.name,))
    elif (rounding := sample.roundings.get("weight")) is not None:
        known = {**given, **{f"new_{name}": value for name, value in states.items()}}
        yield from compare_rounded_weight(step, sample, known, after, rounding)
    else:
        yield _compare_weight(step, sample, given, states, after)


def _of_one_gradient(
    sample: ParameterSample, definition: Definition, results: Sequence[PieceResult]
) -> Iterator[PieceResult]:
    """Results of the states, in which a factor on the gradient is one that all of them have; of some alone it is their own."""
    is_own = any(each.status == EQUAL for each in results)
    for each in results:
        factor = float(str(each.values.get("factor", -1.0)))  # the sign, which squares do not have
        if each.cause == "gradient-scaled" and is_own and not near(factor, -1.0, 1e-3):
            state = str(each.values["state"])
            kept, taken = definition.factors(sample)[state]
            times = factor**2 if state == "exp_avg_sq" else factor
            values = {"state": state, "kept": kept, "taken": taken * times}
            yield replace(each, cause="state-other-factors", values=values)
        else:
            yield each


def measured_envelope(
    rule: Rule, given: Values, exact: Tensor, formats: dict[str, torch.dtype], result: torch.dtype
) -> float:
    """How far rounding alone takes a rule from its value in float64, a length.

    The rule is computed with every value in its format, and with every input moved up or down by half a spacing.

    Args:
        rule: elementwise.
        given: float64 inputs.
        exact: what the rule gives of them.
        formats: of each input.
        result: the format of what is stored.
    """
    worked = rule({name: value.to(formats.get(name, torch.float32)) for name, value in given.items()})
    stored = worked.to(result).double() - exact
    generator = torch.Generator().manual_seed(0)
    moved = {}
    for name, value in given.items():
        half = torch.finfo(formats.get(name, torch.float32)).eps / 2
        signs = random_signs(value.shape, generator).double()
        moved[name] = value if name == "weight" else value * (1 + half * signs)
    perturbed = rule(moved).to(result).double() - exact
    # Of float64 no wider format tells how far a few roundings go.
    spacing = torch.finfo(result).eps / 2 * float(exact.norm()) * (8 if result is torch.float64 else 1)
    return _MARGIN * max(float(stored.norm()), float(perturbed.norm()), spacing / _MARGIN)


def _formats(sample: ParameterSample) -> dict[str, torch.dtype]:
    found = {name: state.dtype for name, state in sample.states_after.items()}
    gradient = sample.weight.dtype if sample.gradient is None else sample.gradient.dtype
    return {**found, "weight": sample.weight.dtype, "gradient": gradient}


# ── states ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _compare_state(
    step: StepCapture, sample: ParameterSample, name: str, rule: Rule, given: Values, now: Tensor
) -> PieceResult:
    expected, actual = rule(given), now.double()
    envelope = measured_envelope(rule, given, expected, _formats(sample), now.dtype)
    distance, length = float((actual - expected).norm()), max(float(expected.norm()), 1e-300)
    result = PieceResult(PIECE, EQUAL, (sample.name,), distance / length, envelope / length, step=step.step)
    if distance <= envelope:
        return result
    cause, values = _cause_of_state(step, sample, name, given, expected, actual, envelope)
    return replace(result, status=DEPARTS, cause=cause, values={"state": name, **values})


def _cause_of_state(
    step: StepCapture,
    sample: ParameterSample,
    name: str,
    given: Values,
    expected: Tensor,
    actual: Tensor,
    envelope: float,
) -> tuple[str, dict[str, object]]:
    if not actual.any():  # first: one that is zero after each step is also what it was before this one
        return "state-zero", {}
    if bool((actual == given[name]).all()):
        return "state-frozen", {}
    if (narrow := narrower_format(actual, expected, sample.states_after[name].dtype)) is not None:
        return "state-narrow", {"format": narrow}
    definition = definition_of(step, sample)
    kept, taken = definition.factors(sample)[name]
    term = new_term(name, definition.gradient(sample, given))
    (alpha, beta), rest = fitted(actual, [given[name], term])
    tolerance = 2 * envelope
    if rest <= tolerance:
        if not given[name].any():
            alpha = kept  # nothing is known of it
        if near(alpha, 0.0, 1e-6) or abs(alpha) < 1e-4:
            return "state-lost", {}
        if near(alpha + beta, 1.0, 1e-3) and not near(alpha, kept, 1e-5) and definition is not SGD:
            return "beta", {"value": alpha, "wanted": kept}
        if near(alpha, kept, 1e-3):
            factor = beta / taken if taken else 0.0
            if name == "exp_avg_sq":
                factor = abs(factor) ** 0.5
            return "gradient-scaled", {"factor": factor}
        return "state-other-factors", {"kept": alpha, "taken": beta}
    own = 0.0 if definition.decouples(sample) else decay_of(sample)
    if another := _another_term(sample, name, given[name], term, actual, taken, own, tolerance):
        return another
    share = float(((actual - expected).abs() > 1e-4 * expected.abs()).double().mean())
    return ("part", {"share": share}) if 0 < share < 0.9 else ("", {})


def _another_term(
    sample: ParameterSample,
    name: str,
    before: Tensor,
    term: Tensor,
    actual: Tensor,
    taken: float,
    own: float,
    tolerance: float,
) -> tuple[str, dict[str, object]] | None:
    """What else the state took, beside the gradient's term: of what agrees, the nearest.

    While weights have hardly moved, the gradient of the step before and the state hold their decay between them.
    Squares tell a gradient that was exchanged for that of the step before, and no sum of several terms.

    Args:
        before, actual: the state, before the step and after it.
        taken: by the rule, of the gradient's term, which has ``own`` times the weight in it.
    """
    found: list[tuple[float, str, dict[str, object]]] = []
    if sample.previous is not None:
        (_, now, then), rest = fitted(actual, [before, term, new_term(name, sample.previous.double())])
        found.append((rest, "gradient-stale", {"share": then / (now + then) if now + then else 1.0}))
    if taken and name != "exp_avg_sq":
        (_, _, decay), rest = fitted(actual, [before, term, sample.weight.double()])
        held = decay / taken + own
        found.append((rest, "decay-in-gradient", {"value": held if abs(held) > 1e-3 * own else 0.0}))
    rest, cause, values = min(found, key=lambda each: each[0], default=(math.inf, "", {}))
    return (cause, values) if rest <= tolerance else None


def narrower_format(
    actual: Tensor, expected: Tensor, dtype: torch.dtype, factor: float = 1.0, terms: Sequence[Tensor] = ()
) -> str | None:
    """The format, narrower than its dtype, in which values were rounded, or ``None``.

    Every element is a value of that format, and nearly every one is the expected rounded to it; few lie near a tie. A sum that
    was rounded after each of its terms is as near to the expected as these roundings may take it.

    Args:
        actual, expected: float64.
        dtype: of the run's tensor.
        factor: by which both were multiplied after the rounding.
        terms: that were added one by one, if there were several.
    """
    if torch.finfo(dtype).bits < 32 or actual.numel() < 8 or not factor:
        return None
    actual, expected = actual / factor, expected / factor
    slack = 4 * torch.finfo(dtype).eps * actual.abs()
    # What is left of a term that was added after the last rounding.
    slack = sum((torch.finfo(dtype).eps * each.abs() for each in terms), slack)
    reach = sum((each.abs() / abs(factor) for each in terms), torch.zeros_like(expected))
    for narrow in reversed(NARROWER):
        is_in = bool(((actual.float().to(narrow).double() - actual).abs() <= slack).all())
        rounded = (expected.float().to(narrow).double() - actual).abs() <= slack
        near_enough = (expected - actual).abs() <= len(terms) * torch.finfo(narrow).eps / 2 * reach
        if is_in and float((rounded | near_enough).double().mean()) >= 0.95:
            return str(narrow).removeprefix("torch.")
    return None


# ── the weight ────────────────────────────────────────────────────────────────────────────────────────────────────────


def _compare_weight(
    step: StepCapture, sample: ParameterSample, given: Values, states: Values, after: Tensor
) -> PieceResult:
    definition = definition_of(step, sample)
    result = _compare_with(definition, step, sample, given, states, after)
    if definition.unrounded is None or result.status == EQUAL or result.cause:
        return result
    return _compare_with(definition.unrounded, step, sample, given, states, after)


def _compare_with(
    definition: Definition, step: StepCapture, sample: ParameterSample, given: Values, states: Values, after: Tensor
) -> PieceResult:
    rate, decay = float(sample.settings["lr"]), definition.weight_decay(sample)
    known = {**given, **{f"new_{name}": value for name, value in states.items()}}

    def rule(values: Values) -> Tensor:
        weight = values["weight"]
        return weight * (1 - rate * decay) - rate * definition.direction(sample, values)

    formats = {**_formats(sample)}
    formats |= {f"new_{name}": formats.get(name, torch.float32) for name in states}
    expected, moved = rule(known), after.double() - given["weight"]
    envelope = measured_envelope(rule, known, expected, formats, after.dtype)
    distance = float((after.double() - expected).norm())
    length = max(float((expected - given["weight"]).norm()), 1e-300)
    result = PieceResult(PIECE, EQUAL, (sample.name,), distance / length, envelope / length, step=step.step)
    if distance <= envelope:
        return _lost_in_dtype(result, given["weight"], expected, after)
    cause, values = _cause_of_weight(definition, sample, known, expected, moved, after, rate, decay, envelope)
    others: tuple[Alternative, ...] = ()
    if definition is not SGD and cause not in _EXACT:
        change = moved + rate * decay * given["weight"]
        counts = counts_that_agree(sample, known, change, rate, _CAUSE * envelope) if definition.is_counted else ()
        others = (*counts, *_near_variants(definition, sample, known, change, 3 * envelope))
    return replace(result, status=DEPARTS, cause=cause, values=values, alternatives=others)


def _lost_in_dtype(result: PieceResult, before: Tensor, expected: Tensor, after: Tensor) -> PieceResult:
    """A step that is the rule's, and most of which a 16-bit weight without a wider copy rounds away."""
    if torch.finfo(after.dtype).bits > 16:
        return result
    weight, meant = before.to(after.dtype), expected - before
    towards = torch.full_like(weight, torch.inf).copysign(meant.to(after.dtype))
    share = lost_share(meant, after.double() - before, (weight.nextafter(towards) - weight).double().abs())
    if not share:
        return result
    values: dict[str, object] = {"format": str(after.dtype).removeprefix("torch.")}
    return replace(result, status=DEPARTS, difference=share, cause="lost-in-dtype", values=values)


def _near_variants(
    definition: Definition, sample: ParameterSample, known: Values, change: Tensor, tolerance: float
) -> Iterator[Alternative]:
    """The variants of the rule that a step is near without a free number: what other parameters agree with may be one."""
    rate = float(sample.settings["lr"])
    for each in definition.with_variants(sample, known):
        if each.cause not in ("", UNSEEN) and float((change + rate * each.step).norm()) <= tolerance:
            yield Alternative(each.cause, dict(each.values), error=1.0)


def _cause_of_weight(
    definition: Definition,
    sample: ParameterSample,
    known: Values,
    expected: Tensor,
    moved: Tensor,
    after: Tensor,
    rate: float,
    decay: float,
    envelope: float,
) -> tuple[str, dict[str, object]]:
    weight = known["weight"]
    if not moved.any():
        return "frozen", {}
    length = float((expected - weight).norm())
    if (narrow := narrower_format(after.double(), expected, after.dtype)) is not None:
        return "weight-narrow", {"format": narrow}
    tolerance = _CAUSE * envelope
    variants = list(definition.with_variants(sample, known))
    for free in _FREE:
        fits = [_fit(v, free, moved, weight, rate, decay) for v in variants if free == "" or not _is_factor(v)]
        own = fits[0]
        # The rule itself, where it agrees; else the nearest of its variants.
        variant, rest, factor, taken = own if own[1] <= tolerance else min(fits, key=lambda fit: fit[1])
        if rest > tolerance:
            continue
        if variant.cause and any(each[0].cause == UNSEEN and each[1] <= tolerance for each in fits):
            return "", {}
        if variant.cause:
            return variant.cause, dict(variant.values)
        return _cause_of_factors(factor, taken, rate, decay)
    for term, other in (("1", torch.ones_like(weight)), ("sign(weight)", weight.sign())):
        (lost,), rest = fitted(moved + rate * variants[0].step, [-other])
        if decay and rest <= tolerance:
            return "decay-of-other", {"value": lost / rate, "term": term, "wanted": decay}
    if definition.unrounded is not None:  # an input that is rounded otherwise changes some of a matrix's elements, too
        return "", {}
    if (share := _share_apart(after, expected)) < 0.9:
        return "part", {"share": share}
    # Nothing agrees to rounding; a fit that leaves almost nothing is still an answer.
    _, rest, factor, taken = _fit(variants[0], _FREE[-1], moved, weight, rate, decay)
    if rest <= 1e-2 * length:
        return _cause_of_factors(factor, taken, rate, decay)
    return "", {}


def _is_factor(variant: Variant) -> bool:
    """Whether a variant is a factor on the step, or near one: with a free factor it would be any other."""
    return variant.cause in COUNTS or variant.cause == "scale-of-shape"


def _share_apart(after: Tensor, expected: Tensor) -> float:
    spacing = torch.finfo(after.dtype).eps * expected.abs().clamp_min(1e-30)
    return float(((after.double() - expected).abs() > 4 * spacing).double().mean())


def _fit(
    variant: Variant, free: str, moved: Tensor, weight: Tensor, rate: float, decay: float
) -> tuple[Variant, float, float, float]:
    """What is left of the change with some free numbers; the factor on the step, and what decay took of the weight."""
    step, drop = -rate * variant.step, -rate * decay * weight
    if free == "":
        return variant, float((moved - step - drop).norm()), 1.0, rate * decay
    if free == "rate":
        (factor,), rest = fitted(moved, [step + drop])
        return variant, rest, factor, factor * rate * decay
    if free == "decay":
        (taken,), rest = fitted(moved - step, [-weight])
        return variant, rest, 1.0, taken
    if free == "step":
        (factor,), rest = fitted(moved - drop, [step])
        return variant, rest, factor, rate * decay
    (factor, taken), rest = fitted(moved, [step, -weight])
    return variant, rest, factor, taken


def _cause_of_factors(factor: float, taken: float, rate: float, decay: float) -> tuple[str, dict[str, object]]:
    """The cause behind a factor on the step, and what decay took of the weight."""
    wanted = rate * decay
    if abs(taken) > 1e-3 and abs(taken - wanted) > 0.5 * abs(wanted) and near(factor, 1 - taken, 1e-3):
        return "weights-scaled", {"factor": factor}
    has_decay = near(taken, wanted, 0.05) if wanted else abs(taken) < 1e-9
    if near(factor, 1.0, 1e-3):
        if wanted and abs(taken) < 0.05 * wanted:
            return "decay-lost", {}
        # A fit that leaves more than rounding may find the rule itself.
        return ("", {}) if has_decay else ("decay", {"value": taken / rate, "wanted": decay})
    if near(factor, -1.0, 1e-3):
        return "sign", {}
    if abs(factor) < 1e-4:
        return "step-lost", {}
    if (wanted == 0 and has_decay) or near(taken, factor * wanted, 0.05):
        return "rate", {"factor": factor, "rate": rate}
    return ("step-scaled" if has_decay else "rate-and-decay"), {"factor": factor, "value": taken / (rate * factor)}
