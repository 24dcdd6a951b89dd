"""The audit: measure during a run which fraction of the intended updates a storage stores.

An audit reads a sample: 256 elements of each tensor in its first 1,000 steps, later 4,096 of a 16th
of the tensors in turn. Each step reads the gradients of the sample, and steps moments of its own in
float32 that no storage ever cuts. An audited step, one of ten, compares: D is the rule's change with
these moments, E the change that the definition stores. So an audit sees what a storage rounds off
the weight, and what it lost of the moments before.

One step is noisy, and stalls come late. So an alarm reads a window of the last audits. It is raised
when the upper end of a confidence interval of the tensor's EDQ is below the threshold.
"""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import add_up, by_group, local_of, place_along
from narrowgauge.optim import codes
from narrowgauge.optim.codes import Lane
from narrowgauge.optim.kernel import Inputs, Numbers, advance, finite_or_zero, named
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
MOST_ELEMENTS = 1 << 15
"""Elements of all samples of a rule and storage together. A sample of many tensors has less of each:
the definition takes 0.3 µs for an element.
"""
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
MOST_AT_END = 0.01
"""Raise an alarm where more than this fraction of elements is at the end of a code's range."""


# ── the sample ────────────────────────────────────────────────────────────────────────────────────


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


class Comparison(NamedTuple):
    """Hold what an audited step read before it wrote.

    ``exact`` is the change by exact moments; a matrix rule has its own ``change`` instead.
    """

    lane: Lane
    exact: Tensor | None
    change: Tensor | None


class Followed(NamedTuple):
    """Hold the sample of states in a step, and what is compared if it is audited."""

    states: list[LocalState]
    numbers: Numbers
    sample: Sample
    comparison: Comparison | None


def _follow(
    states: list[LocalState], numbers: Numbers, sample: Sample, is_audited: bool
) -> Comparison | None:
    """Step the exact moments of a sample. Return what an audited step compares."""
    rule = numbers.kernel.rule
    gradient = sample.read([state.gradient for state in states]).float()
    lane = sample.lane(states, gradient) if is_audited else None
    if not isinstance(rule, Rule):
        assert lane is not None
        return Comparison(lane, None, sample.read([state.change for state in states]))
    scalars = named(rule, numbers.values)
    scale = scalars["gradient_scale"]
    weight = scale.new_zeros(())
    if lane is not None:
        weight = codes.read_weight(numbers.kernel.storage, lane)
    elif rule.coupled:
        weight = sample.read([state.parameter.detach() for state in states])
    weight = finite_or_zero(weight.to(scale.dtype))
    gradient = gradient.to(scale.dtype) * scale
    exact, *moments = rule.update(weight, gradient, *sample.moments, scalars)
    if not scale.is_cpu:  # a CPU does not come here in a step that it skips
        is_skipped = scalars["skip"] != 0
        pairs = zip(sample.moments, moments, strict=True)
        moments = [torch.where(is_skipped, *pair) for pair in pairs]
    sample.moments = list(moments)
    return None if lane is None else Comparison(lane, exact, None)


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
    weight = codes.read(storage, lane, ()).weight if leading else codes.read_weight(storage, lane)
    without = advance(inputs._replace(scalars={**scalars, rule.decay: factor - audited}))
    return finite_or_zero(weight) * audited, stored - codes.changes(storage, lane, without)[1]


