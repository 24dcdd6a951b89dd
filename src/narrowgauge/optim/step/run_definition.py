"""The step of a state by its definition: as the proof of a kernel, and where no kernel is written.

Then it is compiled by ``torch.compile``: in float64, for a rule of the user's own, and on a GPU for
Collage, Kahan's compensation and float16 weights. Each (rule, storage) is compiled once for all
sizes, and compared with the definition at its first use.
"""

import math
from collections.abc import Callable
from functools import cache, reduce
from operator import or_
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim.rules.elementwise import Scalars
from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.step import codes
from narrowgauge.optim.step.bit_layout import block_peaks, planes_of
from narrowgauge.optim.step.state import LocalState
from narrowgauge.optim.step.state_chunks import StateChunk, chunks_of, integers_of, lane_of
from narrowgauge.optim.step.step_definition import (
    StepScalars,
    average,
    finite_or_zero,
    named,
    step_elements,
)
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.compile import compiled

MOST_GROWTH = 2.0**20
"""The factor by which the bound of a block grows in a step, at most."""


@cache
def step_words(rule: AnyRule, storage: Storage) -> Callable[..., None]:
    """Return a function that steps the integers of the weight and of each plane in place:
    ``step(weight, gradient, *planes, *scales, *changes, values, seed)``.

    The scales are float32: for each scaled code, below its block's end and back. A matrix rule has
    one change, float32.
    """
    planes = planes_of(storage)

    def step_in_place(weight: Tensor, gradient: Tensor, *rest: Tensor) -> None:
        stored = [weight, *rest[: len(planes)]]
        *others, values, seed = rest[len(planes) :]
        scales = {}
        for name in storage.scaled:
            into, back, *others = others
            scales[name] = into, back
        lane = lane_of(storage, weight, gradient, stored[1:], scales)
        scalars = named(rule, values)
        visible, fields = step_elements(rule, storage, lane, scalars, seed, *others)
        results = [codes.weight_word(storage.visible, visible)]
        for plane in planes:
            results.append(reduce(or_, [fields[field.name] for field in plane.fields]))
        for integers, result in zip(stored, results, strict=True):
            integers.copy_(torch.where(scalars["skip"] != 0, integers, result))

    return step_in_place


def run(state: LocalState, numbers: StepScalars, *, is_compiled: bool = False) -> None:
    """Step in place. The state has its gradient. That of a matrix rule has its change."""
    rule = state.kernel.rule
    step = step_words(rule, state.storage)
    if is_compiled:
        # Else the bits of a code would be symbols, as sizes are.
        step = torch._dynamo.config.patch(specialize_int=True)(compiled(step))
    changes = [state.change] if state.kernel.is_matrix else []
    for chunk in chunks_of(state, state.gradient, *changes, writes=True):
        gradient, *change = chunk.arguments
        arguments = [integers_of(chunk.weight), gradient]
        arguments += [integers_of(values) for values in chunk.planes.values()]
        bounds = new_bounds(chunk, rule, named(rule, numbers.values))
        for name, bound in bounds.items():
            arguments.append(chunk.expand_scales(codes.multipliers(bound)[0]))
            arguments.append(chunk.expand_scales(codes.multipliers(chunk.bounds[name])[1]))
        step(*arguments, *change, numbers.values, numbers.seed)
        for name, bound in bounds.items():
            chunk.bounds[name].data.copy_(bound)


def new_bounds(chunk: StateChunk, rule: Any, scalars: Scalars) -> dict[str, Tensor]:
    """Return the bounds of blocks after a step, for each scaled state: no exact value exceeds it.

    The rule is monotone in magnitudes. So its step of the largest weight and gradient of a block,
    and of its old bounds, bounds each new state. A skipped step keeps its bounds.
    """
    result: dict[str, Tensor] = {}
    if not chunk.bounds:
        return result
    slopes = block_peaks(chunk.arguments[0]) * scalars["gradient_scale"].abs()
    weights = block_peaks(finite_or_zero(chunk.weight))
    zeros = torch.zeros_like(slopes)
    moments = [chunk.bounds[name] for name in rule.states]  # all are scaled, or none
    plus = rule.update(weights, slopes, *moments, scalars)[1:]
    minus = rule.update(weights, -1.0 * slopes, *moments, scalars)[1:]
    added = rule.update(weights, slopes, *[zeros] * len(moments), scalars)[1:]
    for (name, old), up, down, new in zip(chunk.bounds.items(), plus, minus, added, strict=True):
        bound = torch.maximum(up.abs(), down.abs())
        # A non-finite gradient must not stay in a bound: inf - inf would be NaN forever.
        bound = torch.where(bound < math.inf, bound, 3e38)
        # One huge gradient costs its element, not its block.
        limited = torch.where(old > 0, torch.minimum(bound, old * MOST_GROWTH), bound)
        # The bound of a block without gradients would fall, and the next gradient would be huge to it.
        bound = torch.where(new == 0, torch.maximum(bound, old), limited)
        result[name] = torch.where(scalars["skip"] != 0, old, bound)
    return result


def average_gradient(state: LocalState, numbers: StepScalars) -> None:
    """Write a matrix rule's average of the gradients into ``change``, by the definition."""
    rule: Any = state.kernel.rule
    scalars = named(rule, numbers.values)
    for chunk in chunks_of(state, state.gradient, state.change):
        gradient, into = chunk.arguments
        into.copy_(average(rule, state.storage, chunk.lane(gradient), scalars)[0])
