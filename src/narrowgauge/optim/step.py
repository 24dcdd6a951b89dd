"""One step of a param group: its numbers, matrices, and the definition where no printed step runs.

Elementwise rules step all tensors by one launch (:mod:`narrowgauge.optim.multi_tensor`). Matrix
rules average, gather and write in batches (:mod:`narrowgauge.optim.matrix_step`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.hashing import step_seed
from narrowgauge.numerics.metrics import KERNEL_SUMS
from narrowgauge.optim import codes
from narrowgauge.optim.audit import Auditor
from narrowgauge.optim.kernel import Numbers, least_decay
from narrowgauge.optim.matrix_step import step_matrices
from narrowgauge.optim.multi_tensor import Launches
from narrowgauge.optim.state import ParameterState
from narrowgauge.torch_support.torch_names import to_device


class Stepper:
    """Take one step of one param group. ``control`` holds the scalars of ``CONTROL``, ``[2]``."""

    def __init__(
        self, group: Mapping[str, Any], control: Tensor, auditor: Auditor, audit_every: int, launches: Launches
    ) -> None:  # fmt: skip
        self.group = group
        self.control = control
        self.auditor = auditor
        self.audit_every = audit_every
        self._launches = launches
        self._numbers: dict[tuple[str, int, torch.dtype], Numbers] = {}

    def numbers(self, state: ParameterState) -> Numbers:
        """Return the scalars and the seed of the next step of a state."""
        kernel = state.kernel
        count = state.step + 1
        dtype = codes.value_dtype(kernel.storage)
        key = kernel.rule.name, count, dtype
        if key not in self._numbers:
            scalars = [1.0, 0.0, *kernel.rule.prepare(self.group, count)]
            number = step_seed(self.group["seed"], count)
            device = self.control.device
            seed = to_device(torch.tensor(number, dtype=torch.int32, device="cpu"), device)
            values = to_device(torch.tensor(scalars, dtype=dtype, device="cpu"), device)
            values[:2] = self.control
            is_audited = self.audit_every > 0 and count % self.audit_every == 0
            self._numbers[key] = Numbers(values, seed, is_audited)
        return self._numbers[key]

    def step(self, states: Sequence[ParameterState]) -> None:
        """Step states of this group once each. They have their gradients."""
        if self.control.is_cpu and self.control[1]:
            return  # skipped
        elementwise = [state for state in states if not state.kernel.is_matrix]
        matrices = [state for state in states if state.kernel.is_matrix]
        refused = self._launches.take(self, elementwise)
        for state, sums in step_matrices(matrices, self.group, self.numbers, self._launch):
            self.note(state, sums)
        for state in refused:
            audit = state.run(self.numbers(state))
            if audit is not None:
                self.note(state, audit)

    def _launch(self, states: Sequence[ParameterState], averages: bool) -> list[ParameterState]:
        """Step matrices by one launch, or average them. Return the states that have none."""
        launches = Launches(self._launches.tables)
        refused = launches.take(self, states)
        launches.run(self.control, self.auditor, averages=averages)
        return refused

    def note(self, state: ParameterState, sums: Tensor) -> None:
        """Pass the sums over all elements of a state to the auditor, with the host's own sums."""
        num_elements = sums.new_full((1,), state.parameter.numel())
        missing = sums.new_zeros(len(KERNEL_SUMS) - len(sums))
        spacings = num_elements * self.audited_spacings(state)
        row = torch.cat([sums, missing, num_elements, spacings])
        self.auditor.fresh.append(([state.owner], row.unsqueeze(0)))

    def audited_spacings(self, state: ParameterState) -> float:
        """Return the decay that an audit looks for in the next step, in ulps of an element.

        It is 0 without decay.
        """
        decay = state.kernel.decay(self.group, state.step + 1)
        if decay <= 0:
            return 0.0
        return max(decay, least_decay(state.storage)) * state.storage.weight.spacings
