"""The row of a step: the loop's values, and readings of the clock, the optimizer and the
low-precision layers.

:class:`StepReader` makes every row of ``steps.jsonl``, for every loop. A loop says when a step
begins and passes its values. All else is read here.
"""

from __future__ import annotations

import hashlib
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
        self.optimizer: torch.optim.Optimizer | None = None
        self.ours: Optimizer | None = None
        if optimizer is not None:
            self.optimizer = unwrapped(optimizer)
        if isinstance(self.optimizer, Optimizer):
            self.ours = self.optimizer
        self.model = model
        self.was_skipped = False
        self.begin()

    def begin(self) -> None:
        """Begin a step: note the time, and the state of the optimizer."""
        self.restart_clock()
        if self.ours is None:
            return
        self._num_skipped = self.ours.num_skipped
        self._num_calls = self.ours.num_calls

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
        row: Row = {}
        rate = self.optimizer.param_groups[0].get("lr")
        if rate is not None:  # Adafactor may have none, and a container has none
            row["lr"] = float(rate)
        if torch.cuda.is_available():
            row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
        reduction = None if self.model is None else reduction_of(self.model)
        if reduction is not None and reduction.size > 1:
            seconds = all_ranks().gather(reduction.seconds())
            row["communication_seconds"] = fmean(seconds)
            row["wait_seconds"] = fmean(seconds) - min(seconds)
        if self.ours is not None:
            row |= self._read_ours(self.ours)
        return row

    def _read_ours(self, optimizer: Optimizer) -> Row:
        optimizer.settle()
        self.was_skipped = optimizer.num_skipped > self._num_skipped
        is_taken = optimizer.num_calls > self._num_calls and not self.was_skipped
        row: Row = {"skipped": not is_taken}
        if optimizer.grad_norm is not None:
            row["grad_norm"] = float(optimizer.grad_norm)
        if optimizer.loss_scale is not None:
            row["loss_scale"] = float(optimizer.loss_scale)
        if optimizer.last_audit is not None:
            sums = optimizer.last_audit.to("cpu", torch.float64)
            optimizer.last_audit = None
            row |= figures_of(sums)
            row["audit_sums"] = dict(zip(UPDATE_SUMS, sums.tolist(), strict=True))
        return row

    def bytes_per_param(self) -> float | None:
        """Return the bytes of weights, gradients and states per parameter, as our optimizers count
        them.
        """
        if self.ours is not None:
            return self.ours.bytes_per_param()
        if self.optimizer is None:
            return None
        size = 0
        count = 0
        for p in members_of(self.optimizer):
            states = [x for x in self.optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
            count += local_of(p).numel()
            for x in map(local_of, (p, p, *states)):
                size += x.numel() * x.element_size()
        return size / max(1, count)


def batch_checksum(batch: np.ndarray) -> str:
    """Return a 64-bit checksum of a step's tokens: the sum of a hash of each sequence.

    Example:
        >>> batch_checksum(np.zeros((2, 3), dtype=np.int64)) == batch_checksum(np.ones((2, 3), dtype=np.int64))
        False
    """
    total = 0
    for row in np.atleast_2d(batch).astype(np.uint32):
        digest = hashlib.blake2b(row.tobytes(), digest_size=8).digest()
        total += int.from_bytes(digest, "big")
    return f"{total % 2**64:016x}"


# ── messages about a step ─────────────────────────────────────────────────────────────────────────


def why_skipped(optimizer: Optimizer, ranks: Ranks) -> str:
    """Return which gradient overflowed in the last step, and the new loss scale.

    All ranks call it.
    """
    # A rank knows of the rows that it holds.
    names: dict[str, None] = {}
    for overflow in ranks.gather(optimizer.last_overflow):
        names |= dict.fromkeys(overflow)
    message = "gradients are not finite"
    if names:
        message += f" in '{next(iter(names))}'"
    if len(names) > 1:
        message += f" and {len(names) - 1} more"
    message += "; no weight changed"
    if optimizer.loss_scale is not None:
        message += f"; the loss scale was {float(optimizer.loss_scale):g}"
    return message
