"""Compare a step with the optimizer's rule: states, weights, counts, clip, and writes between two steps.

Each parameter is compared alone. A state is fitted as ``kept · old + taken · term``, the weight as ``weight − step · rule −
decay · weight``. So a difference is a number beside the rule's number. The expected weight uses the states of the rule.
If the actual states differ, it uses the actual states. So a fault of a moment is not also a fault of the weight.

The bound is measured against the rule in float64. The rule is computed in the formats of the tensors, and with every input
moved by half the epsilon of its format. Stored values are compared by their likelihood (:mod:`narrowgauge.checks.stored`).

Linear fits replace a list of named faults. The prototype located 16 of 16 faults in the right tensor.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS, STEP
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.step_rules import DEFINITIONS, Definition, Rule, Values, decay_of, decided, inputs_of, new_term
from narrowgauge.checks.step_samples import (
    Sample,
    SampledStep,
    complete,
    count_of,
    named_parameters,
    rule_of,
    sampled_step,
    spread,
    states_of,
    weight_of,
)
from narrowgauge.checks.stored import Assumption, Rounding, StoredValues, agrees
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.runs.schema import Row
from narrowgauge.torch_hooks import follow_steps
from narrowgauge.torch_names import plain_name, unwrapped_model

_MARGIN = 3.0
"""The bound over the largest measured distance due to rounding."""
_LEFT = 1.5
"""Bounds that a fit may leave unexplained. The measured rounding and the run's rounding are different draws."""
_EXPLAINED = 1e-2
"""Fraction of a step that an explanation may leave unexplained."""
_OPERATIONS = 12
"""Approximate number of roundings in a step of Adam: the arithmetic's largest error of a change, in its own units."""
_COARSEST = 2.0**-8
"""The unit of the coarsest supported arithmetic: bfloat16."""
NARROWER = (torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)
Report = Callable[[int, list[Reading], Row], object]
NAMES = tuple(kind.name for kind in KINDS.values() if kind.by == STEP)


