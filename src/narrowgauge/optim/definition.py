"""The step of a state by its definition: where no kernel runs, and as the proof of a kernel."""

from __future__ import annotations

from narrowgauge.optim.kernel import Inputs, Numbers, advance, average, named
from narrowgauge.optim.row_bounds import new_bounds
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.values import at_once
from narrowgauge.optim.walk import Scales, spans


def run(state: LocalState, numbers: Numbers) -> None:
    """Step by the definition, in place.

    The state has its gradient. That of a matrix rule has its change.
    """
    scales = scales_of_step(state, numbers)
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


def scales_of_step(state: LocalState, numbers: Numbers) -> Scales | None:
    """Return the multipliers of a state's rows in this step, and write their new bounds."""
    if not state.bounds:
        return None
    scales = {}
    (bounds,) = new_bounds([state], [numbers.values])
    for name, (bound, into, back) in bounds.items():
        scales[name] = into, back
        state.bounds[name].copy_(bound)
    return scales


def average_gradient(state: LocalState, numbers: Numbers) -> None:
    """Write a matrix rule's average of the gradients into ``change``, by the definition."""
    rule = state.kernel.rule
    assert isinstance(rule, MatrixRule)
    scalars = named(rule, numbers.values)
    for span in spans(state, state.gradient, state.change, at_once=at_once(state)):
        gradient, into = span.arguments
        into.copy_(average(rule, state.storage, span.lane(gradient), scalars)[0])
