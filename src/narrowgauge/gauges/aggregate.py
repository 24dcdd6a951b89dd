"""Aggregation over the ranks that shard a model: from metrics of shards to metrics of whole parameters.

Amax is reduced by one maximum, everything else by one sum. Every rank makes the same calls, even if it holds nothing of a
parameter.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.gauges.recorder import Recorder
from narrowgauge.numerics.shards import add_up, is_sharded, is_shared_out, local_of

SHARED = ("weight", "grad")
"""The kinds of tensors that may be sharded. Operands of matmuls come from each rank's own batch."""


@dataclass(eq=False)
class Shards:
    """The ranks that shard the parameters.

    Args:
        mesh: the ``DeviceMesh`` of the ranks.
        share: for each parameter the share of its elements that this rank reports, 0 to 1; shares add up to 1 over all
            ranks. A shard with replicas is reported by the first replica.

    Attributes:
        largest: amax over all ranks of the weights and gradients recorded last.
    """

    mesh: Any
    share: dict[str, float]
    largest: Tensor | None = None

    @classmethod
    def of(cls, parameters: Mapping[str, Any]) -> Shards | None:
        """From parameters by name; ``None`` if nothing is sharded or the shards lie on several meshes."""
        meshes = {p.device_mesh for p in parameters.values() if is_sharded(p)}
        if len(meshes) != 1 or not any(map(is_shared_out, parameters.values())):
            return None
        mesh = meshes.pop()
        return cls(mesh, {name: _share(p, mesh.get_coordinate()) for name, p in parameters.items()})

    def join_amax(self, recorder: Recorder) -> None:
        """Replace the recorded amax of weights and gradients by the amax over all shards."""
        entries = sharded_entries(recorder)
        # Below all magnitudes, and NaN above: the integer order of their bits.
        nothing = torch.full((), -1.0, dtype=torch.float32, device=recorder.stats_device)
        own = torch.stack(
            [recorder.stats_of[k][0].to(nothing.device) if k in recorder.stats_of else nothing for k in entries]
        )
        bits = torch.where(own.isnan(), torch.nan, own).view(torch.int32)
        self.largest = self._over_ranks(bits, "max").view(torch.float32)
        for index, largest in zip(entries, self.largest.unbind(), strict=True):
            if index in recorder.stats_of:
                recorder.stats_of[index] = (largest, *recorder.stats_of[index][1:])

    def total(self, values: Tensor) -> Tensor:
        """Sum over all ranks."""
        return self._over_ranks(values, "sum")

    def _over_ranks(self, values: Tensor, op: str) -> Tensor:
        groups = [self.mesh.get_group(axis) for axis in range(self.mesh.ndim)]
        return add_up(values.to(self.mesh.device_type), groups, op).to(values.device)


def _share(parameter: Any, coordinate: Sequence[int]) -> float:
    """The share of a parameter that the rank at a coordinate of the mesh reports."""
    is_whole = [p.is_replicate() for p in parameter.placements] if is_sharded(parameter) else [True] * len(coordinate)
    # Along a mesh axis that does not shard, all ranks are replicas. (``is_shard()`` is false for two sharding axes.)
    if any(index and whole for index, whole in zip(coordinate, is_whole, strict=True)):
        return 0.0
    return float(local_of(parameter).numel() / max(1, parameter.numel()))


def sharded_entries(recorder: Recorder) -> list[int]:
    """The entries of tensors that may be sharded."""
    return [index for index, watched in enumerate(recorder.watched) if watched.kind in SHARED]
