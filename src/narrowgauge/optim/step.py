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
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.dtensor import gathered, own_part
from narrowgauge.optim import definition, proof
from narrowgauge.optim.audit import Auditor
from narrowgauge.optim.kernel import Kernel
from narrowgauge.optim.rules.matrix import MatrixRule, matrix_shape
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.step_cpp import has_kernel
from narrowgauge.optim.table import Batch, Part, Table, table_of
from narrowgauge.torch_support.compile import COMPILE_ELEMENTS
from narrowgauge.torch_support.proof import TORCH, language_on

Work = Sequence[Sequence[LocalState]]
"""The states of each param group that have a gradient."""


class Step:
    """Take steps of states that have their gradients.

    Attributes:
        device: of all tensors.
        auditor: takes the audits.
        audit_every: steps between audits.
        tables: kept between steps.
        compile: as in the optimizer.
    """

    def __init__(
        self, device: torch.device, auditor: Auditor, audit_every: int, tables: dict[Kernel, Table],
        compile: bool | None,
    ) -> None:  # fmt: skip
        self.device = device
        self.auditor = auditor
        self.audit_every = audit_every
        self.tables = tables
        self.compile = compile

    def batches_of(self, work: Work) -> list[Batch]:
        """Return the states of param groups by kernel, and where they lie."""
        alike: dict[Kernel, dict[tuple[int, int], list[LocalState]]] = defaultdict(dict)
        for place, states in enumerate(work):
            for state in states:
                alike[state.kernel].setdefault((place, state.step), []).append(state)
        batches = [Batch(kernel, members) for kernel, members in alike.items()]
        for batch in batches:
            if not batch.kernel.is_matrix:
                self._choose(batch)
        return batches

    def run(
        self, batches: Sequence[Batch], groups: Sequence[Mapping[str, Any]], control: Tensor
    ) -> None:
        """Step batches. ``control`` holds the scalars of ``CONTROL``, float32 ``[2]`` on the device."""
        if control.is_cpu and control[1]:
            return  # skipped
        for batch in batches:
            batch.prepare(groups, control)
        for batch in batches:
            if not batch.kernel.is_matrix:
                self._write(batch)
                continue
            for part in batch.parts:
                for state in part.states:
                    if state.owner.numel():
                        self._step_matrix(state, part, groups[part.place])

    def _step_matrix(self, state: LocalState, part: Part, options: Mapping[str, Any]) -> None:
        """Step one parameter by a matrix rule."""
        owner = state.owner
        state.change = state.parameter.new_empty(state.parameter.shape, dtype=torch.float32)
        definition.average_gradient(state, part.numbers)
        matrix = gathered(owner, state.change).reshape(matrix_shape(owner.shape))
        state.change = None
        control = part.numbers.control
        if matrix.ndim == 2:
            _direct(state, matrix, (), options, control)
        else:
            for place, member in enumerate(matrix):
                _direct(state, member, (place,), options, control)
        state.change = own_part(owner, matrix.view(owner.shape))
        del matrix
        batch = Batch(state.kernel, {(part.place, part.step): [state]})
        batch.parts[0].numbers = part.numbers
        self._choose(batch)
        self._write(batch)
        state.change = None

    def _write(self, batch: Batch) -> None:
        """Step an elementwise rule, or write the changes of matrices: by one launch, or by the
        definition.
        """
        batch.kernel.how_it_ran = batch.how
        if self.audit_every:
            self.auditor.before(batch, self.audit_every)
        if batch.table is not None:
            batch.step()
        else:
            run = definition.run_compiled if batch.how == TORCH else definition.run
            for part in batch.parts:
                for state in part.states:
                    run(state, part.numbers)
        self.auditor.after(batch)

    def _choose(self, batch: Batch) -> None:
        """Decide how a batch steps, and find its memory."""
        kernel = batch.kernel
        reason = ""
        if self.compile is False:
            reason = "compile=False"
        way = language_on(self.device)
        if has_kernel(kernel.rule, kernel.storage, way):
            reason = reason or proof.why_not(kernel.rule, kernel.storage, self.device)
        else:
            way = TORCH
            count = sum(state.parameter.numel() for state in batch.states)
            if self.device.type == "cpu" and count < COMPILE_ELEMENTS and not self.compile:
                why = f"{count:,} elements, and no kernel is written for the rule or storage"
                reason = reason or why
        batch.how = f"definition: {reason}" if reason else way
        if not reason and way != TORCH:
            if kernel not in self.tables:
                self.tables[kernel] = table_of(kernel, self.device)
            batch.lay_out(self.tables[kernel])
        batch.locate()


def _direct(
    state: LocalState,
    matrix: Tensor,
    index: tuple[int, ...],
    options: Mapping[str, Any],
    control: Tensor,
) -> None:
    """Replace the gradient of a whole matrix by its step, and store its own states."""
    rule = state.kernel.rule
    assert isinstance(rule, MatrixRule)
    states = {name: memory[index] for name, memory in state.extras.items()}
    change, new = rule.direction(matrix, states, options, state.step + 1)
    for name, values in new.items():
        states[name].copy_(torch.where(control[1] != 0, states[name], values))
    matrix.copy_(change)
