"""Rules of optimizers in float64, and the rules next to them that a faulty step follows.

A definition has two parts: what each state becomes, and the direction that the learning rate multiplies. Its variants have
another epsilon or another place for it, no bias correction, another count of steps, a stale moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim.rules.matrix import LR_SCALES, NS_COEFFICIENTS, matrix_shape, newton_schulz, orthogonalise
from narrowgauge.recompute.capture import ParameterSample, StepCapture

_EPSILONS = (0.0, 1e-16, 1e-12, 1e-10, 1e-9, 1e-8, 1e-7, 1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0)
_BETAS = (0.5, 0.8, 0.9, 0.95, 0.98, 0.99, 0.999)
_ROUNDINGS_OF_SIGN = 8.0
"""How many roundings a sum whose sign is taken may be from zero and still be rounded to either side."""
_LEAST_UNIT = 2.0**-23
"""The relative error of a gradient after our own optimizers' factor, which is computed in another order."""
UNSEEN = "second-moment-unseen"
"""The variant that divides by epsilon alone: a step that agrees with it does not tell how it uses the second moment."""
Values = dict[str, Tensor]
Rule = Callable[[Values], Tensor]


@dataclass(frozen=True)
class Variant:
    """A step of the rule or of one that is near it: ``cause`` is empty for the rule itself."""

    cause: str
    values: tuple[tuple[str, object], ...]
    step: Tensor


def all_are_told(sample: ParameterSample, given: Values) -> Tensor:
    """Of a rule whose direction is continuous: every element's is known to rounding."""
    return torch.ones_like(given["gradient"], dtype=torch.bool)


@dataclass(frozen=True)
class Definition:
    """What an optimizer computes.

    Args:
        keeps: the states that it has under a group's settings.
        factors: what each state keeps of itself and takes of its new term.
        direction: what the learning rate multiplies, of the inputs and the new states (``new_exp_avg``).
        variants: the rules near it.
        is_decoupled: decay acts on the weight, not in the gradient.
        is_counted: moments are corrected by the number of steps.
        told: the elements whose direction does not hang on a rounding, bool.
        unrounded: where the direction needs the whole matrix and rounds its products: the same without these roundings. A step
            that took its products in another order agrees with it to what they are worth.
    """

    keeps: Callable[[Mapping[str, Any]], tuple[str, ...]]
    factors: Callable[[ParameterSample], dict[str, tuple[float, float]]]
    direction: Callable[[ParameterSample, Values], Tensor]
    variants: Callable[[ParameterSample, Values], Iterator[Variant]]
    is_decoupled: bool = False
    is_counted: bool = False
    told: Callable[[ParameterSample, Values], Tensor] = all_are_told
    unrounded: Definition | None = None

    def decouples(self, sample: ParameterSample) -> bool:
        return self.is_decoupled or bool(sample.settings.get("decoupled_weight_decay"))

    def weight_decay(self, sample: ParameterSample) -> float:
        """The decay that acts on the weight itself: 0 where it is in the gradient."""
        return decay_of(sample) if self.decouples(sample) else 0.0

    def gradient(self, sample: ParameterSample, given: Values) -> Tensor:
        """The gradient that the states take, with decay where the rule adds it there."""
        if self.decouples(sample):
            return given["gradient"]
        return given["gradient"] + decay_of(sample) * given["weight"]

    def state_rules(self, sample: ParameterSample) -> dict[str, Rule]:
        """What each state becomes."""

        def make(name: str, kept: float, taken: float) -> Rule:
            return lambda given: kept * given[name] + taken * new_term(name, self.gradient(sample, given))

        return {name: make(name, *factors) for name, factors in self.factors(sample).items()}

    def with_variants(self, sample: ParameterSample, known: Values) -> Iterator[Variant]:
        """The rule's own step first, then those of the rules near it."""
        yield Variant("", (), self.direction(sample, known))
        yield from self.variants(sample, known)


def definition_of(step: StepCapture, sample: ParameterSample) -> Definition:
    return DEFINITIONS[sample.rule or step.rule]


def inputs_of(step: StepCapture, sample: ParameterSample) -> Values:
    assert sample.gradient is not None
    sign = -1.0 if sample.settings.get("maximize") else 1.0
    gradient = sample.gradient.double() * sign
    zeros = torch.zeros_like(gradient)
    found = {"weight": sample.weight.double(), "gradient": gradient}
    for name in definition_of(step, sample).factors(sample):
        kept = sample.states.get(name)
        found[name] = zeros if kept is None else kept.double()
    return found


