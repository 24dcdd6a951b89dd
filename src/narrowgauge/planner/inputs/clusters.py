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

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import ChipError, DataError, suggestion
from narrowgauge.planner.inputs.efficiency import SOFTWARE, software_of
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.toml import load_toml

HOST_GB_PER_SECOND = {"PCIe3": 15.75, "PCIe4": 31.5, "PCIe5": 63.0, "NVLink-C2C": 450.0}
"""Printed rates of the links to the host in one direction, 10^9 bytes per second; of 16 lanes."""
_ASSUMED_HOST = "PCIe4"


@dataclass(frozen=True, slots=True)
class Nodes:
    """Equal nodes.

    Args:
        chips: in each node.
        count: of nodes.
        link_gb_per_second: between the chips of a node, per chip in one direction, 10^9 bytes per second; None for the chip's.
        interconnect_gbit_per_second: of a node's network cards together, 10^9 bits per second; None for what such nodes usually
            have (``is_network_assumed``).
        memory_gb: usable by the job on each chip, 2^30 bytes; None for the chip's.
        host_memory_gb: of each node, for offloading, 2^30 bytes; None if unknown.
        dollars_per_hour: of one chip; None if unknown.
        speed: of these nodes as a share of their chip's, such as 0.8 for nodes that are late at every step.
        watts: of one chip, as printed; None for what is published of the chip.
        software: a row of :data:`narrowgauge.planner.inputs.efficiency.SOFTWARE`; empty for what is assumed on the chip.
    """

    chip: Chip
    chips: int = 8
    count: int = 1
    link_gb_per_second: float | None = None
    interconnect_gbit_per_second: float | None = None
    memory_gb: float | None = None
    host_memory_gb: float | None = None
    dollars_per_hour: float | None = None
    speed: float = 1.0
    watts: float | None = None
    software: str = ""

    def __post_init__(self) -> None:
        software_of(self.chip, self.software)
        for name in _NODE_NUMBERS:
            value = getattr(self, name)
            least = 1 if name in ("chips", "count") else 0
            if value is not None and not (least <= value < math.inf):
                raise ChipError(f"nodes of {self.chip.name} have {name} = {value}.", f"Use {least} or more.")
        if not 0 < self.speed <= 1:
            raise ChipError(
                f"nodes of {self.chip.name} have speed = {self.speed:g}.", "Use a share of their chip's: 0.8."
            )
        if self.memory_gb is not None and self.memory_gb > self.chip.memory_gb:
            raise ChipError(
                f"{self.memory_gb:g} GB of memory were given for {self.chip.name}, which has {self.chip.memory_gb}.",
                "Name another chip, or omit memory_gb.",
            )
        if self.link_gb_per_second == 0 and self.chips > 1:
            raise ChipError(
                f"nodes of {self.chips} {self.chip.name} have a link of 0 GB/s.", "Omit it for the chip's own."
            )

    @property
    def num_chips(self) -> int:
        return self.chips * self.count

    @property
    def memory_bytes(self) -> float:
        """Usable bytes of each chip."""
        return float(self.chip.memory_bytes if self.memory_gb is None else self.memory_gb * 2**30)

    @property
    def host_bytes_per_second(self) -> float:
        """Between a chip and its host, in one direction, as printed; PCIe4's where the link is not published."""
        found = (rate for name, rate in HOST_GB_PER_SECOND.items() if self.chip.host_link.startswith(name))
        return 1e9 * next(found, HOST_GB_PER_SECOND[_ASSUMED_HOST])

    @property
    def link_bytes_per_second(self) -> float:
        """Between the chips of a node, per chip in one direction; through the host where they have no link of their own.

        Example:
            >>> Nodes(get_chip("RTX-4090")).link_bytes_per_second / 1e9
            31.5
        """
        own = self.chip.link_gb_per_second if self.link_gb_per_second is None else self.link_gb_per_second
        return own * 1e9 if own else self.host_bytes_per_second

    @property
    def is_network_assumed(self) -> bool:
        return self.interconnect_gbit_per_second is None

    @property
    def network_bytes_per_second(self) -> float:
        """Between nodes, per chip in one direction, when all chips of a node send.

        Example:
            >>> Nodes(get_chip("H100-SXM"), interconnect_gbit_per_second=3200).network_bytes_per_second / 1e9
            50.0
        """
        if self.interconnect_gbit_per_second is not None:
            return self.interconnect_gbit_per_second * 1e9 / 8 / self.chips
        return self.chip.network_gbit_per_second * 1e9 / 8

    def __str__(self) -> str:
        late = f" at {self.speed:.0%} of their speed" if self.speed < 1 else ""
        return f"{self.num_chips} × {self.chip.name}{late}"


