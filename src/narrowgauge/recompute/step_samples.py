"""Samples of every parameter of an optimizer before its step, and after it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge import _torch
from narrowgauge._torch import plain_name
from narrowgauge.numerics.shards import is_sharded
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import matrix_shape
from narrowgauge.recompute.capture import (
    ForwardCall,
    ParameterSample,
    StepCapture,
    gradient_of,
    number_of,
    rule_of,
    settings_of,
    spread_on_cpu,
    states_of,
    weight_of,
    whole_on_cpu,
)
from narrowgauge.recompute.computed_gradients import LeftByBackward
from narrowgauge.recompute.rules.definitions import DEFINITIONS
from narrowgauge.recompute.rules.other_counts import shared_counts
from narrowgauge.recompute.rules.own_step import own_step, roundings_of

WHOLE_ELEMENTS, WHOLE_PRODUCTS = 1 << 22, 1 << 35
"""Of the matrices of a step that are kept whole: elements of one, and multiply-adds that computing all again takes."""
_TIMES = 3
"""Times that a step is computed again, by and large."""


def sampled_step(
    number: int,
    optimizer: torch.optim.Optimizer,
    model: nn.Module,
    names: Mapping[int, str],
    computed: Mapping[int, LeftByBackward],
    previous: Mapping[int, Tensor],
    calls: Sequence[ForwardCall],
) -> StepCapture:
    """A step that is about to be taken.

    Args:
        number: of the step, from 1.
        model: without wrappers.
        names: of its parameters, by their id.
        computed: what the backward passes left, by the id of a parameter.
        previous: samples of the gradients of the step before, by the id of a parameter, on any device.
        calls: the forward passes that backward passes followed.
    """
    step = StepCapture(number, rule_of(optimizer), calls=list(calls))
    if (scaler := _torch.scaler_of_step()) is not None:
        step.loss_scale = float(scaler.get_scale())
    own = own_step(optimizer)
    step.loss_scale = max(step.loss_scale, own.loss_scale)
    if own.why_not:
        step.missing["update"] = own.why_not
    released = getattr(optimizer, "released", ())
    if released:
        step.missing["calls"] = "gradients are released as they arrive: the weights are no more those of the passes"
    listed: Counter[int] = Counter()
    products = WHOLE_PRODUCTS
    for index, group in enumerate(optimizer.param_groups):
        settings = settings_of(group)
        for place, parameter in enumerate(group["params"]):
            listed[id(parameter)] += 1
            if parameter in released:  # stepped already
                continue
            name, left = names.get(id(parameter), f"param {place}"), computed.get(id(parameter))
            sample = _sampled(name, optimizer, parameter, settings, own.factor)
            if (cost := _products(sample, parameter)) is not None and cost <= products:
                products -= cost
                sample.whole = _sampled(name, optimizer, parameter, settings, own.factor, whole_on_cpu)
            last = previous.get(id(parameter))
            sample.group, sample.previous = index, None if last is None else last.cpu()
            sample.listed = listed[id(parameter)]
            if left is not None:
                passed, squares = left.up_to(parameter.grad)
                sample.computed = passed.cpu()
                sample.computed_squares = None if is_sharded(parameter) else squares.cpu()
            step.parameters[name] = sample
    named = dict(model.named_parameters())
    step.outside = {
        plain_name(n): spread_on_cpu(p) for n, p in named.items() if p.grad is not None and id(p) not in listed
    }
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    step.embeddings = tuple(plain_name(n) for n, p in named.items() if any(p is table for table in tables))
    return step


def _products(sample: ParameterSample, parameter: Tensor) -> int | None:
    """Multiply-adds of computing a matrix's step again; ``None`` where it cannot be, or no rule needs the whole of it."""
    rule = DEFINITIONS.get(sample.rule)
    if rule is None or rule.unrounded is None or parameter.grad is None or is_sharded(parameter):
        return None
    rows, columns = matrix_shape(sample.shape)
    short, number = min(rows, columns), rows * columns
    if not sample.weight.numel() < number <= WHOLE_ELEMENTS:
        return None
    return int(_TIMES * sample.settings["ns_steps"] * (2 * short * number + short**3))


def _sampled(
    name: str,
    optimizer: torch.optim.Optimizer,
    parameter: Tensor,
    settings: dict[str, Any],
    factor: float,
    take: Callable[[Tensor], Tensor] = spread_on_cpu,
) -> ParameterSample:
    gradient = gradient_of(parameter)
    gradient = None if gradient is None else take(gradient)
    if gradient is not None and isinstance(optimizer, Optimizer):
        # Its rule computes in float32 with gradients of any format.
        gradient = (gradient.double() * factor).to(torch.promote_types(gradient.dtype, torch.float32))
    return ParameterSample(
        name,
        parameter.shape,
        parameter.dtype,
        settings,
        weight=take(weight_of(optimizer, parameter)),
        states=states_of(optimizer, parameter, take),
        gradient=gradient,
        gradient_eps=0.0 if parameter.grad is None else torch.finfo(parameter.grad.dtype).eps,
        number_before=number_of(optimizer, parameter),
        requires_grad=parameter.requires_grad,
        rule=rule_of(optimizer, parameter),
    )


def add_results(step: StepCapture, optimizer: torch.optim.Optimizer, held: Mapping[str, Tensor]) -> None:
    """Add what the step made of each parameter.

    Args:
        held: the optimizer's parameters by the names of the samples.
    """
    for name, sample in step.parameters.items():
        for each, take in ((sample, spread_on_cpu), (sample.whole, whole_on_cpu)):
            if each is not None and (parameter := held.get(name)) is not None:
                each.weight_after = take(weight_of(optimizer, parameter))
                each.states_after = states_of(optimizer, parameter, take)
                each.number = number_of(optimizer, parameter)
                each.roundings = roundings_of(optimizer, parameter, take)
    stepped = [sample for sample in step.parameters.values() if sample.gradient is not None]
    for place, sample in enumerate(stepped):
        of_groups, of_all = (sample.group, len(optimizer.param_groups)), (place, len(stepped))
        sample.shared_counts = shared_counts(sample.number, of_groups, of_all, max(1, len(step.calls)))
