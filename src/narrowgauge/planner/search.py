"""Search: the layouts in which a recipe trains a model on a cluster, the best first.

A layout has a shape (ranks per axis, and the sharded state) and a batch (sequences at once,
recomputation). Shapes follow the bounds of practice. Tensor ranks share a node. Stages hold at
least one layer each. Context ranks split long sequences only. The search tries every shape with
every batch.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import product
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner.ask import Ask
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout, unsuited
from narrowgauge.planner.program import DEFAULT, Program
from narrowgauge.planner.step_time import check_ask
from narrowgauge.runs.finding import counted
from narrowgauge.spec.sums import ACCUMULATION_DTYPES

TOKENS_PER_STEP = 1 << 22
"""Default tokens of an optimizer step: four million, as Llama 3 begins with (arXiv 2407.21783,
section 3.4.1).
"""
LEAST_TOKENS_PER_STEP = 1 << 19
"""Minimum default tokens of an optimizer step, if any layout has memory for the sum of gradients:
half a million. This is the smallest batch of GPT-3's models (arXiv 2005.14165, table 2.1).
"""
TOKENS_PER_CHIP = 1 << 10
"""Tokens of a step per chip on many chips: 16 million on 16,384, as for Llama 3 405B (section
3.3.2).
"""
MOST_TOKENS_PER_STEP = 1 << 26
"""Maximum default tokens of an optimizer step on any number of chips: 67 million.

The largest published steps have 63 million, in DeepSeek-V3 (arXiv 2412.19437, section 4.2: 15,360
sequences of 4,096).
"""
ADAPTER_TOKENS_PER_STEP = 1 << 16
"""Default tokens of a step of adapters: 32 sequences of 2,048."""
SIMPLER_STEP_FACTOR = 2
"""Factor on the default tokens that a simpler layout may use, if no tokens are given."""
LEAST_PART = 4096
"""Minimum tokens of a sequence on a context rank."""
_TENSOR = (1, 2, 4, 8)
MOST_CONTEXT = 64
"""Maximum context ranks that are tried."""
_EXPERT = (16, 32, 64)
_MICRO_BATCHES = (*range(1, 9), 16, 32, 64, 128, 256, 512)
MOST_TOKENS_AT_ONCE = 1 << 16
"""Maximum tokens of a micro-batch of more than eight sequences: llm.c's 64 of 1,024."""
_MOST_STAGES = 64
_MOST_GROUPS = 12  # of layers of a stage: published runs had up to 12
NOISE = 0.05
"""Fraction by which a layout must be faster than FSDP2 or plain data parallelism: they are simpler,
and the intervals are far wider.
"""


def search(
    ask: Estimate,
    tokens_per_step: float | None = None,
    fixed: Mapping[str, Any] | None = None,
    usual_tokens: int | None = None,
) -> Estimate:
    """Return an ask in its best layout on all chips of its cluster.

    That is the fastest whose memory interval fits. Else it is the fastest that fits, or the closest
    to fitting.

    Args:
        ask: its layout is replaced.
        tokens_per_step: None for ``TOKENS_PER_STEP``, or ``TOKENS_PER_CHIP`` on many chips. It is
            at least ``LEAST_TOKENS_PER_STEP`` unless nothing else fits. A layout takes the nearest
            number of sequences that its ranks can share. Layouts with more replicas than sequences
            are skipped.
        fixed: fields of :class:`~narrowgauge.planner.layouts.Layout` with fixed values.
        usual_tokens: replaces the default tokens per step, so that several searches share one.
    Raises:
        RecipeError: no layout has these fixed values on this cluster, or a step has fewer sequences
            than replicas.
        ChipError: the chip does not multiply the recipe's dtype.
    """
    fixed = dict(fixed or {})
    program = ask.program
    check_ask(ask)
    if program.release:  # a gradient that is freed cannot be summed
        fixed["micro_batches"] = 1
    if tokens_per_step is not None and "micro_batches" in fixed:
        raise RecipeError(
            f"Cannot take {tokens_per_step:,} tokens per step and micro_batches = "
            f"{fixed['micro_batches']}: one follows from the other.",
            "Leave one open.",
        )
    usual_tokens = usual_tokens or usual_tokens_per_step(ask.cluster.chips, program)
    num_sequences = max(1, round((tokens_per_step or usual_tokens) / ask.sequence_length))
    shapes = _shapes_of_step(ask, fixed, num_sequences, tokens_per_step)
    is_batch_free = tokens_per_step is None and "micro_batches" not in fixed
    least = min(LEAST_TOKENS_PER_STEP, usual_tokens) if is_batch_free else 0
    tried: list[Estimate] = []
    # Gradients are summed in fewer bits where wide sums leave no usual step. Small steps come after
    # those.
    for dtype in _sums(ask, fixed):
        for shape in shapes:
            layout = replace(shape, accumulation_dtype=dtype)
            for batch in _batches(ask, layout, num_sequences, fixed, is_batch_free):
                tried.append(replace(ask, layout=batch))
        best = _best(tried, least)
        if best is not None:
            return best
    return _best(tried, 0) or min(tried, key=lambda option: option.memory.total)


