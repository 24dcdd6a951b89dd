"""The sample of an audit: elements of each tensor, with moments that no storage cuts.

A sample holds 256 elements of each tensor in its first 1,000 steps, later 4,096 of a 16th of the
tensors in turn. Each step reads the gradients of the sample, and steps moments of its own in
float32. An audited step reads what is stored, too, and runs the definition on all samples at once.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import place_along
from narrowgauge.optim import codes
from narrowgauge.optim.codes import Lane
from narrowgauge.optim.kernel import Inputs, Numbers, advance, finite_or_zero, named
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.walk import word_of
from narrowgauge.spec.storages import Storage

FIRST_STEPS = 1000
"""Steps in which every tensor has a sample. Later ones are sampled in turn, each for as long: second
moments of beta2 = 0.999 last 1,000 steps.
"""
FIRST_ELEMENTS = 256
LATER_ELEMENTS = 4096
TURNS = 16
MOST_ELEMENTS = 1 << 15
"""Elements of all samples of a rule and storage together. A sample of many tensors has less of each:
the definition takes 0.3 µs for an element.
"""


def sample_of(numel: int, most: int) -> range:
    """Return the places in memory of ``most`` elements of a tensor, evenly spaced.

    The spacing is odd, so that the places are not all in one column of a matrix.
    """
    count = min(most, numel)
    stride = max(1, numel // max(1, count))
    if stride % 2 == 0:
        stride -= 1
    first = (numel - (count - 1) * stride) // 2
    return range(first, first + count * stride, stride)


def places_of(state: LocalState, most: int) -> range:
    """Return the places of this rank's part of a sample in its memory.

    However rows lie on ranks, the sample is that of the whole tensor. A rank that has some columns
    has a sample of its own.
    """
    shape = state.parameter.shape
    whole = state.owner.shape
    if shape == whole or shape[1:] != whole[1:] or not state.parameter.numel():
        return sample_of(state.parameter.numel(), most)
    first = int(place_along(state.owner, 0)[0]) * math.prod(whole[1:])
    places = sample_of(math.prod(whole), most)
    inside = [x - first for x in places if first <= x < first + state.parameter.numel()]
    if not inside:
        return range(0)
    return range(inside[0], inside[-1] + 1, places.step)


class Sample:
    """Hold the sample of states that step alike, joined.

    Attributes:
        places, rows: of each state's elements, in memory.
        moments: those of the rule that were never cut, flat. A matrix rule has none.
        count: the steps that the moments have taken.
        version: of the states' tensors. Another one says that a script has written them.
    """

    def __init__(self, states: Sequence[LocalState], most: int) -> None:
        self.most = most
        self.owners = [state.owner for state in states]  # whose ids are keys, and must stay
        self.places = [places_of(state, most) for state in states]
        self.rows: list[Tensor] = []
        for state, x in zip(states, self.places, strict=True):
            elements = torch.arange(x.start, x.stop, x.step, device=state.parameter.device)
            self.rows.append(elements // state.form[1])
        self.moments: list[Tensor] = []
        self.count = states[0].step
        self.version = _version(states)
        rule = states[0].kernel.rule
        if isinstance(rule, Rule) and rule.states:
            lane = self.lane(states, torch.zeros(()))
            self.moments = [codes.read_state(states[0].storage, lane, x) for x in rule.states]

    def read(self, tensors: Iterable[Tensor]) -> Tensor:
        """Return the elements of tensors in the shapes of the parameters."""
        parts = []
        for places, tensor in zip(self.places, tensors, strict=True):
            memory = tensor.contiguous()
            first = memory.storage_offset() + places.start
            parts.append(memory.as_strided((len(places),), (places.step,), first))
        return torch.cat(parts)

    def lane(self, states: Sequence[LocalState], gradient: Tensor) -> Lane:
        """Return what is stored now, with the scales of its rows."""
        kernel = states[0].kernel
        weight = self.read([state.parameter.detach() for state in states])
        weight = weight.to(getattr(torch, kernel.storage.visible))
        words = []
        for plane in kernel.planes:
            words.append(word_of(self.read([x.planes[plane.name] for x in states])))
        scales = self.scales(states)
        return codes.lane_of(kernel.storage, word_of(weight), gradient, words, scales)

    def scales(self, states: Sequence[LocalState]) -> dict[str, tuple[Tensor, Tensor]]:
        """Return the multipliers of each element's row."""
        scales = {}
        for name in states[0].kernel.scaled:
            parts = []
            for state, rows in zip(states, self.rows, strict=True):
                parts.append(state.bounds[name].view(-1).index_select(0, rows))
            scales[name] = codes.multipliers(torch.cat(parts))
        return scales


def _version(states: Sequence[LocalState]) -> int:
    """Return a number that changes when anything but a kernel writes states."""
    version = 0
    for state in states:
        for plane in state.planes.values():
            version += plane._version
    return version


class Followed(NamedTuple):
    """Hold the sample of states in a step, and what an audited step compares: the inputs of the
    definition, and the change by exact moments.
    """

    states: list[LocalState]
    sample: Sample
    spacings: float
    inputs: Inputs | None
    exact: Tensor | None


