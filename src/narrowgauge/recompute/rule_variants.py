"""Rules of optimizers in float64, and the rules next to them that a faulty step follows.

A rule has two parts: what each state becomes, and the direction that the learning rate multiplies. Its variants have another
epsilon or another place for it, no bias correction, another count of steps, a stale moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.recompute.capture import ParameterSample, StepCapture

_EPSILONS = (0.0, 1e-16, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
Values = dict[str, Tensor]
Rule = Callable[[Values], Tensor]


def inputs_of(step: StepCapture, sample: ParameterSample) -> Values:
    assert sample.gradient is not None
    sign = -1.0 if sample.settings.get("maximize") else 1.0
    gradient = sample.gradient.double() * sign
    zeros = torch.zeros_like(gradient)
    found = {"weight": sample.weight.double(), "gradient": gradient}
    for name in state_rules(step.rule, sample):
        kept = sample.states.get(name)
        found[name] = zeros if kept is None else kept.double()
    return found


def decay_of(sample: ParameterSample) -> float:
    return float(sample.settings.get("weight_decay") or 0.0)


def is_decoupled(rule: str, sample: ParameterSample) -> bool:
    return rule == "adamw" or bool(sample.settings.get("decoupled_weight_decay"))


def gradient_with_decay(rule: str, sample: ParameterSample, given: Values) -> Tensor:
    """The gradient that the states take, with decay where the rule adds it there."""
    if is_decoupled(rule, sample):
        return given["gradient"]
    return given["gradient"] + decay_of(sample) * given["weight"]


def factors_of(rule: str, sample: ParameterSample) -> dict[str, tuple[float, float]]:
    """What each state keeps of itself and takes of its new term."""
    if rule == "sgd":
        momentum = float(sample.settings.get("momentum") or 0.0)
        is_first = "momentum_buffer" not in sample.states
        taken = 1.0 if is_first else 1.0 - float(sample.settings.get("dampening") or 0.0)
        return {"momentum_buffer": (momentum, taken)} if momentum else {}
    beta1, beta2 = sample.settings["betas"]
    return {"exp_avg": (beta1, 1 - beta1), "exp_avg_sq": (beta2, 1 - beta2)}


def new_term(name: str, gradient: Tensor) -> Tensor:
    return gradient.square() if name == "exp_avg_sq" else gradient


def state_rules(rule: str, sample: ParameterSample) -> dict[str, Rule]:
    def make(name: str, kept: float, taken: float) -> Rule:
        return lambda given: kept * given[name] + taken * new_term(name, gradient_with_decay(rule, sample, given))

    return {name: make(name, *factors) for name, factors in factors_of(rule, sample).items()}


@dataclass(frozen=True)
class Variant:
    """A step of the rule or of one that is near it: ``cause`` is empty for the rule itself."""

    cause: str
    values: tuple[tuple[str, object], ...]
    step: Tensor


def direction(rule: str, sample: ParameterSample, values: Values) -> Tensor:
    """What the learning rate multiplies."""
    if rule == "sgd":
        gradient = gradient_with_decay(rule, sample, values)
        if "new_momentum_buffer" not in values:
            return gradient
        buffer = values["new_momentum_buffer"]
        momentum = float(sample.settings["momentum"])
        return gradient + momentum * buffer if sample.settings.get("nesterov") else buffer
    return adam_step(sample, values["new_exp_avg"], values["new_exp_avg_sq"], sample.number, sample.number)


def adam_step(
    sample: ParameterSample, first: Tensor, second: Tensor, count1: int, count2: int, eps: float | None = None
) -> Tensor:
    """Adam's step; a count of 0 corrects no bias."""
    beta1, beta2 = sample.settings["betas"]
    correction1 = 1 - beta1**count1 if count1 else 1.0
    correction2 = 1 - beta2**count2 if count2 else 1.0
    eps = float(sample.settings["eps"]) if eps is None else eps
    return first / correction1 / ((second / correction2).sqrt() + eps).clamp_min(1e-300)


def variants_of(rule: str, sample: ParameterSample, known: Values) -> Iterator[Variant]:
    yield Variant("", (), direction(rule, sample, known))
    if rule == "sgd":
        gradient, decay = known["gradient"], decay_of(sample)
        if "new_momentum_buffer" in known:
            buffer, momentum = known["new_momentum_buffer"], float(sample.settings["momentum"])
            yield Variant("no-momentum", (), gradient_with_decay(rule, sample, known))
            is_nesterov = bool(sample.settings.get("nesterov"))
            other = buffer if is_nesterov else gradient_with_decay(rule, sample, known) + momentum * buffer
            yield Variant("nesterov", (("given", is_nesterov),), other)
        elif decay:
            yield Variant("decay-lost", (), gradient)
        return
    first, second, count = known["new_exp_avg"], known["new_exp_avg_sq"], sample.number
    yield Variant("no-bias-correction", (("of", "both"),), adam_step(sample, first, second, 0, 0))
    yield Variant("no-bias-correction", (("of", "exp_avg"),), adam_step(sample, first, second, 0, count))
    yield Variant("no-bias-correction", (("of", "exp_avg_sq"),), adam_step(sample, first, second, count, 0))
    for number in (count - 1, count + 1, 1):
        if number > 0 and number != count:
            counts = (("count", number), ("wanted", count))
            yield Variant("step-count", counts, adam_step(sample, first, second, number, number))
    for by, number in sample.shared_counts:
        yield Variant("count-shared", (("by", by),), adam_step(sample, first, second, number, number))
    eps, beta2 = float(sample.settings["eps"]), float(sample.settings["betas"][1])
    for value in _EPSILONS:
        if value != eps:
            values = (("value", value), ("wanted", eps))
            yield Variant("eps", values, adam_step(sample, first, second, count, count, value))
    yield Variant("no-momentum", (), adam_step(sample, known["gradient"], second, 0, count))
    yield Variant("stale-moment", (("state", "exp_avg"),), adam_step(sample, known["exp_avg"], second, count, count))
    if known["exp_avg_sq"].any():
        stale = adam_step(sample, first, known["exp_avg_sq"], count, count)
        yield Variant("stale-moment", (("state", "exp_avg_sq"),), stale)
    if not eps:
        return
    corrected, correction2 = first / (1 - float(sample.settings["betas"][0]) ** count), 1 - beta2**count
    yield Variant("eps-inside-root", (("added", "eps"),), corrected / (second / correction2 + eps).sqrt())
    yield Variant("eps-inside-root", (("added", "eps²"),), corrected / (second / correction2 + eps * eps).sqrt())
    # The correction then multiplies eps, too.
    before = {
        "eps was added to the root of": second.sqrt() + eps,
        "eps was added to": (second + eps).sqrt(),
        "eps² was added to": (second + eps * eps).sqrt(),
    }
    for what, root in before.items():
        yield Variant("eps-before-correction", (("what", what),), corrected * correction2**0.5 / root)
