"""The sample of an audit: elements of each tensor, with moments that no storage cuts.

Each step reads the gradients of the sample, and steps moments of its own in float32. An audited step
reads what is stored before and after it, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from narrowgauge.numerics.metrics import change_terms
from narrowgauge.optim import codes, step_cpp
from narrowgauge.optim.codes import Lane
from narrowgauge.optim.kernel import Numbers, advance, finite_or_zero, named
from narrowgauge.optim.planes import BLOCK
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.walk import word_of
from narrowgauge.torch_support.proof import CPP
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

States = Sequence[LocalState]


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


def identities_of(states: States) -> list[tuple[int, torch.Size, torch.device]]:
    """Return what places in memory depend on."""
    identities = []
    for state in states:
        tensor = state.parameter
        identities.append((id(state.owner), tensor.shape, tensor.device))
    return identities


def version_of(states: States) -> int:
    """Return how often scripts have written states in place. A step raises no version of them."""
    total = 0
    for state in states:
        for tensor in state.tensors.values():
            total += tensor._version
    return total


class Places:
    """Read some elements of each of several tensors, joined.

    Attributes:
        ranges: the places in the memory of each tensor.
        counts: how many, int64 on the host.
        elements, blocks: all places, and the numbers of their blocks.
    """

    def __init__(self, states: States) -> None:
        most = min(ELEMENTS, max(LEAST_ELEMENTS, MOST_ELEMENTS // len(states)))
        turn = states[0].step // TURN
        self.ranges = [sample_of(state.parameter.numel(), most, turn) for state in states]
        elements = []
        blocks = []
        for state, x in zip(states, self.ranges, strict=True):
            places = torch.arange(x.start, x.stop, x.step, device=state.parameter.device)
            columns = state.form[1]
            elements.append(places)
            blocks.append(places // columns * -(-columns // BLOCK) + places % columns // BLOCK)
        self.elements = torch.cat(elements)
        self.blocks = torch.cat(blocks)
        self.counts = torch.tensor([len(x) for x in self.ranges], device="cpu")
        self._tensors = torch.repeat_interleave(self.counts)
        kernel = states[0].kernel
        self._gather = None
        if kernel.how_it_ran == CPP:
            self._gather = step_cpp.functions(kernel.rule, kernel.storage).gather

    def _gathered(self, tensors: Sequence[Tensor], places: Tensor) -> Tensor | None:
        """Return the values of tensors at places in the memory of each, by a kernel."""
        if self._gather is None:
            return None
        dtype = tensors[0].dtype
        for tensor in tensors:
            if tensor.dtype is not dtype or not tensor.is_contiguous():
                return None
        result = torch.empty(len(places), dtype=dtype, device="cpu")
        addresses = np.array([tensor.data_ptr() for tensor in tensors])
        self._gather(
            addresses.ctypes.data, self._tensors.data_ptr(), len(places), places.data_ptr(),
            result.data_ptr(), dtype.itemsize,
        )  # fmt: skip
        return result

    def read(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return the elements of tensors in the shapes of the parameters."""
        values = self._gathered(tensors, self.elements)
        if values is not None:
            return values
        parts = []
        for tensor, x in zip(tensors, self.ranges, strict=True):
            dense = tensor.contiguous()
            first = dense.storage_offset() + x.start
            parts.append(dense.as_strided((len(x),), (x.step,), first))
        return torch.cat(parts)

    def read_blocks(self, bounds: Sequence[Tensor]) -> Tensor:
        """Return the bound of the block of each element."""
        values = self._gathered(bounds, self.blocks)
        if values is not None:
            return values
        parts = self.blocks.split(self.counts.tolist())
        return torch.cat([bound.take(x) for bound, x in zip(bounds, parts, strict=True)])


