"""The audit: measure during a run which fraction of the intended updates a storage stores.

An audit reads a sample. In a tensor's first 1,000 steps it holds 256 elements, later 4,096 of a
16th of the tensors in turn. Each step reads the gradients of the sample, and steps moments of its
own in float32 that no storage ever cuts. An audited step, one of ten, compares: D is the rule's
change with these moments, E the change that the definition stores. So an audit sees what a storage
rounds off the weight, and what it lost of the moments before.

One step is noisy, and stalls come late. So an alarm reads a window of the last audits. It is raised
when the upper end of a confidence interval of the tensor's EDQ is below the threshold.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import accumulate, chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import add_up, by_group, local_of
from narrowgauge.optim import codes
from narrowgauge.optim.codes import Lane
from narrowgauge.optim.kernel import Inputs, Kernel, Numbers, advance, finite_or_zero, named
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.state import LocalState
from narrowgauge.optim.walk import word_of
from narrowgauge.spec.significance import MIN_EDQ, student_t
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.tables import Column, Table
from narrowgauge.torch_support.torch_names import HostCopy

FIRST_STEPS = 1000
"""Steps in which every tensor has a sample. Later ones are sampled in turn, each for as long: second
moments of beta2 = 0.999 last 1,000 steps.
"""
FIRST_ELEMENTS = 256
LATER_ELEMENTS = 4096
TURNS = 16
MOST_COMPARED = 1 << 15
"""Of more elements, each audit compares a half in turn: the definition takes 0.3 µs for each."""
WINDOW = 20
"""Audited steps in a window."""
FEWEST = 5
"""Audited steps before an alarm may be raised."""
FEWEST_EVENTS = 3
"""Audits of equal weight that a window is worth: one in which all else was still is no interval."""
FEWEST_MOVED = 32
"""Elements that moved in a window of a stochastic storage, before a loss is told from chance."""
CONFIDENCE = 1 - 2e-4
"""Two-sided: one false alarm in 10,000 windows whose true EDQ is exactly ``MIN_EDQ``."""
NUM_SUMS = len(metrics.UPDATE_SUMS)
NONZERO = metrics.UPDATE_SUMS.index("nonzero")
LOST = metrics.UPDATE_SUMS.index("lost")
MOST_AT_END = 0.01
"""Raise an alarm where more than this fraction of elements is at the end of a code's range."""


# ── the sample ────────────────────────────────────────────────────────────────────────────────────

Batch = Mapping[LocalState, Numbers]
"""States with the numbers of their step."""


def sample_of(numel: int, most: int) -> range:
    """Return the places in memory of ``most`` elements of a tensor, evenly spaced.

    The spacing is odd, so that the places are not all in one column of a matrix.
    """
    count = min(most, numel)
    if not count:
        return range(0)
    stride = numel // count
    if stride % 2 == 0:
        stride -= 1
    span = (count - 1) * stride + 1
    first = (numel - span) // 2
    return range(first, first + span, stride)


class Sample:
    """Hold the samples of states that step alike, joined, with moments that were never cut.

    Attributes:
        most: elements of one.
        places: the places of each one's elements in the memory of this rank.
        moments: those of the rule, flat: one part after the other.
        count: the steps of the states and of the moments.
        versions: of each state. Another one says that a script has written it.
    """

    def __init__(self, states: Sequence[LocalState], most: int) -> None:
        self.most = most
        self.owners = [state.owner for state in states]  # whose ids are not reused
        self.places = [sample_of(state.parameter.numel(), most) for state in states]
        self.ends = list(accumulate(map(len, self.places), initial=0))
        dtype = codes.value_dtype(states[0].storage)
        self.moments: list[Tensor] = []
        for _ in states[0].kernel.rule.stored_states:
            zeros = states[0].parameter.new_zeros(self.ends[-1], dtype=dtype)
            self.moments.append(zeros)
        self.count = states[0].step
        self.versions = [_version(state) for state in states]

    def elements(self, part: slice) -> slice:
        """Return the elements of a part of the states in the moments."""
        first, last, _ = part.indices(len(self.places))
        return slice(self.ends[first], self.ends[last])


