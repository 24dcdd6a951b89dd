"""What a record has beside the hooks' numbers: readings of the optimizer and the ranks, and the summary
of all steps.
"""

from __future__ import annotations

import hashlib
from statistics import fmean, median_high

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import reduction_of
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.metrics import UPDATE_SUMS
from narrowgauge.optim.audit import figures_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.torch_support.torch_hooks import members_of


def columns_of(model: nn.Module, optimizer: torch.optim.Optimizer) -> Row:
    """Return the columns of the last step that the ranks and an optimizer of ours hold."""
    row: Row = {}
    if torch.cuda.is_available():
        row["peak_memory_bytes"] = torch.cuda.max_memory_allocated()
    reduction = reduction_of(model)
    if reduction is not None and reduction.size > 1:
        seconds = all_ranks().gather(reduction.seconds())
        row["communication_seconds"] = fmean(seconds)
        row["wait_seconds"] = fmean(seconds) - min(seconds)
    if not isinstance(optimizer, Optimizer):
        return row
    optimizer.settle()
    for name in ("grad_norm", "loss_scale"):
        value = getattr(optimizer, name)
        if value is not None:
            row[name] = float(value)
    if optimizer.last_audit is not None:
        sums = optimizer.last_audit.to("cpu", torch.float64)
        optimizer.last_audit = None
        row |= figures_of(sums)
        row["audit_sums"] = dict(zip(UPDATE_SUMS, sums.tolist(), strict=True))
    return row


def bytes_per_param(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of weights, gradients and states per parameter, as our optimizers count them."""
    if isinstance(optimizer, Optimizer):
        return optimizer.bytes_per_param()
    size = 0
    count = 0
    for p in members_of(optimizer):
        states = [x for x in optimizer.state.get(p, {}).values() if isinstance(x, Tensor)]
        count += local_of(p).numel()
        size += sum(local_of(x).nbytes for x in (p, p, *states))
    return size / max(1, count)


def batch_checksum(batch: Tensor) -> str:
    """Return a 64-bit checksum of a step's tokens or inputs on all ranks: the sum of a hash of each
    sequence.

    Example:
        >>> batch_checksum(torch.zeros(2, 3)) == batch_checksum(torch.ones(2, 3))
        False
    """
    values = batch.detach().cpu()
    if values.is_floating_point():
        values = values.float().view(torch.int32)  # the bits
    total = 0
    for row in values.to(torch.int32).reshape(-1, values.shape[-1]).numpy():
        total += int.from_bytes(hashlib.blake2b(row.tobytes(), digest_size=8).digest(), "big")
    return f"{sum(all_ranks().gather(total)) % 2**64:016x}"


def summary_of(run: Run) -> Row:
    """Return what the rows of a run say of all of it, so that a resume does not change it."""
    total = torch.zeros(len(UPDATE_SUMS), dtype=torch.float64, device="cpu")
    summary: Row = {"num_skipped": 0}
    rates = []
    memory = []
    for row in run.steps:
        sums = row.get("audit_sums")
        if sums:
            total += total.new_tensor([sums.get(name, 0.0) for name in UPDATE_SUMS])
        if row.get("tokens_per_second") is not None:
            rates.append(row["tokens_per_second"])
        memory.append(row.get("peak_memory_bytes") or 0)
        summary["num_skipped"] += bool(row.get("skipped"))
    losses = [row["val_loss"] for row in run.evals if row.get("val_loss") is not None]
    if losses:
        summary["val_loss"] = losses[-1]
    if any(memory):
        summary["step_memory_bytes"] = max(memory)
    if rates:
        summary["tokens_per_second"] = median_high(rates)
    return summary | figures_of(total)