class StepCheck:
    """Compare some steps of a loop with the optimizer's rule, by hooks on the step. The model is never called.

    The hooks only copy. An error of the comparison does not end the run: it becomes the reason for a missing comparison.

    Args:
        model: gives the parameter names. Other parameters are named by their place in the optimizer.
        optimizer: without wrappers.
        every: steps between compared steps; 0 compares only the first.
        report: called after each compared step with the step, its readings and the column ``recomputed``. Called again before
            the next step, with the readings of writes in between and an empty column.
        first: the first compared step, counted from now.
        max_grad_norm: the limit of clipping; ``None`` does not check it.
        ignore: kinds of intended readings.

    Raises:
        RecipeError: ``ignore`` has a name that is not a kind of reading of a step.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        every: int,
        report: Report,
        *,
        first: int = 2,
        max_grad_norm: float | None = None,
        ignore: Collection[str] = (),
    ) -> None:
        for name in ignore:
            if name not in NAMES:
                raise RecipeError(
                    f"Cannot ignore '{name}' because no reading of a step has this name.",
                    suggestion(name, NAMES) or f"Known are {', '.join(NAMES)}.",
                )
        self.optimizer, self.every, self.num_steps = optimizer, every, 0
        self._names = {id(p): plain_name(name) for name, p in unwrapped_model(model).named_parameters()}
        self._report, self._first, self._limit, self._ignored = report, first, max_grad_norm, frozenset(ignore)
        self._step: SampledStep | None = None
        self._done: SampledStep | None = None
        self._follower = follow_steps(optimizer, self._before_step, self._after_step)

    def go_on_from_checkpoint(self) -> None:
        """Forget the last step: weights and states are loaded before the next one."""
        self._done = None

    def remove(self) -> None:
        """Remove the hooks; also from within a step."""
        self._follower.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        self._step, done, self._done = None, self._done, None
        parameters = named_parameters(optimizer, self._names)
        if done is not None:
            self._send(lambda: between_readings(done, optimizer, parameters), {})
        step, first = self.num_steps + 1, self._first
        if step == first or (self.every > 0 and step > first and step % self.every == 0):
            with torch.no_grad():
                self._step = sampled_step(step, optimizer, parameters)

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_steps += 1
        step, self._step = self._step, None
        if step is None:
            return
        unseen: dict[str, str] = {}

        def compare() -> list[Reading]:
            complete(step, optimizer, named_parameters(optimizer, self._names))
            readings = [*clip_readings(step, self._limit, unseen), *update_readings(step, optimizer, unseen)]
            self._done = step
            return readings

        self._send(compare, {"compared": len(step.samples), "unseen": unseen})

    def _send(self, read: Callable[[], Iterable[Reading]], row: Row) -> None:
        readings: list[Reading] = []
        try:
            with torch.no_grad():
                readings = [reading for reading in read() if reading.what not in self._ignored]
        except Exception as error:
            message = str(error).splitlines()[0] if str(error) else ""
            row = {**row, "compared": 0, "unseen": {"the step": f"{type(error).__name__}: {message}"[:200]}}
        self._report(self.num_steps, readings, {**row, "beyond": len(readings)} if row else row)


def joined(readings: Iterable[Reading], number: int) -> list[Reading]:
    """Join readings of one kind and like values. The tensor is empty if all ``number`` tensors have the reading."""
    groups: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        like = f"{reading.value:.2g}/{reading.expected:.6g}" if reading.expected and reading.value is not None else ""
        groups.setdefault((reading.what, like), []).append(reading)
    results = []
    for members in sorted(groups.values(), key=len, reverse=True):
        worst, names = max(members, key=lambda r: r.excess), list(dict.fromkeys(r.tensor for r in members))
        results.append(replace(worst, tensor="" if len(names) == number > 1 else of_all(names)))
    return results


# ── clip and counts ─────────────────────────────────────────────────────────────────────────────────────────────────────


def clip_readings(step: SampledStep, limit: float | None, unseen: dict[str, str]) -> Iterator[Reading]:
    """Compare the norm of the gradients after clipping with the declared limit."""
    if limit is None or step.why_not:
        return
    left = math.nan if step.grad_norm is None else step.grad_norm * step.clip
    if not math.isfinite(left):
        unseen["the clip"] = (
            "gradients are sharded over ranks" if step.grad_norm is None else "a gradient is not finite"
        )
        return
    dtypes = {sample.dtype for sample in step.samples.values() if sample.gradient is not None}
    kind = KINDS["clip-norm"]
    bound = (kind.bound + 2 * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)) * limit
    if left > limit + bound:
        yield kind.reading("", left, limit, bound, step.step)


def update_readings(step: SampledStep, optimizer: torch.optim.Optimizer, unseen: dict[str, str]) -> list[Reading]:
    """Recompute the update of every sampled parameter. Fill ``unseen`` with names not compared, and reasons."""
    frozen = [
        name
        for name, s in step.samples.items()
        if not s.requires_grad and s.weight_after is not None and not s.weight_after.equal(s.weight)
    ]
    readings = [KINDS["frozen-moves"].reading(of_all(frozen), len(frozen), 0, step=step.step)] if frozen else []
    if step.why_not or not rule_of(optimizer):
        unseen["the update"] = step.why_not or f"the rule of {type(optimizer).__name__} has no definition here"
        return readings
    if any(sample.settings.get("amsgrad") for sample in step.samples.values()):
        unseen["the update"] = "amsgrad divides by the largest second moment so far, which is not kept"
        return readings
    compared, differing = 0, list[Reading]()
    for sample in step.samples.values():
        if sample.gradient is None or sample.weight_after is None or not sample.weight.numel():
            continue
        compared += 1
        differing += [replace(reading, step=step.step) for reading in _of_parameter(sample, unseen)]
    if not compared:
        unseen["the update"] = "no parameter had a gradient"
    return readings + joined(differing, compared)


def _of_parameter(sample: Sample, unseen: dict[str, str]) -> Iterator[Reading]:
    after, definition, inputs = sample.weight_after, DEFINITIONS[sample.rule], inputs_of(sample)
    assert after is not None
    if not all(bool(t.isfinite().all()) for t in inputs.values()):
        return
    if (bad := int((~after.isfinite()).sum())) > 0:
        advice = "The step made them of a finite gradient, weight and state. Look at eps in the format of the weights."
        yield Reading(0, "optimizer step", sample.name, "nonfinite", bad, 0, 0, advice)
        return
    if sample.listed > 1:
        yield KINDS["parameters-twice"].reading(sample.name, sample.listed, 1)
        return
    yield from _counts(sample, definition)
    places = decided(sample, inputs)
    if not bool(places.any()):
        return
    if not bool(places.all()):
        sample = sample.at(places)
        inputs = inputs_of(sample)
    states: Values = {}
    is_off = False
    for name, rule in definition.state_rules(sample).items():
        now = sample.states_after.get(name)
        readings = [] if now is None else list(_of_state(sample, definition, name, rule, inputs, now, unseen))
        states[name] = now.double() if readings and now is not None else rule(inputs)
        is_off |= bool(readings)
        yield from readings
    if is_off:
        return  # the weight's step belongs to other states
    known = {**inputs, **{f"new_{name}": value for name, value in states.items()}}
    if definition.direction is None:
        unseen["the update of matrices"] = f"the rule '{sample.rule}' needs the whole matrix"
    elif (rounding := sample.roundings.get("weight")) is not None:
        yield from _of_rounded_weight(sample, definition, known, rounding, unseen)
    else:
        yield from _of_weight(sample, definition, known)


def _counts(sample: Sample, definition: Definition) -> Iterator[Reading]:
    """Compare the optimizer's counts of steps with one step, and with moments that hold older gradients."""
    if (
        not definition.is_counted
        or not sample.count
        or sample.weight_after is None
        or sample.weight_after.equal(sample.weight)
    ):
        return
    if sample.count != sample.count_before + 1:
        yield KINDS["step-count"].reading(sample.name, sample.count, sample.count_before + 1, more=" and one more step")
    elif sample.count == 1 and any(bool(state.any()) for state in sample.states.values()):
        yield KINDS["step-count"].reading(
            sample.name,
            1,
            2,
            more=" at least: its moments hold older gradients, and are corrected as if they had just begun",
        )


