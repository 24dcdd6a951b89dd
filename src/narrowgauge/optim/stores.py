"""Stores: one parameter's share of the optimizer's memory, and the buckets of small ones.

A :class:`Store` joins a parameter with the words of its states. Most are stepped where they lie: parameter and gradient
are contiguous, and two bfloat16 make a word. What is small, odd in length or oddly placed joins a :class:`Bucket`, whose
members' states lie side by side: weights and gradients are copied in, one kernel steps them all, weights are copied out.
So 300 norm gains cost one call, and no shape needs a kernel of its own. A storage with scales by row has no buckets: its
rows are its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import half, quiet
from narrowgauge.optim import arithmetics, encoding, packing
from narrowgauge.optim.kernels import Work
from narrowgauge.optim.shards import local_of
from narrowgauge.spec.storages import Storage

if TYPE_CHECKING:
    from narrowgauge.optim.kernels import StepKernel
    from narrowgauge.optim.outside import Trace

NO_GRADIENT = torch.empty(0, dtype=torch.float32)
"""Stands for the gradient between steps, so that nothing holds on to the last one."""
SMALL = 4096
"""Parameters of at most so many elements go into buckets."""
BUCKET_WORDS = 1 << 16
"""A bucket is closed once it holds so many words; also the longest piece that is copied at a time."""
ALIGNMENT = 16
"""Every member of a bucket begins at a multiple of so many words: a full vector register."""
SMALLEST_BOUND = 2.0**-8
"""What a row of weights kept relative to its largest is at least taken to reach: a row of zeros must be able to leave it."""


@dataclass(eq=False)
class Store:
    """One parameter and the words of its states.

    Args:
        owner: the parameter as its user knows it.
        parameter: its memory: the same, or this rank's part of a DTensor.
        storage: how it is kept.
        kernel: what steps it.
        words: the words of each plane, by plane name.
        bounds: of what is kept relative to its row, the magnitude that no exact value of the row exceeds, float32
            ``[rows, 1]``; one that is cut stochastically may, and the window ends at 1.7 times the power of two above.
        extras: what a matrix rule keeps beside, as it is.
        step: how many steps it has taken.
        begun: after how many steps its states were made; not 0 where a rule came to keep states late.
        gradient: its gradient, during a step.
        scales: the multipliers that a kernel takes, during a step.
        trace: what the parameter was when the last step let go of it.
        asked: the name of the storage that its group named.
        notes: what hooks and users keep beside its states.
        left: the visible weight as the last step left it, where there is a copy of it.
        copied: whether that copy is kept for its own sake, because others write to the parameter.
    """

    owner: Tensor
    parameter: Tensor
    storage: Storage
    kernel: StepKernel
    words: dict[str, Tensor] = field(default_factory=dict)
    bounds: dict[str, Tensor] = field(default_factory=dict)
    extras: dict[str, Tensor] = field(default_factory=dict)
    step: int = 0
    begun: int = 0
    gradient: Tensor = NO_GRADIENT
    scales: list[Tensor] = field(default_factory=list)
    asked: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    trace: Trace | None = None
    left: Tensor | None = None
    copied: bool = False
    _weight_at: int = -1
    _weight_words: list[Tensor] | None = None

    def allocate(self) -> None:
        """Give it words of its own, all zero."""
        shape, device = self.parameter.shape, self.parameter.device
        for plane in packing.planes(self.storage):
            self.words[plane.name] = packing.allocate(self.storage, plane, shape, device)
        for name in self.storage.scaled:
            self.bounds[name] = torch.zeros(self.num_rows, 1, dtype=torch.float32, device=device)
        if "weight" in self.bounds:
            self.bounds["weight"].copy_(weight_bound(self.peaks_of(self.parameter.detach())))

    @property
    def num_rows(self) -> int:
        """Rows of the matrix in which it is kept, where it is."""
        return packing.matrix_of(self.storage, self.parameter.shape)[0]

    @cached_property
    def plane_words(self) -> list[Tensor]:
        """The state tensors in the order in which a kernel takes them."""
        return [t for plane in packing.planes(self.storage) for t in self.words[plane.name].unbind(0)]

    def tensors(self) -> list[Tensor]:
        """Everything kept beside the parameter."""
        own = [self.left] if self.copied and self.left is not None else []
        return [*self.words.values(), *self.bounds.values(), *self.extras.values(), *own]

    # ── values, in the parameter's order ────────────────────────────────────────────────────────────────────────────

    def in_parameter_order(self) -> dict[str, Tensor]:
        """Every plane as a tensor of the parameter's shape, in its own dtype, without loss; bounds as ``…_bound``."""
        shape = self.parameter.shape
        planes = {
            plane.name: packing.to_parameter_order(self.storage, plane, self.words[plane.name], shape)
            for plane in packing.planes(self.storage)
        }
        bounds = {f"{name}_bound": bound.reshape(self._rows_shape).clone() for name, bound in self.bounds.items()}
        return {**planes, **bounds, **{name: value.clone() for name, value in self.extras.items()}}

    @property
    def _rows_shape(self) -> tuple[int, ...]:
        """The parameter's shape with one value for each of its rows."""
        return (*self.parameter.shape[:-1], 1)

    def take(self, values: dict[str, Tensor]) -> None:
        """Fill the planes from tensors made by :meth:`in_parameter_order`."""
        for plane in packing.planes(self.storage):
            value = self._checked(values, plane.name, plane.dtype, tuple(self.parameter.shape))
            self.words[plane.name].copy_(packing.from_parameter_order(self.storage, plane, value))
        for name, bound in self.bounds.items():
            given = self._checked(values, f"{name}_bound", bound.dtype, self._rows_shape)
            bound.copy_(given.reshape(bound.shape))
        for name, extra in self.extras.items():
            extra.copy_(self._checked(values, name, extra.dtype, tuple(extra.shape)))

    def _checked(self, values: dict[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if name not in values:
            raise RecipeError(
                f"the state to load holds {sorted(values)}, and storage '{self.storage.name}' needs '{name}'.",
                "Build the optimizer with the storage the state was saved from, or take it over with ng.convert.",
            )
        value = values[name].to(self.parameter.device)
        if dtype is torch.int16 and value.dtype is torch.int32:
            value = value.to(dtype)  # as shards are handed out
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise RecipeError(
                f"'{name}' of storage '{self.storage.name}' is {dtype} of shape {shape}, and {value.dtype} of shape "
                f"{tuple(value.shape)} was given.",
                "Load the state that belongs to this model and storage.",
            )
        return value

    @cached_property
    def shapes_of_states(self) -> dict[str, tuple[int, ...]]:
        """The states of its rule, by name, as :func:`narrowgauge.optim.rules.matrix.shapes_of_states`."""
        kept = dict.fromkeys(dict(self.storage.states), tuple(self.owner.shape))
        return {**kept, **{name: tuple(extra.shape) for name, extra in self.extras.items()}}

    def inherit(self, old: Store) -> None:
        """Hold what another store of the parameter holds, bit for bit; states that it lacks are new, and begin as zeros."""
        kept, places, fields = old._lane().fields, packing.places(self.storage), {}
        widths = dict(self.storage.fields)
        for name in places.keys() & kept.keys():
            word, shift = kept[name]
            mask = -1 if widths[name] == 32 else (1 << widths[name]) - 1
            fields[name] = ((word >> shift) & mask) << places[name].shift
        self._fill(fields)
        for mine, theirs in ((self.bounds, old.bounds), (self.extras, old.extras)):
            for name in mine.keys() & theirs.keys():
                mine[name].copy_(theirs[name])
        self.step = self.begun = old.step

    def _bits(self, plane: packing.Plane) -> Tensor:
        """A plane's bits in the parameter's order and shape, int32."""
        words = packing.to_parameter_order(self.storage, plane, self.words[plane.name], self.parameter.shape)
        return words.view(packing.INTEGER[plane.bits]).to(torch.int32)

    def _lane(self) -> arithmetics.Lane:
        """The store as one lane in the parameter's order, a matrix or flat."""
        matrix = packing.matrix_of(self.storage, self.parameter.shape)
        fields = {}
        for plane in packing.planes(self.storage):
            raw = self._bits(plane).reshape(matrix)
            fields.update({name: (raw, shift) for name, shift, _ in plane.fields})
        scales = {n: encoding.multipliers(self.storage.code(n), bound) for n, bound in self.bounds.items()}
        seen = encoding.seen_bits(self.storage.visible, self.parameter.detach().float().reshape(matrix).contiguous())
        return arithmetics.Lane(seen, seen, fields, scales)

    def stored(self, name: str) -> Tensor:
        """What is kept under ``weight`` or the name of a state, as float32 of the parameter's shape (a copy)."""
        if name in self.extras:
            return self.extras[name].clone()
        if name != "weight" and name not in dict(self.storage.states):
            raise KeyError(f"storage '{self.storage.name}' keeps no '{name}'")
        lane = self._lane()
        if name == "weight":
            value = arithmetics.read_weight(self.storage, lane)
        else:
            value = arithmetics.read_state(self.storage, lane, name)
        return value.reshape(self.parameter.shape).clone()

    def adopt(self, values: Tensor, seed: Tensor | None = None) -> None:
        """Keep ``values`` (float32) as the weight, cut to the nearest; the parameter becomes its visible part.

        Args:
            values: of the parameter's shape.
            seed: 0-d int32; with it, a code that rounds stochastically does so here too.
        """
        value = self._fresh("weight", values)
        lane = self._lane()
        seen, fields = arithmetics.write_weight(self.storage, lane, value, self._addend("weight", lane, seed))
        visible = encoding.seen_value(self.storage.visible, seen).reshape(self.parameter.shape)
        visible = visible.to(getattr(torch, self.storage.visible))
        if self.parameter.dtype is visible.dtype:
            self.parameter.data.copy_(visible)  # in place: others may hold views of this memory
        else:
            self.parameter.data = visible
        self._fill(fields)

    def put(self, name: str, values: Tensor, seed: Tensor | None = None) -> None:
        """:meth:`adopt` for a state."""
        if name in self.extras:
            self.extras[name].copy_(values)
            return
        value = self._fresh(name, values)
        lane = self._lane()
        self._fill(arithmetics.write_state(self.storage, lane, name, value, self._addend(name, lane, seed)))

    def outdated(self) -> Tensor:
        """Where a float32 master is not that of the visible weight, bool of the parameter's shape."""
        lane = self._lane()
        outdated = encoding.is_outdated(self.storage, lane.seen, lane.fields["master"][0])
        return outdated.reshape(self.parameter.shape)

    def drop_tails(self, where: Tensor) -> None:
        """Let the stored weight be the visible one ``where`` (bool, of the parameter's shape) that is true."""
        if "weight" in self.bounds:  # other values may need another scale for all of their row
            self.adopt(torch.where(where, self.parameter.detach().float(), self.stored("weight")))
            return
        fields = self._lane().fields
        self._fill({n: torch.where(where, 0, fields[n][0].reshape(where.shape)) for n in self.storage.beside})

    def _fresh(self, name: str, values: Tensor) -> Tensor:
        """Values as a matrix, and the row's bound made theirs."""
        value = quiet(values.detach().float().contiguous()).reshape(
            packing.matrix_of(self.storage, self.parameter.shape)
        )
        if name in self.bounds:
            peaks = self.peaks_of(value)
            self.bounds[name].copy_(weight_bound(peaks) if name == "weight" else peaks)
        return value

    def _addend(self, name: str, lane: arithmetics.Lane, seed: Tensor | None) -> Tensor | int:
        """What is added before cutting: the random bits are a hash of the stored weights, as in a step."""
        if seed is None:
            return half(encoding.dropped_bits(self.storage.code(name)))
        weight = arithmetics.read_weight(self.storage, lane)
        return arithmetics.addends(self.storage, weight, torch.zeros_like(lane.seen), seed)[name]

    def _fill(self, fields: dict[str, Tensor]) -> None:
        """Write fields, in the parameter's order and in their places, over what was there."""
        shape = self.parameter.shape
        for plane in packing.planes(self.storage):
            mine = [(name, shift, bits) for name, shift, bits in plane.fields if name in fields]
            if not mine:
                continue
            raw = self._bits(plane)
            for name, shift, bits in mine:
                mask = ((1 << bits) - 1) << shift if bits < 32 else -1
                raw = (raw & ~mask) | (fields[name].reshape(shape) & mask)
            value = raw.to(packing.INTEGER[plane.bits]).view(plane.dtype)
            self.words[plane.name].copy_(packing.from_parameter_order(self.storage, plane, value))

    def detached(self) -> Tensor:
        """The parameter without its gradients; the view that its trace holds, where it has been looked at."""
        return self.parameter.detach() if self.trace is None else self.trace.view

    # ── words, as a kernel takes them ───────────────────────────────────────────────────────────────────────────────

    def peaks_of(self, values: Tensor) -> Tensor:
        """The largest magnitude of each row, float32 ``[rows, 1]``."""
        matrix = packing.matrix_of(self.storage, self.parameter.shape)
        if not values.numel():
            return values.new_zeros(matrix[0], 1, dtype=torch.float32)
        words = None
        if self.storage.visible == "bfloat16" and values.dtype is torch.bfloat16:
            words = self._parts(values)
        if words is not None:
            return self.kernel.peaks(words).unsqueeze(1)
        pieces = values.reshape(matrix).split(max(1, BUCKET_WORDS // matrix[1]))
        return torch.cat([piece.abs().amax(1, keepdim=True) for piece in pieces]).float()

    def _parts(self, tensor: Tensor) -> list[Tensor] | None:
        """A tensor of the parameter's shape as the words that a kernel takes, where it lies, or ``None``."""
        if not packing.fits(self.storage, tensor.shape) or (flat := as_words(tensor)) is None:
            return None
        if not packing.by_rows(self.storage):
            return [flat]
        parts, shape = packing.num_parts(self.storage), packing.extent(self.storage, tensor.shape)
        return list(flat.view(parts, *shape).unbind(0))

    def direct(self) -> Work | None:
        """Parameter, gradient and states as words where they lie, or ``None`` where they cannot be read so."""
        weight = self.weight_words()
        slopes = None if weight is None else self._parts(self.gradient)
        if weight is None or slopes is None:
            return None
        return Work([*weight, *slopes, *self.plane_words], self.scales)

    def weight_words(self) -> list[Tensor] | None:
        """The parameter as words where it lies, or ``None``."""
        place = self.parameter.data_ptr()
        if place != self._weight_at:  # it has moved, or this is the first time
            self._weight_words, self._weight_at = self._parts(self.parameter.detach()), place
        return self._weight_words if self.parameter.is_contiguous() else None

    def pieces(self) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
        """What cannot be read as words, in copies of at most ``BUCKET_WORDS`` words.

        Yields:
            ``(work, copies)``: after the step each copied weight's words must be written back by the caller with
            :func:`write_back`.
        """
        if packing.by_rows(self.storage):
            yield from self._row_pieces()
            return
        lanes = packing.num_lanes(self.storage)
        for start, weight, slopes in _even_pieces(self.parameter.detach(), self.gradient, BUCKET_WORDS * lanes):
            first, count = start // lanes, -(-weight.numel() // lanes)
            planes = [words[first : first + count] for words in self.plane_words]
            copies = [_padded(values.reshape(1, -1), (1, count)).view(-1) for values in (weight, slopes)]
            yield Work([*copies, *planes]), [(copies[0], weight)]

    def _row_pieces(self) -> Iterator[tuple[Work, list[tuple[Tensor, Tensor]]]]:
        storage, shape = self.storage, self.parameter.shape
        rows, columns = packing.matrix_of(storage, shape)
        parts = packing.num_parts(storage)
        group, width = packing.extent(storage, shape)
        weights = self.parameter.detach()
        # Oddly strided tensors of more than two dims are copied whole: their rows are no matrix in memory.
        whole = weights.reshape(rows, columns)
        slopes = self.gradient.reshape(rows, columns)
        step = max(1, BUCKET_WORDS // max(1, width))
        for start in range(0, group, step):
            stop = min(start + step, group)
            ranges = [(min(p * group + start, rows), min(p * group + stop, rows)) for p in range(parts)]
            copies = [
                _padded(values[first:last], (stop - start, width))
                for values in (whole, slopes)
                for first, last in ranges
            ]
            work = Work(
                [*copies, *(words[start:stop] for words in self.plane_words)], [s[start:stop] for s in self.scales]
            )
            yield work, [(copies[p], whole[first:last]) for p, (first, last) in enumerate(ranges)]
        if whole.data_ptr() != weights.data_ptr():
            weights.copy_(whole.view(shape))

    def set_scales(self, into: dict[str, Tensor], back: dict[str, Tensor]) -> None:
        """The multipliers of each scaled code, ``[rows, 1]``, as a kernel takes them: for each code, each part's pair."""
        parts = packing.num_parts(self.storage)
        group = packing.extent(self.storage, self.parameter.shape)[0]
        self.scales = []
        for name in self.storage.scaled:
            halves = [_filled(s[name], parts * group).view(parts, group, 1).unbind(0) for s in (into, back)]
            self.scales += [scale for pair in zip(*halves, strict=True) for scale in pair]


def weight_bound(peaks: Tensor) -> Tensor:
    """What bounds a row of weights after a step: twice its largest now."""
    return (peaks * 2.0).clamp(min=SMALLEST_BOUND)


def write_back(words: Tensor, piece: Tensor) -> None:
    """Copy stepped words back into the piece of the parameter they were copied from."""
    values = words.view(piece.dtype)
    if values.ndim == 2:
        piece.copy_(values[: piece.shape[0], : piece.shape[1]])
    else:
        piece.copy_(values[: piece.numel()].view(piece.shape))


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
    def work(self) -> Work:
        """As of a :class:`Store`, for all members at once."""
        first = self.members[0]
        planes = Store(self.weights, self.weights, first.storage, first.kernel, self.words).plane_words
        return Work([self.weights, self.gradients, *planes])

    def gather(self) -> None:
        """Copy the members' weights and gradients in."""
        torch._foreach_copy_(self.weight_views, [m.detached() for m in self.members])
        torch._foreach_copy_(self.gradient_views, [m.gradient for m in self.members])

    def scatter(self) -> None:
        """Copy the weights out; what remains here is what they were left as."""
        torch._foreach_copy_([m.detached() for m in self.members], self.weight_views)
        for member, view in zip(self.members, self.weight_views, strict=True):
            member.left = member.left if member.copied else view

    def segments(self) -> list[slice]:
        """Which words belong to each member."""
        return [
            slice(start, start + packing.extent(m.storage, m.parameter.shape)[0])
            for start, m in zip(self.starts, self.members, strict=True)
        ]


def make_stores(
    parameters: Sequence[Tensor], storage: Storage, kernel: StepKernel, *, joined: bool = True
) -> tuple[list[Store], list[Bucket]]:
    """Stores with zeroed states for parameters of one storage and device, and the buckets of the small ones.

    Args:
        parameters: the parameters.
        storage, kernel: how they are kept and stepped.
        joined: whether small ones may share a bucket.
    """
    stores, buckets, small = [], [], []
    joined = joined and not packing.by_rows(storage)
    for owner in parameters:
        parameter = local_of(owner)
        store = Store(owner, parameter, storage, kernel)
        stores.append(store)
        odd = as_words(parameter) is None and parameter.numel() <= BUCKET_WORDS
        if joined and (parameter.numel() <= SMALL or odd):
            small.append(store)
        else:
            store.allocate()
    batch: list[Store] = []
    total = 0
    for store in small:
        total += packing.extent(storage, store.parameter.shape)[0]
        batch.append(store)
        if total >= BUCKET_WORDS:
            buckets.append(_make_bucket(batch))
            batch, total = [], 0
    if batch:
        buckets.append(_make_bucket(batch))
    return stores, buckets


def _make_bucket(members: list[Store]) -> Bucket:
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
    bucket = Bucket(members, starts, words, weights, gradients)
    visible = getattr(torch, storage.visible)
    for member, segment in zip(members, bucket.segments(), strict=True):
        member.words = {p.name: words[p.name][:, segment] for p in planes}
        shape = member.parameter.shape
        for source, views in ((weights, bucket.weight_views), (gradients, bucket.gradient_views)):
            views.append(source[segment].view(visible)[: shape.numel()].view(shape))
    return bucket


def without(bucket: Bucket, gone: Collection[Store]) -> list[Bucket]:
    """A bucket of those members that stay, whose words go with them; none where nobody does."""
    stay = [member for member in bucket.members if member not in gone]
    old = [member.words for member in stay]
    buckets = [_make_bucket(stay)] if stay else []
    for member, words in zip(stay, old, strict=True):
        member.__dict__.pop("plane_words", None)  # of the old words
        for name, kept in words.items():
            member.words[name].copy_(kept)
    return buckets


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


def _padded(values: Tensor, words: tuple[int, int]) -> Tensor:
    """A copy of a matrix as so many rows of words; what it lacks is zero."""
    # Words first: rows of nothing have no stride that narrower values could be viewed as words by.
    buffer = torch.zeros(words, dtype=torch.int32, device=values.device)
    buffer.view(values.dtype)[: values.shape[0], : values.shape[1]].copy_(values)
    return buffer


def _filled(rows: Tensor, count: int) -> Tensor:
    """As many rows as asked for; those that are not there are ones."""
    return rows if rows.shape[0] == count else torch.cat([rows, rows.new_ones(count - rows.shape[0], 1)])
