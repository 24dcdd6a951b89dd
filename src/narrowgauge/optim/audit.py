"""The audit: what share of the intended updates a storage took, watched all run long.

On audited steps the kernel sums, per tensor, what was intended and what was stored (:mod:`narrowgauge.numerics.update_metrics`).
One audited step of a small tensor is noisy, so alarms use a window of them: a tensor raises one when even the upper end of a
confidence interval of its EDQ lies below the threshold. Stalls come late, when the learning rate decays, so the window moves
with the run, and a tensor that recovers and stalls again raises another alarm.
"""

from __future__ import annotations

import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError
from narrowgauge.numerics import update_metrics
from narrowgauge.numerics.shards import add_up, by_group, local_of
from narrowgauge.spec.significance import MIN_EDQ, student_t
from narrowgauge.spec.storages import Storage

WINDOW = 20
"""Audited steps in a window."""
FEWEST = 5
"""Audited steps before an alarm may be raised."""
CONFIDENCE = 1 - 2e-4
"""Two-sided: one false alarm in 10,000 windows of tensors whose EDQ is exactly ``MIN_EDQ``."""


AUDIT_SHARE, AUDIT_WHOLE = 32, 1 << 15
"""Of a tensor of more than ``AUDIT_WHOLE`` words, each audit covers the next part in ``AUDIT_SHARE``: it costs as little, and the
20 readings of a window cover two thirds of the tensor."""


class UpdateLossWarning(UserWarning):
    """A storage loses so much of the updates that training stalls."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a tensor's storage did to its updates over the audited window.

    Args:
        edq: effective descent quality, ⟨D,E⟩/‖D‖²; 1 when nothing is lost on average, NaN when nothing was intended.
        edq_error: standard error of ``edq`` over the window's steps, NaN for fewer than two.
        noise: ‖E−D‖/‖D‖, the part of the stored change that was not intended.
        lost_fraction: share of intended element changes that left the stored value as it was, 0 to 1.
        unseen_fraction: the same for the weight that the model sees.
        visible_edq: ⟨D,V⟩/‖D‖² for the visible weight's change V.
        num_audits: audited steps in the window.
        imprecision_share: the source's "imprecision percentage", 0 to 1: share of *all* elements whose visible weight did not
            change, including elements whose intended update was zero. High is healthy where the storage keeps a tail or a
            low part. NaN where a window comes from a checkpoint of version 0.1, which does not count elements.
        lost_decay: share of the intended weight decay that was not stored, 0 to 1 but for noise: 1 − ⟨C,T⟩/‖C‖² with C = −lr·wd·w
            and T what decay changed in the stored value (:func:`narrowgauge.numerics.update_metrics.decay_terms`). NaN where
            nothing decays, where decay is part of the gradient (:class:`narrowgauge.Adam`), and in windows of too few elements.
    """

    edq: float
    edq_error: float
    noise: float
    lost_fraction: float
    unseen_fraction: float
    visible_edq: float
    num_audits: int
    imprecision_share: float = math.nan
    lost_decay: float = math.nan

    @property
    def stalls(self) -> bool:
        """Whether the update is lost beyond doubt."""
        return (
            self.num_audits >= FEWEST
            and self.edq + student_t(self.num_audits - 1, CONFIDENCE) * self.edq_error < MIN_EDQ
        )


@dataclass(frozen=True, slots=True)
class Alarm:
    """One tensor whose updates are lost.

    Args:
        tensor: its name.
        storage: the row that loses them.
        fallback: the row that would keep them.
        reading: the metrics that show it.
    """

    tensor: str
    storage: str
    fallback: str
    reading: Reading

    @property
    def message(self) -> str:
        """One line: what, how much, what to do."""
        r = self.reading
        return (
            f"'{self.tensor}' loses {1 - r.edq:.0%} of its update (EDQ {r.edq:.2f} ± {r.edq_error:.2f} over "
            f"{r.num_audits} audited steps): storage '{self.storage}' rounds it away; '{self.fallback}' would keep it."
        )

    @property
    def cure(self) -> str:
        """The former name of ``fallback``."""
        warnings.warn("Alarm.cure is now Alarm.fallback.", DeprecationWarning, stacklevel=2)
        return self.fallback