# ── rounding ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def rounding_of(
    rule: Rule, inputs: Values, exact: Tensor, formats: Mapping[str, torch.dtype], result: torch.dtype
) -> float:
    """Measure how far rounding alone takes a rule from its value in float64, as a length.

    Compute the rule with every value in its format, and with every input moved up or down by half the format's epsilon.

    Args:
        rule: elementwise.
        inputs: float64.
        exact: the rule's result.
        formats: of each input.
        result: the format of the stored result.
    """
    generator, moved = torch.Generator().manual_seed(0), {}
    for name, value in inputs.items():
        half = torch.finfo(formats.get(name, torch.float32)).eps / 2
        signs = torch.randint(0, 2, value.shape, generator=generator).double() * 2 - 1
        moved[name] = value if name == "weight" else value * (1 + half * signs)
    narrow = rule({name: value.to(formats.get(name, torch.float32)) for name, value in inputs.items()})
    lengths = [_length(values.to(result).double() - exact) for values in (narrow, rule(moved))]
    # No wider format shows how far a few float64 roundings go.
    spacing = torch.finfo(result).eps / 2 * _length(exact) * (8 if result is torch.float64 else 1)
    return max(_MARGIN * max(lengths), spacing)


def _length(values: Tensor) -> float:
    """Return the norm of the finite values. A 16-bit format may divide by an epsilon that it rounds to zero."""
    return float(values.where(values.isfinite(), 0.0).norm())


