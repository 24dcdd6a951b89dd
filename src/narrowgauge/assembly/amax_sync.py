"""Delayed scales on several ranks: max-reduce the amax histories over ranks that train together, so that scales are equal.

The histories are reduced when the optimizer steps, since the step's backward passes are over then. Two frameworks call
:func:`sync_amax` themselves. Lightning's optimizers run the backward passes in a closure. In Hugging Face's Trainer, DDP copies
buffers between micro-batches.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from narrowgauge.distributed.ranks import all_ranks, largest_of_ranks
from narrowgauge.distributed.sharding import mesh_of
from narrowgauge.matmul.swapping import NarrowLayers, linears_of
from narrowgauge.numerics.dtensor import add_up
from narrowgauge.optim.optimizer import Optimizer

_hooks: weakref.WeakKeyDictionary[Optimizer, RemovableHandle] = weakref.WeakKeyDictionary()


def sync_amax(model: nn.Module, linears: NarrowLayers, optimizer: Optimizer | None = None) -> None:
    """Max-reduce the amax histories of narrow layers over ranks that train together. All of these ranks call it.

    These are the ranks of the optimizer's reduction, else of the model's sharding, else all.
    """
    if all_ranks().size > 1:
        linears.join_histories(_largest(model, optimizer))


def sync_amax_before_steps(model: nn.Module, optimizer: Optimizer) -> None:
    """Call :func:`sync_amax` before each step of a model's optimizer, if the model has narrow layers."""
    if linears_of(model) is not None:
        _hooks[optimizer] = optimizer.register_step_pre_hook(partial(_sync_before_step, model))


def _sync_before_step(model: nn.Module, optimizer: Optimizer, *_: Any) -> None:
    if (linears := linears_of(model)) is not None:
        sync_amax(model, linears, optimizer)


def _largest(model: nn.Module, optimizer: Optimizer | None) -> Callable[[Tensor], Tensor]:
    reduction: Any = None if optimizer is None else optimizer.reduction
    if reduction is not None:
        largest: Callable[[Tensor], Tensor] = reduction.largest
        return largest
    mesh = mesh_of(model)
    return largest_of_ranks if mesh is None else partial(add_up, groups=mesh.get_all_groups(), how="max")
