"""The step of a state by its definition, where no printed step runs, and as its proof."""

from __future__ import annotations

import torch
from torch import Tensor

from narrowgauge.optim.kernel import Inputs, Numbers, advance, audited_terms, average, named
from narrowgauge.optim.row_bounds import bound_rows
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.values import at_once
from narrowgauge.optim.walk import spans


def run(state: LocalState, numbers: Numbers) -> Tensor | None:
    """Step by the definition, in place. Return the audit's sums, float64, if it is audited.

    The state has its gradient. That of a matrix rule has its change.
    """
    rule = state.kernel.rule
    scales = bound_rows(state, numbers.values) if state.bounds else None
    scalars = named(rule, numbers.values)
    total = numbers.values.new_zeros(state.kernel.num_sums, dtype=torch.float64)
    arguments = [state.gradient, *([state.change] if state.kernel.is_matrix else [])]
    is_skipped = None if numbers.values.is_cpu else scalars["skip"] != 0
    for span in spans(state, *arguments, scales=scales, at_once=at_once(state), writes=True):
        gradient, *changes = span.arguments
        change = changes[0] if changes else None
        lane = span.lane(gradient)
        inputs = Inputs(rule, state.storage, lane, change, scalars, numbers.seed)
        written = advance(inputs)
        if numbers.turn is not None:
            for place, term in enumerate(audited_terms(inputs, written)):
                total[place] += term.double().sum()
        span.store(written.fields, written.visible, is_skipped)
    return None if numbers.turn is None else total


def average_gradient(state: LocalState, numbers: Numbers) -> None:
    """Write a matrix rule's average of the gradients into ``change``, by the definition."""
    rule = state.kernel.rule
    assert isinstance(rule, MatrixRule)
    scalars = named(rule, numbers.values)
    for span in spans(state, state.gradient, state.change, at_once=at_once(state)):
        gradient, into = span.arguments
        into.copy_(average(rule, state.storage, span.lane(gradient), scalars)[0])
