"""Clusters: chips in equal nodes, and the links between them.

Rates are in one direction and per chip, as in the table of chips. A TOML file has the arguments of
:func:`cluster_of`::

    chip = "H100-SXM"
    chips = 32
    interconnect_gbit_per_second = 400   # of a node
"""

from __future__ import annotations

import inspect
import math
from dataclasses import dataclass
from pathlib import Path

from narrowgauge.errors import DataError
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.toml import read_file, refuse_unknown
from narrowgauge.spec.values import require_number

HOST_GB_PER_CHIP = 256
"""Memory of a host for each of its chips: 2 TB for the eight of a DGX A100, H100 or B200 (NVIDIA's
data sheets).
"""
HOST_UPDATES = 4e9
"""Parameters that the processors of a node step in a second: ZeRO-Offload, arXiv 2101.06840, table 4."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """Describe the equal nodes that run a job; the last may lack chips.

    Args:
        chips: number of all chips.
        interconnect_gbit_per_second: of all network cards of a node.
        host_memory_gb: of a node.
        host_updates_per_second: parameters that a node's processors step in a second.
        name: for tables and messages.
    """

    chip: Chip
    chips: int
    chips_per_node: int
    interconnect_gbit_per_second: float
    host_memory_gb: float
    host_updates_per_second: float
    name: str

    def link_bytes_per_second(self, ranks: int, stride: int = 1) -> float:
        """Return a chip's send rate to a group of ``ranks`` at a distance of ``stride`` in its node.

        In a full mesh each peer has its own link. Chips without a link, or beyond a bridge, go
        through the host.

        Example:
            >>> [cluster_of("MI300X", 8).link_bytes_per_second(ranks) / 1e9 for ranks in (2, 8)]
            [64.0, 448.0]
        """
        chip = self.chip
        if not chip.link_gb_per_second or ranks * stride > (chip.peers or math.inf):
            return 1e9 * chip.host_gb_per_second
        of_peers = (chip.peer_gb_per_second or math.inf) * max(1, ranks - 1)
        return 1e9 * min(chip.link_gb_per_second, of_peers)

    @property
    def host_memory_bytes(self) -> float:
        """Return the memory of a node's host."""
        return 2**30 * self.host_memory_gb

    @property
    def network_bytes_per_second(self) -> float:
        """Return the rate between nodes, per chip, when all chips of a node send.

        Example:
            >>> cluster_of("H100-SXM", 32, interconnect_gbit_per_second=3200).network_bytes_per_second / 1e9
            50.0
        """
        return self.interconnect_gbit_per_second * 1e9 / 8 / self.chips_per_node


def cluster_of(
    chip: str | Chip,
    chips: int,
    chips_per_node: int | None = None,
    *,
    name: str = "",
    interconnect_gbit_per_second: float = 0.0,
    host_memory_gb: float = 0.0,
    host_updates_per_second: float = HOST_UPDATES,
) -> Cluster:
    """Return a cluster. Fewer chips than a full node make one smaller node.

    Args:
        chips_per_node: None for eight, or for the chips on one link.
        name: empty for the number and the chip.
        interconnect_gbit_per_second, host_memory_gb: of a node; 0 for the chip's usual rate, and
            for :data:`HOST_GB_PER_CHIP`.
    Raises:
        NarrowgaugeError: an unknown chip, or a number that is none of at least 1.
    """
    kind = chip if isinstance(chip, Chip) else get_chip(str(chip))
    require_number("chips", chips, 1, is_whole=True)
    if chips_per_node is None:
        # Nodes fill evenly: 128 chips in racks of 72 become twice 64, 12 in nodes of 8 twice 6, 73
        # become 37 and 36.
        chips_per_node = math.ceil(chips / math.ceil(chips / kind.chips_per_node))
    require_number("chips_per_node", chips_per_node, 1, is_whole=True)
    size = min(chips, chips_per_node)
    if not interconnect_gbit_per_second:
        interconnect_gbit_per_second = kind.network_gbit_per_second * size
    if not host_memory_gb:
        host_memory_gb = HOST_GB_PER_CHIP * size
    require_number("interconnect_gbit_per_second", interconnect_gbit_per_second)
    require_number("host_memory_gb", host_memory_gb)
    require_number("host_updates_per_second", host_updates_per_second, 1)
    host = host_memory_gb, host_updates_per_second
    name = name or f"{chips} × {kind.name}"
    return Cluster(kind, chips, size, interconnect_gbit_per_second, *host, name)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file with the arguments of :func:`cluster_of`.

    Its stem is the name.

    Raises:
        NarrowgaugeError: the file is unreadable, a key or value is unknown, or a required key is
            missing.
    """
    advice = "Write chip = 'H100-SXM' and chips = 8."
    table = read_file(path, "cluster", advice)
    refuse_unknown(table, inspect.signature(cluster_of).parameters, str(path))
    if not {"chip", "chips"} <= {*table}:
        raise DataError(f"{path} does not say its chip or its chips.", advice)
    return cluster_of(**{"name": Path(path).stem, **table})
