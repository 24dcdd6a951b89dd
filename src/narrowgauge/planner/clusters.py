"""Clusters: chips in nodes, and the links between them.

A cluster is one or more groups of equal nodes. Groups may differ in chip, size and links (mixed generations). Rates are in one
direction and per chip, as in the table of chips. A TOML file has a table ``[[nodes]]`` per group::

    interconnect_gbit_per_second = 400   # of a node, if the groups do not say otherwise

    [[nodes]]
    count = 4
    chip = "H100-SXM"
    chips = 8
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, DataError, suggestion
from narrowgauge.planner.efficiency import SOFTWARE, efficiency_of
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.toml import load_toml

HOST_GB_PER_SECOND = {"PCIe3": 15.75, "PCIe4": 31.5, "PCIe5": 63.0, "NVLink-C2C": 450.0}
"""Printed rates of the links to the host with 16 lanes, in one direction, 10^9 bytes per second."""
_ASSUMED_HOST = "PCIe4"
_RACK = 16  # larger nodes are racks, and a job may take a part of a rack


@dataclass(frozen=True, slots=True)
class Nodes:
    """Describe a group of equal nodes.

    Args:
        chips, count: chips per node, and number of nodes.
        link_gb_per_second: between chips of a node, per chip, one direction, 10^9 bytes per second; None for the chip's rate.
        interconnect_gbit_per_second: of all network cards of a node; None for the usual rate of such nodes.
        host_memory_gb: per node, for offloading, in 2^30 bytes; None if unknown.
        dollars_per_hour: per chip; None if unknown.
        speed: relative to the chip's speed, such as 0.8 for stragglers.
        software: a row of :data:`narrowgauge.planner.efficiency.SOFTWARE`; empty for the chip's default assumption.
    """

    chip: Chip
    chips: int = 8
    count: int = 1
    link_gb_per_second: float | None = None
    interconnect_gbit_per_second: float | None = None
    host_memory_gb: float | None = None
    dollars_per_hour: float | None = None
    speed: float = 1.0
    software: str = ""

    def __post_init__(self) -> None:
        efficiency_of(self.chip, self.software)
        where = f"nodes of {self.chip.name} have"
        for name in _NUMBERS:
            value, least = getattr(self, name), 1 if name in _WHOLE else 0
            if value is not None and not (least <= value < math.inf):
                raise ChipError(f"{where} {name} = {value}.", f"Use {least} or more.")
        if not 0 < self.speed <= 1:
            raise ChipError(f"{where} speed = {self.speed:g}.", "Use a share of their chip's: 0.8.")
        if self.link_gb_per_second == 0 and self.chips > 1:
            raise ChipError(f"{where} link_gb_per_second = 0 between {self.chips} chips.", "Omit it for the chip's.")

    @property
    def num_chips(self) -> int:
        return self.chips * self.count

    @property
    def host_bytes_per_second(self) -> float:
        """Return the printed rate between a chip and its host; PCIe4's rate if the link is not published."""
        rates = (rate for name, rate in HOST_GB_PER_SECOND.items() if self.chip.host_link.startswith(name))
        return 1e9 * next(rates, HOST_GB_PER_SECOND[_ASSUMED_HOST])

    def link_bytes_per_second(self, ranks: int, stride: int = 1) -> float:
        """Return a chip's send rate to a group of ``ranks`` that lie ``stride`` apart in its node.

        In a full mesh each peer has its own link. Chips without a link, or beyond a bridge, go through the host.

        Example:
            >>> [Nodes(get_chip("MI300X")).link_bytes_per_second(ranks) / 1e9 for ranks in (2, 8)]
            [64.0, 448.0]
        """
        if self.link_gb_per_second is not None:
            return self.link_gb_per_second * 1e9
        chip = self.chip
        if not chip.link_gb_per_second or (chip.peers and ranks * stride > chip.peers):
            return self.host_bytes_per_second
        return 1e9 * min(chip.link_gb_per_second, (chip.peer_gb_per_second or math.inf) * max(1, ranks - 1))

    @property
    def is_network_assumed(self) -> bool:
        return self.interconnect_gbit_per_second is None

    @property
    def network_bytes_per_second(self) -> float:
        """Return the rate between nodes, per chip, when all chips of a node send.

        Example:
            >>> Nodes(get_chip("H100-SXM"), interconnect_gbit_per_second=3200).network_bytes_per_second / 1e9
            50.0
        """
        if self.interconnect_gbit_per_second is None:
            return self.chip.network_gbit_per_second * 1e9 / 8
        return self.interconnect_gbit_per_second * 1e9 / 8 / self.chips

    def __str__(self) -> str:
        late = f" at {self.speed:.0%} of their speed" if self.speed < 1 else ""
        return f"{self.num_chips} × {self.chip.name}{late}"


