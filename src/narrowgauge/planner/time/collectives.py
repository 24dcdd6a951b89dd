"""Collectives: how long ranks take to exchange tensors, from bandwidth and latency.

S bytes among R ranks. A ring gathers or reduces and scatters in R − 1 steps of S/R bytes each; an all-reduce does both. A group
that spans nodes has two bounds: what each chip sends within its node, and what each node sends over its network cards, of which a
group uses as many as it has ranks there. A ring does both at the same time, so the slower one counts; a hierarchical all-reduce
does them one after the other, on a share of the bytes, and its latency grows with the number of nodes only. A tree's grows with
its logarithm. A switch that adds (NVLink SHARP) halves what a chip sends within a node. The fastest is taken, as NCCL would
choose it.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in MPICH, 2005; NCCL's documentation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from narrowgauge.planner.inputs.architectures import Architecture
from narrowgauge.planner.inputs.clusters import Cluster, Nodes
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.time.layer_times import Work
from narrowgauge.planner.time.roofline import bytes_per_number

LINK_LATENCY_SECONDS = 4e-6
"""Of one step of a ring within a node: 2 × 7 steps of eight H200s take 54 µs more than their bytes at 16 MiB (ml-engineering,
network/benchmarks: all_reduce of 16 MiB at 256 of 482 GB/s)."""

_ADDING_SWITCHES = ("NVLink4", "NVLink5")


@dataclass(frozen=True, slots=True)
class Path:
    """What a group of ranks, spread evenly over nodes, communicates over.

    Args:
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
    """The path of ranks that lie ``stride`` apart in the numbering of all ranks; nodes hold consecutive ranks.

    ``nodes`` are those they run on, and the slowest network of the cluster counts. ``link`` and ``network`` are the shares of the
    printed rates that collectives reach.

    Example:
        >>> from narrowgauge.planner.inputs.clusters import cluster_of
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
    """Seconds until every rank, which sends ``num_bytes`` in all, has sent each other rank its part.

    Of the bytes for other nodes the share ``between`` travels, where equal parts for ranks of one node travel once.

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


# ── exchanges: what ranks send in a step, how long it takes, and how much of it computing hides ───────────────────────────


class Exchange(NamedTuple):
    """One kind of exchange in an optimizer step.

    Attributes:
        seconds: of all of them, were nothing hidden.
        hidden: seconds hidden by computing.
        slowed: seconds that computing is longer meanwhile, since the exchange takes multiprocessors.
    """

    name: str
    seconds: float
    hidden: float
    slowed: float
    formula: str

    @property
    def exposed(self) -> float:
        """Seconds that the step is longer."""
        return self.seconds - self.hidden + self.slowed


