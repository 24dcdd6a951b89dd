"""Delayed scales on several ranks: those that train together max-reduce their amax histories, so that all use the same scales.

A step's backward passes are over when the optimizer steps, so that is when the histories are reduced. Two frameworks call
:func:`sync_amax` themselves: Lightning, whose optimizers run the backward passes in a closure, and Hugging Face's Trainer, where
DDP copies buffers between micro-batches.
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
    """Max-reduce the amax histories of narrow layers over the ranks that train together, if there are several; they all call it.

    These are the ranks of the optimizer's reduction, else those that the model is sharded over, else all.
    """
    if all_ranks().size > 1:
        linears.join_histories(_largest(model, optimizer))


def sync_amax_before_steps(model: nn.Module, optimizer: Optimizer) -> None:
    """:func:`sync_amax` before each step of a model's optimizer, if the model has narrow layers."""
    if linears_of(model) is not None:
        _hooks[optimizer] = optimizer.register_step_pre_hook(partial(_sync_before_step, model))


def _sync_before_step(model: nn.Module, optimizer: Optimizer, *_: Any) -> None:
    if (linears := linears_of(model)) is not None:
        sync_amax(model, linears, optimizer)


def _largest(model: nn.Module, optimizer: Optimizer | None) -> Callable[[Tensor], Tensor]:
    """Return the elementwise maximum over these ranks."""
    reduction: Any = None if optimizer is None else optimizer.reduction
    if reduction is not None:
        largest: Callable[[Tensor], Tensor] = reduction.largest
        return largest
    mesh = mesh_of(model)
    return largest_of_ranks if mesh is None else partial(add_up, groups=mesh.get_all_groups(), how="max")