def figures_of(sums: Tensor) -> dict[str, float | None]:
    """The audit's metrics of a vector of sums, as a run records them: ``None`` where no change was intended."""
    readings = {
        "edq": update_metrics.edq(sums),
        "noise": update_metrics.noise(sums),
        "lost_fraction": update_metrics.lost_fraction(sums),
        "unseen_fraction": update_metrics.unseen_fraction(sums),
        "imprecision_share": update_metrics.imprecision_share(sums),
        "lost_decay": update_metrics.lost_decay(sums),
    }
    return {name: None if bool(torch.isnan(value)) else float(value) for name, value in readings.items()}


def read(rows: Iterable[Tensor]) -> Reading:
    """The metrics of a window of float64 ``UPDATE_SUMS``, one vector per audited step: sums first, ratios after.

    The error of the EDQ is that of a ratio of sums over the steps (the delta method).
    """
    table = torch.stack(list(rows))
    total = table.sum(0)
    edq = float(update_metrics.edq(total))
    dd, de = table[:, 0], table[:, 1]
    count = len(table)
    error = math.nan
    if count > 1 and float(dd.sum()) > 0:
        spread = float(((de - edq * dd) ** 2).sum())
        error = math.sqrt(spread * count / (count - 1)) / float(dd.sum())
    return Reading(
        edq,
        error,
        float(update_metrics.noise(total)),
        float(update_metrics.lost_fraction(total)),
        float(update_metrics.unseen_fraction(total)),
        float(update_metrics.visible_edq(total)),
        count,
        float(update_metrics.imprecision_share(total)),
        float(update_metrics.lost_decay(total)),
    )


Noted = tuple[Tensor, Tensor, tuple[float, ...]]
"""A tensor, what the kernel summed over it in one step (``KERNEL_SUMS``, or the first of them), and the ``HOST_SUMS``."""


@dataclass
class Auditor:
    """Collects the audits of one optimizer's tensors and decides on alarms.

    ``join`` adds up over ranks the sums of tensors that ranks share; all of them call it at every audited step.
    """

    windows: dict[Tensor, deque[Tensor]] = field(default_factory=dict)
    alarmed: dict[Tensor, bool] = field(default_factory=dict)
    fresh: list[Noted] = field(default_factory=list)
    join: Callable[[list[Noted]], list[Noted]] | None = None
    _products: dict[Tensor, deque[tuple[float, float]]] = field(default_factory=dict)

    def add(self, parameter: Tensor, sums: Tensor, num_elements: int, spacings: float = 0.0) -> None:
        """Note a kernel's sums of one tensor, which may still be on their way from a device, over so many elements.

        ``spacings``: to how many of its weights' their decay comes.
        """
        self.fresh.append((parameter, sums, (float(num_elements), spacings)))

    def discard(self) -> None:
        """Discard the sums of this step, which was skipped."""
        self.fresh.clear()

    def collect(self) -> Tensor:
        """Move the new sums into the windows and return their total; the host waits here for a device."""
        if not self.fresh:
            return torch.zeros(len(update_metrics.UPDATE_SUMS), dtype=torch.float64)
        known = torch.tensor([counts for _, _, counts in self.fresh], dtype=torch.float64)
        table = torch.cat([torch.stack([_filled(sums) for _, sums, _ in self.fresh]).cpu(), known], 1)
        for (parameter, *_), row, (dd, de, *_) in zip(self.fresh, table, table.tolist(), strict=True):
            self.windows.setdefault(parameter, deque(maxlen=WINDOW)).append(row)
            self._products.setdefault(parameter, deque(maxlen=WINDOW)).append((dd, de))
        self.fresh.clear()
        return table.sum(0)

    def forget(self, parameters: Iterable[Tensor]) -> None:
        gone = set(parameters)
        for parameter in gone:
            for kept in (self.windows, self.alarmed, self._products):
                kept.pop(parameter, None)
        self.fresh = [noted for noted in self.fresh if noted[0] not in gone]

    def restore(self, parameter: Tensor, rows: Tensor) -> None:
        """Put a saved window back; a tensor that stalls in it raises no second alarm."""
        rows = update_metrics.completed(rows)
        self.windows[parameter] = deque(rows.unbind(0), maxlen=WINDOW)
        self._products[parameter] = deque(((dd, de) for dd, de, *_ in rows.tolist()), maxlen=WINDOW)
        self.alarmed[parameter] = read(rows.unbind(0)).stalls

    def alarms(self, names: dict[Tensor, str], storages: dict[Tensor, Storage]) -> list[Alarm]:
        """Tensors that began to stall since the last call."""
        result = []
        for parameter, products in self._products.items():
            if parameter not in names:
                continue  # replaced since
            # A tensor whose EDQ is not below the threshold cannot stall; in a healthy run this test is the only cost.
            known, self.alarmed[parameter] = self.alarmed.get(parameter), False
            if not sum(de for _, de in products) < MIN_EDQ * sum(dd for dd, _ in products):
                continue
            reading, storage = read(self.windows[parameter]), storages[parameter]
            # Stochastic rounding stores rare updates on average, though none may be stored in this window.
            if not reading.stalls or (reading.lost_fraction == 1 and is_stochastic(storage)):
                continue
            self.alarmed[parameter] = True
            if not known:
                result.append(Alarm(names[parameter], storage.name, storage.fallback, reading))
        return result


