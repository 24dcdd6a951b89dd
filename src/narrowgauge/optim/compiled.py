"""The definition of a step under ``torch.compile``: of a rule of the user's own, and in float64.

No kernel is written for these. Each (rule, storage) is compiled once for all sizes, and compared
with the definition at its first use.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache, reduce
from operator import or_
from typing import Literal

import torch
from torch import Tensor

from narrowgauge.optim import codes
from narrowgauge.optim.definition import scales_of_step
from narrowgauge.optim.kernel import Inputs, Numbers, advance, named
from narrowgauge.optim.planes import planes_of
from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.walk import integers_of, spans, widened
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.compile import COMPILE_ELEMENTS, compiled
from narrowgauge.torch_support.proof import can_compile

AT_ONCE = 1 << 22
"""Elements of a call. More gain nothing, and each temporary has as many."""


@lru_cache(None)
def step_words(rule: AnyRule, storage: Storage) -> Callable[..., None]:
    """Return a step of the integers of the weight and of each plane, in place:
    ``step(weight, gradient, *planes, *scales, *changes, values, seed)``.

    The scales are float32: for each scaled code, below its row's end and back. A matrix rule has one
    change, float32. On a CPU the step does not skip: the caller does.
    """
    planes = planes_of(storage)

    def step_in_place(weight: Tensor, gradient: Tensor, *rest: Tensor) -> None:
        stored = [weight, *rest[: len(planes)]]
        *others, values, seed = rest[len(planes) :]
        scales = {}
        for name in storage.scaled:
            into, back, *others = others
            scales[name] = into, back
        first, *words = map(widened, stored)
        lane = codes.lane_of(storage, first, gradient.float(), words, scales)
        scalars = named(rule, values)
        written = advance(Inputs(rule, storage, lane, (*others, None)[0], scalars, seed))
        results = [codes.weight_word(storage.visible, written.visible)]
        for plane in planes:
            results.append(reduce(or_, [written.fields[name] for name, _, _ in plane.fields]))
        for integers, result in zip(stored, results, strict=True):
            if not values.is_cpu:
                result = torch.where(scalars["skip"] != 0, integers, result)
            integers.copy_(result)

    return step_in_place


def why_not(states: Sequence[LocalState], is_asked: bool) -> str:
    """Return why the definition of states runs uncompiled, or an empty string."""
    count = sum(state.parameter.numel() for state in states)
    place = _place_of(states[0])
    if place == "cpu" and count < COMPILE_ELEMENTS and not is_asked:
        return f"{count:,} elements, and no kernel is written for the rule or storage"
    if not can_compile(place):
        return "there is no compiler"
    return ""


def _place_of(state: LocalState) -> Literal["cpu", "gpu"]:
    return "cpu" if state.parameter.is_cpu else "gpu"


def run(state: LocalState, numbers: Numbers) -> None:
    """Step in place as :func:`narrowgauge.optim.definition.run` does, by compiled code."""
    scales = scales_of_step(state, numbers)
    step = compiled(step_words(state.kernel.rule, state.storage), _place_of(state))
    changes = [state.change] if state.kernel.is_matrix else []
    walk = spans(state, state.gradient, *changes, scales=scales, at_once=AT_ONCE, writes=True)
    for span in walk:
        gradient, *change = span.arguments
        arguments = [integers_of(span.weight), gradient]
        arguments += [integers_of(values) for values in span.planes.values()]
        for name in state.storage.scaled:
            arguments += span.scales[name]
        # Else the bits of a code would be symbols, as sizes are.
        with torch._dynamo.config.patch(specialize_int=True):
            step(*arguments, *change, numbers.values, numbers.seed)
