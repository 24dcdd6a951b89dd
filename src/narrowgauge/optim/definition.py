"""The step of a state by its definition: where no kernel runs, as the proof of a kernel, and to
audit a sample.
"""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.numerics.metrics import KERNEL_SUMS
from narrowgauge.optim.kernel import Inputs, Numbers, advance, audited_terms, average, named
from narrowgauge.optim.row_bounds import new_bounds
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.values import at_once
from narrowgauge.optim.walk import Scales, spans

MOST_ELEMENTS = 1 << 14
"""Elements of a tensor that an audit reads at most, or one row of more: the definition takes 0.3 µs
for each.
"""


def run(state: LocalState, numbers: Numbers) -> None:
    """Step by the definition, in place.

    The state has its gradient. That of a matrix rule has its change.
    """
    scales = scales_of_step(state, numbers, writes=True)
    scalars = named(state.kernel.rule, numbers.values)
    arguments = [state.gradient, *([state.change] if state.kernel.is_matrix else [])]
    is_skipped = None if numbers.values.is_cpu else scalars["skip"] != 0
    for span in spans(state, *arguments, scales=scales, at_once=at_once(state), writes=True):
        gradient, *changes = span.arguments
        change = changes[0] if changes else None
        lane = span.lane(gradient)
        inputs = Inputs(state.kernel.rule, state.storage, lane, change, scalars, numbers.seed)
        written = advance(inputs)
        span.store(written.fields, written.visible, is_skipped)


def scales_of_step(state: LocalState, numbers: Numbers, *, writes: bool) -> Scales | None:
    """Return the multipliers of a state's rows in this step, and write their new bounds."""
    if not state.bounds:
        return None
    scales = {}
    (bounds,) = new_bounds([state], [numbers.values])
    for name, (bound, into, back) in bounds.items():
        scales[name] = into, back
        if writes:
            state.bounds[name].copy_(bound)
    return scales


def sample_of(state: LocalState, turn: int) -> slice:
    """Return the rows, or the elements of one row, that audit number ``turn`` reads.

    An audit reads at least 512 elements, a 16th of the first 131,072, a 32nd of the first 524,288,
    and 16,384 of more. The period, after which each was read once, is a power of two.
    """
    numel = state.parameter.numel()
    rows, columns = state.form
    period = max(min(numel // 512, 16), min(numel // 8192, 32), numel // MOST_ELEMENTS)
    period = max(1, min(period, rows if rows > 1 else columns))
    period = 1 << (period.bit_length() - 1)
    return slice(turn % period, None, period)


def audit(state: LocalState, numbers: Numbers) -> Tensor:
    """Return the sums of the step that comes next over a sample, then the number of its elements
    and the ulps of decay: float64.
    """
    assert numbers.turn is not None
    rule = state.kernel.rule
    total = numbers.values.new_zeros(len(KERNEL_SUMS) + 2, dtype=torch.float64)
    scales = scales_of_step(state, numbers, writes=False)
    scalars = named(rule, numbers.values)
    arguments = [state.gradient, *([state.change] if state.kernel.is_matrix else [])]
    sample = sample_of(state, numbers.turn)
    count = 0
    for span in spans(state, *arguments, scales=scales, at_once=at_once(state), sample=sample):
        gradient, *changes = span.arguments
        change = changes[0] if changes else None
        lane = span.lane(gradient)
        inputs = Inputs(rule, state.storage, lane, change, scalars, numbers.seed)
        for place, term in enumerate(audited_terms(inputs, advance(inputs))):
            total[place] += term.double().sum()
        count += gradient.numel()
    total[-2] = count
    total[-1] = count * numbers.spacings
    return total


def average_gradient(state: LocalState, numbers: Numbers) -> None:
    """Write a matrix rule's average of the gradients into ``change``, by the definition."""
    rule = state.kernel.rule
    assert isinstance(rule, MatrixRule)
    scalars = named(rule, numbers.values)
    for span in spans(state, state.gradient, state.change, at_once=at_once(state)):
        gradient, into = span.arguments
        into.copy_(average(rule, state.storage, span.lane(gradient), scalars)[0])