def decay_of(sample: ParameterSample) -> float:
    return float(sample.settings.get("weight_decay") or 0.0)


def new_term(name: str, gradient: Tensor) -> Tensor:
    return gradient.square() if name == "exp_avg_sq" else gradient


def _betas(sample: ParameterSample) -> tuple[float, float]:
    beta1, beta2 = sample.settings["betas"]
    return float(beta1), float(beta2)


# ── SGD ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _momentum_of(sample: ParameterSample) -> float:
    return float(sample.settings.get("momentum") or 0.0)


def _sgd_factors(sample: ParameterSample) -> dict[str, tuple[float, float]]:
    is_first = "momentum_buffer" not in sample.states
    taken = 1.0 if is_first else 1.0 - float(sample.settings.get("dampening") or 0.0)
    momentum = _momentum_of(sample)
    return {"momentum_buffer": (momentum, taken)} if momentum else {}


def _along_nesterov(sample: ParameterSample, values: Values) -> Tensor:
    return SGD.gradient(sample, values) + _momentum_of(sample) * values["new_momentum_buffer"]


def _sgd_direction(sample: ParameterSample, values: Values) -> Tensor:
    if "new_momentum_buffer" not in values:
        return SGD.gradient(sample, values)
    is_nesterov = sample.settings.get("nesterov")
    return _along_nesterov(sample, values) if is_nesterov else values["new_momentum_buffer"]


def _sgd_variants(sample: ParameterSample, known: Values) -> Iterator[Variant]:
    if "new_momentum_buffer" in known:
        yield Variant("no-momentum", (), SGD.gradient(sample, known))
        is_nesterov = bool(sample.settings.get("nesterov"))
        other = known["new_momentum_buffer"] if is_nesterov else _along_nesterov(sample, known)
        yield Variant("nesterov", (("given", is_nesterov),), other)
        if "momentum_buffer" in known:
            yield Variant("stale-moment", (("state", "momentum_buffer"),), known["momentum_buffer"])
    elif decay_of(sample):
        yield Variant("decay-lost", (), known["gradient"])


SGD = Definition(
    lambda settings: ("momentum_buffer",) if settings.get("momentum") else (),
    _sgd_factors,
    _sgd_direction,
    _sgd_variants,
)


# ── Adam and AdamW ────────────────────────────────────────────────────────────────────────────────────────────────────


def _adam_factors(sample: ParameterSample) -> dict[str, tuple[float, float]]:
    beta1, beta2 = _betas(sample)
    return {"exp_avg": (beta1, 1 - beta1), "exp_avg_sq": (beta2, 1 - beta2)}


def adam_step(
    sample: ParameterSample, first: Tensor, second: Tensor, count1: int, count2: int, eps: float | None = None
) -> Tensor:
    """Adam's step; a count of 0 corrects no bias."""
    beta1, beta2 = _betas(sample)
    correction1 = 1 - beta1**count1 if count1 else 1.0
    correction2 = 1 - beta2**count2 if count2 else 1.0
    eps = float(sample.settings["eps"]) if eps is None else eps
    divisor = (second / correction2).sqrt() + eps
    return first / correction1 / divisor.where(divisor != 0, 1e-300)


def _corrected_by(by: str, sample: ParameterSample, first: Tensor, second: Tensor) -> Variant:
    """A step of moments whose bias was corrected by something else."""
    return Variant("correction-other", (("by", by),), adam_step(sample, first, second, 0, 0))


def _adam_direction(sample: ParameterSample, values: Values) -> Tensor:
    return adam_step(sample, values["new_exp_avg"], values["new_exp_avg_sq"], sample.number, sample.number)


