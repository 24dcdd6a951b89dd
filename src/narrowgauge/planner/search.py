"""Search: every shape of the ranks with every batch, and the fastest layout that fits.

Tensor ranks share a node. Stages hold at least one layer each. Context ranks split long sequences
only. All data ranks share the state: ZeRO-3, or ZeRO-1 beside stages, which keep their weights.
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
from narrowgauge.planner.layouts import Layout, read_layout, unsuited
from narrowgauge.planner.step_time import check_ask
from narrowgauge.runs.finding import counted
from narrowgauge.spec.sums import ACCUMULATION_DTYPES

LEAST_PART = 4096
"""Minimum tokens of a sequence on a context rank."""
_MOST_CONTEXT = 64
_TENSOR = (1, 2, 4, 8)
_STAGES = (1, 2, 4, 8, 16)
_EXPERT = (8, 16, 32, 64)
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)
_MOST_TOKENS_AT_ONCE = 1 << 16
SIMPLER = 0.10
"""Fraction by which a layout must be faster than FSDP2 or plain data parallelism."""
_MOST_GROUPS = 12  # of layers of a stage: published runs had up to 12


def search(ask: Estimate, fixed: Mapping[str, Any], tokens_per_step: float) -> Estimate:
    """Return an ask in its best layout on all chips of its cluster.

    That is the fastest whose memory interval fits. Else it is the fastest that fits, or the closest
    to fitting. Gradients are summed in fewer bits where nothing fits otherwise.

    Args:
        ask: its layout is replaced.
        fixed: fields of :class:`~narrowgauge.planner.layouts.Layout` with fixed values.
        tokens_per_step: a layout takes the nearest number of sequences that its ranks can share.
    Raises:
        RecipeError: no layout has these fixed values on this cluster, or a step has fewer sequences
            than replicas.
        ChipError: the chip does not multiply the recipe's dtype.
    """
    check_ask(ask)
    fixed = {**read_layout(ask.program.layout), **fixed}
    if ask.program.release:  # a gradient that is freed cannot be summed
        fixed["micro_batches"] = 1
    num_sequences = max(1, round(tokens_per_step / ask.sequence_length))
    shapes = _shapes_of_step(ask, fixed, num_sequences)
    tried: list[Estimate] = []
    for dtype in _sums(ask, fixed):
        for shape in shapes:
            layout = replace(shape, accumulation_dtype=dtype)
            for batch in _batches(ask, layout, num_sequences, fixed):
                tried.append(replace(ask, layout=batch))
        fitting = [option for option in tried if option.fits]
        roomy = [option for option in fitting if option.has_room]
        if fitting:
            return min(roomy or fitting, key=_pace)
    return min(tried, key=lambda option: option.peak_bytes)


def _pace(option: Estimate) -> tuple[float, float]:
    """Return the time of a sequence, and the memory. What is simpler counts as faster."""
    seconds = option.step.total / option.layout.num_sequences
    if not option.layout.is_fsdp:
        seconds *= 1 + SIMPLER
    return seconds, option.peak_bytes


def _sums(ask: Ask, fixed: Mapping[str, Any]) -> list[str]:
    """Return the dtypes of the gradient sum: the program's, then the weights'. Gradients are not
    summed in float16, whose range is too small.
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


def _shapes_of_step(ask: Ask, fixed: Mapping[str, Any], num_sequences: int) -> Sequence[Layout]:
    """Return the shapes that suit the model and leave each replica a sequence."""
    a = ask.architecture
    length = ask.sequence_length
    chips = counted(ask.cluster.chips, "chip")
    shapes = [shape for shape in _shapes(ask, fixed) if not unsuited(a, shape, length)]
    if not shapes:
        fields = ", ".join(f"{name}={value}" for name, value in fixed.items()) or "any"
        why = unsuited(a, Layout(**fixed), length) or f"its ranks do not divide {chips}"
        raise RecipeError(f"no layout with {fields} suits {a.name}: {why}.", "Leave a field open.")
    if "micro_batches" in fixed:
        return shapes
    micro_batch = fixed.get("micro_batch", 1)
    small = [shape for shape in shapes if micro_batch * shape.num_replicas <= num_sequences]
    if not small:
        least = micro_batch * min(shape.num_replicas for shape in shapes)
        raise RecipeError(
            f"Cannot plan a step of {num_sequences * length:,} tokens on {chips} because they "
            f"compute {least * length:,} at once.",
            "Name as many tokens, or fewer chips.",
        )
    return small


