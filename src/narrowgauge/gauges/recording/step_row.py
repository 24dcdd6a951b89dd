"""What is read after an optimizer step, in the trainer's loop or in a user's: columns of the row, and of the summary."""

from __future__ import annotations

import math
import resource
import statistics
import sys
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from narrowgauge._torch import plain_name
from narrowgauge.analysis.monitor.spikes import Spike
from narrowgauge.distributed.ranks import Ranks
from narrowgauge.matmul.swapping import Linears
from narrowgauge.numerics.scaling import LossScaler
from narrowgauge.optim.audit import figures_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row


def columns_of_step(optimizer: Optimizer, linears: Linears | None, step: int) -> tuple[Row, Tensor | None]:
    """Columns of some steps only, and the sums behind the audit's.

    Args:
        optimizer: after its step, settled; its last audit is taken.
        linears: the model's narrow layers, if it has any.
        step: steps done.
    Returns:
        ``loss_scale``, ``saturated`` and the audit's metrics where they apply; and the audit's float64 ``[8]`` sums.
    """
    columns: Row = {}
    if optimizer.loss_scaler is not None:
        columns["loss_scale"] = float(optimizer.loss_scaler.scale_tensor)
    if linears is not None and (overflows := linears.overflows(step - 1)):
        columns["saturated"] = sum(sum(counts) for counts in overflows.values())
    sums, optimizer.last_audit = optimizer.last_audit, None
    return columns | (figures_of(sums) if sums is not None else {}), sums


def why_skipped(optimizer: Optimizer, ranks: Ranks) -> str:
    """Which gradient overflowed in the last step, and the new loss scale; all ranks call it."""
    # A rank knows of the rows that it holds.
    names = list(dict.fromkeys(name for found in ranks.gather(optimizer.last_overflow) for name in found))
    scaler = optimizer.loss_scaler
    where = f" in '{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "") if names else ""
    scale = "" if scaler is None else f"; the loss scale is now {float(scaler.scale_tensor):g}"
    return f"gradients are not finite{where}; no weight changed{scale}"


def what_saturated(linears: Linears, step: int) -> str:
    """The message for values that exceeded their delayed scale in the last of ``step`` steps."""
    counts = linears.overflows(step - 1)
    name, worst = max(counts.items(), key=lambda item: sum(item[1]))
    operand = ("input", "weight", "gradient")[worst.index(max(worst))]
    return (
        f"{max(worst)} values of the {operand} of '{plain_name(name)}' exceeded their delayed scale and saturated; 'saturated' "
        "is the count of every step"
    )


def summary_of(rows: Iterable[Row], audit_total: Tensor, **known: Any) -> Row:
    """The record of ``summary.json``.

    Args:
        rows: of the run's steps, for its median throughput.
        audit_total: float64 ``[8]``, the audit's sums over the run.
        known: its other columns; those that are ``None`` are left out.
    """
    rates = [row["tokens_per_second"] for row in rows if row.get("tokens_per_second") is not None]
    measured = {
        "tokens_per_second": statistics.median_high(rates) if rates else None,
        **figures_of(audit_total),
    }
    return {name: value for name, value in known.items() if value is not None} | measured


def peak_memory_bytes() -> int:
    """Peak memory so far: of the device's tensors on CUDA, of the process elsewhere."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated()
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit


# ── failed steps ────────────────────────────────────────────────────────────────────────────────────────────────────

FAILURES = 25
"""Failed steps in a row after which a run has diverged."""


class FailedSteps:
    """Counts failed steps in a row.

    Attributes:
        in_a_row: failed steps up to the last one.

    Example:
        >>> failed = FailedSteps()
        >>> for step in range(1, 26):
        ...     row = {"step": step, "loss": float("nan"), "grad_norm": None}
        ...     is_failure = failed.take(row)
        >>> failed.divergence(row, "Lower the learning rate.").message
        'the last 25 steps failed: the loss is nan and the gradient norm None'
    """

    def __init__(self) -> None:
        self.in_a_row = 0

    def take(self, row: Row, scaler: LossScaler | None = None, scale: float = 1.0) -> bool:
        """Count a step; whether it failed.

        Args:
            row: of the step.
            scaler: the optimizer's, if it has one.
            scale: the loss scale in that step, before the scaler took note of it.
        """
        failed = not is_finite(row) and not is_rescaled(row, scaler, scale)
        self.in_a_row = self.in_a_row + 1 if failed else 0
        return failed

    def divergence(self, row: Row, advice: str) -> Event | None:
        """The event of the step with which the run has diverged; ``None`` for every other step.

        Args:
            row: of the step that was counted last.
            advice: what to do.
        """
        if self.in_a_row != FAILURES:
            return None
        return Event("divergence", row["step"], f"the last {FAILURES} steps failed: {symptom(row)}", advice=advice)


def is_finite(row: Row) -> bool:
    """Whether a step's loss and gradient norm are finite, as far as they are known."""
    return all(row.get(name) is None or math.isfinite(row[name]) for name in ("loss", "grad_norm"))


def is_rescaled(row: Row, scaler: LossScaler | None, scale: float) -> bool:
    """Whether the loss scaler handles a step's overflow by lowering the scale; arguments as of :meth:`FailedSteps.take`."""
    return scaler is not None and math.isfinite(row.get("loss") or 0.0) and scale > scaler.floor


def symptom(row: Row) -> str:
    """What was wrong with a step, without a full stop."""
    spike = row.get("spike")
    if spike is None:
        return f"the loss is {row.get('loss', math.nan):g} and the gradient norm {row.get('grad_norm')}"
    return Spike(**spike).message
