"""The stored state of one parameter.

Kernels read and write its words, in the layout of :mod:`narrowgauge.optim.layout`. All other code
uses tensors in the parameter's shape: :meth:`ParameterState.saved` returns copies,
:meth:`ParameterState.take` restores them bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
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
from narrowgauge.optim.codes import Lane
from narrowgauge.optim.kernel import Kernel, Numbers, lanes_of, make_average, steps_of
from narrowgauge.optim.layout import layout_of
from narrowgauge.optim.row_bounds import bound_rows, largest_of_rows, weight_bound
from narrowgauge.optim.rules.matrix import MatrixRule, MatrixState
from narrowgauge.spec.storages import FLOAT32, OLD_WINDOW, WINDOW, Code, Storage

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
        notes: what other code keeps beside the state, such as slow weights.
    """

    def __init__(
        self, owner: Tensor, storage: Storage, kernel: Kernel, requested: str = "",
        extras: Mapping[str, MatrixState] | None = None,
    ) -> None:  # fmt: skip
        self.owner = owner
        self.parameter = local_of(owner)
        self.made_for = self.parameter.shape, self.parameter.dtype, self.parameter.device
        self.storage = storage
        self.kernel = kernel
        self.requested = requested
        self.layout = layout_of(storage)
        self.row_dims = self.layout.row_dims(owner.shape) if self.layout.by_rows else 0
        self.order = self.memory_order()
        self.form = self.form_of(self.order)
        self.extent = self.layout.extent(self.form)
        num_tensors = sum(map(self.layout.num_tensors, self.layout.planes))
        self.num_words = 2 * self.layout.num_parts + num_tensors
        self.words: dict[str, Tensor] = {}
        self.bounds: dict[str, Tensor] = {}
        self.step = 0
        self.notes: dict[str, Any] = {}
        self.gradient = NO_GRADIENT
        self.change: Any = None
        self._extra_codes: dict[str, Code] = {}
        self.extras: dict[str, Tensor] = {}
        self.extra_bounds: dict[str, Tensor] = {}
        for name, extra in (extras or {}).items():
            code = extra_code(storage, extra.role)
            self._extra_codes[name] = code
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

        def master(lane: Lane) -> dict[str, Tensor]:
            value = codes.visible_value(self.storage.visible, lane.visible)
            return codes.write_weight(self.storage, lane, value, None)[1]

        if self.storage.master:
            self._rewrite(master)

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
        if self.layout.by_rows and order[:first] != tuple(range(first)):
            return None
        return order if parameter.permute(order).is_contiguous() else None

    def form_of(self, order: tuple[int, ...] | None) -> tuple[int, ...]:
        """Return the shape in which the layout sees the parameter."""
        shape = tuple(self.parameter.shape)
        if order is not None:
            shape = tuple([shape[dim] for dim in order])
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
        if self._moved_codes():
            saved["window"] = torch.tensor(float(WINDOW), dtype=torch.float32, device="cpu")
        for name, value in self.in_parameter_order().items():
            if name in extras:
                saved[name] = sendable(self.owner, value)
            elif name.removesuffix("_bound") in self.bounds and name not in self.words:
                saved[name] = placed_like(self.owner, value, row_dims=self.row_dims)
            else:
                saved[name] = placed_like(self.owner, value)
        return saved

    def keys(self) -> list[str]:
        return [
            "step",
            *(["window"] if self._moved_codes() else []),
            *self.words,
            *(f"{name}_bound" for name in self.bounds),
            *self.tensors_of_extras(),
        ]

    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __len__(self) -> int:
        return len(self.keys())

    def __setitem__(self, name: str, value: Any) -> None:
        if name in self.keys() or name in self.shapes_of_states:
            raise RecipeError(
                f"Cannot write '{name}' of a state because it is packed.",
                "Call optimizer.adopt(weights, states).",
            )
        self.notes[name] = value

    def __getitem__(self, name: str) -> Any:
        if name in self.notes:
            return self.notes[name]
        saved = self.saved()
        if name not in saved and name in self.shapes_of_states:
            return self.stored(name)
        return saved[name]

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

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Fill the state from the tensors of :meth:`saved`, also of an earlier version."""
        self.take(saved)
        self.step = int(saved["step"])
        window = int(saved.get("window", OLD_WINDOW))
        if window != WINDOW:
            self._move(window)

    def _moved_codes(self) -> dict[str, Code]:
        """Return the codes of states whose window was once another one, by state."""
        codes_of = {name: self.code(name) for name in (*dict(self.storage.states), *self.extras)}
        return {name: code for name, code in codes_of.items() if code.has_moved}

    def _move(self, window: int) -> None:
        """Encode states again that were saved in another window."""
        moved = self._moved_codes()

        def encoded(name: str, word: Tensor, shift: int) -> Tensor:
            code = moved[name]
            saved = replace(code, lowest=window if code.signed else 2 * window)
            return codes.encode(code, codes.decode(saved, word, shift), None, shift)

        def write(lane: Lane) -> dict[str, Tensor]:
            return {name: encoded(name, *lane.fields[name]) for name in beside}

        beside = moved.keys() - self.extras.keys()
        if beside:
            self._rewrite(write)
        for name in moved.keys() & self.extras.keys():
            extra = self.extras[name]
            extra.copy_(encoded(name, extra.to(torch.int32), 0))

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
        tensors = {}
        for name, tensor in self.extras.items():
            tensors[codes.saved_as(name, self._extra_codes[name])] = tensor
        for name, bound in self.extra_bounds.items():
            tensors[f"{name}_bound"] = bound
        return tensors

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
        for name, bound in self.row_bounds.items():
            if name == "weight":
                beside.append(("weight bound", bound))
            else:
                yield f"{name} bound", bound
        yield from self.tensors_of_extras().items()
        yield "", self.parameter.detach()
        yield from beside

    # ── values ────────────────────────────────────────────────────────────────────────────────────

    @cached_property
    def shapes_of_states(self) -> dict[str, tuple[int, ...]]:
        """Return the shape of each state of the rule, by name."""
        shapes = dict.fromkeys(dict(self.storage.states), tuple(self.owner.shape))
        for name, tensor in self.extras.items():
            shapes[name] = tuple(tensor.shape)
        return shapes

    def code(self, name: str) -> Code:
        """Return the code of the weight or of a state."""
        return self._extra_codes.get(name) or self.storage.code(name)

    def stored(self, name: str, count: int | None = None) -> Tensor:
        """Return a copy of the weight (``"weight"``) or a state in the parameter's shape, in
        float32, or flat its first ``count`` values.

        A weight rounds to the parameter (:func:`narrowgauge.optim.codes.inside_cell`).
        """
        if name in self.extras:
            return self.extra(name).clone()
        storage = self.storage
        is_rounded = name == "weight" and storage.visible != "float32"

        def value(lane: Lane) -> Tensor:
            if name != "weight":
                return codes.read_state(storage, lane, name)
            weight = codes.read_weight(storage, lane)
            if is_rounded and not storage.weight.scaled:
                return codes.inside_cell(storage, lane.visible, weight)
            return weight

        if count is None:
            return self.in_shape(self.read(value, self.form))
        if self.layout.by_rows or self.order is not None:  # unpacked whole
            return self.stored(name).reshape(-1)[:count]
        return self.read(value, (min(count, self.parameter.numel()),))

    def extra(self, name: str, index: tuple[int, ...] = ()) -> Tensor:
        """Return the float32 values of an extra, or of its ``index``.

        For a float32 extra this is its own memory, not a copy.
        """
        bound = None
        if name in self.extra_bounds:
            bound = self.extra_bounds[name][index]
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
        bound = None
        if name in self.extra_bounds:
            bound = values.abs().amax(-1, keepdim=True)
        new = codes.encode_alone(self._extra_codes[name], values, seed, bound)
        for tensor, value in ((self.extras[name], new), (self.extra_bounds.get(name), bound)):
            if tensor is None or value is None:
                continue
            if skip is not None:
                value = torch.where(skip, tensor[index], value)
            tensor[index].copy_(value)

    def adopt(self, values: Tensor) -> None:
        """Store ``values`` as the weight, rounded to nearest.

        The parameter becomes its visible part.
        """
        weights = self._as_matrix("weight", values)
        seen, lanes = self.layout.lanes(torch.empty_like(weights, dtype=torch.float32))

        def write(lane: Lane, weight: Tensor, into: Tensor) -> dict[str, Tensor]:
            weight = codes.into_cell(self.storage, weight)
            bits, fields = codes.write_weight(self.storage, lane, weight, None)
            into.copy_(codes.visible_value(self.storage.visible, bits))
            return fields

        self._rewrite(write, *self.layout.lanes(weights)[1], *lanes)
        visible = narrowed(self.in_shape(seen), getattr(torch, self.storage.visible))
        if self.parameter.dtype is visible.dtype:
            self.parameter.data.copy_(visible)  # in place, since this memory may have views
        else:
            self.parameter.data = visible

    def put_low_bits(self, random: Tensor) -> None:
        """Fill the weight's low bits of a new state from 32 random bits for each element, int32 in
        the parameter's shape.
        """
        write = partial(codes.random_low_bits, self.storage)
        self._rewrite(write, *self.layout.lanes(self.in_form(random))[1])

    def put(self, name: str, values: Tensor, seed: Tensor) -> None:
        """Store the values of a state.

        A stochastic code rounds stochastically under ``seed`` (0-d int32).
        """
        if name in self.extras:
            self.put_extra(name, values, seed)
            return

        def write(lane: Lane, value: Tensor) -> dict[str, Tensor]:
            # The random bits are a hash of the stored weights, as in a step.
            weight = codes.read_weight(self.storage, lane)
            addends = codes.addends(self.storage, weight, lane.gradient, seed)
            return codes.write_state(self.storage, lane, name, value, addends[name])

        self._rewrite(write, *self.layout.lanes(self._as_matrix(name, values))[1])

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

        After a step of a copied weight, pass the second result to :meth:`write_back`.
        """
        weight = self.parameter.detach().to(getattr(torch, self.storage.visible))
        matrix, weights = self.layout.words(self.in_form(weight))
        slopes = [words.new_zeros(()).expand_as(words) for words in weights]
        if self.gradient is not NO_GRADIENT:
            _, slopes = self.layout.words(self.in_form(self.gradient))
        is_in_place = matrix.data_ptr() == self.parameter.data_ptr()
        tensors = [*weights, *slopes, *self.layout.in_order(self.words)]
        return tensors, None if is_in_place else matrix

    def pieces(
        self, *lanes: Tensor, scales: Sequence[Tensor] | None = None, writes: bool = False
    ) -> Iterator[list[Tensor]]:
        """Yield some elements at a time, as the arguments of a definition: words, the multipliers
        of their rows, and ``lanes``, which other tensors have of :meth:`Layout.lanes`.

        The walk is as long as its lanes. ``scales`` replace the multipliers of the bounds. A walk
        that ``writes`` may change the words of the weight, others only those of the planes.
        """
        if not self.parameter.numel():
            return
        tensors, weight = self.kernel_tensors()
        if scales is None:
            scales = []
            for bound in self.bounds.values():
                into, back = codes.multipliers(bound)
                for part in zip(into, back, strict=True):
                    scales += part
        tensors += [*scales, *lanes]
        words = chunk_size(tensors[0].device)
        if self.kernel.is_matrix:  # beside whole matrices, temporaries are to be few
            words //= 2 * self.layout.num_lanes
        rows = max(1, words // tensors[0][0].numel())
        length = len(tensors[-1])
        for start in range(0, length, rows):
            stop = min(start + rows, length)
            yield [tensor[start:stop] for tensor in tensors]
        if writes:
            self.write_back(weight)

    def _by_lane(self, tensors: Sequence[Tensor]) -> Iterator[tuple[Lane, Sequence[Tensor]]]:
        """Yield each lane of a piece, with its part of the other tensors."""
        end = self.num_words + 2 * len(self.bounds) * self.layout.num_parts
        lanes = lanes_of(self.storage, tensors[: self.num_words], tensors[self.num_words : end])
        for number, lane in enumerate(lanes):
            yield lane, tensors[end + number :: self.layout.num_lanes]

    def read(self, value: Callable[[Lane], Tensor], form: Sequence[int]) -> Tensor:
        """Return the values of the lanes, in the order of the words, of as many as ``form`` has."""
        dtype = codes.value_dtype(self.storage)
        values = torch.empty(tuple(form), dtype=dtype, device=self.parameter.device)
        matrix, lanes = self.layout.lanes(values)
        for tensors in self.pieces(*lanes):
            for lane, (into,) in self._by_lane(tensors):
                into.copy_(value(lane))
        return matrix

    def _rewrite(self, write: Callable[..., dict[str, Tensor]], *lanes: Tensor) -> None:
        """Replace the fields that ``write(lane, *parts of other tensors)`` returns."""
        for tensors in self.pieces(*lanes):
            old = []
            new = []
            for lane, parts in self._by_lane(tensors):
                old.append(lane)
                new.append(write(lane, *parts))
            planes = tensors[2 * self.layout.num_parts : self.num_words]
            torch._foreach_copy_(planes, self.layout.with_fields(old, new))

    def run(self, numbers: Numbers) -> Tensor | None:
        """Step by the definition, in place. Return the audit's sums, float64, if it is audited.

        The state has its gradient. That of a matrix rule has its change.
        """
        step, audit = steps_of(self.kernel.rule, self.storage)
        scales = bound_rows(self, numbers.values) if self.bounds else []
        total = numbers.values.new_zeros(self.kernel.num_sums, dtype=torch.float64)
        lanes: Sequence[Tensor] = ()
        if self.kernel.is_matrix:
            _, lanes = self.layout.lanes(self.change.view(self.form))
        for tensors in self.pieces(*lanes, scales=scales, writes=True):
            if numbers.audited:
                sums = audit(*tensors, numbers.values, numbers.seed)
                total += sums.double().view(len(total), -1).sum(1)
            step(*tensors, numbers.values, numbers.seed)
        return total if numbers.audited else None

    def average(self, numbers: Numbers) -> None:
        """Write a matrix rule's average of the gradients into ``change``, by the definition."""
        assert isinstance(self.kernel.rule, MatrixRule)
        definition = make_average(self.kernel.rule, self.storage)
        matrix, lanes = self.layout.lanes(self.change.view(self.form))
        for tensors in self.pieces(*lanes):
            definition(*tensors, numbers.values, numbers.seed)
        if matrix.data_ptr() != self.change.data_ptr():
            # The sums of a matmul follow the strides of its operands: only values are padded.
            self.change.copy_(matrix.reshape(self.change.shape))

    def write_back(self, weight: Tensor | None) -> None:
        """Write the copy of the weight that a step has changed."""
        if weight is not None:
            self.parameter.detach().copy_(self.in_shape(weight))


def extra_code(storage: Storage, role: str | None) -> Code:
    """Return the code of a separate state."""
    return FLOAT32 if role is None else storage.code(role)
