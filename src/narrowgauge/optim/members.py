"""The local state of a parameter in a step: on a CPU that of the last one, if it was made from the
same tensors.

On a GPU a script may move states between two steps, to have their memory.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from narrowgauge.optim.pairing import Group, Kernels
from narrowgauge.optim.state import LocalState, State


def local_state_of(
    kernels: Kernels, group: Group, parameter: Tensor, entry: dict[str, Any]
) -> LocalState:
    """Return the local state of a parameter, whose entry in ``optimizer.state`` is given."""
    made_from: list[Any] = []
    if parameter.is_cpu and type(parameter) in (nn.Parameter, Tensor):
        made_from += kernels.kernel_of(group, parameter), parameter.stride(), *entry
        for tensor in (parameter, *entry.values()):
            if isinstance(tensor, Tensor):
                made_from += id(tensor), tensor.data_ptr(), tensor.dtype, tensor.shape
    kept: Any = getattr(entry, "kept", (None, None))
    state: LocalState
    if made_from == kept[0]:
        state = kept[1]
        state.entry = entry
        state.step = int(entry["step"])
        return state
    state = kernels.local_part(group, parameter, entry)
    if isinstance(entry, State):
        entry.kept = None, None
        if made_from and not state.kernel.is_matrix:  # a matrix rule reads more options
            entry.kept = made_from, state
    return state
