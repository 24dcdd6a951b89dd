"""DistributedDataParallel's buckets: flat gradients, summed by an exchange each, in place of its own all-reduce."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from narrowgauge.distributed.addends import is_filled, refuse_unsent, require_first
from narrowgauge.distributed.exchanges import Exchange
from narrowgauge.errors import RecipeError


class BucketSums:
    """Sums each bucket when DDP has filled it.

    DDP fills it with all that a gradient holds: what was accumulated in ``no_sync()``, and also what it has summed before.
    Averaged again that is itself; added up it would be multiplied by the number of ranks, and so is refused.

    Args:
        make: makes the exchange of a bucket.
        is_inside: whether somebody else sums the gradients of the pass that is under way: they are left as they are.
        average: whether sums are divided by the number of ranks.
        sums_leaves: whether each pass's gradients must enter the sum by themselves.
    """

    def __init__(
        self, make: Callable[[], Exchange], is_inside: Callable[[], bool], average: bool, sums_leaves: bool
    ) -> None:
        self._make, self._is_inside, self._average, self._sums_leaves = make, is_inside, average, sums_leaves
        self._exchanges: dict[int, Exchange] = {}
        self._summed: set[Tensor] = set()

    def install(self, model: Any) -> list[Callable[[], None]]:
        """Attach to a DistributedDataParallel, which keeps its hook; returns what detaches the rest.

        Raises:
            RecipeError: it has a communication hook.
        """

        def sum_bucket(_: object, bucket: Any) -> torch.futures.Future[Tensor]:
            return self._sum(bucket)

        sum_bucket.__annotations__.clear()  # DDP compares them with types, and here they are text
        try:
            model.register_comm_hook(None, sum_bucket)
        except RuntimeError as error:
            raise RecipeError(
                "a reduction was requested for a DistributedDataParallel that has a communication hook, and it cannot have two.",
                "Wrap the model anew.",
            ) from error
        trainable = [p for p in model.parameters() if p.requires_grad]
        undo = []
        if self._sums_leaves:
            undo += [
                parameter.register_hook(partial(self._check_leaf, model, parameter)).remove for parameter in trainable
            ]
        if not self._average:
            undo += [parameter.register_hook(partial(self._check, parameter)).remove for parameter in trainable]
        return undo

    def _sum(self, bucket: Any) -> torch.futures.Future[Tensor]:
        flat: Tensor = bucket.buffer()
        if not self._is_inside():
            index = bucket.index()
            if index not in self._exchanges:
                self._exchanges[index] = self._make()
            self._exchanges[index].take(flat, flat)
            self._summed.update(bucket.parameters())
        done: torch.futures.Future[Tensor] = torch.futures.Future()
        done.set_result(flat)
        return done

    def _check_leaf(self, model: Any, parameter: Tensor, _: Tensor) -> None:
        if self._is_inside():
            return
        if not model.require_backward_grad_sync:
            refuse_unsent("no_sync() of DistributedDataParallel")
        require_first([] if parameter.grad is None else [parameter.grad])

    def _check(self, parameter: Tensor, _: Tensor) -> None:
        if parameter.grad is None or self._is_inside():
            self._summed.discard(parameter)
        elif parameter in self._summed and is_filled(parameter.grad):
            raise RecipeError(
                "a backward pass was begun with gradients that have been added up over ranks, and DistributedDataParallel "
                "would add them up again.",
                "Call zero_grad(set_to_none=True) after each step; accumulate in no_sync() or in micro_batch().",
            )
