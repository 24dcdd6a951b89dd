"""Gradients that every rank has the whole of: those of a replicated model, and of parameters that FSDP2 was told to ignore.

They are copied into flat buckets of one dtype, and the buckets are summed. The layout of the buckets holds every trainable
parameter in the model's order, whether it has a gradient or not, so that it is the same on all ranks and in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.exchanges import Exchange, Parties
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.shards import local_of

BUCKET_BYTES = 32 << 20
"""What is copied and summed at a time: large enough that latency does not count, small beside a model."""


def in_buckets(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Parameters of one dtype and device each, in order, of at most :data:`BUCKET_BYTES` unless one alone is larger."""
    buckets: list[list[Tensor]] = []
    kinds: dict[Any, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
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
        parameters: those that every rank has the whole of, in the same order on all.
        parties: the ranks.
        make: makes the exchange of a bucket.
    """

    def __init__(self, parameters: Sequence[Tensor], parties: Parties, make: Callable[[Parties], Exchange]) -> None:
        self.parameters, self.parties = list(parameters), parties
        self.buckets = [(bucket, make(parties)) for bucket in in_buckets(parameters)]
        self._used = torch.zeros(len(self.parameters), dtype=torch.uint8)

    @torch.no_grad()
    def add(self, *, is_absent: bool = False, is_last: bool = True) -> None:
        """Take in ``p.grad``; after the last micro-batch put in the sums.

        Args:
            is_absent: these gradients do not count.
            is_last: whether this is the step's last micro-batch. Before it, ``p.grad`` is ``None`` afterwards.
        """
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
        """Forget the micro-batches since the last step."""
        self._used.zero_()
        for _, exchange in self.buckets:
            exchange.discard()

    def _used_anywhere(self) -> dict[Tensor, bool]:
        """Which parameters had a gradient on any rank in any micro-batch."""
        used = self._used
        if self.parameters and self.parties.size > 1:
            used = used.to(self.parameters[0].device)
            dist.all_reduce(used, dist.ReduceOp.MAX, group=self.parties.group)
        return dict(zip(self.parameters, used.bool().tolist(), strict=True))

    def _add_bucket(self, bucket: Sequence[Tensor], exchange: Exchange, is_absent: bool, is_last: bool) -> Tensor:
        sizes = [local_of(p).numel() for p in bucket]
        flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
        for parameter, part in zip(bucket, flat.split(sizes), strict=True):
            if is_absent or parameter.grad is None:
                part.zero_()
            else:
                part.copy_(_dense(parameter.grad).reshape(-1))
        exchange.add(flat, flat, is_last=is_last)
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
