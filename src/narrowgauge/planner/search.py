"""Search: the layouts in which a recipe trains a model on a cluster, the best first.

A layout has a shape (how ranks are divided among the axes, and what is sharded) and a batch (sequences at once, what is computed
again, what lies in the host's memory). Shapes are listed with the bounds that practice sets: tensor ranks share a node, stages
hold at least one layer each, context ranks split long sequences only. For each shape the largest micro-batch that fits is found,
first without recomputation; the time of what fits decides. If nothing fits, the layout that comes nearest is returned, with the
smallest changes that would make it possible.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner.advice import smallest_changes
from narrowgauge.planner.architectures import Architecture
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.memory_figures import LayerCounter, figures_of, kernels_of
from narrowgauge.planner.options import Option
from narrowgauge.planner.rank_memory import host_bytes, memory_terms
from narrowgauge.planner.roofline import bytes_of
from narrowgauge.planner.shares import Shares
from narrowgauge.planner.step_time import check_layout, step_terms, why_not
from narrowgauge.planner.terms import Terms
from narrowgauge.spec.recipes import Recipe

TOKENS_PER_STEP = 1 << 22
"""Of an optimizer step where none are given: four million, as Llama 3 begins with (arXiv 2407.21783, section 3.4.1)."""
LEAST_TOKENS_PER_STEP = 1 << 19
"""Of an optimizer step where none are given, if any layout has room for their sum: half a million, the smallest batch of GPT-3's
models (arXiv 2005.14165, table 2.1); smaller steps train, but not as anybody who asks for no number expects."""
TOKENS_PER_CHIP = 1 << 10
"""Of an optimizer step on many chips: 16 million on 16,384, as Llama 3 405B was trained with (section 3.3.2)."""
_MOST_OF_IT = 2  # times as many tokens a step may have where none are given, for a layout that is simpler
LONG_SEQUENCE = 32_768
"""Tokens from which context ranks are tried."""
_TENSOR = (1, 2, 4, 8)
_PIPELINE = (1, 2, 4, 8, 16, 32)
_MICRO_BATCHES = (1, 2, 4, 8)
_SAID = (
    "sequence_parallel",
    "expert_tensor",
    "accumulation_dtype",
    "keeps_gradients",
)  # not tried, but taken as asked for
_MOST_OPTIONS = 4
_LITTLE = 0.05

Fixed = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class _Question:
    """What is searched for."""

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
    # What was computed already: a layout is asked for its memory and its time several times.
    memories: dict[Layout, Terms] = field(default_factory=dict)
    times: dict[Layout, Terms] = field(default_factory=dict)
    kept: dict[tuple[bool, bool], float] = field(default_factory=dict)

    def memory(self, layout: Layout) -> Terms:
        if layout not in self.memories:
            given = self.architecture, self.recipe, layout, self.sequence_length
            self.memories[layout] = memory_terms(*given, counted=self.counted)
        return self.memories[layout]

    def fits(self, layout: Layout) -> bool:
        """Whether the chips hold it, and what is offloaded the hosts."""
        room = self.cluster.memory_bytes
        if self.least_bytes(layout) > room or self.memory(layout).total > room:
            return False
        if layout.offload == "none" or self.cluster.host_bytes is None:
            return layout.offload == "none" or "offload" in self.fixed
        held = host_bytes(self.architecture, self.recipe, layout, self.sequence_length)
        return held * self.cluster.chips_per_node <= self.cluster.host_bytes

    def surely_fits(self, layout: Layout) -> bool:
        """Whether the whole interval of its memory fits."""
        return self.fits(layout) and self.memory(layout).interval[1] < self.cluster.memory_bytes

    def least_bytes(self, layout: Layout) -> float:
        """A lower bound of what a chip holds, without looking at its parts: the state, and what layers keep of a micro-batch."""
        kept = self.least_activations(layout)
        if layout.offload != "none":
            return kept
        number = self.num_parameters / (layout.tensor * layout.pipeline)
        if self.architecture.mixture:
            number /= layout.expert
        visible = bytes_of(self.recipe.storage.visible)
        rest = max(0.0, self.recipe.bytes_per_param - 2 * visible)
        parts = (visible, 3), (rest, 1)
        return kept + 0.9 * number * sum(
            each / (layout.num_sharing if layout.zero >= zero else 1) for each, zero in parts
        )

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
        tokens = layout.micro_batch * self.sequence_length / layout.context
        return tokens * self.kept[kind] / (layout.tensor * layout.pipeline)

    def waiting(self, layout: Layout) -> float:
        """The share of a step that exchanges take."""
        step = self.seconds(layout)
        return step.groups.get("communication", 0.0) / step.total

    def seconds(self, layout: Layout) -> Terms:
        """Of a step, without intervals."""
        if layout not in self.times:
            given = self.architecture, self.recipe, layout, self.cluster, self.sequence_length, self.shares
            self.times[layout] = step_terms(*given, has_intervals=False)
        return self.times[layout]


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
) -> list[Option]:
    """The layouts of a recipe on all chips of a cluster.

    Args:
        architecture: of the model.
        recipe: how it is computed and stored.
        cluster: the machines; every chip is used.
        sequence_length: in tokens.
        tokens_per_step: of an optimizer step; None for ``TOKENS_PER_STEP``, on many chips ``TOKENS_PER_CHIP``, and never below
            ``LEAST_TOKENS_PER_STEP`` unless nothing else fits. A layout takes the nearest number of sequences that its
            ranks can share; one with more replicas than sequences is not taken.
        fixed: fields of :class:`~narrowgauge.planner.layouts.Layout` that must have these values.
        minimize: ``"days"``, ``"cost"`` or ``"chips"`` (fewest seconds a token), or ``"memory"`` (fewest bytes a chip).
        shares: of the chips' printed rates; None for the published ones.
        counted: what a layer keeps, counted in the model's own modules; None for the formulas.
    Returns:
        Options, the best first; or the one that comes nearest to fitting, with advice.
    Raises:
        RecipeError: no layout has these fixed values on this cluster, or a step has fewer sequences than it has replicas.
        ChipError: a chip does not multiply the recipe's dtype.

    Example:
        >>> from narrowgauge.planner.clusters import cluster_of
        >>> from narrowgauge.planner.model_configs import read_architecture
        >>> from narrowgauge.spec.notation import parse
        >>> best = search(read_architecture("llama-8b"), parse("bfloat16/word"), cluster_of("H100-SXM", 8), 8192)[0]
        >>> best.fits, best.layout.num_ranks
        (True, 8)
    """
    check_layout(architecture, recipe, Layout(), cluster, sequence_length)
    usual = max(TOKENS_PER_STEP, TOKENS_PER_CHIP * cluster.num_chips)
    wanted = max(1, round((tokens_per_step or usual) / sequence_length))
    pinned = dict(fixed or {})
    free = tokens_per_step is None and "micro_batches" not in pinned
    number = architecture.num_parameters
    question = _Question(architecture, recipe, cluster, sequence_length, wanted, number, free, pinned, shares, counted)
    question = replace(question, is_small_allowed=minimize == "memory")
    shapes = [shape for shape in _shapes(question) if not why_not(architecture, shape, sequence_length)]
    if not shapes:
        raise _no_shape(question)
    shapes = _small_enough(shapes, question, is_asked=tokens_per_step is not None)
    fitting = list(_fitting(shapes, question))
    if not fitting and free:
        # A step of one micro-batch needs no sum of gradients.
        question = replace(question, is_small_allowed=True)
        fitting = list(_fitting(shapes, question))
    if not fitting:
        return [_nearest(_smallest(shapes, question)[0], question)]
    if minimize == "memory":
        smallest = [layout for layout in _smallest(shapes, question)[:_MOST_OPTIONS] if question.fits(layout)]
        ordered = sorted(dict.fromkeys((*smallest, *fitting)), key=lambda layout: question.memory(layout).total)
    else:
        ordered = sorted(fitting, key=lambda layout: question.seconds(layout).total / layout.num_sequences)
    ordered = list(dict.fromkeys(ordered))
    chosen = ordered[:_MOST_OPTIONS]
    if not any(map(question.surely_fits, chosen)):
        chosen += [layout for layout in ordered[_MOST_OPTIONS:] if question.surely_fits(layout)][:1]
    return [_option(layout, question) for layout in chosen]


def _small_enough(shapes: list[Layout], question: _Question, *, is_asked: bool) -> list[Layout]:
    """Shapes whose replicas have a sequence each in a step; all of them if none has, unless these tokens were asked for."""
    each, most = question.fixed.get("micro_batch", 1), question.num_sequences * (1 if is_asked else _MOST_OF_IT)
    found = [shape for shape in shapes if shape.num_replicas * each <= most]
    if is_asked and not found:
        least = each * min(shape.num_replicas for shape in shapes)
        raise RecipeError(
            f"a step of {question.num_sequences * question.sequence_length:,} tokens was requested on "
            f"{question.cluster.num_chips} chips, which compute {least * question.sequence_length:,} at once.",
            "Ask for as many, or for fewer chips.",
        )
    return found or shapes


def _fitting(shapes: list[Layout], question: _Question) -> Iterator[Layout]:
    """Layouts that fit; those with more axes than data and shard only where they can be faster.

    They divide the same work and send more within layers. So they help only where the others must compute layers again, or, on
    several nodes, wait for the network.
    """
    found = [layout for shape in shapes if shape.runs_here for layout in _batches(shape, question)]
    yield from found
    whole = [layout for layout in found if layout.recompute == layout.offload == "none"]
    is_one_node = question.cluster.num_chips <= question.cluster.chips_per_node
    if whole and (is_one_node or min(map(question.waiting, whole)) < _LITTLE):
        return
    for shape in shapes:
        if not shape.runs_here:
            yield from _batches(shape, question)


def _shapes(question: _Question) -> Iterator[Layout]:
    """Divisions of all chips among the axes, with one sequence at a time."""
    shape, cluster, fixed = question.architecture, question.cluster, question.fixed
    chips, node = cluster.num_chips, cluster.chips_per_node
    contexts = (1, 2, 4, 8, 16) if question.sequence_length >= LONG_SEQUENCE else (1,)
    stages = _PIPELINE if chips > node else (1,)
    said = {name: fixed[name] for name in _SAID if name in fixed}
    for tensor in _tried(fixed, "tensor", (t for t in _TENSOR if t <= node)):
        for pipeline in _tried(fixed, "pipeline", (p for p in stages if p <= shape.num_layers)):
            for context in _tried(fixed, "context", contexts):
                ranks = tensor * pipeline * context
                if chips % ranks:
                    continue
                for sharing in _sharings(chips // ranks, max(1, node // (tensor * context)), pipeline, question):
                    for rest in _expert_and_interleave(pipeline, chips // (tensor * pipeline), question):
                        yield Layout(tensor=tensor, pipeline=pipeline, context=context, **sharing, **rest, **said)


def _tried(fixed: Fixed, name: str, values: Iterable[Any]) -> tuple[Any, ...]:
    """The fixed value of a field, or all that are tried."""
    return (fixed[name],) if name in fixed else tuple(values)


def _sharings(ranks: int, in_node: int, pipeline: int, question: _Question) -> Iterator[dict[str, Any]]:
    """How data ranks share the state: all of them, those of a node, or none."""
    fixed = question.fixed
    # Stages hold a part of the model, and sharing their optimizer states costs no more than summing gradients.
    groups = {ranks} if pipeline > 1 else {ranks, in_node if ranks % in_node == 0 else ranks, 1}
    if question.fixed.get("zero") == 0:
        groups = {1}
    if "data" in fixed:
        groups = {ranks // fixed["data"]} if ranks % fixed["data"] == 0 else set()
    for shard in _tried(fixed, "shard", sorted(groups, reverse=True)):
        # A stage has several micro-batches in flight, and would gather its weights for each.
        zeros = ((1,) if pipeline > 1 else (3, 2, 1)) if shard > 1 else (0,)
        for zero in _tried(fixed, "zero", zeros):
            if ranks % shard == 0 and fixed.get("data", ranks // shard) == ranks // shard:
                yield {"shard": shard, "data": ranks // shard, "zero": zero}


def _expert_and_interleave(pipeline: int, data_ranks: int, question: _Question) -> Iterator[dict[str, Any]]:
    shape, fixed = question.architecture, question.fixed
    experts: tuple[int, ...] = (1,)
    if shape.mixture:
        most = math.gcd(shape.mixture.num_experts, data_ranks)
        experts = tuple(dict.fromkeys((math.gcd(most, question.cluster.chips_per_node), most)))
    most = shape.num_layers // pipeline
    depths = (1, math.gcd(most, 4)) if pipeline > 1 else (1,)
    for expert in _tried(fixed, "expert", experts):
        for interleave in _tried(fixed, "interleave", dict.fromkeys(depths)):
            yield {"expert": expert, "interleave": interleave}


def _batches(shape: Layout, question: _Question) -> Iterator[Layout]:
    """Of a shape the largest micro-batch that fits, with as little computed again and sent to the host as it can.

    Where the tokens of a step are free, one micro-batch a step is tried last: sums of gradients then need no memory.
    """
    places = ("none",) if question.cluster.host_bytes is None else ("none", "optimizer", "all")
    for offload in _tried(question.fixed, "offload", places):
        for recompute in _tried(question.fixed, "recompute", ("none", "full")):
            for sums in (True, False) if question.is_batch_free and shape.pipeline == 1 else (True,):
                tried = replace(shape, offload=offload, recompute=recompute)
                found = _largest(tried, question, question.fits, sums=sums)
                if found is None:
                    continue
                yield found
                # What fits within its interval alone has a smaller one beside it that fits certainly.
                sure = _largest(tried, question, question.surely_fits, sums=sums)
                if sure is not None:
                    yield sure
                    return


def _largest(shape: Layout, question: _Question, fits: Callable[[Layout], bool], *, sums: bool) -> Layout | None:
    """With the largest micro-batch that fits; None if none does."""
    found = None
    for layout in _with_batches(shape, question, sums=sums):
        if not fits(layout):
            break
        found = layout
    return found


def _with_batches(shape: Layout, question: _Question, *, sums: bool) -> Iterator[Layout]:
    """The shape with each micro-batch that its replicas' sequences can be divided into; without ``sums`` one a step."""
    fixed = question.fixed
    per_replica = max(1, round(question.num_sequences / shape.num_replicas))
    for micro_batch in _tried(fixed, "micro_batch", _MICRO_BATCHES):
        if micro_batch > per_replica and "micro_batch" not in fixed and micro_batch > 1:
            return
        count = fixed.get("micro_batches", max(1, round(per_replica / micro_batch)) if sums else 1)
        layout = replace(shape, micro_batch=micro_batch, micro_batches=count)
        tokens = layout.num_sequences * question.sequence_length
        if sums or question.is_small_allowed or tokens >= LEAST_TOKENS_PER_STEP:
            yield layout


