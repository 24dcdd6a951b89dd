"""The definition of a step under ``torch.compile``: of a rule of the user's own, and in float64.

No kernel is written for these. Each (rule, storage) is compiled once for all sizes, and compared
once with the definition as it runs uncompiled.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim import definition
from narrowgauge.optim.kernel import Numbers, make_step
from narrowgauge.optim.planes import planes_of
from narrowgauge.optim.rules.matrix import AnyRule
from narrowgauge.optim.state import ParameterState
from narrowgauge.optim.walk import integers_of, spans, widened
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.compile import COMPILE_ELEMENTS, options

AT_ONCE = 1 << 22
"""Elements of a call. More gain nothing, and each temporary has as many."""


def step_words(rule: AnyRule, storage: Storage) -> Callable[..., None]:
    """Return a step of the integers of the weight and of each plane, in place."""
    step = make_step(rule, storage)
    count = len(planes_of(storage))

    def step_in_place(weight: Tensor, gradient: Tensor, *rest: Tensor) -> None:
        words = [weight, *rest[:count]]
        first, *planes = map(widened, words)
        results = step(first, gradient.float(), *planes, *rest[count:])
        for word, result in zip(words, results, strict=True):
            word.copy_(result)

    return step_in_place


@lru_cache(None)
def _compiled(rule: AnyRule, storage: Storage, device: str) -> Callable[..., None]:
    chosen: Any = options(torch.device(device))
    return torch.compile(step_words(rule, storage), dynamic=True, options=chosen)


def is_worth_it(states: Sequence[ParameterState]) -> bool:
    """Return whether steps of states win back the seconds of compiling."""
    count = sum(state.parameter.numel() for state in states)
    return count >= COMPILE_ELEMENTS or not states[0].parameter.is_cpu


def run(state: ParameterState, numbers: Numbers) -> None:
    """Step in place as :func:`narrowgauge.optim.definition.run` does, by compiled code."""
    scales = definition.scales_of_step(state, numbers, writes=True)
    changes = [state.change] if state.kernel.is_matrix else []
    step = _compiled(state.kernel.rule, state.storage, state.parameter.device.type)
    walk = spans(state, state.gradient, *changes, scales=scales, at_once=AT_ONCE, writes=True)
    for span in walk:
        gradient, *change = span.arguments
        planes = [integers_of(values) for values in span.planes.values()]
        multipliers: list[Tensor] = []
        for name in state.storage.scaled:
            multipliers += span.scales[name]
        with torch.no_grad():
            step(
                integers_of(span.weight), gradient, *planes, *multipliers, *change,
                numbers.values, numbers.seed,
            )  # fmt: skip
