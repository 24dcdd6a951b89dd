"""Compare a step with the optimizer's rule: states, weights, counts, clip, and writes between two
steps.

Each parameter is compared alone. A step writes sums: a state is ``kept · old + taken · term``, the
weight is ``weight + step · change − decay · rate · weight``. So a difference is fitted by these
numbers, and printed beside the rule's.

The rule is computed in float64. Each element has a slack: the largest error of the arithmetic in
the tensors' formats. Stored values bound what was computed, through their rounding
(:mod:`narrowgauge.checks.stored`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all, words_of
from narrowgauge.checks.sites import is_finite
from narrowgauge.checks.step_samples import (
    STATES,
    Sample,
    SampledStep,
    complete,
    sampled_step,
    spread,
)
from narrowgauge.checks.stored import Rounding, Written
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.runs.schema import Row
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import CODES
from narrowgauge.torch_support.torch_hooks import Follower, members_of
from narrowgauge.torch_support.torch_names import plain_name, unwrapped_model

_UNEXPLAINED_SHARE = 1e-2
"""The fraction of a step that a fit of the weight may leave."""
_OPERATIONS = 16
"""Approximate number of roundings in a step of Adam: the arithmetic's largest error of a change, in
its own units.
"""
_WIDE = (torch.float32, torch.float64)
_FORMATS = (torch.float8_e5m2, torch.float8_e4m3fn, torch.bfloat16, torch.float16)
Report = Callable[[int, list[Reading], Row], object]
Values = dict[str, Tensor]
NAMES = tuple(kind.name for kind in KINDS.values() if kind.by == "audit_every")


class StepCheck:
    """Compare some steps of a loop with the optimizer's rule, by hooks on the step.

    The model is never called.

    The hooks only copy. An error of the comparison does not end the run: it becomes the reason for
    a missing comparison.

    Args:
        model: gives the parameter names. Other parameters are named by their place in the
            optimizer.
        optimizer: without wrappers.
        every: steps between compared steps. The second step, and the first after a checkpoint is
            loaded, are compared too. What is written after the first two steps is read as well.
        report: called after each compared step with the step, its readings and the column
            ``recomputed``. Called again before the next step, with the readings of writes in
            between and an empty column.
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
        max_grad_norm: float | None = None,
        ignore: Collection[str] = (),
    ) -> None:
        for name in ignore:
            if name not in NAMES:
                raise RecipeError(
                    f"Cannot ignore '{name}' because no reading of a step has this name.",
                    suggestion(name, NAMES) or f"Known are {', '.join(NAMES)}.",
                )
        self.optimizer = optimizer
        self.every = every
        self.num_steps = 0
        self._model = unwrapped_model(model)
        self._names = {id(p): plain_name(name) for name, p in self._model.named_parameters()}
        self._report = report
        self._limit = max_grad_norm
        self._ignored = frozenset(ignore)
        self._step: SampledStep | None = None  # the last step, if it was sampled
        self._is_loaded = False
        self._first_writes = dict[str, Reading]()  # after the first step, until the second
        self._projected = set[str]()
        self._follower = Follower(optimizer, self._before_step, self._after_step)

    def go_on_from_checkpoint(self) -> None:
        """Forget the last step: weights and states are loaded before the next one.

        Compare the next one.
        """
        self._step = None
        self._is_loaded = True

    def remove(self) -> None:
        """Remove the hooks; also from within a step."""
        self._follower.remove()

    def _before_step(self, optimizer: torch.optim.Optimizer) -> None:
        last = self._step
        if last is not None:
            self._send(last.step, lambda: self._written(last), {})
        step = self.num_steps + 1
        self._step = None
        if step <= 2 or self._is_loaded or step % self.every == 0:
            self._send(step, lambda: self._sample(step, optimizer), {})

    def _sample(self, number: int, optimizer: torch.optim.Optimizer) -> list[Reading]:
        step = sampled_step(number, optimizer, self._names)
        step.is_compared = number > 1 or self._is_loaded
        self._is_loaded = False
        members = set(map(id, members_of(optimizer))) | self._names.keys()
        for name, p in self._model.named_parameters():
            if p.grad is not None and id(p) not in members:
                step.strays[plain_name(name)] = (p, spread(p))
        self._step = step
        return []

    def _after_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.num_steps += 1
        step = self._step
        if step is None:
            return
        if not step.is_compared:
            self._send(step.step, lambda: complete(step, optimizer), {})
            return
        unseen = dict[str, str]()
        row = {"compared": 0, "unseen": unseen}
        read = partial(step_readings, step, optimizer, self._limit, unseen, row)
        self._send(step.step, read, row)

    def _written(self, last: SampledStep) -> list[Reading]:
        """Read what was written since a step.

        A loop that writes a weight after each of its first two steps does so by its rule, as a
        projection: this is a note.
        """
        readings = []
        first_writes = self._first_writes
        self._first_writes = dict[str, Reading]()
        for reading, is_plain in between_readings(last):
            name = reading.tensor
            if not is_plain:
                readings.append(reading)
            elif last.step == 1 and not last.is_compared:
                self._first_writes[name] = replace(reading, step=1)
            else:
                if first_writes.pop(name, None) is not None:
                    self._projected.add(name)
                is_note = name in self._projected
                readings.append(replace(reading, severity="note") if is_note else reading)
        return joined([*first_writes.values(), *readings], len(last.samples))

    def _send(self, step: int, read: Callable[[], Iterable[Reading] | None], row: Row) -> None:
        readings: list[Reading] = []
        try:
            with torch.no_grad():
                for reading in read() or ():
                    if reading.what not in self._ignored:
                        readings.append(replace(reading, step=reading.step or step))
        except Exception as error:
            row = {**row, "compared": 0, "unseen": {"the step": words_of(error)}}
        if row:
            row = {**row, "beyond": len(readings)}
        if row or readings:
            self._report(self.num_steps, readings, row)