class Comparison(NamedTuple):
    """Hold what an audited step read before it wrote: some states of the same numbers.

    ``exact`` is the change by exact moments; a matrix rule has its own ``change`` instead.
    """

    states: Sequence[LocalState]
    places: Sequence[range]
    numbers: Numbers
    lane: Lane
    exact: Tensor | None
    change: Tensor | None


def _version(state: LocalState) -> int:
    """Return a number that changes when anything but a kernel writes a state."""
    return sum([plane._version for plane in state.planes.values()])


def _read(
    states: Sequence[LocalState], places: Sequence[range], tensors: Iterable[Tensor]
) -> Tensor:
    """Return the samples of tensors in the parameters' shapes, joined."""
    parts = []
    for state, part, tensor in zip(states, places, tensors, strict=True):
        memory = tensor if state.is_dense(tensor) else state.in_rows(tensor)
        first = memory.storage_offset() + part.start
        parts.append(memory.as_strided((len(part),), (part.step,), first))
    return torch.cat(parts)


@lru_cache(maxsize=64)
def _rows(places: range, columns: int, device: torch.device) -> Tensor:
    """Return the rows of elements in memory."""
    elements = torch.arange(places.start, places.stop, places.step, device=device)
    return elements // columns


def _scales(states: Sequence[LocalState], places: Sequence[range], way: int) -> dict[str, Tensor]:
    """Return the multipliers of rows, into their windows (0) or back (1), for each element."""
    scales = {}
    for name in states[0].kernel.scaled:
        parts = []
        for state, part in zip(states, places, strict=True):
            rows = _rows(part, state.form[1], state.parameter.device)
            parts.append(state.bounds[name].view(-1).index_select(0, rows))
        scales[name] = codes.multipliers(torch.cat(parts))[way]
    return scales


def _lane(
    states: Sequence[LocalState], places: Sequence[range], gradient: Tensor | None = None
) -> Lane:
    """Return the stored values of samples, with their scales before a step."""
    kernel = states[0].kernel
    visible = getattr(torch, kernel.storage.visible)
    weight = _read(states, places, [state.parameter.detach() for state in states]).to(visible)
    words = []
    for plane in kernel.planes:
        tensors = [state.planes[plane.name] for state in states]
        words.append(word_of(_read(states, places, tensors)))
    if gradient is None:
        gradient = torch.zeros_like(weight, dtype=torch.float32)
    scales = {name: (back, back) for name, back in _scales(states, places, 1).items()}
    return codes.lane_of(kernel.storage, word_of(weight), gradient, words, scales)


def least_decay(storage: Storage) -> float:
    """Return the smallest decay that is audited, 1/32 to 1/16 of a weight's ulp.

    An ulp of less takes a million elements.
    """
    return 1 / (32 * storage.weight.spacings)


def _spacings(numbers: Numbers) -> float:
    """Return the decay that an audit looks for, in ulps of an element; 0 without decay."""
    rule = numbers.kernel.rule
    storage = numbers.kernel.storage
    decay = -float(dict(zip(rule.scalars, numbers.scalars, strict=True)).get(rule.decay, 0.0))
    return max(decay, least_decay(storage)) * storage.weight.spacings if decay > 0 else 0.0


def _weight_decay(inputs: Inputs, stored: Tensor) -> tuple[Tensor, Tensor]:
    """Return the intended and the stored decay of a step, which is repeated without decay."""
    rule, storage, lane, _, scalars, _ = inputs
    factor = scalars[rule.decay]
    audited = torch.where(factor != 0, factor.clamp(max=-least_decay(storage)), factor)
    leading = isinstance(rule, Rule)
    weight = codes.read(storage, lane, ()).weight if leading else codes.read_weight(storage, lane)
    without = advance(inputs._replace(scalars={**scalars, rule.decay: factor - audited}))
    return finite_or_zero(weight) * audited, stored - without.changes[1]


