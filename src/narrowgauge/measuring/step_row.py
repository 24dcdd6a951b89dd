"""What a record has beside the hooks' numbers: readings of the optimizer and the ranks, and the summary
of all steps.
"""

from __future__ import annotations

from collections import defaultdict
from statistics import fmean, median

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import reduction_of
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.numerics.metrics import update_metrics
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
    sums = optimizer.auditor.last
    if sums is not None:
        for name, metric in update_metrics(sums).items():
            row[name] = None if metric.isnan() else float(metric)
        optimizer.auditor.last = None
    return row


def bytes_per_param(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of weights, gradients and states per parameter, as our optimizers count them."""
    if isinstance(optimizer, Optimizer):
        return optimizer.bytes_per_param()
    size = 0
    count = 0
    for p in members_of(optimizer):
        count += local_of(p).numel()
        for x in (p, p, *optimizer.state.get(p, {}).values()):
            if isinstance(x, Tensor):
                size += local_of(x).nbytes
    return size / max(1, count)


def summary_of(run: Run) -> Row:
    """Return what the rows of a run say of all of it, so that a resume does not change it.

    The EDQ is the median of the last tenth of the audits: large first steps would dominate a sum.
    """
    columns: dict[str, list[float]] = defaultdict(list)
    for row in (*run.steps, *run.evals):
        for name, value in row.items():
            if value is not None:
                columns[name].append(value)
    audits = columns["edq"]
    reduced = {
        "val_loss": columns["val_loss"][-1:],
        "step_memory_bytes": sorted(columns["peak_memory_bytes"])[-1:],
        "tokens_per_second": columns["tokens_per_second"],
        "edq": audits[-max(3, len(audits) // 10) :],
    }
    summary: Row = {"num_skipped": sum(map(bool, columns["skipped"]))}
    return summary | {name: median(values) for name, values in reduced.items() if values}
