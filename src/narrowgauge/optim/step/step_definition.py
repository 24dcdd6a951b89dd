"""The definition of a step: of many elements at once.

:func:`step_elements` writes ``read -> rule -> write`` once, in tensor operations. It is the oracle of
``cpp/`` and :mod:`narrowgauge.optim.step.step_triton`. Where these have no kernel, it is compiled
(:mod:`narrowgauge.optim.step.run_definition`). An elementwise rule runs between reading and writing. Storages
of Collage run AdamW in the published expansions. A matrix rule runs outside, on whole matrices:
:func:`average` averages the gradients before it, and the step writes its change.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.expansions import NearestEven
from narrowgauge.numerics.rounding import canonical_nan
from narrowgauge.optim.rules.collage import collage_adamw
from narrowgauge.optim.rules.elementwise import Rule, Scalars
from narrowgauge.optim.rules.matrix import AnyRule, MatrixRule, Result
from narrowgauge.optim.step import codes
from narrowgauge.optim.step.bit_layout import dropped_bits, planes_of
from narrowgauge.optim.step.codes import Lane, Written
from narrowgauge.spec.storages import Storage
from narrowgauge.torch_support.torch_names import host_tensor, to_device

CONTROL = ("gradient_scale", "skip")
"""The scalars of every step, before the rule's own: the factor of the gradients, and 1 to change
nothing.
"""


class StepDefinition:
    """Name the step of one (rule, storage).

    For a matrix rule it only averages, and writes the change that the rule computed on a whole
    matrix.

    Attributes:
        names: of the tensors of a state that a kernel reads, in the order of its table.
        cuts_states: whether states of an elementwise rule are stored in fewer bits than it computes.
    """

    def __init__(self, rule: AnyRule, storage: Storage) -> None:
        self.rule = rule
        self.storage = storage
        self.is_matrix = isinstance(rule, MatrixRule)
        bits = [storage.code(name).bits for name, _ in storage.states]
        self.cuts_states = not self.is_matrix and min(bits, default=32) < 32
        self.planes = planes_of(storage)
        self.scaled = storage.scaled
        self.names = [plane.name for plane in self.planes]
        self.names += [f"{name}_bound" for name in self.scaled]
        self.packed_names = dict(storage.states).keys() - {plane.name for plane in self.planes}


kernel_of = cache(StepDefinition)
"""Return the one kernel of a (rule, storage)."""


@dataclass(frozen=True, eq=False)
class StepScalars:
    """Hold the numbers of one step. States of a kernel with the same number of steps share them.

    Attributes:
        kernel: of the states.
        control: the scalars of ``CONTROL``, float32 ``[2]`` on the device.
        scalars, key: those of the rule, and the seed of the random bits, on the host.
    """

    kernel: StepDefinition
    control: Tensor
    scalars: Sequence[float]
    key: int

    @cached_property
    def values(self) -> Tensor:
        """Return the scalars of ``CONTROL`` and of the rule, in the rule's dtype."""
        dtype = codes.value_dtype(self.kernel.storage)
        scalars = to_device(host_tensor(self.scalars, dtype), self.control.device)
        return torch.cat([self.control.to(dtype), scalars])

    @cached_property
    def on_host(self) -> Tensor:
        """Return the scalars of the rule and the bits of the seed, as a kernel reads them: float32."""
        numbers = np.array([*self.scalars, 0.0], np.float32)
        numbers[-1:].view(np.int32)[0] = self.key
        return torch.from_numpy(numbers)

    @cached_property
    def seed(self) -> Tensor:
        """Return the seed, 0-d int32."""
        return to_device(host_tensor(self.key, torch.int32), self.control.device)


def named(rule: AnyRule, values: Tensor) -> dict[str, Tensor]:
    """Return the scalars of a step by name."""
    return dict(zip((*CONTROL, *rule.scalars), values.unbind(), strict=True))


def finite_or_zero(weight: Tensor) -> Tensor:
    """Return the weights that a rule reads. It would turn the decay of an infinite one into NaN."""
    return torch.where(weight.abs() < math.inf, weight, 0.0)


def in_expansions(rule: Rule, storage: Storage, lane: Lane, scalars: Scalars) -> Written:
    """Run Collage's AdamW: each operation rounds to nearest even at the weight's precision."""
    # NaNs of weights and gradients may have any payload. Rounding to few bits would carry it into
    # the sign.
    weight, rest = codes.read(storage, lane)
    assert rest is not None
    high, low = canonical_nan(weight), canonical_nan(rest)
    first, second = [codes.read_parts(storage, lane, name) for name in rule.states]
    gradient = canonical_nan(lane.gradient * scalars["gradient_scale"])
    rounding = NearestEven(dropped_bits(storage.weight))
    pair = finite_or_zero(high), low
    stepped, *new = collage_adamw(pair, gradient, first, second, scalars, rounding)
    is_finite = high.abs() < math.inf
    visible = codes.encode_visible(storage, torch.where(is_finite, stepped[0], high), None)
    fields = codes.write_low(storage, visible, torch.where(is_finite, stepped[1], 0.0))
    for name, parts in zip(rule.states, new, strict=True):
        fields |= codes.write_parts(storage, lane, name, parts)
    return visible, fields


def average(rule: MatrixRule, storage: Storage, lane: Lane, scalars: Scalars) -> Result:
    """Return a lane's gradient for a matrix rule's direction, and the new packed states."""
    gradient = lane.gradient * scalars["gradient_scale"]
    if rule.average is None:
        return gradient, {}
    states = {name: codes.read_state(storage, lane, name) for name in rule.packed_states}
    return rule.average(gradient, states, scalars)


def applied(
    rule: Rule, weight: Tensor, gradient: Tensor, states: Iterable[Tensor], scalars: Scalars
) -> list[Tensor]:
    """Return the change of an elementwise rule, and its new states."""
    scale = scalars["gradient_scale"]
    scaled = gradient.to(scale.dtype) * scale
    return list(rule.update(finite_or_zero(weight), scaled, *states, scalars))


def step_elements(
    rule: AnyRule, storage: Storage, lane: Lane, scalars: Scalars, seed: Tensor, change: Any = None
) -> Written:
    """Step one lane: run an elementwise rule, or write the ``change`` of a matrix rule, with its
    average and decay. Return the bits of the visible weight, and all fields.

    ``scalars`` are those of ``CONTROL`` and the rule's, in the dtype in which the rule computes.
    """
    if isinstance(rule, Rule) and storage.arithmetic == "expansion":
        return in_expansions(rule, storage, lane, scalars)
    old = codes.read(storage, lane)
    if isinstance(rule, Rule):
        parts = [codes.read_state(storage, lane, name) for name in rule.states]
        change, *new = applied(rule, old[0], lane.gradient, parts, scalars)
        states = dict(zip(rule.states, new, strict=True))
    else:
        weight = finite_or_zero(codes.read_weight(storage, lane))
        change = change + weight * scalars[rule.decay]
        states = average(rule, storage, lane, scalars)[1]
    return codes.write(storage, lane, old, change, states, seed)