def _sums(ask: Ask, fixed: Mapping[str, Any]) -> list[str]:
    """Return the dtypes of the gradient sum: the program's, then the weights'.

    Gradients are not summed in float16, whose range is too small.
    """
    if "accumulation_dtype" in fixed:
        return [fixed["accumulation_dtype"]]
    narrow = ask.recipe.storage.visible
    if narrow not in ACCUMULATION_DTYPES:
        narrow = "float32"
    usual = narrow if ask.program.sums == "weight" else ask.program.sums
    if ask.recipe.reduction.order_invariant or usual == narrow:
        return [usual]
    return [usual, narrow]


def _best(tried: Sequence[Estimate], least: float) -> Estimate | None:
    """Return the fastest option of at least ``least`` tokens that leaves memory free, else that fits."""
    fitting = [option for option in tried if option.tokens_per_step >= least and option.fits]
    roomy = [option for option in fitting if option.has_room]
    return min(roomy or fitting, key=_pace, default=None)


def _pace(option: Estimate) -> tuple[float, float]:
    """Return the time of a sequence, and the memory. Layouts other than FSDP count as slower."""
    seconds = option.step.total / option.layout.num_sequences
    if not option.layout.is_fsdp:
        seconds *= 1 + NOISE
    return seconds, option.memory.total


def _shapes_of_step(
    ask: Ask, fixed: Mapping[str, Any], num_sequences: int, tokens_per_step: float | None
) -> Sequence[Layout]:
    """Return the shapes that suit the model and leave each replica a sequence.

    If none does, return all, unless the tokens were given.
    """
    a = ask.architecture
    length = ask.sequence_length
    shapes = [shape for shape in _shapes(ask, fixed) if not unsuited(a, shape, length)]
    chips = counted(ask.cluster.chips, "chip")
    if not shapes:
        asked = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any"
        why = unsuited(a, Layout(**fixed), length) or f"its ranks do not divide {chips}"
        raise RecipeError(f"no layout with {asked} suits {a.name}: {why}.", "Leave a field open.")
    micro_batch = fixed.get("micro_batch", 1)
    limit = num_sequences
    if tokens_per_step is None:
        limit *= SIMPLER_STEP_FACTOR
    small = [shape for shape in shapes if micro_batch * shape.num_replicas <= limit]
    if tokens_per_step is not None and not small:
        least = micro_batch * min(shape.num_replicas for shape in shapes)
        raise RecipeError(
            f"Cannot plan a step of {num_sequences * length:,} tokens on {chips} because they "
            f"compute {least * length:,} at once.",
            "Name as many tokens, or fewer chips.",
        )
    return small or shapes


def usual_tokens_per_step(chips: int, program: Program = DEFAULT) -> int:
    """Return the default tokens of an optimizer step."""
    if program.has_adapters:
        return ADAPTER_TOKENS_PER_STEP
    return min(max(TOKENS_PER_STEP, TOKENS_PER_CHIP * chips), MOST_TOKENS_PER_STEP)


# ── candidates ────────────────────────────────────────────────────────────────────────────────────


def _values(fixed: Mapping[str, Any], name: str, candidates: Iterable[Any]) -> tuple[Any, ...]:
    """Return the fixed value of a field, or all candidates."""
    return (fixed[name],) if name in fixed else tuple(dict.fromkeys(candidates))


