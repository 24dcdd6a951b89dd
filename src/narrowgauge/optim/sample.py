"""The sample of an audit: elements of each tensor, with moments that no storage cuts.

Each step reads the gradients of the sample, and steps moments of its own in float32. An audited step
reads what is stored before and after it, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.metrics import change_terms
from narrowgauge.optim import codes
from narrowgauge.optim.codes import Lane
from narrowgauge.optim.kernel import Inputs, Numbers, advance, finite_or_zero, named
from narrowgauge.optim.planes import BLOCK
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.walk import word_of

ELEMENTS = 256
"""Elements of a tensor."""
MOST_ELEMENTS = 1 << 14
"""Elements of all samples that step alike. A sample of many tensors has less of each, but 64: the
definition takes 0.3 µs for an element.
"""
TURN = 1000
"""Steps of a sample, before one of other elements: second moments of beta2 = 0.999 last as long."""

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


class Sample:
    """Follow elements of states that step alike, joined.

    Attributes:
        owners, storage: the parameters, and where they are stored.
        places: of each state's elements in memory.
        step: the steps that the states have taken.
        versions: of the states then.
        moments: those of the rule that were never cut, flat. A matrix rule has none.
        lane: what was stored before an audited step, else ``None``.
        change: by the exact moments, or of a matrix rule.
    """

    def __init__(self, states: States) -> None:
        kernel = states[0].kernel
        self.owners = [state.owner for state in states]
        self.storage = kernel.storage
        most = min(ELEMENTS, max(64, MOST_ELEMENTS // len(states)))
        turn = states[0].step // TURN
        self.places = [sample_of(state.parameter.numel(), most, turn) for state in states]
        self.lane: Lane | None = None
        self.change: Any = None
        self.moments: list[Tensor] = []
        self.step = states[0].step
        self.versions = versions_of(states)
        self._blocks: list[Tensor] = []
        if kernel.scaled:
            for state, places in zip(states, self.places, strict=True):
                place = torch.arange(
                    places.start, places.stop, places.step, device=state.parameter.device
                )
                row, column = place // state.form[1], place % state.form[1]
                self._blocks.append(row * -(-state.form[1] // BLOCK) + column // BLOCK)
        if isinstance(kernel.rule, Rule):
            lane = self._stored(states, torch.zeros(()))
            self.moments = [codes.read_state(kernel.storage, lane, x) for x in kernel.rule.states]

    def fits(self, states: States) -> bool:
        """Return whether the moments are those of these states now."""
        step = states[0].step
        if step != self.step or step % TURN == 0:
            return False
        return self.versions == versions_of(states)

    def _read(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the elements of tensors in the shapes of the parameters."""
        parts = []
        for tensor, x in zip(tensors, self.places, strict=True):
            dense = tensor.contiguous()
            first = dense.storage_offset() + x.start
            parts.append(dense.as_strided((len(x),), (x.step,), first))
        return torch.cat(parts)

    def _stored(self, states: States, gradient: Tensor) -> Lane:
        """Return what is stored now, with the scales of its blocks."""
        kernel = states[0].kernel
        weight = self._read([state.parameter for state in states])
        weight = weight.to(getattr(torch, kernel.storage.visible))
        words = []
        for plane in kernel.planes:
            words.append(word_of(self._read([state.planes[plane.name] for state in states])))
        scales = {}
        for name in kernel.scaled:
            bounds = [
                state.bounds[name].take(x) for state, x in zip(states, self._blocks, strict=True)
            ]
            scales[name] = codes.multipliers(torch.cat(bounds))
        return codes.lane_of(kernel.storage, word_of(weight), gradient, words, scales)

    def follow(self, states: States, numbers: Numbers, is_audited: bool) -> None:
        """Step the exact moments, and read what an audited step compares.

        The states have their gradients, or changes.
        """
        rule = numbers.kernel.rule
        scalars = named(rule, numbers.values)
        scale = scalars["gradient_scale"]
        gradient = self._read([state.gradient for state in states]).float()
        weight = scale.new_zeros(())
        self.lane = None
        if is_audited or getattr(rule, "coupled", False):  # or its moments depend on the weight
            lane = self._stored(states, gradient)
            weight = finite_or_zero(codes.read_weight(numbers.kernel.storage, lane))
            if is_audited:
                self.lane = lane
        if not isinstance(rule, Rule):
            self.change = self._read([state.change for state in states])
            return
        slopes = gradient.to(scale.dtype) * scale
        self.change, *moments = rule.update(weight.to(scale.dtype), slopes, *self.moments, scalars)
        for place, old in enumerate(self.moments):
            moments[place] = torch.where(scalars["skip"] != 0, old, moments[place])
        self.moments = moments

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
            inputs = Inputs(rule, storage, self.lane, self.change, still, numbers.seed)
            arrived = stored - (codes.weight_after(storage, self.lane, advance(inputs)) - weight)
        terms = change_terms(intended, stored, seen)
        terms += [decay.double().square(), decay.double() * arrived, torch.ones_like(terms[0])]
        terms.append(torch.full_like(terms[0], abs(rate) * storage.weight.spacings))
        counts = [len(places) for places in self.places]
        sums = [part.sum(1) for part in torch.stack(terms).split(counts, 1)]
        return torch.stack(sums)


def versions_of(states: States) -> list[int]:
    """Return what changes when anything but a kernel writes the states, or others take their place."""
    versions = [id(state.owner) for state in states]
    for state in states:
        versions += [plane._version for plane in state.planes.values()]
    return versions
