"""Exchanges: what ranks send in a step, how long it takes, and how much of it computing hides.

Take S bytes among R ranks. A ring gathers, or reduces and scatters, in R − 1 steps of S/R bytes
each. An all-reduce does both. A group that spans nodes has two bounds: each chip sends within its
node, and each node sends over its network cards. A group uses as many cards of a node as it has
ranks there. A ring sends both at the same time, so the slower bound counts.

Source: Thakur, Rabenseifner and Gropp, Optimization of collective communication operations in
MPICH, 2005; NCCL's docs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from narrowgauge.planner.ask import Ask
from narrowgauge.planner.machine import Cluster
from narrowgauge.planner.terms import Term, term

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
    """

    ranks: int
    nodes: int
    link_bytes_per_second: float
    network_bytes_per_second: float

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
    """Return the path of ranks at a distance of ``stride`` in the global numbering.

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
    return Path(ranks, nodes, link_rate, network_rate)


def gather_seconds(num_bytes: float, path: Path) -> float:
    """Return the seconds of a ring all-gather: each rank starts with a part of ``num_bytes`` and
    ends with all.

    A reduce-scatter takes as long, an all-reduce twice as long.

    Example:
        >>> round(gather_seconds(8e9, Path(8, 1, 1e9, math.inf)), 2)
        7.0
    """
    within = (path.ranks - 1) / path.ranks / path.link_bytes_per_second
    between = (path.nodes - 1) / path.nodes / (path.ranks_per_node * path.network_bytes_per_second)
    steps = (path.ranks - path.nodes) * LINK_LATENCY_SECONDS
    steps += (path.nodes - 1) * NETWORK_LATENCY_SECONDS
    return num_bytes * max(within, between) + steps


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


def parameters_of(ask: Ask, layers: int) -> tuple[float, float]:
    """Return the parameters of a stage on one rank before sharding: non-experts, and the rank's
    experts.

    An embedding on the first or last stage counts.
    """
    a = ask.architecture
    layout = ask.layout
    outer = a.parameters["first"] + a.parameters["last"]
    if layout.pipeline > 1 and not a.tie_embeddings:
        outer -= a.head.num_elements  # it is on another stage
    share = layers / a.num_layers
    experts = a.parameters["experts"] * share / layout.expert_tensor_ranks / layout.expert
    return (a.parameters["layers"] * share + outer) / layout.tensor, experts


def layer_exchanges(ask: Ask, layers: int, compute: float, attention: float) -> Iterator[Term]:
    """Yield the exchanges of a stage with ``layers`` layers in each micro-batch: the seconds that
    computing does not hide.

    ``compute`` is the seconds of a micro-batch on the stage, forward and backward. It includes
    ``attention`` seconds.
    """
    layout = ask.layout
    a = ask.architecture
    batches = layout.micro_batches
    # Bytes of a micro-batch's residual stream, before sharding over tensor ranks.
    stream = ask.tokens * a.hidden_size * ask.width
    again = int(layout.recompute == "full")
    under = batches * compute

    def exposed(
        name: str, kind: str, path: Path, count: float, size: float, once: float, under: float = under
    ) -> Term:  # fmt: skip
        formula = ("{} × {:g} times {:,.3g} MB", batches, count / batches, size / 1e6)
        return _exposed(ask, name, count * once, kind, under, path, formula)

    if layout.tensor > 1:
        # Attention and MLP each gather and reduce the residual stream: two pairs forward, two
        # backward.
        path = _path(ask, layout.tensor, 1)
        count = batches * layers * (4 + 2 * again)
        once = 2 * gather_seconds(stream, path)
        yield exposed("activations between tensor ranks", "tensor", path, count, stream, once)
    if layout.context > 1:
        # Keys, values and their gradients go around the ring.
        path = _path(ask, layout.context, layout.tensor)
        count = batches * layers * (3 + again) * (layout.context - 1)
        size = ask.tokens * a.num_kv_heads * (a.query_dim + a.value_dim) * ask.width / layout.tensor
        name = "keys and values between context ranks"
        once = send_seconds(size, path)
        yield exposed(name, "context", path, count, size, once, batches * attention)
    if a.mixture and layout.expert > 1:
        path = _path(ask, layout.expert, layout.expert_tensor_ranks * layout.context)
        number: float = batches * layers * a.num_mixture_layers / a.num_layers * (4 + 2 * again)
        size = stream * a.mixture.experts_per_token / layout.tensor
        # A token for several experts of a node may travel there once.
        repeated = _repeated(a.mixture.experts_per_token, path.nodes)
        between = 1 - ask.efficiency["once_per_node"] * repeated
        kind = "interleaved" if layout.interleave > 1 else "expert"
        once = all_to_all_seconds(size, path, between=between)
        yield exposed("tokens between experts", kind, path, number, size, once)
    if layout.pipeline > 1:
        path = _path(ask, layout.pipeline, layout.num_ranks // layout.pipeline)
        size = stream / layout.tensor
        count = 2 * layout.interleave * batches
        once = send_seconds(size, path)
        yield exposed("activations between stages", "pipeline", path, count, size, once)


def state_exchanges(ask: Ask, layers: int, compute: float) -> Iterator[Term]:
    """Yield the gathers of weights and sums of gradients, as in :func:`layer_exchanges`.

    :attr:`Layout.num_sharing` ranks share a replica's state.
    """
    layout = ask.layout
    dense, experts = parameters_of(ask, layers)
    dtype = ask.program.reduced if ask.gathered else ask.recipe.storage.visible
    # Bytes to sum for a parameter: only what trains has a gradient.
    summed = ask.recipe.reduction.bytes_per_element(dtype)
    summed *= ask.trained_parameters / ask.architecture.num_parameters
    every = layout.num_replicas * layout.context
    sharing = layout.sharing(1)
    of_experts = layout.sharing_experts(sharing)
    if sharing > 1:
        stride = min(layout.expert_tensor_ranks * layout.expert, layout.num_ranks // of_experts)
        path = _path(ask, sharing, layout.tensor)
        sums = layout.micro_batches if layout.zero >= 2 else 1
        gathers = 2 * layout.micro_batches if layout.zero == 3 else 1
        seconds = 0.0
        for number, link in ((dense, path), (experts, _path(ask, of_experts, stride))):
            if number:
                # Per layer, during the next layer's compute. Or once a step, in Megatron-LM's
                # buckets (``bucket_size``): 40 million parameters, or a million per rank if that is
                # more. Then bandwidth decides, not latency.
                parts = layers
                if layout.zero < 2:
                    parts = min(layers, math.ceil(number / max(40e6, 1e6 * link.ranks)))
                for times, width in ((gathers, ask.weight_bytes), (sums, summed)):
                    seconds += parts * times * gather_seconds(number / parts * width, link)
        text = "{:.3g} parameters: {} × {:g} B gathered and {} × {:g} B reduced"
        sent = (text, dense + experts, gathers, ask.weight_bytes, sums, summed)
        name = "weights and gradients between shards"
        yield _exposed(ask, name, seconds, "shard", sums * compute, path, sent)
    if every > sharing:
        # An expert has fewer copies: one per group of expert ranks. Some of these share its state.
        copies = max(1, layout.sharing_experts(every) // of_experts)
        seconds = size = 0.0
        for ranks, number in ((every // sharing, dense / sharing), (copies, experts / of_experts)):
            if number:
                link = _path(ask, ranks, layout.tensor * max(1, every // ranks))
                seconds += 2 * gather_seconds(number * summed, link)
                size += number * summed
        path = _path(ask, every // sharing, layout.tensor * sharing)
        text = "an all-reduce of {:,.3g} MB"
        # Gradients are summed under the last backward pass.
        under = compute * 2 / 3
        yield _exposed(
            ask, "gradients between replicas", seconds, "shard", under, path, (text, size / 1e6)
        )


def _path(ask: Ask, ranks: int, stride: int) -> Path:
    shares = ask.efficiency
    cluster = ask.cluster
    peers = ask.chip.peers
    is_beyond_bridges = peers and min(ranks * stride, cluster.chips_per_node) > peers
    link = shares["host_path" if is_beyond_bridges else "link"]
    return path_of(ranks, stride, cluster, link=link, network=shares["network"])


def _exposed(
    ask: Ask, name: str, seconds: float, kind: str, under: float, path: Path, sent: tuple[Any, ...]
) -> Term:
    """Return an exchange. Up to ``under`` seconds of computing can hide a part of it.

    Computing is slower meanwhile, since the exchange takes multiprocessors. ``sent`` is the
    formula's beginning.
    """
    shares = ask.efficiency
    is_near = path.nodes == 1
    hidden = min(seconds * shares[f"overlap.{kind}"], under)
    slowed = hidden * shares["slowed.link" if is_near else "slowed.network"]
    is_assumed = not is_near and ask.cluster.interconnect_gbit_per_second is None
    text = sent[0] + ", {}{}: {:.3g} s, {:.3g} hidden, {:.3g} slower"
    where = path, " (assumed)" if is_assumed else ""
    numbers = (*sent[1:], *where, seconds, hidden, slowed)
    return term("communication", name, seconds - hidden + slowed, text, *numbers)


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
