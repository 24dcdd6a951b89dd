"""Search: the layouts in which a recipe trains a model on a cluster, the best first.

A layout has a shape (ranks per axis, and the sharded state) and a batch (sequences at once, recomputation, offloading). Shapes
follow the bounds of practice. Tensor ranks share a node. Stages hold at least one layer each. Context ranks split long
sequences only. The search combines every shape with every batch. The answer is the fastest layout that fits. If nothing fits,
it is the closest layout, with the smallest changes that would make it fit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any, NamedTuple

from narrowgauge.errors import RecipeError
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.jobs import Job, check_job, why_not
from narrowgauge.planner.layouts import AXES, Layout
from narrowgauge.planner.memory import host_bytes, memory_terms
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.option import Option
from narrowgauge.planner.step_time import step_terms
from narrowgauge.planner.terms import Terms
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.recipes import Recipe, is_pair
from narrowgauge.spec.storages import STORAGES

TOKENS_PER_STEP = 1 << 22
"""Default tokens of an optimizer step: four million, as Llama 3 begins with (arXiv 2407.21783, section 3.4.1)."""
LEAST_TOKENS_PER_STEP = 1 << 19
"""Minimum default tokens of an optimizer step, if any layout has memory for the sum of gradients: half a million. This is the
smallest batch of GPT-3's models (arXiv 2005.14165, table 2.1)."""
TOKENS_PER_CHIP = 1 << 10
"""Tokens of a step per chip on many chips: 16 million on 16,384, as for Llama 3 405B (section 3.3.2)."""
MOST_TOKENS_PER_STEP = 1 << 26
"""Maximum default tokens of an optimizer step on any number of chips: 67 million. The largest published steps have 63 million,
in DeepSeek-V3 (arXiv 2412.19437, section 4.2: 15,360 sequences of 4,096)."""
SIMPLER_STEP_FACTOR = 2
"""Factor on the default tokens that a simpler layout may use, if no tokens are given."""
LONG_SEQUENCE = 32_768
"""Minimum tokens for context ranks."""
_TENSOR, _PIPELINE, _CONTEXT, _MICRO_BATCHES = (1, 2, 4, 8), (1, 2, 4, 8, 16, 32), (1, 2, 4, 8, 16), (1, 2, 4, 8)
MOST_CHIPS = 1 << 14
"""Maximum default number of chips, as for Llama 3 405B (arXiv 2407.21783)."""
MOST_OPTIONS = 4
"""Maximum number of shown options per recipe."""
NOISE = 0.05
"""Rates within this fraction count as equal. Then a layout of this project's trainer wins: the intervals are far wider."""


@dataclass(frozen=True, slots=True)
class _Request:
    """Hold the arguments of :func:`search`; ``is_batch_free`` if the tokens of a step may vary."""

    architecture: Architecture
    recipe: Recipe
    cluster: Cluster
    sequence_length: int
    num_sequences: int
    is_batch_free: bool
    fixed: Mapping[str, Any]

    def memory(self, layout: Layout) -> Terms:
        return memory_terms(self.architecture, self.recipe, layout, self.sequence_length)

    def job(self, layout: Layout) -> Job:
        return Job(self.architecture, self.recipe, layout, self.cluster, self.sequence_length)

    def node_bytes(self, layout: Layout) -> float:
        """Return the host memory that the ranks of a node use."""
        return self.cluster.chips_per_node * host_bytes(self.architecture, self.recipe, layout)

    def fits(self, layout: Layout, memory: Terms) -> bool:
        """Tell whether the chips hold the layout, and the hosts its offloaded state."""
        if memory.total > self.cluster.memory_bytes:
            return False
        if layout.offload == "none" or self.cluster.host_bytes is None:
            return layout.offload == "none" or "offload" in self.fixed
        return self.node_bytes(layout) <= self.cluster.host_bytes

    def tried(self, name: str, values: Iterable[Any]) -> tuple[Any, ...]:
        """Return the fixed value of a field, or all candidates."""
        return (self.fixed[name],) if name in self.fixed else tuple(dict.fromkeys(values))

    def option(self, layout: Layout, why_not: str = "", advice: str = "") -> Option:
        memory, step = self.memory(layout), step_terms(self.job(layout))
        asked = self.architecture, self.recipe, layout
        return Option(*asked, memory, self.cluster, step, self.sequence_length, why_not, advice)