def _sums(comparison: Comparison) -> Tensor:
    """Return the ``UPDATE_SUMS`` of each compared state, after the step has set its bounds."""
    states, places, numbers, lane, exact, change = comparison
    kernel = numbers.kernel
    scales = {}
    for name, into in _scales(states, places, 0).items():
        scales[name] = into, lane.scales[name][1]
    lane = replace(lane, scales=scales)
    scalars = named(kernel.rule, numbers.values)
    inputs = Inputs(kernel.rule, kernel.storage, lane, change, scalars, numbers.seed)
    written = advance(inputs)
    intended, stored, visible = [values.double() for values in written.changes]
    if exact is not None:
        intended = exact.double()
    terms = [*metrics.update_terms(intended, stored, visible)]
    terms.append(codes.num_at_end(kernel.storage, written, lane).double())
    spacings = _spacings(numbers)
    decay = arrived = torch.zeros_like(intended)
    if spacings:
        decay, arrived = _weight_decay(inputs, written.changes[1])
    terms += metrics.decay_terms(decay.double(), arrived.double())
    terms += [torch.ones_like(intended), torch.full_like(intended, spacings)]
    parts = torch.stack(terms, 1).split([len(part) for part in places])
    return torch.stack([part.sum(0) for part in parts])


# ── what is reported ──────────────────────────────────────────────────────────────────────────────


class UpdateLossWarning(UserWarning):
    """Warn that a storage loses so much of the updates that training stalls."""


@dataclass(frozen=True, slots=True)
class AuditedUpdates:
    """Audit of one tensor over a window. D is the intended, E the stored and V the visible change.

    D is the rule's change with exact moments. A matrix rule's is its change with the moments that
    are stored.

    Args:
        edq: effective descent quality, ⟨D,E⟩/‖D‖². It is 1 if nothing is lost on average, NaN if
            nothing was intended.
        edq_error: standard error of ``edq`` over the window's steps, NaN for fewer than two.
        noise: ‖E−D‖/‖D‖.
        at_end: fraction of elements with a moment at the end of its code's range. Their gradients
            are too large for the storage.
        lost_fraction: fraction of intended element changes that left the stored value unchanged.
        unseen_fraction: the same for the visible weight.
        num_audits: audited steps in the window.
        num_moved: intended element changes that changed the stored value, over the window.
        last_step: the last audited step.
        imprecision_share: the source's "imprecision percentage", 0 to 1. This is the fraction of
            *all* elements whose visible weight did not change.
        lost_decay: fraction of the intended weight decay that was not stored. NaN without decoupled
            weight decay, and in windows of too few elements.
    """

    edq: float
    edq_error: float
    noise: float
    lost_fraction: float
    unseen_fraction: float
    num_audits: int
    imprecision_share: float
    at_end: float
    lost_decay: float
    num_moved: float
    last_step: int


@dataclass(frozen=True, slots=True)
class Alarm:
    """Report a tensor whose storage loses its updates.

    Attributes:
        tensor, storage: their names.
        fallback: a storage that would keep the updates.
        reading: the audit's figures.
    """

    tensor: str
    storage: str
    fallback: str
    reading: AuditedUpdates

    @property
    def message(self) -> str:
        """Return one line: the tensor, the loss, the remedy."""
        r = self.reading
        if r.at_end > MOST_AT_END:
            return (
                f"The gradients of '{self.tensor}' are too large for storage '{self.storage}': "
                f"moments of {r.at_end:.0%} of its elements are at the end of their range over "
                f"{r.num_audits} audited steps, and the step is not the rule's. "
                f"'{self.fallback}' would keep them, and so would a smaller loss."
            )
        return (
            f"'{self.tensor}' loses {1 - r.edq:.0%} of its update (EDQ {r.edq:.2f} ± "
            f"{r.edq_error:.2f} over "
            f"{r.num_audits} audited steps): storage '{self.storage}' rounds it away; "
            f"'{self.fallback}' would keep it."
        )


def figures_of(sums: Tensor) -> dict[str, float | None]:
    """Return the metrics that a run records from a vector of sums; ``None`` if no change was
    intended.
    """
    figures: dict[str, float | None] = {}
    for name, metric in metrics.update_metrics(sums).items():
        value = float(metric)
        figures[name] = None if math.isnan(value) else value
    return figures


def read(rows: Iterable[Tensor], last_step: int = 0) -> AuditedUpdates:
    """Return the metrics of a window of float64 ``UPDATE_SUMS``, one vector per audited step up to
    ``last_step``.

    Sum first, then divide.

    The delta method gives the error of the EDQ, a ratio of sums over the steps.
    """
    table = torch.stack(list(rows))
    total = table.sum(0)
    values = {name: float(value) for name, value in metrics.update_metrics(total).items()}
    values["at_end"] = float(metrics.share_at_end(total))
    values["num_moved"] = float(total[NONZERO] - total[LOST])
    error = math.nan
    if len(table) > 1:
        error = float(edq_and_error(table, len(table))[1])
    counts = {"num_audits": len(table), "last_step": last_step}
    return AuditedUpdates(**values, **counts, edq_error=error)