def _values(fixed: Mapping[str, Any], name: str, candidates: Iterable[Any]) -> tuple[Any, ...]:
    """Return the fixed value of a field, or all candidates."""
    return (fixed[name],) if name in fixed else tuple(dict.fromkeys(candidates))


def _shapes(ask: Ask, fixed: Mapping[str, Any]) -> Iterator[Layout]:
    """Yield divisions of all chips among the axes, with one sequence at a time."""
    a = ask.architecture
    chips = ask.cluster.chips
    node = ask.cluster.chips_per_node
    is_large = chips > node
    stages = [number for number in _STAGES if number == 1 or (is_large and number <= a.num_layers)]
    if is_large:
        # Stages of equally many layers; embedding and head may count as a layer each.
        for number in range(3, 16):
            if chips % number == 0 and (
                a.num_layers % number == 0 or (a.num_layers + 2) % number == 0
            ):
                stages.append(number)
    longest = min(_MOST_CONTEXT, max(1, ask.sequence_length // LEAST_PART))
    contexts = [number for number in range(1, longest + 1) if chips % number == 0]
    for tensor, pipeline, context in product(
        _values(fixed, "tensor", [number for number in _TENSOR if number <= node]),
        _values(fixed, "pipeline", stages),
        _values(fixed, "context", contexts),
    ):
        ranks, rest = divmod(chips, tensor * pipeline * context)
        if rest:
            continue
        shard = fixed.get("shard", max(1, ranks // fixed.get("data", 1)))
        if fixed.get("zero") == 0:
            shard = 1
        data, rest = divmod(ranks, shard)
        if rest or data != fixed.get("data", data):
            continue
        usual = 3 if pipeline == 1 else 1
        zero = fixed.get("zero", usual if shard * context > 1 else 0)
        groups = _depths(a.num_layers, pipeline)
        if pipeline == 1 and "pipeline" not in fixed and fixed.get("interleave", 1) > 1:
            continue
        for expert, depth in product(
            _values(fixed, "expert", _expert_ranks(ask, chips // (tensor * pipeline))),
            _values(fixed, "interleave", groups),
        ):
            yield Layout(
                data, shard, zero, tensor=tensor, pipeline=pipeline, interleave=depth, context=context,
                expert=expert,
            )  # fmt: skip


def _expert_ranks(ask: Ask, ranks: int) -> list[int]:
    """Return numbers of expert ranks within ``ranks``: usual ones from a node's on, and all."""
    if ask.architecture.mixture is None:
        return [1]
    most = math.gcd(ask.architecture.num_experts, ranks)
    numbers = [number for number in _EXPERT if most % number == 0]
    return [*numbers, most] if numbers else [most]


def _depths(layers: int, pipeline: int) -> list[int]:
    """Return numbers of groups of layers that a stage may have: one, or the most."""
    if pipeline == 1:
        return [1]
    per_stage = layers // pipeline
    if layers % pipeline:
        per_stage = math.ceil((layers + 2) / pipeline)
    depths = [depth for depth in range(1, _MOST_GROUPS + 1) if per_stage % depth == 0]
    return [1, depths[-1]]


def _batches(
    ask: Ask, shape: Layout, num_sequences: int, fixed: Mapping[str, Any]
) -> Iterator[Layout]:
    """Yield a shape with every size of a micro-batch."""
    per_replica = max(1, round(num_sequences / shape.num_replicas))
    most = min(per_replica, max(8, _MOST_TOKENS_AT_ONCE // ask.sequence_length))
    sizes = [size for size in _MICRO_BATCHES if size <= most and per_replica % size == 0]
    recomputed = ["full"] if ask.program.saved else ["none", "selective", "full"]
    for micro_batch, recompute in product(
        _values(fixed, "micro_batch", sizes), _values(fixed, "recompute", recomputed)
    ):
        count = fixed.get("micro_batches", max(1, round(per_replica / micro_batch)))
        yield replace(shape, micro_batch=micro_batch, micro_batches=count, recompute=recompute)