def joined(readings: Iterable[Reading], number: int) -> list[Reading]:
    """Join readings of one kind and like values.

    The tensor is empty if all ``number`` tensors have the reading.
    """
    groups = list[list[Reading]]()
    for reading in readings:
        for members in groups:
            if _are_alike(members[0], reading):
                members.append(reading)
                break
        else:
            groups.append([reading])
    results = []
    for members in sorted(groups, key=len, reverse=True):
        worst = max(members, key=lambda r: r.excess)
        names = {r.tensor: None for r in members}
        is_all = len(names) == number > 1
        results.append(replace(worst, tensor="" if is_all else of_all(names)))
    return results


def _are_alike(first: Reading, second: Reading) -> bool:
    """Return whether two readings are of one kind, with values within 2 % or their bound where a
    value is expected.
    """
    if (first.what, first.severity, first.step) != (second.what, second.severity, second.step):
        return False
    if not first.expected or first.value is None or second.value is None:
        return True
    near = max(0.02 * abs(first.value), first.bound or 0.0)
    return first.expected == second.expected and abs(second.value - first.value) <= near


# ── the step ──────────────────────────────────────────────────────────────────────────────────────


def step_readings(
    step: SampledStep, optimizer: torch.optim.Optimizer, limit: float | None, unseen: dict[str, str], row: Row
) -> list[Reading]:  # fmt: skip
    """Compare a step that was just taken.

    Args:
        unseen: filled with names not compared, and reasons.
        row: gets the norm that reached the step, and the number of tensors whose update was
            compared.
    """
    complete(step, optimizer)
    if step.grad_norm is not None and math.isfinite(step.grad_norm):
        row["norm"] = step.grad_norm * step.clip
    readings = [*clip_readings(step, limit, unseen), *update_readings(step, optimizer, unseen)]
    if "the update" not in unseen:
        row["compared"] = len(step.samples)
    return readings


def clip_readings(
    step: SampledStep, limit: float | None, unseen: dict[str, str]
) -> Iterator[Reading]:
    """Compare the norm of the gradients after clipping with the declared limit."""
    if limit is None or step.why_not:
        return
    if step.grad_norm is None or not math.isfinite(step.grad_norm):
        unseen["the clip"] = "a gradient is not finite"
        if step.grad_norm is None:
            unseen["the clip"] = "gradients are sharded over ranks"
        return
    norm = step.grad_norm * step.clip
    kind = KINDS["clip-norm"]
    epsilon = 0.0
    for sample in step.samples.values():
        if sample.gradient is not None:
            epsilon = max(epsilon, torch.finfo(sample.parameter.dtype).eps)
    bound = (kind.bound + 2 * epsilon) * limit
    # Clipping leaves the limit, to a part in a million. A later division by a loss scale leaves
    # limit / 2^power.
    power = round(math.log2(limit / norm)) if norm > 0 else 0
    cause = ""
    if power >= 3 and abs(norm * 2.0**power / limit - 1) < 1e-5:
        cause = f", 2^{power} times as large: they were clipped before they were unscaled"
    if cause or norm > limit + bound:
        yield kind.reading("", norm, limit, bound, cause=cause)


