"""Machines: chips in equal nodes, and the links between them.

Rates are in one direction and per chip, as in the table of chips.
"""

import math
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from narrowgauge.spec.chips import NUMBERS, Chip, get_chip
from narrowgauge.spec.require import require_number
from narrowgauge.spec.toml import read_file, refuse_unknown


@dataclass(frozen=True)
class Cluster:
    """Describe the equal nodes that run a job; the last may lack chips."""

    chip: Chip
    chips: int

    def __post_init__(self) -> None:
        require_number("chips", self.chips, 1, is_whole=True)

    @property
    def name(self) -> str:
        return f"{self.chips} × {self.chip.name}"

    @cached_property
    def chips_per_node(self) -> int:
        """Return the chips of a node. Nodes fill evenly: 128 chips in racks of 72 become twice 64, 12
        in nodes of 8 twice 6, 73 become 37 and 36.
        """
        return math.ceil(self.chips / math.ceil(self.chips / self.chip.chips_per_node))

    def link_bytes_per_second(self, ranks: int, stride: int = 1) -> float:
        """Return a chip's send rate to a group of ``ranks`` at a distance of ``stride`` in its node.

        In a full mesh each peer has its own link. Chips without a link, or beyond a bridge, go
        through the host.

        Example:
            >>> mesh = Cluster(get_chip("MI300X"), 8)
            >>> [mesh.link_bytes_per_second(ranks) / 1e9 for ranks in (2, 8)]
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
        return 2**30 * self.chip.host_memory_gb * self.chips_per_node

    @property
    def network_bytes_per_second(self) -> float:
        """Return the rate between nodes, per chip, when all chips of a node send."""
        return self.chip.network_gbit_per_second * 1e9 / 8


def chip_of(chip: Any) -> Chip:
    """Return a chip: a row of its own, a name, or a TOML file with the name of one that it is
    ``like``, and the numbers in which it differs.

    Raises:
        NarrowgaugeError: the file is unreadable, a name or key is unknown, or a number is none.
    """
    if isinstance(chip, Chip):
        return chip
    path = Path(str(chip))
    if path.suffix != ".toml":
        return get_chip(str(chip))
    table = read_file(path, "chip", "Write like = 'H100-SXM' and network_gbit_per_second = 50.")
    like = get_chip(str(table.pop("like", "")))
    refuse_unknown(table, (*NUMBERS, "link_gb_per_second", "chips_per_node"), str(path))
    if "memory_gb" in table:
        table["reachable_mib"] = None
    return replace(like, name=path.stem, **table)