@dataclass(frozen=True, slots=True)
class Cluster:
    """Describe the groups of nodes that run one job.

    Args:
        chip_mtbf_hours: mean time between failures of one chip and its part of the node; None ignores failures.
    """

    name: str
    groups: tuple[Nodes, ...]
    chip_mtbf_hours: float | None = None

    def __post_init__(self) -> None:
        where = f"cluster {self.name!r} has"
        if not self.groups:
            raise ChipError(f"{where} no nodes.", "Add a table [[nodes]] with count, chip and chips.")
        if self.chip_mtbf_hours is not None and not self.chip_mtbf_hours > 0:
            raise ChipError(f"{where} chip_mtbf_hours = {self.chip_mtbf_hours:g}.", "Use more than 0, or omit it.")

    @property
    def chip_names(self) -> tuple[str, ...]:
        return tuple(group.chip.name for group in self.groups)

    @property
    def num_chips(self) -> int:
        return sum(group.num_chips for group in self.groups)

    @property
    def chips_per_node(self) -> int:
        """Return the chips of the smallest node: the largest group of ranks that always shares a node."""
        return min(group.chips for group in self.groups)

    @property
    def memory_bytes(self) -> float:
        """Return the bytes of the smallest chip, since all ranks of a job are alike."""
        return float(min(group.chip.memory_bytes for group in self.groups))

    @property
    def host_bytes(self) -> float | None:
        """Return the memory of the smallest host; None if unknown for any group."""
        sizes = [group.host_memory_gb for group in self.groups]
        return None if None in sizes else min(filter(None, sizes), default=0.0) * 2.0**30

    @property
    def dollars_per_hour(self) -> float | None:
        """Return the price of all chips together; None if unknown for any group."""
        prices = [group.dollars_per_hour for group in self.groups]
        if None in prices:
            return None
        return sum(group.num_chips * (price or 0.0) for group, price in zip(self.groups, prices, strict=True))

    @property
    def peak_flops_per_second(self) -> float:
        """Return the total peak of all chips for dense 16-bit matmuls, the denominator of MFU."""
        wide = ("bfloat16", "float16", "float32")
        peaks = [(group.num_chips, group.chip.peak_tflops) for group in self.groups]
        return 1e12 * sum(count * next(peak[name] for name in wide if name in peak) for count, peak in peaks)

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))


_FIELDS = tuple(field.name for field in dataclasses.fields(Nodes))
_NUMBERS = tuple(name for name in _FIELDS if name not in ("chip", "software"))
_CLUSTER = tuple(field.name for field in dataclasses.fields(Cluster) if field.name != "groups")
_WHOLE = ("chips", "count", "chips_per_node")