def search(
    architecture: Architecture,
    recipe: Recipe,
    cluster: Cluster,
    sequence_length: int,
    tokens_per_step: int | None = None,
    *,
    fixed: Mapping[str, Any] | None = None,
    most: int = MOST_OPTIONS,
) -> list[Option]:
    """Try every layout of a recipe on all chips of a cluster.

    Args:
        tokens_per_step: None for ``TOKENS_PER_STEP``, or ``TOKENS_PER_CHIP`` on many chips. It is at least
            ``LEAST_TOKENS_PER_STEP`` unless nothing else fits. A layout takes the nearest number of sequences that its
            ranks can share. Layouts with more replicas than sequences are skipped.
        fixed: fields of :class:`~narrowgauge.planner.layouts.Layout` with fixed values.
        most: options of different shapes to return.
    Returns:
        Options, the fastest first; or the nearest to fitting, with advice. The best is the first option whose memory interval
        fits: the fastest such layout, or a layout of this project's trainer within ``NOISE`` of it.
    Raises:
        RecipeError: no layout has these fixed values on this cluster, or a step has fewer sequences than replicas.
        ChipError: a chip does not multiply the recipe's dtype.

    Example:
        >>> from narrowgauge.planner.clusters import cluster_of
        >>> from narrowgauge.planner.model import read_model
        >>> from narrowgauge.spec.notation import parse
        >>> best = search(read_model("llama-8b"), parse("bfloat16/word"), cluster_of("H100-SXM", 8), 8192)[0]
        >>> best.fits, best.layout.num_ranks
        (True, 8)
    """
    check_job(Job(architecture, recipe, Layout(), cluster, sequence_length))
    usual = min(max(TOKENS_PER_STEP, TOKENS_PER_CHIP * cluster.num_chips), MOST_TOKENS_PER_STEP)
    num_sequences = max(1, round((tokens_per_step or usual) / sequence_length))
    fixed = dict(fixed or {})
    is_free = tokens_per_step is None and "micro_batches" not in fixed
    request = _Request(architecture, recipe, cluster, sequence_length, num_sequences, is_free, fixed)
    shapes = [shape for shape in _shapes(request) if not why_not(architecture, shape, sequence_length)]
    if not shapes:
        raise _no_shape(request)
    shapes = _small_enough(shapes, request, is_asked=tokens_per_step is not None)
    layouts = dict.fromkeys(_candidates(shapes, request, LEAST_TOKENS_PER_STEP if is_free else 0))
    paces = _fastest(layouts, request, most)
    if is_free and not any(pace.is_certain for pace in paces):
        # A step of one micro-batch needs no accumulation buffers, so it may fit where others do not.
        layouts |= dict.fromkeys(_candidates(shapes, request, 0))
        small = [pace for pace in _fastest(layouts, request, most) if not paces or pace.is_certain]
        paces = sorted([*small, *paces][:most], key=lambda pace: pace.seconds)
    if paces:
        return [request.option(pace.layout) for pace in paces]
    return [_nearest(layouts, request)]


def _small_enough(shapes: list[Layout], request: _Request, *, is_asked: bool) -> list[Layout]:
    """Return shapes with a sequence per replica and step. If none exists, return all, unless tokens per step were given."""
    micro_batch, length = request.fixed.get("micro_batch", 1), request.sequence_length
    most = request.num_sequences * (1 if is_asked else SIMPLER_STEP_FACTOR)
    small = [shape for shape in shapes if shape.num_replicas * micro_batch <= most]
    if is_asked and not small:
        least = micro_batch * min(shape.num_replicas for shape in shapes)
        raise RecipeError(
            f"a step of {request.num_sequences * length:,} tokens was requested on {request.cluster.num_chips} chips, which "
            f"compute {least * length:,} at once.",
            "Ask for as many, or for fewer chips.",
        )
    return small or shapes


class _Pace(NamedTuple):
    """Describe a layout that fits: seconds per sequence and memory per chip, in order of preference."""

    seconds: float
    num_bytes: float
    is_certain: bool
    layout: Layout


def _fastest(layouts: Iterable[Layout], request: _Request, most: int) -> list[_Pace]:
    """Return the fitting layouts with the fewest seconds per token, one per shape, including the best."""
    paces = []
    for layout in layouts:
        memory = request.memory(layout)
        if request.fits(layout, memory):
            seconds = step_terms(request.job(layout)).total / layout.num_sequences
            is_certain = memory.interval[1] < request.cluster.memory_bytes
            paces.append(_Pace(seconds, memory.total, is_certain, layout))
    paces.sort(key=lambda pace: pace[:2])
    if not paces:
        return []
    certain = [pace for pace in paces if pace.is_certain] or paces
    # Among layouts within NOISE of the fastest, one of this project's trainer is the best.
    ours = (p for p in certain if p.layout.runs_here and p.seconds <= certain[0].seconds * (1 + NOISE))
    best = next(ours, certain[0])
    first: dict[tuple[Layout, bool], _Pace] = {(_shape_of(best.layout), best.is_certain): best}
    for pace in paces:
        first.setdefault((_shape_of(pace.layout), pace.is_certain), pace)
    alternatives: dict[Layout, _Pace] = {}
    for (shape, _), pace in sorted(first.items(), key=lambda item: item[1][:2]):
        if pace.seconds > best.seconds or (best.is_certain and not pace.is_certain):
            alternatives.setdefault(shape, pace)
    return sorted([best, *list(alternatives.values())[: most - 1]], key=lambda pace: pace[:2])