def is_stochastic(storage: Storage) -> bool:
    """Whether the stored weight is cut stochastically, so that what a single step loses arrives on average."""
    return storage.weight.rounding == "stochastic"


def _filled(sums: Tensor) -> Tensor:
    """``KERNEL_SUMS`` of a kernel that may have left out the last of them, which are then zero."""
    return torch.nn.functional.pad(sums, (0, len(update_metrics.KERNEL_SUMS) - len(sums)))


def joined_over_ranks(parameters: Sequence[Tensor]) -> Callable[[list[Noted]], list[Noted]]:
    """For ``Auditor.join``: what adds up the sums of parameters whose elements are shared out over ranks.

    ``parameters`` are the optimizer's, on every rank in the same order.
    """

    def join(noted: list[Noted]) -> list[Noted]:
        mine = {parameter: (sums, counts) for parameter, sums, counts in noted}
        joined: dict[Tensor, tuple[Tensor, tuple[float, ...]]] = {}
        own = len(update_metrics.KERNEL_SUMS)
        for groups, members in by_group(parameters):
            table = torch.zeros(len(members), len(update_metrics.UPDATE_SUMS), dtype=torch.float64)
            for row, parameter in zip(table, members, strict=True):
                if parameter in mine:
                    sums, counts = mine[parameter]
                    row[:own], row[own:] = _filled(sums).cpu(), torch.tensor(counts, dtype=torch.float64)
            device = local_of(members[0]).device if members else table.device
            table = add_up(table.to(device), groups, "sum").cpu()
            rows = zip(members, table, strict=True)
            joined |= {p: (row[:own], tuple(row[own:].tolist())) for p, row in rows if row[own] > 0}
        return [(parameter, *joined[parameter]) for parameter in parameters if parameter in joined]

    return join


