"""The audit: measure during a run which fraction of the intended updates a storage stores.

An audited step sums intended and stored changes over a sample of each tensor
(:func:`narrowgauge.optim.definition.audit`). One step is noisy, and stalls come late. So an
alarm reads a window of the last steps. It is raised when the upper end of a confidence interval of
the tensor's EDQ is below the threshold.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import metrics
from narrowgauge.numerics.dtensor import add_up, by_group, local_of
from narrowgauge.spec.significance import MIN_EDQ, student_t
from narrowgauge.spec.storages import Storage
from narrowgauge.spec.tables import Column, Table
from narrowgauge.torch_support.torch_names import HostCopy

WINDOW = 20
"""Audited steps in a window."""
FEWEST = 5
"""Audited steps before an alarm may be raised."""
CONFIDENCE = 1 - 2e-4
"""Two-sided: one false alarm in 10,000 windows whose true EDQ is exactly ``MIN_EDQ``."""
NUM_SUMS = len(metrics.UPDATE_SUMS)
MOST_AT_END = 0.01
"""Raise an alarm where more than this fraction of elements is at the end of a code's range."""


class UpdateLossWarning(UserWarning):
    """Warn that a storage loses so much of the updates that training stalls."""


@dataclass(frozen=True, slots=True)
class AuditedUpdates:
    """Audit of one tensor over a window. D is the intended, E the stored and V the visible change.

    D is the rule's change with the moments that are stored. What a storage rounds off the moments
    is not seen here.

    Args:
        edq: effective descent quality, ⟨D,E⟩/‖D‖². It is 1 if nothing is lost on average, NaN if
            nothing was intended.
        edq_error: standard error of ``edq`` over the window's steps, NaN for fewer than two.
        noise: ‖E−D‖/‖D‖.
        at_end: fraction of elements with a moment at the end of its code's range. Their gradients
            are too large for the storage, and D is not the rule's change.
        lost_fraction: fraction of intended element changes that left the stored value unchanged.
        unseen_fraction: the same for the visible weight.
        num_audits: audited steps in the window.
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


def read(rows: Iterable[Tensor]) -> AuditedUpdates:
    """Return the metrics of a window of float64 ``UPDATE_SUMS``, one vector per audited step.

    Sum first, then divide.

    The delta method gives the error of the EDQ, a ratio of sums over the steps.
    """
    table = torch.stack(list(rows))
    total = table.sum(0)
    values = {name: float(value) for name, value in metrics.update_metrics(total).items()}
    values["at_end"] = float(metrics.share_at_end(total))
    error = math.nan
    if len(table) > 1:
        error = float(edq_and_error(table, len(table))[1])
    return AuditedUpdates(**values, edq_error=error, num_audits=len(table))


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
    at_end = metrics.share_at_end(windows.sum(-2))
    return ((edq + width * error < MIN_EDQ) | (at_end > MOST_AT_END)) & (counts >= FEWEST)


Sums = tuple[list[Tensor], Tensor | HostCopy]
"""Tensors, and for each its ``UPDATE_SUMS`` of one step, float64 ``[tensors, 11]``.

They may still be in flight on a device.
"""


@dataclass
class Auditor:
    """Collect the audits of one optimizer's tensors and decide on alarms.

    ``fresh`` holds the sums of the last step. ``join`` adds the sums of sharded tensors over ranks:
    every rank calls it at every audited step.
    """

    fresh: list[Sums] = field(default_factory=list)
    join: Callable[[list[Sums]], list[Sums]] | None = None
    _rows: dict[Tensor, int] = field(default_factory=dict)
    _sums: Tensor = field(
        default_factory=lambda: torch.zeros(0, WINDOW, NUM_SUMS, dtype=torch.float64, device="cpu")
    )
    _counts: Tensor = field(default_factory=lambda: torch.zeros(0, dtype=torch.int64, device="cpu"))
    _alarmed: set[Tensor] = field(default_factory=set)

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
            reading = read(self.window(parameter))
            storage = storage_of(parameter)
            is_rare = reading.lost_fraction == 1 and storage.weight.rounding == "stochastic"
            if is_rare and reading.at_end <= MOST_AT_END:
                continue  # it stores rare updates on average, and a window may contain none
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
                "steps": r.num_audits,
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

    The intended change is computed *from the stored moments*, so errors of a stored second moment
    do not show here.

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
        tensor             EDQ  updates lost  decay lost   noise  steps
        param 0  0.000 ± 0.000        100.0%           -   1.000      3
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
            readings[names[parameter]] = read(window)
            # Count steps from the latest: a tensor that joined late has no oldest ones.
            total[WINDOW - len(window) :] += window
            longest = max(longest, len(window))
    if not readings:
        return Audit({}, None)
    return Audit(readings, read(total[WINDOW - longest :]))
