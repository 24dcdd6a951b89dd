"""Sum replicated gradients: of a replicated model, of parameters that FSDP2 ignores, and of a model in DDP.

They are copied into flat buckets of one dtype, and the buckets are summed. The buckets hold every trainable parameter in the
model's order, with a gradient or without. So their layout is the same on all ranks and in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.exchanges import Exchange, RankGrid
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of

BUCKET_BYTES = 32 << 20
"""Bytes that are copied and summed at a time: enough to hide latency, small beside a model."""


class Replicated:
    """Sum the gradients of parameters that every rank holds in full.

    Args:
        parameters: the replicated ones, in the same order on all ranks.
        make: makes the exchange of a bucket.
    """

    def __init__(self, parameters: Sequence[Tensor], grid: RankGrid, make: Callable[[RankGrid], Exchange]) -> None:
        self.parameters, self.grid = list(parameters), grid
        self.buckets = [(bucket, make(grid)) for bucket in _in_buckets(parameters)]
        self._used = torch.zeros(len(self.parameters), dtype=torch.uint8, device="cpu")

    @torch.no_grad()
    def add(self, *, is_absent: bool = False, is_last: bool = True) -> None:
        """Add ``p.grad``, unless absent. After the last micro-batch write the sums to it; before, set it to ``None``."""
        if not self.parameters:
            return
        gradients = {p: None if is_absent else p.grad for p in self.parameters}
        self._used |= torch.tensor([g is not None for g in gradients.values()], dtype=torch.uint8, device="cpu")
        if is_last and self.grid.size > 1:  # on any rank, in any micro-batch
            anywhere = self._used.to(self.parameters[0].device)
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.grid.group)
            self._used = anywhere.cpu()
        used = dict(zip(self.parameters, self._used.tolist(), strict=True)) if is_last else {}
        for bucket, exchange in self.buckets:
            sizes = [local_of(p).numel() for p in bucket]
            flat = torch.empty(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            parts = dict(zip(bucket, flat.split(sizes), strict=True))
            for parameter, part in parts.items():
                gradient = gradients[parameter]
                part.zero_() if gradient is None else part.copy_(_dense(gradient).reshape(-1))
            exchange.take(flat, flat, is_last=is_last)
            for parameter, part in parts.items():
                if not used.get(parameter):
                    parameter.grad = None
                    continue
                if parameter.grad is None:
                    parameter.grad = torch.empty_like(parameter)
                gradient = local_of(parameter.grad)
                gradient.copy_(part.view(gradient.shape))
        if is_last:
            self._used.zero_()

    def discard(self) -> None:
        self._used.zero_()


def _in_buckets(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the parameters in order, in buckets of one dtype and device, of at most :data:`BUCKET_BYTES` or one parameter."""
    buckets: list[list[Tensor]] = []
    open_buckets: dict[Any, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        size = local_of(parameter).numel() * parameter.element_size()
        bucket, filled = open_buckets.get(kind, ([], BUCKET_BYTES))
        if filled + size > BUCKET_BYTES:
            bucket, filled = [], 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[kind] = (bucket, filled + size)
    return buckets


def _dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise RecipeError(
            f"a gradient of shape {tuple(gradient.shape)} is sparse, and gradients are summed across ranks in flat buckets.",
            "Make the embedding with sparse=False.",
        )
    return local_of(gradient)
