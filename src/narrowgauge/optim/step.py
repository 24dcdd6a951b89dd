"""One step of an optimizer: one launch for each kernel, and the definition where no kernel runs.

Elementwise rules step all tensors by one launch (:mod:`narrowgauge.optim.table`). A matrix rule
steps one parameter at a time, whole on every rank:

1. Every rank averages its shard of gradient and momentum (``MatrixRule.average``).
2. The average is gathered. Every rank computes ``MatrixRule.direction`` of the matrix, or of each
   one in a stack, with the same bits as one process.
3. Every rank writes its shard.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
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
from narrowgauge.optim.table import Batch, Part, addresses_of
from narrowgauge.torch_support.compile import COMPILE_ELEMENTS
from narrowgauge.torch_support.proof import TORCH, language_on


@dataclass(frozen=True, slots=True)
class Step:
    """Take steps of states that have their gradients.

    Attributes:
        device: of all tensors.
        compile: as in the optimizer.
        auditor: takes the audits.
        ran: how each rule and storage ran in the last step: a language, or why the definition did.
    """

    device: torch.device
    compile: bool | None
    auditor: Auditor
    ran: dict[str, str]

    def batches_of(self, work: Iterable[tuple[int, LocalState]]) -> list[Batch]:
        """Return states by kernel. Each comes with the place of its param group."""
        alike: dict[Kernel, dict[tuple[int, int], list[LocalState]]] = defaultdict(dict)
        for place, state in work:
            alike[state.kernel].setdefault((place, state.step), []).append(state)
        batches = []
        for kernel, members in alike.items():
            batches.append(Batch(kernel, members))
            if not kernel.is_matrix:
                self._choose(batches[-1])
        return batches

    def run(
        self, batches: Sequence[Batch], groups: Sequence[Mapping[str, Any]], control: Tensor, audit_every: int
    ) -> None:  # fmt: skip
        """Step batches, with an audit in each ``audit_every`` steps. ``control`` holds the scalars of
        ``CONTROL``, float32 ``[2]`` on the device.
        """
        self.ran.clear()
        if control.is_cpu and control[1]:
            return  # skipped
        self.auditor.every = audit_every
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
        state.place = 0
        batch = Batch(state.kernel, {(part.place, part.step): [state]})
        batch.parts[0].numbers = part.numbers
        batch.use(state.streams(), addresses_of(state.streams()))
        self._choose(batch)
        self._write(batch)
        state.change = None

    def _write(self, batch: Batch) -> None:
        """Step an elementwise rule, or write the changes of matrices: by one launch, or by the
        definition.
        """
        self.ran[f"{batch.kernel.rule.name}/{batch.kernel.storage.name}"] = batch.how
        if self.auditor.every:
            self.auditor.before(batch)
        if batch.table is not None:
            batch.step()
        else:
            run = definition.run_compiled if batch.how == TORCH else definition.run
            for part in batch.parts:
                for state in part.states:
                    run(state, part.numbers)
        self.auditor.after(batch)

    def _choose(self, batch: Batch) -> None:
        """Decide how a batch steps."""
        kernel = batch.kernel
        reason = ""
        if self.compile is False:
            reason = "compile=False"
        way = language_on(self.device)
        if has_kernel(kernel.rule, kernel.storage, way):
            reason = reason or proof.why_not(kernel.rule, kernel.storage, self.device)
        else:
            way = TORCH
            count = sum(rows * columns for rows, columns in batch.forms)
            if self.device.type == "cpu" and count < COMPILE_ELEMENTS and not self.compile:
                why = f"{count:,} elements, and no kernel is written for the rule or storage"
                reason = reason or why
        batch.how = f"definition: {reason}" if reason else way
        if batch.how == way != TORCH:
            batch.lay_out(self.device)


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