def edq_and_error(windows: Tensor, counts: Tensor | int) -> tuple[Tensor, Tensor]:
    """Return the EDQ and its standard error of windows ``[…, audits, 11]`` with ``counts`` audits.

    Other rows are zero.
    """
    dd, de = windows[..., :2].unbind(-1)
    edq = de.sum(-1) / dd.sum(-1)
    spread = (de - edq.unsqueeze(-1) * dd).square().sum(-1)
    return edq, (spread * counts / (counts - 1)).sqrt() / dd.sum(-1)


def stalling(windows: Tensor, counts: Tensor) -> Tensor:
    """Return in which windows updates are lost with statistical certainty, or moments are at the
    end of their range.
    """
    edq, error = edq_and_error(windows, counts)
    widths = [student_t(max(1, n - 1), CONFIDENCE) for n in range(WINDOW + 1)]
    width = torch.tensor(widths, device="cpu")[counts]
    intended = windows[..., 0]
    num_events = intended.sum(-1).square() / intended.square().sum(-1)
    is_lost = (edq + width * error < MIN_EDQ) & (num_events >= FEWEST_EVENTS)
    at_end = metrics.share_at_end(windows.sum(-2))
    return (is_lost | (at_end > MOST_AT_END)) & (counts >= FEWEST)


Sums = tuple[list[Tensor], Tensor | HostCopy]
"""Tensors, and for each its ``UPDATE_SUMS`` of one step, float64 ``[tensors, 11]``.

They may still be in flight on a device.
"""


