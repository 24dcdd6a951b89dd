"""Sum replicated gradients: of a replicated model, of parameters that FSDP2 ignores, and of a model in
one process.

They are copied into flat buckets of one dtype, and the buckets are summed. The buckets hold every
trainable parameter in the model's order, with a gradient or without. So their layout is the same on
all ranks and in all micro-batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from narrowgauge.distributed.exchanges import Exchange, RankGrid
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import gradient_of, local_of

BUCKET_BYTES = 32 << 20
"""Bytes that are copied and summed at a time: enough to hide latency, small beside a model."""


class Replicated:
    """Sum the gradients of parameters that every rank holds in full.

    Args:
        parameters: the replicated ones, in the same order on all ranks.
        make: makes the exchange of a bucket.
    """

    def __init__(
        self, parameters: Sequence[Tensor], grid: RankGrid, make: Callable[[RankGrid], Exchange]
    ) -> None:
        self.parameters = list(parameters)
        self.grid = grid
        self.buckets = [(bucket, make(grid)) for bucket in _in_buckets(parameters)]
        self._used = torch.zeros(len(self.parameters), dtype=torch.uint8, device="cpu")

    @torch.no_grad()
    def add(self, *, is_absent: bool = False, is_last: bool = True) -> None:
        """Add ``p.grad``, unless absent.

        After the last micro-batch write the sums to it; before, set it to ``None``.
        """
        if not self.parameters:
            return
        gradients: dict[Tensor, Tensor | None] = dict.fromkeys(self.parameters)
        if not is_absent:
            gradients = {parameter: gradient_of(parameter) for parameter in self.parameters}
        for bucket, exchange in self.buckets:
            sizes = [local_of(p).numel() for p in bucket]
            flat = torch.zeros(sum(sizes), dtype=bucket[0].dtype, device=bucket[0].device)
            for parameter, part in zip(bucket, flat.split(sizes), strict=True):
                gradient = gradients[parameter]
                if gradient is not None:
                    part.copy_(_dense(gradient).reshape(-1))
            exchange.take(flat, flat, is_last=is_last, gathers=False)
            if is_last and exchange.piece is None:
                _write_gradients(bucket, flat)
        # After all sums: a rank that has another micro-batch takes part in none of these, and hears
        # at its beginning that the others have ended the step.
        for bucket, exchange in self.buckets:
            if exchange.piece is not None:
                _write_gradients(bucket, exchange.gather())
        used = self._used_now(gradients, is_last)
        for parameter in self.parameters:
            if parameter not in used:
                parameter.grad = None

    def _used_now(self, gradients: Mapping[Tensor, Tensor | None], is_last: bool) -> set[Tensor]:
        """Note which parameters have gradients. After the last micro-batch, return those that had
        one on any rank in any micro-batch; before, return none.
        """
        present = [gradient is not None for gradient in gradients.values()]
        self._used |= torch.tensor(present, dtype=torch.uint8, device="cpu")
        if not is_last:
            return set()
        anywhere = self._used.to(self.parameters[0].device)
        if self.grid.size > 1:
            dist.all_reduce(anywhere, dist.ReduceOp.MAX, group=self.grid.group)
        flags = anywhere.tolist()
        self._used.zero_()
        return {p for p, flag in zip(self.parameters, flags, strict=True) if flag}

    def discard(self) -> None:
        self._used.zero_()


def _write_gradients(bucket: Sequence[Tensor], flat: Tensor) -> None:
    start = 0
    for parameter in bucket:
        if parameter.grad is None:
            parameter.grad = torch.empty_like(parameter)
        placed = gradient_of(parameter)
        assert placed is not None
        gradient = local_of(placed)
        gradient.copy_(flat[start : start + gradient.numel()].view(gradient.shape))
        start += gradient.numel()


def _in_buckets(parameters: Iterable[Tensor]) -> list[list[Tensor]]:
    """Return the parameters in order, in buckets of one dtype and device, of at most
    :data:`BUCKET_BYTES` or one parameter.
    """
    buckets: list[list[Tensor]] = []
    open_buckets: dict[Any, tuple[list[Tensor], int]] = {}
    for parameter in parameters:
        kind = (parameter.dtype, parameter.device)
        size = local_of(parameter).numel() * parameter.element_size()
        bucket, filled = open_buckets.get(kind, ([], BUCKET_BYTES))
        if filled + size > BUCKET_BYTES:
            bucket = []
            filled = 0
            buckets.append(bucket)
        bucket.append(parameter)
        open_buckets[kind] = (bucket, filled + size)
    return buckets


def _dense(gradient: Tensor) -> Tensor:
    if gradient.is_sparse:
        raise RecipeError(
            f"a gradient of shape {tuple(gradient.shape)} is sparse, and gradients are summed "
            "across ranks in flat buckets.",
            "Make the embedding with sparse=False.",
        )
    return local_of(gradient)
