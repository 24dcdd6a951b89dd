"""Rules of SGD, Adam and AdamW in float64: the new value of each state, and the direction that the learning rate multiplies."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from narrowgauge.checks.step_samples import Sample

Values = dict[str, Tensor]


def inputs_of(sample: Sample) -> Values:
    """Return the inputs of a sample's rule in float64: weight, gradient and states."""
    assert sample.gradient is not None
    gradient = sample.gradient.double() * (-1.0 if sample.settings.get("maximize") else 1.0)
    states = dict.fromkeys(state_factors(sample), torch.zeros_like(gradient))
    return states | {name: value.double() for name, value in sample.before.items()} | {"gradient": gradient}


def state_factors(sample: Sample) -> dict[str, tuple[float, float]]:
    """Return for each state the factor of its old value and the factor of its new term."""
    settings = sample.settings
    if sample.rule == "sgd":
        momentum, is_first = float(settings.get("momentum") or 0.0), "momentum_buffer" not in sample.before
        take = 1.0 if is_first else 1.0 - float(settings.get("dampening") or 0.0)
        return {"momentum_buffer": (momentum, take)} if momentum else {}
    beta1, beta2 = map(float, settings["betas"])
    return {"exp_avg": (beta1, 1 - beta1), "exp_avg_sq": (beta2, 1 - beta2)}


def new_term(sample: Sample, name: str, inputs: Values) -> Tensor:
    """Return what a state takes: the gradient or its square, with decay if the rule adds it to the gradient."""
    gradient = inputs["gradient"]
    if not decouples(sample):
        gradient = gradient + decay_of(sample) * inputs["weight"]
    return gradient.square() if name == "exp_avg_sq" else gradient


def decay_of(sample: Sample) -> float:
    return float(sample.settings.get("weight_decay") or 0.0)


def decouples(sample: Sample) -> bool:
    """Return whether decay acts on the weight itself. For a rule without states both kinds of decay are equal."""
    is_decoupled = sample.rule == "adamw" or bool(sample.settings.get("decoupled_weight_decay"))
    return is_decoupled or not state_factors(sample)


def direction(sample: Sample, values: Values) -> Tensor:
    """Return the tensor that the learning rate multiplies, from the inputs and the new states (``new_exp_avg``)."""
    settings = sample.settings
    if sample.rule == "sgd":
        gradient, momentum = new_term(sample, "momentum_buffer", values), values.get("new_momentum_buffer")
        if momentum is None:
            return gradient
        return gradient + float(settings["momentum"]) * momentum if settings.get("nesterov") else momentum
    (beta1, beta2), count = map(float, settings["betas"]), max(1, sample.count or 0)
    first, second = values["new_exp_avg"], values["new_exp_avg_sq"]
    divisor = (second / (1 - beta2**count)).sqrt() + float(settings["eps"])
    return first / (1 - beta1**count) / divisor.where(divisor != 0, 1e-300)


def terms_of(sample: Sample, name: str, values: Values) -> dict[str, tuple[Tensor, float]]:
    """Return the terms that a step adds up for a state or the weight, each with the rule's number.

    A state becomes ``kept · old + taken · term``, the weight ``weight + step · change − decay · rate · weight``.
    """
    if name != "weight":
        factor, taken = state_factors(sample)[name]
        return {"kept": (values[name], factor), "taken": (new_term(sample, name, values), taken)}
    rate = float(sample.settings["lr"])
    decay = {"decay": (-rate * values["weight"], decay_of(sample))} if decouples(sample) else {}
    return {"step": (-rate * direction(sample, values), 1.0)} | decay


def sum_of(terms: Mapping[str, tuple[Tensor, float]]) -> Tensor:
    """Return the sum of terms, each times its number."""
    return torch.stack([number * term for term, number in terms.values()]).sum(0)
