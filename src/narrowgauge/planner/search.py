"""Search: the layouts in which a recipe trains a model on a cluster, the best first.

A layout has a shape (ranks per axis, and the sharded state) and a batch (sequences at once, recomputation, offloading). Shapes
follow the bounds of practice. Tensor ranks share a node. Stages hold at least one layer each. Context ranks split long
sequences only. The search combines every shape with every batch. The answer is the fastest layout that fits. If nothing fits,
it is the closest layout, with the smallest changes that would make it fit.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.jobs import Job, check_job, why_not
from narrowgauge.planner.layouts import AXES, Layout
from narrowgauge.planner.memory import host_bytes, memory_terms
from narrowgauge.planner.model import Architecture
from narrowgauge.planner.option import Option
from narrowgauge.planner.step_time import step_terms
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
    job = Job(architecture, recipe, Layout(), cluster, sequence_length)
    check_job(job)
    usual = min(max(TOKENS_PER_STEP, TOKENS_PER_CHIP * cluster.num_chips), MOST_TOKENS_PER_STEP)
    num_sequences = max(1, round((tokens_per_step or usual) / sequence_length))
    fixed = dict(fixed or {})
    space = _Space(job, num_sequences, tokens_per_step is None, fixed)
    shapes = space.shapes()
    options = {layout: _option(job, layout) for layout in space.layouts(shapes, LEAST_TOKENS_PER_STEP)}
    best = _fastest(options.values(), most)
    if space.is_batch_free and not any(option.is_certain for option in best):
        # A step of one micro-batch needs no accumulation buffers, so it may fit where others do not.
        for layout in space.layouts(shapes, 0):
            if layout not in options:
                options[layout] = _option(job, layout)
        small = [option for option in _fastest(options.values(), most) if not best or option.is_certain]
        best = sorted([*small, *best][:most], key=_pace)
    return best or [_nearest(job, options.values(), fixed)]


def _option(job: Job, layout: Layout) -> Option:
    """Plan a layout: its memory, and its step if the chips hold the layout, and the hosts its offloaded state."""
    memory = memory_terms(job.architecture, job.recipe, layout, job.sequence_length)
    why, available = "", job.cluster.host_bytes
    if layout.offload != "none" and available is not None:
        needed = job.cluster.chips_per_node * host_bytes(job.architecture, job.recipe, layout)
        if needed > available:
            why = f"needs {needed / 1e9:,.0f} GB of host memory a node of {available / 1e9:,.0f}"
    fits = not why and memory.total <= job.cluster.memory_bytes
    step = step_terms(replace(job, layout=layout)) if fits else None
    return Option(job.architecture, job.recipe, layout, memory, job.cluster, step, job.sequence_length, why)


def _pace(option: Option) -> tuple[float, float]:
    """Return the sort key of options that fit: seconds per sequence, then memory."""
    assert option.step is not None
    return option.step.total / option.layout.num_sequences, option.memory.total


def _fastest(options: Iterable[Option], most: int) -> list[Option]:
    """Return the fitting options with the fewest seconds per token, one per shape, including the best."""
    fitting = sorted((option for option in options if option.fits), key=_pace)
    if not fitting:
        return []
    certain = [option for option in fitting if option.is_certain] or fitting
    # Among layouts within NOISE of the fastest, one of this project's trainer is the best.
    limit = _pace(certain[0])[0] * (1 + NOISE)
    best = next((o for o in certain if o.layout.runs_here and _pace(o)[0] <= limit), certain[0])
    best_shape = _shape_of(best.layout), best.is_certain
    alternatives: dict[Layout, Option] = {}
    for option in fitting:
        shape = _shape_of(option.layout)
        is_behind = _pace(option)[0] > _pace(best)[0] or (best.is_certain and not option.is_certain)
        if is_behind and (shape, option.is_certain) != best_shape:
            alternatives.setdefault(shape, option)
    return sorted([best, *list(alternatives.values())[: most - 1]], key=_pace)


def _shape_of(layout: Layout) -> Layout:
    return replace(layout, micro_batch=1, micro_batches=1, recompute="none", offload="none")


# ── candidates ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class _Space:
    """Describe the layouts to try for a job: those with the ``fixed`` fields and about ``num_sequences`` per step."""

    job: Job
    num_sequences: int
    has_default_tokens: bool
    fixed: Mapping[str, Any]

    @property
    def is_batch_free(self) -> bool:
        """Tell whether the tokens of a step may vary."""
        return self.has_default_tokens and "micro_batches" not in self.fixed

    def values(self, name: str, candidates: Iterable[Any]) -> tuple[Any, ...]:
        """Return the fixed value of a field, or all candidates."""
        return (self.fixed[name],) if name in self.fixed else tuple(dict.fromkeys(candidates))

    def layouts(self, shapes: Iterable[Layout], least_tokens: int) -> Iterator[Layout]:
        """Yield every shape with every batch that divides its replicas' sequences.

        If the tokens of a step are free, also try one micro-batch per step with at least ``least_tokens``. It needs no memory
        for sums of gradients.
        """
        places = ("none",) if self.job.cluster.host_bytes is None else ("none", "optimizer", "all")
        for shape in shapes:
            per_replica = max(1, round(self.num_sequences / shape.num_replicas))
            for micro_batch in self.values("micro_batch", (size for size in _MICRO_BATCHES if size <= per_replica)):
                counts = [self.fixed.get("micro_batches", max(1, round(per_replica / micro_batch)))]
                tokens = shape.num_replicas * micro_batch * self.job.sequence_length
                if self.is_batch_free and shape.pipeline == 1 and tokens >= max(least_tokens, 1) and counts != [1]:
                    counts.append(1)
                batches = product(self.values("offload", places), self.values("recompute", ("none", "full")), counts)
                for offload, recompute, count in batches:
                    batch = {"micro_batch": micro_batch, "offload": offload, "recompute": recompute}
                    yield replace(shape, micro_batches=count, **batch)

    def shapes(self) -> list[Layout]:
        """Return divisions of all chips among the axes, with one sequence at a time, that leave each replica a sequence.

        If none leaves one, return all, unless tokens per step were given.
        """
        job, length = self.job, self.job.sequence_length
        shapes = [shape for shape in self._divisions() if not why_not(job.architecture, shape, length)]
        if not shapes:
            raise self._no_shape()
        micro_batch = self.fixed.get("micro_batch", 1)
        most = self.num_sequences * (SIMPLER_STEP_FACTOR if self.has_default_tokens else 1)
        small = [shape for shape in shapes if shape.num_replicas * micro_batch <= most]
        if not self.has_default_tokens and not small:
            least = micro_batch * min(shape.num_replicas for shape in shapes)
            raise RecipeError(
                f"a step of {self.num_sequences * length:,} tokens was requested on {job.cluster.num_chips} chips, which "
                f"compute {least * length:,} at once.",
                "Ask for as many, or for fewer chips.",
            )
        return small or shapes

    def _divisions(self) -> Iterator[Layout]:
        model, cluster, values = self.job.architecture, self.job.cluster, self.values
        chips, node = cluster.num_chips, cluster.chips_per_node
        contexts = _CONTEXT if self.job.sequence_length >= LONG_SEQUENCE else (1,)
        stages = [stages for stages in _PIPELINE if stages <= model.num_layers] if chips > node else [1]
        tensors = [ranks for ranks in _TENSOR if ranks <= node]
        axes = product(values("tensor", tensors), values("pipeline", stages), values("context", contexts))
        for tensor, pipeline, context in axes:
            ranks, rest = divmod(chips, tensor * pipeline * context)
            if rest:
                continue
            most = math.gcd(model.mixture.num_experts, chips // (tensor * pipeline)) if model.mixture else 1
            experts = values("expert", (1, math.gcd(most, node), most))
            depths = values("interleave", (1, math.gcd(model.num_layers // pipeline, 4)) if pipeline > 1 else (1,))
            sharings = self._sharings(ranks, max(1, node // (tensor * context)), pipeline)
            for (data, shard, zero), expert, depth in product(sharings, experts, depths):
                axes_of = {"tensor": tensor, "pipeline": pipeline, "context": context, "expert": expert}
                sums = self.fixed.get("accumulation_dtype", "float32")
                yield Layout(data, shard, zero, interleave=depth, accumulation_dtype=sums, **axes_of)

    def _sharings(self, ranks: int, in_node: int, pipeline: int) -> Iterator[tuple[int, int, Any]]:
        """Yield data, shard and zero: the state is sharded over all data ranks, those of a node, or none."""
        # Stages hold a part of the model. Sharding their optimizer states costs no more than summing gradients.
        groups = {ranks} if pipeline > 1 else {ranks, in_node if ranks % in_node == 0 else ranks, 1}
        if self.fixed.get("zero") == 0:
            groups = {1}
        if "data" in self.fixed:
            groups = {ranks // self.fixed["data"]}
        for shard in self.values("shard", sorted(groups, reverse=True)):
            # A stage has several micro-batches in flight. It would gather its weights for each.
            zeros = ((1,) if pipeline > 1 else (3, 2, 1)) if shard > 1 else (0,)
            if shard and ranks % shard == 0 and self.fixed.get("data", ranks // shard) == ranks // shard:
                yield from ((ranks // shard, shard, zero) for zero in self.values("zero", zeros))

    def _no_shape(self) -> RecipeError:
        """Say why no layout has the fixed values, if known."""
        model, fixed = self.job.architecture, self.fixed
        asked = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any"
        why = why_not(model, Layout(**fixed), self.job.sequence_length)
        if not why:
            ranks = math.prod(fixed.get(name, 1) for name in AXES)
            why = f"{ranks} ranks do not divide {self.job.cluster.num_chips} chips"
        return RecipeError(f"no layout with {asked} suits {model.name}: {why}.", "Leave a field open.")


# ── where nothing fits: the nearest layout, and the smallest changes that would make it fit, each found by trying it ──────


def _nearest(job: Job, options: Iterable[Option], fixed: Mapping[str, Any]) -> Option:
    """Return the option with the fewest bytes per chip, and advice."""
    allowed = (option for option in options if option.layout.offload == "none" or "offload" in fixed)
    nearest = min(allowed, key=lambda option: option.memory.total)
    job = replace(job, layout=nearest.layout)
    return replace(nearest, step=step_terms(job), advice=smallest_changes(job, fixed=fixed))


_Change = tuple[str, Job]
"""A change in words, and the changed job."""


def smallest_changes(job: Job, *, fixed: Mapping[str, Any]) -> str:
    """Name the changes that make a job fit: of each kind, the smallest that suffices alone."""
    layout, recipe, length, cluster = job.layout, job.recipe, job.sequence_length, job.cluster

    def needed(changed: Job) -> float:
        return memory_terms(changed.architecture, changed.recipe, changed.layout, changed.sequence_length).total

    def change(text: str, **fields: Any) -> _Change:
        return text, replace(job, layout=replace(layout, **fields))

    relaxed = [change("with recompute=full", recompute="full")] if fixed.get("recompute", "full") != "full" else []
    ranks = layout.num_replicas
    if ranks > 1 and ("zero" in fixed or "data" in fixed) and (layout.zero < 3 or layout.data > 1):
        for zero in (1, 2, 3):
            text = f"with its state shared by all {ranks} replicas (zero={zero})"
            relaxed.append(change(text, data=1, shard=ranks, zero=zero))
    offloaded = []
    for place in ("optimizer", "all") if layout.offload == "none" else ():
        node = cluster.chips_per_node * host_bytes(job.architecture, recipe, replace(layout, offload=place))
        offloaded.append(change(f"with offload={place} ({node / 1e9:,.0f} GB of host memory a node)", offload=place))
    smaller = []
    for storage in sorted(STORAGES.values(), key=lambda storage: -storage.bytes_per_param):
        is_possible = is_pair(recipe.compute, storage) and storage.visible == recipe.storage.visible
        if is_possible and storage.keeps_updates and storage.bytes_per_param < recipe.bytes_per_param:
            text = f"at {storage.bytes_per_param:g} B/param ({recipe.compute.name}/{storage.short_name})"
            states = replace(recipe, storage=storage.keeping(recipe.storage.states))
            smaller.append((text, replace(job, recipe=states)))
    lengths = [length >> power for power in (1, 2, 3) if length >> power >= 512]
    shorter = [(f"with sequences of {size:,} tokens", replace(job, sequence_length=size)) for size in lengths]
    is_sharding_fixed = {"shard", "data"} & set(fixed) or fixed.get("zero") == 0
    kinds = [relaxed, offloaded, smaller, [] if is_sharding_fixed else _on_more_chips(job), shorter]
    first = (next((text for text, changed in kind if needed(changed) <= cluster.memory_bytes), "") for kind in kinds)
    larger = sorted((chip.memory_gb, chip.name) for chip in CHIPS.values() if chip.memory_bytes >= needed(job))
    changes = [*filter(None, first), *(f"on chips of {size} GB ({name})" for size, name in larger[:1])]
    if not changes:
        return "No single change suffices: combine a narrower storage, more chips and larger ones."
    return f"It fits {', or '.join(changes)}."


def _on_more_chips(job: Job) -> list[_Change]:
    """Return more whole nodes, with the state sharded over more ranks."""
    layout, chips, node = job.layout, job.cluster.num_chips, job.cluster.chips_per_node
    counts = list(range(chips + node, 4 * chips + 1, node))
    counts += [chips << power for power in range(3, 12) if chips << power <= MOST_CHIPS]
    # A layout of one replica shards nothing yet. With stages it would shard optimizer states, else all.
    zero = layout.zero or (3 if layout.pipeline == 1 else 1)
    divisible = [count for count in counts if count % layout.model_ranks == 0]
    shards = [(count, max(1, count // layout.model_ranks)) for count in divisible]
    return [
        (f"on {count} chips", replace(job, layout=replace(layout, data=1, shard=shard, zero=zero)))
        for count, shard in shards
    ]