def update_readings(
    step: SampledStep, optimizer: torch.optim.Optimizer, unseen: dict[str, str]
) -> list[Reading]:
    """Recompute the update of every sampled parameter."""
    stepped = []
    why_not = step.why_not
    for sample in step.samples.values():
        if sample.gradient is None or not sample.after or not sample.gradient.numel():
            continue
        stepped.append(sample)
        if sample.why_not:
            why_not = why_not or sample.why_not
        elif not sample.rule:
            why_not = f"the rule of {type(optimizer).__name__} has no definition here"
        elif sample.settings.get("amsgrad"):
            why_not = "amsgrad divides by the largest second moment so far, which is not kept"
    if why_not or not stepped:
        unseen["the update"] = why_not or "no parameter had a gradient"
        return []
    readings = list[Reading]()
    for sample in stepped:
        readings += _of_parameter(sample, unseen)
    return joined(readings, len(stepped))


def _differs(now: Tensor, before: Tensor) -> bool:
    """Return whether any element differs. NaN equals NaN."""
    return now.shape != before.shape or not bool(((now == before) | before.isnan()).all())


def _count_readings(sample: Sample) -> Iterator[Reading]:
    """Compare the optimizer's counts of steps with one step, and with moments that hold older
    gradients.
    """
    kind = KINDS["step-count"]
    before = sample.count_before or 0
    if sample.count is None:
        return
    if sample.count != before + 1:
        yield kind.reading(sample.name, sample.count, before + 1, more=" and one more step")
    elif sample.count == 1:
        older = [x for name, x in sample.before.items() if name in STATES and bool(x.any())]
        more = " at least: its moments hold older gradients, and are corrected as if they had just begun"
        if older:
            yield kind.reading(sample.name, 1, 2, more=more)


# ── the rules of SGD, Adam and AdamW, in float64 ──────────────────────────────────────────────────


def inputs_of(sample: Sample) -> Values:
    """Return the inputs of a sample's rule in float64: weight, gradient and states."""
    assert sample.gradient is not None
    gradient = sample.gradient.double()
    if sample.settings.get("maximize"):
        gradient = -gradient
    values = dict.fromkeys(state_factors(sample), torch.zeros_like(gradient))
    for name, value in sample.before.items():
        values[name] = value.double()
    return values | {"gradient": gradient}


def state_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    """Return for each state the factor of its old value and the factor of its new term."""
    settings = sample.settings
    if sample.rule == "sgd":
        momentum = float(settings.get("momentum") or 0.0)
        taken = 1.0
        if "momentum_buffer" in sample.before:
            taken -= float(settings.get("dampening") or 0.0)
        if momentum:
            return {"momentum_buffer": (momentum, taken)}
        return {}
    beta1, beta2 = map(float, settings["betas"])
    return {"exp_avg": (beta1, 1 - beta1), "exp_avg_sq": (beta2, 1 - beta2)}


def new_term(sample: Sample, name: str, inputs: Values) -> Tensor:
    """Return what a state takes: the gradient or its square, with decay if the rule adds it to the
    gradient.
    """
    gradient = inputs["gradient"]
    if not decouples(sample):
        gradient = gradient + decay_of(sample) * inputs["weight"]
    if name == "exp_avg_sq":
        return gradient.square()
    return gradient


def decay_of(sample: Sample) -> float:
    return float(sample.settings.get("weight_decay") or 0.0)


def decouples(sample: Sample) -> bool:
    """Return whether decay acts on the weight itself.

    For a rule without states both kinds of decay are equal.
    """
    is_decoupled = sample.rule == "adamw" or bool(sample.settings.get("decoupled_weight_decay"))
    return is_decoupled or not state_factors(sample)


def direction(sample: Sample, values: Values) -> Tensor:
    """Return the tensor that the learning rate multiplies, from the inputs and the new states
    (``new_exp_avg``).
    """
    settings = sample.settings
    if sample.rule == "sgd":
        gradient = new_term(sample, "momentum_buffer", values)
        momentum = values.get("new_momentum_buffer")
        if momentum is None:
            return gradient
        if settings.get("nesterov"):
            return gradient + float(settings["momentum"]) * momentum
        return momentum
    beta1, beta2 = map(float, settings["betas"])
    count = max(1, sample.count or 0)
    first = values["new_exp_avg"]
    second = values["new_exp_avg_sq"]
    divisor = (second / (1 - beta2**count)).sqrt() + float(settings["eps"])
    return first / (1 - beta1**count) / divisor.where(divisor != 0, 1e-300)


