"""Optimizer states: ``optimizer.state[p]`` is a dict of live tensors, as in ``torch.optim``.

A tensor has the shape and strides of its parameter, and is a DTensor if the parameter is one. It
has torch's name only if it is the whole state as a float: ``exp_avg`` in float32 or bfloat16. Codes
have names of their own (``packed``, ``exp_avg_bits``); :mod:`narrowgauge.optim.step.state_values` reads and
writes them. A step reads the dict through a :class:`LocalState`: what a script changes, moves or
removes between two steps is seen by the next one.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.dtensor import local_of, part_of_row, placed_like
from narrowgauge.optim.rules.matrix import Shapes
from narrowgauge.optim.step.bit_layout import BLOCK, bounds_shape, row_dims
from narrowgauge.optim.step.parameter_formats import refuse_overlap
from narrowgauge.optim.step.step_definition import StepDefinition
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import WINDOW
from narrowgauge.torch_support.torch_hooks import members_of
from narrowgauge.torch_support.torch_names import host_tensor


class State(dict[str, Any]):
    """Hold the tensors of one parameter by name. A packed state has another name than torch's."""

    def __missing__(self, name: str) -> Any:
        raise KeyError(
            f"A state of {', '.join(self)} has no '{name}'. optimizer.stored(p, '{name}') decodes "
            "a packed state, and optimizer.adopt(weights, states) writes it."
        )


def bytes_per_param(optimizer: torch.optim.Optimizer) -> float:
    """Return the bytes of weights, gradients (in ``grad_dtype``) and states per parameter."""
    size = 0
    count = 0
    for p in members_of(optimizer):
        numel = local_of(p).numel()
        count += numel
        size += numel * (p.grad_dtype or p.dtype).itemsize
        for x in (p, *optimizer.state.get(p, {}).values()):
            if isinstance(x, Tensor) and x.ndim:  # no count of steps
                size += local_of(x).nbytes
    return size / max(1, count)


def new_state(parameter: Tensor, kernel: StepDefinition, extras: Shapes) -> State:
    """Return a parameter's state: its values as their master, and zeros. Zero encodes 0."""
    local = local_of(parameter.detach())
    storage = kernel.storage
    dims = row_dims(parameter.shape)
    if storage.scaled and part_of_row(parameter, dims) % BLOCK:
        raise RecipeError(
            f"Cannot use storage '{storage.name}' for a shard of {part_of_row(parameter, dims)} "
            f"columns: its codes have a scale for each block of {BLOCK}.",
            f"Shard matrices along their first dimension, or use '{storage.fallback}'.",
        )
    state = State(step=host_tensor(0.0))
    if any(storage.code(name).lowest in (WINDOW, 2 * WINDOW) for name, _ in storage.states):
        state["window"] = host_tensor(WINDOW)
    for plane in kernel.planes:
        tensor = torch.zeros_like(local, dtype=plane.dtype)
        if plane.name == "master":
            tensor.copy_(local)
        state[plane.name] = placed_like(parameter, tensor)
    for name in kernel.scaled:
        tensor = local.new_zeros(bounds_shape(local.shape, dims), dtype=torch.float32)
        state[f"{name}_bound"] = placed_like(parameter, tensor, bounds_shape(parameter.shape, dims))
    for name, form in extras.items():
        state[name] = local.new_zeros(form, dtype=torch.float32)
    return state


def check_tensor(
    name: str, value: Any, dtype: torch.dtype, shape: Sequence[int], kernel: StepDefinition
) -> None:
    """Refuse a value that cannot be the local tensor ``name`` of a kernel's state."""
    if isinstance(value, Tensor) and value.dtype is dtype and value.shape == shape:
        return
    reason = f"it has no '{name}'"
    if isinstance(value, Tensor):
        reason = f"its '{name}' is {dtype_name(value.dtype)} of shape {tuple(value.shape)}"
    raise RecipeError(
        f"Cannot use a state because {reason}: rule '{kernel.rule.name}' in storage "
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
        tensors: the local tensors of the state by name, without counts and notes: the planes, and
            for each scaled code a bound on the exact values of each block, float32. A rounded value
            may exceed its bound: the window ends at 1.7 times the power of two above.
        row_shape: rows and columns in memory order. Without bounds each element is a row.
        extras: a matrix rule's states that are separate from the weight, float32.
        step: the number of steps taken. Its tensor is float32 on the CPU.
        place: of its first stream among the tensors of a step.
        gradient: set for a step.
        change: of a matrix rule, float32 in the parameter's shape: during a step the averaged
            gradient, then the change.
    """

    def __init__(
        self, owner: Tensor, entry: dict[str, Any], kernel: StepDefinition, extras: Shapes
    ) -> None:
        self.owner = owner
        self.entry = entry
        self.kernel = kernel
        self.storage = kernel.storage
        self.parameter = local_of(owner)
        if not self.parameter.is_contiguous():
            refuse_overlap(owner)
        step = entry["step"]
        # A script may have set a number, or moved it to a device, where a step would wait for it.
        if type(step) is not Tensor or not step.is_cpu or step.dtype is not torch.float32:
            step = entry["step"] = host_tensor(float(step))
        self.step = int(step)
        self.place = 0
        self.gradient: Any = None
        self.change: Any = None
        if not kernel.packed_names.isdisjoint(entry):
            strange = min(kernel.packed_names & entry.keys())
            raise RecipeError(
                f"Cannot step with '{strange}' in a state whose '{strange}' is packed.",
                "Remove it, and call optimizer.adopt(weights, states).",
            )
        shape = self.parameter.shape
        dims = row_dims(owner.shape) if kernel.scaled else 0
        columns = math.prod(shape[len(shape) - dims :])
        self.row_shape = self.parameter.numel() // max(1, columns), columns
        self.tensors: dict[str, Tensor] = {}
        for plane in kernel.planes:
            self._take(plane.name, plane.dtype, shape)
        for name in kernel.scaled:
            self._take(f"{name}_bound", torch.float32, bounds_shape(shape, dims))
        for name, form in extras.items():
            self._take(name, torch.float32, form)
        self.extras = {name: self.tensors[name] for name in extras}

    def _take(self, name: str, dtype: torch.dtype, shape: Sequence[int]) -> None:
        """Take a tensor of the state, to the parameter's device if the model has moved."""
        local = local_of(self.entry.get(name))
        check_tensor(name, local, dtype, shape, self.kernel)
        if local.device != self.parameter.device:
            self.entry[name] = self.entry[name].to(self.parameter.device)
            local = local_of(self.entry[name])
        self.tensors[name] = local

    def streams(self) -> list[Tensor]:
        """Return the tensors that a kernel reads and writes, in the order of its table."""
        streams = [self.parameter, self.gradient]
        streams += [self.tensors[name] for name in self.kernel.names]
        if self.change is not None:  # of a matrix rule, whose states have no bounds
            streams.append(self.change)
        return streams

    def in_rows(self, values: Tensor) -> Tensor:
        """Return a tensor in the parameter's shape as rows and columns: its own memory if that is
        dense and in order.
        """
        return values.contiguous().view(self.row_shape)
