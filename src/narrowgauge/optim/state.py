"""Optimizer states: ``optimizer.state[p]`` is a dict of live tensors, as in ``torch.optim``.

A tensor has the shape and strides of its parameter, and is a DTensor if the parameter is one. It
has torch's name only if it is the whole state as a float: ``exp_avg`` in float32 or bfloat16. Codes
have names of their own (``packed``, ``exp_avg_bits``); :mod:`narrowgauge.optim.values` reads and
writes them. A step reads the dict through a :class:`LocalState`, which lives as long as the step:
what a script changes, moves or removes between two steps is seen by the next one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of, placed_like, split_groups
from narrowgauge.optim.extras import alone_dtype, saved_as
from narrowgauge.optim.kernel import Kernel
from narrowgauge.optim.planes import as_rows, planes_of, row_dims
from narrowgauge.optim.rules.matrix import MatrixState
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import WINDOW, Code, Storage

Extras = Mapping[str, MatrixState]
"""The states of a matrix rule that have shapes of their own, by name."""
NO_GRADIENT = torch.empty(0, dtype=torch.float32, device="cpu")
"""Stands for the gradient of a step that has ended, which can be freed then."""


class State(dict[str, Any]):
    """Hold the tensors of one parameter by name. A packed state has another name than torch's."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"A state of {', '.join(self)} has no '{name}'. optimizer.stored(p, '{name}') decodes "
            "a packed state, and optimizer.adopt(weights, states) writes it."
        )


def new_state(parameter: Tensor, storage: Storage, extras: Extras) -> State:
    """Return zeroed tensors for a parameter. Zero encodes 0; a master is not set yet."""
    local = local_of(parameter.detach())
    state = State(step=_number(0.0))
    used = [storage.code(name) for name in dict(storage.states)]
    used += [storage.code(extra.role) for extra in extras.values()]
    if any(code.lowest in (WINDOW, 2 * WINDOW) for code in used):
        state["window"] = _number(float(WINDOW))
    for plane in planes_of(storage):
        zeros = torch.zeros_like(local, dtype=plane.dtype)
        state[plane.name] = placed_like(parameter, zeros)
    dims = row_dims(parameter.shape)
    if storage.scaled and split_groups(parameter, columns=dims):
        raise RecipeError(
            f"Cannot use storage '{storage.name}' for a parameter whose rows ranks share: its codes "
            "have a scale for each row.",
            f"Shard it along its first dimension, or use '{storage.fallback}'.",
        )
    for name in storage.scaled:
        zeros = local.new_zeros(_shape_of_bounds(local, dims), dtype=torch.float32)
        state[f"{name}_bound"] = placed_like(parameter, zeros, row_dims=dims)
    for name, extra in extras.items():
        code = storage.code(extra.role)
        key = saved_as(name, code)
        state[key] = local.new_zeros(extra.shape, dtype=alone_dtype(code))
        if code.scaled:
            rows = (*extra.shape[:-1], 1)
            state[f"{name}_bound"] = local.new_zeros(rows, dtype=torch.float32)
    return state


def _number(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32, device="cpu")


def _shape_of_bounds(local: Tensor, dims: int) -> tuple[int, ...]:
    """Return the shape of bounds, each of which covers the last ``dims`` dimensions."""
    return (*local.shape[: local.ndim - dims], *[1] * max(1, dims))


def check_tensor(
    name: str, value: Any, dtype: torch.dtype, shape: Sequence[int], kernel: Kernel
) -> None:
    """Refuse a value that cannot be the local tensor ``name`` of a kernel's state."""
    if isinstance(value, Tensor) and value.dtype is dtype and value.shape == shape:
        return
    has = f"has no '{name}'"
    if isinstance(value, Tensor):
        has = f"has a '{name}' of {dtype_name(value.dtype)} and shape {tuple(value.shape)}"
    raise RecipeError(
        f"Cannot use a state that {has}: rule '{kernel.rule.name}' in storage "
        f"'{kernel.storage.name}' needs {dtype_name(dtype)} of shape {tuple(shape)}.",
        "Set formats, shapes and options (storage, rule, rank, momentum) before the first step, and "
        "load states of the same ones. ng.to_torch_state(old) converts others.",
    )


