"""The stored state of one parameter.

Kernels read and write its words, in the layout of :mod:`narrowgauge.optim.layout`. All other code
uses tensors in the parameter's shape: :meth:`ParameterState.saved` returns copies,
:meth:`ParameterState.take` restores them bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.chunks import chunk_size
from narrowgauge.numerics.dtensor import (
    is_sharded,
    largest_over_ranks,
    local_of,
    placed_like,
    sendable,
    split_groups,
)
from narrowgauge.numerics.rounding import narrowed
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import Kernel, lanes_of
from narrowgauge.optim.layout import layout_of
from narrowgauge.optim.row_bounds import largest_of_rows, weight_bound
from narrowgauge.optim.rules.matrix import MatrixState
from narrowgauge.spec.storages import FLOAT32, Code, Storage

NO_GRADIENT = torch.empty(0, dtype=torch.float32, device="cpu")
"""Replaces the gradient between steps, so that the last one can be freed."""


class ParameterState:
    """Hold one parameter and its packed state.

    It reads as a dict of copies, as a ``state_dict()`` holds them. ``state["exp_avg"]`` of a packed
    state is its float32 value.

    Attributes: owner: the parameter of the model. parameter: the local tensor: the owner, or this
        rank's shard of a DTensor. made_for: its shape, dtype and device. words: the words of each
        plane, by plane name. bounds: for each code scaled by row, a bound on the exact values of
        each row: float32 ``[parts, rows, 1]``, with padding.
            A rounded value may exceed its bound: the window ends at 1.7 times the power of two
                above.
        order: the parameter's dimensions from the slowest in memory to the fastest, where they are
            dense in another order than its own. The words are in memory order.
        form: the shape in which the layout sees the parameter: in memory order, with the dimensions
            of a row joined.
        row_dims: how many trailing dimensions one bound covers.
        extras: the tensors of a matrix rule's states that are separate from the weight.
        extra_bounds: the largest magnitude of each of their rows, if their code is scaled: float32
            ``[…, rows, 1]``.
        gradient: set during a step.
        change: of a matrix rule, float32 in the parameter's shape: during a step the averaged
            gradient, then the change.
        requested: the storage name in its param group.
    """

    def __init__(
        self, owner: Tensor, storage: Storage, kernel: Kernel, requested: str = "",
        extras: Mapping[str, MatrixState] | None = None,
    ) -> None:  # fmt: skip
        self.owner, self.parameter = owner, local_of(owner)
        self.made_for = self.parameter.shape, self.parameter.dtype, self.parameter.device
        self.storage = storage
        self.kernel = kernel
        self.requested = requested
        self.layout = layout_of(storage)
        self.row_dims = self.layout.row_dims(owner.shape) if self.layout.by_rows else 0
        self.order = self.memory_order()
        self.form = self.form_of(self.order)
        self.extent = self.layout.extent(self.form)
        self.words: dict[str, Tensor] = {}
        self.bounds: dict[str, Tensor] = {}
        self.step = 0
        self.gradient = NO_GRADIENT
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
        if "weight" in self.bounds:
            self._set_bounds("weight", self.parameter.detach())
        if self.storage.master:
            for lanes, words in self.pieces():
                pairs = [
                    (lane, codes.visible_value(self.storage.visible, lane.visible))
                    for lane in lanes
                ]
                masters = [codes.write_weight(self.storage, *pair, None)[1] for pair in pairs]
                torch._foreach_copy_(words, self.layout.with_fields(lanes, masters))

    # ── the parameter's memory ────────────────────────────────────────────────────────────────────

    def memory_order(self) -> tuple[int, ...] | None:
        """Return the parameter's dimensions in memory order, or ``None`` if they are in order, or
        not dense.

        A matrix rule reads whole matrices in order. Rows must stay rows.
        """
        parameter = self.parameter
        if parameter.is_contiguous() or self.kernel.is_matrix:
            return None
        order = tuple(sorted(range(parameter.ndim), key=parameter.stride, reverse=True))
        first = parameter.ndim - self.row_dims
        keeps_rows = not self.layout.by_rows or order[:first] == tuple(range(first))
        return order if keeps_rows and parameter.permute(order).is_contiguous() else None

    def form_of(self, order: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the shape in which the layout sees the parameter."""
        shape = tuple(self.parameter.shape)
        if order is not None:
            shape = tuple(shape[dim] for dim in order)
        if not self.layout.by_rows or not shape:
            return shape
        first = len(shape) - self.row_dims
        return (*shape[:first], math.prod(shape[first:]))

    def in_form(self, values: Tensor) -> Tensor:
        """Return a tensor in the parameter's shape as the layout sees it: a matrix or flat, in
        memory order, contiguous.
        """
        if self.order is not None:
            values = values.permute(self.order)
        return values.reshape(self.layout.matrix(self.form)).contiguous()

    def in_shape(self, values: Tensor) -> Tensor:
        """Return values that the layout sees in the parameter's shape, contiguous: the inverse of
        :meth:`in_form`.
        """
        if self.order is None:
            return values.reshape(self.parameter.shape).contiguous()
        shape = [self.parameter.shape[dim] for dim in self.order]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return values.reshape(shape).permute(back).contiguous()

    def set_parameter(self, parameter: Tensor) -> None:
        """Take the local tensor of the parameter in this step.

        Reorder the words if its memory order has changed.
        """
        self.parameter = parameter
        if parameter.is_contiguous() and self.order is None:
            return
        if self.memory_order() != self.order:
            values = self.in_parameter_order()
            self.order = self.memory_order()
            self.form = self.form_of(self.order)
            self.take(values)  # into the same memory, whose addresses a table holds

    def is_in_place(self) -> bool:
        """Return whether weight and gradient are dense, in the order of the words."""
        if self.order is None:
            return self.parameter.is_contiguous() and self.gradient.is_contiguous()
        return self.gradient.stride() == self.parameter.stride()

    def allocate(self) -> None:
        """Allocate zeroed words and bounds."""
        device = self.parameter.device
        self.words = self.layout.allocate(self.extent, device)
        self.bounds = self.layout.allocate_bounds(self.extent[0], device)

    # ── what a checkpoint holds ───────────────────────────────────────────────────────────────────

    def saved(self) -> dict[str, Tensor]:
        """Return ``step`` and copies of all tensors in the parameter's shape.

        They are DTensors if the parameter is one.
        """
        saved = {"step": torch.tensor(float(self.step), dtype=torch.float32, device="cpu")}
        extras = self.tensors_of_extras()
        bounds = {f"{name}_bound" for name in self.bounds}
        for name, value in self.in_parameter_order().items():
            if name in extras:
                saved[name] = sendable(self.owner, value)
            else:
                row_dims = self.row_dims if name in bounds else 0
                saved[name] = placed_like(self.owner, value, row_dims=row_dims)
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
    __contains__ = Mapping.__contains__
    get = Mapping.get
    items = Mapping.items
    values = Mapping.values

    def in_parameter_order(self) -> dict[str, Tensor]:
        """Return copies of this rank's part: planes in the parameter's shape, bounds as
        ``…_bound``, and extras.
        """
        values = {}
        for plane in self.layout.planes:
            in_form = self.layout.to_parameter_order(plane, self.words[plane.name], self.form)
            values[plane.name] = self.in_shape(in_form)
        for name, bound in self.row_bounds.items():
            values[f"{name}_bound"] = bound.reshape(self._shape_of_bounds()).clone()
        for name, value in self.tensors_of_extras().items():
            values[name] = value.clone()
        return values

    def _shape_of_bounds(self) -> tuple[int, ...]:
        shape = tuple(self.parameter.shape)
        return (*shape[: len(shape) - self.row_dims], *[1] * max(1, self.row_dims))

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Fill the state from the tensors of :meth:`in_parameter_order`."""
        shape = tuple(self.parameter.shape)
        for plane in self.layout.planes:
            value = self.in_form(self._checked(values, plane.name, plane.dtype, shape))
            words = self.layout.from_parameter_order(plane, value.view(self.form))
            self.words[plane.name].copy_(words)
        for name in self.bounds:
            shape = self._shape_of_bounds()
            self.set_bound(name, self._checked(values, f"{name}_bound", torch.float32, shape))
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
                f"Cannot load the state because its '{name}' is {value.dtype} of shape "
                f"{tuple(value.shape)}, not {dtype} of "
                f"shape {shape}, as storage '{self.storage.name}' needs.",
                "Load the state of this model and storage.",
            )
        return value

    @property
    def row_bounds(self) -> dict[str, Tensor]:
        """Return for each code scaled by row the bounds of this rank's rows, float32 ``[rows, 1]``."""
        num_rows = self.layout.matrix(self.form)[0]
        return {name: bounds.view(-1, 1)[:num_rows] for name, bounds in self.bounds.items()}

    def set_bound(self, name: str, rows: Tensor) -> None:
        """Set the bounds of a code, a number for each row."""
        self.row_bounds[name].copy_(rows.reshape(-1, 1))

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
        """Yield each live tensor with its fields: states, then the weight under ``""``, then its
        tail.
        """
        beside: list[tuple[str, Tensor]] = []
        for plane in self.layout.planes:
            fields = [name for name, _, _ in plane.fields]
            entry = ", ".join(fields), self.words[plane.name].view(plane.dtype)
            if set(fields) <= set(self.storage.beside):
                beside.append(entry)
            else:
                yield entry
        yield from (
            (f"{name} bound", bound) for name, bound in self.row_bounds.items() if name != "weight"
        )
        yield from self.tensors_of_extras().items()
        yield "", self.parameter.detach()
        yield from beside
        yield from (
            (f"{name} bound", bound) for name, bound in self.row_bounds.items() if name == "weight"
        )

    # ── values ────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def shapes_of_states(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state of the rule, by name."""
        beside = dict.fromkeys(dict(self.storage.states), tuple(self.owner.shape))
        return {**beside, **{name: tuple(tensor.shape) for name, tensor in self.extras.items()}}

    def code(self, name: str) -> Code:
        """Return the code of the weight or of a state."""
        return self._extra_codes.get(name) or self.storage.code(name)

    def stored(self, name: str) -> Tensor:
        """Return a copy of the weight (``"weight"``) or a state in the parameter's shape, in
        float32.

        A weight rounds to the parameter (:func:`narrowgauge.optim.codes.inside_cell`).
        """
        if name in self.extras:
            return self.extra(name).clone()
        lane = self._lane()
        is_weight = name == "weight"
        value = (
            codes.read_weight(self.storage, lane)
            if is_weight
            else codes.read_state(self.storage, lane, name)
        )
        if is_weight and self.storage.visible != "float32" and not self.storage.weight.scaled:
            value = codes.inside_cell(self.storage, lane.visible, value)
        return self.in_shape(value).clone()

    def leading(self, count: int, name: str) -> Tensor | None:
        """Return the first ``count`` values of :meth:`stored`, if the name is stored.

        Storages in rows are unpacked whole.
        """
        if name != "weight" and name not in dict(self.storage.states):
            return None
        if self.layout.by_rows or self.order is not None:
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
        """Return the float32 values of an extra, or of its ``index``.

        For a float32 extra this is its own memory, not a copy.
        """
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
        """Store ``values`` as the weight, rounded to nearest.

        The parameter becomes its visible part.
        """
        value = self._as_matrix("weight", values)
        lane = self._lane()
        value = codes.into_cell(self.storage, value)
        bits, fields = codes.write_weight(self.storage, lane, value, None)
        visible = self.in_shape(codes.visible_value(self.storage.visible, bits))
        visible = narrowed(visible, getattr(torch, self.storage.visible))
        if self.parameter.dtype is visible.dtype:
            self.parameter.data.copy_(visible)  # in place, since this memory may have views
        else:
            self.parameter.data = visible
        self.layout.set_fields(self.words, self.form, fields)

    def put_low_bits(self, random: Tensor) -> None:
        """Fill the weight's low bits of a new state from 32 random bits for each element, int32 in
        the parameter's shape.
        """
        if not random.numel():
            return
        _, random_lanes = self.layout.lanes(self.in_form(random))
        start = 0
        for lanes, words in self.pieces():
            piece = slice(start, start + len(lanes[0].visible))
            start = piece.stop
            fields = []
            for lane, bits in zip(lanes, random_lanes, strict=True):
                fields.append(codes.random_low_bits(self.storage, lane, bits[piece]))
            torch._foreach_copy_(words, self.layout.with_fields(lanes, fields))

    def put(self, name: str, values: Tensor, seed: Tensor) -> None:
        """Store the values of a state.

        A stochastic code rounds stochastically under ``seed`` (0-d int32).
        """
        if name in self.extras:
            self.put_extra(name, values, seed)
            return
        value = self._as_matrix(name, values)
        lane = self._lane()
        # The random bits are a hash of the stored weights, as in a step.
        addends = codes.addends(
            self.storage, codes.read_weight(self.storage, lane), lane.gradient, seed
        )
        fields = codes.write_state(self.storage, lane, name, value, addends[name])
        self.layout.set_fields(self.words, self.form, fields)

    def _lane(self) -> codes.Lane:
        """Return the state as one lane in memory order, as a matrix or flat."""
        scales = {}
        for name, bound in self.row_bounds.items():
            scales[name] = codes.multipliers(self.storage.code(name), bound)
        weight = self.in_form(self.parameter.detach().float())
        visible = codes.visible_bits(self.storage.visible, weight)
        fields = self.layout.fields_of(self.words, self.form)
        # No gradient: only a step has one.
        return codes.Lane(visible, visible.new_zeros(()), fields, scales)

    def _as_matrix(self, name: str, values: Tensor) -> Tensor:
        """Return values as the layout sees them, and set the bounds of their rows."""
        value = values.detach().to(codes.value_dtype(self.storage))
        if name in self.bounds:
            self._set_bounds(name, value)
        return self.in_form(value)

    def _set_bounds(self, name: str, values: Tensor) -> None:
        rows = largest_of_rows(self.in_form(values)).view(torch.int32)
        (joined,) = largest_over_ranks([rows], [self.column_groups])
        peaks = joined.view(torch.float32)
        self.set_bound(name, weight_bound(peaks) if name == "weight" else peaks)

    @property
    def column_groups(self) -> list[Any]:
        """Return the process groups that share the rows of this state's parameter."""
        if not self.row_dims or not is_sharded(self.owner):
            return []
        return split_groups(self.owner, columns=self.row_dims)

    # ── as the definition takes it ────────────────────────────────────────────────────────────────

    def kernel_tensors(self) -> tuple[list[Tensor], Tensor | None]:
        """Return parameter, gradient and states as words: in place, or else as copies.

        After a step of copies, pass the second result to :meth:`write_back`. It is ``None`` in
        place.
        """
        states = self.layout.in_order(self.words)
        has_gradient = self.gradient is not NO_GRADIENT
        weight = self.parameter.detach()
        if self.order is None:
            weights = self.layout.in_place(weight, self.form)
            if weights is not None and not has_gradient:
                return [*weights, *_zeros_like(weights), *states], None
            slopes = self.layout.in_place(self.gradient, self.form) if has_gradient else None
            if weights is not None and slopes is not None:
                return [*weights, *slopes, *states], None
        copy, weights = self.layout.copied(self.in_form(weight).view(self.form))
        slopes = _zeros_like(weights)
        if has_gradient:
            _, slopes = self.layout.copied(self.in_form(self.gradient).view(self.form))
        return [*weights, *slopes, *states], copy

    def pieces(self) -> Iterator[tuple[list[codes.Lane], list[Tensor]]]:
        """Yield the lanes of some elements at a time, and the words of their planes: a walk that
        takes little memory.
        """
        if not self.parameter.numel():
            return
        tensors, _ = self.kernel_tensors()
        first = 2 * self.layout.num_parts
        end = len(tensors)
        for name, bound in self.bounds.items():
            into, back = codes.multipliers(self.storage.code(name), bound)
            for part in zip(into, back, strict=True):
                tensors += part
        rows = max(1, chunk_size(tensors[0].device) // tensors[0][0].numel())
        for start in range(0, len(tensors[0]), rows):
            chunk = [tensor[start : start + rows] for tensor in tensors]
            yield lanes_of(self.storage, chunk[:end], chunk[end:]), chunk[first:end]

    def write_back(self, weight: Tensor | None) -> None:
        """Write the copy of the weight that a step has changed."""
        if weight is not None:
            self.parameter.detach().copy_(self.in_shape(weight))


def _zeros_like(words: Sequence[Tensor]) -> list[Tensor]:
    """Return a zero for each word, without memory of their size."""
    return [tensor.new_zeros(()).expand_as(tensor) for tensor in words]


def extra_code(storage: Storage, role: str | None) -> Code:
    """Return the code of a separate state."""
    return FLOAT32 if role is None else storage.code(role)