def _shapes(ask: Ask, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield divisions of all chips among the axes, with one sequence at a time."""
    chips = ask.cluster.chips
    node = ask.cluster.chips_per_node
    tensors = _values(fixed, "tensor", filter(node.__ge__, _TENSOR))
    stages = _values(fixed, "pipeline", _stages(ask))
    longest = min(MOST_CONTEXT, max(1, ask.sequence_length // LEAST_PART))
    contexts = _values(fixed, "context", _divisors(chips, longest))
    for tensor, pipeline, context in product(tensors, stages, contexts):
        ranks, rest = divmod(chips, tensor * pipeline * context)
        is_interleaved_one = pipeline == 1 and fixed.get("interleave", 1) > 1
        if rest or (is_interleaved_one and "pipeline" not in fixed):
            continue
        experts = _values(fixed, "expert", _expert_ranks(ask, chips // (tensor * pipeline)))
        depths = _values(fixed, "interleave", _depths(ask.architecture.num_layers, pipeline))
        for shard in _shards(fixed, ranks, max(1, node // (tensor * context)), pipeline):
            # Context ranks hold the same weights, so they share the state, too.
            zeros: tuple[int, ...] = (0,)
            if pipeline > 1 and shard * context > 1:
                zeros = (2, 1)  # stages keep their weights gathered, so ZeRO-3 frees nothing
            elif shard > 1:
                zeros = (3, 2, 1)
            elif context > 1:
                zeros = (3, 2, 1, 0)
            for zero, expert, depth in product(_values(fixed, "zero", zeros), experts, depths):
                yield Layout(
                    ranks // shard,
                    shard,
                    zero,
                    tensor=tensor,
                    pipeline=pipeline,
                    context=context,
                    expert=expert,
                    interleave=depth,
                )


def _divisors(number: int, most: int) -> list[int]:
    return [value for value in range(1, most + 1) if number % value == 0]


def _stages(ask: Ask) -> list[int]:
    """Return numbers of stages: powers of two, and stages of equally many layers (embedding and head
    may count as a layer each).
    """
    layers = ask.architecture.num_layers
    stages = [1]
    if ask.cluster.chips > ask.cluster.chips_per_node:
        for number in _divisors(ask.cluster.chips, min(_MOST_STAGES, layers)):
            is_even = layers % number == 0 or (layers + 2) % number == 0
            if is_even or number.bit_count() == 1:
                stages.append(number)
    return stages


def _expert_ranks(ask: Ask, ranks: int) -> list[int]:
    """Return numbers of expert ranks within ``ranks``: one, a node's, usual ones, and all."""
    if ask.architecture.mixture is None:
        return [1]
    most = math.gcd(ask.architecture.num_experts, ranks)
    usual = [number for number in _EXPERT if most % number == 0]
    return [1, math.gcd(most, ask.cluster.chips_per_node), *usual, most]


def _depths(layers: int, pipeline: int) -> list[int]:
    """Return numbers of groups of layers that a stage may have."""
    per_stage = layers // pipeline
    if layers % pipeline:
        per_stage = math.ceil((layers + 2) / pipeline)
    return _divisors(per_stage, min(per_stage, _MOST_GROUPS)) if pipeline > 1 else [1]


def _shards(fixed: Mapping[str, Any], ranks: int, of_node: int, pipeline: int) -> Iterator[int]:
    """Yield numbers of ranks that shard the state: all data ranks, those of a node, or none."""
    shards: tuple[int, ...] = (ranks, of_node, 1)
    if "data" in fixed:
        shards = (max(1, ranks // fixed["data"]),)
    elif fixed.get("zero") == 0:
        shards = (1,)
    elif pipeline > 1 and ranks > 1:
        # Stages hold a part of the model. Sharding their states costs no more than summing
        # gradients.
        shards = (ranks,)
    for shard in _values(fixed, "shard", shards):
        if ranks % shard == 0 and ranks // shard == fixed.get("data", ranks // shard):
            yield shard


def _batches(
    ask: Ask,
    shape: Layout,
    num_sequences: int,
    fixed: Mapping[str, Any],
    is_batch_free: bool,
) -> Iterator[Layout]:
    """Yield a shape with every batch that divides its replicas' part of ``num_sequences``, and one
    micro-batch if free.
    """
    per_replica = max(1, round(num_sequences / shape.num_replicas))
    most = max(8, MOST_TOKENS_AT_ONCE // ask.sequence_length)
    sizes = [size for size in _MICRO_BATCHES if size <= most and per_replica % size == 0]
    recomputed = ["none", "full"]
    if ask.program.saved:
        recomputed = ["full"]
    elif ask.program.selective != "attention" or ask.program.attention == "eager":
        recomputed = ["none", "selective", "full"]
    for micro_batch in _values(fixed, "micro_batch", sizes):
        counts = [fixed.get("micro_batches", max(1, round(per_replica / micro_batch)))]
        if is_batch_free and shape.pipeline == 1 and counts != [1]:
            # A step of one micro-batch needs no memory for sums of gradients.
            counts.append(1)
        for recompute, count in product(_values(fixed, "recompute", recomputed), counts):
            yield replace(shape, micro_batch=micro_batch, micro_batches=count, recompute=recompute)