def _formats(sample: Sample) -> dict[str, torch.dtype]:
    assert sample.gradient is not None
    states = {name: state.dtype for name, state in sample.states_after.items()}
    new = {f"new_{name}": dtype for name, dtype in states.items()}
    return {**states, **new, "weight": sample.weight.dtype, "gradient": sample.gradient.dtype}


def fitted(target: Tensor, terms: Iterable[Tensor]) -> tuple[list[float], float]:
    """Fit a target by a sum of terms. Return the factors and the length of the residual; float64, 1-D."""
    columns = torch.stack(list(terms), 1)
    scales = columns.norm(dim=0).clamp_min(1e-300)
    solution = torch.linalg.lstsq(columns / scales, target[:, None], driver="gelsd").solution[:, 0]
    return (solution / scales).tolist(), float((target - columns / scales @ solution).norm())


def narrower_format(actual: Tensor, expected: Tensor, dtype: torch.dtype) -> str | None:
    """Return the smaller format to which values of a dtype were rounded, or ``None``; both float64."""
    if torch.finfo(dtype).bits < 32 or actual.numel() < 8 or not actual.any():
        return None
    slack = 4 * torch.finfo(dtype).eps * actual.abs()
    for narrow in reversed(NARROWER):
        is_in = bool(((actual.float().to(narrow).double() - actual).abs() <= slack).all())
        rounded = (expected.float().to(narrow).double() - actual).abs() <= slack
        if is_in and float(rounded.double().mean()) >= 0.95:  # few lie near a tie
            return str(narrow).removeprefix("torch.")
    return None


# ── states ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_state(
    sample: Sample, definition: Definition, name: str, rule: Rule, inputs: Values, now: Tensor, unseen: dict[str, str]
) -> Iterator[Reading]:
    kept, taken = definition.factors(sample)[name]
    old, term = inputs[name], new_term(name, definition.gradient(sample, inputs))
    expected, actual = rule(inputs), now.double()
    length = max(float(expected.norm()), 1e-300)

    def reading(value: float, target: float, bound: float, numbers: tuple[float, float], more: str = "") -> Reading:
        return KINDS["state"].reading(
            sample.name, value, target, bound, state=name, kept=numbers[0], taken=numbers[1], rule_kept=kept, rule_taken=taken,
            more=more,
        )  # fmt: skip

    if (rounding := sample.roundings.get(name)) is not None:
        if rounding.unit > _COARSEST:
            unseen["the update"] = f"storage '{rounding.storage.name}' rounds every operation to few bits"
            return
        moved = (taken * term).abs().maximum((actual - old).abs())
        slack = rounding.carried * (kept * old).abs() + 4 * rounding.unit * moved
        stored = StoredValues(actual, old, expected, rounding, slack)
        others = [Assumption("kept", taken * term, old, kept), Assumption("taken", kept * old, term, taken)]
        is_equal, _, fit = agrees(stored, others)
        if is_equal:
            return
        if fit is None:
            distance = float((actual - expected).norm()) / length
            yield reading(distance, 0.0, stored.envelope / length, (math.nan, math.nan))
        else:
            numbers = (fit.number, taken) if fit.assumption.what == "kept" else (kept, fit.number)
            yield reading(fit.number, fit.assumption.expected, fit.error, numbers)
        return
    bound = rounding_of(rule, inputs, expected, _formats(sample), now.dtype)
    distance = float((actual - expected).norm())
    if distance <= bound:
        return
    if (narrow := narrower_format(actual, expected, now.dtype)) is not None:
        yield reading(distance / length, 0.0, bound / length, (kept, taken), f"; it was rounded to {narrow}")
        return
    has_old = bool(old.any())  # without old values the kept factor is unknown
    (*old_factor, taken_now), left = fitted(actual, [old, term] if has_old else [term])
    kept_now = old_factor[0] if has_old else kept
    if left <= 2 * bound:
        value, target = max(
            ((kept_now, kept), (taken_now, taken)), key=lambda pair: abs(pair[0] - pair[1]) / max(abs(pair[1]), 1e-3)
        )
        yield reading(value, target, bound / length * max(abs(target), 1e-12), (kept_now, taken_now))
        return
    if taken and name != "exp_avg_sq":
        (kept_now, taken_now, decay), left = fitted(actual, [old, term, sample.weight.double()])
        if left <= 2 * bound:
            in_gradient = 0.0 if definition.decouples(sample) else decay_of(sample)
            more = f"; it took {decay / taken + in_gradient:.4g} of the weight, where decay in the gradient is {in_gradient:g}"
            yield reading(distance / length, 0.0, bound / length, (kept_now, taken_now), more)
            return
    yield reading(distance / length, 0.0, bound / length, (math.nan, math.nan))


