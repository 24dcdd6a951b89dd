"""The sample of an audit: elements of each tensor, with moments that no storage cuts.

Where states are stored in fewer bits, each step reads the gradients of the sample, and steps moments
of its own in float32. An audited step reads what is stored before and after it.
"""

from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.metrics import change_terms
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.optim.step import codes
from narrowgauge.optim.step.bit_layout import BLOCK
from narrowgauge.optim.step.codes import Lane
from narrowgauge.optim.step.launch import Batch
from narrowgauge.optim.step.state_chunks import lane_of
from narrowgauge.optim.step.step_definition import applied, finite_or_zero, named
from narrowgauge.torch_support.torch_names import host_tensor, to_device

ELEMENTS = 256
"""Elements of a tensor."""
LEAST_ELEMENTS = 32
"""Of each of many tensors."""
MOST_ELEMENTS = 1 << 13
"""Elements of all samples that step alike, unless their tensors are many."""
TURN = 1000
"""Steps of a sample, before one of other elements: second moments of beta2 = 0.999 last as long."""


def sample_of(numel: int, most: int, turn: int) -> range:
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
        step, marks: the steps that the states have taken, and the versions and addresses of their
            tensors. Where the last step left others, and other moments, the exact ones begin anew
            with what is stored.
        before: the elements before an audited step, else ``None``.
        change: by the exact moments, or of a matrix rule.
    """

    def __init__(self, batch: Batch) -> None:
        self.kernel = batch.kernel
        self.storage = batch.kernel.storage
        self.owners = batch.owners
        self.key = batch.key, batch.num_steps // TURN
        self.step = -1
        self.marks: Any = None
        self.before: Lane | None = None
        most = min(ELEMENTS, max(LEAST_ELEMENTS, MOST_ELEMENTS // len(batch.forms)))
        elements = []
        blocks = []
        for rows, columns in batch.forms:
            taken = sample_of(rows * columns, most, self.key[1])
            places = host_tensor(taken, torch.int64)
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
        self._is_moved = False
        self._stored = values[:0]  # the moments that a step of moved states has stored

    def _table(self, batch: Batch) -> Any:
        """Return the table of a batch, if C++ reads its memory as it is."""
        table = batch.table
        return table if table is not None and table.is_cpp and batch.is_dense else None

    def _read(self, batch: Batch, column: int) -> Tensor:
        """Return the elements of a stream, or for each element the bound of its block."""
        places = self._elements
        if column >= batch.index.shape[1] - len(self.kernel.scaled):
            places = self._blocks
        tensors = [batch.tensors[number] for number in batch.index[:, column].tolist()]
        table = self._table(batch)
        dtype = tensors[0].dtype
        if table is not None and all(tensor.dtype is dtype for tensor in tensors):
            addresses = table.rows["addresses"][:, column].copy()
            result = torch.empty(len(places), dtype=dtype, device="cpu")
            table.kernels.gather(
                addresses.ctypes.data, self._tensors.data_ptr(), len(places), places.data_ptr(),
                result.data_ptr(), dtype.itemsize,
            )  # fmt: skip
            return result
        parts = []
        for tensor, taken in zip(tensors, places.split(self.counts.tolist()), strict=True):
            parts.append(tensor.take(to_device(taken, tensor.device)))
        return torch.cat(parts)

    def _lane(self, batch: Batch) -> Lane:
        """Return the inputs of a step of the elements."""
        num_streams = batch.index.shape[1]
        weight, gradient, *rest = [self._read(batch, column) for column in range(num_streams)]
        num_planes = len(self.kernel.planes)
        scales = {}
        for name, bound in zip(self.kernel.scaled, rest[num_planes:], strict=False):
            scales[name] = codes.multipliers(bound)
        return lane_of(self.storage, weight, gradient, rest[:num_planes], scales)

    def _marks(self, batch: Batch) -> Any:
        """Return what is another when other code has written a state, or has put a tensor in its place."""
        if batch.table is not None:
            addresses = batch.table.rows["addresses"][:, 2:].tobytes()
        else:
            places = batch.index[:, 2:].ravel().tolist()
            addresses = [batch.tensors[place].data_ptr() for place in places]
        return batch.versions(), addresses

    def _moments_in(self, lane: Lane) -> Tensor:
        """Return the stored moments of the elements."""
        moments = torch.empty_like(self._moments)
        for moment, name in zip(moments, dict(self.storage.states), strict=True):
            moment.copy_(codes.read_state(self.storage, lane, name))
        return moments

    def follow(self, batch: Batch, is_audited: bool) -> None:
        """Step the exact moments. Before an audited step, copy what is stored."""
        rule = self.kernel.rule
        is_next = batch.num_steps == self.step
        self.step = batch.num_steps
        self._is_moved = self._marks(batch) != self.marks
        if self._is_moved:
            # A tensor that takes the memory of another has no such version.
            states = [batch.tensors[place] for place in batch.index[:, 2:].ravel().tolist()]
            torch.autograd.graph.increment_version([x for x in states if not x.is_inference()])
            self.marks = self._marks(batch)
        lane: Any = None
        if is_audited or self._is_moved or not is_next:
            lane = self._lane(batch)
        if self._is_moved or not is_next:
            moments = self._moments_in(lane)
            # An offloader may have moved the tensors, and changed nothing.
            if not (is_next and moments.equal(self._stored)):
                self._moments.copy_(moments)
        self.before = lane if is_audited else None
        numbers = batch.numbers
        table = self._table(batch)
        if table is not None and isinstance(rule, Rule):
            tensors = self._elements, numbers.on_host, numbers.control, self._moments, self.change
            table.kernels.follow(
                table.rows.ctypes.data, self._tensors.data_ptr(), len(self._elements),
                *map(Tensor.data_ptr, tensors), 0,
            )  # fmt: skip
            return
        scalars = named(rule, numbers.values)
        if isinstance(rule, MatrixRule):  # in audited steps
            weight = finite_or_zero(codes.read_weight(self.storage, lane))
            change = self._read(batch, batch.index.shape[1] - 1)
            self.change = change + weight * scalars[rule.decay]
            return
        if lane is None and not rule.decay:  # a penalty may be in its moments
            lane = self._lane(batch)
        weight = scalars["skip"]  # which no moment reads
        if lane is None:
            gradient = self._read(batch, 1).float()
        else:
            gradient = lane.gradient
            weight = codes.read_weight(self.storage, lane)
        self.change, *results = applied(rule, weight, gradient, self._moments, scalars)
        for old, new in zip(self._moments, results, strict=True):
            old.copy_(torch.where(scalars["skip"] != 0, old, new))

    def compare(self, batch: Batch) -> Tensor | None:
        """Read what a step has stored. Of an audited one, return the ``UPDATE_SUMS`` of each state and
        the number of the step, float64.
        """
        self.step += 1
        before = self.before
        if before is None and not self._is_moved:
            return None
        after = self._lane(batch)
        self._stored = self._moments_in(after)
        if before is None:
            return None
        rule = self.kernel.rule
        options = dict(zip(rule.scalars, batch.numbers.scalars, strict=True))
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
