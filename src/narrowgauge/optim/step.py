"""One step of a param group: a kernel steps each parameter in place, in a bucket, or as a copy.

Large parameters are stepped in place, small ones in their bucket. What strides or an address prevent from being read as words is
copied, and its weights are copied back. A storage scaled by row first gets new bounds for its rows
(:mod:`narrowgauge.optim.row_bounds`). :mod:`narrowgauge.optim.matrix_step` steps matrices.
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
from narrowgauge.optim.kernel import Kernel, Numbers, least_decay
from narrowgauge.optim.layout import Bucket, buckets_of
from narrowgauge.optim.low_bits import fill_states
from narrowgauge.optim.matrix_step import step_matrices
from narrowgauge.optim.multi_tensor import Launches
from narrowgauge.optim.row_bounds import bound_rows
from narrowgauge.optim.state import ParameterState
from narrowgauge.torch_names import to_device


def on_device(seed: Tensor, values: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy a seed, int32 0-d, and floats ``[n]`` to a device at once. Each begins at a multiple of 16 bytes."""
    if device.type == "cpu":
        return seed, values
    sent = to_device(torch.cat([seed.view(1), seed.new_zeros(3), values.view(torch.int32)]), device)
    return sent[0], sent[4:].view(values.dtype)


class Stepper:
    """Take one step of one param group. ``control`` holds the scalars of ``CONTROL``, ``[2]``."""

    def __init__(
        self,
        group: Mapping[str, Any],
        control: Tensor,
        auditor: Auditor,
        audit_every: int,
        launches: Launches,
    ) -> None:
        self.group, self.control, self.auditor, self.audit_every = (
            group,
            control,
            auditor,
            audit_every,
        )
        self._launches = launches
        self._numbers: dict[tuple[str, int, torch.dtype], Numbers] = {}

    def numbers(self, work: ParameterState | Bucket) -> Numbers:
        """Return the scalars and the seed of the next step of a state or bucket."""
        kernel, count = work.kernel, work.step + 1
        dtype = codes.value_dtype(kernel.storage)
        key = kernel.rule.name, count, dtype
        if key not in self._numbers:
            scalars = torch.tensor(
                [1.0, 0.0, *kernel.rule.prepare(self.group, count)], dtype=dtype, device="cpu"
            )
            number = torch.tensor(
                step_seed(self.group["seed"], count), dtype=torch.int32, device="cpu"
            )
            seed, values = on_device(number, scalars, self.control.device)
            values[:2] = self.control
            self._numbers[key] = Numbers(
                values, seed, self.audit_every > 0 and count % self.audit_every == 0
            )
        return self._numbers[key]

    def step(self, states: Sequence[ParameterState]) -> None:
        """Step states of this group once each. They have their gradients.

        Small states of one kernel and step number share buckets: those of the last step, if the same states step together.
        """
        if self.group.get("low_bits") == "random":
            fill_states(
                [state for state in states if state.step == 0], self.group["seed"], self.control[1]
            )
        if self.control.is_cpu and self.control[1]:
            return  # skipped
        buckets: list[Bucket] = buckets_of([state for state in states if state.bucket is not None])
        alone = [state for state in states if state.bucket is None and not state.kernel.is_matrix]
        alone = self._launches.take(self, alone)
        for state, sums in step_matrices(
            (state for state in states if state.kernel.is_matrix),
            self.group,
            self.numbers,
            self._launch,
        ):
            self.note([state], sums.unsqueeze(0), sums.new_full((1,), state.parameter.numel()))
        for bucket in buckets:
            bucket.gather()
        batch: list[ParameterState | Bucket] = [*buckets, *alone]
        self._bound_rows(batch)
        for work in batch:
            (tensors, weight), numbers = work.kernel_tensors(), self.numbers(work)
            if numbers.audited:
                self._audit(work, tensors, numbers)
            work.kernel.run(tensors, numbers.values, numbers.seed)
            work.write_back(weight)

    def _launch(self, states: Sequence[ParameterState], averages: bool) -> list[ParameterState]:
        """Step matrices by one launch, or average them. Return the states that have none."""
        launches = Launches(self._launches.tables)
        refused = launches.take(self, states)
        launches.run(self.control, self.auditor, averages=averages)
        return refused

    def _audit(
        self, work: ParameterState | Bucket, tensors: Sequence[Tensor], numbers: Numbers
    ) -> None:
        """Pass the sums of each member over some of its rows to the auditor, before they are stepped."""
        rows, member, elements = work.audited_rows((work.step + 1) // self.audit_every)
        copies = [work.layout.rows(tensor).index_select(0, rows) for tensor in tensors]
        table = work.kernel.audit(copies, numbers.values, numbers.seed)
        sums = table.new_zeros(len(work.members), len(table) + 1)
        sums.index_add_(0, member, torch.cat([table, elements.to(table).unsqueeze(0)]).t())
        self.note(work.members, sums[:, :-1], sums[:, -1])

    def note(self, states: Sequence[ParameterState], sums: Tensor, num_elements: Tensor) -> None:
        """Pass the sums over some elements of states of one kernel and step count to the auditor, with the host's own sums."""
        missing = sums.new_zeros(len(sums), len(KERNEL_SUMS) - sums.shape[1])
        spacings = num_elements * self.audited_spacings(states[0])
        rows = torch.cat([sums, missing, num_elements.unsqueeze(1), spacings.unsqueeze(1)], 1)
        self.auditor.fresh.append(([state.owner for state in states], rows))

    def audited_spacings(self, state: ParameterState) -> float:
        """Return the decay that an audit looks for in the next step, in ulps of an element. It is 0 without decay."""
        decay = state.kernel.decay(self.group, state.step + 1)
        return (
            max(decay, least_decay(state.storage)) * state.storage.weight.spacings
            if decay > 0
            else 0.0
        )

    def _bound_rows(self, batch: Sequence[ParameterState | Bucket]) -> None:
        alike: dict[tuple[Kernel, Numbers], list[ParameterState | Bucket]] = {}
        for work in batch:
            if work.scales:
                alike.setdefault((work.kernel, self.numbers(work)), []).append(work)
        for (kernel, numbers), members in alike.items():
            bound_rows(kernel, members, numbers.values)
