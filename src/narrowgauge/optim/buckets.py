"""Buckets: small parameters that are stepped together.

The states of a bucket's members lie side by side in one tensor. Their weights and gradients are copied in, one kernel call
steps all of them, and the weights are copied out: 300 norm gains cost one call. A storage with scales by row has no
buckets, since each row has scales of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from narrowgauge.numerics.shards import local_of
from narrowgauge.optim import packing
from narrowgauge.optim.kernel import Kernel, StepKernel, Work
from narrowgauge.optim.stores import SMALL, Store, as_words, tensors_of_planes
from narrowgauge.spec.storages import Storage

BUCKET_WORDS = 1 << 16
"""A bucket is closed once it holds this many words."""
ALIGNMENT = 16
"""Every member of a bucket begins at a multiple of this many words: a full vector register."""


@dataclass(eq=False)
class Bucket:
    """Small parameters of one storage, stepped together."""

    members: list[Store]
    kernel: StepKernel
    starts: list[int]
    words: dict[str, Tensor]
    weights: Tensor
    gradients: Tensor
    weight_views: list[Tensor] = field(default_factory=list)
    gradient_views: list[Tensor] = field(default_factory=list)

    @cached_property
    def work(self) -> Work:
        """The words of all members, as a kernel takes them."""
        return Work([self.weights, self.gradients, *tensors_of_planes(self.members[0].storage, self.words)])

    def gather(self) -> None:
        """Copy the members' weights and gradients in."""
        torch._foreach_copy_(self.weight_views, [m.detached() for m in self.members])
        torch._foreach_copy_(self.gradient_views, [m.gradient for m in self.members])

    def scatter(self) -> None:
        """Copy the weights out; the copies that remain here show later whether a weight was modified."""
        torch._foreach_copy_([m.detached() for m in self.members], self.weight_views)
        for member, view in zip(self.members, self.weight_views, strict=True):
            member.last_visible = member.last_visible if member.owns_copy else view

    def segments(self) -> list[slice]:
        """Which words belong to each member."""
        return [
            slice(start, start + packing.extent(m.storage, m.parameter.shape)[0])
            for start, m in zip(self.starts, self.members, strict=True)
        ]


def make_stores(
    parameters: Sequence[Tensor], storage: Storage, kernel: Kernel, *, joined: bool = True
) -> tuple[list[Store], list[Bucket]]:
    """Stores with zeroed states for parameters of one storage and device, and the buckets of the small ones.

    Args:
        parameters: the parameters.
        storage, kernel: how they are stored and stepped.
        joined: whether small ones may share a bucket.
    """
    stores, small = [], []
    # Neither rows with scales of their own nor whole matrices can be joined.
    shared = kernel if joined and isinstance(kernel, StepKernel) and not packing.by_rows(storage) else None
    for owner in parameters:
        parameter = local_of(owner)
        store = Store(owner, parameter, storage, kernel)
        stores.append(store)
        odd = as_words(parameter) is None and parameter.numel() <= BUCKET_WORDS
        if shared is not None and (parameter.numel() <= SMALL or odd):
            small.append(store)
        else:
            store.allocate()
    return stores, [] if shared is None else [_make_bucket(members, shared) for members in _batches(small)]


def _batches(small: Sequence[Store]) -> Iterator[list[Store]]:
    """Stores in groups of about ``BUCKET_WORDS`` words."""
    batch: list[Store] = []
    total = 0
    for store in small:
        total += packing.extent(store.storage, store.parameter.shape)[0]
        batch.append(store)
        if total >= BUCKET_WORDS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _make_bucket(members: list[Store], kernel: StepKernel) -> Bucket:
    storage, device = members[0].storage, members[0].parameter.device
    starts, total = [], 0
    for member in members:
        starts.append(total)
        count = packing.extent(storage, member.parameter.shape)[0]
        total += -(-count // ALIGNMENT) * ALIGNMENT
    planes = packing.planes(storage)
    length = total * packing.num_lanes(storage)
    words = {p.name: packing.allocate(storage, p, (length,), device) for p in planes}
    weights, gradients = (torch.zeros(total, dtype=torch.int32, device=device) for _ in range(2))
    bucket = Bucket(members, kernel, starts, words, weights, gradients)
    visible = getattr(torch, storage.visible)
    for member, segment in zip(members, bucket.segments(), strict=True):
        member.words = {p.name: words[p.name][:, segment] for p in planes}
        shape = member.parameter.shape
        for source, views in ((weights, bucket.weight_views), (gradients, bucket.gradient_views)):
            views.append(source[segment].view(visible)[: shape.numel()].view(shape))
    return bucket


def without(bucket: Bucket, gone: Collection[Store]) -> list[Bucket]:
    """The bucket without some members, the words of the others unchanged; none where no member is left."""
    stay = [member for member in bucket.members if member not in gone]
    old = [member.words for member in stay]
    buckets = [_make_bucket(stay, bucket.kernel)] if stay else []
    for member, words in zip(stay, old, strict=True):
        member.__dict__.pop("plane_words", None)  # of the old words
        for name, kept in words.items():
            member.words[name].copy_(kept)
    return buckets