class Auditor:
    """Audit one optimizer's tensors, and decide on alarms.

    ``fresh`` holds the sums of the last step. ``join`` adds the sums of sharded tensors over ranks:
    every rank calls it at every audited step.
    """

    def __init__(self, join: Callable[[list[Sums]], list[Sums]] | None = None) -> None:
        self.join = join
        self.fresh: list[Sums] = []
        self.seen: dict[Tensor, int] = {}  # the step of a tensor's last audit
        self._samples: dict[tuple[int, ...], Sample] = {}
        self._open: list[Comparison] = []
        self._rows: dict[Tensor, int] = {}
        self._sums = torch.zeros(0, WINDOW, NUM_SUMS, dtype=torch.float64, device="cpu")
        self._counts = torch.zeros(0, dtype=torch.int64, device="cpu")
        self._alarmed: set[Tensor] = set()

    # ── in a step ─────────────────────────────────────────────────────────────────────────────────

    def before(self, batch: Batch, audit_every: int) -> None:
        """Read what the next step reads of the samples, and step their exact moments.

        The states have their gradients, or changes. Call :meth:`after` when they were written.
        """
        self._open = []
        alike: dict[Numbers, list[LocalState]] = defaultdict(list)
        for state, numbers in batch.items():
            if state.parameter.numel():
                alike[numbers].append(state)
        for numbers, states in alike.items():
            self._follow(states, numbers, audit_every)

    def _follow(self, states: list[LocalState], numbers: Numbers, audit_every: int) -> None:
        """Read the samples of states that step alike."""
        count = states[0].step + 1
        most = FIRST_ELEMENTS
        if count > FIRST_STEPS:
            most = LATER_ELEMENTS
            turns = min(TURNS, len(states))
            states = states[count // FIRST_STEPS % turns :: turns]
        audit, rest = divmod(count, audit_every)
        compared = slice(0, 0)
        if rest == 0:
            half = -(-len(states) // 2)
            compared = slice(None)
            if len(states) * most > MOST_COMPARED:
                compared = slice(half) if audit % 2 else slice(half, None)
        if isinstance(numbers.kernel.rule, Rule):
            self._advance(states, self._sample(states, most), numbers, compared)
        elif rest == 0:
            places = [sample_of(state.parameter.numel(), most) for state in states]
            gradient = _read(states, places, [state.gradient for state in states])
            change = _read(states, places, [state.change for state in states])
            lane = _lane(states, places, gradient.float())
            self._open.append(Comparison(states, places, numbers, lane, None, change))

    def _sample(self, states: list[LocalState], most: int) -> Sample:
        """Return the joined sample of states: that of the last step, or one that begins with the
        moments that are stored now.
        """
        key = tuple([id(state.owner) for state in states])
        sample = self._samples.get(key)
        if sample is not None and sample.count == states[0].step and sample.most == most:
            return sample
        for old in list(self._samples):  # of some of these states, joined with others
            if not set(old).isdisjoint(key):
                del self._samples[old]
        sample = self._samples[key] = Sample(states, most)
        self._begin(sample, states, slice(None))
        return sample

    def _begin(self, sample: Sample, states: Sequence[LocalState], part: slice) -> None:
        """Set the moments of a part of a sample to those that are stored now."""
        states = states[part]
        lane = _lane(states, sample.places[part])
        inside = sample.elements(part)
        for moment, name in zip(sample.moments, states[0].kernel.rule.states, strict=True):
            moment[inside] = codes.read_state(states[0].storage, lane, name)

    def _advance(
        self, states: list[LocalState], sample: Sample, numbers: Numbers, part: slice
    ) -> None:
        """Step the exact moments of a sample. Begin a comparison of a part of the states."""
        rule = numbers.kernel.rule
        assert isinstance(rule, Rule)
        scalars = named(rule, numbers.values)
        scale = scalars["gradient_scale"]
        gradient = _read(states, sample.places, [state.gradient for state in states]).float()
        compared = states[part]
        if compared:
            for place in range(*part.indices(len(states))):
                if sample.versions[place] != _version(states[place]):
                    self._begin(sample, states, slice(place, place + 1))
            inside = sample.elements(part)
            lane = _lane(compared, sample.places[part], gradient[inside])
            weight = finite_or_zero(codes.read_weight(numbers.kernel.storage, lane))
            old = [moment[inside] for moment in sample.moments]
            slopes = lane.gradient.to(scale.dtype) * scale
            exact = rule.update(weight, slopes, *old, scalars)[0]
            places = sample.places[part]
            self._open.append(Comparison(compared, places, numbers, lane, exact, None))
        weight = scale.new_zeros(())
        if rule.coupled:
            seen = [state.parameter.detach() for state in states]
            weight = finite_or_zero(_read(states, sample.places, seen).to(scale.dtype))
        slopes = gradient.to(scale.dtype) * scale
        moments = rule.update(weight, slopes, *sample.moments, scalars)[1:]
        if not scale.is_cpu:  # a CPU does not come here in a step that it skips
            is_skipped = scalars["skip"] != 0
            pairs = zip(sample.moments, moments, strict=True)
            moments = [torch.where(is_skipped, *pair) for pair in pairs]
        sample.moments = list(moments)
        sample.count = states[0].step + 1

    def after(self, defined: Iterable[LocalState]) -> None:
        """Compare what was stored with what was intended.

        The definition has written the ``defined`` states, where it has run.
        """
        for comparison in self._open:
            owners = [state.owner for state in comparison.states]
            for state in comparison.states:
                self.seen[state.owner] = state.step + 1
            self.fresh.append((owners, _sums(comparison)))
        self._open = []
        written = {id(state.owner): state for state in defined}
        for key, sample in self._samples.items():
            for place, owner in enumerate(key):
                if owner in written:
                    sample.versions[place] = _version(written[owner])

    # ── over the steps ────────────────────────────────────────────────────────────────────────────

    def _places(self, parameters: Sequence[Tensor]) -> Tensor:
        """Return the rows of tensors in the table of windows, which grows for new ones."""
        places = [self._rows.setdefault(parameter, len(self._rows)) for parameter in parameters]
        missing = len(self._rows) - len(self._sums)
        if missing:
            self._sums = torch.cat([self._sums, self._sums.new_zeros(missing, WINDOW, NUM_SUMS)])
            self._counts = torch.cat([self._counts, self._counts.new_zeros(missing)])
        return torch.tensor(places, device="cpu")

    def window(self, parameter: Tensor) -> Tensor:
        """Return the last sums of a tensor, oldest first: float64 ``[audits, 11]``."""
        place = self._rows[parameter]
        count = int(self._counts[place])
        return self._sums[place].roll(-count, 0)[max(0, WINDOW - count) :]

    @property
    def windows(self) -> dict[Tensor, Tensor]:
        """Return the window of each audited tensor."""
        return {parameter: self.window(parameter) for parameter in self._rows}

    def start_copy(self) -> None:
        """Join the new sums and begin to copy them to the host, which later waits for the copy
        alone.
        """
        if self.fresh:
            members, tables = zip(*self.fresh, strict=True)
            self.fresh = [(list(chain(*members)), HostCopy(torch.cat(tables)))]

    def collect(self) -> Tensor:
        """Move the new sums into the windows and return their total."""
        if not self.fresh:
            return self._sums.new_zeros(NUM_SUMS)
        parameters: list[Tensor] = []
        tables = []
        for members, sums in self.fresh:
            parameters += members
            tables.append(sums.cpu())
        table = torch.cat(tables)
        places = self._places(parameters)
        self._sums[places, self._counts[places] % WINDOW] = table
        self._counts[places] += 1
        self.fresh.clear()
        return table.sum(0)

    def restore(self, parameter: Tensor, rows: Tensor) -> None:
        """Restore a saved window. A tensor that stalls in it raises no second alarm."""
        place = self._places([parameter])
        self._sums[place, : len(rows)] = rows
        self._counts[place] = len(rows)
        if stalling(self._sums[place], self._counts[place]):
            self._alarmed.add(parameter)

    def stalled(self) -> list[Tensor]:
        """Return the tensors whose window stalls, all at once."""
        low = stalling(self._sums, self._counts.clamp(max=WINDOW))
        if not low.any():
            return []
        return [parameter for parameter, place in self._rows.items() if low[place]]

    def alarms(
        self, names_of: Callable[[], Mapping[Tensor, str]], storage_of: Callable[[Tensor], Storage]
    ) -> list[Alarm]:
        """Return the tensors that began to stall since the last call.

        In a healthy run no name is asked for.
        """
        before = self._alarmed
        self._alarmed = set()
        result: list[Alarm] = []
        stalled = self.stalled()
        if not stalled:
            return result
        names = names_of()
        for parameter in stalled:
            if parameter not in names:
                continue  # replaced since
            reading = read(self.window(parameter), self.seen.get(parameter, 0))
            storage = storage_of(parameter)
            is_random = storage.weight.rounding == "stochastic"
            if is_random and reading.num_moved < FEWEST_MOVED and reading.at_end <= MOST_AT_END:
                continue  # it stores rare updates on average, and a window may contain few
            self._alarmed.add(parameter)
            if parameter not in before:
                result.append(Alarm(names[parameter], storage.name, storage.fallback, reading))
        return result


def joined_over_ranks(parameters: Sequence[Tensor]) -> Callable[[list[Sums]], list[Sums]]:
    """Return an ``Auditor.join`` for the optimizer's parameters.

    Every rank passes them in the same order.
    """

    def join(sums: list[Sums]) -> list[Sums]:
        local: dict[Tensor, Tensor] = {}
        for owners, rows in sums:
            local.update(zip(owners, rows.cpu(), strict=True))
        joined: dict[Tensor, Tensor] = {}
        zeros = torch.zeros(NUM_SUMS, dtype=torch.float64, device="cpu")
        for groups, members in by_group(parameters):
            if members:
                table = torch.stack([local.get(parameter, zeros) for parameter in members])
                table = add_up(table.to(local_of(members[0]).device), groups, "sum").cpu()
                joined.update(zip(members, table, strict=True))
        audited = []
        for parameter in parameters:
            if joined[parameter][len(metrics.KERNEL_SUMS)] > 0:
                audited.append(parameter)
        if not audited:
            return []
        return [(audited, torch.stack([joined[parameter] for parameter in audited]))]

    return join


def warn_of(alarms: Sequence[Alarm]) -> None:
    """Warn once, about the worst alarm. This is the default of ``Optimizer.on_alarm``."""
    message = min(alarms, key=lambda a: a.reading.edq).message
    if len(alarms) > 1:
        message += f" So do {len(alarms) - 1} more tensors."
    warnings.warn(message, UpdateLossWarning, stacklevel=4)


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside a framework's wrapper.

    Accelerate and Lightning store it as ``.optimizer``.
    """
    inner = getattr(optimizer, "optimizer", None)
    return optimizer if inner is None else unwrapped(inner)


class Audit(dict[str, AuditedUpdates]):
    """Map the name of each audited tensor to its :class:`AuditedUpdates`.

    Print a table, worst tensors first.

    Attributes:
        total: the reading of all tensors together; ``None`` before the first audited step.
    """

    LINES = 20
    """Largest number of tensors to print."""

    def __init__(
        self, readings: Mapping[str, AuditedUpdates], total: AuditedUpdates | None
    ) -> None:
        super().__init__(readings)
        self.total = total

    def __repr__(self) -> str:
        if self.total is None:
            return "No step has been audited yet."
        rows = sorted(self.items(), key=lambda item: (math.isnan(item[1].edq), item[1].edq))
        rows = rows[: self.LINES]
        if len(self) > 1:
            rows.append((f"all {len(self)} tensors", self.total))
        table = []
        for name, r in rows:
            edq = _text(r.edq, ".3f")
            if not math.isnan(r.edq_error):
                edq += f" ± {r.edq_error:.3f}"
            row = {
                "tensor": name,
                "EDQ": edq,
                "updates lost": f"{r.lost_fraction:.1%}",
                "decay lost": _text(r.lost_decay, ".1%"),
                "noise": f"{r.noise:.3f}",
                "audits": r.num_audits,
                "last step": r.last_step,
            }
            if any(reading.at_end for reading in self.values()):
                row["at their end"] = f"{r.at_end:.1%}"
            table.append(row)
        columns = tuple(Column(title, title, right=title != "tensor") for title in table[0])
        lines = Table(columns, table).plain().splitlines()
        if len(self) > self.LINES:
            lines.insert(-1, f"… and {len(self) - self.LINES} with a higher EDQ")
        return "\n".join(lines)

    __str__ = __repr__


def _text(value: float, form: str) -> str:
    return "-" if math.isnan(value) else format(value, form)


def audit(optimizer: Any, model: nn.Module | None = None) -> Audit:
    """Measure for each tensor which fraction of its updates was stored in the last audited steps.

    The intended change is computed from exact moments of a sample of each tensor. So a storage that
    loses moments shows, too.

    Args:
        optimizer: a Narrowgauge optimizer with ``audit_every`` above 0, or a framework's wrapper
            around one.
        model: provides names for unnamed parameters, here and in later alarms.
    Returns:
        An :class:`Audit`: :class:`AuditedUpdates` per parameter name (``"param 0"`` … for unnamed
        ones), and their ``total``. It is empty before the first audited step.
    Raises:
        RecipeError: the optimizer is not a Narrowgauge optimizer.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        >>> optimizer = ng.AdamW([weight], lr=1e-5, storage="naive", audit_every=1)
        >>> for _ in range(3):
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer.step()
        >>> ng.audit(optimizer)
        tensor             EDQ  updates lost  decay lost   noise  audits  last step
        param 0  0.000 ± 0.000        100.0%           -   1.000       3          3
        >>> ng.audit(optimizer)["param 0"].lost_fraction
        1.0
    """
    inner = unwrapped(optimizer)
    if not hasattr(inner, "auditor"):
        raise RecipeError(
            f"Cannot audit {type(inner).__name__}, because it does not audit its steps.",
            "Use a Narrowgauge optimizer.",
        )
    if model is not None:
        inner.name_parameters(model)
    inner.settle()
    auditor: Auditor = inner.auditor
    names = inner.parameter_names()
    readings: dict[str, AuditedUpdates] = {}
    total = torch.zeros(WINDOW, NUM_SUMS, dtype=torch.float64, device="cpu")
    longest = 0
    for parameter, window in auditor.windows.items():
        if parameter in names:  # it may have left since the last step
            readings[names[parameter]] = read(window, auditor.seen.get(parameter, 0))
            # Count steps from the latest: a tensor that joined late has no oldest ones.
            total[WINDOW - len(window) :] += window
            longest = max(longest, len(window))
    if not readings:
        return Audit({}, None)
    last_step = max(reading.last_step for reading in readings.values())
    return Audit(readings, read(total[WINDOW - longest :], last_step))