# ── the weight ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def _of_weight(sample: Sample, definition: Definition, known: Values) -> Iterator[Reading]:
    after, weight, direction = sample.weight_after, known["weight"], definition.direction
    assert after is not None and direction is not None
    rate, decay = float(sample.settings["lr"]), definition.weight_decay(sample)

    def rule(values: Values) -> Tensor:
        return values["weight"] * (1 - rate * decay) - rate * direction(sample, values)

    expected, moved = rule(known), after.double() - weight
    bound = rounding_of(rule, known, expected, _formats(sample), after.dtype)
    distance = float((after.double() - expected).norm())
    if distance <= bound:
        return
    length = max(float((expected - weight).norm()), 1e-300)
    if not moved.any():
        yield _factor(sample, 0.0, bound / length)
        return
    if (narrow := narrower_format(after.double(), expected, after.dtype)) is not None:
        more = f" The weights were rounded to {narrow}."
        yield _unexplained(sample, distance / length, bound / length, after, expected, more)
        return
    step = -rate * direction(sample, known)
    (factor,), rest = fitted(moved, [step - rate * decay * weight])
    if rest <= _LEFT * bound:  # one number explains it
        yield _factor(sample, factor, bound / length)
        return
    (factor, used), rest = fitted(moved, [step, -rate * weight])
    if rest > max(_LEFT * bound, _EXPLAINED * length):
        yield _unexplained(sample, distance / length, bound / length, after, expected)
        return
    if abs(factor - 1) > bound / length:
        yield _factor(sample, factor, bound / length)
    # A wrong rate multiplies the decay too. Do not report it twice.
    is_scaled = abs(used - factor * decay) <= 0.05 * abs(factor * decay)
    if not is_scaled and abs(used - decay) > max(0.05 * decay, bound / max(rate * float(weight.norm()), 1e-300)):
        yield _decay(sample, used, decay, bound / length)


def _factor(sample: Sample, factor: float, bound: float, more: str = "") -> Reading:
    rate = float(sample.settings["lr"])
    return KINDS["step-factor"].reading(sample.name, factor, 1.0, bound, rate=rate, more=more)


def _decay(sample: Sample, used: float, decay: float, bound: float) -> Reading:
    return KINDS["weight-decay"].reading(sample.name, used, decay, bound * max(decay, 1e-12))


def _unexplained(
    sample: Sample, value: float, bound: float, after: Tensor, expected: Tensor, more: str = ""
) -> Reading:
    spacing = torch.finfo(after.dtype).eps * expected.abs().clamp_min(1e-30)
    share = float(((after.double() - expected).abs() > 4 * spacing).double().mean())
    reading = KINDS["weight"].reading(sample.name, value, 0.0, bound, share=share)
    return replace(reading, advice=reading.advice + more)


