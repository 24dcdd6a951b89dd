"""Delayed scales on several ranks: max-reduce the amax histories over ranks that train together, so that scales are equal.

The histories are reduced before the optimizer steps. Then the step's backward passes are over.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.numerics.dtensor import add_up
from narrowgauge.optim.optimizer import Optimizer


def sync_amax_before_steps(model: nn.Module, optimizer: Optimizer) -> None:
    """Max-reduce a model's amax histories before each step of its optimizer, if the model has narrow layers.

    The ranks are those of the optimizer's reduction, else all. All of them step together.
    """
    if linears_of(model) is not None:
        optimizer.register_step_pre_hook(partial(_sync, model))


def _sync(model: nn.Module, optimizer: Optimizer, *_: Any) -> None:
    linears, reduction = linears_of(model), optimizer.reduction
    ranks = all_ranks() if reduction is None else reduction
    if linears is not None and ranks.size > 1:
        linears.join_histories(partial(add_up, groups=[ranks.group], how="max"))
