"""The packed state of one parameter, and the buckets in which small parameters share one.

A *storage* (:class:`narrowgauge.spec.storages.Storage`) says in which formats weights and states are stored; a
:class:`ParameterState` holds the tensors of one parameter in that storage. Its words, in the layout of
:mod:`narrowgauge.optim.codec`, are what a kernel reads and writes. Most parameters are stepped in place: parameter and
gradient are contiguous, and two bfloat16 make a word.

Small parameters share a :class:`Bucket`: the states of its members lie side by side in one tensor. Their weights and
gradients are copied in, one kernel call steps all of them, and the weights are copied out: 300 norm gains cost one call. A
storage with scales by row has no buckets, since each row has scales of its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.rounding import at_least_float32, half, narrowed
from narrowgauge.numerics.shards import local_of
from narrowgauge.optim import codec
from narrowgauge.optim.kernel import Kernel, StepKernel, Work, peaks_of_matrices
from narrowgauge.optim.replicated_state import ReplicatedState
from narrowgauge.spec.storages import VISIBLE, Code, Storage

NO_GRADIENT = torch.empty(0, dtype=torch.float32)
"""Replaces the gradient between steps, so that the last one can be freed."""
SMALL = 4096
"""Parameters of at most this many elements are stepped in buckets."""
PIECE_WORDS = 1 << 16
"""Words that are copied, or searched for their largest magnitude, at a time."""
SMALLEST_BOUND = 2.0**-8
"""The least bound of a row of weights that is scaled by row, so that a row of zeros can grow."""


@dataclass(slots=True)
class Snapshot:
    """What a parameter was after its last step: how :mod:`narrowgauge.optim.reconcile` notices that it was modified.

    Args:
        view: the parameter, detached: the same memory and version counter.
        version: its version counter; ``None`` where its next value belongs to its states too, which were just loaded.
        fingerprint: of all its bits, before the first step.
        checksum: 0-d, of what the next step audits.
        num_writes: how often it was modified outside the optimizer.
    """

    view: Tensor
    address: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int | None
    fingerprint: int | None = None
    checksum: Tensor | None = None
    num_writes: int = 0


@dataclass(eq=False)
class ParameterState:
    """One parameter and its packed state.

    Args:
        owner: the parameter of the model.
        parameter: the local tensor: the same, or this rank's shard of a DTensor.
        words: int32 (int64 of float64 values), the words of each plane, by plane name.
        bounds: of each code that is scaled by row, the magnitude that no exact value of a row exceeds, float32
            ``[rows, 1]``; a stochastically cut value may, and the window ends at 1.7 times the power of two above.
        extras: states of a matrix rule that do not lie beside the weight, by name.
        begun: the step after which its states were made; not 0 where an option added states later.
        gradient: set during a step, as are ``scales``, the multipliers that a kernel takes.
        requested: the name of the storage in its param group.
        notes: entries that hooks and users added to its state.
        last_visible: a copy of the visible weight after the last step, where there is one.
        owns_copy: whether that copy exists only because the parameter is often modified outside the optimizer.
    """

    owner: Tensor
    parameter: Tensor
    storage: Storage
    kernel: Kernel
    words: dict[str, Tensor] = field(default_factory=dict)
    bounds: dict[str, Tensor] = field(default_factory=dict)
    extras: dict[str, ReplicatedState] = field(default_factory=dict)
    step: int = 0
    begun: int = 0
    gradient: Tensor = NO_GRADIENT
    scales: list[Tensor] = field(default_factory=list)
    requested: str = ""
    notes: dict[str, Any] = field(default_factory=dict)
    snapshot: Snapshot | None = None
    last_visible: Tensor | None = None
    owns_copy: bool = False
    _weight_at: int = -1
    _weight_words: list[Tensor] | None = None

    def allocate(self) -> None:
        shape, device = self.parameter.shape, self.parameter.device
        for plane in codec.planes(self.storage):
            self.words[plane.name] = codec.allocate(self.storage, plane, shape, device)
        for name in self.storage.scaled:
            self.bounds[name] = torch.zeros(self.num_rows, 1, dtype=torch.float32, device=device)
        if "weight" in self.bounds:
            self.bounds["weight"].copy_(weight_bound(self.peaks_of(self.parameter.detach())))

    @property
    def num_rows(self) -> int:
        """Rows of the parameter as a matrix, for storages laid out in rows."""
        return self._matrix[0]

    @cached_property
    def plane_words(self) -> list[Tensor]:
        """The state tensors in the order in which a kernel takes them."""
        return tensors_of_planes(self.storage, self.words)

    def tensors_of_extras(self) -> dict[str, Tensor]:
        """The tensors of all extras, by the names under which they are saved."""
        return {part: tensor for extra in self.extras.values() for part, tensor in extra.tensors.items()}

    def tensors(self) -> list[Tensor]:
        own = [self.last_visible] if self.owns_copy and self.last_visible is not None else []
        return [*self.words.values(), *self.bounds.values(), *self.tensors_of_extras().values(), *own]

    # ── unpacked, in the parameter's order ────────────────────────────────────────────────────────────────────────────

    def in_parameter_order(self) -> dict[str, Tensor]:
        """Every plane as a tensor of the parameter's shape, in its own dtype, without loss; bounds as ``…_bound``."""
        shape = self.parameter.shape
        planes = {
            plane.name: codec.to_parameter_order(self.storage, plane, self.words[plane.name], shape)
            for plane in codec.planes(self.storage)
        }
        bounds = {f"{name}_bound": bound.reshape(self._rows_shape).clone() for name, bound in self.bounds.items()}
        return {**planes, **bounds, **{name: value.clone() for name, value in self.tensors_of_extras().items()}}

    @property
    def _rows_shape(self) -> tuple[int, ...]:
        """The parameter's shape with one value for each of its rows."""
        return (*self.parameter.shape[:-1], 1)

    def take(self, values: dict[str, Tensor]) -> None:
        """Fill the planes from tensors made by :meth:`in_parameter_order`."""
        for plane in codec.planes(self.storage):
            value = self._checked(values, plane.name, plane.dtype, tuple(self.parameter.shape))
            self.words[plane.name].copy_(codec.from_parameter_order(self.storage, plane, value))
        for name, bound in self.bounds.items():
            given = self._checked(values, f"{name}_bound", bound.dtype, self._rows_shape)
            bound.copy_(given.reshape(bound.shape))
        for name, extra in self.extras.items():
            if name in values and values[name].dtype is torch.float32:
                # Saved before these states took the storage's codes, or stored in float32 anyway.
                extra.put(self._checked(values, name, torch.float32, tuple(extra.shape)))
                continue
            for part, tensor in extra.tensors.items():
                tensor.copy_(self._checked(values, part, tensor.dtype, tuple(tensor.shape)))

    def _checked(self, values: dict[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        if name not in values:
            raise RecipeError(
                f"the state to load holds {sorted(values)}, and storage '{self.storage.name}' needs '{name}'.",
                "Build the optimizer with the storage the state was saved from, or take it over with ng.convert.",
            )
        value = values[name].to(self.parameter.device)
        if dtype is torch.int16 and value.dtype is torch.int32:
            value = value.to(dtype)  # the dtype in which DTensors are saved
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

    def code(self, name: str) -> Code:
        """The code of a state, by name."""
        return self.extras[name].code if name in self.extras else self.storage.code(name)

    def inherit(self, old: ParameterState) -> None:
        """Copy an older state of the parameter bit for bit, with its notes; what it lacks begins as zeros."""
        kept, places, fields = old._lane().fields, codec.places(self.storage), {}
        widths = dict(self.storage.fields)
        for name in places.keys() & kept.keys():
            word, shift = kept[name]
            mask = -1 if widths[name] >= 32 else (1 << widths[name]) - 1
            fields[name] = ((word >> shift) & mask) << places[name].shift
        self._fill(fields)
        for mine, theirs in ((self.bounds, old.bounds), (self.tensors_of_extras(), old.tensors_of_extras())):
            for name in mine.keys() & theirs.keys():
                mine[name].copy_(theirs[name])
        self.step = self.begun = old.step
        self.notes = {name: value for name, value in old.notes.items() if name not in self.shapes_of_states}
        if self.snapshot is not None and old.snapshot is not None:
            self.snapshot.num_writes = old.snapshot.num_writes

    def _lane(self) -> codec.Lane:
        """The state as one lane in the parameter's order, a matrix or flat."""
        scales = {n: codec.multipliers(self.storage.code(n), bound) for n, bound in self.bounds.items()}
        weight = at_least_float32(self.parameter.detach()).reshape(self._matrix).contiguous()
        visible = codec.visible_bits(self.storage.visible, weight)
        fields = codec.fields_of(self.storage, self.words, self.parameter.shape)
        return codec.Lane(visible, visible, fields, scales)

    @property
    def _matrix(self) -> tuple[int, ...]:
        return codec.matrix_of(self.storage, self.parameter.shape)

    def stored(self, name: str) -> Tensor:
        """The stored weight (``"weight"``) or a state, by name, of the parameter's shape, float32 or float64 (a copy)."""
        if name in self.extras:
            return self.extras[name].value().clone()
        if name != "weight" and name not in dict(self.storage.states):
            raise KeyError(f"storage '{self.storage.name}' has no '{name}'")
        lane = self._lane()
        if name == "weight":
            value = codec.read_weight(self.storage, lane)
        else:
            value = codec.read_state(self.storage, lane, name)
        return value.reshape(self.parameter.shape).clone()

    def adopt(self, values: Tensor, seed: Tensor | None = None) -> None:
        """Store float32 or float64 ``values`` as the weight, cut to the nearest; the parameter becomes its visible part.

        With a ``seed`` (0-d int32), a code that rounds stochastically does so here too.
        """
        value = self._fresh("weight", values)
        lane = self._lane()
        bits, fields = codec.write_weight(self.storage, lane, value, self._addend("weight", lane, seed))
        visible = codec.visible_value(self.storage.visible, bits).reshape(self.parameter.shape)
        visible = narrowed(visible, getattr(torch, self.storage.visible))
        if self.parameter.dtype is visible.dtype:
            self.parameter.data.copy_(visible)  # in place: there may be views of this memory
        else:
            self.parameter.data = visible
        self._fill(fields)

    def put(self, name: str, values: Tensor, seed: Tensor | None = None) -> None:
        """:meth:`adopt` for a state."""
        if name in self.extras:
            self.extras[name].put(values, seed)
            return
        value = self._fresh(name, values)
        lane = self._lane()
        self._fill(codec.write_state(self.storage, lane, name, value, self._addend(name, lane, seed)))

    def outdated(self) -> Tensor:
        """Where the visible weight is not the rounded float32 master, bool of the parameter's shape."""
        lane = self._lane()
        outdated = codec.is_outdated(self.storage, lane.visible, lane.fields["master"][0])
        return outdated.reshape(self.parameter.shape)

    def discard_tails(self, where: Tensor) -> None:
        """Make the stored weight equal the visible one ``where`` (bool, of the parameter's shape) is true."""
        if "weight" in self.bounds:  # a row with other values may need another scale
            self.adopt(torch.where(where, self.parameter.detach().float(), self.stored("weight")))
            return
        fields = self._lane().fields
        self._fill({n: fields[n][0].reshape(where.shape).masked_fill(where, 0) for n in self.storage.beside})

    def _fresh(self, name: str, values: Tensor) -> Tensor:
        """Values as a matrix; sets the bounds of their rows."""
        value = values.detach().to(codec.value_dtype(self.storage)).contiguous().reshape(self._matrix)
        if name in self.bounds:
            peaks = self.peaks_of(value)
            self.bounds[name].copy_(weight_bound(peaks) if name == "weight" else peaks)
        return value

    def _addend(self, name: str, lane: codec.Lane, seed: Tensor | None) -> Tensor | int:
        """What is added before cutting: the random bits are a hash of the stored weights, as in a step."""
        if seed is None:
            return half(codec.dropped_bits(self.storage.code(name)))
        weight = codec.read_weight(self.storage, lane)
        return codec.addends(self.storage, weight, torch.zeros_like(lane.visible), seed)[name]

    def _fill(self, fields: dict[str, Tensor]) -> None:
        codec.set_fields(self.storage, self.words, self.parameter.shape, fields)

    def detached(self) -> Tensor:
        """The parameter, detached: the view of its snapshot where there is one."""
        return self.parameter.detach() if self.snapshot is None else self.snapshot.view

    # ── packed, as a kernel takes it ───────────────────────────────────────────────────────────────────────────────

    def peaks_of(self, values: Tensor) -> Tensor:
        """The largest magnitude of each row, float32 ``[rows, 1]``."""
        return peaks_of_all([self], [values])

    def matrices(self, values: Tensor) -> list[Tensor] | None:
        """A bfloat16 tensor of the parameter's shape as matrices of words, or ``None``."""
        is_known = self.storage.visible == "bfloat16" and values.dtype is torch.bfloat16 and values.numel() > 0
        return self._parts(values) if is_known else None

    def row_peaks(self, values: Tensor) -> Tensor:
        """The largest magnitude of each row of any float tensor of the parameter's shape, float32 ``[rows]``."""
        matrix = self._matrix
        if not values.numel():
            return values.new_zeros(matrix[0], dtype=torch.float32)
        pieces = values.reshape(matrix).split(max(1, PIECE_WORDS // matrix[1]))
        return torch.cat([piece.abs().amax(1) for piece in pieces]).float()

    def _parts(self, tensor: Tensor) -> list[Tensor] | None:
        """A tensor of the parameter's shape as words in place, as a kernel takes them, or ``None``."""
        if not codec.fits(self.storage, tensor.shape) or (flat := as_words(tensor)) is None:
            return None
        if not codec.by_rows(self.storage):
            return [flat]
        parts, shape = codec.num_parts(self.storage), codec.extent(self.storage, tensor.shape)
        return list(flat.view(parts, *shape).unbind(0))

    def direct(self) -> Work | None:
        """Parameter, gradient and states as words in place, or ``None`` where that is not possible."""
        weight = self.weight_words()
        slopes = None if weight is None else self._parts(self.gradient)
        if weight is None or slopes is None:
            return None
        return Work([*weight, *slopes, *self.plane_words], self.scales)

    def weight_words(self) -> list[Tensor] | None:
        """The parameter as words in place, or ``None``."""
        place = self.parameter.data_ptr()
        if place != self._weight_at:  # it has moved, or this is the first time
            self._weight_words, self._weight_at = self._parts(self.parameter.detach()), place
        return self._weight_words if self.parameter.is_contiguous() else None

    def set_scales(self, into: dict[str, Tensor], back: dict[str, Tensor]) -> None:
        """The multipliers of each scaled code, ``[rows, 1]``, as a kernel takes them: for each code, each part's pair."""
        parts = codec.num_parts(self.storage)
        group = codec.extent(self.storage, self.parameter.shape)[0]
        self.scales = []
        for name in self.storage.scaled:
            halves = [_filled(s[name], parts * group).view(parts, group, 1).unbind(0) for s in (into, back)]
            self.scales += [scale for pair in zip(*halves, strict=True) for scale in pair]


def peaks_of_all(states: Sequence[ParameterState], values: Sequence[Tensor]) -> Tensor:
    """The largest magnitude of each row of tensors, one of each state's shape, all rows in order: float32 ``[rows, 1]``."""
    matrices = [state.matrices(value) for state, value in zip(states, values, strict=True)]
    joined = [matrix for own in matrices if own is not None for matrix in own]
    sizes = [sum(map(len, own)) for own in matrices if own is not None]
    found: Iterator[Tensor] = iter(())
    if joined:
        compiles = states[0].kernel.compiles_for(joined[0].device)
        all_peaks = peaks_of_matrices(joined, compile=compiles)
        if len(sizes) == len(states):
            return all_peaks.unsqueeze(1)
        found = iter(all_peaks.split(sizes))
    peaks = [
        state.row_peaks(value) if own is None else next(found)
        for state, value, own in zip(states, values, matrices, strict=True)
    ]
    return torch.cat(peaks).unsqueeze(1)


def tensors_of_planes(storage: Storage, words: Mapping[str, Tensor]) -> list[Tensor]:
    """The words of each plane as the list of tensors that a kernel takes."""
    return [tensor for plane in codec.planes(storage) for tensor in words[plane.name].unbind(0)]


def weight_bound(peaks: Tensor) -> Tensor:
    """A bound on a row of weights after a step: twice its largest now."""
    return (peaks * 2.0).clamp(min=SMALLEST_BOUND)


def as_words(tensor: Tensor) -> Tensor | None:
    """A contiguous tensor as int32 words, int64 of float64 values; ``None`` where its length or address does not allow it."""
    size = tensor.element_size()
    if not tensor.is_contiguous() or tensor.numel() * size % 4 or tensor.storage_offset() * size % 4:
        return None
    return tensor.view(-1).view(codec.word_dtype(8 * size))


def _filled(rows: Tensor, count: int) -> Tensor:
    return rows if rows.shape[0] == count else torch.cat([rows, rows.new_ones(count - rows.shape[0], 1)])


def read_leading(states: Sequence[ParameterState], count: int, name: str) -> list[Tensor]:
    """The first ``count`` values of each state's weight or state called ``name``: those of ``stored(name)``, bit for bit.

    Unpacking costs the same for one value as for a thousand, so the leading words of all states of one storage are joined
    and unpacked at once; storages that lie in rows, whose scales differ, are unpacked one by one.
    """
    first = [leading(state, count) for state in states]
    found: dict[int, Tensor] = {}
    alike: dict[Storage, list[int]] = {}
    for place, state in enumerate(first):
        if state is states[place] or codec.by_rows(state.storage):
            found[place] = state.stored(name)
        else:
            alike.setdefault(state.storage, []).append(place)
    for storage, places in alike.items():
        members = [first[place] for place in places]
        words = {key: torch.cat([state.words[key] for state in members], 1) for key in members[0].words}
        joined = torch.cat([state.parameter for state in members])
        values = ParameterState(joined, joined, storage, members[0].kernel, words).stored(name)
        found.update(zip(places, values.split([len(state.parameter) for state in members]), strict=True))
    return [found[place].reshape(-1)[:count] for place in range(len(states))]


def leading(state: ParameterState, count: int) -> ParameterState:
    """A state, for reading, of at least the first ``count`` elements: whole words, and whole rows where it has rows."""
    matrix = codec.matrix_of(state.storage, state.parameter.shape)
    lanes = codec.num_lanes(state.storage)
    wanted = -(-count // matrix[1]) if len(matrix) == 2 else -(-count // lanes) * lanes
    if wanted >= matrix[0]:
        return state
    groups = wanted if len(matrix) == 2 else wanted // lanes
    return ParameterState(
        state.owner,
        state.parameter.detach().reshape(matrix)[:wanted],
        state.storage,
        state.kernel,
        {name: words[:, :groups] for name, words in state.words.items()},
        {name: bound[:wanted] for name, bound in state.bounds.items()},
    )


# ── buckets ─────────────────────────────────────────────────────────────────────────────────────────────────────────────

BUCKET_WORDS = 1 << 16
"""A bucket is closed once it holds this many words."""
ALIGNMENT = 16
"""Every member of a bucket begins at a multiple of this many words: a full vector register."""


@dataclass(eq=False)
class Bucket:
    """Small parameters of one storage, stepped together."""

    members: list[ParameterState]
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
        given = [*(m.detached() for m in self.members), *(m.gradient for m in self.members)]
        torch._foreach_copy_([*self.weight_views, *self.gradient_views], given)

    def scatter(self) -> None:
        """Copy the weights out; the copies that remain here show later whether a weight was modified."""
        torch._foreach_copy_([m.detached() for m in self.members], self.weight_views)
        for member, view in zip(self.members, self.weight_views, strict=True):
            member.last_visible = member.last_visible if member.owns_copy else view

    def segments(self) -> list[slice]:
        """Which words belong to each member."""
        return [
            slice(start, start + codec.extent(m.storage, m.parameter.shape)[0])
            for start, m in zip(self.starts, self.members, strict=True)
        ]


def make_states(
    parameters: Sequence[Tensor], storage: Storage, kernel: Kernel, *, joined: bool = True
) -> tuple[list[ParameterState], list[Bucket]]:
    """Zeroed states of parameters of one storage and device, and the buckets of the small ones, if these may be ``joined``."""
    states, small = [], []
    # Neither rows with scales of their own nor whole matrices can be joined.
    shared = kernel if joined and isinstance(kernel, StepKernel) and not codec.by_rows(storage) else None
    for owner in parameters:
        parameter = local_of(owner)
        state = ParameterState(owner, parameter, storage, kernel)
        states.append(state)
        odd = as_words(parameter) is None and parameter.numel() <= BUCKET_WORDS
        if shared is not None and (parameter.numel() <= SMALL or odd):
            small.append(state)
        else:
            state.allocate()
    return states, [] if shared is None else [_make_bucket(members, shared) for members in _batches(small)]


def _batches(small: Sequence[ParameterState]) -> Iterator[list[ParameterState]]:
    batch: list[ParameterState] = []
    total = 0
    for state in small:
        total += codec.extent(state.storage, state.parameter.shape)[0]
        batch.append(state)
        if total >= BUCKET_WORDS:
            yield batch
            batch, total = [], 0
    if batch:
        yield batch


def _make_bucket(members: list[ParameterState], kernel: StepKernel) -> Bucket:
    storage, device = members[0].storage, members[0].parameter.device
    starts, total = [], 0
    for member in members:
        starts.append(total)
        count = codec.extent(storage, member.parameter.shape)[0]
        total += -(-count // ALIGNMENT) * ALIGNMENT
    planes = codec.planes(storage)
    length = total * codec.num_lanes(storage)
    words = {p.name: codec.allocate(storage, p, (length,), device) for p in planes}
    word = codec.word_dtype(VISIBLE[storage.visible][0])
    weights, gradients = (torch.zeros(total, dtype=word, device=device) for _ in range(2))
    bucket = Bucket(members, kernel, starts, words, weights, gradients)
    visible = getattr(torch, storage.visible)
    for member, segment in zip(members, bucket.segments(), strict=True):
        member.words = {p.name: words[p.name][:, segment] for p in planes}
        shape = member.parameter.shape
        for source, views in ((weights, bucket.weight_views), (gradients, bucket.gradient_views)):
            views.append(source[segment].view(visible)[: shape.numel()].view(shape))
    return bucket


def without(bucket: Bucket, gone: Collection[ParameterState]) -> list[Bucket]:
    """The bucket without some members, the words of the others unchanged; none where no member is left."""
    stay = [member for member in bucket.members if member not in gone]
    old = [member.words for member in stay]
    buckets = [_make_bucket(stay, bucket.kernel)] if stay else []
    for member, words in zip(stay, old, strict=True):
        member.__dict__.pop("plane_words", None)  # of the old words
        for name, kept in words.items():
            member.words[name].copy_(kept)
    return buckets