_NOTHING = Exchange("", 0.0, 0.0, 0.0, "")


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of the largest stage on one rank, before they are sharded: all but experts, and its share of the experts."""

    dense: float
    experts: float

    @property
    def total(self) -> float:
        return self.dense + self.experts

    def on_rank(self, layout: Layout, zero: int = 1) -> float:
        """Parameters per rank once ZeRO shards them, from stage ``zero`` on.

        Ranks that share experts are among those that share a replica's state, so each expert's state has fewer ranks to lie on.

        Example:
            >>> Parameters(800.0, 100.0).on_rank(Layout(shard=8, expert=4))
            150.0
        """
        ranks = layout.shard if layout.zero >= zero else 1
        return self.dense / ranks + self.experts / layout.sharing_experts(ranks)


def parameters_of(work: Work, layers: int) -> Parameters:
    """Parameters of a stage of that many layers; an embedding lies on the first or last stage, and is counted."""
    shape, layout = work.architecture, work.layout
    inner, outer, experts = _counts(shape)
    if layout.pipeline > 1 and not shape.tie_embeddings:
        outer -= shape.vocab_size * shape.hidden_size  # the head is on another stage
    share = layers / shape.num_layers
    of_experts = experts * share / layout.expert_tensor_ranks / layout.expert
    return Parameters((inner * share + outer) / layout.tensor, of_experts)


@lru_cache(maxsize=64)
def _counts(architecture: Architecture) -> tuple[int, int, int]:
    """Parameters of layers without experts, outside layers, and of experts."""
    outer, experts = architecture.outer_parameters, architecture.expert_parameters
    return architecture.num_parameters - outer - experts, outer, experts


@dataclass(frozen=True, slots=True)
class Exchanges:
    """What one rank exchanges in a step.

    ``compute`` can hide exchanges: the seconds of a micro-batch on the stage's layers, forward and backward, of which
    ``attention`` are spent in attention.
    """

    work: Work
    cluster: Cluster
    layers: int
    compute: float
    attention: float

    def __iter__(self) -> Iterator[Exchange]:
        for found in (self.tensor, self.context, self.expert, self.pipeline, self.shard, self.replicas):
            exchange = found()
            if exchange.seconds > 0:
                yield exchange

    def path(self, ranks: int, stride: int) -> Path:
        """Of a group, at the rates that collectives reach."""
        shares = self.work.shares
        link, network = shares["link"].value, shares["network"].value
        return path_of(ranks, stride, self.work.nodes, self.cluster, link=link, network=network)

    def _exchange(self, name: str, seconds: float, kind: str, under: float, path: Path, what: str) -> Exchange:
        """An exchange of which ``under`` seconds of computing can hide a share."""
        hidden = min(seconds * self.work.shares[f"overlap.{kind}"].value, under)
        slowed = hidden * self.work.shares["slowed.link" if path.nodes == 1 else "slowed.network"].value
        assumed = " (assumed)" if path.nodes > 1 and self.work.nodes.is_network_assumed else ""
        return Exchange(name, seconds, hidden, slowed, f"{what}, {path}{assumed}")

    def tensor(self) -> Exchange:
        """Gathers and reductions of the residual stream around attention and MLP: two pairs forward, two backward."""
        layout = self.work.layout
        path = self.path(layout.tensor, 1)
        pairs = 6 if layout.recompute == "full" else 4
        size = self.work.stream_bytes
        one = all_gather_seconds(size, path) + reduce_scatter_seconds(size, path)
        seconds = layout.micro_batches * self.layers * pairs * one
        what = f"{layout.micro_batches} × {self.layers} layers × {pairs} gathers and reductions of {_size(size)}"
        under = layout.micro_batches * self.compute
        return self._exchange("activations between tensor ranks", seconds, "tensor", under, path, what)

    def context(self) -> Exchange:
        """Keys and values sent around the ring of context ranks, and their gradients."""
        layout, shape = self.work.layout, self.work.architecture
        path = self.path(layout.context, layout.tensor)
        per_token = shape.num_kv_heads * (shape.query_dim + shape.value_dim)
        size = self.work.tokens * per_token * self.work.width / layout.tensor
        steps = 3 * (layout.context - 1) + (layout.context - 1) * (layout.recompute == "full")
        seconds = layout.micro_batches * self.layers * steps * send_seconds(size, path)
        what = f"{layout.micro_batches} × {self.layers} layers × {steps} sends of {_size(size)}"
        under = layout.micro_batches * self.attention
        return self._exchange("keys and values between context ranks", seconds, "context", under, path, what)

    def expert(self) -> Exchange:
        """Tokens sent to their experts and back, forward and backward."""
        layout, mixture = self.work.layout, self.work.architecture.mixture
        if mixture is None:
            return _NOTHING
        path = self.path(layout.expert, layout.expert_tensor_ranks * layout.context)
        layers = self.layers * mixture.num_layers / self.work.architecture.num_layers
        size = self.work.stream_bytes * mixture.experts_per_token / layout.tensor
        count = 6 if layout.recompute == "full" else 4
        # A token that visits several experts of a node may travel there once.
        once = 1 - self.work.shares["once_per_node"].value * _repeated(mixture.experts_per_token, path.nodes)
        seconds = layout.micro_batches * layers * count * all_to_all_seconds(size, path, between=once)
        what = f"{layout.micro_batches} × {layers:g} layers × {count} all-to-alls of {_size(size)}"
        under = layout.micro_batches * self.compute
        return self._exchange("tokens between experts", seconds, "expert", under, path, what)

    def pipeline(self) -> Exchange:
        """The residual stream sent to the next stage, and its gradient back."""
        layout = self.work.layout
        path = self.path(layout.pipeline, layout.num_ranks // layout.pipeline)
        size = self.work.stream_bytes / layout.tensor
        count = 2 * layout.interleave * layout.micro_batches
        seconds = count * send_seconds(size, path)
        what, under = f"{count} sends of {_size(size)}", layout.micro_batches * self.compute
        return self._exchange("activations between stages", seconds, "pipeline", under, path, what)

    def shard(self) -> Exchange:
        """Weights gathered and gradients reduced among the ranks that share a replica's state."""
        layout = self.work.layout
        if layout.zero == 0:
            return _NOTHING
        dense = self.path(layout.shard, layout.tensor * layout.context)
        between = layout.expert_tensor_ranks * layout.context * layout.expert
        others = self.path(layout.sharing_experts(layout.shard), between)
        found = parameters_of(self.work, self.layers)
        weight, gradient = self._weight_bytes, self._gradient_bytes
        gathers = 2 * layout.micro_batches if layout.zero == 3 else 1
        sums = layout.micro_batches if layout.zero >= 2 else 1
        seconds = 0.0
        for number, ranks, path in ((found.dense, layout.shard, dense), (found.experts, others.ranks, others)):
            if number:
                # Layer by layer, while the next is computed; or once a step, in buckets that grow with the ranks.
                parts = self.layers if layout.zero >= 2 else _buckets(number, ranks, self.layers)
                seconds += parts * gathers * all_gather_seconds(number / parts * weight, path)
                seconds += parts * sums * reduce_scatter_seconds(number / parts * gradient, path)
        what = f"{found.total:.3g} parameters: {gathers} × {weight:g} B gathered and {sums} × {gradient:g} B reduced"
        under = sums * self.compute
        return self._exchange("weights and gradients between shards", seconds, "shard", under, dense, what)

    def replicas(self) -> Exchange:
        """Gradients summed over replicas, and over context ranks, once per step."""
        layout = self.work.layout
        owned, found = parameters_of(self.work, self.layers), layout.shard if layout.zero >= 1 else 1
        every, dense = layout.num_replicas * layout.context, owned.dense / found
        experts = owned.on_rank(layout) - dense
        # An expert has fewer copies: one for each group of expert ranks, of which some share its state.
        copies = max(1, layout.sharing_experts(every) // layout.sharing_experts(found))
        paths = [self.path(ranks, layout.tensor * max(1, every // ranks)) for ranks in (every // found, copies)]
        sizes = [number * self._gradient_bytes for number in (dense, experts)]
        seconds = sum(all_reduce_seconds(size, path) for size, path in zip(sizes, paths, strict=True) if size)
        path, size = paths[0], sum(sizes)
        under = self.compute * 2 / 3  # the last backward pass
        what = f"an all-reduce of {_size(size)}"
        return self._exchange("gradients between replicas", seconds, "shard", under, path, what)

    @property
    def _weight_bytes(self) -> float:
        adapters = self.work.architecture.adapters
        return bytes_per_number(self.work.recipe.storage.visible) if adapters is None else adapters.base_bytes

    @property
    def _gradient_bytes(self) -> float:
        sent = self.work.recipe.reduction.bytes_per_element(self.work.recipe.storage.visible)
        return sent * self.work.architecture.trained_share


def _buckets(num_parameters: float, ranks: int, layers: int) -> int:
    """In how many buckets gradients are reduced once a step; not more than layers.

    A bucket has 40 million parameters, or a million a rank if that is more, so that latency does not decide.

    Source: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py, ``bucket_size``, with ``overlap_grad_reduce``
    (without it one bucket holds all).

    Example:
        >>> _buckets(8e9, 64, 32), _buckets(8e9, 2048, 32)
        (32, 4)
    """
    return min(layers, math.ceil(num_parameters / max(40e6, 1e6 * ranks)))


def _repeated(experts_per_token: int, nodes: int) -> float:
    """Of the copies of a token for experts of other nodes, the share for nodes that get another copy; experts are drawn evenly.

    Example:
        >>> _repeated(1, 8), round(_repeated(8, 2), 2)
        (0.0, 0.75)
    """
    if nodes == 1:
        return 0.0
    copies = experts_per_token * (nodes - 1) / nodes
    visited = (nodes - 1) * (1 - (1 - 1 / nodes) ** experts_per_token)
    return 1 - visited / copies


def _size(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.3g} MB"
