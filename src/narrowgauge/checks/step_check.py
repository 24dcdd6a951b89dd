"""Compare a step with the optimizer's rule: states, weights, counts, clip, and writes between two steps.

Each parameter is compared alone. A step writes sums: a state is ``kept · old + taken · term``, the weight is ``weight +
step · change − decay · rate · weight``. So a difference is fitted by these numbers, and printed beside the rule's.

The bound is measured against the rule in float64. The rule is computed in the formats of the tensors, and with every input
moved by half the epsilon of its format. Rounded values are compared by their likelihood (:mod:`narrowgauge.checks.stored`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS, STEP
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.checks.step_rules import DEFINITIONS, Definition, Rule, Values, decided, inputs_of, new_term
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
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_hooks import follow_steps
from narrowgauge.torch_names import plain_name, unwrapped_model

_MARGIN = 3.0
"""The bound over the largest measured distance due to rounding."""
_UNEXPLAINED_BOUNDS, _UNEXPLAINED_SHARE = 1.5, 1e-2
"""What a fit may leave: this many bounds, since roundings of the run are other draws; or this fraction of a step."""
_SAME_DECAY = 0.05
"""Relative difference of two decays that counts as none."""
_OPERATIONS = 12
"""Approximate number of roundings in a step of Adam: the arithmetic's largest error of a change, in its own units."""
_COARSEST = 2.0**-8
"""The unit of the coarsest supported arithmetic: bfloat16."""
_FORMATS = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
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
    norm = math.nan if step.grad_norm is None else step.grad_norm * step.clip
    if not math.isfinite(norm):
        unseen["the clip"] = (
            "gradients are sharded over ranks" if step.grad_norm is None else "a gradient is not finite"
        )
        return
    dtypes = {sample.dtype for sample in step.samples.values() if sample.gradient is not None}
    kind = KINDS["clip-norm"]
    bound = (kind.bound + 2 * max((torch.finfo(dtype).eps for dtype in dtypes), default=0.0)) * limit
    if norm > limit + bound:
        yield kind.reading("", norm, limit, bound, step.step)


def update_readings(step: SampledStep, optimizer: torch.optim.Optimizer, unseen: dict[str, str]) -> list[Reading]:
    """Recompute the update of every sampled parameter. Fill ``unseen`` with names not compared, and reasons."""
    frozen = [
        name
        for name, s in step.samples.items()
        if not s.requires_grad and s.weight_after is not None and not s.weight_after.equal(s.weight)
    ]
    readings = [KINDS["frozen-moves"].reading(of_all(frozen), len(frozen), 0, step=step.step)] if frozen else []
    readings += _damaged_by_gradients(step)
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


def _damaged_by_gradients(step: SampledStep) -> Iterator[Reading]:
    """Read which gradients made finite weights NaN or infinite."""
    bad = {
        name: int((~s.gradient.isfinite()).sum())
        for name, s in step.samples.items()
        if s.gradient is not None and s.weight_after is not None and s.weight.isfinite().all()
        and not s.weight_after.isfinite().all()
    }  # fmt: skip
    if number := sum(bad.values()):
        advice = "The step wrote values of the gradient that are not finite to the weights. Skip a step whose norm is not finite."
        reading = KINDS["nonfinite-gradient"].reading(of_all([n for n in bad if bad[n]]), number, 0, step=step.step)
        yield replace(reading, advice=advice)


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
    if definition.is_counted and sample.is_counted and not after.equal(sample.weight):
        yield from _count_readings(sample)
    coarse = next((rounding for rounding in sample.roundings.values() if rounding.unit > _COARSEST), None)
    if coarse is not None:
        unseen["the update"] = f"storage '{coarse.storage.name}' rounds every operation to few bits"
        return
    rules = definition.state_rules(sample)
    readings = [
        r for name in rules if name in sample.states_after for r in _state_readings(sample, definition, name, inputs)
    ]
    yield from readings
    if readings:
        return  # the weight's step belongs to other states
    if definition.direction is None:
        unseen["the update of matrices"] = f"the rule '{sample.rule}' needs the whole matrix"
    else:
        values = {**inputs, **{f"new_{name}": rule(inputs) for name, rule in rules.items()}}
        yield from _weight_readings(sample, definition, values, unseen)


def _count_readings(sample: Sample) -> Iterator[Reading]:
    """Compare the optimizer's counts of steps with one step, and with moments that hold older gradients."""
    kind = KINDS["step-count"]
    if sample.count != sample.count_before + 1:
        yield kind.reading(sample.name, sample.count, sample.count_before + 1, more=" and one more step")
    elif sample.count == 1 and any(bool(state.any()) for state in sample.states.values()):
        more = " at least: its moments hold older gradients, and are corrected as if they had just begun"
        yield kind.reading(sample.name, 1, 2, more=more)


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


