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
    if not parameter.is_cpu or type(parameter) not in (nn.Parameter, Tensor):
        return kernels.local_part(group, parameter, entry)
    made_from = [group["storage"], group.get("rule"), bool(group.get("momentum")), *entry]
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
    # A matrix rule's depends on more options.
    if isinstance(entry, State) and not state.kernel.is_matrix:
        entry.kept = made_from, state
    return state
