"""Replicated gradients: those of a replicated model, of parameters that FSDP2 ignores, and of DDP's buckets.

They are copied into flat buckets of one dtype, and the buckets are summed. The layout of the buckets holds every trainable
parameter in the model's order, whether it has a gradient or not, so that it is the same on all ranks and in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge import torch_names
from narrowgauge.distributed.exchanges import Exchange, RankGrid
from narrowgauge.distributed.order_invariance import is_filled, refuse_unsent, require_first
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of

BUCKET_BYTES = 32 << 20
"""What is copied and summed at a time: large enough that latency does not count, small beside a model."""


def in_buckets(parameters: Iterable[Tensor], dtypes: Mapping[Tensor, torch.dtype]) -> list[list[Tensor]]:
    """Parameters in buckets of one dtype of their sums and one device, in order, of at most :data:`BUCKET_BYTES` of parameters.

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
    """Parameters whose gradients are summed after the backward pass.

    Args:
        parameters: the replicated ones, in the same order on all ranks.
        make: makes the exchange of a bucket.
        dtypes: of gradients that are summed in another dtype than their parameter's.
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
        """Add ``p.grad``, unless absent; after the last micro-batch write the sums to it, before that set it to ``None``."""
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
        """Which parameters had a gradient on any rank in any micro-batch."""
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


@dataclass
class _Pass:
    """A backward pass: the parameters whose gradients it has computed, and the gradients from before it."""

    arrived: set[Tensor] = field(default_factory=set)
    before: dict[Tensor, Tensor] = field(default_factory=dict)


class SumAfterBackward:
    """Sums gradients at the end of each backward pass that nothing surrounds, and adds to those from before it.

    A pass sums what it has computed itself: gradients of an earlier pass have been summed. A pass may run inside another, as
    reentrant checkpointing does.

    Args:
        is_inside: whether the gradients of the current pass are summed elsewhere.
        check: called before a sum with what its gradients would be added to; raises where there must be no sum.
    """

    def __init__(
        self, replicated: Replicated, is_inside: Callable[[], bool], check: Callable[[Iterable[Tensor]], None]
    ) -> None:
        self._replicated, self._is_inside, self._check = replicated, is_inside, check
        self._passes: dict[int, _Pass] = {}

    def install(self) -> list[Callable[[], None]]:
        """Attach to the parameters; returns what detaches."""
        undo: list[Callable[[], None]] = []
        for parameter in self._replicated.parameters:
            undo.append(parameter.register_hook(partial(self.set_aside, parameter)).remove)
            undo.append(parameter.register_post_accumulate_grad_hook(self._note).remove)
        return undo

    def discard(self) -> None:
        self._passes.clear()

    def set_aside(self, parameter: Tensor, _: Tensor | None = None) -> None:
        """Keep the gradient from before the pass that is under way, which is about to compute another."""
        if not self._is_inside() and parameter.grad is not None:
            this = self._passes.setdefault(torch_names.current_backward(), _Pass())
            this.before[parameter] = parameter.grad
            parameter.grad = None

    def _note(self, parameter: Tensor) -> None:
        if self._is_inside():
            return
        number = torch_names.current_backward()
        this = self._passes.setdefault(number, _Pass())
        if not this.arrived:
            torch_names.queue_after_backward(partial(self._sum, number))
        this.arrived.add(parameter)

    @torch.no_grad()
    def _sum(self, number: int) -> None:
        this = self._passes.pop(number)
        self._check(this.before[p] for p in this.arrived if p in this.before)
        for parameter in self._replicated.parameters:
            if parameter.grad is not None and parameter not in this.arrived:
                this.before[parameter] = parameter.grad
                parameter.grad = None
        self._replicated.add()
        for parameter, gradient in this.before.items():
            parameter.grad = gradient if parameter.grad is None else gradient.add_(parameter.grad)


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
    """Sums each bucket when DDP has filled it.

    DDP fills it with all that a gradient holds: what was accumulated in ``no_sync()``, and also what it has summed before.
    An average of that, averaged again, does not change; a sum would be multiplied by the number of ranks, and so is refused.

    Args:
        make: makes the exchange of a bucket.
        is_inside: whether the gradients of the current pass are summed elsewhere: they are left as they are.
        average: whether sums are divided by the number of ranks.
        sums_leaves: whether each pass's gradients must enter the sum separately.
    """

    def __init__(
        self, make: Callable[[], Exchange], is_inside: Callable[[], bool], average: bool, sums_leaves: bool
    ) -> None:
        self._make, self._is_inside, self._average, self._sums_leaves = make, is_inside, average, sums_leaves
        self._exchanges: dict[int, Exchange] = {}
        self._summed: set[Tensor] = set()

    def install(self, model: Any) -> list[Callable[[], None]]:
        """Attach to a DistributedDataParallel without a communication hook, which keeps ours; returns what detaches the rest."""

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