def _rounded_to(values: Tensor, expected: Tensor) -> str:
    """Name the smaller format that holds all values, if rounding the expected ones gives them; empty otherwise."""
    if values.dtype not in (torch.float32, torch.float64) or values.numel() < 8 or not bool(values.any()):
        return ""
    for dtype in _FORMATS:
        # A few values lie near a tie.
        is_rounded = float((expected.float().to(dtype).to(values.dtype) == values).double().mean()) >= 0.95
        if is_rounded and bool((values.to(dtype).to(values.dtype) == values).all()):
            return f"; it was rounded to {dtype_name(dtype)}"
    return ""


# ── what a step writes ──────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class Written:
    """A tensor after a step, float64 and 1-D. Its rule writes ``fixed + Σ number × term``.

    Args:
        terms: by name, the term and the rule's number.
    """

    after: Tensor
    fixed: Tensor
    terms: dict[str, tuple[Tensor, float]]

    @property
    def expected(self) -> Tensor:
        return self.fixed + torch.stack([number * term for term, number in self.terms.values()]).sum(0)

    def fitted(self, bound: float) -> dict[str, float] | None:
        """Return the numbers that explain the tensor up to a length; ``None`` without any. A zero term keeps its number."""
        names = [name for name, (term, _) in self.terms.items() if bool(term.any())]
        if not names:
            return None
        numbers, rest = fitted(self.after - self.fixed, [self.terms[name][0] for name in names])
        rule = {name: number for name, (_, number) in self.terms.items()}
        return rule | dict(zip(names, numbers, strict=True)) if rest <= bound else None

    def assumptions(self) -> list[Assumption]:
        """Return an assumption for each number: the others are the rule's."""
        expected = self.expected
        return [Assumption(name, expected - number * term, term, number) for name, (term, number) in self.terms.items()]


def _state_readings(sample: Sample, definition: Definition, name: str, inputs: Values) -> Iterator[Reading]:
    (keep, take), rule = definition.factors(sample)[name], definition.state_rules(sample)[name]
    stored, old, term = sample.states_after[name], inputs[name], new_term(name, definition.gradient(sample, inputs))
    written = Written(stored.double(), torch.zeros_like(old), {"kept": (old, keep), "taken": (term, take)})
    length = max(float(written.expected.norm()), 1e-300)
    distance = float((written.after - written.expected).norm())
    numbers: dict[str, float] | None
    if (rounding := sample.roundings.get(name)) is not None:
        moved = (take * term).abs().maximum((written.after - old).abs())
        slack = rounding.carried * (keep * old).abs() + 4 * rounding.unit * moved
        values = StoredValues(written.after, old, written.expected, rounding, slack)
        is_equal, _, fit = agrees(values, written.assumptions())
        numbers = None if fit is None else {"kept": keep, "taken": take, fit.assumption.name: fit.number}
        bound = values.tolerance if fit is None else fit.error * length
    else:
        bound = rounding_of(rule, inputs, written.expected, _formats(sample), stored.dtype)
        is_equal, numbers = distance <= bound, written.fitted(2 * bound)
    if is_equal:
        return
    value, target, allowed = distance / length, 0.0, bound / length
    kept_now, taken_now = math.nan, math.nan
    if numbers is not None:
        kept_now, taken_now = numbers["kept"], numbers["taken"]
        pairs = (kept_now, keep), (taken_now, take)
        value, target = max(pairs, key=lambda pair: abs(pair[0] - pair[1]) / max(abs(pair[1]), 1e-3))
        allowed *= max(abs(target), 1e-12) if rounding is None else 1.0
    yield KINDS["state"].reading(
        sample.name, value, target, allowed, state=name, kept=kept_now, taken=taken_now, rule_kept=keep, rule_taken=take,
        more=_rounded_to(stored, written.expected),
    )  # fmt: skip


