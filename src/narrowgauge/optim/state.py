"""The stored state of one parameter.

Kernels read and write its words, in the layout of :mod:`narrowgauge.optim.layout`. All other code uses tensors in the parameter's
shape: :meth:`ParameterState.saved` returns copies, :meth:`ParameterState.take` restores them bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from narrowgauge.compile import compiled_for_pattern
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.chunks import chunk_size
from narrowgauge.numerics.dtensor import (
    largest_over_ranks,
    local_of,
    placed_like,
    sendable,
    split_groups,
)
from narrowgauge.numerics.rounding import half, narrowed
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import Kernel, lanes_of
from narrowgauge.optim.layout import ALIGNMENT, Bucket, buckets_of, joins_bucket, layout_of
from narrowgauge.optim.rules.matrix import MatrixState
from narrowgauge.spec.storages import FLOAT32, Code, Storage

NO_GRADIENT = torch.empty(0, dtype=torch.float32, device="cpu")
"""Replaces the gradient between steps, so that the last one can be freed."""
PIECE_WORDS = 1 << 16
"""Number of words to copy, or to search for their largest magnitude, at a time."""
LEAST_COMPILED = 1 << 16
"""Find the largest magnitudes of the rows of fewer elements uncompiled. A call of compiled code costs the host 50 µs."""
SMALLEST_BOUND = 2.0**-8
"""The smallest bound of a row of weights scaled by row, so that a row of zeros can grow."""


class ParameterState:
    """Hold one parameter and its packed state.

    It reads as a dict of copies, as a ``state_dict()`` holds them. ``state["exp_avg"]`` of a packed state is its float32 value.

    Attributes:
        owner: the parameter of the model.
        parameter: the local tensor: the owner, or this rank's shard of a DTensor.
        made_for: its shape, dtype and device.
        words: the words of each plane, by plane name.
        scales: for each code scaled by row, bounds on the exact values of a row, and in this step the factors into its window and
            back: float32 ``[3, parts, rows, 1]``. A rounded value may exceed its bound: the window ends at 1.7 times the power of
            two above.
        extras: the tensors of a matrix rule's states that are separate from the weight.
        extra_bounds: the largest magnitude of each of their rows, if their code is scaled: float32 ``[…, rows, 1]``.
        gradient: set during a step.
        change: of a matrix rule, float32 in the parameter's shape: during a step the averaged gradient, then the change.
        requested: the storage name in its param group.
        bucket: shared with other small parameters.
    """

    def __init__(
        self, owner: Tensor, storage: Storage, kernel: Kernel, requested: str = "",
        extras: Mapping[str, MatrixState] | None = None,
    ) -> None:  # fmt: skip
        self.owner, self.parameter = owner, local_of(owner)
        self.made_for = self.parameter.shape, self.parameter.dtype, self.parameter.device
        self.storage, self.kernel, self.requested = storage, kernel, requested
        self.layout = layout_of(storage)
        self.extent = self.layout.extent(self.parameter.shape)
        self.num_words, self.kind = math.prod(self.extent), (kernel, self.extent[1:])
        self.words: dict[str, Tensor] = {}
        self.scales: dict[str, Tensor] = {}
        self.bucket: Bucket | None = None
        self.step, self.gradient = 0, NO_GRADIENT
        self.change: Any = None
        self._extra_codes: dict[str, Code] = {}
        self.extras: dict[str, Tensor] = {}
        self.extra_bounds: dict[str, Tensor] = {}
        for name, extra in (extras or {}).items():
            self._extra_codes[name] = code = extra_code(storage, extra.role)
            self.extras[name] = torch.zeros(
                extra.shape, dtype=codes.alone_dtype(code), device=self.parameter.device
            )
            if code.scaled:
                self.extra_bounds[name] = self.extras[name].new_zeros(
                    (*extra.shape[:-1], 1), dtype=torch.float32
                )

    def begin(self) -> None:
        """Set the bounds and the master from the parameter. Allocate memory first."""
        if "weight" in self.scales:
            self._set_bounds("weight", self.parameter.detach())
        if self.storage.master:
            addend = half(codes.dropped_bits(self.storage.weight))
            for lanes, words in self.pieces():
                pairs = [
                    (lane, codes.visible_value(self.storage.visible, lane.visible))
                    for lane in lanes
                ]
                masters = [codes.write_weight(self.storage, *pair, addend)[1] for pair in pairs]
                torch._foreach_copy_(words, self.layout.with_fields(lanes, masters))

    # ── what a checkpoint holds ─────────────────────────────────────────────────────────────────────────────────────

    def saved(self) -> dict[str, Tensor]:
        """Return ``step`` and copies of all tensors in the parameter's shape. They are DTensors if the parameter is one."""
        saved = {"step": torch.tensor(float(self.step), dtype=torch.float32, device="cpu")}
        extras, bounds = self.tensors_of_extras(), {f"{name}_bound" for name in self.bounds}
        for name, value in self.in_parameter_order().items():
            placed = (
                placed_like(self.owner, value, is_per_row=name in bounds)
                if name not in extras
                else None
            )
            saved[name] = sendable(self.owner, value) if placed is None else placed
        return saved

    def keys(self) -> list[str]:
        return [
            "step",
            *self.words,
            *(f"{name}_bound" for name in self.bounds),
            *self.tensors_of_extras(),
        ]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __getitem__(self, name: str) -> Tensor:
        saved = self.saved()
        return (
            saved[name] if name in saved or name not in self.shapes_of_states else self.stored(name)
        )

    # Not a Mapping to isinstance, since frameworks build those anew.
    __contains__, get, items, values = (
        Mapping.__contains__,
        Mapping.get,
        Mapping.items,
        Mapping.values,
    )

    def in_parameter_order(self) -> dict[str, Tensor]:
        """Return copies of this rank's part: planes in the parameter's shape, bounds as ``…_bound``, and extras."""
        shape = self.parameter.shape
        layout = self.layout
        planes = {
            p.name: layout.to_parameter_order(p, self.words[p.name], shape) for p in layout.planes
        }
        bounds = {
            f"{name}_bound": bound.reshape(*shape[:-1], 1).clone()
            for name, bound in self.bounds.items()
        }
        return {
            **planes,
            **bounds,
            **{name: value.clone() for name, value in self.tensors_of_extras().items()},
        }

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Fill the state from the tensors of :meth:`in_parameter_order`."""
        shape = tuple(self.parameter.shape)
        for plane in self.layout.planes:
            value = self._checked(values, plane.name, plane.dtype, shape)
            self.words[plane.name].copy_(self.layout.from_parameter_order(plane, value))
        for name in self.scales:
            self.set_bound(
                name, self._checked(values, f"{name}_bound", torch.float32, (*shape[:-1], 1))
            )
        for name, tensor in self.tensors_of_extras().items():
            tensor.copy_(self._checked(values, name, tensor.dtype, tuple(tensor.shape)))

    def _checked(
        self, values: Mapping[str, Tensor], name: str, dtype: torch.dtype, shape: tuple[int, ...]
    ) -> Tensor:
        value = values[name].to(self.parameter.device)
        if dtype is torch.int16 and value.dtype is torch.int32:
            value = value.to(dtype)  # the dtype in which DTensors are saved
        if tuple(value.shape) != shape or value.dtype != dtype:
            raise RecipeError(
                f"Cannot load the state because its '{name}' is {value.dtype} of shape {tuple(value.shape)}, not {dtype} of "
                f"shape {shape}, as storage '{self.storage.name}' needs.",
                "Load the state of this model and storage.",
            )
        return value

    @property
    def bounds(self) -> dict[str, Tensor]:
        """Return for each code scaled by row the bounds, float32 ``[rows, 1]``."""
        num_rows = self.layout.matrix(self.parameter.shape)[0]
        return {name: scales[0].reshape(-1, 1)[:num_rows] for name, scales in self.scales.items()}

    def set_bound(self, name: str, rows: Tensor) -> None:
        """Set the bounds of a code, a number for each row."""
        bound = self.scales[name][0]
        bound.copy_(padded_rows(rows.reshape(-1), bound.numel()).view(bound.shape))

    def tensors_of_extras(self) -> dict[str, Tensor]:
        """Return the tensors of all extras, by saved name."""
        bounds = {f"{name}_bound": bound for name, bound in self.extra_bounds.items()}
        return {
            codes.saved_as(name, self._extra_codes[name]): x for name, x in self.extras.items()
        } | bounds

    def tensors(self) -> list[Tensor]:
        """Return all live tensors."""
        return [*self.words.values(), *self.bounds.values(), *self.tensors_of_extras().values()]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each live tensor with its fields: states, then the weight under ``""``, then its tail."""
        beside: list[tuple[str, Tensor]] = []
        for plane in self.layout.planes:
            fields = [name for name, _, _ in plane.fields]
            entry = ", ".join(fields), self.words[plane.name].view(plane.dtype)
            if set(fields) <= set(self.storage.beside):
                beside.append(entry)
            else:
                yield entry
        yield from (
            (f"{name} bound", bound) for name, bound in self.bounds.items() if name != "weight"
        )
        yield from self.tensors_of_extras().items()
        yield "", self.parameter.detach()
        yield from beside
        yield from (
            (f"{name} bound", bound) for name, bound in self.bounds.items() if name == "weight"
        )

    # ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def shapes_of_states(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state of the rule, by name."""
        beside = dict.fromkeys(dict(self.storage.states), tuple(self.owner.shape))
        return {**beside, **{name: tuple(tensor.shape) for name, tensor in self.extras.items()}}

    def code(self, name: str) -> Code:
        """Return the code of the weight or of a state."""
        return self._extra_codes.get(name) or self.storage.code(name)

    def stored(self, name: str) -> Tensor:
        """Return a copy of the weight (``"weight"``) or a state in the parameter's shape, in float32."""
        if name in self.extras:
            return self.extra(name).clone()
        lane, is_weight = self._lane(), name == "weight"
        value = (
            codes.read_weight(self.storage, lane)
            if is_weight
            else codes.read_state(self.storage, lane, name)
        )
        return value.reshape(self.parameter.shape).clone()

    def leading(self, count: int, name: str) -> Tensor | None:
        """Return the first ``count`` values of :meth:`stored`, if the name is stored. Storages in rows are unpacked whole."""
        if name != "weight" and name not in dict(self.storage.states):
            return None
        if self.layout.by_rows:
            return self.stored(name).reshape(-1)[:count]
        lanes = self.layout.num_lanes
        places = -(-count // lanes)
        weight = self.parameter.detach().reshape(-1)[: places * lanes]
        part = ParameterState(
            torch.nn.functional.pad(weight, (0, -len(weight) % lanes)), self.storage, self.kernel
        )
        part.words = {plane: words[:, :places] for plane, words in self.words.items()}
        return part.stored(name)[: min(count, self.parameter.numel())]

    def extra(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return the float32 values of an extra, or of its ``index``. For a float32 extra this is its own memory, not a copy."""
        bound = self.extra_bounds[name][index] if name in self.extra_bounds else None
        return codes.alone_value(self._extra_codes[name], self.extras[name][index], bound)

    def put_extra(
        self,
        name: str,
        values: Tensor,
        seed: Tensor,
        skip: Tensor | None = None,
        index: tuple[int, ...] = (),
    ) -> None:
        """Store values of an extra, or of its ``index``, unless ``skip`` (0-d bool)."""
        bound = values.abs().amax(-1, keepdim=True) if name in self.extra_bounds else None
        new = codes.encode_alone(self._extra_codes[name], values, seed, bound)
        for tensor, value in ((self.extras[name], new), (self.extra_bounds.get(name), bound)):
            if tensor is not None and value is not None:
                tensor[index].copy_(
                    value if skip is None else torch.where(skip, tensor[index], value)
                )

    def adopt(self, values: Tensor) -> None:
        """Store ``values`` as the weight, rounded to nearest. The parameter becomes its visible part."""
        value, lane = self._as_matrix("weight", values), self._lane()
        addend = half(codes.dropped_bits(self.storage.weight))
        bits, fields = codes.write_weight(self.storage, lane, value, addend)
        visible = codes.visible_value(self.storage.visible, bits).reshape(self.parameter.shape)
        visible = narrowed(visible, getattr(torch, self.storage.visible))
        if self.parameter.dtype is visible.dtype:
            self.parameter.data.copy_(visible)  # in place, since this memory may have views
        else:
            self.parameter.data = visible
        self.layout.set_fields(self.words, self.parameter.shape, fields)

    def put(self, name: str, values: Tensor, seed: Tensor) -> None:
        """Store the values of a state. A stochastic code rounds stochastically under ``seed`` (0-d int32)."""
        if name in self.extras:
            self.put_extra(name, values, seed)
            return
        value, lane = self._as_matrix(name, values), self._lane()
        # The random bits are a hash of the stored weights, as in a step.
        addends = codes.addends(
            self.storage, codes.read_weight(self.storage, lane), lane.gradient, seed
        )
        fields = codes.write_state(self.storage, lane, name, value, addends[name])
        self.layout.set_fields(self.words, self.parameter.shape, fields)

    def _lane(self) -> codes.Lane:
        """Return the state as one lane in the parameter's order, as a matrix or flat."""
        matrix = self.layout.matrix(self.parameter.shape)
        scales = {
            n: codes.multipliers(self.storage.code(n), bound) for n, bound in self.bounds.items()
        }
        weight = self.parameter.detach().float().reshape(matrix).contiguous()
        visible = codes.visible_bits(self.storage.visible, weight)
        fields = self.layout.fields_of(self.words, self.parameter.shape)
        return codes.Lane(
            visible, visible.new_zeros(()), fields, scales
        )  # no gradient: only a step has one

    def _as_matrix(self, name: str, values: Tensor) -> Tensor:
        """Return values as a matrix, and set the bounds of their rows."""
        value = values.detach().to(codes.value_dtype(self.storage)).contiguous()
        if name in self.scales:
            self._set_bounds(name, value)
        return value.reshape(self.layout.matrix(value.shape))

    def _set_bounds(self, name: str, values: Tensor) -> None:
        (peaks,) = peaks_of_all(self.kernel, [values], [self.column_groups])
        self.set_bound(name, weight_bound(peaks) if name == "weight" else peaks)

    @property
    def column_groups(self) -> list[Any]:
        """Return the process groups that share the rows of this state's parameter."""
        return split_groups(self.owner, columns=True)

    def move(self, words: dict[str, Tensor], scales: dict[str, Tensor]) -> None:
        """Move the state to other memory, which is as new for a new state."""
        for new, old in ((words, self.words), (scales, self.scales)):
            for name, before in old.items():
                new[name].copy_(before)
        self.words, self.scales = words, scales
        self.__dict__.pop("beside", None)

    # ── as a kernel takes it ────────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def beside(self) -> list[Tensor]:
        """Return the words of the planes and the factors of rows, as a kernel takes them."""
        return self.layout.in_order(self.words, self.scales)

    def kernel_tensors(self) -> tuple[list[Tensor], Tensor | None]:
        """Return parameter, gradient and states as the kernel's words: in place, or else as copies.

        After a step of copies, pass the second result to :meth:`write_back`. It is ``None`` in place.
        """
        weights, slopes = (
            self.layout.in_place(x) for x in (self.parameter.detach(), self.gradient)
        )
        if weights is not None and slopes is not None:
            tensors = [*weights, *slopes, *self.beside]
            # On a GPU compiled code writes 16 bytes at a time.
            if self.parameter.is_cpu or all(tensor.data_ptr() % 16 == 0 for tensor in tensors):
                return tensors, None
        weight, weights = self.layout.copied(self.parameter.detach())
        _, slopes = self.layout.copied(self.gradient)
        return [*weights, *slopes, *self.beside], weight

    def pieces(self) -> Iterator[tuple[list[codes.Lane], list[Tensor]]]:
        """Yield the lanes of some elements at a time, and the words of their planes: a walk that takes little memory."""
        tensors, _ = self.kernel_tensors()
        if not self.parameter.numel():
            return
        first, rows = (
            2 * self.layout.num_parts,
            max(1, chunk_size(tensors[0].device) // tensors[0][0].numel()),
        )
        end = first + sum(map(self.layout.num_tensors, self.layout.planes))
        for start in range(0, len(tensors[0]), rows):
            chunk = [tensor[start : start + rows] for tensor in tensors]
            yield lanes_of(self.storage, chunk[:end], chunk[end:]), chunk[first:end]

    @property
    def members(self) -> list[ParameterState]:
        """Return this state, as a bucket returns its members."""
        return [self]

    def audited_rows(self, turn: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return which rows of words audit number ``turn`` reads, and their members (0) and numbers of elements."""
        period, width = self.layout.audit(self.parameter.shape)
        num_rows = self.extent[0] if self.layout.by_rows else self.extent[0] // ALIGNMENT
        place = torch.arange(turn % period, num_rows, period, device=self.parameter.device)
        elements = (self.parameter.numel() - place * width).clamp(0, width)
        return place, torch.zeros_like(place), elements

    def write_back(self, weight: Tensor | None) -> None:
        """Write the copy of the weight that a step has changed."""
        if weight is not None:
            self.parameter.detach().copy_(weight.reshape(self.parameter.shape))


def allocate_all(states: Sequence[ParameterState], *, joined: bool) -> None:
    """Allocate memory for states of one kernel and device. Small ones share buckets if ``joined``."""
    small = []
    for state in states:
        if joined and joins_bucket(state):
            small.append(state)
        else:
            state.words = state.layout.allocate(state.extent, state.parameter.device)
            state.scales = state.layout.allocate_scales(state.extent[0], state.parameter.device)
    buckets_of(small)


def extra_code(storage: Storage, role: str | None) -> Code:
    """Return the code of a separate state."""
    return FLOAT32 if role is None else storage.code(role)


def weight_bound(peaks: Tensor) -> Tensor:
    """Return a bound on a row of weights after a step: twice its largest magnitude now."""
    return (peaks * 2.0).clamp(min=SMALLEST_BOUND)


def padded_rows(rows: Tensor, count: int) -> Tensor:
    """Append zeros to numbers of rows."""
    return rows if len(rows) == count else torch.nn.functional.pad(rows, (0, count - len(rows)))


def peaks_of_all(
    kernel: Kernel, values: Sequence[Tensor], groups: Sequence[Sequence[Any]]
) -> list[Tensor]:
    """Return the largest magnitude of each row of each tensor, float32 ``[rows]``.

    ``groups`` are the process groups that share a tensor's rows. All their ranks call this, and get the same magnitudes.
    """
    # As integers, in which a NaN is the largest.
    peaks = [_peaks(kernel, tensor).view(torch.int32) for tensor in values]
    return [rows.view(torch.float32) for rows in largest_over_ranks(peaks, groups)]


def _peaks(kernel: Kernel, values: Tensor) -> Tensor:
    matrix = values.contiguous().view(layout_of(kernel.storage).matrix(values.shape))
    if not values.numel():
        return values.new_zeros(len(matrix), dtype=torch.float32)
    if values.numel() < LEAST_COMPILED:
        return _row_maxima(matrix)
    if (
        matrix.dtype is torch.bfloat16
        and min(matrix.shape) > 1
        and kernel.compiles_for(matrix.device)
    ):
        return compiled_for_pattern(_row_maxima, matrix)  # type: ignore[no-any-return]
    return torch.cat(
        [_row_maxima(rows) for rows in matrix.split(max(1, PIECE_WORDS // matrix.shape[1]))]
    )


def _row_maxima(matrix: Tensor) -> Tensor:
    return matrix.abs().amax(1).float()
