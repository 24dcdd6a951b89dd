"""The step of matrix rules: one parameter at a time, whole on every rank.

1. Every rank averages its shard of gradient and momentum (``MatrixRule.average``).
2. The average is gathered. Every rank computes ``MatrixRule.direction`` of the matrix, or of each
   one in a stack, with the same bits as one process.
3. Every rank writes its shard.

Weights and states are decoded piece by piece.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import gathered, own_part
from narrowgauge.optim.extras import extra_values, store_extra
from narrowgauge.optim.kernel import Numbers
from narrowgauge.optim.rules.matrix import MatrixRule, Options, matrix_shape
from narrowgauge.optim.state import LocalState

Batch = Mapping[LocalState, Numbers]
"""States with the numbers of their step."""


def step_matrices(
    numbers: Batch,
    options: Options,
    average: Callable[[Batch], None],
    write: Callable[[Batch], None],
) -> None:
    """Step the matrices of one param group.

    ``average`` averages the gradients of states into their changes, ``write`` writes the changes.
    """
    for state in numbers:
        owner = state.owner
        if not owner.numel():
            continue
        alone = {state: numbers[state]}
        state.change = state.parameter.new_empty(state.parameter.shape, dtype=torch.float32)
        average(alone)
        matrix = gathered(owner, state.change).reshape(matrix_shape(owner.shape))
        state.change = None
        _direct(state, matrix, options, numbers[state])
        state.change = own_part(owner, matrix.view(owner.shape))
        del matrix
        write(alone)
        state.change = None


def _rule(state: LocalState) -> MatrixRule:
    assert isinstance(state.kernel.rule, MatrixRule)
    return state.kernel.rule


def _matrices(values: Tensor) -> Sequence[Tensor]:
    """Return a matrix, or those of a stack."""
    return (values,) if values.ndim == 2 else values.unbind(0)


def _direct(state: LocalState, gradient: Tensor, options: Options, numbers: Numbers) -> None:
    """Replace the gradients of whole matrices by their steps, and store extras."""
    rule = _rule(state)
    skip = numbers.values[1] != 0
    for place, matrix in enumerate(_matrices(gradient)):
        index = (place,) if gradient.ndim == 3 else ()
        extras = {}
        for name in state.extras:
            extras[name] = extra_values(state, name, index)
        change, new = rule.direction(matrix, extras, options, state.step + 1)
        for name, values in new.items():
            store_extra(state, name, values, numbers.seed, skip, index)
        matrix.copy_(change)