def audited_parts(length: int, turn: int, row: int = 1) -> list[tuple[slice, bool]]:
    """The parts of a tensor stepped one after the other at its ``turn``-th audit, and whether each is audited.

    One of them is (see ``AUDIT_SHARE``); its length is a multiple of a vector register's, or of two rows. The tensor has
    ``length`` words, or rows of ``row`` words.
    """
    if length * row <= AUDIT_WHOLE:
        return [(slice(0, length), True)]
    unit = 16 if row == 1 else 2
    share = -(-length // AUDIT_SHARE // unit) * unit
    start = turn % -(-length // share) * share
    stop = min(start + share, length)
    parts = [(slice(0, start), False), (slice(start, stop), True), (slice(stop, length), False)]
    return [(part, watched) for part, watched in parts if part.start < part.stop]


def warn_of(alarms: Sequence[Alarm]) -> None:
    """The default of ``Optimizer.on_alarm``: one warning, about the worst."""
    worst = min(alarms, key=lambda a: a.reading.edq)
    more = f" So do {len(alarms) - 1} more tensors." if len(alarms) > 1 else ""
    warnings.warn(worst.message + more, UpdateLossWarning, stacklevel=4)


class Audited(Protocol):
    """What :func:`audit` needs of an optimizer."""

    auditor: Auditor

    def settle(self) -> None:
        """Take in what the last step left on its way."""

    def parameter_names(self) -> dict[Tensor, str]:
        """The name of each parameter."""

    def name_parameters(self, model: nn.Module) -> None:
        """Take the names of parameters that were given without."""


def unwrapped(optimizer: Any) -> Any:
    """The optimizer inside a framework's, as Accelerate and Lightning have it under ``.optimizer``.

    Example:
        >>> from types import SimpleNamespace
        >>> unwrapped(SimpleNamespace(optimizer=SimpleNamespace(optimizer="ours")))
        'ours'
    """
    while (inner := getattr(optimizer, "optimizer", None)) is not None:
        optimizer = inner
    return optimizer


def audit(optimizer: Audited, model: nn.Module | None = None) -> dict[str, Reading]:
    """What each tensor's storage did to its updates over the last audited steps.

    Its limit: the intended change is the one that the rule computes *from the moments as they are stored*. Where a second
    moment is wrong itself, as that of ``collage-light`` at beta2 = 0.999, every step is too small, and all of it is
    stored: EDQ 1. Gauges compare second moments with exact ones (``bias``, see :func:`narrowgauge.attach_gauges`).

    Args:
        optimizer: one of ours, with ``audit_every`` above 0, or a framework's that wraps it.
        model: gives its names to parameters that have none, here and in alarms from now on.
    Returns:
        A :class:`Reading` per tensor that was audited, by parameter name (``"param 0"`` … for unnamed ones), and one
        over all of them under ``""``; empty before the first audited step.
    Raises:
        RecipeError: the optimizer is none of ours.

    Cost: none on the training step beyond the audit itself; this call adds up a few hundred numbers.

    Example:
        >>> import torch, narrowgauge as ng
        >>> weight = torch.nn.Parameter(torch.ones(64, 64, dtype=torch.bfloat16))
        >>> optimizer = ng.AdamW([weight], lr=1e-5, storage="naive", audit_every=1)
        >>> for _ in range(3):
        ...     weight.grad = torch.ones_like(weight)
        ...     optimizer.step()
        >>> ng.audit(optimizer)["param 0"].lost_fraction
        1.0
    """
    inner = unwrapped(optimizer)
    if not hasattr(inner, "auditor"):
        raise RecipeError(
            f"an audit of a {type(inner).__name__} was requested, which does not audit its steps.",
            "Use one of Narrowgauge's.",
        )
    if model is not None:
        inner.name_parameters(model)
    inner.settle()
    auditor: Auditor = inner.auditor
    names = inner.parameter_names()
    windows = {
        p: window for p, window in auditor.windows.items() if p in names
    }  # one may have left since the last step
    if not windows:
        return {}
    readings = {names[p]: read(window) for p, window in windows.items()}
    longest = max(len(w) for w in windows.values())
    # Steps counted from the latest: a tensor that joined late has none for the oldest.
    steps = [torch.stack([w[-k] for w in windows.values() if len(w) >= k]).sum(0) for k in range(1, longest + 1)]
    return {"": read(steps), **readings}
