"""Sum replicated gradients: of a replicated model, of parameters that FSDP2 ignores, and of DDP's buckets.

Gradients are copied into flat buckets of one dtype, and the buckets are summed. The buckets cover every trainable parameter in
the model's order, with or without a gradient. So the layout is the same on all ranks and in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.exchanges import Exchange, RankGrid
from narrowgauge.distributed.order_invariance import is_filled, refuse_unsent, require_first
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of

BUCKET_BYTES = 32 << 20
"""What is copied and summed at a time: large enough that latency does not count, small beside a model."""


def in_buckets(parameters: Iterable[Tensor], dtypes: Mapping[Tensor, torch.dtype]) -> list[list[Tensor]]:
    """Group parameters into buckets with one sum dtype and one device, in order, up to :data:`BUCKET_BYTES` of parameters.

    A single parameter may be larger.
    """
    buckets: list[list[Tensor]] = []
    kinds: dict[Any, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind = (dtypes.get(parameter, parameter.dtype), parameter.device)
        size = local_of(parameter).numel() * parameter.element_size()
        bucket, filled = kinds.get(kind, ([], BUCKET_BYTES))
        if filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        kinds[kind] = (bucket, filled + size)
    return buckets


class Replicated:
    """Sum the gradients of parameters after the backward pass.

    Args:
        parameters: the replicated parameters, in the same order on all ranks.
        make: makes the exchange of a bucket.
        dtypes: the sum dtype of gradients where it is not the parameter's.
    """

    def __init__(
        self,
        parameters: Sequence[Tensor],
        grid: RankGrid,
        make: Callable[[RankGrid], Exchange],
        dtypes: Mapping[Tensor, torch.dtype],
    ) -> None:
        self.parameters, self.grid, self._dtypes = list(parameters), grid, dtypes
        self.buckets = [(bucket, make(grid)) for bucket in in_buckets(parameters, dtypes)]
        self._used = torch.zeros(len(self.parameters), dtype=torch.uint8)

    @torch.no_grad()
    def add(self, *, is_absent: bool = False, is_last: bool = True) -> None:
        """Add ``p.grad``, unless absent. Set it to ``None``, or after the last micro-batch to the sum."""
        if not self.parameters:
            return
        gradients = [None if is_absent else p.grad for p in self.parameters]
        self._used |= torch.tensor([g is not None for g in gradients], dtype=torch.uint8)
        used = self._used_anywhere() if is_last else {}
        for bucket, exchange in self.buckets:
            total = self._add_bucket(bucket, exchange, is_absent, is_last)
            if is_last:
                self._hand_out(bucket, total, used)
            else:
                for parameter in bucket:
                    parameter.grad = None
        if is_last:
            self._used.zero_()

    def discard(self) -> None:
        self._used.zero_()
        for _, exchange in self.buckets:
            exchange.discard()

    def _used_anywhere(self) -> dict[Tensor, bool]:
        """Return which parameters had a gradient on any rank in any micro-batch."""
        used = self._used
        if self.parameters and self.grid.size > 1:
            used = used.to(self.parameters[0].device)
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.grid.group)
        return dict(zip(self.parameters, used.bool().tolist(), strict=True))

    def _add_bucket(self, bucket: Sequence[Tensor], exchange: Exchange, is_absent: bool, is_last: bool) -> Tensor:
        sizes = [local_of(p).numel() for p in bucket]
        dtype = self._dtypes.get(bucket[0], bucket[0].dtype)
        flat = torch.empty(sum(sizes), dtype=dtype, device=bucket[0].device)
        for parameter, part in zip(bucket, flat.split(sizes), strict=True):
            if is_absent or parameter.grad is None:
                part.zero_()
            else:
                part.copy_(_dense(parameter.grad).reshape(-1))
        exchange.take(flat, flat, is_last=is_last)
        return flat

    def _hand_out(self, bucket: Sequence[Tensor], total: Tensor, used: dict[Tensor, bool]) -> None:
        sizes = [local_of(p).numel() for p in bucket]
        for parameter, part in zip(bucket, total.split(sizes), strict=True):
            if not used[parameter]:
                parameter.grad = None
                continue
            if parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
            gradient = local_of(parameter.grad)
            gradient.copy_(part.view(gradient.shape))


def _dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise RecipeError(
            f"a gradient of shape {tuple(gradient.shape)} is sparse, and gradients are summed across ranks in flat buckets.",
            "Make the embedding with sparse=False.",
        )
    return local_of(gradient)


# ── the buckets of DistributedDataParallel ─────────────────────────────────────────────────────────────────────────────
#
# Flat gradients, each summed by an exchange in place of DDP's own all-reduce.


class BucketSums:
    """Sum each bucket when DDP has filled it.

    DDP fills it with the whole gradient: what ``no_sync()`` accumulated, and what was summed before. Averaging an average again
    changes nothing. A sum would be multiplied by the number of ranks, so it is refused.

    Args:
        make: makes the exchange of a bucket.
        is_inside: the current pass's gradients are summed elsewhere; leave them unchanged.
        average: divide sums by the number of ranks.
        sums_leaves: each pass's gradients must enter the sum separately.
    """

    def __init__(
        self, make: Callable[[], Exchange], is_inside: Callable[[], bool], average: bool, sums_leaves: bool
    ) -> None:
        self._make, self._is_inside, self._average, self._sums_leaves = make, is_inside, average, sums_leaves
        self._exchanges: dict[int, Exchange] = {}
        self._summed: set[Tensor] = set()

    def install(self, model: Any) -> list[Callable[[], None]]:
        """Attach to a DistributedDataParallel without a communication hook. Return functions that detach all but that hook."""

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