def terms_of(sample: Sample, name: str, values: Values) -> dict[str, tuple[Tensor, float]]:
    """Return the terms that a step adds up for a state or the weight, each with the rule's number.

    A state becomes ``kept · old + taken · term``, the weight ``weight + step · change − decay ·
    rate · weight``.
    """
    if name != "weight":
        factor, taken = state_factors(sample)[name]
        return {"kept": (values[name], factor), "taken": (new_term(sample, name, values), taken)}
    rate = float(sample.settings["lr"])
    terms = {"step": (-rate * direction(sample, values), 1.0)}
    if decouples(sample):
        terms["decay"] = (-rate * values["weight"], decay_of(sample))
    return terms


def sum_of(terms: Mapping[str, tuple[Tensor, float]]) -> Tensor:
    """Return the sum of terms, each times its number."""
    total = torch.zeros(())
    for term, number in terms.values():
        total = total + number * term
    return total


# ── what a step writes ────────────────────────────────────────────────────────────────────────────


def _of_parameter(sample: Sample, unseen: dict[str, str]) -> Iterator[Reading]:
    """Compare the states of a parameter in the order of the rule, then its weight, whose step
    depends on them.
    """
    values = inputs_of(sample)
    if not all(map(is_finite, (*values.values(), sample.after["weight"]))):
        return
    if sample.rule != "sgd" and _differs(sample.after["weight"], sample.before["weight"]):
        yield from _count_readings(sample)
    errors = {}
    readings = list[Reading]()
    if not decouples(sample):
        errors["gradient"] = _unit(sample) * (
            values["gradient"].abs() + (decay_of(sample) * values["weight"]).abs()
        )
    for name in state_factors(sample):
        if name not in sample.after:  # a step that left the parameter out
            values[f"new_{name}"] = sum_of(terms_of(sample, name, values))
            continue
        written = _written(sample, name, values, errors)
        readings += _readings(sample, name, written)
        values[f"new_{name}"] = written.expected
        errors[f"new_{name}"] = written.slack
        if name not in sample.roundings:  # optimizers of torch may compute with the rounded state
            errors[f"new_{name}"] = written.slack + written.spacing / 2
    if not readings:  # with a wrong state the step is wrong, too
        written = _written(sample, "weight", values, errors)
        readings += _readings(sample, "weight", written)
        if not readings and "weight" in sample.roundings and written.fitted()[1]["step"] > 1:
            unseen["the update of some weights"] = "their storage keeps too little of a step"
    yield from readings


def _unit(sample: Sample) -> float:
    """Return the relative rounding error of an operation.

    Our optimizers compute in float32, torch's in the weight's format.
    """
    return torch.finfo(sample.after["weight"].dtype).eps / 2


def _written(sample: Sample, name: str, values: Values, errors: Values) -> Written:
    """Return a state or the weight after the step, with the sum that its rule writes and the error
    of this sum.
    """
    after = sample.after[name]
    terms = terms_of(sample, name, values)
    fixed = torch.zeros_like(values["weight"])
    if name == "weight":
        fixed = values["weight"]
    slack = 4 * _unit(sample) * fixed.abs()
    # A compiled step of torch rounds beta and 1 − beta^count to float32.
    count = max(1, sample.count or 0)
    of_step = _OPERATIONS * _unit(sample)
    for beta in map(float, sample.settings.get("betas", ())):
        of_step += (1 + count * beta**count) / (1 - beta**count) * 2.0**-24
    for key, (term, number) in terms.items():
        relative = of_step if key == "step" else 4 * _unit(sample)
        slack += relative * (number * term).abs()
    # Errors of the inputs move the sum, for some elements without a bound.
    computed = sum_of(terms)
    for key, error in errors.items():
        above = sum_of(terms_of(sample, name, values | {key: values[key] + error}))
        below = sum_of(terms_of(sample, name, values | {key: values[key] - error}))
        off = (above - computed).abs().maximum((below - computed).abs())
        slack += off.nan_to_num(math.inf)
    rounding = sample.roundings.get(name) or Rounding(CODES[dtype_name(after.dtype)])
    return Written(after.double(), fixed, terms, rounding, slack)


_MEANING = {
    "kept": ("state", "kept {:.6g} of itself, where its rule keeps {:.6g}"),
    "taken": ("state", "took {:.6g} of the gradient's term, where its rule takes {:.6g}"),
    "step": ("step-factor", ""),
    "decay": ("weight-decay", ""),
}
"""The kind of reading of each number that a rule has, and its words."""


