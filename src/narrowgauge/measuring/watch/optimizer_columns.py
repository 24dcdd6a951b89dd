"""Columns of a record that the hooks do not give: numbers of the optimizer and the ranks, and the summary
of all steps.
"""

import math
from itertools import chain
from operator import itemgetter
from statistics import fmean, median

import torch
from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.distributed.reduction import reduction_of
from narrowgauge.measuring.diagnose.update_laws import late
from narrowgauge.numerics.metrics import UPDATE_SUMS, update_metrics
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.record import Run
from narrowgauge.spec.tables import Row
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
            row["edq_error"] = _edq_error(sums, row["noise"], optimizer)
        row["stalled"] = {alarm.tensor: alarm.reading.edq for alarm in optimizer.auditor.alarms}
        optimizer.auditor.last = None
    return row


def _edq_error(sums: Tensor, noise: float, optimizer: Optimizer) -> float:
    """Return the standard error of the EDQ of an audit, from its ``UPDATE_SUMS`` and its noise.

    The errors of its elements are independent. Few elements move where a random rounding stores few
    changes, and then their number is as uncertain as its root.
    """
    counts = dict(zip(UPDATE_SUMS, sums.tolist(), strict=True))
    error = noise / math.sqrt(counts["nonzero"])
    for p in members_of(optimizer):
        if optimizer.storage_of(p).weight.rounding == "stochastic":
            return max(error, 1 / math.sqrt(1 + counts["nonzero"] - counts["lost"]))
    return error


def summary_of(run: Run) -> Row:
    """Return what the rows of a run say of all of it, so that a resume does not change it."""

    def values(name: str) -> list[float]:
        return [row[name] for row in chain(run.steps, run.evals) if row.get(name) is not None]

    summary: Row = {"num_skipped": sum(map(bool, values("skipped")))}
    for name, column, reduced in (
        ("val_loss", "val_loss", itemgetter(-1)), ("step_memory_bytes", "peak_memory_bytes", max),
        ("tokens_per_second", "tokens_per_second", median), ("edq", "edq", late),
        ("edq_error", "edq_error", late),
    ):  # fmt: skip
        if values(column):
            summary[name] = reduced(values(column))
    return summary