def sums_of(followed: Followed) -> Tensor:
    """Return the ``UPDATE_SUMS`` of each state, after the step has set its bounds."""
    states, numbers, sample, comparison = followed
    assert comparison is not None
    lane, exact, change = comparison
    rule = numbers.kernel.rule
    storage = numbers.kernel.storage
    scales = {}
    for name, (into, _) in sample.scales(states).items():
        scales[name] = into, lane.scales[name][1]
    scalars = named(rule, numbers.values)
    lane = replace(lane, scales=scales)
    inputs = Inputs(rule, storage, lane, change, scalars, numbers.seed)
    written = advance(inputs)
    changes = codes.changes(storage, lane, written)
    intended, stored, visible = [values.double() for values in changes]
    if exact is not None:
        intended = exact.double()
    decay = arrived = torch.zeros_like(intended)
    spacings = 0.0
    factor = dict(zip(rule.scalars, numbers.scalars, strict=True)).get(rule.decay, 0.0)
    if factor:
        decay, arrived = [values.double() for values in _decay(inputs, changes[1])]
        spacings = max(abs(factor), least_decay(storage)) * storage.weight.spacings
    terms = [
        *metrics.update_terms(intended, stored, visible),
        codes.num_at_end(storage, written, lane).double(),
        *metrics.decay_terms(decay, arrived),
        torch.ones_like(intended),
        torch.full_like(intended, spacings),
    ]
    parts = torch.stack(terms, 1).split([len(places) for places in sample.places])
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
    counts = dict(zip(metrics.UPDATE_SUMS, total.tolist(), strict=True))
    values["num_moved"] = counts["nonzero"] - counts["lost"]
    error = math.nan
    if len(table) > 1:
        error = float(edq_and_error(table, len(table))[1])
    audits = {"num_audits": len(table), "last_step": last_step}
    return AuditedUpdates(**values, **audits, edq_error=error)


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


class Auditor:
    """Audit one optimizer's tensors, and decide on alarms.

    Attributes:
        fresh: the tensors that the last step audited, and their ``UPDATE_SUMS``, float64
            ``[tensors, 11]``. They may still be in flight on a device.
        is_joined: whether the sums of sharded tensors are added over ranks. Every rank calls
            :meth:`join` at every audited step then.
        seen: the step of each tensor's last audit.
    """

    def __init__(self, is_joined: bool = False) -> None:
        self.is_joined = is_joined
        self.fresh: list[tuple[list[Tensor], Tensor | HostCopy]] = []
        self.seen: dict[Tensor, int] = {}
        self._samples: dict[tuple[int, ...], Sample] = {}
        self._followed: list[Followed] = []
        self._rows: dict[Tensor, int] = {}
        self._sums = torch.zeros(0, WINDOW, len(metrics.UPDATE_SUMS), dtype=torch.float64)
        self._counts = torch.zeros(0, dtype=torch.int64)
        self._alarmed: set[Tensor] = set()

    # ── in a step ─────────────────────────────────────────────────────────────────────────────────

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
            if is_audited or isinstance(numbers.kernel.rule, Rule):
                sample = self._sample(states, most)
                comparison = _follow(states, numbers, sample, is_audited)
                self._followed.append(Followed(states, numbers, sample, comparison))

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

    def after(self) -> None:
        """Compare what was stored with what was intended."""
        for followed in self._followed:
            states = followed.states
            followed.sample.version = _version(states)
            followed.sample.count = states[0].step + 1
            if followed.comparison is not None:
                for state in states:
                    self.seen[state.owner] = state.step + 1
                self.fresh.append(([state.owner for state in states], sums_of(followed)))
        self._followed = []

    # ── over the steps ────────────────────────────────────────────────────────────────────────────

    def start_copy(self) -> None:
        """Begin to copy the new sums to the host, which later waits for the copy alone."""
        if self.fresh:
            owners, tables = zip(*self.fresh, strict=True)
            self.fresh = [(list(chain(*owners)), HostCopy(torch.cat(tables)))]

    def join(self, parameters: Sequence[Tensor]) -> None:
        """Add the new sums of the optimizer's parameters over ranks. Every rank passes all, in order."""
        local: dict[Tensor, Tensor] = {}
        for owners, sums in self.fresh:
            local.update(zip(owners, sums.cpu(), strict=True))
        self.fresh = []
        nothing = self._sums.new_zeros(self._sums.shape[-1])
        for groups, members in by_group(parameters):
            if members:
                table = torch.stack([local.get(parameter, nothing) for parameter in members])
                table = add_up(table.to(local_of(members[0]).device), groups, "sum").cpu()
                audited = (table[:, len(metrics.KERNEL_SUMS)] > 0).nonzero().flatten().tolist()
                self.fresh.append(([members[place] for place in audited], table[audited]))

    def collect(self) -> Tensor | None:
        """Move the new sums into the windows and return their total; ``None`` without new ones."""
        total = None
        for owners, sums in self.fresh:
            table = sums.cpu()
            places = [self._rows.setdefault(owner, len(self._rows)) for owner in owners]
            missing = len(self._rows) - len(self._sums)
            self._sums = torch.cat(
                [self._sums, self._sums.new_zeros(missing, *self._sums.shape[1:])]
            )
            self._counts = torch.cat([self._counts, self._counts.new_zeros(missing)])
            self._sums[places, self._counts[places] % WINDOW] = table
            self._counts[places] += 1
            if owners:
                total = table.sum(0) if total is None else total + table.sum(0)
        self.fresh = []
        return total

    @property
    def windows(self) -> dict[Tensor, Tensor]:
        """Return the last sums of each audited tensor, oldest first: float64 ``[audits, 11]``."""
        windows = {}
        for parameter, place in self._rows.items():
            count = int(self._counts[place])
            windows[parameter] = self._sums[place].roll(-count, 0)[max(0, WINDOW - count) :]
        return windows

    def alarms(
        self, names_of: Callable[[], Mapping[Tensor, str]], storage_of: Callable[[Tensor], Storage]
    ) -> list[Alarm]:
        """Return the tensors that began to stall since the last call.

        In a healthy run no name is asked for.
        """
        before = self._alarmed
        self._alarmed = set()
        stalls = stalling(self._sums, self._counts.clamp(max=WINDOW))
        result: list[Alarm] = []
        if not stalls.any():
            return result
        names = names_of()
        windows = self.windows
        for parameter, place in self._rows.items():
            if not stalls[place] or parameter not in names:
                continue  # or it was replaced since
            reading = read(windows[parameter], self.seen.get(parameter, 0))
            storage = storage_of(parameter)
            is_random = storage.weight.rounding == "stochastic"
            if is_random and reading.num_moved < FEWEST_MOVED and reading.at_end <= MOST_AT_END:
                continue  # it stores rare updates on average, and a window may contain few
            self._alarmed.add(parameter)
            if parameter not in before:
                result.append(Alarm(names[parameter], storage.name, storage.fallback, reading))
        return result


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
    total: AuditedUpdates | None = None

    def __repr__(self) -> str:
        if self.total is None:
            return "No step has been audited yet."
        rows = sorted(self.items(), key=lambda item: (math.isnan(item[1].edq), item[1].edq))
        rows = rows[: self.LINES]
        if len(self) > 1:
            rows.append((f"all {len(self)} tensors", self.total))
        lines = Table(COLUMNS, rows).plain().splitlines()
        if len(self) > self.LINES:
            lines.insert(-1, f"… and {len(self) - self.LINES} with a higher EDQ")
        return "\n".join(lines)

    __str__ = __repr__


