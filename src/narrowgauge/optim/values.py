"""The values of a state: its weight and states in float32, read and written by the definition of
codes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from narrowgauge.numerics.chunks import chunk_size
from narrowgauge.numerics.rounding import narrowed
from narrowgauge.optim import cells, codes, extras
from narrowgauge.optim.codes import Lane
from narrowgauge.optim.row_bounds import peaks_of_rows
from narrowgauge.optim.walk import spans

if TYPE_CHECKING:
    from narrowgauge.optim.state import LocalState


def begin(state: LocalState) -> None:
    """Set the master from the parameter. Allocate memory first."""

    def master(lane: Lane) -> dict[str, Tensor]:
        value = codes.visible_value(state.storage.visible, lane.visible)
        return codes.write_weight(state.storage, lane, value, None)[1]

    if state.storage.master:
        rewrite(state, master)


def stored(state: LocalState, name: str, count: int | None = None) -> Tensor:
    """Return a copy of the weight (``"weight"``) or a state in the parameter's shape, in
    float32, or flat its first ``count`` values.

    A weight rounds to the parameter (:func:`narrowgauge.optim.cells.inside_cell`).
    """
    if name in state.extras:
        return extra_values(state, name).clone()
    storage = state.storage
    is_rounded = name == "weight" and storage.visible != "float32"

    def value(lane: Lane) -> Tensor:
        if name != "weight":
            return codes.read_state(storage, lane, name)
        weight = codes.read_weight(storage, lane)
        if is_rounded:
            return cells.inside_cell(storage, lane.visible, weight)
        return weight

    if count is None:
        return read(state, value).view(state.parameter.shape)
    if state.row_dims:  # unpacked whole
        return stored(state, name).reshape(-1)[:count]
    return read(state, value, count).view(-1)


def extra_values(state: LocalState, name: str, index: tuple[int, ...] = ()) -> Tensor:
    """Return the float32 values of an extra, or of its ``index``.

    For a float32 extra this is its own memory, not a copy.
    """
    bound = None
    if name in state.extra_bounds:
        bound = state.extra_bounds[name][index]
    return extras.alone_value(state.extra_codes[name], state.extras[name][index], bound)


def store_extra(
    state: LocalState,
    name: str,
    values: Tensor,
    seed: Tensor,
    skip: Tensor | None = None,
    index: tuple[int, ...] = (),
) -> None:
    """Store values of an extra, or of its ``index``, unless ``skip`` (0-d bool)."""
    bound = None
    if name in state.extra_bounds:
        bound = values.abs().amax(-1, keepdim=True)
    new = extras.encode_alone(state.extra_codes[name], values, seed, bound)
    for tensor, value in ((state.extras[name], new), (state.extra_bounds.get(name), bound)):
        if tensor is None or value is None:
            continue
        if skip is not None:
            value = torch.where(skip, tensor[index], value)
        tensor[index].copy_(value)


def store_weight(state: LocalState, values: Tensor) -> None:
    """Store ``values`` as the weight, rounded to nearest.

    The parameter becomes its visible part.
    """
    weights = _bounded(state, "weight", values)
    seen = torch.empty_like(weights, memory_format=torch.contiguous_format, dtype=torch.float32)
    for span in spans(state, weights, seen):
        weight, into = span.arguments
        lane = span.lane()
        weight = cells.into_cell(state.storage, weight)
        bits, fields = codes.write_weight(state.storage, lane, weight, None)
        into.copy_(codes.visible_value(state.storage.visible, bits))
        span.store(fields)
    visible = narrowed(seen, getattr(torch, state.storage.visible))
    if state.parameter.dtype is visible.dtype:
        state.parameter.data.copy_(visible)  # in place, since this memory may have views
    else:
        state.parameter.data = visible


def store_low_bits(state: LocalState, random: Tensor) -> None:
    """Fill the weight's low bits of a new state from 32 random bits for each element, int32 in
    the parameter's shape.
    """
    rewrite(state, partial(cells.random_low_bits, state.storage), random)


def store_state(state: LocalState, name: str, values: Tensor, seed: Tensor) -> None:
    """Store the values of a state.

    A stochastic code rounds stochastically under ``seed`` (0-d int32).
    """
    if name in state.extras:
        store_extra(state, name, values, seed)
        return

    def write(lane: Lane, value: Tensor) -> dict[str, Tensor]:
        # The random bits are a hash of the stored weights, as in a step.
        weight = codes.read_weight(state.storage, lane)
        addends = codes.addends(state.storage, weight, lane.gradient, seed)
        return codes.write_state(state.storage, lane, name, value, addends[name])

    rewrite(state, write, _bounded(state, name, values))


def _bounded(state: LocalState, name: str, values: Tensor) -> Tensor:
    """Return values in the dtype of the rule, and set the bounds of their rows."""
    value = values.detach().to(codes.value_dtype(state.storage))
    if name in state.bounds:
        state.bounds[name].copy_(peaks_of_rows(state, value))
    return value


def read(state: LocalState, value: Callable[[Lane], Tensor], count: int | None = None) -> Tensor:
    """Return the values of the lanes as rows and columns, or of the first
    ``count`` elements.
    """
    dtype = codes.value_dtype(state.storage)
    result = torch.empty(state.form, dtype=dtype, device=state.parameter.device)
    if count is not None:
        result = result.new_empty(1, min(count, state.parameter.numel()))
    unfilled = result.view(-1)
    for span in spans(state, at_once=at_once(state)):
        part = value(span.lane()).reshape(-1)[: len(unfilled)]
        unfilled[: len(part)] = part
        unfilled = unfilled[len(part) :]
        if not len(unfilled):
            break
    return result


def rewrite(state: LocalState, write: Callable[..., dict[str, Tensor]], *arguments: Tensor) -> None:
    """Replace the fields that ``write(lane, *parts of other tensors)`` returns."""
    for span in spans(state, *arguments, at_once=at_once(state)):
        span.store(write(span.lane(), *span.arguments))


def at_once(state: LocalState) -> int:
    """Return the elements of a span. Beside whole matrices, temporaries are to be few."""
    most = chunk_size(state.parameter.device)
    return most // 4 if state.kernel.is_matrix else most
