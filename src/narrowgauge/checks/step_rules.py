"""Rules of optimizers in float64.

A definition has two parts: what each state becomes, and the direction that the learning rate multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from narrowgauge.checks.step_samples import Sample
from narrowgauge.optim.rules.matrix import LR_SCALES, NS_COEFFICIENTS, matrix_shape, newton_schulz, orthogonalise

_ROUNDINGS_OF_SIGN = 8.0
"""How many roundings a sum whose sign is taken may be from zero and still be rounded to either side."""
_LEAST_UNIT = 2.0**-23
"""The relative error of a gradient after our own optimizers' factor, which is computed in another order."""
Values = dict[str, Tensor]
Rule = Callable[[Values], Tensor]


def accept_all(sample: Sample, inputs: Values) -> Tensor:
    """Accept every element: where a direction is continuous, rounding does not decide it."""
    return torch.ones_like(inputs["gradient"], dtype=torch.bool)


@dataclass(frozen=True)
class Definition:
    """The rule of an optimizer.

    Args:
        factors: what each state keeps of itself and takes of its new term.
        direction: what the learning rate multiplies, of the inputs and the new states (``new_exp_avg``).
        is_decoupled: decay acts on the weight, not in the gradient.
        is_counted: moments are corrected by the number of steps.
        decided: which elements have a direction that does not hang on a rounding, bool.
        unrounded: where the direction needs the whole matrix and rounds its products: the same without these roundings. A step
            that took its products in another order agrees with it to what they are worth.
    """

    factors: Callable[[Sample], dict[str, tuple[float, float]]]
    direction: Callable[[Sample, Values], Tensor]
    is_decoupled: bool = False
    is_counted: bool = False
    decided: Callable[[Sample, Values], Tensor] = accept_all
    unrounded: Definition | None = None

    def decouples(self, sample: Sample) -> bool:
        """Return whether decay acts on the weight itself; without a state that is the same as in the gradient."""
        is_stateless = not self.factors(sample)
        return self.is_decoupled or is_stateless or bool(sample.settings.get("decoupled_weight_decay"))

    def weight_decay(self, sample: Sample) -> float:
        """Return the decay that acts on the weight itself: 0 where it is in the gradient."""
        return decay_of(sample) if self.decouples(sample) else 0.0

    def gradient(self, sample: Sample, inputs: Values) -> Tensor:
        """Return the gradient that the states take, with decay where the rule adds it there."""
        if self.decouples(sample):
            return inputs["gradient"]
        return inputs["gradient"] + decay_of(sample) * inputs["weight"]

    def state_rules(self, sample: Sample) -> dict[str, Rule]:
        """Return what each state becomes."""

        def make(name: str, kept: float, taken: float) -> Rule:
            return lambda inputs: kept * inputs[name] + taken * new_term(name, self.gradient(sample, inputs))

        return {name: make(name, *factors) for name, factors in self.factors(sample).items()}


def inputs_of(sample: Sample) -> Values:
    """Return the inputs of a sample's rule in float64: weight, gradient and states."""
    assert sample.gradient is not None
    sign = -1.0 if sample.settings.get("maximize") else 1.0
    gradient = sample.gradient.double() * sign
    zeros = torch.zeros_like(gradient)
    inputs = {"weight": sample.weight.double(), "gradient": gradient}
    for name in DEFINITIONS[sample.rule].factors(sample):
        state = sample.states.get(name)
        inputs[name] = zeros if state is None else state.double()
    return inputs


def decay_of(sample: Sample) -> float:
    return float(sample.settings.get("weight_decay") or 0.0)


def new_term(name: str, gradient: Tensor) -> Tensor:
    return gradient.square() if name == "exp_avg_sq" else gradient


def _betas(sample: Sample) -> tuple[float, float]:
    beta1, beta2 = sample.settings["betas"]
    return float(beta1), float(beta2)


# ── SGD ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _momentum_of(sample: Sample) -> float:
    return float(sample.settings.get("momentum") or 0.0)


def _sgd_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    is_first = "momentum_buffer" not in sample.states
    taken = 1.0 if is_first else 1.0 - float(sample.settings.get("dampening") or 0.0)
    momentum = _momentum_of(sample)
    return {"momentum_buffer": (momentum, taken)} if momentum else {}


def _along_nesterov(sample: Sample, values: Values) -> Tensor:
    return SGD.gradient(sample, values) + _momentum_of(sample) * values["new_momentum_buffer"]


def _sgd_direction(sample: Sample, values: Values) -> Tensor:
    if "new_momentum_buffer" not in values:
        return SGD.gradient(sample, values)
    is_nesterov = sample.settings.get("nesterov")
    return _along_nesterov(sample, values) if is_nesterov else values["new_momentum_buffer"]


SGD = Definition(_sgd_factors, _sgd_direction)


# ── Adam and AdamW ────────────────────────────────────────────────────────────────────────────────────────────────────


def _adam_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    beta1, beta2 = _betas(sample)
    return {"exp_avg": (beta1, 1 - beta1), "exp_avg_sq": (beta2, 1 - beta2)}


