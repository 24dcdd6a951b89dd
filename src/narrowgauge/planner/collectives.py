"""Collectives: the time to exchange tensors between ranks, from bandwidth and latency.

Take S bytes among R ranks. A ring gathers, or reduces and scatters, in R − 1 steps of S/R bytes
each. An all-reduce does both. A group that spans nodes has two bounds: each chip sends within its
node, and each node sends over its network cards. A group uses as many cards of a node as it has
ranks there. A ring sends both at the same time, so the slower bound counts. A hierarchical
all-reduce does them one after the other, on a part of the bytes. Its latency grows only with the
number of nodes. A tree's latency grows with the logarithm. A switch that adds (NVLink SHARP) halves
a chip's bytes within a node. We take the fastest, as NCCL would.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, 2005; NCCL's docs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.job import Job
from narrowgauge.planner.terms import Term

LINK_LATENCY_SECONDS = 4e-6
"""Latency of one step of a ring within a node.

On eight H200s, 2 × 7 steps take 54 µs more than their bytes at 16 MiB (ml-engineering,
network/benchmarks: all_reduce of 16 MiB at 256 of 482 GB/s).
"""
NETWORK_LATENCY_SECONDS = 5e-6
"""Latency of a message between nodes: an assumption."""


@dataclass(frozen=True, slots=True)
class Path:
    """Describe the links of a group of ranks that is spread evenly over nodes.

    Args:
        link_bytes_per_second: of a chip within its node; infinite with one rank per node.
        network_bytes_per_second: of its node's network cards, per chip; infinite in one node.
        has_adding_switch: the switch in a node adds the chips' data.
    """

    ranks: int
    nodes: int
    link_bytes_per_second: float
    network_bytes_per_second: float
    has_adding_switch: bool = False

    @property
    def ranks_per_node(self) -> float:
        return self.ranks / self.nodes

    def __str__(self) -> str:
        where = f"over {self.nodes} nodes"
        rate = self.network_bytes_per_second
        if self.nodes == 1:
            where = "in a node"
            rate = self.link_bytes_per_second
        return f"{self.ranks} ranks {where} at {rate / 1e9:,.3g} GB/s"


def path_of(
    ranks: int, stride: int, cluster: Cluster, *, link: float = 1.0, network: float = 1.0
) -> Path:
    """Return the path of ranks that lie ``stride`` apart in the global numbering.

    Nodes hold consecutive ranks.

    ``link`` and ``network`` are the fractions of printed rates that collectives reach.
    """
    within = max(1, min(ranks, cluster.chips_per_node // stride))
    nodes = math.ceil(ranks / within)
    link_rate = network_rate = math.inf
    if within > 1:
        link_rate = cluster.link_bytes_per_second(within, stride) * link
    if nodes > 1:
        network_rate = cluster.network_bytes_per_second * network
    adds = cluster.chips_per_node > 2 and cluster.chip.switch_adds
    return Path(ranks, nodes, link_rate, network_rate, adds)


def all_gather_seconds(num_bytes: float, path: Path) -> float:
    """Return the seconds of a ring all-gather: each rank starts with a part of ``num_bytes`` and
    ends with all.

    A reduce-scatter takes as long.

    Example:
        >>> round(all_gather_seconds(8e9, Path(8, 1, 1e9, math.inf)), 2)
        7.0
    """
    within = (path.ranks - 1) / path.ranks / path.link_bytes_per_second
    between = (path.nodes - 1) / path.nodes / (path.ranks_per_node * path.network_bytes_per_second)
    steps = (path.ranks - path.nodes) * LINK_LATENCY_SECONDS
    steps += (path.nodes - 1) * NETWORK_LATENCY_SECONDS
    return num_bytes * max(within, between) + steps


def all_reduce_seconds(num_bytes: float, path: Path) -> float:
    """Return the seconds of an all-reduce of ``num_bytes``: the fastest of ring, tree, hierarchy
    and switch.

    Example:
        >>> round(all_reduce_seconds(8e9, Path(8, 1, 1e9, math.inf)), 2)
        14.0
    """
    ways = [ring_seconds, tree_seconds, hierarchical_seconds]
    if path.has_adding_switch and path.nodes == 1:
        ways.append(switch_seconds)
    return min(way(num_bytes, path) for way in ways)


def ring_seconds(num_bytes: float, path: Path) -> float:
    """Return the seconds of a ring's all-reduce: 2 (R − 1)/R S/B + 2 (R − 1) α."""
    return 2 * all_gather_seconds(num_bytes, path)