class Sample:
    """Follow elements of states that step alike, joined.

    Attributes:
        owners, storage: the parameters, and where they are stored.
        places: of the elements.
        step: the steps that the states have taken.
        lane: what was stored before an audited step, else ``None``.
        change: by the exact moments, or of a matrix rule.
    """

    def __init__(self, states: States) -> None:
        kernel = states[0].kernel
        self.owners = [state.owner for state in states]
        self._known = identities_of(states)
        self._kernel = kernel
        self.storage = kernel.storage
        self.places = Places(states)
        self.lane: Lane | None = None
        self.change: Any = None
        self.step = states[0].step
        self._version = version_of(states)
        self._moments: list[Tensor] = []
        self._waiting: list[tuple[Tensor, Tensor, Numbers]] = []
        if isinstance(kernel.rule, Rule):
            lane = self._stored(states, torch.zeros(()))
            self._moments = [codes.read_state(kernel.storage, lane, x) for x in kernel.rule.states]

    def fits(self, states: States, is_audited: bool) -> bool:
        """Return whether the sample is of these states, and has followed their last step.

        Before an audit, a script may not have written them, as ReLoRA prunes moments.
        """
        first = states[0]
        is_next = first.step == self.step and first.step % TURN > 0
        if not is_next or first.kernel is not self._kernel or identities_of(states) != self._known:
            return False
        return not is_audited or version_of(states) == self._version

    def _stored(self, states: States, gradient: Tensor) -> Lane:
        """Return what is stored now, with the scales of its blocks."""
        kernel = states[0].kernel
        weight = self.places.read([state.parameter for state in states])
        weight = weight.to(getattr(torch, kernel.storage.visible))
        words = []
        for plane in kernel.planes:
            words.append(word_of(self.places.read([state.planes[plane.name] for state in states])))
        scales = {}
        for name in kernel.scaled:
            bounds = self.places.read_blocks([state.bounds[name] for state in states])
            scales[name] = codes.multipliers(bounds)
        return codes.lane_of(kernel.storage, word_of(weight), gradient, words, scales)

    def follow(self, states: States, numbers: Numbers, is_audited: bool) -> None:
        """Read the gradients of a step, and what an audited step compares.

        The states have their gradients, or changes.
        """
        rule = numbers.kernel.rule
        gradient = self.places.read([state.gradient for state in states])
        weight = torch.zeros((), device=gradient.device)
        self.lane = None
        if is_audited or getattr(rule, "coupled", False):  # or its moments depend on the weight
            lane = self._stored(states, gradient.float())
            weight = finite_or_zero(codes.read_weight(numbers.kernel.storage, lane))
            if is_audited:
                self.lane = lane
        if not isinstance(rule, Rule):
            self.change = self.places.read([state.change for state in states])
            return
        self._waiting.append((gradient, weight, numbers))
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

    def sums(self, states: States, numbers: Numbers) -> Tensor:
        """Compare what a step has stored with what was intended. Return the ``UPDATE_SUMS`` of each
        state, float64.
        """
        assert self.lane is not None
        rule, storage = numbers.kernel.rule, numbers.kernel.storage
        after = self._stored(states, self.lane.gradient)
        weight = codes.read_weight(storage, self.lane)
        stored = codes.read_weight(storage, after) - weight
        seen = codes.visible_value(storage.visible, after.visible)
        seen = seen - codes.visible_value(storage.visible, self.lane.visible)
        intended = self.change
        decay = arrived = torch.zeros_like(stored)
        rate = dict(zip(rule.scalars, numbers.scalars, strict=True)).get(rule.decay, 0.0)
        if rate:
            scalars = named(rule, numbers.values)
            decay = finite_or_zero(weight) * scalars[rule.decay]
            if not isinstance(rule, Rule):
                intended = self.change + decay
            still = {**scalars, rule.decay: torch.zeros_like(scalars[rule.decay])}
            written = advance(rule, storage, self.lane, still, numbers.seed, self.change)
            arrived = stored - (codes.weight_after(storage, self.lane, *written) - weight)
        terms = change_terms(intended, stored, seen)
        terms += [decay.double().square(), decay.double() * arrived, torch.ones_like(terms[0])]
        terms.append(torch.full_like(terms[0], abs(rate) * storage.weight.spacings))
        eps = dict(zip(rule.scalars, numbers.scalars, strict=True)).get("eps", 0.0)
        terms.append(codes.at_end(storage, after, eps).double())
        lengths = to_device(self.places.counts, stored.device).repeat(len(terms), 1)
        # Without a check, which would wait for the device.
        sums = torch.segment_reduce(torch.stack(terms), "sum", lengths=lengths, axis=1, unsafe=True)
        return sums.T
