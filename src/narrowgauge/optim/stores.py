"""Stores: one parameter's share of the optimizer's memory, and the buckets of small ones.

A :class:`Store` joins a parameter with the words of its states. Most are stepped where they lie: parameter and gradient
are contiguous, and two bfloat16 make a word. What is small, odd in length or oddly placed joins a :class:`Bucket`, whose
members' states lie side by side: weights and gradients are copied in, one kernel steps them all, weights are copied out.
So 300 norm gains cost one call, and no shape needs a kernel of its own.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import half, quiet
from narrowgauge.optim import codes, layouts
from narrowgauge.storages import Storage

if TYPE_CHECKING:
    from narrowgauge.optim.kernels import StepKernel

NO_GRADIENT = torch.empty(0)
"""Stands for the gradient between steps, so that nothing holds on to the last one."""
SMALL = 4096
"""Parameters of at most so many elements go into buckets."""
BUCKET_WORDS = 1 << 16
"""A bucket is closed once it holds so many words; also the longest piece that is copied at a time."""
ALIGNMENT = 16
"""Every member of a bucket begins at a multiple of so many words: a full vector register."""


@dataclass(eq=False)
class Store:
    """One parameter and the words of its states.

    Args:
        parameter: the parameter.
        storage: how it is kept.
        kernel: what steps it.
        words: the words of each plane, by plane name.
        step: how many steps it has taken.
        gradient: its gradient, during a step.
    """

    parameter: Tensor
    storage: Storage
    kernel: StepKernel
    words: dict[str, Tensor]
    step: int = 0
    gradient: Tensor = NO_GRADIENT
    _weight_at: int = -1
    _weight_words: Tensor | None = None

    @cached_property
    def plane_words(self) -> list[Tensor]:
        """The state tensors in the order in which a kernel takes them."""
        planes = layouts.planes(self.storage)
        return [t for plane in planes for t in layouts.kernel_words(plane, self.words[plane.name])]

    def in_parameter_order(self) -> dict[str, Tensor]:
        """Every plane as a tensor of the parameter's shape, in its own dtype, without loss."""
        shape = self.parameter.shape
        return {p.name: layouts.to_parameter_order(p, self.words[p.name], shape) for p in layouts.planes(self.storage)}

    def take(self, values: dict[str, Tensor]) -> None:
        """Fill the planes from tensors made by :meth:`in_parameter_order`."""
        for plane in layouts.planes(self.storage):
            if plane.name not in values:
                raise RecipeError(
                    f"the state to load holds {sorted(values)}, and storage '{self.storage.name}' needs '{plane.name}'.",
                    "Build the optimizer with the storage the state was saved from.",
                )
            value = values[plane.name].to(self.parameter.device)
            if value.shape != self.parameter.shape or value.dtype != plane.dtype:
                raise RecipeError(
                    f"'{plane.name}' of storage '{self.storage.name}' is {plane.dtype} of shape "
                    f"{tuple(self.parameter.shape)}, and {value.dtype} of shape {tuple(value.shape)} was given.",
                    "Load the state that belongs to this model and storage.",
                )
            self.words[plane.name].copy_(layouts.from_parameter_order(self.storage, plane, value))

    def stored(self, name: str) -> Tensor:
        """What is kept under ``weight``, ``exp_avg`` or ``exp_avg_sq``, as float32 of the parameter's shape."""
        shape = self.parameter.shape
        place = layouts.place_of(self.storage, self.storage.beside if name == "weight" else name)
        raw = None
        if place is not None:
            values = layouts.to_parameter_order(place.plane, self.words[place.plane.name], shape)
            narrow = place.plane.bits == 16
            raw = values.view(torch.int16).to(torch.int32) << 16 if narrow else values.view(torch.int32)
        if name == "weight":
            seen = self.parameter.detach().float().contiguous().view(torch.int32)
            return codes.decode_weight(self.storage, seen, raw, place.shift if place else 0).clone()
        if raw is None or place is None:
            raise KeyError(f"storage '{self.storage.name}' keeps no '{name}'")
        return codes.decode(getattr(self.storage, name), raw, place.shift)

    def adopt(self, values: Tensor) -> None:
        """Keep ``values`` (float32) as the weight, cut to the nearest; the parameter becomes its visible part."""
        place = layouts.place_of(self.storage, self.storage.beside)
        addend = half(codes.dropped_bits(self.storage.weight))
        value = quiet(values.detach().float().contiguous())
        seen, raw, _ = codes.encode_weight(self.storage, value, addend, place.shift if place else 0)
        visible = seen.view(torch.float32).to(getattr(torch, self.storage.visible))
        if self.parameter.dtype is visible.dtype:
            self.parameter.data.copy_(visible)  # in place: others may hold views of this memory
        else:
            self.parameter.data = visible
        if place is None or raw is None:
            return
        plane = place.plane
        raw = (raw >> 16).to(torch.int16) if plane.bits == 16 else raw
        self.words[plane.name].copy_(layouts.from_parameter_order(self.storage, plane, raw.view(plane.dtype)))

    def direct_words(self) -> list[Tensor] | None:
        """Parameter, gradient and states as words where they lie, or ``None`` where they cannot be read so."""
        parameter, gradient = self.parameter, self.gradient
        place = parameter.data_ptr()
        if place != self._weight_at:  # it has moved, or this is the first time
            self._weight_words, self._weight_at = as_words(parameter.detach()), place
        if self._weight_words is None or not parameter.is_contiguous():
            return None
        slopes = as_words(gradient)
        return None if slopes is None else [self._weight_words, slopes, *self.plane_words]

    def pieces(self) -> Iterator[tuple[Tensor, Tensor, list[Tensor], Tensor]]:
        """What cannot be read as words, in copies of at most ``BUCKET_WORDS`` words.

        Yields:
            ``(weight words, gradient words, plane words, back)``; after the step the copied weight is in ``back``'s
            shape and must be written there by the caller with :func:`write_back`.
        """
        lanes = layouts.num_lanes(self.storage)
        for start, weight, slopes in _even_pieces(self.parameter.detach(), self.gradient, BUCKET_WORDS * lanes):
            first = start // lanes
            count = layouts.num_words(self.storage, weight.numel())
            planes = [words[first : first + count] for words in self.plane_words]
            yield _padded_words(weight, count, lanes), _padded_words(slopes, count, lanes), planes, weight


