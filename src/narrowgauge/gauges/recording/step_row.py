"""The row of a step: the loop's values, and readings of the clock, the optimizer and the
low-precision layers.

:class:`StepReader` makes every row of ``steps.jsonl``, for every loop. A loop says when a step
begins and passes its values. All else is read here.
"""

from __future__ import annotations

import hashlib
import math
import time
from statistics import fmean
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.distributed.reduction import reduction_of
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.metrics import UPDATE_SUMS
from narrowgauge.optim.audit import figures_of, unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.schema import STEP, Row
from narrowgauge.torch_support.torch_hooks import members_of


class StepReader:
    """Make the row of each step of a loop, with the readings of its optimizer, if it has one.

    Args:
        model: the optimizer's.
        optimizer: one of Narrowgauge's or of ``torch.optim``'s, possibly in a framework's wrapper.
            Only ours has an audit.

    Attributes:
        ours: the optimizer, if it is one of Narrowgauge's.
        was_skipped: our optimizer skipped the last step itself.
        scale: the loss scale of the current step.
    """

    def __init__(self, model: nn.Module | None = None, optimizer: Any = None) -> None:
        self.optimizer: torch.optim.Optimizer | None = (
            None if optimizer is None else unwrapped(optimizer)
        )
        self.model = model
        self.ours = self.optimizer if isinstance(self.optimizer, Optimizer) else None
        self.was_skipped = False
        self.begin()

    def begin(self) -> None:
        """Begin a step: note the time, and the state of the optimizer."""
        self.restart_clock()
        self.scale = 1.0
        if self.ours is None:
            return
        self._num_skipped = self.ours.num_skipped
        self._num_calls = self.ours.num_calls
        if self.ours.loss_scaler is not None:
            self.scale = float(self.ours.loss_scaler.scale_tensor)

    def restart_clock(self) -> None:
        """Do not count the time since the step began."""
        self._began = time.perf_counter()

    def row(self, step: int, columns: Row, tokens_before: int = 0) -> Row:
        """Return the row of ``steps.jsonl`` for the last step.

        The ``columns`` replace columns read here. Known columns come first. ``tokens`` and
        ``tokens_before`` count from the start of the run.
        """
        seconds = time.perf_counter() - self._began
        row: Row = {"step": step, "seconds": seconds, **self._read(), **columns}
        if row.get("tokens") is not None and row["seconds"]:
            row.setdefault("tokens_per_second", (row["tokens"] - tokens_before) / row["seconds"])
        first = {name: row[name] for name in STEP if name in row}
        return first | row

    def _read(self) -> Row:
        """Return the last step's columns of the optimizer and the layers."""
        if self.optimizer is None:
            return {}
        group = self.optimizer.param_groups[0]
        row: Row = (
            {} if group["lr"] is None else {"lr": float(group["lr"])}
        )  # Adafactor may have none
        if torch.cuda.is_available():
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        reduction = None if self.model is None else reduction_of(self.model)
        if reduction is not None and reduction.size > 1:
            seconds = all_ranks().gather(reduction.seconds())
            row |= {
                "communication_seconds": fmean(seconds),
                "wait_seconds": fmean(seconds) - min(seconds),
            }
        if self.ours is None:
            return row
        self.ours.settle()
        self.was_skipped = self.ours.num_skipped > self._num_skipped
        row["skipped"] = self.was_skipped or self.ours.num_calls == self._num_calls
        if self.ours.grad_norm is not None:
            row["grad_norm"] = float(self.ours.grad_norm)
        if self.ours.loss_scaler is not None:
            row["loss_scale"] = float(self.ours.loss_scaler.scale_tensor)
        sums = self.ours.last_audit
        self.ours.last_audit = None
        if sums is not None:
            sums = sums.to("cpu", torch.float64)
            row |= {
                **figures_of(sums),
                "audit_sums": dict(zip(UPDATE_SUMS, sums.tolist(), strict=True)),
            }
        return row

    def bytes_per_param(self) -> float | None:
        """Return the bytes of weights, gradients and states per parameter, as our optimizers count
        them.
        """
        if self.optimizer is None or self.ours is not None:
            return None if self.ours is None else self.ours.bytes_per_param()
        parameters = members_of(self.optimizer)
        states = [
            t
            for p in parameters
            for t in self.optimizer.state.get(p, {}).values()
            if isinstance(t, Tensor)
        ]
        local = [local_of(t) for t in (*parameters, *parameters, *states)]
        total: int = sum(t.numel() * t.element_size() for t in local)
        number: int = sum(local_of(p).numel() for p in parameters)
        return total / max(1, number)


def batch_checksum(batch: np.ndarray) -> str:
    """Return a 64-bit checksum of a step's tokens: the sum of a hash of each sequence.

    Example:
        >>> batch_checksum(np.zeros((2, 3), dtype=np.int64)) == batch_checksum(np.ones((2, 3), dtype=np.int64))
        False
    """
    hashes = (
        hashlib.blake2b(row.tobytes(), digest_size=8).digest()
        for row in np.atleast_2d(batch).astype(np.uint32)
    )
    return f"{sum(int.from_bytes(number, 'big') for number in hashes) % 2**64:016x}"


# ── messages about a step ─────────────────────────────────────────────────────────────────────────


def why_skipped(optimizer: Optimizer, ranks: Ranks) -> str:
    """Return which gradient overflowed in the last step, and the new loss scale.

    All ranks call it.
    """
    # A rank knows of the rows that it holds.
    names = list(
        dict.fromkeys(
            name for overflow in ranks.gather(optimizer.last_overflow) for name in overflow
        )
    )
    scaler = optimizer.loss_scaler
    where = (
        f" in '{names[0]}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
        if names
        else ""
    )
    scale = "" if scaler is None else f"; the loss scale is now {float(scaler.scale_tensor):g}"
    return f"gradients are not finite{where}; no weight changed{scale}"


def is_finite(row: Row) -> bool:
    """Return whether a step's loss and gradient norm are finite. Unknown values count as finite."""
    return all(row.get(name) is None or math.isfinite(row[name]) for name in ("loss", "grad_norm"))


def symptom(row: Row) -> str:
    """Describe the failure of a step, without a full stop."""
    return f"the loss is {row.get('loss', math.nan):g} and the gradient norm {row.get('grad_norm')}"