def _shape_of(layout: Layout) -> Layout:
    return replace(layout, micro_batch=1, micro_batches=1, recompute="none", offload="none")


# ── candidates ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _candidates(shapes: list[Layout], request: _Request, least_tokens: int) -> Iterator[Layout]:
    """Yield every shape with every batch that divides its replicas' sequences.

    If the tokens of a step are free, also try one micro-batch per step with at least ``least_tokens``. It needs no memory for
    sums of gradients.
    """
    fixed, tried = request.fixed, request.tried
    places = ("none",) if request.cluster.host_bytes is None else ("none", "optimizer", "all")
    for shape in shapes:
        per_replica = max(1, round(request.num_sequences / shape.num_replicas))
        for micro_batch in tried("micro_batch", (size for size in _MICRO_BATCHES if size <= per_replica)):
            counts = {fixed.get("micro_batches", max(1, round(per_replica / micro_batch)))}
            tokens = shape.num_replicas * micro_batch * request.sequence_length
            if request.is_batch_free and shape.pipeline == 1 and tokens >= least_tokens:
                counts.add(1)
            for offload, recompute in product(tried("offload", places), tried("recompute", ("none", "full"))):
                batch = {"micro_batch": micro_batch, "offload": offload, "recompute": recompute}
                yield from (replace(shape, micro_batches=count, **batch) for count in sorted(counts, reverse=True))