def _weight_readings(
    sample: Sample, definition: Definition, values: Values, unseen: dict[str, str]
) -> Iterator[Reading]:
    direction, stored, places = definition.direction, sample.weight_after, decided(sample, values)
    assert direction is not None and stored is not None
    if not bool(places.any()):
        return
    stored, values = stored[places], {name: value[places] for name, value in values.items()}
    weight, rate, decay = values["weight"], float(sample.settings["lr"]), definition.weight_decay(sample)

    def rule(values: Values) -> Tensor:
        return values["weight"] * (1 - rate * decay) - rate * direction(sample, values)

    change, terms = -rate * direction(sample, values), dict[str, tuple[Tensor, float]]()
    terms["step"] = (change, 1.0)
    if definition.decouples(sample):
        terms["decay"] = (-rate * weight, decay)
    written = Written(stored.double(), weight, terms)
    expected, moved = written.expected, written.after - weight
    length, distance = max(float((expected - weight).norm()), 1e-300), float((written.after - expected).norm())
    numbers: dict[str, float] | None
    if (rounding := sample.roundings.get("weight")) is not None:
        rounding = rounding.at(places)
        slack = _slack_of_weight(sample, definition, values, rounding, change, rate * decay * weight, moved)
        stored_values = StoredValues(written.after, weight, expected, rounding, slack)
        whole_step = Assumption("step", weight, expected - weight)
        is_equal, shows_a_step, fit = agrees(stored_values, [whole_step, *written.assumptions()])
        if is_equal and not shows_a_step:
            unseen["the update of some weights"] = f"storage '{rounding.storage.name}' keeps too little of a step"
        numbers = None if fit is None else {"step": 1.0, "decay": decay, fit.assumption.name: fit.number}
        allowed, noise = (stored_values.tolerance / length, 0.0) if fit is None else (fit.error, fit.error)
    else:
        bound = rounding_of(rule, values, expected, _formats(sample), stored.dtype)
        is_equal, allowed = distance <= bound, bound / length
        noise = bound / max(rate * float(weight.norm()), 1e-300)
        (factor,), rest = fitted(moved, [expected - weight])
        numbers = {"step": factor, "decay": factor * decay}
        if rest > _UNEXPLAINED_BOUNDS * bound:  # one factor does not explain it
            numbers = written.fitted(max(_UNEXPLAINED_BOUNDS * bound, _UNEXPLAINED_SHARE * length))
    if is_equal:
        return
    if numbers is None:
        spacing = torch.finfo(stored.dtype).eps * expected.abs().clamp_min(1e-30)
        share = float(((written.after - expected).abs() > 4 * spacing).double().mean())
        more = _rounded_to(stored, expected)
        yield KINDS["weight"].reading(sample.name, distance / length, 0.0, allowed, share=share, more=more)
        return
    step, used = numbers["step"], numbers.get("decay", decay)
    if abs(step - 1) > allowed:
        yield KINDS["step-factor"].reading(sample.name, step, 1.0, allowed, rate=rate)
    # A wrong rate multiplies the decay too. Do not report it twice.
    is_scaled = abs(used - step * decay) <= max(_SAME_DECAY * abs(step * decay), noise)
    if not is_scaled and abs(used - decay) > max(_SAME_DECAY * decay, noise):
        yield KINDS["weight-decay"].reading(sample.name, used, decay, allowed * max(decay, 1e-12))


def _slack_of_weight(
    sample: Sample,
    definition: Definition,
    values: Values,
    rounding: Rounding,
    change: Tensor,
    drop: Tensor,
    moved: Tensor,
) -> Tensor:
    """Return the largest error of the arithmetic of a weight's step, for each element."""
    size = (change.abs() + drop.abs()).maximum(moved.abs())
    slack = rounding.carried * values["weight"].abs() + _OPERATIONS * rounding.unit * size + rounding.read * drop.abs()
    if "new_exp_avg_sq" in values:
        # Where the terms of the mean cancel, their rounding is large beside it.
        keep, take = definition.factors(sample)["exp_avg"]
        terms = (keep * values["exp_avg"]).abs() + (take * definition.gradient(sample, values)).abs()
        slack = slack + 4 * rounding.unit * terms * (change / values["new_exp_avg"]).abs().nan_to_num(0.0, 0.0, 0.0)
    return slack


# ── between two steps ───────────────────────────────────────────────────────────────────────────────────────────────────


def between_readings(
    step: SampledStep, optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]
) -> list[Reading]:
    """Compare the state after a step with the state before the next step, bit for bit at the sampled places."""
    readings = list[Reading]()
    for name, parameter in parameters.items():
        if (sample := step.samples.get(name)) is None:
            continue
        readings += _written_weight(step.step, sample, spread(weight_of(optimizer, parameter)))
        states, count = states_of(optimizer, parameter), count_of(optimizer, parameter)
        for state, before in sample.states_after.items():
            now = states.get(state)
            if now is not None and now.shape == before.shape and bool(((now == before) | before.isnan()).all()):
                continue
            more = ""
            if now is None or not now.any():
                more = ": it is lost"
            elif 0 < count != sample.count:
                more = f": the states are those of step {count}, and the loop goes on from step {sample.count}"
            norms = 0.0 if now is None else float(now.double().norm()), float(before.double().norm())
            readings.append(KINDS["states-written"].reading(name, *norms, 0.0, step.step, state=state, more=more))
    return joined(readings, len(step.samples))


def _written_weight(step: int, sample: Sample, now: Tensor) -> Iterator[Reading]:
    after = sample.weight_after
    if after is None or now.shape != after.shape or bool(((now == after) | after.isnan()).all()):
        return
    length = max(float(after.double().norm()), 1e-300)
    distance = float((now.double() - after.double()).norm()) / length
    # Averages that are swapped in and back out leave a rounding error.
    slack = 4 * torch.finfo(now.dtype).eps
    if now.dtype in (torch.float32, torch.float64) and distance <= slack:
        return
    more, share = _rounded_to(now, after), float((now != after).double().mean())
    (factor,), rest = fitted(now.double(), [after.double()])
    if now.equal(sample.weight):
        more = ": they are those of before the step again"
    elif not more and rest <= slack * length:
        more = f": they were multiplied by {factor:.6g}"
    yield KINDS["weights-written"].reading(sample.name, distance, 0.0, 0.0, step, share=share, more=more)