class LocalState:
    """The tensors on this rank that a step of one parameter reads and writes.

    Attributes:
        owner: the parameter of the model.
        parameter: the local tensor: the owner, or this rank's shard of a DTensor.
        entry: ``optimizer.state`` of the owner.
        tensors: the local tensors of the state by name, without counts and notes.
        planes: those in the parameter's shape.
        bounds: for each code scaled by row, a bound on the exact values of each row: float32
            ``[rows, 1]``. A rounded value may exceed its bound: the window ends at 1.7 times the
            power of two above.
        form: rows and columns. Without bounds it is one row.
        row_dims: how many trailing dimensions one bound covers.
        extras: a matrix rule's states that are separate from the weight.
        extra_bounds: the largest magnitude of each of their rows, if their code is scaled: float32
            ``[…, rows, 1]``.
        step: the number of steps taken.
        gradient: set for a step.
        change: of a matrix rule, float32 in the parameter's shape: during a step the averaged
            gradient, then the change.
    """

    def __init__(
        self, owner: Tensor, entry: dict[str, Any], kernel: Kernel, extras: Extras
    ) -> None:
        self.owner = owner
        self.entry = entry
        self.kernel = kernel
        self.storage = kernel.storage
        self.parameter = local_of(owner)
        self.step = int(entry["step"])
        self.gradient = NO_GRADIENT
        self.change: Any = None
        strange = kernel.packed_names & entry.keys()
        if strange:
            raise RecipeError(
                f"Cannot step with '{min(strange)}' in a state whose '{min(strange)}' is packed.",
                "Remove it, and call optimizer.adopt(weights, states).",
            )
        shape = self.parameter.shape
        self.row_dims = row_dims(owner.shape) if kernel.scaled else 0
        self.form = as_rows(shape, self.row_dims)
        self.tensors: dict[str, Tensor] = {}
        self.planes: dict[str, Tensor] = {}
        for plane in kernel.planes:
            self.planes[plane.name] = self._here(plane.name, plane.dtype, shape)
        self.bounds: dict[str, Tensor] = {}
        for name in kernel.scaled:
            shape_of_bounds = _shape_of_bounds(self.parameter, self.row_dims)
            bound = self._here(f"{name}_bound", torch.float32, shape_of_bounds)
            if bound.ndim != 2:
                bound = bound.view(-1, 1)
            self.bounds[name] = bound
        self.extra_codes: dict[str, Code] = {}
        self.extras: dict[str, Tensor] = {}
        self.extra_bounds: dict[str, Tensor] = {}
        for name, extra in extras.items():
            code = self.storage.code(extra.role)
            key = saved_as(name, code)
            self.extra_codes[name] = code
            self.extras[name] = self._here(key, alone_dtype(code), extra.shape)
            if code.scaled:
                rows = (*extra.shape[:-1], 1)
                self.extra_bounds[name] = self._here(f"{name}_bound", torch.float32, rows)

    def _here(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """Return the local tensor of a state. Move it if the model has moved."""
        value: Any = self.entry.get(name)
        local = value
        if type(value) is not Tensor:  # each step asks for each tensor
            local = local_of(value)
        if not isinstance(local, Tensor) or local.dtype is not dtype or local.shape != shape:
            check_tensor(name, local, dtype, shape, self.kernel)
        if local.device != self.parameter.device:
            self.entry[name] = value.to(self.parameter.device)
            local = local_of(self.entry[name])
        self.tensors[name] = local
        return self.tensors[name]

    def in_rows(self, values: Tensor) -> Tensor:
        """Return a tensor in the parameter's shape as rows and columns: its own memory if that is
        dense and in order.
        """
        return values.contiguous().view(self.form)

    def end(self) -> None:
        """Drop the tensors after a step, so that what a script removes is freed at once."""
        self.gradient = NO_GRADIENT
        for tensors in (self.tensors, self.planes, self.bounds, self.extras, self.extra_bounds):
            tensors.clear()

    @property
    def names(self) -> list[str]:
        """Return the names of the rule's states."""
        return [*dict(self.storage.states), *self.extras]
