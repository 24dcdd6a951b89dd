"""Collectives: how long ranks take to exchange tensors, from bandwidth and latency.

S bytes among R ranks. A ring gathers or reduces and scatters in R − 1 steps of S/R bytes each; an all-reduce does both. A group
that spans nodes has two bounds: what each chip sends within its node, and what each node sends over its network cards, of which a
group uses as many as it has ranks there. A ring does both at the same time, so the slower one counts; a hierarchical all-reduce
does them one after the other, on a share of the bytes, and its latency grows with the number of nodes only. A tree's grows with
its logarithm. A switch that adds (NVLink SHARP) halves what a chip sends within a node. What NCCL would choose is taken: the
fastest.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005; NCCL's documentation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from narrowgauge.planner.clusters import Cluster, Nodes

LINK_LATENCY_SECONDS = 4e-6
"""Of one step of a ring within a node: 2 × 7 steps of eight H200s take 54 µs more than their bytes at 16 MiB (ml-engineering,
network/benchmarks: all_reduce of 16 MiB at 256 of 482 GB/s)."""

_ADDING_SWITCHES = ("NVLink4", "NVLink5")


@dataclass(frozen=True, slots=True)
class Path:
    """What a group of ranks communicates over.

    Args:
        ranks: in the group.
        nodes: over which it is spread evenly.
        link_bytes_per_second: of a chip within its node.
        network_bytes_per_second: of a chip's share of its node's network cards.
        link_latency, network_latency: seconds of a message.
        has_adding_switch: whether the switch between the chips of a node adds what they send.
    """

    ranks: int
    nodes: int
    link_bytes_per_second: float
    network_bytes_per_second: float
    link_latency: float = LINK_LATENCY_SECONDS
    network_latency: float = 5e-6
    has_adding_switch: bool = False

    @property
    def ranks_per_node(self) -> float:
        """Ranks of the group on each node."""
        return self.ranks / self.nodes

    @property
    def sent_within(self) -> float:
        """Seconds per byte of a gathered tensor within nodes."""
        return (self.ranks - 1) / self.ranks / self.link_bytes_per_second if self.ranks_per_node > 1 else 0.0

    @property
    def sent_between(self) -> float:
        """Seconds per byte of a gathered tensor between nodes."""
        return (self.nodes - 1) / self.nodes / (self.ranks_per_node * self.network_bytes_per_second)

    def __str__(self) -> str:
        where = "in a node" if self.nodes == 1 else f"over {self.nodes} nodes"
        rate = self.link_bytes_per_second if self.nodes == 1 else self.network_bytes_per_second
        return f"{self.ranks} ranks {where} at {rate / 1e9:,.3g} GB/s"


def path_of(
    ranks: int, stride: int, nodes: Nodes, cluster: Cluster, *, link: float = 1.0, network: float = 1.0
) -> Path:
    """The path of ranks that lie ``stride`` apart.

    Args:
        ranks: in the group.
        stride: between neighbours of the group in the numbering of all ranks; nodes hold consecutive ranks.
        nodes: the nodes they run on.
        cluster: for its latency, and the slowest network among its groups.
        link, network: the shares of the printed rates that collectives reach.
    Example:
        >>> from narrowgauge.planner.clusters import cluster_of
        >>> cluster = cluster_of("H100-SXM", 64)
        >>> path = path_of(16, 2, cluster.groups[0], cluster)
        >>> path.nodes, path.ranks_per_node
        (4, 4.0)
    """
    within = max(1, min(ranks, nodes.chips // stride))
    slowest = min(group.network_bytes_per_second for group in cluster.groups)
    return Path(
        ranks,
        math.ceil(ranks / within),
        nodes.link_bytes_per_second * link,
        slowest * network,
        network_latency=cluster.latency_seconds,
        has_adding_switch=nodes.chips > 2
        and nodes.chip.link.startswith(_ADDING_SWITCHES)
        and "bridge" not in nodes.chip.link,
    )


def all_gather_seconds(num_bytes: float, path: Path) -> float:
    """Seconds until every rank has ``num_bytes``, of which each held its part; a ring.

    Example:
        >>> all_gather_seconds(8e9, Path(8, 1, 1e9, 1e9, 0.0))
        7.0
    """
    if path.ranks == 1:
        return 0.0
    latency = (path.ranks - path.nodes) * path.link_latency + (path.nodes - 1) * path.network_latency
    return num_bytes * max(path.sent_within, path.sent_between) + latency


def reduce_scatter_seconds(num_bytes: float, path: Path) -> float:
    """Seconds until every rank has its part of the sum of ``num_bytes``: as many as it takes to gather them."""
    return all_gather_seconds(num_bytes, path)


def all_reduce_seconds(num_bytes: float, path: Path) -> float:
    """Seconds until every rank has the sum of ``num_bytes``: of a ring, a tree, a hierarchy or a switch the fastest.

    Example:
        >>> all_reduce_seconds(8e9, Path(8, 1, 1e9, 1e9, 0.0))
        14.0
    """
    ways = [ring_seconds, tree_seconds, hierarchical_seconds]
    if path.has_adding_switch and path.nodes == 1:
        ways.append(switch_seconds)
    return min(way(num_bytes, path) for way in ways)


def ring_seconds(num_bytes: float, path: Path) -> float:
    """Seconds of a ring's all-reduce: 2 (R − 1)/R S/B + 2 (R − 1) α."""
    return reduce_scatter_seconds(num_bytes, path) + all_gather_seconds(num_bytes, path)