def _cell(name: str, form: str) -> Callable[[tuple[str, AuditedUpdates]], str]:
    """Return a function of a row of the table: the text of a figure, or a dash for NaN."""

    def text(row: tuple[str, AuditedUpdates]) -> str:
        value = getattr(row[1], name)
        return "-" if math.isnan(value) else format(value, form)

    return text


COLUMNS = (
    Column("tensor", lambda row: row[0]),
    Column("EDQ", _cell("edq", ".3f"), right=True),
    Column("±", _cell("edq_error", ".3f"), right=True),
    Column("updates lost", _cell("lost_fraction", ".1%"), right=True),
    Column("decay lost", _cell("lost_decay", ".1%"), right=True),
    Column("noise", _cell("noise", ".3f"), right=True),
    Column("at their end", _cell("at_end", ".1%"), right=True),
    Column("audits", _cell("num_audits", "d"), right=True),
    Column("last step", _cell("last_step", "d"), right=True),
)


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
        tensor     EDQ      ±  updates lost  decay lost  noise  at their end  audits  last step
        param 0  0.000  0.000        100.0%           -  1.000          0.0%       3          3
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
    readings = Audit()
    total = torch.zeros(WINDOW, len(metrics.UPDATE_SUMS), dtype=torch.float64)
    longest = 0
    for parameter, window in auditor.windows.items():
        if parameter in names:  # it may have left since the last step
            readings[names[parameter]] = read(window, auditor.seen.get(parameter, 0))
            # Count steps from the latest: a tensor that joined late has no oldest ones.
            total[WINDOW - len(window) :] += window
            longest = max(longest, len(window))
    if readings:
        last_step = max(reading.last_step for reading in readings.values())
        readings.total = read(total[WINDOW - longest :], last_step)
    return readings
