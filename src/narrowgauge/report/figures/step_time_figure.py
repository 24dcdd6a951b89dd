"""The figure of a step's time: data, forward and backward, optimizer, the rest, evaluation.

Tokens per second give the speed of a run, not its bottleneck. The trainer records these parts. Other records, such as of an
older version, join forward, backward and optimizer into one part.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

import numpy as np

from narrowgauge.analysis.columns import numbers
from narrowgauge.report.figures.palette import colour, plain
from narrowgauge.report.figures.series import rounded
from narrowgauge.report.figures.traces import Figure, labelled_rows, layout_of
from narrowgauge.report.recipe_groups import Group
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

PARTS: dict[str, float] = {
    "waiting for tokens": 0.3,
    "forward and backward": 1.0,
    "optimizer": 0.75,
    "all else in the step": 0.2,
    "evaluation": 0.4,
}
"""Parts of a step from left to right, each with the opacity of its bar. A recipe keeps its own colour."""

_RECORDED = ("data_seconds", "gradient_seconds")
"""Without one of these columns a step has no parts."""
_WARM_UP = 2
"""Number of first steps to skip: they compile."""


def time_of_a_step(groups: Sequence[Group]) -> Figure | None:
    """Return a bar per recipe, divided into the parts of its average step; ``None`` if no run recorded parts."""
    parts_by_index = {
        group.index: parts for group in groups if (parts := _mean([parts_of_step(run) for run in group.runs]))
    }
    drawn = [group for group in groups if group.index in parts_by_index]
    if not drawn:
        return None
    layout = layout_of("milliseconds of a step", "")
    # Hovering shows the name of a part with a short bar.
    layout |= {"barmode": "stack", "uniformtext": {"mode": "hide", "minsize": 10}}
    # Leave space for the tokens per second next to the longest bar.
    layout["xaxis"] |= {"range": [0, 1.35e3 * max(math.fsum(parts.values()) for parts in parts_by_index.values())]}
    layout["yaxis"] |= labelled_rows([group.label for group in drawn])
    named = [part for part in PARTS if any(part in parts for parts in parts_by_index.values())]
    how = (
        f"Shorter is faster. From left to right: {', '.join(named)}; hover over a part for its share. Seconds are means of the "
        "middle half of the steps by their duration, so that steps that compile or sample do not count; those of evaluations "
        "are spread over all steps."
    )
    data = [bar for line, group in enumerate(drawn) for bar in _bars(group, line, parts_by_index[group.index])]
    data += [_rate(group, line, parts_by_index[group.index]) for line, group in enumerate(drawn)]
    return Figure("step-time", "Where the time of a step goes", how, data, layout, height=110 + 40 * len(drawn))


def parts_of_step(run: Run) -> dict[str, float]:
    """Return the seconds of a run's average step by part, in the order of :data:`PARTS`; empty if unrecorded.

    Their sum is the average duration of those steps, plus the time of evaluations per step.

    Example:
        >>> from pathlib import Path
        >>> row = {"seconds": 1.0, "data_seconds": 0.1, "gradient_seconds": 0.5, "update_seconds": 0.25}
        >>> parts_of_step(Run(Path("a"), {}, [{"step": step, **row} for step in range(1, 9)]))
        {'waiting for tokens': 0.1, 'forward and backward': 0.5, 'optimizer': 0.25, 'all else in the step': 0.15}
    """
    columns = {name: numbers(run, "steps", name)[_WARM_UP:] for name in ("seconds", *_RECORDED, "update_seconds")}
    order = np.argsort(columns["seconds"], kind="stable")
    order = order[columns["seconds"][order] > 0]  # without untimed steps
    quarter = len(order) // 4
    middle = {name: values[order[quarter : len(order) - quarter]] for name, values in columns.items()}
    means = {name: None if np.isnan(v).all() else float(np.nanmean(v)) for name, v in middle.items()}
    step_seconds = means["seconds"]
    if step_seconds is None or all(means[name] is None for name in _RECORDED):
        return {}
    waiting, update = (means[name] or 0.0 for name in ("data_seconds", "update_seconds"))
    inside = means["gradient_seconds"]
    computing = max(0.0, step_seconds - waiting if inside is None else inside)
    rest = max(0.0, step_seconds - waiting - computing - update)
    evaluations = numbers(run, "evals", "evaluation_seconds")
    values = (waiting, computing, update, rest, float(np.nansum(evaluations)) / len(run.steps))
    return {part: rounded(value, 9) for part, value in zip(PARTS, values, strict=True) if value > 0}


def _mean(runs: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """Return the mean over runs of one recipe. Skip runs without parts."""
    timed = [parts for parts in runs if parts]
    if not timed:
        return {}
    return {
        part: statistics.fmean(parts.get(part, 0.0) for parts in timed)
        for part in PARTS
        if any(part in parts for parts in timed)
    }


def _rate(group: Group, line: int, parts: Mapping[str, float]) -> Row:
    """Return the tokens per second next to a bar: the mean over runs, each at its median step."""
    rates = [
        float(np.nanmedian(line.y)) for line in group.lines("steps", "tokens_per_second") if not np.isnan(line.y).all()
    ]
    return {
        "type": "scatter", "mode": "text", "x": [rounded(1e3 * math.fsum(parts.values()))], "y": [line],
        "text": [f" {statistics.fmean(rates):,.0f} tokens/s" if rates else ""], "textposition": "middle right",
        "hoverinfo": "skip", "meta": {"group": group.index},
    }  # fmt: skip


def _bars(group: Group, line: int, parts: Mapping[str, float]) -> list[Row]:
    total = math.fsum(parts.values())
    return [
        {
            "type": "bar", "orientation": "h", "x": [rounded(1e3 * seconds)], "y": [line], "width": 0.62,
            "marker": {"color": colour(group.index, PARTS[part]), "line": {"width": 1, "color": "@card"}},
            "text": [f"{part} {seconds / total:.0%}"], "textposition": "inside", "insidetextanchor": "middle",
            "textangle": 0,
            "meta": {"group": group.index, "part": part},
            "hovertemplate": f"{part}: {1e3 * seconds:.3g} ms, {seconds / total:.1%}<extra>{plain(group.label)}</extra>",
        }
        for part, seconds in parts.items()
    ]  # fmt: skip
