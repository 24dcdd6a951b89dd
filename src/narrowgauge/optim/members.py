"""The local states of a step's parameters.

On a CPU the next step takes them again, if all that they were made from is there, unchanged. On a
GPU a script may move states between two steps, to have their memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from typing import Any

from torch import Tensor, nn

from narrowgauge.optim.pairing import Group, Kernels
from narrowgauge.optim.state import LocalState, State

PLAIN = {Tensor, nn.Parameter}
Entries = Sequence[dict[str, Any]]
"""Of ``optimizer.state``."""


class Members:
    """Make the local states of groups, or take those of the last step."""

    def __init__(self) -> None:
        self._marks: dict[int, list[Any]] = {}  # by group

    def states(
        self, kernels: Kernels, group: Group, parameters: Sequence[Tensor], entries: Entries
    ) -> list[LocalState]:
        """Return the local states of parameters, with their entries."""
        marks = []
        if parameters and parameters[0].is_cpu and {*map(type, parameters)} <= PLAIN:
            marks = _marks(group, parameters, entries)
        states: list[Any] = []
        if marks and marks == self._marks.get(id(group)):
            states = [getattr(entry, "local", None) for entry in entries]
        if not states or None in states:
            states = []
            for parameter, entry in zip(parameters, entries, strict=True):
                state = kernels.local_part(group, parameter, entry)
                # Those of a matrix rule depend on more options.
                if marks and isinstance(entry, State) and not state.kernel.is_matrix:
                    entry.local = state
                states.append(state)
        for state, entry in zip(states, entries, strict=True):
            state.entry = entry
            state.step = int(entry["step"])
        self._marks[id(group)] = marks
        return states


def _marks(group: Group, parameters: Sequence[Tensor], entries: Entries) -> list[Any]:
    """Return what local states are made from."""
    values = chain.from_iterable(entry.values() for entry in entries)
    tensors = [*parameters, *[x for x in values if isinstance(x, Tensor)]]
    return [
        (group["storage"], group.get("rule"), bool(group.get("momentum"))),
        [list(entry) for entry in entries],
        [id(x) for x in tensors],
        [x.data_ptr() for x in tensors],
        [x.dtype for x in tensors],
        [x.shape for x in tensors],
    ]
