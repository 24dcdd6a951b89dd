"""One step of an optimizer: its numbers, one launch for each kernel, and the definition where no
kernel runs.

Elementwise rules step all tensors by one launch (:mod:`narrowgauge.optim.table`). A matrix rule
steps one parameter at a time, whole on every rank:

1. Every rank averages its shard of gradient and momentum (``MatrixRule.average``).
2. The average is gathered. Every rank computes ``MatrixRule.direction`` of the matrix, or of each
   one in a stack, with the same bits as one process.
3. Every rank writes its shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import gathered, own_part
from narrowgauge.numerics.hashing import step_seed
from narrowgauge.optim import definition, proof
from narrowgauge.optim.audit import Auditor
from narrowgauge.optim.kernel import Kernel, Numbers
from narrowgauge.optim.rules.matrix import MatrixRule, matrix_shape
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.step_cpp import has_kernel
from narrowgauge.optim.table import Batch, Table
from narrowgauge.torch_support.compile import COMPILE_ELEMENTS
from narrowgauge.torch_support.proof import TORCH, language_on


class Step:
    """Take one step of states that have their gradients.

    Attributes:
        control: the scalars of ``CONTROL``, float32 ``[2]`` on the device.
        auditor: takes the audits.
        audit_every: steps between audits.
        tables: kept between steps.
        compile: as in the optimizer.
    """

    def __init__(
        self, control: Tensor, auditor: Auditor, audit_every: int, tables: dict[Kernel, Table],
        compile: bool | None,
    ) -> None:  # fmt: skip
        self.control = control
        self.auditor = auditor
        self.audit_every = audit_every
        self.tables = tables
        self.compile = compile

    def run(self, work: Sequence[tuple[Mapping[str, Any], Sequence[LocalState]]]) -> None:
        """Step the states of param groups."""
        if self.control.is_cpu and self.control[1]:
            return  # skipped
        batches: dict[Kernel, dict[Numbers, list[LocalState]]] = defaultdict(dict)
        for group, states in work:
            alike: dict[tuple[Kernel, int], list[LocalState]] = defaultdict(list)
            for state in states:
                alike[state.kernel, state.step + 1].append(state)
            for (kernel, count), members in alike.items():
                scalars = kernel.rule.prepare(group, count)
                numbers = Numbers(kernel, self.control, scalars, step_seed(group["seed"], count))
                if not kernel.is_matrix:
                    batches[kernel][numbers] = members
                    continue
                for state in members:
                    if state.owner.numel():
                        self._step_matrix(state, numbers, group)
        for kernel, batch in batches.items():
            self._write(kernel, batch)

    def _step_matrix(self, state: LocalState, numbers: Numbers, options: Mapping[str, Any]) -> None:
        """Step one parameter by a matrix rule."""
        owner = state.owner
        state.change = state.parameter.new_empty(state.parameter.shape, dtype=torch.float32)
        definition.average_gradient(state, numbers)
        matrix = gathered(owner, state.change).reshape(matrix_shape(owner.shape))
        state.change = None
        if matrix.ndim == 2:
            _direct(state, matrix, (), options, numbers)
        else:
            for place, part in enumerate(matrix):
                _direct(state, part, (place,), options, numbers)
        state.change = own_part(owner, matrix.view(owner.shape))
        del matrix
        self._write(state.kernel, {numbers: [state]})
        state.change = None

    def _write(self, kernel: Kernel, batch: Batch) -> None:
        """Step an elementwise rule, or write the changes of matrices: by one launch, or by the
        definition.
        """
        reason = self._choose(kernel, list(chain.from_iterable(batch.values())))
        if self.audit_every:
            self.auditor.before(batch, self.audit_every)
        if not reason and kernel.how_it_ran != TORCH:
            if kernel not in self.tables:
                self.tables[kernel] = Table(kernel.rule, kernel.storage, self.control.device)
            self.tables[kernel].step(batch, self.control)
        else:
            run = definition.run if reason else definition.run_compiled
            for numbers, states in batch.items():
                for state in states:
                    run(state, numbers)
        self.auditor.after()

    def _choose(self, kernel: Kernel, states: Sequence[LocalState]) -> str:
        """Decide how states step. Return why their definition runs, or an empty string."""
        reason = ""
        if self.compile is False:
            reason = "compile=False"
        device = self.control.device
        way = language_on(device)
        if has_kernel(kernel.rule, kernel.storage, way):
            reason = reason or proof.why_not(kernel.rule, kernel.storage, device)
        else:
            way = TORCH
            count = sum(state.parameter.numel() for state in states)
            if device.type == "cpu" and count < COMPILE_ELEMENTS and not self.compile:
                why = f"{count:,} elements, and no kernel is written for the rule or storage"
                reason = reason or why
        kernel.how_it_ran = f"definition: {reason}" if reason else way
        return reason


def _direct(
    state: LocalState,
    matrix: Tensor,
    index: tuple[int, ...],
    options: Mapping[str, Any],
    numbers: Numbers,
) -> None:
    """Replace the gradient of a whole matrix by its step, and store its own states."""
    rule = state.kernel.rule
    assert isinstance(rule, MatrixRule)
    states = {name: memory[index] for name, memory in state.extras.items()}
    change, new = rule.direction(matrix, states, options, state.step + 1)
    for name, values in new.items():
        states[name].copy_(torch.where(numbers.control[1] != 0, states[name], values))
    matrix.copy_(change)
