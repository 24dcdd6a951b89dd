"""The audit: measure during a run which fraction of the intended updates a storage stores.

An audited step, one of ten, compares a sample of each tensor (:mod:`narrowgauge.optim.audit.audit_sample`): D is
the rule's change with moments that no storage ever cuts, E the change of what is stored. So
an audit sees what a storage rounds off the weight, and what it lost of the moments before.

One step is noisy, and stalls come late. So an alarm reads a window of the last audits. It is raised
when the upper end of a confidence interval of the tensor's EDQ is below the threshold. A mean cannot
see the end of a range: so an audit counts moments at the ends of their codes, and two audits with
more than one of a hundred raise an alarm. Each rank audits its own part of a sharded tensor.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError, warn_caller
from narrowgauge.numerics.metrics import UPDATE_SUMS, update_metrics
from narrowgauge.optim.audit.audit_sample import TURN, AuditSample
from narrowgauge.optim.step.launch import Batch
from narrowgauge.spec.significance import MIN_EDQ, student_t
from narrowgauge.torch_support.torch_names import HostCopy, host_tensor, unwrapped_optimizer

WINDOW = 20
"""Audited steps in a window."""
FEWEST = 5
"""Audited steps before an alarm may be raised."""
FEWEST_EVENTS = 3
"""Audits of equal weight that a window is worth: of one alone there is no interval."""
FEWEST_MOVED = 32
"""Elements that moved in a window of a stochastic storage, before a loss is more than chance."""
MOST_AT_END = 0.01
"""Moments at an end of their codes' range, before a tensor is told."""
CONFIDENCE = 1 - 2e-4
"""Two-sided: one false alarm in 10,000 windows whose true EDQ is exactly ``MIN_EDQ``."""


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
        lost_fraction: fraction of intended element changes that left the stored value unchanged.
        imprecision_share: the source's "imprecision percentage", 0 to 1. This is the fraction of
            *all* elements whose visible weight did not change.
        num_audits: audited steps in the window.
        num_events: audits of equal weight that the window is worth, by the sizes of D.
        num_moved: intended element changes that changed the stored value, over the window.
        last_step: the last audited step.
        at_end: fraction of elements with a moment at an end of its code's range, in all audits but
            the worst of the window.
        stalls: whether updates are lost, or too large, with statistical certainty, or moments lie
            at an end of their range.
    """

    edq: float
    noise: float
    lost_fraction: float
    imprecision_share: float
    edq_error: float
    num_audits: int
    num_events: float
    num_moved: float
    last_step: int
    at_end: float
    stalls: bool


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
        if self.reading.at_end > MOST_AT_END:
            return RANGE_MESSAGE.format(self, self.reading)
        cause = TOO_LARGE if self.reading.edq > 1 else TOO_SMALL
        return (MESSAGE + cause).format(self, self.reading)


MESSAGE = (
    "'{0.tensor}' stores {1.edq:.0%} of its update (EDQ {1.edq:.2f} ± {1.edq_error:.2f} over "
    "{1.num_audits} audited steps): "
)
TOO_SMALL = (
    "storage '{0.storage}' rounds the rest away, or has not the range of its gradients. "
    "'{0.fallback}' would keep it."
)
TOO_LARGE = (
    "its moments are not those of its gradients. Storage '{0.storage}' has not their range, or other "
    "code has changed them. '{0.fallback}' would keep them."
)

RANGE_MESSAGE = (
    "'{0.tensor}' has {1.at_end:.0%} of its moments at an end of the range of storage "
    "'{0.storage}', in two audits: its steps have another size. Scale the loss, or use "
    "'{0.fallback}'."
)


@lru_cache
def factors() -> Tensor:
    """Return the factor of a standard error for windows of 0, 1, … steps."""
    values = [student_t(max(1, count - 1), CONFIDENCE) for count in range(WINDOW + 1)]
    return host_tensor(values, torch.float64)


def read(windows: Tensor) -> dict[str, Tensor]:
    """Return the fields of :class:`AuditedUpdates` of windows: float64 ``UPDATE_SUMS`` and the step,
    ``[windows, WINDOW, 9]``, zero where no step is yet.

    Sum first, then divide. The delta method gives the error of the EDQ, a ratio of sums over the
    steps.
    """
    dd, de, _, nonzero, lost, _, elements, at_end, steps = windows.unbind(2)
    total = dd.sum(1)
    metrics = update_metrics(windows[:, :, :-1].sum(1))
    edq = metrics["edq"]
    count = (steps > 0).sum(1)
    spread = (de - edq[:, None] * dd).square().sum(1) * count / (count - 1)
    error = torch.where(count > 1, spread.sqrt() / total, math.nan)
    num_events = total.square() / dd.square().sum(1)
    width = error * factors()[count]
    is_off = (edq + width < MIN_EDQ) | (edq - width > 1 / MIN_EDQ)
    shares = at_end / elements.clamp(min=1)
    second_largest = shares.topk(2, dim=1).values[:, 1]
    stalls = is_off & (count >= FEWEST) & (num_events >= FEWEST_EVENTS)
    return {
        **metrics,
        "edq_error": error,
        "num_audits": count,
        "num_events": num_events,
        "num_moved": (nonzero - lost).sum(1),
        "last_step": steps.amax(1).long(),
        "at_end": second_largest,
        "stalls": stalls | (second_largest > MOST_AT_END),
    }


def reading_of(metrics: Mapping[str, Tensor], place: int) -> AuditedUpdates:
    """Return the reading of one window."""
    values: dict[str, Any] = {name: metric[place].item() for name, metric in metrics.items()}
    return AuditedUpdates(**values)


class Auditor:
    """Audit one optimizer's tensors.

    Attributes:
        fresh: the samples that the last step audited, and the ``UPDATE_SUMS`` of their tensors with
            its number, float64 ``[tensors, 9]``. They may still be in flight on a device.
        last: the sums of all tensors of the last step; ``None`` if it was not audited.
        alarms: of the last step.
        windows: the last sums of each tensor, as :func:`read` takes them.
        places: those of the tensors in ``windows``. ``None`` stands for all together.
    """

    def __init__(self) -> None:
        self.fresh: list[tuple[AuditSample, HostCopy]] = []
        self.last: Tensor | None = None
        self.alarms: list[Alarm] = []
        size = 0, WINDOW, len(UPDATE_SUMS) + 1
        self.windows = torch.zeros(size, dtype=torch.float64, device="cpu")
        self.places: dict[Tensor | None, int] = {}
        self._stalled: set[int] = set()
        self._samples: dict[Tensor, AuditSample] = {}  # by the first of their tensors

    def before(self, batch: Batch, every: int) -> AuditSample | None:
        """Read what the next step reads of a sample. When it has written, compare it, and put its
        sums into ``fresh``.
        """
        is_audited = (batch.num_steps + 1) % every == 0
        if not is_audited and not batch.kernel.cuts_states:
            return None
        sample = self._samples.get(batch.owners[0])
        if not sample or sample.key != (batch.key, batch.num_steps // TURN):
            sample = self._samples[batch.owners[0]] = AuditSample(batch)
        sample.follow(batch, is_audited)
        return sample

    def _append(self, owners: Sequence[Tensor | None], sums: Tensor) -> list[int]:
        """Put the sums and the number of a step in the place of the oldest ones. Return the places of
        tensors.
        """
        places = [self.places.setdefault(owner, len(self.places)) for owner in owners]
        num_new = len(self.places) - len(self.windows)
        if num_new:
            empty = self.windows.new_zeros(num_new, *self.windows.shape[1:])
            self.windows = torch.cat([self.windows, empty])
        oldest = self.windows[places, :, -1].argmin(1)
        self.windows[places, oldest] = sums
        return places

    def collect(self, names_of: Callable[[], Mapping[Tensor, str]]) -> list[Alarm]:
        """Move the new sums into the windows. Return the tensors that begin to stall.

        In a healthy run no name is asked for.
        """
        self.alarms = []
        self.last = None
        if not self.fresh:
            return []
        owners = []
        storages = []
        rows = []
        for sample, copy in self.fresh:
            owners += sample.owners
            storages += [sample.storage] * len(sample.owners)
            rows.append(copy.cpu())
        self.fresh = []
        sums = torch.cat(rows)
        total = sums.sum(0)
        self.last = total[:-1].clone()
        total[-1] = sums[:, -1].amax()
        places = self._append(owners, sums)
        self._append([None], total[None])
        metrics = read(self.windows[places])
        # A stochastic storage stores rare updates on average, and a window may contain few.
        is_rare = (metrics["at_end"] <= MOST_AT_END) & (metrics["num_moved"] < FEWEST_MOVED)
        self._stalled -= {places[x] for x in (~metrics["stalls"]).nonzero()}
        for number in metrics["stalls"].nonzero()[:, 0].tolist():
            storage = storages[number]
            is_chance = is_rare[number] and storage.weight.rounding == "stochastic"
            if places[number] not in self._stalled and not is_chance:
                self._stalled.add(places[number])
                name = names_of().get(owners[number], "")
                reading = reading_of(metrics, number)
                self.alarms.append(Alarm(name, storage.name, storage.fallback, reading))
        return self.alarms


def warn_of(alarms: Sequence[Alarm]) -> None:
    """Warn once, about the worst alarm. This is the default of ``Optimizer.on_alarm``."""
    worst = min(alarms, key=lambda alarm: alarm.reading.edq)
    message = f"Of {len(alarms)} tensors that lose updates, {worst.message}"
    warn_caller(message, UpdateLossWarning)


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
        lines = [HEAD]
        for name, reading in [*rows[: self.LINES], (f"all {len(self)} tensors", self.total)]:
            lines.append(f"{LINE.format(reading).replace('nan', '  –')}  {name}")
        return "\n".join(lines)


HEAD = "    EDQ      ±  updates lost    noise  audits  last step  tensor"
LINE = (
    "{0.edq:7.3f}{0.edq_error:7.3f}{0.lost_fraction:14.1%}{0.noise:9.3f}"
    "{0.num_audits:8}{0.last_step:11}"
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
            EDQ      ±  updates lost    noise  audits  last step  tensor
          0.000  0.000        100.0%    1.000       3          3  param 0
          0.000  0.000        100.0%    1.000       3          3  all 1 tensors
        >>> ng.audit(optimizer)["param 0"].lost_fraction
        1.0
    """
    inner = unwrapped_optimizer(optimizer)
    auditor = getattr(inner, "auditor", None)
    if not isinstance(auditor, Auditor):
        raise RecipeError(
            f"Cannot audit {type(inner).__name__}, because it does not audit its steps.",
            "Use a Narrowgauge optimizer.",
        )
    if model is not None:
        inner.name_parameters(model)
    inner.finish_step()
    names = inner.parameter_names()
    metrics = read(auditor.windows)
    readings = Audit()
    for tensor, place in auditor.places.items():
        if tensor is None:
            readings.total = reading_of(metrics, place)
        elif tensor in names:  # it may have left since the last step
            readings[names[tensor]] = reading_of(metrics, place)
    return readings
