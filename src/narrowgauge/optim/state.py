"""The stored state of one parameter: its planes, bounds and extras, live.

All are tensors in the parameter's shape and order in memory. :meth:`ParameterState.saved` returns
them, :meth:`ParameterState.take` restores them bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import (
    is_sharded,
    local_of,
    placed_like,
    sendable,
    split_groups,
)
from narrowgauge.optim import codes
from narrowgauge.optim.kernel import Kernel
from narrowgauge.optim.planes import as_rows, planes_of, row_dims, staggered
from narrowgauge.optim.rules.matrix import MatrixState
from narrowgauge.optim.values import stored
from narrowgauge.spec.storages import FLOAT32, WINDOW, Code, Storage

NO_GRADIENT = torch.empty(0, dtype=torch.float32, device="cpu")
"""Replaces the gradient between steps, so that the last one can be freed."""


class ParameterState:
    """Hold one parameter and its packed state.

    It reads as a dict of live tensors, as a ``state_dict()`` holds them. ``state["exp_avg"]`` of a
    packed state is its float32 value, a copy. A packed tensor refuses changes.

    Attributes:
        owner: the parameter of the model.
        parameter: the local tensor: the owner, or this rank's shard of a DTensor.
        made_for: its shape, dtype and device.
        planes: the state tensors by name, each in the parameter's shape and order in memory.
        bounds: for each code scaled by row, a bound on the exact values of each row: float32
            ``[rows, 1]``. A rounded value may exceed its bound: the window ends at 1.7 times the
            power of two above.
        order: the parameter's dimensions from the slowest in memory to the fastest.
        form: rows and columns in memory order. Without bounds it is one row.
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
        self.row_dims = row_dims(storage, owner.shape)
        self.order = self.memory_order()
        self.form = self._form()
        self.planes: dict[str, Tensor] = {}
        self.bounds: dict[str, Tensor] = {}
        self.step = 0
        self.notes: dict[str, Any] = {}
        self.gradient = NO_GRADIENT
        self.change: Any = None
        self.extra_codes: dict[str, Code] = {}
        self.extras: dict[str, Tensor] = {}
        self.extra_bounds: dict[str, Tensor] = {}
        for name, extra in (extras or {}).items():
            code = FLOAT32 if extra.role is None else storage.code(extra.role)
            self.extra_codes[name] = code
            self.extras[name] = torch.zeros(
                extra.shape, dtype=codes.alone_dtype(code), device=self.parameter.device
            )
            if code.scaled:
                self.extra_bounds[name] = self.extras[name].new_zeros(
                    (*extra.shape[:-1], 1), dtype=torch.float32
                )

    # ── the parameter's memory ────────────────────────────────────────────────────────────────────

    def memory_order(self) -> tuple[int, ...]:
        """Return the parameter's dimensions in memory order, or in order if they are not dense.

        A matrix rule reads whole matrices in order. Rows must stay rows.
        """
        parameter = self.parameter
        in_order = tuple(range(parameter.ndim))
        if parameter.is_contiguous() or self.kernel.is_matrix:
            return in_order
        order = tuple(sorted(in_order, key=parameter.stride, reverse=True))
        first = parameter.ndim - self.row_dims
        if self.row_dims and order[:first] != in_order[:first]:
            return in_order
        return order if parameter.permute(order).is_contiguous() else in_order

    def _form(self) -> tuple[int, int]:
        shape = [self.parameter.shape[dim] for dim in self.order]
        return as_rows(shape, self.row_dims)

    def in_rows(self, values: Tensor) -> Tensor:
        """Return a tensor in the parameter's shape as rows and columns in memory order,
        contiguous: its own memory if it has that order.
        """
        return values.permute(self.order).contiguous().view(self.form)

    def in_shape(self, values: Tensor) -> Tensor:
        """Return rows and columns in the parameter's shape: the inverse of :meth:`in_rows`."""
        shape = [self.parameter.shape[dim] for dim in self.order]
        back = [self.order.index(dim) for dim in range(len(self.order))]
        return values.view(shape).permute(back)

    def set_parameter(self, parameter: Tensor) -> None:
        """Take the local tensor of the parameter in this step.

        Reorder the planes if its memory order has changed.
        """
        self.parameter = parameter
        if parameter.is_contiguous() and sorted(self.order) == list(self.order):
            return
        order = self.memory_order()
        if order == self.order:
            return
        values = {name: plane.clone() for name, plane in self.planes.items()}
        memory = {name: self.in_rows(plane) for name, plane in self.planes.items()}
        self.order = order
        self.form = self._form()
        for name, flat in memory.items():  # the same memory, whose addresses a table holds
            self.planes[name] = self.in_shape(flat)
            self.planes[name].copy_(values[name])

    def is_dense(self, values: Tensor) -> bool:
        """Return whether a tensor in the parameter's shape lies in memory as the planes do."""
        return values.permute(self.order).is_contiguous()

    def allocate(self) -> None:
        """Allocate zeroed planes and bounds."""
        device = self.parameter.device
        # Weight and gradient come first.
        for place, plane in enumerate(planes_of(self.storage), 2):
            memory = staggered(self.parameter.numel(), plane.dtype, place, device)
            self.planes[plane.name] = self.in_shape(memory)
        for name in self.storage.scaled:
            self.bounds[name] = torch.zeros(self.form[0], 1, device=device, dtype=torch.float32)

    # ── what a checkpoint holds ───────────────────────────────────────────────────────────────────

    def saved(self) -> dict[str, Tensor]:
        """Return ``step`` and all tensors in the parameter's shape, live.

        They are DTensors if the parameter is one.
        """
        tensors = {"step": torch.tensor(float(self.step), dtype=torch.float32, device="cpu")}
        if self._has_window:
            tensors["window"] = torch.tensor(float(WINDOW), dtype=torch.float32, device="cpu")
        for name, plane in self.planes.items():
            tensors[name] = placed_like(self.owner, plane)
        for name, bound in self.bounds.items():
            rows = bound.view(self._shape_of_bounds())
            tensors[f"{name}_bound"] = placed_like(self.owner, rows, row_dims=self.row_dims)
        for name, tensor in self.tensors_of_extras().items():
            tensors[name] = sendable(self.owner, tensor)
        return tensors

    def keys(self) -> list[str]:
        return list(self.saved())

    def __iter__(self) -> Iterator[str]:
        return iter(self.saved())

    def __len__(self) -> int:
        return len(self.saved())

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
        is_packed = {plane.name: plane.is_packed for plane in planes_of(self.storage)}
        if is_packed.get(name) and not is_sharded(self.owner):
            return self.planes[name].as_subclass(Packed)
        saved = self.saved()
        if name in saved:
            return saved[name]
        if name in self.shapes_of_states:
            return stored(self, name)
        raise KeyError(name)

    # Not a Mapping to isinstance, since frameworks build those anew.
    __contains__ = Mapping.__contains__
    get = Mapping.get
    items = Mapping.items
    values = Mapping.values

    def _shape_of_bounds(self) -> tuple[int, ...]:
        shape = tuple(self.parameter.shape)
        return (*shape[: len(shape) - self.row_dims], *[1] * max(1, self.row_dims))

    def take(self, values: Mapping[str, Tensor]) -> None:
        """Fill the state from this rank's tensors of :meth:`saved`."""
        shape = tuple(self.parameter.shape)
        for name, plane in self.planes.items():
            plane.copy_(self._checked(values, name, plane.dtype, shape))
        for name, bound in self.bounds.items():
            shape = self._shape_of_bounds()
            rows = self._checked(values, f"{name}_bound", torch.float32, shape)
            bound.copy_(rows.reshape(-1, 1))
        for name, tensor in self.tensors_of_extras().items():
            tensor.copy_(self._checked(values, name, tensor.dtype, tuple(tensor.shape)))

    def load(self, saved: Mapping[str, Tensor]) -> None:
        """Fill the state from the tensors of :meth:`saved`."""
        self.take(saved)
        self.step = int(saved["step"])
        if saved.get("window", WINDOW) != WINDOW:
            raise RecipeError(
                f"Cannot load a state whose codes begin at 2^{int(saved['window'])}, not 2^{WINDOW}.",
                "Load it by the version that has saved it.",
            )

    @property
    def _has_window(self) -> bool:
        """Return whether a code has a window whose place a checkpoint names."""
        roles = (*dict(self.storage.states), *self.extras)
        return any(self.code(name).lowest in (WINDOW, 2 * WINDOW) for name in roles)

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

    def tensors_of_extras(self) -> dict[str, Tensor]:
        """Return the tensors of all extras, by saved name."""
        tensors = {}
        for name, tensor in self.extras.items():
            tensors[codes.saved_as(name, self.extra_codes[name])] = tensor
        for name, bound in self.extra_bounds.items():
            tensors[f"{name}_bound"] = bound
        return tensors

    def tensors(self) -> list[Tensor]:
        """Return all live tensors."""
        return [*self.planes.values(), *self.bounds.values(), *self.tensors_of_extras().values()]

    def named_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each live tensor with its fields: states, then the weight under ``""``, then its
        tail.
        """
        beside: list[tuple[str, Tensor]] = []
        for plane in planes_of(self.storage):
            fields = [name for name, _, _ in plane.fields]
            entry = ", ".join(fields), self.planes[plane.name]
            if set(fields) <= set(self.storage.beside):
                beside.append(entry)
            else:
                yield entry
        for name, bound in self.bounds.items():
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
        return self.extra_codes.get(name) or self.storage.code(name)

    @property
    def column_groups(self) -> list[Any]:
        """Return the process groups that share the rows of this state's parameter."""
        if not self.row_dims or not is_sharded(self.owner):
            return []
        return split_groups(self.owner, columns=self.row_dims)


class Packed(Tensor):
    """A packed state as others see it: the live memory, which refuses changes in place."""

    @classmethod
    def __torch_function__(
        cls, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__
        changes = name in _CHANGING or (name.endswith("_") and not name.endswith("__"))
        if changes and isinstance(args[0], cls):
            raise RecipeError(
                "Cannot change a packed state in place because its bits are codes of several values.",
                "Set values by optimizer.adopt(weights, states).",
            )
        with torch._C.DisableTorchFunctionSubclass():
            return function(*args, **(kwargs or {}))


_CHANGING = (
    "__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__iand__", "__ior__", "__ixor__",
)  # fmt: skip