def write_back(words: Tensor, piece: Tensor) -> None:
    """Copy stepped words back into the piece of the parameter they were copied from."""
    piece.copy_(words.view(piece.dtype)[: piece.numel()].view(piece.shape))


@dataclass(eq=False)
class Bucket:
    """Small parameters of one storage, stepped together."""

    members: list[Store]
    starts: list[int]
    words: dict[str, Tensor]
    weights: Tensor
    gradients: Tensor
    weight_views: list[Tensor] = field(default_factory=list)
    gradient_views: list[Tensor] = field(default_factory=list)

    @cached_property
    def plane_words(self) -> list[Tensor]:
        """As of a :class:`Store`, for all members at once."""
        first = self.members[0]
        return Store(self.weights, first.storage, first.kernel, self.words).plane_words

    def gather(self) -> None:
        """Copy the members' weights and gradients in."""
        torch._foreach_copy_(self.weight_views, [m.parameter.detach() for m in self.members])
        torch._foreach_copy_(self.gradient_views, [m.gradient for m in self.members])

    def scatter(self) -> None:
        """Copy the weights out."""
        torch._foreach_copy_([m.parameter.detach() for m in self.members], self.weight_views)

    def segments(self) -> list[slice]:
        """Which words belong to each member."""
        return [
            slice(start, start + layouts.num_words(m.storage, m.parameter.numel()))
            for start, m in zip(self.starts, self.members, strict=True)
        ]


def make_stores(parameters: Sequence[Tensor], storage: Storage, kernel: StepKernel) -> tuple[list[Store], list[Bucket]]:
    """Stores with zeroed states for parameters of one storage and device, and the buckets of the small ones."""
    stores, buckets, small = [], [], []
    for parameter in parameters:
        store = Store(parameter, storage, kernel, {})
        stores.append(store)
        if parameter.numel() <= SMALL or (as_words(parameter) is None and parameter.numel() <= BUCKET_WORDS):
            small.append(store)
        else:
            for plane in layouts.planes(storage):
                store.words[plane.name] = layouts.allocate(storage, plane, parameter.numel(), parameter.device)
    batch: list[Store] = []
    total = 0
    for store in small:
        total += layouts.num_words(storage, store.parameter.numel())
        batch.append(store)
        if total >= BUCKET_WORDS:
            buckets.append(_make_bucket(batch))
            batch, total = [], 0
    if batch:
        buckets.append(_make_bucket(batch))
    return stores, buckets


def _make_bucket(members: list[Store]) -> Bucket:
    storage, device = members[0].storage, members[0].parameter.device
    lanes, starts, total = layouts.num_lanes(storage), [], 0
    for member in members:
        starts.append(total)
        count = layouts.num_words(storage, member.parameter.numel())
        total += -(-count // ALIGNMENT) * ALIGNMENT
    planes = layouts.planes(storage)
    words = {p.name: layouts.allocate(storage, p, total * lanes, device) for p in planes}
    weights, gradients = (torch.zeros(total, dtype=torch.int32, device=device) for _ in range(2))
    bucket = Bucket(members, starts, words, weights, gradients)
    visible = getattr(torch, storage.visible)
    for member, segment in zip(members, bucket.segments(), strict=True):
        member.words = {p.name: words[p.name][..., segment] for p in planes}
        shape = member.parameter.shape
        for source, views in ((weights, bucket.weight_views), (gradients, bucket.gradient_views)):
            views.append(source[segment].view(visible)[: shape.numel()].view(shape))
    return bucket


def as_words(tensor: Tensor) -> Tensor | None:
    """A contiguous tensor as int32 words, where its length and address allow."""
    size = tensor.element_size()
    if not tensor.is_contiguous() or tensor.numel() * size % 4 or tensor.storage_offset() * size % 4:
        return None
    return tensor.view(-1).view(torch.int32)


def _even_pieces(weight: Tensor, gradient: Tensor, limit: int) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Pieces in row-major order that begin at even elements and hold about ``limit`` of them: ``(start, w, g)``."""
    if weight.is_contiguous() and gradient.is_contiguous():
        weight, gradient = weight.view(-1), gradient.view(-1)
    if weight.ndim == 1:
        for start in range(0, weight.numel(), limit):
            yield start, weight[start : start + limit], gradient[start : start + limit]
    elif weight.numel() <= limit:
        yield 0, weight, gradient
    elif (row := weight[0].numel()) > limit and row % 2 == 0:
        for place in range(weight.shape[0]):
            for start, w, g in _even_pieces(weight[place], gradient[place], limit):
                yield place * row + start, w, g
    else:
        rows = max(2, limit // row // 2 * 2)
        for first in range(0, weight.shape[0], rows):
            yield first * row, weight[first : first + rows], gradient[first : first + rows]


def _padded_words(values: Tensor, count: int, lanes: int) -> Tensor:
    """A copy as words; the other half of an odd last word is zero."""
    buffer = torch.zeros(count * lanes, dtype=values.dtype, device=values.device)
    buffer[: values.numel()].view(values.shape).copy_(values)
    return buffer.view(torch.int32)