def tree_seconds(num_bytes: float, path: Path) -> float:
    """Return the seconds of a tree's all-reduce: 2 S/B + 2 log2(R) α.

    It is a tree between nodes, a chain within them.
    """
    of_node = path.ranks_per_node * path.network_bytes_per_second
    slowest = min(path.link_bytes_per_second, of_node)
    within = (path.ranks_per_node - 1) * LINK_LATENCY_SECONDS
    between = math.ceil(math.log2(path.nodes)) * NETWORK_LATENCY_SECONDS
    return 2 * (num_bytes / slowest + within + between)


def switch_seconds(num_bytes: float, path: Path) -> float:
    """Return the seconds of an all-reduce in a node's switch: each chip sends its tensor once and
    receives a part and the sum.

    Eight H200s reach 482 GB/s of ``busbw`` with the switch, 368 without (ml-engineering,
    network/benchmarks).
    """
    sent = num_bytes * (1 + 1 / path.ranks)
    return sent / path.link_bytes_per_second + 2 * path.ranks * LINK_LATENCY_SECONDS


def hierarchical_seconds(num_bytes: float, path: Path) -> float:
    """Return the seconds of a three-part all-reduce: scatter within nodes, sum between them, gather
    within them.
    """
    k = path.ranks_per_node
    n = path.nodes
    within = (k - 1) * (num_bytes / k / path.link_bytes_per_second + LINK_LATENCY_SECONDS)
    steps = min(n - 1, math.ceil(math.log2(n)) * 2) * NETWORK_LATENCY_SECONDS
    between = (n - 1) / n * num_bytes / k / path.network_bytes_per_second + steps
    return 2 * (within + between)


def all_to_all_seconds(num_bytes: float, path: Path, *, between: float = 1.0) -> float:
    """Return the seconds of an all-to-all: every rank sends ``num_bytes`` in total, an equal part
    to each rank.

    ``between`` is the fraction of bytes for other nodes that travels: equal parts for ranks of one
    node travel once.

    Example:
        >>> round(all_to_all_seconds(8e9, Path(8, 1, 1e9, math.inf)), 2)
        7.0
    """
    part = num_bytes / path.ranks
    within = (path.ranks_per_node - 1) * part / path.link_bytes_per_second
    far = between * (path.ranks - path.ranks_per_node) * part / path.network_bytes_per_second
    # Sends to all peers overlap: latency counts once per doubling.
    latency = LINK_LATENCY_SECONDS
    if path.nodes > 1:
        latency = NETWORK_LATENCY_SECONDS
    return max(within, far) + math.ceil(math.log2(path.ranks)) * latency


def send_seconds(num_bytes: float, path: Path) -> float:
    """Return the seconds of one message between neighbours of the group."""
    if path.ranks_per_node > 1:
        return num_bytes / path.link_bytes_per_second + LINK_LATENCY_SECONDS
    return num_bytes / path.network_bytes_per_second + NETWORK_LATENCY_SECONDS


# ── exchanges: what ranks send in a step, how long it takes, and how much of it computing hides ───


def parameters_of(job: Job, layers: int) -> tuple[float, float]:
    """Return the parameters of a stage on one rank before sharding: non-experts, and the rank's
    experts.

    An embedding on the first or last stage counts.
    """
    a = job.architecture
    layout = job.layout
    outer = a.outer_parameters
    share = layers / a.num_layers
    inner = a.num_parameters - outer - a.expert_parameters
    if layout.pipeline > 1 and not a.tie_embeddings:
        outer -= a.vocab_size * a.hidden_size  # the head is on another stage
    experts = a.expert_parameters * share / layout.expert_tensor_ranks / layout.expert
    return (inner * share + outer) / layout.tensor, experts