def _readings(sample: Sample, name: str, written: Written) -> Iterator[Reading]:
    """Read the numbers of a state or a weight that are not the rule's, or else its distance from
    the rule's.
    """
    length = float((written.expected - written.fixed).norm())
    difference = written.difference(_UNEXPLAINED_SHARE * length if name == "weight" else 0.0)
    if difference is None:
        return
    more = _rounded_to(sample.after[name], written.expected)
    rate = float(sample.settings["lr"])
    rule = written.rule
    numbers = difference.numbers
    wrong = {}
    for key, value in numbers.items():
        bound = max(difference.errors[key], KINDS[_MEANING[key][0]].bound * abs(rule[key]))
        # A wrong rate multiplies the decay too. Do not report it twice.
        scaled = rule[key] * (numbers["step"] if key == "decay" else 1.0)
        if min(abs(value - rule[key]), abs(value - scaled)) > bound:
            wrong[key] = bound
    if name != "weight" and wrong:  # the farther one of the two
        far = max(wrong, key=lambda key: abs(numbers[key] - rule[key]) / max(abs(rule[key]), 1e-3))
        wrong = {far: wrong[far]}
    for key, bound in wrong.items():
        label, words = _MEANING[key]
        words = words.format(numbers[key], rule[key])
        yield KINDS[label].reading(
            sample.name, numbers[key], rule[key], bound, state=name, words=words, rate=rate, more=more
        )  # fmt: skip
    if not wrong:
        after = sample.after[name]
        spacing = torch.finfo(after.dtype).eps * written.expected.abs().clamp_min(1e-30)
        share = float(((after - written.expected).abs() > 4 * spacing).double().mean())
        distance = _relative(difference.distance, length)
        bound = _relative(difference.bound, length)
        words = f"differs from its rule's by {distance:.2g} of its length"
        kind = KINDS["weight" if name == "weight" else "state"]
        yield kind.reading(
            sample.name, distance, 0.0, bound, state=name, words=words, share=share, more=more
        )


def _relative(distance: float, length: float) -> float:
    if not distance:
        return 0.0
    if length:
        return distance / length
    return math.inf


def _rounded_to(values: Tensor, expected: Tensor) -> str:
    """Name the smaller format that holds all values, if rounding the expected ones gives them;
    empty otherwise.
    """
    if values.dtype not in _WIDE or values.numel() < 8 or not bool(values.any()):
        return ""
    for dtype in _FORMATS:
        rounded = expected.float().to(dtype).to(values.dtype)
        is_near = float((rounded == values).double().mean()) >= 0.95  # a few lie near a tie
        if is_near and torch.equal(values.to(dtype).to(values.dtype), values):
            return f"; it was rounded to {dtype_name(dtype)}"
    return ""


# ── between two steps ─────────────────────────────────────────────────────────────────────────────


def between_readings(step: SampledStep) -> Iterator[tuple[Reading, bool]]:
    """Compare the state after a step with the state before the next step, bit for bit at the
    sampled places.

    Yield a reading of each tensor, and whether it is a weight with new values of no known kind.
    """
    for sample in step.samples.values():
        values = sample.values()
        for key, before in sample.after.items():
            if key not in values or _differs(values[key], before):
                yield from _written_between(sample, key, values.get(key))
    unmoved = [name for name, (p, before) in step.strays.items() if torch.equal(spread(p), before)]
    for reading in KINDS["missing-parameters"].of(unmoved):
        yield reading, False


def _written_between(
    sample: Sample, name: str, now: Tensor | None
) -> Iterator[tuple[Reading, bool]]:
    """Read a weight or state that the loop wrote after the step."""
    before = sample.after[name]
    kind = KINDS["weights-written" if name == "weight" else "states-written"]
    if now is None:
        more = ": it is lost"
        yield kind.reading(sample.name, 1.0, 0.0, 0.0, state=name, share=1.0, more=more), False
        return
    if now.shape != before.shape:  # of other shards
        return
    x = now.double()
    y = before.double()
    length = float(y.norm())
    distance = _relative(float((x - y).norm()), length)
    factor = float(x @ y) / length**2 if length else 0.0
    # Averages that are swapped in and back out leave a rounding error.
    slack = 4 * torch.finfo(now.dtype).eps
    if now.dtype in _WIDE and distance <= slack:
        return
    more = _rounded_to(now, before)
    share = float((now != before).double().mean())
    if not now.any():
        more = ": it is lost"
    elif now.equal(sample.before.get(name, before)):
        more = ": it has the values from before the step again"
    elif not more and float((x - factor * y).norm()) <= slack * length:
        more = f": it was multiplied by {factor:.6g}"
    reading = kind.reading(sample.name, distance, 0.0, 0.0, state=name, share=share, more=more)
    yield reading, name == "weight" and not more