def _smallest(shapes: list[Layout], question: _Question) -> list[Layout]:
    """Each shape with all layers computed again and the smallest batch; the one that needs the fewest bytes first."""
    tried = []
    for shape in shapes:
        last = replace(
            shape,
            offload=question.fixed.get("offload", "none"),
            recompute=question.fixed.get("recompute", "full"),
        )
        sums = not (question.is_batch_free and question.is_small_allowed) or shape.pipeline > 1
        tried.append(next(_with_batches(last, question, sums=sums)))
    return sorted(tried, key=lambda layout: question.memory(layout).total)


def _nearest(layout: Layout, question: _Question) -> Option:
    """A layout that does not fit, with the smallest changes that would make it fit."""
    option = replace(_option(layout, question), why_not=_full_host(layout, question))
    given = question.architecture, question.recipe, layout, question.cluster, question.sequence_length
    return replace(option, advice=smallest_changes(*given, fixed=question.fixed, counted=question.counted))


def _full_host(layout: Layout, question: _Question) -> str:
    """Why the hosts cannot hold what is offloaded; empty if they can, or if it is the chips that cannot."""
    cluster = question.cluster
    held = cluster.chips_per_node * host_bytes(question.architecture, question.recipe, layout, question.sequence_length)
    if layout.offload == "none" or cluster.host_bytes is None or held <= cluster.host_bytes:
        return ""
    return f"needs {held / 1e9:,.0f} GB of host memory a node of {cluster.host_bytes / 1e9:,.0f}"


def _option(layout: Layout, question: _Question) -> Option:
    cluster, length = question.cluster, question.sequence_length
    return Option(
        question.recipe,
        layout,
        question.memory(layout),
        cluster.memory_bytes,
        step_terms(question.architecture, question.recipe, layout, cluster, length, question.shares),
        length,
        question.architecture.flops_per_token(length),
        cluster.peak_flops_per_second,
        cluster.dollars_per_hour,
        cluster.name,
    )


def _no_shape(question: _Question) -> RecipeError:
    """Why no layout has the fixed values, as far as it can be said."""
    names = {field.name for field in dataclasses.fields(Layout)}
    fixed = {name: value for name, value in question.fixed.items() if name in names}
    asked = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any"
    axes = ("data", "shard", "tensor", "pipeline", "context")
    ranks = math.prod(fixed.get(name, 1) for name in axes)
    why = why_not(question.architecture, Layout(**fixed), question.sequence_length)
    if not why:
        why = f"{ranks} ranks do not divide {question.cluster.num_chips} chips"
    return RecipeError(f"no layout with {asked} suits {question.architecture.name}: {why}.", "Leave a field open.")
