"""The sample of an audit: elements of each tensor, with moments that no storage cuts.

Each step reads the gradients of the sample, and steps moments of its own in float32. An audited step
reads what is stored before and after it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.metrics import change_terms
from narrowgauge.optim import codes
from narrowgauge.optim.codes import Lane
from narrowgauge.optim.definition import step_words
from narrowgauge.optim.kernel import Numbers, finite_or_zero, named
from narrowgauge.optim.planes import BLOCK
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.table import Batch, Part
from narrowgauge.optim.walk import integers_of, word_of
from narrowgauge.torch_support.torch_names import to_device

ELEMENTS = 256
"""Elements of a tensor."""
LEAST_ELEMENTS = 32
"""Of each of many tensors."""
MOST_ELEMENTS = 1 << 13
"""Elements of all samples that step alike, unless their tensors are many."""
TURN = 1000
"""Steps of a sample, before one of other elements: second moments of beta2 = 0.999 last as long."""
MOST_WAITING = 16
"""Steps whose gradients wait for the exact moments. On a CPU ten steps at once take half the time."""


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


def layout_of(batch: Batch, part: Part) -> list[Any]:
    """Return what the places of a sample and its moments depend on."""
    layout: list[Any] = [batch.kernel, batch.memory.tensors[batch.index[0, 0]].device]
    for row, owner in zip(part.rows.tolist(), part.owners, strict=True):
        layout.append((id(owner), batch.forms[row]))
    return layout


def version_of(batch: Batch, part: Part) -> int:
    """Return how often scripts have written states in place. A step raises no version of them."""
    total = 0
    if isinstance(batch.kernel.rule, Rule):
        for place in batch.index[part.rows, 2:].ravel().tolist():
            total += batch.memory.tensors[place]._version
    return total


class Places:
    """Read some elements of each of several tensors, joined.

    Attributes:
        ranges: the places in the memory of each tensor.
        counts: how many, int64 on the host.
        elements, blocks: all places, and the numbers of their blocks.
    """

    def __init__(self, batch: Batch, part: Part) -> None:
        forms = [batch.forms[row] for row in part.rows]
        most = min(ELEMENTS, max(LEAST_ELEMENTS, MOST_ELEMENTS // len(forms)))
        self.ranges = []
        elements = []
        blocks = []
        for rows, columns in forms:
            taken = sample_of(rows * columns, most, part.step // TURN)
            places = torch.arange(taken.start, taken.stop, taken.step, device="cpu")
            self.ranges.append(taken)
            elements.append(places)
            blocks.append(places // columns * -(-columns // BLOCK) + places % columns // BLOCK)
        self.elements = torch.cat(elements)
        self.blocks = torch.cat(blocks)
        self.counts = torch.tensor([len(x) for x in self.ranges], device="cpu")
        self._tensors = torch.repeat_interleave(self.counts)

    def read(self, batch: Batch, part: Part, column: int, is_bound: bool = False) -> Tensor:
        """Return the elements of a stream, or for each element the bound of its block."""
        rows = batch.index[part.rows, column]
        places = self.blocks if is_bound else self.elements
        first = batch.memory.tensors[rows[0]]
        formats = batch.formats[part.rows]
        is_alike = column != 1 or (formats == formats[0]).all()
        if batch.table is not None and batch.table.is_cpp and is_alike:
            addresses = batch.memory.addresses[rows]
            result = torch.empty(len(places), dtype=first.dtype, device="cpu")
            batch.table.kernels.gather(
                addresses.ctypes.data, self._tensors.data_ptr(), len(places), places.data_ptr(),
                result.data_ptr(), first.dtype.itemsize,
            )  # fmt: skip
            return result
        parts = []
        blocks = self.blocks.split(self.counts.tolist())
        for row, taken, numbers in zip(rows, self.ranges, blocks, strict=True):
            tensor = batch.memory.tensors[row].contiguous()
            if is_bound:
                parts.append(tensor.take(to_device(numbers, tensor.device)))
            else:
                start = tensor.storage_offset() + taken.start
                parts.append(tensor.as_strided((len(taken),), (taken.step,), start))
        return torch.cat(parts)


class Sample:
    """Follow elements of states that share numbers, joined.

    Attributes:
        owners, storage: the parameters, and where they are stored.
        step: the steps that the states have taken.
        before: the streams of the elements before an audited step, else ``None``.
        change: by the exact moments, or of a matrix rule.
    """

    def __init__(self, batch: Batch, part: Part) -> None:
        kernel = batch.kernel
        self.kernel = kernel
        self.owners = part.owners
        self.storage = kernel.storage
        self.step = part.step
        self.places = Places(batch, part)
        self.before: list[Tensor] | None = None
        self.change: Any = None
        self._part = part
        self._layout = layout_of(batch, part)
        self._version = version_of(batch, part)
        self._moments: list[Tensor] = []
        self._waiting: list[tuple[Tensor, Tensor, Numbers]] = []
        if isinstance(kernel.rule, Rule):
            lane = self._lane(self._stored(batch, part))
            self._moments = [codes.read_state(kernel.storage, lane, x) for x in kernel.rule.states]

    def fits(self, batch: Batch, part: Part, is_audited: bool) -> bool:
        """Return whether the sample is of these states, and has followed their last step.

        Before an audit, a script may not have written them, as ReLoRA prunes moments.
        """
        if part.step != self.step or part.step % TURN == 0:
            return False
        if part is not self._part:
            if layout_of(batch, part) != self._layout:
                return False
            self._part = part  # it stays while checks are kept
        return not is_audited or version_of(batch, part) == self._version

    def _stored(self, batch: Batch, part: Part) -> list[Tensor]:
        """Return the streams of the elements now. A block of one element has the bound of its block."""
        first_bound = batch.index.shape[1] - len(self.kernel.scaled)
        streams = []
        for column in range(batch.index.shape[1]):
            streams.append(self.places.read(batch, part, column, column >= first_bound))
        streams[0] = streams[0].to(getattr(torch, self.storage.visible))
        return streams

    def _lane(self, streams: Sequence[Tensor]) -> Lane:
        """Return the lane of streams."""
        weight, gradient, *rest = streams
        words = list(map(word_of, rest[: len(self.kernel.planes)]))
        scales = {}
        bounds = rest[len(rest) - len(self.kernel.scaled) :]
        for name, bound in zip(self.kernel.scaled, bounds, strict=True):
            scales[name] = codes.multipliers(bound)
        return codes.lane_of(self.storage, word_of(weight), gradient.float(), words, scales)

    def follow(self, batch: Batch, part: Part, is_audited: bool) -> None:
        """Read the gradients of a step, and what an audited step compares."""
        rule = self.kernel.rule
        self.before = None
        gradient = self.places.read(batch, part, 1)
        weight = torch.zeros((), device=gradient.device)
        if is_audited or getattr(rule, "coupled", False):  # or its moments depend on the weight
            streams = self._stored(batch, part)
            weight = finite_or_zero(codes.read_weight(self.storage, self._lane(streams)))
            if is_audited:
                self.before = streams
        if not isinstance(rule, Rule):
            self.change = self.places.read(batch, part, 2 + len(self.kernel.planes))
            return
        self._waiting.append((gradient, weight, part.numbers))
        if is_audited or len(self._waiting) == MOST_WAITING:
            self._step_moments(rule)

    def _step_moments(self, rule: Rule) -> None:
        """Step the exact moments by the gradients that wait."""
        for gradient, weight, numbers in self._waiting:
            scalars = named(rule, numbers.values)
            scale = scalars["gradient_scale"]
            slopes = gradient.float().to(scale.dtype) * scale
            weight = weight.to(scale.dtype)
            self.change, *moments = rule.update(weight, slopes, *self._moments, scalars)
            if not scale.is_cpu:  # where no step is skipped
                for place, old in enumerate(self._moments):
                    moments[place] = torch.where(scalars["skip"] != 0, old, moments[place])
            self._moments = moments
        self._waiting = []

    def _stepped_without_decay(self, numbers: Numbers) -> list[Tensor]:
        """Return copies of what was stored before the step, after the same step without decay."""
        assert self.before is not None
        kernel = self.kernel
        rule = kernel.rule
        scalars = list(numbers.scalars)
        scalars[rule.scalars.index(rule.decay)] = 0.0
        numbers = Numbers(kernel, numbers.control, scalars, numbers.key)
        streams = [x.clone() for x in self.before]
        scales = [x for pair in self._lane(streams).scales.values() for x in pair]
        weight, gradient, *rest = streams
        words = [integers_of(plane) for plane in rest[: len(kernel.planes)]]
        changes = rest[len(kernel.planes) : len(rest) - len(kernel.scaled)]
        step = step_words(rule, self.storage)
        step(integers_of(weight), gradient, *words, *scales, *changes, numbers.values, numbers.seed)
        return streams

    def sums(self, batch: Batch, part: Part) -> Tensor:
        """Compare what a step has stored with what was intended. Return the ``UPDATE_SUMS`` of each
        state, float64.
        """
        assert self.before is not None
        rule = self.kernel.rule
        numbers = part.numbers
        rate = dict(zip(rule.scalars, numbers.scalars, strict=True)).get(rule.decay, 0.0)
        stages = [self.before, self._stored(batch, part)]
        if rate:
            stages.append(self._stepped_without_decay(numbers))
        joined = [torch.cat(streams) for streams in zip(*stages, strict=True)]
        lane = self._lane(joined)
        before, *weights = codes.read_weight(self.storage, lane).chunk(len(stages))
        visible_before, visible_after, *_ = codes.visible_value(
            self.storage.visible, lane.visible
        ).chunk(len(stages))
        stored = weights[0] - before
        intended = self.change
        decay = arrived = torch.zeros_like(stored)
        if rate:
            decay = finite_or_zero(before) * named(rule, numbers.values)[rule.decay]
            arrived = stored - (weights[1] - before)
            if not isinstance(rule, Rule):
                intended = self.change + decay
        terms = change_terms(intended, stored, visible_after - visible_before)
        terms += [decay.double().square(), decay.double() * arrived, torch.ones_like(terms[0])]
        terms.append(torch.full_like(terms[0], abs(rate) * self.storage.weight.spacings))
        after = self._lane(stages[1])
        eps = dict(zip(rule.scalars, numbers.scalars, strict=True)).get("eps", 0.0)
        terms.append(codes.at_end(self.storage, after, eps).double())
        lengths = to_device(self.places.counts, stored.device).repeat(len(terms), 1)
        # Without a check, which would wait for the device.
        sums = torch.segment_reduce(torch.stack(terms), "sum", lengths=lengths, axis=1, unsafe=True)
        return sums.T
