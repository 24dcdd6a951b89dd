"""Search: the layouts in which a recipe trains a model on a cluster, the best first.

A layout has a shape (how ranks are divided among the axes, and what is sharded) and a batch (sequences at once, what is
recomputed, what lies in the host's memory). Shapes are listed with the bounds that practice sets: tensor ranks share a
node, stages hold at least one layer each, context ranks split long sequences only. Every shape is combined with every batch,
and the time of what fits decides. Candidates are tried in the order of a lower bound of their time, their computing alone, so
most need not be tried, and none that is skipped could have been the best. If nothing fits, the layout that comes closest
is returned, with the smallest changes that would make it possible.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeVar

from narrowgauge.errors import RecipeError
from narrowgauge.planner.inputs.architectures import Architecture
from narrowgauge.planner.inputs.clusters import Cluster
from narrowgauge.planner.inputs.efficiency import Shares
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout, Offload, Recompute
from narrowgauge.planner.memory.activations import LayerCounter, figures_of, kernels_of
from narrowgauge.planner.memory.rank_memory import FIXED, host_bytes, memory_terms
from narrowgauge.planner.question import Option
from narrowgauge.planner.terms import Terms
from narrowgauge.planner.time.layer_times import computed_as
from narrowgauge.planner.time.roofline import bytes_per_number
from narrowgauge.planner.time.step_time import SecondsCache, check_layout, least_seconds, step_terms, why_not
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.recipes import Recipe, is_pair
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.sums import ACCUMULATIONS

TOKENS_PER_STEP = 1 << 22
"""Tokens of an optimizer step by default: four million, as Llama 3 begins with (arXiv 2407.21783, section 3.4.1)."""
LEAST_TOKENS_PER_STEP = 1 << 19
"""Fewest tokens of an optimizer step by default, if any layout has room for the sum of gradients: half a million, the smallest
batch of GPT-3's models (arXiv 2005.14165, table 2.1)."""
TOKENS_PER_CHIP = 1 << 10
"""Tokens of an optimizer step for each of many chips: 16 million on 16,384, as Llama 3 405B was trained with (section 3.3.2)."""
MOST_TOKENS_PER_STEP = 1 << 26
"""Most tokens of an optimizer step by default, on any number of chips: 67 million; the largest published steps have 63 million,
in DeepSeek-V3 (arXiv 2412.19437, section 4.2: 15,360 sequences of 4,096)."""
SIMPLER_STEP_FACTOR = 2
"""How many times the default tokens a step may have for a simpler layout, if none are given."""
LONG_SEQUENCE = 32_768
"""Tokens from which context ranks are tried."""
_TENSOR = (1, 2, 4, 8)
_PIPELINE = (1, 2, 4, 8, 16, 32)
_MICRO_BATCHES = (1, 2, 4, 8)
_TAKEN_AS_GIVEN = ("sequence_parallel", "expert_tensor", "accumulation_dtype", "keeps_gradients")
_WEIGHTS, _GRADIENTS = 3, 2  # ZeRO's stages that share them
_CONTEXT_BYTES = FIXED["context"][0]
_RECOMPUTES: tuple[Recompute, ...] = ("none", "full")
MOST_CHIPS = 1 << 14
"""The largest number of chips that is tried where none is given: that of Llama 3 405B (arXiv 2407.21783)."""
MOST_OPTIONS = 4
"""The most options of one recipe that are shown."""
NOISE = 0.05
"""Rates that differ by less count as equal, and a layout of this project's trainer wins: the intervals are far wider."""