def _of_rounded_weight(
    sample: Sample, definition: Definition, known: Values, rounding: Rounding, unseen: dict[str, str]
) -> Iterator[Reading]:
    after, weight = sample.weight_after, known["weight"]
    assert after is not None
    if rounding.unit > _COARSEST:
        unseen["the update"] = f"storage '{rounding.storage.name}' rounds every operation to few bits"
        return
    rate, decay = float(sample.settings["lr"]), definition.weight_decay(sample)
    assert definition.direction is not None
    change, drop = -rate * definition.direction(sample, known), -rate * decay * weight
    expected = weight + change + drop
    moved = (change.abs() + drop.abs()).maximum((after.double() - weight).abs())
    slack = rounding.carried * weight.abs() + _OPERATIONS * rounding.unit * moved + rounding.read * drop.abs()
    if "new_exp_avg_sq" in known:
        # Where the terms of the mean cancel, their rounding is large beside it.
        kept, taken = definition.factors(sample)["exp_avg"]
        terms = (kept * known["exp_avg"]).abs() + (taken * definition.gradient(sample, known)).abs()
        slack = slack + 4 * rounding.unit * terms * (change / known["new_exp_avg"]).abs().nan_to_num(0.0, 0.0, 0.0)
    others = [Assumption("step", weight, change + drop), Assumption("step", weight + drop, change)]
    if definition.decouples(sample):
        others.append(Assumption("decay", weight + change, -rate * weight, decay))
    stored = StoredValues(after.double(), weight, expected, rounding, slack)
    is_equal, is_telling, fit = agrees(stored, others)
    length = max(float((expected - weight).norm()), 1e-300)
    if is_equal:
        if not is_telling:
            unseen["the update of some weights"] = f"storage '{rounding.storage.name}' keeps too little of a step"
    elif fit is None:
        yield _unexplained(
            sample, float((after.double() - expected).norm()) / length, stored.envelope / length, after, expected
        )
    elif fit.assumption.what == "decay":
        yield KINDS["weight-decay"].reading(sample.name, fit.number, decay, fit.error)
    else:
        yield _factor(sample, fit.number, fit.error)


# ── between two steps ───────────────────────────────────────────────────────────────────────────────────────────────────


def between_readings(
    step: SampledStep, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> list[Reading]:
    """Compare the state after a step with the state before the next step, bit for bit at the sampled places."""
    readings = []
    for name, parameter in parameters.items():
        sample = step.samples.get(name)
        if sample is None:
            continue
        now, after = spread(weight_of(optimizer, parameter)), sample.weight_after
        if after is not None and now.shape == after.shape and not _is_same(now, after):
            readings.append(_written(step.step, sample, after, now))
        states = states_of(optimizer, parameter)
        for state, left in sample.states_after.items():
            present = states.get(state)
            if present is not None and present.shape == left.shape and bool(((present == left) | left.isnan()).all()):
                continue
            count, more = count_of(optimizer, parameter), ""
            if present is None or not present.any():
                more = ": it is lost"
            elif 0 < count != sample.count:
                more = f": the states are those of step {count}, and the loop goes on from step {sample.count}"
            value = 0.0 if present is None else float(present.double().norm())
            expected = float(left.double().norm())
            readings.append(
                KINDS["states-written"].reading(name, value, expected, 0.0, step.step, state=state, more=more)
            )
    return joined(readings, len(step.samples))


def _is_same(now: Tensor, after: Tensor) -> bool:
    """Return whether values are the same. Allow the rounding error of swapping averages in and back out."""
    if bool(((now == after) | after.isnan()).all()):
        return True
    return now.dtype in (torch.float32, torch.float64) and _apart(now, after) <= 4 * torch.finfo(now.dtype).eps


def _apart(now: Tensor, after: Tensor) -> float:
    return float((now.double() - after.double()).norm() / max(float(after.double().norm()), 1e-300))


def _written(step: int, sample: Sample, after: Tensor, now: Tensor) -> Reading:
    more, share = "", float((now != after).double().mean())
    (factor,), rest = fitted(now.double(), [after.double()])
    if now.equal(sample.weight):
        more = ": they are those of before the step again"
    elif (narrow := narrower_format(now.double(), after.double(), now.dtype)) is not None:
        more = f": they were rounded to {narrow}"
    elif rest <= 4 * torch.finfo(now.dtype).eps * float(after.double().norm()):
        more = f": they were multiplied by {factor:.6g}"
    return KINDS["weights-written"].reading(sample.name, _apart(now, after), 0.0, 0.0, step, share=share, more=more)