def tree_seconds(num_bytes: float, path: Path) -> float:
    """Seconds of a tree's all-reduce: 2 S/B + 2 log2(R) α; between nodes a tree, within them a chain."""
    if path.ranks == 1:
        return 0.0
    within = 1 / path.link_bytes_per_second if path.ranks_per_node > 1 else 0.0
    between = 1 / (path.ranks_per_node * path.network_bytes_per_second) if path.nodes > 1 else 0.0
    steps = (path.ranks_per_node - 1) * path.link_latency + math.ceil(math.log2(path.nodes)) * path.network_latency
    return 2 * (num_bytes * max(within, between) + steps)


def switch_seconds(num_bytes: float, path: Path) -> float:
    """Seconds of an all-reduce in the switch of a node: each chip sends its tensor once and receives a part and the sum.

    Eight H200s reach 482 GB/s of ``busbw`` so, and 368 without (ml-engineering, network/benchmarks).
    """
    if path.ranks == 1:
        return 0.0
    return num_bytes * (1 + 1 / path.ranks) / path.link_bytes_per_second + 2 * path.ranks * path.link_latency


def hierarchical_seconds(num_bytes: float, path: Path) -> float:
    """Seconds of an all-reduce in three parts: scattered within nodes, summed between them, gathered within them."""
    k, n = path.ranks_per_node, path.nodes
    within = 2 * ((k - 1) / k * num_bytes / path.link_bytes_per_second + (k - 1) * path.link_latency)
    steps = min(n - 1, math.ceil(math.log2(n)) * 2) * path.network_latency
    between = 2 * ((n - 1) / n * num_bytes / k / path.network_bytes_per_second + steps)
    return within + between


def all_to_all_seconds(num_bytes: float, path: Path, *, between: float = 1.0) -> float:
    """Seconds until every rank has sent each other rank its part of ``num_bytes``.

    Args:
        num_bytes: that each rank sends.
        path: of the group.
        between: share of the bytes for other nodes that travel there, where equal parts for ranks of one node travel once.

    Example:
        >>> all_to_all_seconds(8e9, Path(8, 1, 1e9, 1e9, 0.0))
        7.0
    """
    if path.ranks == 1:
        return 0.0
    within = (path.ranks_per_node - 1) / path.ranks * num_bytes / path.link_bytes_per_second
    far = between * (path.ranks - path.ranks_per_node) / path.ranks * num_bytes / path.network_bytes_per_second
    # Sends to all peers are under way at once: latency counts once per doubling.
    latency = math.ceil(math.log2(path.ranks)) * (path.network_latency if path.nodes > 1 else path.link_latency)
    return max(within, far) + latency


def send_seconds(num_bytes: float, path: Path) -> float:
    """Seconds of one message between neighbours of the group."""
    if path.ranks == 1:
        return 0.0
    if path.ranks_per_node > 1:
        return num_bytes / path.link_bytes_per_second + path.link_latency
    return num_bytes / path.network_bytes_per_second + path.network_latency
