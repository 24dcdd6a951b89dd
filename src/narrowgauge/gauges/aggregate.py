"""The ranks that share parameters out, and how what each sees of its shards becomes what is told of the whole.

Largest magnitudes are joined by one maximum, all else by one sum. Both are the same calls on every rank, whatever it holds of
a parameter, be it nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges.recorder import Board
from narrowgauge.optim.shards import add_up, is_sharded, is_shared_out, local_of

SHARED = ("weight", "grad")
"""The kinds of tensors that ranks may share out. Operands are made of each rank's own batch."""


@dataclass(eq=False)
class Shards:
    """The ranks that share parameters out.

    Args:
        mesh: the ranks, a ``DeviceMesh``.
        share: by parameter, of how much of it this rank tells, 0 to 1: over all ranks that adds up to 1. What several ranks
            hold alike the first of them tells.

    Attributes:
        largest: magnitudes of the weights and gradients that were marked last, over all ranks.
    """

    mesh: Any
    share: dict[str, float]
    largest: Tensor | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Shards | None:
        """Those of a model's parameters by name; ``None`` without any, and where one mesh does not hold all shards."""
        meshes = {p.device_mesh for p in parameters.values() if is_sharded(p)}
        if len(meshes) != 1 or not any(map(is_shared_out, parameters.values())):
            return None
        mesh = meshes.pop()
        return cls(mesh, {name: _share(p, mesh.get_coordinate()) for name, p in parameters.items()})

    def join_largest(self, board: Board) -> None:
        """Take what was marked of weights and gradients to be the largest magnitudes of all shards."""
        places = shared_places(board)
        # Below all magnitudes, as NaN of one sign is above: as integers the bits of floats are ordered so.
        nothing = torch.full((), -1.0, dtype=torch.float32, device=board.marked_on)
        own = torch.stack([board.marks[k][0].to(nothing.device) if k in board.marks else nothing for k in places])
        bits = torch.where(own.isnan(), torch.nan, own).view(torch.int32)
        self.largest = self._over_ranks(bits, "max").view(torch.float32)
        for index, largest in zip(places, self.largest.unbind(), strict=True):
            if index in board.marks:
                board.marks[index] = (largest, *board.marks[index][1:])

    def total(self, values: Tensor) -> Tensor:
        """The sum over all ranks."""
        return self._over_ranks(values, "sum")

    def _over_ranks(self, values: Tensor, how: str) -> Tensor:
        groups = [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]
        return add_up(values.to(self.mesh.device_type), groups, how).to(values.device)


def _share(parameter: Any, coordinate: Sequence[int]) -> float:
    """Of how much of a parameter the rank at a place of a mesh tells."""
    is_whole = [p.is_replicate() for p in parameter.placements] if is_sharded(parameter) else [True] * len(coordinate)
    # Along an axis where nothing is cut all ranks hold the same. (What two axes cut is not ``is_shard()``.)
    if any(at and whole for at, whole in zip(coordinate, is_whole, strict=True)):
        return 0.0
    return float(local_of(parameter).numel() / max(1, parameter.numel()))


def shared_places(board: Board) -> list[int]:
    """The places of weights and gradients."""
    return [index for index, watched in enumerate(board.watched) if watched.kind in SHARED]
