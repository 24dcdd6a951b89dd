"""One step of a param group: a kernel steps each parameter in place, in a bucket, or as a copy.

Large parameters are stepped in place, small ones in their bucket. A tensor may have strides or an address that prevent reading
it as words. It is copied into words, and its weights are copied back. :mod:`narrowgauge.optim.matrix_step` steps matrices.

A storage scaled by row gets new bounds for its rows before the step (:mod:`narrowgauge.optim.row_bounds`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.hashing import step_seed
from narrowgauge.optim import codes
from narrowgauge.optim.audit import Auditor, audited_parts
from narrowgauge.optim.kernel import Kernel, least_decay
from narrowgauge.optim.layout import Bucket, buckets_of
from narrowgauge.optim.low_bits import fill_states
from narrowgauge.optim.matrix_step import step_matrices
from narrowgauge.optim.multi_tensor import Launches
from narrowgauge.optim.row_bounds import bound_rows
from narrowgauge.optim.state import ParameterState
from narrowgauge.torch_names import to_device


@dataclass(frozen=True, slots=True, eq=False)
class Numbers:
    """Hold the scalars of a step for one (rule, step number). States with the same number of steps share them.

    ``values`` are the scalars of ``CONTROL`` and of the rule, in the rule's dtype. ``seed`` is the seed of the random bits, 0-d
    int32.
    """

    values: Tensor
    seed: Tensor
    audited: bool


def on_device(seed: Tensor, values: Tensor, device: torch.device) -> tuple[Tensor, Tensor]:
    """Copy a seed, int32 0-d, and floats ``[n]`` to a device at once. Each begins at a multiple of 16 bytes."""
    if device.type == "cpu":
        return seed, values
    sent = to_device(torch.cat([seed.view(1), seed.new_zeros(3), values.view(torch.int32)]), device)
    return sent[0], sent[4:].view(values.dtype)


class Stepper:
    """Take one step of one param group. ``control`` holds the scalars of ``CONTROL``, ``[2]``."""

    def __init__(
        self, group: Mapping[str, Any], control: Tensor, auditor: Auditor, audit_every: int, launches: Launches
    ) -> None:
        self.group, self.control, self.auditor, self.audit_every = group, control, auditor, audit_every
        self._launches = launches
        self._numbers: dict[tuple[str, int, torch.dtype], Numbers] = {}

    def numbers(self, state: ParameterState) -> Numbers:
        """Return the scalars and the seed of a state's next step."""
        kernel, count = state.kernel, state.step + 1
        key = kernel.rule.name, count, codes.value_dtype(state.storage)
        if key not in self._numbers:
            device = self.control.device
            scalars = [1.0, 0.0, *kernel.rule.prepare(self.group, count)]
            seed, values = on_device(
                torch.full((), step_seed(self.group["seed"], count), dtype=torch.int32, device="cpu"),
                torch.tensor(scalars, dtype=codes.value_dtype(state.storage), device="cpu"),
                device,
            )
            values[:2] = self.control
            self._numbers[key] = Numbers(values, seed, self.audit_every > 0 and count % self.audit_every == 0)
        return self._numbers[key]

    def step(self, states: Sequence[ParameterState]) -> None:
        """Step states of this group once each. They have their gradients.

        Small states of one kernel and step number share buckets: those of the last step, if the same states step together.
        """
        if self.group.get("low_bits") == "random":
            fill_states([state for state in states if state.step == 0], self.group["seed"], self.control[1])
        small: dict[tuple[Kernel, int], list[ParameterState]] = {}
        elementwise: list[ParameterState] = []
        matrices: list[ParameterState] = []
        for state in states:
            if state.bucket is not None:
                small.setdefault((state.kernel, state.step), []).append(state)
            else:
                (matrices if state.kernel.is_matrix else elementwise).append(state)
        for state, sums in step_matrices(matrices, self.group, self.numbers):
            self.note(state, sums, state.parameter.numel())
        elementwise = self._launches.take(self, elementwise)
        self._bound_rows(elementwise)
        for members in small.values():
            for bucket in buckets_of(members):
                self._step_bucket(bucket)
        for state in elementwise:
            (tensors, weight), numbers = state.kernel_tensors(), self.numbers(state)
            if numbers.audited:
                self._step_audited(state, tensors, numbers)
            else:
                state.kernel.run(tensors, numbers.values, numbers.seed)
            state.write_back(weight)

    def _step_bucket(self, bucket: Bucket) -> None:
        kernel, numbers = bucket.members[0].kernel, self.numbers(bucket.members[0])
        bucket.gather()
        if numbers.audited:
            rows = kernel.run_bucket(bucket.tensors, numbers.values, numbers.seed, bucket.segments)
            for member, sums in zip(bucket.members, rows, strict=True):
                self.note(member, sums, member.parameter.numel())
        else:
            kernel.run(bucket.tensors, numbers.values, numbers.seed)
        bucket.scatter()

    def _step_audited(self, state: ParameterState, tensors: Sequence[Tensor], numbers: Numbers) -> None:
        turn, length = (state.step + 1) // self.audit_every, len(tensors[0])
        for part, watched in audited_parts(length, turn, tensors[0][0].numel() if length else 1):
            chunk = [tensor[part] for tensor in tensors]
            sums = state.kernel.run(chunk, numbers.values, numbers.seed, audited=watched)
            if sums is not None:
                self.note(state, sums, state.parameter.numel() * (part.stop - part.start) // max(1, length))

    def note(self, state: ParameterState, sums: Tensor, num_elements: int) -> None:
        """Pass a kernel's sums over some elements of a parameter to the auditor, with the host's own sums."""
        decay = state.kernel.decay(self.group, state.step + 1)
        audited = max(decay, least_decay(state.storage)) if decay > 0 else 0.0
        counts = float(num_elements), num_elements * audited * state.storage.weight.spacings
        self.auditor.fresh.append((state.owner, sums, counts))

    # ── scales by row ───────────────────────────────────────────────────────────────────────────────────────────────

    def _bound_rows(self, states: Sequence[ParameterState]) -> None:
        batches: dict[tuple[Kernel, Numbers], list[ParameterState]] = {}
        for state in states:
            if state.storage.scaled:
                batches.setdefault((state.kernel, self.numbers(state)), []).append(state)
        for (kernel, numbers), batch in batches.items():
            bound_rows(kernel, batch, numbers.values)
