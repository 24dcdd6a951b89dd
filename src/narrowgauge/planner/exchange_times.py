"""Exchange times: what ranks send in an optimizer step, how long it takes, and how much of it computing hides.

Ranks are numbered with tensor ranks innermost, then context, shard, data and pipeline ranks (Megatron-LM's order), and nodes hold
consecutive ranks: tensor ranks share a node where they fit, stages lie in different ones.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from narrowgauge.planner.architectures import Architecture
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.collectives import (
    Path,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    path_of,
    reduce_scatter_seconds,
    send_seconds,
)
from narrowgauge.planner.layer_times import Work
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.roofline import bytes_of


class Exchange(NamedTuple):
    """One kind of exchange in an optimizer step.

    Attributes:
        name: what is sent.
        seconds: of all of them, were nothing hidden.
        hidden: by computing.
        slowed: seconds that computing is longer meanwhile, since the exchange takes multiprocessors.
        formula: bytes, and over what.
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
    """Parameters of the largest stage on one rank, before they are sharded.

    Args:
        dense: all but experts.
        experts: of this rank's share of the experts.
    """

    dense: float
    experts: float

    @property
    def total(self) -> float:
        """Both."""
        return self.dense + self.experts

    def on_rank(self, layout: Layout, zero: int = 1) -> float:
        """Parameters that a rank is left with of what the layout shares from a ZeRO stage on.

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

    Args:
        work: of the rank.
        cluster: that it runs on.
        layers: of the stage.
        compute: seconds of a micro-batch on the stage, forward and backward: what can hide exchanges.
        attention: of that, seconds of attention.
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
                # Layer by layer, for the next is computed meanwhile; once a step in buckets that grow with the ranks.
                parts = self.layers if layout.zero >= 2 else _buckets(number, ranks, self.layers)
                seconds += parts * gathers * all_gather_seconds(number / parts * weight, path)
                seconds += parts * sums * reduce_scatter_seconds(number / parts * gradient, path)
        rounds = layout.micro_batches if layout.zero >= 2 else 1
        what = f"{found.total:.3g} parameters: {gathers} × {weight:g} B gathered and {sums} × {gradient:g} B reduced"
        under = rounds * self.compute
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
        return bytes_of(self.work.recipe.storage.visible) if adapters is None else adapters.base_bytes

    @property
    def _gradient_bytes(self) -> float:
        sent = self.work.recipe.reduction.bytes_per_element(self.work.recipe.storage.visible)
        return sent * self.work.architecture.trained_share


def _buckets(num_parameters: float, ranks: int, layers: int) -> int:
    """In how many parts gradients are reduced once a step: of 40 million parameters or more, a million a rank, so that latency
    does not decide; not more than layers.

    Source: Megatron-LM, megatron/core/distributed/distributed_data_parallel.py, ``bucket_size``.

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
