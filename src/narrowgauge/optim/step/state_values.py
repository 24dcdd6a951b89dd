"""The values of a state: its weight and states in float32, read and written by the definition of
codes.
"""

from torch import Tensor

from narrowgauge.optim.step import codes
from narrowgauge.optim.step.bit_layout import block_peaks
from narrowgauge.optim.step.state import LocalState
from narrowgauge.optim.step.state_chunks import chunks_of, integers_of


def stored(state: LocalState, name: str) -> Tensor:
    """Return a copy of the weight (``"weight"``) or a state in the parameter's shape, in float32.

    A weight rounds to the parameter (:func:`narrowgauge.optim.step.codes.inside_cell`).
    """
    if name in state.extras:
        return state.extras[name].clone()
    storage = state.storage
    dtype = codes.value_dtype(storage)
    result = state.parameter.new_empty(state.parameter.shape, dtype=dtype)
    for chunk in chunks_of(state, result):
        lane = chunk.lane()
        value = codes.read_state(storage, lane, name)
        if name == "weight" and storage.visible != "float32":
            value = codes.inside_cell(storage, chunk.weight, lane, value)
        chunk.arguments[0].copy_(value)
    return result


def store_weight(state: LocalState, values: Tensor) -> None:
    """Store ``values`` as the weight, rounded to nearest.

    The parameter becomes its visible part.
    """
    storage = state.storage
    for chunk in chunks_of(state, values.detach(), writes=True):
        value = chunk.arguments[0].to(codes.value_dtype(storage))
        bits, fields = codes.write_weight(storage, codes.into_cell(storage, value), None)
        integers_of(chunk.weight).copy_(codes.weight_word(storage.visible, bits))
        chunk.store(fields)


def store_state(state: LocalState, name: str, values: Tensor, seed: int) -> None:
    """Store the values of a state. A stochastic code rounds stochastically under ``seed``."""
    if name in state.extras:
        state.extras[name].copy_(values)
        return
    storage = state.storage
    value = values.detach().to(codes.value_dtype(storage))
    if name in state.kernel.scaled:
        bound = state.tensors[f"{name}_bound"]
        bound.copy_(block_peaks(state.in_rows(value)).view(bound.shape))
    for chunk in chunks_of(state, value):
        # The random bits are a hash of the stored weights, as in a step.
        lane = chunk.lane()
        weight = codes.read_weight(storage, lane)
        addend = codes.addends(storage, weight, lane.gradient, seed)[name]
        chunk.store(codes.write_state(storage, lane, name, chunk.arguments[0], addend))
