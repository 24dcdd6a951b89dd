"""The sample of an audit: elements of each tensor, with moments that no storage cuts.

Where states are stored in fewer bits, each step reads the gradients of the sample, and steps moments
of its own in float32. An audited step reads what is stored before and after it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.metrics import change_terms
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.step import codes
from narrowgauge.optim.step.bit_layout import BLOCK
from narrowgauge.optim.step.codes import Lane
from narrowgauge.optim.step.launch import Batch, KernelLaunch
from narrowgauge.optim.step.state_chunks import word_of
from narrowgauge.optim.step.step_definition import finite_or_zero, named
from narrowgauge.torch_support.torch_names import to_device

ELEMENTS = 256
"""Elements of a tensor."""
LEAST_ELEMENTS = 32
"""Of each of many tensors."""
MOST_ELEMENTS = 1 << 13
"""Elements of all samples that step alike, unless their tensors are many."""
TURN = 1000
"""Steps of a sample, before one of other elements: second moments of beta2 = 0.999 last as long."""


def sample_of(numel: int, most: int, turn: int = 0) -> range:
    """Return the places in memory of ``most`` elements of a tensor, evenly spaced, others in each
    turn.

    The stride is odd, so that the places are not all in one column of a matrix.
    """
    count = min(most, numel)
    stride = (numel // count - 1) | 1
    num_starts = numel - (count - 1) * stride
    first = (num_starts // 2 + turn * ELEMENTS) % num_starts
    return range(first, first + count * stride, stride)


class AuditSample:
    """Follow elements of the states of a batch, joined.

    Attributes:
        owners, storage: the parameters, and where they are stored.
        key: of their batch, and its turn.
        step, versions: the steps that the states have taken, and the versions of their tensors. If
            these are others than the last step left, the moments begin anew with what is stored.
        before: the elements before an audited step, else ``None``.
        change: by the exact moments, or of a matrix rule.
    """

    def __init__(self, batch: Batch) -> None:
        self.kernel = batch.kernel
        self.storage = batch.kernel.storage
        self.owners = batch.owners
        self.key = batch.key, batch.num_steps // TURN
        self.step = -1
        self.versions: list[int] = []
        self.before: Lane | None = None
        most = min(ELEMENTS, max(LEAST_ELEMENTS, MOST_ELEMENTS // len(batch.forms)))
        elements = []
        blocks = []
        for rows, columns in batch.forms:
            taken = sample_of(rows * columns, most, self.key[1])
            places = torch.arange(taken.start, taken.stop, taken.step, device="cpu")
            elements.append(places)
            blocks.append(places // columns * -(-columns // BLOCK) + places % columns // BLOCK)
        self._elements = torch.cat(elements)
        self._blocks = torch.cat(blocks)
        self.counts = torch.tensor(list(map(len, elements)), device="cpu")
        self._tensors = torch.repeat_interleave(self.counts).int()
        shape = len(self.storage.states) + 1, len(self._elements)
        values = torch.empty(shape, dtype=codes.value_dtype(self.storage), device=batch.device)
        self._moments = values[:-1]
        self.change: Any = values[-1]

    def _table(self, batch: Batch) -> KernelLaunch | None:
        """Return the table of a batch, if C++ reads its memory as it is."""
        if batch.table is None or not batch.table.is_cpp or not batch.is_dense:
            return None
        return batch.table

    def _read(self, batch: Batch, column: int) -> Tensor:
        """Return the elements of a stream, or for each element the bound of its block."""
        places = self._elements
        if column >= batch.index.shape[1] - len(self.kernel.scaled):
            places = self._blocks
        numbers = batch.index[:, column].tolist()
        table = self._table(batch)
        dtypes = {batch.tensors[number].dtype for number in numbers}
        if table is not None and len(dtypes) == 1:
            addresses = table.rows["addresses"][:, column].copy()
            (dtype,) = dtypes
            result = torch.empty(len(places), dtype=dtype, device="cpu")
            table.kernels.gather(
                addresses.ctypes.data, self._tensors.data_ptr(), len(places), places.data_ptr(),
                result.data_ptr(), dtype.itemsize,
            )  # fmt: skip
            return result
        parts = []
        for number, taken in zip(numbers, places.split(self.counts.tolist()), strict=True):
            tensor = batch.tensors[number]
            parts.append(tensor.take(to_device(taken, tensor.device)))
        return torch.cat(parts)

    def _lane(self, batch: Batch) -> Lane:
        """Return the inputs of a step of the elements."""
        num_streams = batch.index.shape[1]
        weight, gradient, *rest = [self._read(batch, column) for column in range(num_streams)]
        words = [word_of(x) for x in rest[: len(self.kernel.planes)]]
        scales = {}
        for name, bound in zip(self.kernel.scaled, rest[len(words) :], strict=False):
            scales[name] = codes.multipliers(bound)
        visible = codes.weight_bits(self.storage.visible, word_of(weight))
        return Lane(visible, gradient.float(), words, scales)

    def follow(self, batch: Batch, is_audited: bool) -> None:
        """Step the exact moments. Before an audited step, copy what is stored."""
        rule = self.kernel.rule
        last = self.step, self.versions
        self.step, self.versions = batch.num_steps, batch.versions()
        self.before = None
        if is_audited:
            self.before = self._lane(batch)
        if last != (self.step, self.versions) and isinstance(rule, Rule):
            lane = self.before or self._lane(batch)
            for moment, name in zip(self._moments, rule.states, strict=True):
                moment.copy_(codes.read_state(self.storage, lane, name))
        table = self._table(batch)
        if table is not None and isinstance(rule, Rule):
            numbers = batch.numbers
            tensors = self._elements, numbers.on_host, numbers.control, self._moments, self.change
            pointers = [tensor.data_ptr() for tensor in (self._tensors, *tensors)]
            count = len(self._elements)
            table.kernels.follow(table.rows.ctypes.data, pointers[0], count, *pointers[1:], 0)
            return
        if is_audited or getattr(rule, "coupled", False):  # or its moments depend on the weight
            lane = self.before or self._lane(batch)
            gradient = lane.gradient
            weight = finite_or_zero(codes.read_weight(self.storage, lane))
        else:
            gradient = self._read(batch, 1).float()
            weight = torch.zeros((), device=gradient.device)
        scalars = named(rule, batch.numbers.values)
        if not isinstance(rule, Rule):
            change = self._read(batch, batch.index.shape[1] - 1)
            self.change = change + weight * scalars[rule.decay]
            return
        scale = scalars["gradient_scale"]
        slopes = gradient.to(scale.dtype) * scale
        self.change, *moments = rule.update(weight.to(scale.dtype), slopes, *self._moments, scalars)
        for old, new in zip(self._moments, moments, strict=True):
            old.copy_(torch.where(scalars["skip"] != 0, old, new))

    def sums(self, batch: Batch) -> Tensor:
        """Compare what a step has stored with what was intended. Return the ``UPDATE_SUMS`` of each
        state and the number of the step, float64.
        """
        before = self.before
        assert before is not None
        rule = self.kernel.rule
        options = dict(zip(rule.scalars, batch.numbers.scalars, strict=True))
        after = self._lane(batch)
        weight = codes.read_weight(self.storage, before)
        stored = codes.read_weight(self.storage, after) - weight
        seen = codes.visible_value(self.storage.visible, after.visible)
        seen = seen - codes.visible_value(self.storage.visible, before.visible)
        terms = change_terms(self.change, stored, seen)
        terms.append(codes.at_end(self.storage, after, options.get("eps", 0.0)).double())
        lengths = to_device(self.counts, stored.device)
        # Without a check, which would wait for the device.
        sums = torch.segment_reduce(torch.stack(terms, 1), "sum", lengths=lengths, unsafe=True)
        return torch.nn.functional.pad(sums, (0, 1), value=self.step)
