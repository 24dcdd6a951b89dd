"""Places: the clusters that a question names, and parts of them where fewer chips may be better."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from narrowgauge.errors import ChipError
from narrowgauge.planner.clusters import Cluster, Nodes, cluster_of, read_cluster
from narrowgauge.planner.shares import Shares
from narrowgauge.spec.chips import Chip

if TYPE_CHECKING:
    from narrowgauge.planner.calibration import Calibration

HERE = "here"
"""The name of this machine, as :mod:`~narrowgauge.planner.calibration` has it."""
Named = Cluster | str | Path


def clusters_asked_for(
    cluster: Named | Sequence[Named],
    chip: str | Chip | Sequence[str | Chip],
    chips: int | Sequence[int],
    chips_per_node: int | None,
    **rates: float | str | None,
) -> tuple[Cluster, ...]:
    """The clusters that are named: values, files, or every chip in every number.

    Args:
        cluster: one or more values or files.
        chip, chips: one or more chips and numbers of them, instead.
        chips_per_node: of the chips' nodes; None for what is usual.
        rates: further fields of :class:`~narrowgauge.planner.clusters.Nodes`.
    Raises:
        ChipError: both ways at once, or what is named is not known.
    """
    listed: list[Named] = [cluster] if isinstance(cluster, Cluster | str | Path) else list(cluster)
    names: list[str | Chip] = [chip] if isinstance(chip, str | Chip) else list(chip)
    numbers = numbers_of(chips)
    if listed and (names or numbers):
        raise ChipError(
            "a cluster and chips were requested together.", "A cluster's file names its chips: leave them out."
        )
    found = [each if isinstance(each, Cluster) else read_cluster(each) for each in listed]
    given: dict[str, Any] = {name: rate for name, rate in rates.items() if rate is not None}
    if listed and given:
        raise ChipError(
            f"a cluster and {next(iter(given))} were requested together.", "Write it into the cluster's file."
        )
    rows = [_here().chip if each == HERE else each for each in names]
    found += [cluster_of(each, number, chips_per_node, **given) for each in rows for number in numbers or [1]]
    return tuple(found)


def shares_asked_for(chip: str | Chip | Sequence[str | Chip]) -> Shares | None:
    """The calibrated shares if this machine is among the chips; None for the published ones.

    Args:
        chip: one or more chips.
    Raises:
        ChipError: this machine was not calibrated, or other chips are named beside it.
    """
    names = [chip] if isinstance(chip, str | Chip) else list(chip)
    if HERE not in names:
        return None
    if len(names) > 1:
        raise ChipError("this machine and other chips were requested together.", "Plan for them one after the other.")
    return _here().shares


def _here() -> Calibration:
    # What reads runs takes as long to load as all the rest.
    from narrowgauge.planner.calibration import kept

    return kept(HERE)


def numbers_of(chips: int | Sequence[int]) -> list[int]:
    """The numbers of chips that are named.

    Args:
        chips: one or more.
    Raises:
        ChipError: a number below one.
    """
    numbers = [chips] if isinstance(chips, int) else list(chips)
    for number in numbers:
        if number < 1:
            raise ChipError(f"{number} chips were requested.", "Use 1 or more.")
    return numbers


def parts_of(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster in fewer chips: powers of two of the chips of one node, then of the nodes of each group, and all of it.

    Args:
        cluster: to take parts of.
    Returns:
        Clusters of one group each, and the whole.
    Example:
        >>> [part.num_chips for part in parts_of(cluster_of("H100-SXM", 48))]
        [1, 2, 4, 8, 16, 32, 48]
    """
    for group in cluster.groups:
        for size in _powers_below(group.chips):
            yield _part(cluster, replace(group, chips=size, count=1))
        for count in _powers_below(group.count):
            yield _part(cluster, replace(group, count=count))
        if len(cluster.groups) > 1:
            yield _part(cluster, group)
    yield cluster


def multiples_of(cluster: Cluster) -> Iterator[Cluster]:
    """Twice and four times the nodes of a cluster of equal nodes.

    Args:
        cluster: of one group.
    Example:
        >>> [part.num_chips for part in multiples_of(cluster_of("H100-SXM", 8))]
        [16, 32]
    """
    for times in (2, 4):
        yield _part(cluster, replace(cluster.groups[0], count=times * cluster.groups[0].count))


def sizes_up_to(cluster: Cluster, node: int, most: int) -> Iterator[Cluster]:
    """Clusters of the same chips: powers of two of the chips of a node, then of nodes.

    Args:
        cluster: of such chips.
        node: chips of a node.
        most: chips in all.
    Example:
        >>> [size.num_chips for size in sizes_up_to(cluster_of("H100-SXM", 1), 8, 64)]
        [1, 2, 4, 8, 16, 32, 64]
    """
    whole = replace(cluster.groups[0], chips=node, count=1)
    yield from parts_of(_part(cluster, whole))
    while (whole := replace(whole, count=2 * whole.count)).num_chips <= most:
        yield _part(cluster, whole)


def between_sizes(few: Cluster, many: Cluster) -> Iterator[Cluster]:
    """Three numbers of whole nodes between those of two clusters of equal nodes, the fewest first; none within a node.

    Example:
        >>> [each.num_chips for each in between_sizes(cluster_of("H100-SXM", 32), cluster_of("H100-SXM", 64))]
        [40, 48, 56]
    """
    first, last = few.groups[0], many.groups[0]
    if len(many.groups) > 1 or first.chips != last.chips:
        return
    counts = (first.count + (last.count - first.count) * quarter // 4 for quarter in (1, 2, 3))
    for count in dict.fromkeys(counts):
        if first.count < count < last.count:
            yield _part(many, replace(last, count=count))


def _part(cluster: Cluster, group: Nodes) -> Cluster:
    return replace(cluster, name=str(group), groups=(group,))


def _powers_below(number: int) -> Iterator[int]:
    power = 1
    while power < number:
        yield power
        power *= 2