def cluster_of(
    chip: str | Chip,
    num_chips: int,
    chips_per_node: int | None = None,
    *,
    name: str = "",
    chip_mtbf_hours: float | None = None,
    **rates: Any,
) -> Cluster:
    """Return a cluster of one kind of chip. Fewer chips than a full node make one smaller node.

    Args:
        chips_per_node: None for eight, or for the chips on one link.
        name: for messages; empty for the number and the chip.
        rates: further fields of :class:`Nodes`.
    Raises:
        ChipError: unknown chip, or the chips do not fill whole nodes.

    Example:
        >>> cluster = cluster_of("H100-SXM", 32)
        >>> cluster.name, cluster.groups[0].count, cluster.groups[0].network_bytes_per_second / 1e9
        ('32 × H100-SXM5-80GB', 4, 50.0)
    """
    kind = get_chip(chip) if isinstance(chip, str) else chip
    counts_of(num_chips)
    usual_size = chips_per_node or kind.chips_per_node
    size = min(num_chips, usual_size)
    if chips_per_node is None and num_chips > usual_size > _RACK:
        # Racks fill evenly: 128 chips in racks of 72 become twice 64.
        size = next(chips for chips in range(usual_size, 0, -1) if num_chips % chips == 0)
    if num_chips % size:
        near = num_chips - num_chips % size
        raise ChipError(
            f"{num_chips} chips were requested in nodes of {size}, which is {num_chips / size:.2f} nodes.",
            f"Use {near} or {near + size} chips, or name the chips of a node.",
        )
    nodes = Nodes(kind, size, num_chips // size, **rates)
    return Cluster(name or str(nodes), (nodes,), chip_mtbf_hours)


def read_cluster(path: str | Path) -> Cluster:
    """Read a cluster from a TOML file.

    Its keys are the fields of :class:`Cluster` and, in tables ``[[nodes]]``, of :class:`Nodes`. A field of ``Nodes`` outside
    the tables is the default for all groups.
    """
    path = Path(path).expanduser()
    table = read_table(path, "cluster", "It is a TOML file with [[nodes]].")
    groups = table.pop("nodes", [])
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise DataError(f"{path}: nodes is not a list of tables.", "Write [[nodes]] before each group of nodes.")
    _check(path, table, ("nodes", *_CLUSTER, *_FIELDS))
    fields = {name: table.pop(name) for name in _CLUSTER if name in table}
    nodes = tuple(_nodes(path, {**table, **group}) for group in groups)
    return Cluster(**{"name": path.stem, **fields, "groups": nodes})


def cluster_in(path: Path, table: Mapping[str, Any]) -> Cluster:
    """Return the cluster of one kind of chip, from a table with the arguments of :func:`cluster_of`."""
    _check(path, table, (*_CLUSTER, "chips_per_node", *(name for name in _FIELDS if name != "count")))
    rest = {name: value for name, value in table.items() if name not in ("chip", "chips")}
    return cluster_of(table["chip"], table["chips"], **rest)


def _nodes(path: Path, table: Mapping[str, Any]) -> Nodes:
    _check(path, table, _FIELDS)
    if "chip" not in table:
        raise DataError(f"{path}: a group of nodes names no chip.", 'Add chip = "H100-SXM" (narrowgauge show chips).')
    return Nodes(**{**table, "chip": get_chip(table["chip"])})


def _check(path: Path, table: Mapping[str, Any], names: Sequence[str]) -> None:
    """Raise for unknown keys and values of the wrong type."""
    examples = {"name": "mine", "chip": "H100-SXM", "software": SOFTWARE[-1]}
    for name, value in table.items():
        if name not in names:
            advice = suggestion(name, names) or f"Known: {', '.join(names)}."
            raise DataError(f"{path}: no key is named {name!r}.", advice)
        if name in examples and not isinstance(value, str):
            raise DataError(f"{path}: {name} = {value!r} is no name.", f'Write {name} = "{examples[name]}".')
        number = int if name in _WHOLE else (int, float)
        if name not in examples and (isinstance(value, bool) or not isinstance(value, number)):
            raise DataError(f"{path}: {name} = {value!r} is not a number, or not a whole one.", f"Write {name} = 8.")


def read_table(path: Path, content: str, advice: str) -> dict[str, Any]:
    """Read a TOML file. ``what`` names its content. It and ``advice`` enter the message of a :class:`DataError`."""
    try:
        return load_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot read the {content} {path}: {reason.rstrip('.')}.", advice) from None


# ── the clusters that a question names, and parts of them where fewer chips may be better ─────────────────────────────────


def clusters_asked_for(
    cluster: Cluster | str | Path | Sequence[Cluster | str | Path],
    chip: str | Chip | Sequence[str | Chip],
    chips: int | Sequence[int],
    chips_per_node: int | None = None,
    **rates: float | str | None,
) -> tuple[Cluster, ...]:
    """Return the named clusters, or every chip in every number. ``rates`` are fields of :class:`Nodes`; None is ignored."""
    clusters = [cluster] if isinstance(cluster, Cluster | str | Path) else list(cluster)
    kinds = [chip] if isinstance(chip, str | Chip) else list(chip)
    counts = counts_of(chips)
    fields: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
    if clusters and (kinds or counts or fields):
        second = "chips" if kinds or counts else next(iter(fields))
        raise ChipError(f"a cluster and {second} were requested together.", "Write it into the cluster's file.")
    if clusters:
        return tuple(c if isinstance(c, Cluster) else read_cluster(c) for c in clusters)
    return tuple(cluster_of(kind, count, chips_per_node, **fields) for kind in kinds for count in counts or [1])


def counts_of(chips: int | Sequence[int]) -> list[int]:
    counts = [chips] if isinstance(chips, int) else list(chips)
    if any(count < 1 for count in counts):
        raise ChipError(f"{min(counts)} chips were requested.", "Use 1 or more.")
    return counts


def with_nodes(cluster: Cluster, count: int, **fields: Any) -> Cluster:
    """Return a cluster of ``count`` nodes like the first group's. ``fields`` replace the node's fields."""
    group = replace(cluster.groups[0], count=count, **fields)
    return replace(cluster, name=str(group), groups=(group,))


def parts_of(cluster: Cluster) -> Iterator[Cluster]:
    """Yield smaller clusters: powers of two of one node's chips, then of each group's nodes, and the whole cluster.

    Example:
        >>> [part.num_chips for part in parts_of(cluster_of("H100-SXM", 48))]
        [1, 2, 4, 8, 16, 32, 48]
    """
    for group in cluster.groups:
        alone = replace(cluster, groups=(group,))
        yield from (with_nodes(alone, 1, chips=chips) for chips in _powers_below(group.chips))
        yield from (with_nodes(alone, count) for count in _powers_below(group.count))
        if len(cluster.groups) > 1:
            yield with_nodes(alone, group.count)
    yield cluster


def between_sizes(few: Cluster, many: Cluster) -> Iterator[Cluster]:
    """Yield up to three numbers of whole nodes between two clusters of equal nodes, the fewest first.

    Example:
        >>> [cluster.num_chips for cluster in between_sizes(cluster_of("H100-SXM", 32), cluster_of("H100-SXM", 64))]
        [40, 48, 56]
    """
    first, last = few.groups[0], many.groups[0]
    if len(many.groups) > 1 or first.chips != last.chips:
        return
    counts = (first.count + (last.count - first.count) * quarter // 4 for quarter in (1, 2, 3))
    for count in dict.fromkeys(counts):
        if first.count < count < last.count:
            yield with_nodes(many, count)


def _powers_below(number: int) -> list[int]:
    return [1 << power for power in range((number - 1).bit_length())]
