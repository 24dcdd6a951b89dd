"""Clusters: chips in nodes, and the links between them.

A cluster is one or more groups of equal nodes; groups may differ in chip, size and links (mixed generations). Rates are in one
direction and per chip, as in the table of chips. A TOML file has a table ``[[nodes]]`` per group::

    interconnect_gbit_per_second = 400   # of a node, if the groups do not say otherwise

    [[nodes]]
    count = 4
    chip = "H100-SXM"
    chips = 8
"""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.spec.chips import Chip


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes.

    Args:
        chip: of every node.
        chips: in each node.
        count: of nodes.
        link_gb_per_second: between the chips of a node, per chip in one direction, 10^9 bytes per second; None for the chip's.
        interconnect_gbit_per_second: of a node's network cards together, 10^9 bits per second; None if there is one node.
        memory_gb: usable by the job on each chip; None for the chip's.
        host_memory_gb: of each node, for offloading; None if unknown.
        dollars_per_hour: of one chip; None if unknown.
    """

    chip: Chip
    chips: int = 8
    count: int = 1
    link_gb_per_second: float | None = None
    interconnect_gbit_per_second: float | None = None
    memory_gb: float | None = None
    host_memory_gb: float | None = None
    dollars_per_hour: float | None = None


@dataclass(frozen=True, slots=True)
class Cluster:
    """Groups of nodes that run one job.

    Args:
        name: for messages.
        groups: of equal nodes, one or more.
        latency_seconds: of a message between nodes.
        chip_mtbf_hours: mean time between failures of one chip with its share of the node; None leaves failures out.
    """

    name: str
    groups: tuple[Nodes, ...]
    latency_seconds: float = 5e-6
    chip_mtbf_hours: float | None = None

    @property
    def num_chips(self) -> int:
        """Chips of all nodes."""
        return sum(group.chips * group.count for group in self.groups)
