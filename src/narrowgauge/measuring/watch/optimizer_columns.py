"""What a record has beside the hooks' numbers: readings of the optimizer and the ranks, and the summary
of all steps.
"""

from __future__ import annotations

import math
from itertools import chain
from statistics import fmean, median

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import reduction_of
from narrowgauge.measuring.diagnose.update_laws import late
from narrowgauge.numerics.metrics import UPDATE_SUMS, update_metrics
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
    optimizer.finish_step()
    for name in ("grad_norm", "loss_scale"):
        value = getattr(optimizer, name)
        if value is not None:
            row[name] = float(value)
    sums = optimizer.auditor.last
    if sums is not None:
        for name, metric in update_metrics(sums).items():
            row[name] = None if metric.isnan() else float(metric)
        if row["edq"] is not None:
            row["edq_error"] = edq_error(sums, is_random=_rounds_at_random(optimizer))
        row["stalled"] = {alarm.tensor: alarm.reading.edq for alarm in optimizer.auditor.alarms}
        optimizer.auditor.last = None
    return row


def edq_error(sums: Tensor, is_random: bool) -> float:
    """Return the standard error of the EDQ of an audit.

    The errors of its elements are independent. Few elements move where a random rounding stores few
    changes, and then their number is as uncertain as its root.

    Args:
        sums: the ``UPDATE_SUMS`` of the audit.
        is_random: a storage rounds at random.
    """
    intended = float(sums[UPDATE_SUMS.index("nonzero")])
    moved = intended - float(sums[UPDATE_SUMS.index("lost")])
    error = float(update_metrics(sums)["noise"]) / math.sqrt(intended)
    return max(error, 1 / math.sqrt(1 + moved)) if is_random else error


def _rounds_at_random(optimizer: Optimizer) -> bool:
    storages = map(optimizer.storage_of, members_of(optimizer))
    return any(storage.weight.rounding == "stochastic" for storage in storages)


def summary_of(run: Run) -> Row:
    """Return what the rows of a run say of all of it, so that a resume does not change it."""

    def values(name: str) -> list[float]:
        rows = chain(run.steps, run.evals)
        return [row[name] for row in rows if row.get(name) is not None]

    reduced = {
        "val_loss": values("val_loss")[-1:],
        "step_memory_bytes": sorted(values("peak_memory_bytes"))[-1:],
        "tokens_per_second": values("tokens_per_second"),
    }
    for name in ("edq", "edq_error"):
        reduced[name] = [late(x) for x in [values(name)] if x]
    summary: Row = {"num_skipped": sum(map(bool, values("skipped")))}
    return summary | {name: median(x) for name, x in reduced.items() if x}