def _follow(
    states: list[LocalState], numbers: Numbers, sample: Sample, is_audited: bool
) -> Followed:
    """Step the exact moments of a sample, and read what an audited step compares."""
    kernel = numbers.kernel
    rule = kernel.rule
    scalars = named(rule, numbers.values)
    scale = scalars["gradient_scale"]
    gradient = sample.read([state.gradient for state in states]).float()
    weight = scale.new_zeros(())
    inputs = exact = change = None
    if is_audited or getattr(rule, "coupled", False):  # or its moments depend on the weight
        lane = sample.lane(states, gradient)
        weight = codes.read_weight(kernel.storage, lane)
        if is_audited:
            if kernel.is_matrix:
                change = sample.read([state.change for state in states])
            inputs = Inputs(rule, kernel.storage, lane, change, scalars, numbers.seed)
    if isinstance(rule, Rule):
        weight = finite_or_zero(weight.to(scale.dtype))
        slopes = gradient.to(scale.dtype) * scale
        exact, *moments = rule.update(weight, slopes, *sample.moments, scalars)
        if not scale.is_cpu:  # a CPU does not come here in a step that it skips
            for place, old in enumerate(sample.moments):
                moments[place] = torch.where(scalars["skip"] != 0, old, moments[place])
        sample.moments = moments
    decay = abs(dict(zip(rule.scalars, numbers.scalars, strict=True)).get(rule.decay, 0.0))
    if decay:
        decay = max(decay, least_decay(kernel.storage)) * kernel.storage.weight.spacings
    return Followed(states, sample, decay, inputs, exact)


def least_decay(storage: Storage) -> float:
    """Return the smallest decay that is audited, 1/32 to 1/16 of a weight's ulp.

    An ulp of less takes a million elements.
    """
    return 1 / (32 * storage.weight.spacings)


def _decay(inputs: Inputs, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the intended and the stored decay of a step, which is repeated without decay."""
    rule, storage, lane, _, scalars, _ = inputs
    factor = scalars[rule.decay]
    audited = torch.where(factor != 0, factor.clamp(max=-least_decay(storage)), factor)
    leading = isinstance(rule, Rule)
    weight = codes.read(storage, lane).weight if leading else codes.read_weight(storage, lane)
    without = advance(inputs._replace(scalars={**scalars, rule.decay: factor - audited}))
    return finite_or_zero(weight) * audited, stored - codes.changes(storage, lane, without)[1]


def sums_of(followed: Followed) -> Tensor:
    """Return the ``UPDATE_SUMS`` of each state, after the step has set its bounds."""
    inputs = followed.inputs
    assert inputs is not None
    scales = {}
    for name, (into, _) in followed.sample.scales(followed.states).items():
        scales[name] = into, inputs.lane.scales[name][1]
    inputs = inputs._replace(lane=replace(inputs.lane, scales=scales))
    written = advance(inputs)
    changes = codes.changes(inputs.storage, inputs.lane, written)
    intended, stored, visible = [values.double() for values in changes]
    if followed.exact is not None:
        intended = followed.exact.double()
    decay = arrived = torch.zeros_like(intended)
    if followed.spacings:
        decay, arrived = [values.double() for values in _decay(inputs, changes[1])]
    terms = [
        *metrics.update_terms(intended, stored, visible),
        codes.num_at_end(inputs.storage, written, inputs.lane).double(),
        *metrics.decay_terms(decay, arrived),
        torch.ones_like(intended),
        torch.full_like(intended, followed.spacings),
    ]
    sums = []
    for part in torch.stack(terms, 1).split(list(map(len, followed.sample.places))):
        sums.append(part.sum(0))
    return torch.stack(sums)


class Samples:
    """Follow the samples of one optimizer's states.

    Attributes:
        seen: the step of each tensor's last audit.
    """

    def __init__(self) -> None:
        self.seen: dict[Tensor, int] = {}
        self._samples: dict[tuple[int, ...], Sample] = {}
        self._followed: list[Followed] = []

    def before(self, batch: Mapping[LocalState, Numbers], audit_every: int) -> None:
        """Read what the next step reads of the samples, and step their exact moments.

        The states have their gradients, or changes. Call :meth:`after` when they were written.
        """
        self._followed = []
        alike: dict[Numbers, list[LocalState]] = defaultdict(list)
        for state, numbers in batch.items():
            if state.owner.numel():
                alike[numbers].append(state)
        for numbers, states in alike.items():
            count = states[0].step + 1
            most = FIRST_ELEMENTS
            if count > FIRST_STEPS:
                most = LATER_ELEMENTS
                turns = min(TURNS, len(states))
                states = states[count // FIRST_STEPS % turns :: turns]
            most = min(most, max(64, MOST_ELEMENTS // len(states)))
            is_audited = count % audit_every == 0
            if is_audited or not numbers.kernel.is_matrix:
                sample = self._sample(states, most)
                self._followed.append(_follow(states, numbers, sample, is_audited))

    def _sample(self, states: list[LocalState], most: int) -> Sample:
        """Return the sample of states: that of the last step, or one that begins with the moments
        that are stored now.
        """
        key = tuple([id(state.owner) for state in states])
        sample = self._samples.get(key)
        now = most, states[0].step, _version(states)
        if sample is not None and now == (sample.most, sample.count, sample.version):
            return sample
        for old in list(self._samples):  # of some of these states, joined with others
            if not set(old).isdisjoint(key):
                del self._samples[old]
        self._samples[key] = Sample(states, most)
        return self._samples[key]

    def after(self) -> list[tuple[list[Tensor], Tensor]]:
        """Compare what was stored with what was intended. Return tensors and their
        ``UPDATE_SUMS``, float64 ``[tensors, 11]``.
        """
        compared = []
        for followed in self._followed:
            states = followed.states
            followed.sample.version = _version(states)
            followed.sample.count = states[0].step + 1
            if followed.inputs is not None:
                for state in states:
                    self.seen[state.owner] = state.step + 1
                compared.append((followed.sample.owners, sums_of(followed)))
        self._followed = []
        return compared
