"""Rules of optimizers in float64.

A definition has two parts: the new value of each state, and the direction that the learning rate multiplies.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.checks.step_samples import Sample

_ROUNDINGS_OF_SIGN = 8.0
"""A sum within this many roundings of zero may get either sign."""
_LEAST_UNIT = 2.0**-23
"""The relative error of a gradient after our optimizers' clip factor, which they compute in another order."""
Values = dict[str, Tensor]
Rule = Callable[[Values], Tensor]


@dataclass(frozen=True)
class Definition:
    """The rule of an optimizer.

    Args:
        factors: for each state, the factor of its old value and the factor of its new term.
        direction: the tensor that the learning rate multiplies, computed from the inputs and the new states (``new_exp_avg``).
            ``None`` if it needs the whole matrix.
        is_decoupled: decay acts on the weight, not in the gradient.
        is_counted: moments are corrected by the number of steps.
    """

    factors: Callable[[Sample], dict[str, tuple[float, float]]]
    direction: Callable[[Sample, Values], Tensor] | None
    is_decoupled: bool = False
    is_counted: bool = False

    def decouples(self, sample: Sample) -> bool:
        """Return whether decay acts on the weight itself. For a rule without states both kinds of decay are equal."""
        is_stateless = not self.factors(sample)
        return self.is_decoupled or is_stateless or bool(sample.settings.get("decoupled_weight_decay"))

    def weight_decay(self, sample: Sample) -> float:
        """Return the decay that acts on the weight itself, or 0 for decay in the gradient."""
        return decay_of(sample) if self.decouples(sample) else 0.0

    def gradient(self, sample: Sample, inputs: Values) -> Tensor:
        """Return the gradient that the states take, with decay if the rule adds it there."""
        if self.decouples(sample):
            return inputs["gradient"]
        return inputs["gradient"] + decay_of(sample) * inputs["weight"]

    def state_rules(self, sample: Sample) -> dict[str, Rule]:
        """Return a rule for the new value of each state."""

        def make(name: str, keep: float, take: float) -> Rule:
            return lambda inputs: keep * inputs[name] + take * new_term(name, self.gradient(sample, inputs))

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


def _sgd_direction(sample: Sample, values: Values) -> Tensor:
    gradient, momentum = SGD.gradient(sample, values), values.get("new_momentum_buffer")
    if momentum is None:
        return gradient
    return gradient + _momentum_of(sample) * momentum if sample.settings.get("nesterov") else momentum


SGD = Definition(_sgd_factors, _sgd_direction)


# ── Adam and AdamW ────────────────────────────────────────────────────────────────────────────────────────────────────


def _adam_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    beta1, beta2 = _betas(sample)
    return {"exp_avg": (beta1, 1 - beta1), "exp_avg_sq": (beta2, 1 - beta2)}


def _adam_direction(sample: Sample, values: Values) -> Tensor:
    (beta1, beta2), count = _betas(sample), max(1, sample.count)
    first, second = values["new_exp_avg"], values["new_exp_avg_sq"]
    divisor = (second / (1 - beta2**count)).sqrt() + float(sample.settings["eps"])
    return first / (1 - beta1**count) / divisor.where(divisor != 0, 1e-300)


ADAM = Definition(_adam_factors, _adam_direction, is_counted=True)
ADAMW = Definition(_adam_factors, _adam_direction, is_decoupled=True, is_counted=True)


# ── Lion ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _lion_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    beta2 = _betas(sample)[1]
    return {"exp_avg": (beta2, 1 - beta2)}


def _lion_mean(values: Values, beta1: float) -> Tensor:
    """Return the mean of the old momentum and the gradient. Its sign is the step."""
    return beta1 * values["exp_avg"] + (1 - beta1) * values["gradient"]


def _lion_direction(sample: Sample, values: Values) -> Tensor:
    return _lion_mean(values, _betas(sample)[0]).sign()


LION = Definition(_lion_factors, _lion_direction, is_decoupled=True)


def decided(sample: Sample, inputs: Values) -> Tensor:
    """Mark the elements whose direction does not depend on a rounding, bool. Lion's terms may nearly cancel."""
    if sample.rule != "lion":
        return torch.ones_like(inputs["gradient"], dtype=torch.bool)
    mean = _lion_mean(inputs, _betas(sample)[0])
    unit = max([_LEAST_UNIT, *(rounding.unit for rounding in sample.roundings.values())])
    size = inputs["exp_avg"].abs() + inputs["gradient"].abs()
    return (mean.abs() > _ROUNDINGS_OF_SIGN * unit * size) | (size == 0)


# ── Muon ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _muon_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    momentum = _momentum_of(sample)
    return {"momentum_buffer": (momentum, 1 - momentum)}


MUON = Definition(_muon_factors, direction=None, is_decoupled=True)

DEFINITIONS = {"sgd": SGD, "adam": ADAM, "adamw": ADAMW, "lion": LION, "muon": MUON}
"""By the rule of a :class:`StepCapture`."""
