"""Search: every shape of the ranks with every batch, and the fastest layout that fits.

Tensor ranks share a node. Stages hold at least one layer each. Context ranks split long sequences
only. All data ranks share the state: ZeRO-3, or ZeRO-1 beside stages, which keep their weights.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from functools import lru_cache
from itertools import product
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.planner.cluster import Cluster
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout, read_layout, suits
from narrowgauge.planner.shapes import Architecture

LEAST_PART = 4096
"""Minimum tokens of a sequence on a context rank."""
_MOST_CONTEXT = 64
_STAGES = (1, 2, 4, 8, 16)
_MICRO_BATCHES = (1, 2, 3, 4, 6, 8, 16, 32, 64, 128, 256)
_MOST_TOKENS_AT_ONCE = 1 << 16
SIMPLER = 0.10
"""Fraction by which a layout must be faster than FSDP2 or plain data parallelism."""
Fixed = Mapping[str, Any]
"""Fields of a layout with fixed values."""


def search(job: Estimate, fixed: Fixed, tokens_per_step: float) -> Estimate:
    """Return a job in its best layout on all chips of its cluster.

    That is the fastest whose memory interval fits. Else it is the fastest that fits, or the closest
    to fitting.

    Args:
        job: its layout is replaced.
        fixed: fields of :class:`~narrowgauge.planner.layouts.Layout` with fixed values.
        tokens_per_step: a layout takes the nearest number of sequences that its ranks can share.
    Raises:
        RecipeError: no layout has these fixed values on this cluster, or a step has fewer sequences
            than replicas.
    """
    fixed = {**read_layout(job.program.layout), **fixed}
    if job.program.release:  # a gradient that is freed cannot be summed
        fixed["micro_batches"] = 1
    num_sequences = max(1, round(tokens_per_step / job.sequence_length))
    question = job.architecture, job.cluster, job.sequence_length, num_sequences
    tried = [replace(job, layout=layout) for layout in _layouts(*question, tuple(fixed.items()))]
    if not tried:
        raise RecipeError(
            f"no layout with {fixed or 'any field'} suits: it does not divide {job.architecture.name} "
            f"over {job.cluster.name}, or {tokens_per_step:,} tokens are fewer than it computes at once.",
            "Leave a field open, or name more tokens.",
        )
    fitting = [option for option in tried if option.fits]
    roomy = [option for option in fitting if option.has_room]
    if fitting:
        return min(roomy or fitting, key=_pace)
    return min(tried, key=lambda option: option.peak_bytes)


def _pace(option: Estimate) -> tuple[float, float]:
    """Return the time of a sequence, and the memory. What is simpler counts as faster."""
    seconds = option.step_seconds / option.layout.num_sequences
    if not option.layout.is_fsdp:
        seconds *= 1 + SIMPLER
    return seconds, option.peak_bytes


def _product(fixed: Fixed, **axes: Iterable[Any]) -> Iterator[tuple[Any, ...]]:
    """Yield all combinations of the values of axes; a fixed field has one value."""
    return product(*((fixed[name],) if name in fixed else axes[name] for name in axes))


@lru_cache(maxsize=64)
def _layouts(
    a: Architecture, cluster: Cluster, length: int, num_sequences: int, values: tuple[Any, ...]
) -> list[Layout]:
    """Return all layouts to try, with these values of fixed fields: the same for each recipe."""
    fixed = dict(values)
    layouts: list[Layout] = []
    for shape in _shapes(a, cluster, length, fixed):
        layouts += _batches(shape, length, num_sequences, fixed)
    return layouts


def _shapes(a: Architecture, cluster: Cluster, length: int, fixed: Fixed) -> Iterator[Layout]:
    """Yield divisions of all chips among the axes that suit the model, with one sequence at a time."""
    chips = cluster.chips
    node = cluster.chips_per_node
    longest = min(_MOST_CONTEXT, max(1, length // LEAST_PART))
    for tensor, pipeline, context in _product(
        fixed,
        tensor=[number for number in (1, 2, 4, 8) if number <= node],
        pipeline=_STAGES if chips > node else [1],
        context=range(1, longest + 1),
    ):
        ranks = max(1, chips // (tensor * pipeline * context))
        data = fixed.get("data", ranks if fixed.get("zero") == 0 else 1)
        shard = max(1, fixed.get("shard", ranks // data))
        sizes = {"data": max(1, ranks // shard), "shard": shard, "zero": 1 if pipeline > 1 else 3}
        sizes |= {"tensor": tensor, "pipeline": pipeline, "context": context}
        experts = math.gcd(a.num_experts, ranks * context) if a.num_experts else 1
        sizes["expert"] = experts
        shape = Layout(**{**sizes, **fixed})
        if shape.num_ranks == chips and suits(a, shape, length):
            yield shape


def _batches(shape: Layout, length: int, num_sequences: int, fixed: Fixed) -> Iterator[Layout]:
    """Yield a shape with every size of a micro-batch."""
    per_replica = max(1, round(num_sequences / shape.num_replicas))
    most = min(per_replica, max(8, _MOST_TOKENS_AT_ONCE // length))
    sizes = [size for size in _MICRO_BATCHES if size <= most and per_replica % size == 0]
    recomputes = "none", "selective", "full"
    for size, recompute in _product(fixed, micro_batch=sizes, recompute=recomputes):
        count = fixed.get("micro_batches", max(1, round(per_replica / size)))
        if size * shape.num_replicas <= num_sequences or "micro_batches" in fixed:
            yield replace(shape, micro_batch=size, micro_batches=count, recompute=recompute)