_NODE_FIELDS = tuple(field.name for field in dataclasses.fields(Nodes))
_NODE_NUMBERS = tuple(name for name in _NODE_FIELDS if name not in ("chip", "software"))


@dataclass(frozen=True, slots=True)
class Cluster:
    """Groups of nodes that run one job.

    Args:
        latency_seconds: of a message between nodes.
        chip_mtbf_hours: mean time between failures of one chip with its share of the node; None leaves failures out.
    """

    name: str
    groups: tuple[Nodes, ...]
    latency_seconds: float = 5e-6
    chip_mtbf_hours: float | None = None

    def __post_init__(self) -> None:
        if not self.groups:
            raise ChipError(f"cluster {self.name!r} has no nodes.", "Add a table [[nodes]] with count, chip and chips.")
        if not 0 <= self.latency_seconds < 1:
            raise ChipError(
                f"cluster {self.name!r} has latency_seconds = {self.latency_seconds:g}.", "Use seconds: 5e-6."
            )
        if self.chip_mtbf_hours is not None and not self.chip_mtbf_hours > 0:
            raise ChipError(
                f"cluster {self.name!r} has chip_mtbf_hours = {self.chip_mtbf_hours:g}.", "Use more than 0, or omit it."
            )

    @property
    def chip_names(self) -> tuple[str, ...]:
        """Of each group of nodes."""
        return tuple(group.chip.name for group in self.groups)

    @property
    def num_chips(self) -> int:
        return sum(group.num_chips for group in self.groups)

    @property
    def chips_per_node(self) -> int:
        """Chips of the smallest node: the largest group of ranks that surely shares a node."""
        return min(group.chips for group in self.groups)

    @property
    def memory_bytes(self) -> float:
        """Usable bytes of the smallest chip; a job's ranks are alike."""
        return min(group.memory_bytes for group in self.groups)

    @property
    def host_bytes(self) -> float | None:
        """Memory of the smallest host; None if one group's is unknown."""
        known = [group.host_memory_gb for group in self.groups]
        return None if None in known else min(gb for gb in known if gb is not None) * 2.0**30

    @property
    def dollars_per_hour(self) -> float | None:
        """Of all chips together; None if one group's price is unknown."""
        prices = [group.dollars_per_hour for group in self.groups]
        if any(price is None for price in prices):
            return None
        return sum(g.num_chips * (g.dollars_per_hour or 0.0) for g in self.groups)

    @property
    def watts(self) -> float | None:
        """Printed power of all chips together; None if one group's is not known.

        Example:
            >>> cluster_of("H100-SXM", 16).watts
            11200.0
        """
        each = [group.watts or group.chip.watts for group in self.groups]
        if None in each:
            return None
        return float(sum(group.num_chips * (power or 0.0) for group, power in zip(self.groups, each, strict=True)))

    @property
    def peak_flops_per_second(self) -> float:
        """Of all chips together, dense matmuls of 16-bit operands (of float32 ones where a chip multiplies no others)."""
        return 1e12 * sum(group.num_chips * wide_tflops(group.chip) for group in self.groups)

    def __str__(self) -> str:
        return " + ".join(map(str, self.groups))


def wide_tflops(chip: Chip) -> float:
    """The rate that MFU is a share of: bfloat16's, or float16's, or float32's."""
    return next(chip.peak_tflops[name] for name in ("bfloat16", "float16", "float32") if name in chip.peak_tflops)


