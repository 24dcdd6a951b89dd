"""How the recipes of a page stand beside each other: which are not to be used, and which is best beyond chance.

A table that prints the lowest number in bold gives a prize for luck. So a figure that varies from run to run is told as
the best only where the seeds tell it apart from those of every other recipe that is fit for use: a loss by the interval
of the paired differences, time and memory where every seed agrees, by more than a hair. Nor is bold what reads like
another's. Bytes per parameter do not vary; less than a tenth of one is a few vectors.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

from narrowgauge.comparison.intervals import interval
from narrowgauge.comparison.run_stats import late_reading
from narrowgauge.report.groups import Group
from narrowgauge.report.series import number
from narrowgauge.runs.schema import Row

MARGIN = 1.1
"""With one seed in common, a figure of time or memory is apart from another where it is so many times as good."""

LEAST_MARGIN = 1.005
"""With several, where it is so many times as good with each: less is nothing to choose a recipe by."""


def late_of(group: Group | None, figure: str) -> float | None:
    """What the audit read last of the runs that count: the figure that the verdict judges by."""
    return number(late_reading(group.trials, figure)) if group is not None else None


def best_of(
    figure: str,
    is_low: bool,
    rows: Sequence[Row],
    members: Mapping[str, Group],
    out: Mapping[str, object],
    said: Callable[[float], str] = repr,
) -> frozenset[str]:
    """The recipes whose figure is the best beyond chance: one, several that spend the same, or none.

    Law: a figure that reads like another recipe's is not the best.

    Args:
        figure: a column of ``rows``.
        is_low: whether less is better.
        rows: of ``compare.json``.
        members: the groups, by label.
        out: recipes not to be used, which are no one's measure.
        said: how the figure is printed.
    """
    known = {
        str(row.get("recipe")): value
        for row in rows
        if not row.get("diverged") and row.get("recipe") not in out and (value := number(row.get(figure))) is not None
    }
    if len(known) < 2:
        return frozenset()
    if figure == "bytes_per_param":
        sizes = {label: round(value, 1) for label, value in known.items()}
        least = {label for label, size in sizes.items() if size == min(sizes.values())}
        return frozenset(least if len(least) < len(sizes) else ())
    first = (min if is_low else max)(known, key=lambda label: known[label])
    others = [label for label in known if label != first]
    if any(said(known[label]) == said(known[first]) for label in others):
        return frozenset()
    leads = all(_leads(figure, is_low, members.get(first), members.get(label)) for label in others)
    return frozenset([first] if leads else ())


def _leads(figure: str, is_low: bool, group: Group | None, other: Group | None) -> bool:
    """Whether the seeds that both groups have tell them apart."""
    mine, theirs = _figures(group, figure), _figures(other, figure)
    pairs = [(mine[seed], theirs[seed]) for seed in mine if seed in theirs]
    if not pairs:
        return False
    if figure == "val_loss":
        mean, half = interval([[a - b for a, b in pairs]])
        return mean + half < 0 if is_low else mean - half > 0
    ratios = [(b / a if is_low else a / b) if a > 0 and b > 0 else math.nan for a, b in pairs]
    return all(ratio > (LEAST_MARGIN if len(pairs) > 1 else MARGIN) for ratio in ratios)


def _figures(group: Group | None, figure: str) -> dict[int, float]:
    """A figure of the runs that count, by seed."""
    if group is None:
        return {}
    summaries = {trial.seed: trial.run.summary or {} for trial in group.trials if trial.counts}
    return {seed: value for seed, summary in summaries.items() if (value := number(summary.get(figure))) is not None}