def _adam_variants(sample: ParameterSample, known: Values) -> Iterator[Variant]:
    first, second, count = known["new_exp_avg"], known["new_exp_avg_sq"], sample.number
    eps, (beta1, beta2) = float(sample.settings["eps"]), _betas(sample)
    yield Variant("no-bias-correction", (("of", "both"),), adam_step(sample, first, second, 0, 0))
    yield Variant("no-bias-correction", (("of", "exp_avg"),), adam_step(sample, first, second, 0, count))
    yield Variant("no-bias-correction", (("of", "exp_avg_sq"),), adam_step(sample, first, second, count, 0))
    for number in (count - 1, count + 1, 1):
        if number > 0 and number != count:
            counts = (("count", number), ("wanted", count))
            yield Variant("step-count", counts, adam_step(sample, first, second, number, number))
    powers1, powers2 = beta1**count, beta2**count
    yield _corrected_by("* (1 - beta**step)", sample, first * (1 - powers1), second * (1 - powers2))
    if powers1 and powers2:
        yield _corrected_by("/ beta**step", sample, first / powers1, second / powers2)
    for value in _BETAS:
        if value != beta2:
            yield _corrected_by(f"/ (1 - {value}**step)", sample, first / (1 - powers1), second / (1 - value**count))
    for by, number in sample.shared_counts:
        yield Variant("count-shared", (("by", by),), adam_step(sample, first, second, number, number))
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
    opposite = (("value", -eps), ("wanted", eps))
    yield Variant("eps", opposite, adam_step(sample, first, second, count, count, -eps))
    corrected, correction2 = first / (1 - beta1**count), 1 - beta2**count
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
    yield Variant(UNSEEN, (), corrected / eps)


def _two_moments(settings: Mapping[str, Any]) -> tuple[str, ...]:
    return "exp_avg", "exp_avg_sq"


ADAM = Definition(_two_moments, _adam_factors, _adam_direction, _adam_variants, is_counted=True)
ADAMW = Definition(_two_moments, _adam_factors, _adam_direction, _adam_variants, is_decoupled=True, is_counted=True)


# ── Lion ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lion_factors(sample: ParameterSample) -> dict[str, tuple[float, float]]:
    beta2 = _betas(sample)[1]
    return {"exp_avg": (beta2, 1 - beta2)}


def _lion_mean(values: Values, beta1: float) -> Tensor:
    """What the step is the sign of and no state keeps: the momentum before the step, averaged with the gradient."""
    return beta1 * values["exp_avg"] + (1 - beta1) * values["gradient"]


def _lion_direction(sample: ParameterSample, values: Values) -> Tensor:
    return _lion_mean(values, _betas(sample)[0]).sign()


def _lion_variants(sample: ParameterSample, known: Values) -> Iterator[Variant]:
    yield Variant("no-momentum", (), known["gradient"].sign())
    yield Variant("sign-of-state", (("state", "exp_avg"),), known["new_exp_avg"].sign())
    beta1 = _betas(sample)[0]
    for value in _BETAS:
        if value != beta1:
            yield Variant("sign-beta", (("value", value), ("wanted", beta1)), _lion_mean(known, value).sign())


def _lion_told(sample: ParameterSample, given: Values) -> Tensor:
    """Where the terms nearly cancel, a rounding chooses the sign."""
    mean = _lion_mean(given, _betas(sample)[0])
    unit = max([_LEAST_UNIT, *(rounding.unit for rounding in sample.roundings.values())])
    size = given["exp_avg"].abs() + given["gradient"].abs()
    return (mean.abs() > _ROUNDINGS_OF_SIGN * unit * size) | (size == 0)


LION = Definition(
    lambda settings: ("exp_avg",), _lion_factors, _lion_direction, _lion_variants, is_decoupled=True, told=_lion_told
)


# ── Muon ──────────────────────────────────────────────────────────────────────────────────────────────────────────────

_SCALES: dict[str, Callable[[int, int], float]] = {
    "max(1, rows / cols)**0.5": LR_SCALES["original"],
    "0.2 * max(rows, cols)**0.5": LR_SCALES["match_rms_adamw"],
    "max(1, cols / rows)**0.5": lambda rows, cols: LR_SCALES["original"](cols, rows),
    "1": lambda rows, cols: 1.0,
}
"""What implementations multiply the rate of a matrix by; the third takes a weight for its transpose."""
_GIVEN_SCALES = dict(zip((None, "original", "match_rms_adamw"), ("max(1, rows / cols)**0.5", *_SCALES), strict=False))
"""By the name that a group gives its scale."""


def _muon_factors(sample: ParameterSample) -> dict[str, tuple[float, float]]:
    momentum = _momentum_of(sample)
    return {"momentum_buffer": (momentum, 1 - momentum)}