def layer_exchanges(job: Job, layers: int, compute: float, attention: float) -> Iterator[Term]:
    """Yield the exchanges of a stage with ``layers`` layers in each micro-batch: the seconds that
    computing does not hide.

    ``compute`` is the seconds of a micro-batch on the stage, forward and backward. It includes
    ``attention`` seconds.
    """
    layout = job.layout
    a = job.architecture
    batches = job.layout.micro_batches
    # Bytes of a micro-batch's residual stream, before sharding over tensor ranks.
    stream = job.tokens * a.hidden_size * job.width
    once_more = 1 if layout.recompute == "full" else 0

    def term(
        name: str, kind: str, path: Path, size: float, count: int, exchanges: str, seconds: float
    ) -> Term:
        """Return an exchange of ``size`` bytes that takes ``seconds``, ``count`` times per layer
        and micro-batch.
        """
        sending = float(layers)
        under = batches * compute
        if kind in ("expert", "interleaved"):
            sending *= a.num_mixture_layers / a.num_layers
        elif kind == "context":
            under = batches * attention
        text = f"{batches} × {sending:g} layers × {count} {exchanges} of {size / 1e6:,.3g} MB"
        return _exposed(job, name, batches * sending * count * seconds, kind, under, path, text)

    if layout.tensor > 1:
        # Attention and MLP each gather and reduce the residual stream: two pairs forward, two
        # backward.
        path = _path(job, layout.tensor, 1)
        count = 4 + 2 * once_more
        seconds = 2 * all_gather_seconds(stream, path)
        exchanges = "gathers and reductions"
        yield term(
            "activations between tensor ranks", "tensor", path, stream, count, exchanges, seconds
        )
    if layout.context > 1:
        # Keys, values and their gradients go around the ring.
        path = _path(job, layout.context, layout.tensor)
        count = (3 + once_more) * (layout.context - 1)
        size = job.tokens * a.num_kv_heads * (a.query_dim + a.value_dim) * job.width / layout.tensor
        name = "keys and values between context ranks"
        yield term(name, "context", path, size, count, "sends", send_seconds(size, path))
    if layout.expert > 1:
        assert a.mixture is not None
        path = _path(job, layout.expert, layout.expert_tensor_ranks * layout.context)
        count = 4 + 2 * once_more
        size = stream * a.mixture.experts_per_token / layout.tensor
        # A token for several experts of a node may travel there once.
        repeated = _repeated(a.mixture.experts_per_token, path.nodes)
        once = 1 - job.efficiency["once_per_node"] * repeated
        seconds = all_to_all_seconds(size, path, between=once)
        kind = "interleaved" if layout.interleave > 1 else "expert"
        yield term("tokens between experts", kind, path, size, count, "all-to-alls", seconds)
    if layout.pipeline > 1:
        path = _path(job, layout.pipeline, layout.num_ranks // layout.pipeline)
        size = stream / layout.tensor
        count = 2 * layout.interleave * batches
        seconds = count * send_seconds(size, path)
        text = f"{count} sends of {size / 1e6:,.3g} MB"
        name = "activations between stages"
        yield _exposed(job, name, seconds, "pipeline", batches * compute, path, text)


def state_exchanges(job: Job, layers: int, compute: float) -> Iterator[Term]:
    """Yield the gathers of weights and sums of gradients, as in :func:`layer_exchanges`.

    :attr:`Layout.num_sharing` ranks share a replica's state.
    """
    layout = job.layout
    dense, experts = parameters_of(job, layers)
    dtype = job.program.reduced if job.gathered else job.recipe.storage.visible
    gradient = job.recipe.reduction.bytes_per_element(dtype)
    # Bytes to sum for a parameter: only what trains has a gradient.
    summed = gradient * job.trained_parameters / job.architecture.num_parameters
    every = layout.num_replicas * layout.context
    sharing = layout.sharing(1)
    if sharing > 1:
        of_experts = layout.sharing_experts(sharing)
        stride = min(layout.expert_tensor_ranks * layout.expert, layout.num_ranks // of_experts)
        path = _path(job, sharing, layout.tensor)
        experts_path = _path(job, of_experts, stride)
        weight = job.weight_bytes
        gathers = sums = 1
        if layout.zero >= 2:
            sums = layout.micro_batches
        if layout.zero == 3:
            gathers = 2 * layout.micro_batches
        seconds = 0.0
        for number, link in ((dense, path), (experts, experts_path)):
            if number:
                # Per layer, during the next layer's compute. Or once a step, in Megatron-LM's
                # buckets (``bucket_size``): 40 million parameters, or a million per rank if that is
                # more. Then bandwidth decides, not latency.
                buckets = math.ceil(number / max(40e6, 1e6 * link.ranks))
                parts = layers
                if layout.zero < 2:
                    parts = min(layers, buckets)
                size = number / parts
                seconds += parts * gathers * all_gather_seconds(size * weight, link)
                seconds += parts * sums * all_gather_seconds(size * summed, link)
        text = f"{dense + experts:.3g} parameters: {gathers} × {weight:g} B gathered and {sums} × {gradient:g} B reduced"
        name = "weights and gradients between shards"
        yield _exposed(job, name, seconds, "shard", sums * compute, path, text)
    if every > sharing:
        # An expert has fewer copies: one per group of expert ranks. Some of these share its state.
        of_experts = layout.sharing_experts(sharing)
        copies = max(1, layout.sharing_experts(every) // of_experts)
        seconds = size = 0.0
        for ranks, number in ((every // sharing, dense / sharing), (copies, experts / of_experts)):
            if number:
                link = _path(job, ranks, layout.tensor * max(1, every // ranks))
                seconds += all_reduce_seconds(number * summed, link)
                size += number * summed
        path = _path(job, every // sharing, layout.tensor * sharing)
        last_backward = compute * 2 / 3
        text = f"an all-reduce of {size / 1e6:,.3g} MB"
        name = "gradients between replicas"
        yield _exposed(job, name, seconds, "shard", last_backward, path, text)


def _path(job: Job, ranks: int, stride: int) -> Path:
    shares = job.efficiency
    cluster = job.cluster
    peers = job.chip.peers
    is_beyond_bridges = peers and min(ranks * stride, cluster.chips_per_node) > peers
    link = shares["host_path" if is_beyond_bridges else "link"]
    return path_of(ranks, stride, cluster, link=link, network=shares["network"])


def _exposed(
    job: Job, name: str, seconds: float, kind: str, under: float, path: Path, text: str
) -> Term:
    """Return an exchange. Up to ``under`` seconds of computing can hide a part of it.

    Computing is slower meanwhile, since the exchange takes multiprocessors.
    """
    is_near = path.nodes == 1
    hidden = min(seconds * job.efficiency[f"overlap.{kind}"], under)
    slowed = hidden * job.efficiency["slowed.link" if is_near else "slowed.network"]
    where = str(path)
    if not is_near and job.cluster.interconnect_gbit_per_second is None:
        where += " (assumed)"
    formula = f"{text}, {where}: {seconds:.3g} s, {hidden:.3g} hidden, {slowed:.3g} slower"
    source = "ring, tree or hierarchy; arXiv 2104.04473"
    return Term("communication", name, seconds - hidden + slowed, formula, source)


def _repeated(experts_per_token: int, nodes: int) -> float:
    """Return the fraction of a token's copies for other nodes that go to a node twice.

    Experts are drawn evenly.

    Example:
        >>> _repeated(1, 8), round(_repeated(8, 2), 2)
        (0.0, 0.75)
    """
    if nodes == 1:
        return 0.0
    copies = experts_per_token * (nodes - 1) / nodes
    visited = (nodes - 1) * (1 - (1 - 1 / nodes) ** experts_per_token)
    return 1 - visited / copies