Fixed = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class SearchCache:
    """Results that the searches of one model on one cluster share, so that all recipes cost little more than one of each kind.

    ``seconds`` and ``orders`` are by what a recipe computes in, all but its optimizer; ``orders`` and ``candidates`` also by
    what is asked of a batch.
    """

    seconds: dict[Hashable, SecondsCache] = field(default_factory=dict)
    orders: dict[Hashable, list[tuple[float, Layout]]] = field(default_factory=dict)
    candidates: dict[Hashable, list[Layout]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class _Request:
    architecture: Architecture
    recipe: Recipe
    cluster: Cluster
    sequence_length: int
    num_sequences: int
    num_parameters: int
    is_batch_free: bool
    fixed: Fixed
    shares: Shares | None
    counted: LayerCounter | None
    is_small_allowed: bool = False
    common: SearchCache = field(default_factory=SearchCache)
    kind: Hashable = None
    # Caches: the memory of a layout is needed several times.
    memories: dict[Layout, Terms] = field(default_factory=dict)
    kept: dict[tuple[bool, bool], float] = field(default_factory=dict)

    def memory(self, layout: Layout) -> Terms:
        if layout not in self.memories:
            given = self.architecture, self.recipe, layout, self.sequence_length
            self.memories[layout] = memory_terms(*given, counted=self.counted)
        return self.memories[layout]

    def fits(self, layout: Layout) -> bool:
        """Whether the chips hold it, and the hosts what is offloaded."""
        room = self.cluster.memory_bytes
        if self.least_bytes(layout) > room or self.memory(layout).total > room:
            return False
        if layout.offload == "none" or self.cluster.host_bytes is None:
            return layout.offload == "none" or "offload" in self.fixed
        held = host_bytes(self.architecture, self.recipe, layout, self.sequence_length)
        return held * self.cluster.chips_per_node <= self.cluster.host_bytes

    def is_certain(self, layout: Layout) -> bool:
        """Whether the whole interval of its memory fits."""
        return self.memory(layout).interval[1] < self.cluster.memory_bytes

    def least_bytes(self, layout: Layout) -> float:
        """A lower bound of what a chip holds, from totals: the state, and what layers keep of a micro-batch."""
        kept = self.least_activations(layout)
        if layout.offload != "none":
            return kept
        number = 0.9 * self.num_parameters / (layout.tensor * layout.pipeline)
        if self.architecture.mixture:
            number /= layout.expert
        visible, sharing = bytes_per_number(self.recipe.storage.visible), layout.num_sharing
        if (adapters := self.architecture.adapters) is not None:
            return kept + _CONTEXT_BYTES + number * adapters.base_bytes / (sharing if layout.zero >= _WEIGHTS else 1)
        weights = visible / (sharing if layout.zero >= _WEIGHTS else 1)
        row = ACCUMULATIONS[layout.accumulation_dtype]
        has_sums = layout.micro_batches > 1 and row.keeps_sums(self.recipe.storage.visible)
        has_sums = has_sums and visible < row.bytes_per_param
        sums = has_sums * row.bytes_per_param / (sharing if layout.zero >= _GRADIENTS else 1)
        rest = max(0.0, self.recipe.bytes_per_param - 2 * visible) / (sharing if layout.zero else 1)
        return kept + _CONTEXT_BYTES + number * (weights + sums + rest)

    def least_activations(self, layout: Layout) -> float:
        """A lower bound: the worst stage has at least its part of the layers, and one micro-batch in flight."""
        kind = layout.is_whole, layout.recompute == "full"
        if kind not in self.kept:
            given = self.architecture, self.recipe, self.sequence_length, "flash", kernels_of(layout), self.counted
            figures = figures_of(*given)  # type: ignore[arg-type]
            inputs = figures.widths.stream * self.architecture.hidden_size
            self.kept[kind] = (
                inputs if layout.recompute == "full" else figures.per_layer
            ) * self.architecture.num_layers
        tokens = layout.tokens_on_rank(self.sequence_length)
        return tokens * self.kept[kind] / (layout.tensor * layout.pipeline)

    def pace(self, layout: Layout) -> float:
        """Seconds of a step for each sequence, without intervals."""
        step = step_terms(self.job(layout), has_intervals=False, known=self._known)
        return step.total / layout.num_sequences

    def least_pace(self, layout: Layout) -> float:
        """A lower bound of :meth:`pace`."""
        return least_seconds(self.job(layout), known=self._known) / layout.num_sequences

    @property
    def batch(self) -> Hashable:
        """What candidates depend on besides the model and the cluster."""
        return tuple(sorted(self.fixed.items())), self.num_sequences, self.is_batch_free, self.is_small_allowed

    def option(self, layout: Layout) -> Option:
        cluster = self.cluster
        return Option(
            self.recipe,
            layout,
            self.memory(layout),
            capacity_bytes=cluster.memory_bytes,
            step=step_terms(self.job(layout), known=self._known),
            sequence_length=self.sequence_length,
            flops_per_token=self.architecture.flops_per_token(self.sequence_length),
            peak_flops_per_second=cluster.peak_flops_per_second,
            dollars_per_hour=cluster.dollars_per_hour,
            cluster=cluster.name,
            watts=cluster.watts,
        )

    def job(self, layout: Layout) -> Job:
        return Job(self.architecture, self.recipe, layout, self.cluster, self.sequence_length, self.shares)

    @property
    def _known(self) -> SecondsCache:
        return self.common.seconds.setdefault(self.kind, {})


def usual_tokens_per_step(num_chips: int) -> int:
    """Tokens of an optimizer step where none are given.

    Example:
        >>> [usual_tokens_per_step(chips) >> 20 for chips in (8, 16_384, 1_000_000)]
        [4, 16, 64]
    """
    return min(max(TOKENS_PER_STEP, TOKENS_PER_CHIP * num_chips), MOST_TOKENS_PER_STEP)


def search(
    architecture: Architecture,
    recipe: Recipe,
    cluster: Cluster,
    sequence_length: int,
    tokens_per_step: int | None = None,
    *,
    fixed: Fixed | None = None,
    minimize: str = "days",
    shares: Shares | None = None,
    counted: LayerCounter | None = None,
    common: SearchCache | None = None,
    most: int = MOST_OPTIONS,
) -> list[Option]:
    """The layouts of a recipe on all chips of a cluster.

    Args:
        tokens_per_step: None for ``TOKENS_PER_STEP``, on many chips ``TOKENS_PER_CHIP``, and never below
            ``LEAST_TOKENS_PER_STEP`` unless nothing else fits. A layout takes the nearest number of sequences that its
            ranks can share; one with more replicas than sequences is not taken.
        fixed: fields of :class:`~narrowgauge.planner.inputs.layouts.Layout` that must have these values.
        minimize: ``"days"``, ``"cost"`` or ``"chips"`` (fewest seconds a token), or ``"memory"`` (fewest bytes a chip).
        shares: of the chips' printed rates; None for the published ones.
        counted: what a layer keeps, counted in the model's own modules; None for the formulas.
        common: results of earlier searches of the same model, cluster and shares; the answer does not depend on it.
        most: options of different shapes to return.
    Returns:
        Options, the fastest first; or the one that comes nearest to fitting, with advice. The first that fits for certain is the
        best: the fastest of all that are tried and do, or one of this project's trainer that is as fast but for ``NOISE``.
    Raises:
        RecipeError: no layout has these fixed values on this cluster, or a step has fewer sequences than it has replicas.
        ChipError: a chip does not multiply the recipe's dtype.

    Example:
        >>> from narrowgauge.planner.inputs.clusters import cluster_of
        >>> from narrowgauge.planner.inputs.model_configs import read_architecture
        >>> from narrowgauge.spec.notation import parse
        >>> best = search(read_architecture("llama-8b"), parse("bfloat16/word"), cluster_of("H100-SXM", 8), 8192)[0]
        >>> best.fits, best.layout.num_ranks
        (True, 8)
    """
    check_layout(Job(architecture, recipe, Layout(), cluster, sequence_length))
    wanted = max(1, round((tokens_per_step or usual_tokens_per_step(cluster.num_chips)) / sequence_length))
    pinned = dict(fixed or {})
    request = _Request(
        architecture=architecture,
        recipe=recipe,
        cluster=cluster,
        sequence_length=sequence_length,
        num_sequences=wanted,
        num_parameters=architecture.num_parameters,
        is_batch_free=tokens_per_step is None and "micro_batches" not in pinned,
        fixed=pinned,
        shares=shares,
        counted=counted,
        is_small_allowed=minimize == "memory",
        common=common or SearchCache(),
        kind=computed_as(architecture, recipe),
    )
    layouts, is_fitting = _chosen(request, most, is_asked=tokens_per_step is not None)
    options = [request.option(layout) for layout in layouts]
    return options if is_fitting else [_nearest(options[0], request)]


def _chosen(request: _Request, most: int, *, is_asked: bool) -> tuple[list[Layout], bool]:
    """The layouts of an answer, and whether they fit; the one that comes closest if none does."""
    shapes = [s for s in _shapes(request) if not why_not(request.architecture, s, request.sequence_length)]
    if not shapes:
        raise _no_shape(request)
    shapes = _small_enough(shapes, request, is_asked=is_asked)
    if request.is_small_allowed:
        found = _smallest(shapes, request, most)
        return found or [_nearest_of(shapes, request)], bool(found)
    found = _fastest(shapes, request, most)
    if request.is_batch_free and not any(map(request.is_certain, found)):
        # A step of one micro-batch needs no sum of gradients, so it may fit for certain where others barely do.
        request = replace(request, is_small_allowed=True)
        small = [layout for layout in _fastest(shapes, request, most) if not found or request.is_certain(layout)]
        found = sorted([*small, *found][:most], key=request.pace)
    return found or [_nearest_of(shapes, request)], bool(found)


def _small_enough(shapes: list[Layout], request: _Request, *, is_asked: bool) -> list[Layout]:
    """Shapes whose replicas each have a sequence in a step; all shapes if none has, unless the tokens of a step were given."""
    each, most = request.fixed.get("micro_batch", 1), request.num_sequences * (1 if is_asked else SIMPLER_STEP_FACTOR)
    found = [shape for shape in shapes if shape.num_replicas * each <= most]
    if is_asked and not found:
        least = each * min(shape.num_replicas for shape in shapes)
        raise RecipeError(
            f"a step of {request.num_sequences * request.sequence_length:,} tokens was requested on "
            f"{request.cluster.num_chips} chips, which compute {least * request.sequence_length:,} at once.",
            "Ask for as many, or for fewer chips.",
        )
    return found or shapes


class _Pace(NamedTuple):
    """A layout that fits, and what decides between it and others: the seconds of a sequence, and the memory of a chip."""

    seconds: float
    num_bytes: float
    layout: Layout


def _fastest(shapes: list[Layout], request: _Request, most: int) -> list[Layout]:
    """The layouts that fit and take the fewest seconds a token, one of each shape, with the best among them.

    The computing of a layout is a lower bound of its seconds: candidates come in its order, and the first that computes for
    longer than what was found takes ends the search.
    """
    found = _Fitting(request, most)
    for least, layout in _by_least_pace(shapes, request):
        if least > found.limit * (1 + NOISE):
            break
        # Beyond the limit only this project's own layouts are still of interest.
        if least <= found.limit or layout.runs_here:
            found.try_out(layout)
    return found.chosen()


class _Fitting:
    """The layouts found to fit, and the seconds above which others need not be tried."""

    def __init__(self, request: _Request, most: int) -> None:
        self.request, self.most = request, most
        self.limit = math.inf
        self._paces: dict[Hashable, _Pace] = {}  # the fastest of each shape
        self._best: dict[
            tuple[bool, bool], _Pace
        ] = {}  # by whether it fits for certain, and whether it is one of our own
        self._too_large: dict[Hashable, int] = {}

    def try_out(self, layout: Layout) -> None:
        request, limit = self.request, self.limit * (1 + NOISE * layout.runs_here)
        # Of layouts that differ in their micro-batch alone, the larger needs more memory.
        alike = _shape_of(layout), layout.recompute, layout.offload, layout.micro_batches == 1
        if layout.micro_batch >= self._too_large.get(alike, math.inf):
            return
        # Earlier recipes may have made the bound tighter.
        if limit < math.inf and request.least_pace(layout) > limit:
            return
        seconds = request.pace(layout) if limit < math.inf else 0.0
        if seconds > limit:
            return
        if not request.fits(layout):
            self._too_large[alike] = layout.micro_batch
            return
        pace = _Pace(seconds or request.pace(layout), request.memory(layout).total, layout)
        shape, kind = _shape_of(layout), (request.is_certain(layout), layout.runs_here)
        self._paces[shape] = min(pace, self._paces.get(shape, pace), key=_order)
        self._best[kind] = min(pace, self._best.get(kind, pace), key=_order)
        certain = [self._best[kind].seconds for kind in ((True, True), (True, False)) if kind in self._best]
        if certain and len(self._paces) >= self.most:
            self.limit = max(min(certain), sorted(each.seconds for each in self._paces.values())[self.most - 1])

    def chosen(self) -> list[Layout]:
        """The best, and the fastest of other shapes that are not better than it; the fastest first."""
        if not self._best:
            return []
        is_certain = any(certain for certain, _ in self._best)
        alike = [self._best[is_certain, ours] for ours in (True, False) if (is_certain, ours) in self._best]
        first = min(alike, key=_order)
        # Of layouts that are equally fast within NOISE, this project's trainer's own is the best.
        best = alike[0] if alike[0].seconds <= first.seconds * (1 + NOISE) else first
        others = [
            pace
            for pace in self._paces.values()
            if pace.seconds > best.seconds or (is_certain and not self.request.is_certain(pace.layout))
        ]
        others = sorted(others, key=_order)[: self.most - 1]
        return [pace.layout for pace in sorted([best, *others], key=_order)]


def _order(pace: _Pace) -> tuple[float, float]:
    return pace.seconds, pace.num_bytes


def _shape_of(layout: Layout) -> Hashable:
    axes = layout.data, layout.shard, layout.tensor, layout.pipeline, layout.context, layout.expert
    return *axes, layout.zero, layout.interleave


def _by_least_pace(shapes: list[Layout], request: _Request) -> list[tuple[float, Layout]]:
    """All candidates with lower bounds of their seconds, the least first; the same for recipes that compute alike."""
    orders, key = request.common.orders, (request.kind, request.batch)
    if key not in orders:
        found = request.common.candidates
        if request.batch not in found:
            found[request.batch] = list(dict.fromkeys(_candidates(shapes, request)))
        tried = ((request.least_pace(layout), layout) for layout in found[request.batch])
        orders[key] = sorted(tried, key=lambda each: each[0])
    return orders[key]


def _candidates(shapes: list[Layout], request: _Request) -> Iterator[Layout]:
    """Every shape with every batch.

    Where the tokens of a step are free, one micro-batch a step is tried too: sums of gradients then need no memory.
    """
    for shape in shapes:
        for offload in _places(request):
            for recompute in _tried(request.fixed, "recompute", _RECOMPUTES):
                tried = replace(shape, offload=offload, recompute=recompute)
                for sums in (True, False) if request.is_batch_free and shape.pipeline == 1 else (True,):
                    yield from _with_batches(tried, request, sums=sums)


def _places(request: _Request) -> tuple[Offload, ...]:
    places = ("none",) if request.cluster.host_bytes is None else ("none", "optimizer", "all")
    return _tried(request.fixed, "offload", places)


def _shapes(request: _Request) -> Iterator[Layout]:
    """Divisions of all chips among the axes, with one sequence at a time."""
    shape, cluster, fixed = request.architecture, request.cluster, request.fixed
    chips, node = cluster.num_chips, cluster.chips_per_node
    contexts = (1, 2, 4, 8, 16) if request.sequence_length >= LONG_SEQUENCE else (1,)
    stages = _PIPELINE if chips > node else (1,)
    given = {name: fixed[name] for name in _TAKEN_AS_GIVEN if name in fixed}
    for tensor in _tried(fixed, "tensor", (t for t in _TENSOR if t <= node)):
        for pipeline in _tried(fixed, "pipeline", (p for p in stages if p <= shape.num_layers)):
            for context in _tried(fixed, "context", contexts):
                ranks = tensor * pipeline * context
                if chips % ranks:
                    continue
                for sharing in _sharings(chips // ranks, max(1, node // (tensor * context)), pipeline, request):
                    for rest in _expert_and_interleave(pipeline, chips // (tensor * pipeline), request):
                        yield Layout(tensor=tensor, pipeline=pipeline, context=context, **sharing, **rest, **given)


def _tried(fixed: Fixed, name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """The fixed value of a field, or all that are tried."""
    return (fixed[name],) if name in fixed else tuple(values)


def _sharings(ranks: int, in_node: int, pipeline: int, request: _Request) -> Iterator[dict[str, Any]]:
    """How data ranks share the state: all of them, those of a node, or none."""
    fixed = request.fixed
    # Stages hold a part of the model, and sharing their optimizer states costs no more than summing gradients.
    groups = {ranks} if pipeline > 1 else {ranks, in_node if ranks % in_node == 0 else ranks, 1}
    if request.fixed.get("zero") == 0:
        groups = {1}
    if "data" in fixed:
        groups = {ranks // fixed["data"]} if ranks % fixed["data"] == 0 else set()
    for shard in _tried(fixed, "shard", sorted(groups, reverse=True)):
        # A stage has several micro-batches in flight, and would gather its weights for each.
        zeros = ((1,) if pipeline > 1 else (3, 2, 1)) if shard > 1 else (0,)
        for zero in _tried(fixed, "zero", zeros):
            if ranks % shard == 0 and fixed.get("data", ranks // shard) == ranks // shard:
                yield {"shard": shard, "data": ranks // shard, "zero": zero}


def _expert_and_interleave(pipeline: int, data_ranks: int, request: _Request) -> Iterator[dict[str, Any]]:
    shape, fixed = request.architecture, request.fixed
    experts: tuple[int, ...] = (1,)
    if shape.mixture:
        most = math.gcd(shape.mixture.num_experts, data_ranks)
        experts = tuple(dict.fromkeys((math.gcd(most, request.cluster.chips_per_node), most)))
    most = shape.num_layers // pipeline
    depths = (1, math.gcd(most, 4)) if pipeline > 1 else (1,)
    for expert in _tried(fixed, "expert", experts):
        for interleave in _tried(fixed, "interleave", dict.fromkeys(depths)):
            yield {"expert": expert, "interleave": interleave}


def _with_batches(shape: Layout, request: _Request, *, sums: bool) -> Iterator[Layout]:
    """The shape with each micro-batch that its replicas' sequences can be divided into; without ``sums`` one a step."""
    fixed = request.fixed
    per_replica = max(1, round(request.num_sequences / shape.num_replicas))
    for micro_batch in _tried(fixed, "micro_batch", _MICRO_BATCHES):
        if micro_batch > per_replica and "micro_batch" not in fixed and micro_batch > 1:
            return
        count = fixed.get("micro_batches", max(1, round(per_replica / micro_batch)) if sums else 1)
        layout = replace(shape, micro_batch=micro_batch, micro_batches=count)
        tokens = layout.num_sequences * request.sequence_length
        if sums or request.is_small_allowed or tokens >= LEAST_TOKENS_PER_STEP:
            yield layout


def _smallest(shapes: list[Layout], request: _Request, most: int) -> list[Layout]:
    """The layouts that fit in the fewest bytes, one of each shape, the smallest first."""
    paces: dict[Hashable, _Pace] = {}
    for layout in _least_batches(shapes, request, _RECOMPUTES, _places(request)):
        if request.fits(layout):
            pace = _Pace(request.pace(layout), request.memory(layout).total, layout)
            shape = _shape_of(layout)
            paces[shape] = min(pace, paces.get(shape, pace), key=lambda each: each.num_bytes)
    return [pace.layout for pace in sorted(paces.values(), key=lambda each: (each.num_bytes, each.seconds))[:most]]


def _nearest_of(shapes: list[Layout], request: _Request) -> Layout:
    """The layout that needs the fewest bytes: with all layers computed again, and the smallest batch."""
    tried = sorted(_least_batches(shapes, request, ("full",), ("none",)), key=request.least_bytes)
    best = tried[0]
    for layout in tried[1:]:
        if request.least_bytes(layout) >= request.memory(best).total:
            break
        best = min(best, layout, key=lambda each: request.memory(each).total)
    return best


def _least_batches(
    shapes: list[Layout], request: _Request, recomputes: tuple[Recompute, ...], places: tuple[Offload, ...]
) -> Iterator[Layout]:
    for shape in shapes:
        sums = not (request.is_batch_free and request.is_small_allowed) or shape.pipeline > 1
        for offload in _tried(request.fixed, "offload", places):
            for recompute in _tried(request.fixed, "recompute", recomputes):
                yield next(_with_batches(replace(shape, offload=offload, recompute=recompute), request, sums=sums))


def _nearest(option: Option, request: _Request) -> Option:
    """An option that does not fit, with the smallest changes that would make it fit."""
    layout = option.layout
    option = replace(option, why_not=_full_host(layout, request))
    advice = smallest_changes(request.job(layout), fixed=request.fixed, counted=request.counted)
    return replace(option, advice=advice)


def _full_host(layout: Layout, request: _Request) -> str:
    """Why the hosts cannot hold what is offloaded; empty if they can, or if it is the chips that cannot."""
    cluster = request.cluster
    held = cluster.chips_per_node * host_bytes(request.architecture, request.recipe, layout, request.sequence_length)
    if layout.offload == "none" or cluster.host_bytes is None or held <= cluster.host_bytes:
        return ""
    return f"needs {held / 1e9:,.0f} GB of host memory a node of {cluster.host_bytes / 1e9:,.0f}"


def _no_shape(request: _Request) -> RecipeError:
    """Why no layout has the fixed values, as far as is known."""
    names = {field.name for field in dataclasses.fields(Layout)}
    fixed = {name: value for name, value in request.fixed.items() if name in names}
    asked = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any"
    axes = ("data", "shard", "tensor", "pipeline", "context")
    ranks = math.prod(fixed.get(name, 1) for name in axes)
    why = why_not(request.architecture, Layout(**fixed), request.sequence_length)
    if not why:
        why = f"{ranks} ranks do not divide {request.cluster.num_chips} chips"
    return RecipeError(f"no layout with {asked} suits {request.architecture.name}: {why}.", "Leave a field open.")


# ── the smallest changes that would make an impossible plan possible, each found by trying it ─────────────────────────────

_Value = TypeVar("_Value")
Fits = Callable[[_Value], bool]


def smallest_changes(job: Job, *, fixed: Mapping[str, Any], counted: LayerCounter | None = None) -> str:
    """What would have to change for a job to fit, in a sentence: of each kind of change the smallest that suffices alone."""
    layout, cluster = job.layout, job.cluster

    def needed(recipe: Recipe = job.recipe, layout: Layout = layout, length: int = job.sequence_length) -> float:
        return memory_terms(job.architecture, recipe, layout, length, counted=counted).total

    def held(layout: Layout) -> float:
        return cluster.chips_per_node * host_bytes(job.architecture, job.recipe, layout, job.sequence_length)

    room = cluster.memory_bytes
    changes = [
        *_freed(layout, fixed, lambda other: needed(layout=other) <= room),
        *_offloaded(layout, lambda other: needed(layout=other) <= room, held),
        *_narrower(job.recipe, lambda other: needed(recipe=other) <= room),
        *_more_chips(layout, cluster, fixed, lambda other: needed(layout=other) <= room),
        *_shorter(job.sequence_length, lambda length: needed(length=length) <= room),
        *_larger_chips(needed(), cluster),
    ]
    if not changes:
        return "No single change suffices: combine a narrower storage, more chips and larger ones."
    return f"It fits {', or '.join(changes)}."


def _freed(layout: Layout, fixed: Mapping[str, Any], fits: Fits[Layout]) -> Iterator[str]:
    """The smallest set of fixed settings to relax."""
    if fixed.get("recompute", "full") != "full" and fits(replace(layout, recompute="full")):
        yield "with recompute=full"
    ranks = layout.data * layout.shard
    if ranks > 1 and ("zero" in fixed or "data" in fixed) and (layout.zero < 3 or layout.data > 1):
        for zero in (1, 2, 3):
            if fits(replace(layout, data=1, shard=ranks, zero=zero)):
                yield f"with its state shared by all {ranks} replicas (zero={zero})"
                return


def _offloaded(layout: Layout, fits: Fits[Layout], held: Callable[[Layout], float]) -> Iterator[str]:
    """The least that has to be offloaded, and the host memory that it takes."""
    places: tuple[Offload, ...] = ("optimizer", "all")
    for place in places if layout.offload == "none" else ():
        other = replace(layout, offload=place)
        if fits(other):
            yield f"with offload={place} ({held(other) / 1e9:,.0f} GB of host memory a node)"
            return


def _narrower(recipe: Recipe, fits: Fits[Recipe]) -> Iterator[str]:
    """The widest storage that fits."""
    others = sorted(STORAGES.values(), key=lambda storage: -storage.bytes_per_param)
    for storage in others:
        is_possible = is_pair(recipe.compute, storage) and storage.visible == recipe.storage.visible
        is_narrower = is_possible and storage.keeps_updates and storage.bytes_per_param < recipe.bytes_per_param
        if is_narrower and fits(replace(recipe, storage=storage.keeping(recipe.storage.states))):
            yield f"at {storage.bytes_per_param:g} B/param ({recipe.compute.name}/{storage.name.rpartition('/')[2]})"
            return


def _more_chips(layout: Layout, cluster: Cluster, fixed: Mapping[str, Any], fits: Fits[Layout]) -> Iterator[str]:
    """The fewest whole nodes on which it fits, with the state sharded over more ranks."""
    if {"shard", "data"} & set(fixed) or fixed.get("zero") == 0:
        return
    chips, node = cluster.num_chips, cluster.chips_per_node

    def shared(count: int) -> Layout:
        # A layout of one replica shares nothing yet: with stages it would share optimizer states, else all.
        zero = layout.zero or (3 if layout.pipeline == 1 else 1)
        return replace(layout, data=1, shard=max(1, count // layout.model_ranks), zero=zero)

    steps = list(range(chips + node, 4 * chips + 1, node))
    steps += [chips << power for power in range(3, 12) if chips << power <= MOST_CHIPS]
    for count in steps:
        if count % layout.model_ranks == 0 and fits(shared(count)):
            yield f"on {count} chips"
            return


def _shorter(sequence_length: int, fits: Fits[int]) -> Iterator[str]:
    """The longest power of two that fits, down to an eighth."""
    for power in (1, 2, 3):
        length = sequence_length >> power
        if length >= 512 and fits(length):
            yield f"with sequences of {length:,} tokens"
            return


def _larger_chips(needed: float, cluster: Cluster) -> Iterator[str]:
    """The smallest memory in the table of chips that suffices."""
    larger = sorted((chip.memory_gb, chip.name) for chip in CHIPS.values() if chip.memory_bytes >= needed)
    if larger:
        yield f"on chips of {larger[0][0]} GB ({larger[0][1]})"
