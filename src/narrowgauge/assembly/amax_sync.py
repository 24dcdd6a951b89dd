"""Delayed scales of several ranks: one set for all that train together, as if one process had seen all of their data.

A loop that calls :func:`narrowgauge.prepare` alone (DDP around its model, Accelerate, a plain Trainer) tells nobody when a step's
backward passes are over, so the optimizer's step joins the histories. Frameworks whose hooks say so join them themselves.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn

from narrowgauge.distributed.ranks import all_ranks, largest_of_ranks
from narrowgauge.distributed.sharding import mesh_of
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.numerics.shards import add_up
from narrowgauge.optim.optimizer import Optimizer


def join_histories(model: nn.Module, optimizer: Optimizer) -> None:
    """Let delayed scales take the maximum over the ranks that train together, before each step, where there are several.

    These are the ranks of the optimizer's reduction, else those that the model is sharded over by then, else all.

    Args:
        model: prepared; all of these ranks step it.
        optimizer: of the model.
    """
    narrow = linears_of(model)
    if narrow is None:
        return

    def join(*_: Any) -> None:
        if all_ranks().size > 1:
            narrow.join_histories(_largest(model, optimizer))

    optimizer.register_step_pre_hook(join)


def _largest(model: nn.Module, optimizer: Optimizer) -> Callable[[Tensor], Tensor]:
    """The elementwise maximum over these ranks."""
    if optimizer.reduction is not None:
        largest: Callable[[Tensor], Tensor] = optimizer.reduction.largest
        return largest
    mesh = mesh_of(model)
    return largest_of_ranks if mesh is None else partial(add_up, groups=mesh.get_all_groups(), how="max")
