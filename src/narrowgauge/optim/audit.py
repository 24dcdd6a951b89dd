"""The audit: measure during a run which fraction of the intended updates a storage stores.

An audited step, one of ten, compares a sample of each tensor (:mod:`narrowgauge.optim.sample`): D is
the rule's change with moments that no storage ever cuts, E the change that the definition stores. So
an audit sees what a storage rounds off the weight, and what it lost of the moments before.

One step is noisy, and stalls come late. So an alarm reads a window of the last audits. It is raised
when the upper end of a confidence interval of the tensor's EDQ is below the threshold.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import add_up, by_group, local_of
from narrowgauge.optim.sample import Samples
from narrowgauge.spec.significance import MIN_EDQ, student_t
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.tables import Column, Table
from narrowgauge.torch_support.torch_names import HostCopy

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
        num_events: audits of equal weight that the window is worth, by the sizes of D.
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
    num_events: float
    num_moved: float
    last_step: int

    @property
    def stalls(self) -> bool:
        """Tell whether updates are lost with statistical certainty, or moments are at the end of
        their range.
        """
        if self.num_audits < FEWEST:
            return False
        if self.at_end > MOST_AT_END:
            return True
        width = student_t(self.num_audits - 1, CONFIDENCE) * self.edq_error
        return self.num_events >= FEWEST_EVENTS and self.edq + width < MIN_EDQ


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

    Sum first, then divide. The delta method gives the error of the EDQ, a ratio of sums over the
    steps.
    """
    table = torch.stack(list(rows))
    total = table.sum(0)
    values = {name: float(value) for name, value in metrics.update_metrics(total).items()}
    counts = dict(zip(metrics.UPDATE_SUMS, total.tolist(), strict=True))
    count = len(table)
    dd, de = table[:, 0], table[:, 1]
    error = math.nan
    if count > 1:
        spread = (de - values["edq"] * dd).square().sum() * count / (count - 1)
        error = float(spread.sqrt() / dd.sum())
    return AuditedUpdates(
        **values,
        edq_error=error,
        at_end=float(metrics.share_at_end(total)),
        num_audits=count,
        num_events=float(dd.sum().square() / dd.square().sum()),
        num_moved=counts["nonzero"] - counts["lost"],
        last_step=last_step,
    )


class Auditor:
    """Audit one optimizer's tensors, and decide on alarms.

    Attributes:
        fresh: the tensors that the last step audited, and their ``UPDATE_SUMS``, float64
            ``[tensors, 11]``. They may still be in flight on a device.
        windows: the last sums of each tensor, oldest first.
        is_joined: whether the sums of sharded tensors are added over ranks. Every rank calls
            :meth:`join` at every audited step then.
        samples: what is compared.
    """

    def __init__(self, is_joined: bool = False) -> None:
        self.is_joined = is_joined
        self.fresh: list[tuple[list[Tensor], Tensor | HostCopy]] = []
        self.windows: dict[Tensor, deque[Tensor]] = {}
        self.samples = Samples()
        self._alarmed: set[Tensor] = set()

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
        nothing = torch.zeros(len(metrics.UPDATE_SUMS), dtype=torch.float64)
        for groups, members in by_group(parameters):
            if members:
                table = torch.stack([local.get(parameter, nothing) for parameter in members])
                table = add_up(table.to(local_of(members[0]).device), groups, "sum").cpu()
                audited = (table[:, len(metrics.KERNEL_SUMS)] > 0).nonzero().flatten().tolist()
                self.fresh.append(([members[place] for place in audited], table[audited]))

    def collect(self) -> Tensor | None:
        """Move the new sums into the windows and return their total; ``None`` without new ones."""
        totals = []
        for owners, sums in self.fresh:
            if not owners:
                continue
            table = sums.cpu()
            totals.append(table.sum(0))
            for owner, row in zip(owners, table, strict=True):
                self.windows.setdefault(owner, deque(maxlen=WINDOW)).append(row)
        self.fresh = []
        if not totals:
            return None
        return torch.stack(totals).sum(0)

    def alarms(
        self, names_of: Callable[[], Mapping[Tensor, str]], storage_of: Callable[[Tensor], Storage]
    ) -> list[Alarm]:
        """Return the tensors that began to stall since the last call.

        In a healthy run no name is asked for.
        """
        last = torch.stack([window[-1] for window in self.windows.values()])
        loses = (last[:, 1] < MIN_EDQ * last[:, 0]) | (metrics.share_at_end(last) > MOST_AT_END)
        result = []
        for parameter, is_low in zip(self.windows, loses.tolist(), strict=True):
            was_alarmed = parameter in self._alarmed
            if not is_low and not was_alarmed:
                continue
            reading = read(self.windows[parameter], self.samples.seen.get(parameter, 0))
            self._alarmed.discard(parameter)
            name = names_of().get(parameter) if reading.stalls else None
            if name is None:  # or it was replaced since
                continue
            storage = storage_of(parameter)
            is_random = storage.weight.rounding == "stochastic"
            if is_random and reading.num_moved < FEWEST_MOVED and reading.at_end <= MOST_AT_END:
                continue  # it stores rare updates on average, and a window may contain few
            self._alarmed.add(parameter)
            if not was_alarmed:
                result.append(Alarm(name, storage.name, storage.fallback, reading))
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
    totals: dict[int, Tensor] = {}  # of each audit, from the latest
    for parameter, window in auditor.windows.items():
        if parameter in names:  # it may have left since the last step
            readings[names[parameter]] = read(window, auditor.samples.seen.get(parameter, 0))
            for place, row in enumerate(reversed(window)):
                totals[place] = totals.get(place, 0) + row
    if readings:
        last_step = max(reading.last_step for reading in readings.values())
        readings.total = read(reversed(totals.values()), last_step)
    return readings