def _adam_direction(sample: Sample, values: Values, eps: float | None = None) -> Tensor:
    (beta1, beta2), count = _betas(sample), max(1, sample.count)
    first, second = values["new_exp_avg"], values["new_exp_avg_sq"]
    divisor = (second / (1 - beta2**count)).sqrt() + (float(sample.settings["eps"]) if eps is None else eps)
    return first / (1 - beta1**count) / divisor.where(divisor != 0, 1e-300)


ADAM = Definition(_adam_factors, _adam_direction, is_counted=True)
ADAMW = Definition(_adam_factors, _adam_direction, is_decoupled=True, is_counted=True)


# ── Lion ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lion_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    beta2 = _betas(sample)[1]
    return {"exp_avg": (beta2, 1 - beta2)}


def _lion_mean(values: Values, beta1: float) -> Tensor:
    """Return the mean whose sign is the step: of the momentum before the step and the gradient."""
    return beta1 * values["exp_avg"] + (1 - beta1) * values["gradient"]


def _lion_direction(sample: Sample, values: Values) -> Tensor:
    return _lion_mean(values, _betas(sample)[0]).sign()


def _lion_decided(sample: Sample, inputs: Values) -> Tensor:
    """Leave out elements whose terms nearly cancel: a rounding chooses their sign."""
    mean = _lion_mean(inputs, _betas(sample)[0])
    unit = max([_LEAST_UNIT, *(rounding.unit for rounding in sample.roundings.values())])
    size = inputs["exp_avg"].abs() + inputs["gradient"].abs()
    return (mean.abs() > _ROUNDINGS_OF_SIGN * unit * size) | (size == 0)


LION = Definition(_lion_factors, _lion_direction, is_decoupled=True, decided=_lion_decided)


# ── Muon ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _muon_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    momentum = _momentum_of(sample)
    return {"momentum_buffer": (momentum, 1 - momentum)}


def _mean_as_rounded(sample: Sample, values: Values, is_nesterov: bool) -> Tensor:
    """Return what is made orthogonal, with the operations and the format of the optimizer's class."""
    momentum = _momentum_of(sample)
    if "ns_coefficients" in sample.settings:
        g, m = (values[name].to(sample.dtype) for name in ("gradient", "momentum_buffer"))
        m = m.lerp(g, 1 - momentum)
        return g.lerp(m, momentum) if is_nesterov else m
    g, m = values["gradient"].float(), values["momentum_buffer"].float()
    m = m + (g - m) * (1 - momentum)
    return g + (m - g) * momentum if is_nesterov else m


def _mean(sample: Sample, values: Values, is_nesterov: bool) -> Tensor:
    """Return the same in float64."""
    gradient, momentum = values["gradient"], values["new_momentum_buffer"]
    return gradient + (momentum - gradient) * _momentum_of(sample) if is_nesterov else momentum


def _orthogonal_as_rounded(sample: Sample, values: Tensor) -> Tensor:
    """Make a matrix orthogonal as the optimizer's class does it: torch's rounds before it divides by the norm, ours after."""
    settings, matrix = sample.settings, values.reshape(matrix_shape(sample.shape)).float()
    if "ns_coefficients" in settings:
        x = matrix.bfloat16()
        x = x / x.norm().clamp(min=float(settings["eps"]))
        result = newton_schulz(x, settings["ns_steps"], settings["ns_coefficients"])
    else:
        result = orthogonalise(matrix, settings["ns_steps"], getattr(torch, settings["ns_dtype"]))
    return result.reshape(-1).double()


def _orthogonal(sample: Sample, values: Tensor) -> Tensor:
    """Make a matrix orthogonal in float64; in a narrower format as the optimizer's class does it, to measure rounding."""
    if values.dtype is not torch.float64:
        return _orthogonal_as_rounded(sample, values)
    matrix = values.reshape(matrix_shape(sample.shape))
    unit = matrix / matrix.norm().clamp_min(1e-300)
    coefficients = sample.settings.get("ns_coefficients", NS_COEFFICIENTS)
    return newton_schulz(unit, sample.settings["ns_steps"], coefficients).reshape(-1)


def _muon(mean: Callable[[Sample, Values, bool], Tensor], orthogonal: Callable[[Sample, Tensor], Tensor]) -> Definition:
    def direction(sample: Sample, values: Values) -> Tensor:
        scale = LR_SCALES[sample.settings.get("adjust_lr_fn") or "original"](*matrix_shape(sample.shape))
        return scale * orthogonal(sample, mean(sample, values, bool(sample.settings.get("nesterov"))))

    return Definition(_muon_factors, direction, is_decoupled=True)


MUON = replace(_muon(_mean_as_rounded, _orthogonal_as_rounded), unrounded=_muon(_mean, _orthogonal))

DEFINITIONS = {"sgd": SGD, "adam": ADAM, "adamw": ADAMW, "lion": LION, "muon": MUON}
"""By the rule of a :class:`StepCapture`."""
