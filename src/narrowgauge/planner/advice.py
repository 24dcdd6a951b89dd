"""Advice: the smallest changes that would make an impossible plan possible, each found by trying it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any, TypeVar

from narrowgauge.planner.architectures import Architecture
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.layouts import Layout, Offload
from narrowgauge.planner.memory_figures import LayerCounter
from narrowgauge.planner.rank_memory import host_bytes, memory_terms
from narrowgauge.spec.chips import CHIPS
from narrowgauge.spec.recipes import Recipe, is_pair
from narrowgauge.spec.storages import STORAGES

_MOST_CHIPS = 1 << 14
_Value = TypeVar("_Value")
Fits = Callable[[_Value], bool]


def smallest_changes(
    architecture: Architecture,
    recipe: Recipe,
    layout: Layout,
    cluster: Cluster,
    sequence_length: int,
    *,
    fixed: Mapping[str, Any],
    counted: LayerCounter | None = None,
) -> str:
    """What would have to change for a layout to fit, one change at a time.

    Args:
        architecture, recipe, layout, cluster, sequence_length: of the plan that does not fit.
        fixed: fields of the layout that were asked for.
        counted: what a layer keeps, counted in the model's own modules; None for the formulas.
    Returns:
        A sentence; of each kind of change the smallest that suffices.
    """

    def needed(recipe: Recipe = recipe, layout: Layout = layout, length: int = sequence_length) -> float:
        return memory_terms(architecture, recipe, layout, length, counted=counted).total

    def held(layout: Layout) -> float:
        return cluster.chips_per_node * host_bytes(architecture, recipe, layout, sequence_length)

    room = cluster.memory_bytes
    changes = [
        *_freed(layout, fixed, lambda other: needed(layout=other) <= room),
        *_offloaded(layout, lambda other: needed(layout=other) <= room, held),
        *_narrower(recipe, lambda other: needed(recipe=other) <= room),
        *_more_chips(layout, cluster, fixed, lambda other: needed(layout=other) <= room),
        *_shorter(sequence_length, lambda length: needed(length=length) <= room),
        *_larger_chips(needed(), cluster),
    ]
    if not changes:
        return "No single change suffices: combine a narrower storage, more chips and larger ones."
    return f"It fits {', or '.join(changes)}."


def _freed(layout: Layout, fixed: Mapping[str, Any], fits: Fits[Layout]) -> Iterator[str]:
    """What was pinned, freed."""
    if fixed.get("recompute", "full") != "full" and fits(replace(layout, recompute="full")):
        yield "with recompute=full"
    ranks = layout.data * layout.shard
    if ranks > 1 and ("zero" in fixed or "data" in fixed) and (layout.zero < 3 or layout.data > 1):
        for zero in (1, 2, 3):
            if fits(replace(layout, data=1, shard=ranks, zero=zero)):
                yield f"with its state shared by all {ranks} replicas (zero={zero})"
                return


def _offloaded(layout: Layout, fits: Fits[Layout], held: Callable[[Layout], float]) -> Iterator[str]:
    """The least that has to lie in the hosts' memory, and how much of it that takes."""
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
    """The fewest whole nodes on which it fits, with the state shared by more ranks."""
    if {"shard", "data"} & set(fixed) or fixed.get("zero") == 0:
        return
    chips, node = cluster.num_chips, cluster.chips_per_node

    def shared(count: int) -> Layout:
        # A layout of one replica shares nothing yet; as stages do, or fully.
        zero = layout.zero or (3 if layout.pipeline == 1 else 1)
        return replace(layout, data=1, shard=max(1, count // layout.model_ranks), zero=zero)

    steps = list(range(chips + node, 4 * chips + 1, node))
    steps += [chips << power for power in range(3, 12) if chips << power <= _MOST_CHIPS]
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