def _shapes(request: _Request) -> Iterator[Layout]:
    """Yield divisions of all chips among the axes, with one sequence at a time."""
    model, cluster, fixed = request.architecture, request.cluster, request.fixed
    chips, node, tried = cluster.num_chips, cluster.chips_per_node, request.tried
    contexts = _CONTEXT if request.sequence_length >= LONG_SEQUENCE else (1,)
    stages = [stages for stages in _PIPELINE if stages <= model.num_layers] if chips > node else [1]
    tensors = [ranks for ranks in _TENSOR if ranks <= node]
    sums = {name: fixed[name] for name in ("accumulation_dtype",) if name in fixed}
    axes = product(tried("tensor", tensors), tried("pipeline", stages), tried("context", contexts))
    for tensor, pipeline, context in axes:
        ranks, rest = divmod(chips, tensor * pipeline * context)
        if rest:
            continue
        most = math.gcd(model.mixture.num_experts, chips // (tensor * pipeline)) if model.mixture else 1
        experts = tried("expert", (1, math.gcd(most, node), most))
        depths = tried("interleave", (1, math.gcd(model.num_layers // pipeline, 4)) if pipeline > 1 else (1,))
        for sharing in _sharings(ranks, max(1, node // (tensor * context)), pipeline, request):
            for expert, interleave in product(experts, depths):
                yield Layout(
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    expert=expert,
                    interleave=interleave,
                    **sharing,
                    **sums,
                )


def _sharings(ranks: int, in_node: int, pipeline: int, request: _Request) -> Iterator[dict[str, Any]]:
    """Yield the sharding of state over data ranks: all of them, those of a node, or none."""
    fixed = request.fixed
    # Stages hold a part of the model. Sharding their optimizer states costs no more than summing gradients.
    groups = {ranks} if pipeline > 1 else {ranks, in_node if ranks % in_node == 0 else ranks, 1}
    if fixed.get("zero") == 0:
        groups = {1}
    if "data" in fixed:
        groups = {ranks // fixed["data"]}
    for shard in request.tried("shard", sorted(groups, reverse=True)):
        # A stage has several micro-batches in flight. It would gather its weights for each.
        zeros = ((1,) if pipeline > 1 else (3, 2, 1)) if shard > 1 else (0,)
        if shard and ranks % shard == 0 and fixed.get("data", ranks // shard) == ranks // shard:
            yield from ({"shard": shard, "data": ranks // shard, "zero": z} for z in request.tried("zero", zeros))


# ── where nothing fits: the nearest layout, and the smallest changes that would make it fit, each found by trying it ──────


def _nearest(layouts: Iterable[Layout], request: _Request) -> Option:
    """Return the layout with the fewest bytes per chip, and advice."""
    allowed = [layout for layout in layouts if layout.offload == "none" or "offload" in request.fixed]
    layout = min(allowed, key=lambda layout: request.memory(layout).total)
    needed, room, why = request.node_bytes(layout), request.cluster.host_bytes, ""
    if layout.offload != "none" and room is not None and needed > room:
        why = f"needs {needed / 1e9:,.0f} GB of host memory a node of {room / 1e9:,.0f}"
    advice = smallest_changes(request.job(layout), fixed=request.fixed)
    return request.option(layout, why_not=why, advice=advice)


def _no_shape(request: _Request) -> RecipeError:
    """Say why no layout has the fixed values, if known."""
    fixed = request.fixed
    asked = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any"
    why = why_not(request.architecture, Layout(**fixed), request.sequence_length)
    if not why:
        ranks = math.prod(fixed.get(name, 1) for name in AXES)
        why = f"{ranks} ranks do not divide {request.cluster.num_chips} chips"
    return RecipeError(f"no layout with {asked} suits {request.architecture.name}: {why}.", "Leave a field open.")


def smallest_changes(job: Job, *, fixed: Mapping[str, Any]) -> str:
    """Name the changes that make a job fit: of each kind, the smallest that suffices alone."""
    layout, recipe, length, cluster = job.layout, job.recipe, job.sequence_length, job.cluster

    def needed(change: Mapping[str, Any]) -> float:
        changed: dict[str, Any] = {"recipe": recipe, "layout": layout, "sequence_length": length, **change}
        return memory_terms(job.architecture, **changed).total

    relaxed: _Changes = []
    if fixed.get("recompute", "full") != "full":
        relaxed.append(("with recompute=full", {"layout": replace(layout, recompute="full")}))
    ranks = layout.num_replicas
    if ranks > 1 and ("zero" in fixed or "data" in fixed) and (layout.zero < 3 or layout.data > 1):
        for zero in (1, 2, 3):
            text = f"with its state shared by all {ranks} replicas (zero={zero})"
            relaxed.append((text, {"layout": replace(layout, data=1, shard=ranks, zero=zero)}))
    offloaded: _Changes = []
    for place in ("optimizer", "all") if layout.offload == "none" else ():
        there = replace(layout, offload=place)
        node = cluster.chips_per_node * host_bytes(job.architecture, recipe, there)
        offloaded.append((f"with offload={place} ({node / 1e9:,.0f} GB of host memory a node)", {"layout": there}))
    narrower: _Changes = []
    for storage in sorted(STORAGES.values(), key=lambda storage: -storage.bytes_per_param):
        is_possible = is_pair(recipe.compute, storage) and storage.visible == recipe.storage.visible
        if is_possible and storage.keeps_updates and storage.bytes_per_param < recipe.bytes_per_param:
            name = f"{recipe.compute.name}/{storage.name.rpartition('/')[2]}"
            other = replace(recipe, storage=storage.keeping(recipe.storage.states))
            narrower.append((f"at {storage.bytes_per_param:g} B/param ({name})", {"recipe": other}))
    shorter = [length >> power for power in (1, 2, 3) if length >> power >= 512]
    kinds = [
        relaxed,
        offloaded,
        narrower,
        [] if {"shard", "data"} & set(fixed) or fixed.get("zero") == 0 else _on_more_chips(layout, cluster),
        [(f"with sequences of {length:,} tokens", {"sequence_length": length}) for length in shorter],
    ]
    changes = [text for kind in kinds for text in _first(kind, lambda change: needed(change) <= cluster.memory_bytes)]
    larger = sorted((chip.memory_gb, chip.name) for chip in CHIPS.values() if chip.memory_bytes >= needed({}))
    changes += [f"on chips of {size} GB ({name})" for size, name in larger[:1]]
    if not changes:
        return "No single change suffices: combine a narrower storage, more chips and larger ones."
    return f"It fits {', or '.join(changes)}."


_Changes = list[tuple[str, dict[str, Any]]]


def _first(changes: _Changes, suffices: Callable[[dict[str, Any]], bool]) -> list[str]:
    return next(([text] for text, change in changes if suffices(change)), [])


def _on_more_chips(layout: Layout, cluster: Cluster) -> _Changes:
    """Return more whole nodes, with the state sharded over more ranks."""
    chips, node = cluster.num_chips, cluster.chips_per_node
    counts = list(range(chips + node, 4 * chips + 1, node))
    counts += [chips << power for power in range(3, 12) if chips << power <= MOST_CHIPS]
    # A layout of one replica shards nothing yet. With stages it would shard optimizer states, else all.
    zero = layout.zero or (3 if layout.pipeline == 1 else 1)
    divisible = [count for count in counts if count % layout.model_ranks == 0]
    shards = [(count, max(1, count // layout.model_ranks)) for count in divisible]
    return [(f"on {count} chips", {"layout": replace(layout, data=1, shard=n, zero=zero)}) for count, n in shards]