def cluster_of(
    chip: str | Chip,
    num_chips: int,
    chips_per_node: int | None = None,
    *,
    name: str = "",
    latency_seconds: float = 5e-6,
    chip_mtbf_hours: float | None = None,
    **rates: Any,
) -> Cluster:
    """A cluster of one kind of chip; fewer chips than a node holds are one smaller node, with the network of their share.

    Args:
        chips_per_node: None for eight, or as many as share one link of the chip.
        name: for messages; empty for the number and the chip.
        rates: further fields of :class:`Nodes`.
    Raises:
        ChipError: no chip has that name, or the chips do not fill whole nodes.

    Example:
        >>> cluster = cluster_of("H100-SXM", 32)
        >>> cluster.name, cluster.groups[0].count, cluster.groups[0].network_bytes_per_second / 1e9
        ('32 × H100-SXM5-80GB', 4, 50.0)
    """
    found = get_chip(chip) if isinstance(chip, str) else chip
    if num_chips < 1:
        raise ChipError(f"{num_chips} chips were requested.", "Use 1 or more.")
    whole = chips_per_node or found.chips_per_node
    size = min(num_chips, whole)
    if num_chips % size:
        near = num_chips - num_chips % size
        raise ChipError(
            f"{num_chips} chips were requested in nodes of {size}, which is {num_chips / size:.2f} nodes.",
            f"Use {near} or {near + size} chips, or name the chips of a node.",
        )
    nodes = Nodes(found, size, num_chips // size, **rates)
    return Cluster(name or str(nodes), (nodes,), latency_seconds, chip_mtbf_hours)


def read_cluster(path: str | Path) -> Cluster:
    """The cluster that a TOML file describes.

    Its keys are the fields of :class:`Cluster` and, in tables ``[[nodes]]``, of :class:`Nodes`. A field of ``Nodes`` outside the
    tables holds for all groups that do not set it.
    """
    path = Path(path).expanduser()
    table = read_table(path, "cluster", "It is a TOML file with [[nodes]].")
    groups = table.pop("nodes", [])
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise DataError(f"{path}: nodes is not a list of tables.", "Write [[nodes]] before each group of nodes.")
    own = {field.name: table.pop(field.name) for field in dataclasses.fields(Cluster) if field.name in table}
    shared = {name: table.pop(name) for name in _NODE_FIELDS if name in table}
    _refuse_unknown(path, table, ("nodes", *(field.name for field in dataclasses.fields(Cluster)), *_NODE_FIELDS))
    own.pop("groups", None)
    _check_numbers(path, {name: value for name, value in own.items() if name != "name"})
    found = tuple(_nodes_of(path, {**shared, **group}) for group in groups)
    return Cluster(**{"name": path.stem, **own, "groups": found})


def cluster_in(path: Path, table: Mapping[str, Any]) -> Cluster:
    """The cluster of one kind of chip that a table of a file describes by the arguments of :func:`cluster_of`."""
    own = ("name", "chips_per_node", "latency_seconds", "chip_mtbf_hours")
    _check_fields(path, table, (*own, *(name for name in _NODE_FIELDS if name != "count")))
    rest = {name: value for name, value in table.items() if name not in ("chip", "chips")}
    return cluster_of(table["chip"], table["chips"], **rest)


def _nodes_of(path: Path, table: Mapping[str, Any]) -> Nodes:
    _check_fields(path, table, _NODE_FIELDS)
    return Nodes(**{**table, "chip": get_chip(table["chip"])})


def _check_fields(path: Path, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    _refuse_unknown(path, table, known)
    if not isinstance(table.get("chip"), str):
        raise DataError(f"{path}: a group of nodes names no chip.", 'Add chip = "H100-SXM" (narrowgauge show chips).')
    software = table.get("software", "")
    if not isinstance(software, str):
        raise DataError(f"{path}: software = {software!r} is no name.", f"There is {', '.join(SOFTWARE)}.")
    _check_numbers(path, {name: value for name, value in table.items() if name not in ("name", "chip", "software")})


def _check_numbers(path: Path, table: Mapping[str, Any]) -> None:
    for name, value in table.items():
        whole = name in ("chips", "count", "chips_per_node")
        if isinstance(value, bool) or not isinstance(value, int if whole else (int, float)):
            raise DataError(f"{path}: {name} = {value!r} is not a {'whole ' * whole}number.", f"Write {name} = 8.")


def _refuse_unknown(path: Path, table: Mapping[str, Any], known: tuple[str, ...]) -> None:
    for name in table:
        if name not in known:
            raise DataError(
                f"{path}: no key is named {name!r}.", suggestion(name, known) or f"Known: {', '.join(known)}."
            )


def read_table(path: Path, what: str, advice: str) -> dict[str, Any]:
    """The table of a TOML file; ``what`` it describes and the ``advice`` are for the message of a :class:`DataError`."""
    try:
        return load_toml(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        reason = getattr(error, "strerror", None) or (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"cannot read the {what} {path}: {reason.rstrip('.')}.", advice) from None


# ── the clusters that a question names, and parts of them where fewer chips may be better ─────────────────────────────────

HERE = "here"
"""The name of this machine, as :mod:`~narrowgauge.planner.measured.calibration` keeps it: ``--chip here``."""
Named = Cluster | str | Path


def clusters_asked_for(
    cluster: Named | Sequence[Named],
    chip: str | Chip | Sequence[str | Chip],
    chips: int | Sequence[int],
    chips_per_node: int | None,
    **rates: float | str | None,
) -> tuple[Cluster, ...]:
    """The named clusters: values and files, or every chip in every number; both ways at once are refused.

    ``rates`` are further fields of :class:`~narrowgauge.planner.inputs.clusters.Nodes`; None is left out.
    """
    listed: list[Named] = [cluster] if isinstance(cluster, Cluster | str | Path) else list(cluster)
    names: list[str | Chip] = [chip] if isinstance(chip, str | Chip) else list(chip)
    numbers = numbers_of(chips)
    if listed and (names or numbers):
        raise ChipError(
            "a cluster and chips were requested together.", "A cluster's file names its chips: leave them out."
        )
    found = [each if isinstance(each, Cluster) else read_cluster(each) for each in listed]
    given: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
    if listed and given:
        raise ChipError(
            f"a cluster and {next(iter(given))} were requested together.", "Write it into the cluster's file."
        )
    found += [cluster_of(each, number, chips_per_node, **given) for each in names for number in numbers or [1]]
    return tuple(found)


def numbers_of(chips: int | Sequence[int]) -> list[int]:
    numbers = [chips] if isinstance(chips, int) else list(chips)
    for number in numbers:
        if number < 1:
            raise ChipError(f"{number} chips were requested.", "Use 1 or more.")
    return numbers


def parts_of(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster in fewer chips: powers of two of the chips of one node, then of the nodes of each group, and all of it.

    Example:
        >>> [part.num_chips for part in parts_of(cluster_of("H100-SXM", 48))]
        [1, 2, 4, 8, 16, 32, 48]
    """
    for group in cluster.groups:
        for size in _powers_below(group.chips):
            yield _part(cluster, replace(group, chips=size, count=1))
        for count in _powers_below(group.count):
            yield _part(cluster, replace(group, count=count))
        if len(cluster.groups) > 1:
            yield _part(cluster, group)
    yield cluster


def multiples_of(cluster: Cluster) -> Iterator[Cluster]:
    """Twice and four times the nodes of a cluster of equal nodes.

    Example:
        >>> [part.num_chips for part in multiples_of(cluster_of("H100-SXM", 8))]
        [16, 32]
    """
    for times in (2, 4):
        yield _part(cluster, replace(cluster.groups[0], count=times * cluster.groups[0].count))


def sizes_up_to(cluster: Cluster, node: int, most: int) -> Iterator[Cluster]:
    """Clusters of the same chips, up to ``most``: powers of two of the chips of a node, then of nodes of ``node`` chips.

    Example:
        >>> [size.num_chips for size in sizes_up_to(cluster_of("H100-SXM", 1), 8, 64)]
        [1, 2, 4, 8, 16, 32, 64]
    """
    whole = replace(cluster.groups[0], chips=node, count=1)
    yield from parts_of(_part(cluster, whole))
    while (whole := replace(whole, count=2 * whole.count)).num_chips <= most:
        yield _part(cluster, whole)


def between_sizes(few: Cluster, many: Cluster) -> Iterator[Cluster]:
    """Three numbers of whole nodes between those of two clusters of equal nodes, the fewest first; none within a node.

    Example:
        >>> [each.num_chips for each in between_sizes(cluster_of("H100-SXM", 32), cluster_of("H100-SXM", 64))]
        [40, 48, 56]
    """
    first, last = few.groups[0], many.groups[0]
    if len(many.groups) > 1 or first.chips != last.chips:
        return
    counts = (first.count + (last.count - first.count) * quarter // 4 for quarter in (1, 2, 3))
    for count in dict.fromkeys(counts):
        if first.count < count < last.count:
            yield _part(many, replace(last, count=count))


def _part(cluster: Cluster, group: Nodes) -> Cluster:
    return replace(cluster, name=str(group), groups=(group,))


def _powers_below(number: int) -> Iterator[int]:
    power = 1
    while power < number:
        yield power
        power *= 2