def _mean_as_rounded(sample: ParameterSample, values: Values, is_nesterov: bool) -> Tensor:
    """What is made orthogonal, with the operations of the optimizer's class, in its format: torch's is that of the weight."""
    momentum = _momentum_of(sample)
    if "ns_coefficients" in sample.settings:
        g, m = (values[name].to(sample.dtype) for name in ("gradient", "momentum_buffer"))
        m = m.lerp(g, 1 - momentum)
        return g.lerp(m, momentum) if is_nesterov else m
    g, m = values["gradient"].float(), values["momentum_buffer"].float()
    m = m + (g - m) * (1 - momentum)
    return g + (m - g) * momentum if is_nesterov else m


def _mean(sample: ParameterSample, values: Values, is_nesterov: bool) -> Tensor:
    """The same in float64."""
    gradient, momentum = values["gradient"], values["new_momentum_buffer"]
    return gradient + (momentum - gradient) * _momentum_of(sample) if is_nesterov else momentum


def _orthogonal_as_rounded(sample: ParameterSample, values: Tensor) -> Tensor:
    """A matrix made orthogonal as the optimizer's class does it: torch's rounds before it divides by the norm, ours after."""
    settings, matrix = sample.settings, values.reshape(matrix_shape(sample.shape)).float()
    if "ns_coefficients" in settings:
        x = matrix.bfloat16()
        x = x / x.norm().clamp(min=float(settings["eps"]))
        found = newton_schulz(x, settings["ns_steps"], settings["ns_coefficients"])
    else:
        found = orthogonalise(matrix, settings["ns_steps"], getattr(torch, settings["ns_dtype"]))
    return found.reshape(-1).double()


def _orthogonal(sample: ParameterSample, values: Tensor) -> Tensor:
    """The same in float64; values of a narrower format as the optimizer's class does it, which rounding is measured by."""
    if values.dtype is not torch.float64:
        return _orthogonal_as_rounded(sample, values)
    matrix = values.reshape(matrix_shape(sample.shape))
    unit = matrix / matrix.norm().clamp_min(1e-300)
    coefficients = sample.settings.get("ns_coefficients", NS_COEFFICIENTS)
    return newton_schulz(unit, sample.settings["ns_steps"], coefficients).reshape(-1)


def _muon(
    mean: Callable[[ParameterSample, Values, bool], Tensor], orthogonal: Callable[[ParameterSample, Tensor], Tensor]
) -> Definition:
    def scale(sample: ParameterSample, by: str = "") -> float:
        return _SCALES[by or _GIVEN_SCALES[sample.settings.get("adjust_lr_fn")]](*matrix_shape(sample.shape))

    def is_nesterov(sample: ParameterSample) -> bool:
        return bool(sample.settings.get("nesterov"))

    def direction(sample: ParameterSample, values: Values) -> Tensor:
        return scale(sample) * orthogonal(sample, mean(sample, values, is_nesterov(sample)))

    def variants(sample: ParameterSample, known: Values) -> Iterator[Variant]:
        own, given = direction(sample, known), _GIVEN_SCALES[sample.settings.get("adjust_lr_fn")]
        for by in _SCALES:
            if by != given:
                factor = scale(sample, by) / scale(sample)
                yield Variant("scale-of-shape", (("by", by), ("wanted", given)), factor * own)
        yield Variant("not-orthogonal", (), scale(sample) * mean(sample, known, is_nesterov(sample)).double())
        other = orthogonal(sample, mean(sample, known, not is_nesterov(sample)))
        yield Variant("nesterov", (("given", is_nesterov(sample)),), scale(sample) * other)
        yield Variant("no-momentum", (), scale(sample) * orthogonal(sample, known["gradient"]))
        if known["momentum_buffer"].any():
            stale = scale(sample) * orthogonal(sample, known["momentum_buffer"])
            yield Variant("stale-moment", (("state", "momentum_buffer"),), stale)

    return Definition(lambda settings: ("momentum_buffer",), _muon_factors, direction, variants, is_decoupled=True)


MUON = replace(_muon(_mean_as_rounded, _orthogonal_as_rounded), unrounded=_muon(_mean, _orthogonal))

DEFINITIONS = {"sgd": SGD, "adam": ADAM, "adamw": ADAMW, "lion": LION, "muon": MUON}
"""By the rule of a :class:`StepCapture`."""
