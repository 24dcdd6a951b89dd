"""The figures that compare recipes, as plain data for Plotly: what is drawn, on which axes, and how to read it.

A figure here is a dict of traces, a dict of layout and two sentences for the reader; looks are the page's own affair.
Axes are chosen so that they do not lie: log scale where values span decades, zero where a length is compared, the same
colour for the same recipe throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from narrowgauge.comparison.run_stats import Curve as Clock
from narrowgauge.comparison.run_stats import Trial, on_one_clock
from narrowgauge.report.coinciding import part_coinciding
from narrowgauge.report.groups import Group, final_loss
from narrowgauge.report.history_figures import gradient_norm, loss_scale, skipped, worst_overflow, worst_underflow
from narrowgauge.report.label_placement import keep_apart
from narrowgauge.report.series import Series, band, column, is_wide, number, rounded, smooth
from narrowgauge.report.standing import trials_of
from narrowgauge.report.traces import (
    Curve,
    Figure,
    any_wide,
    colour,
    curve_of,
    kept_in_view,
    layout_of,
    plain,
    symbol_of,
    traces_of,
)
from narrowgauge.runs.schema import Row

SMALLEST_SPAN = 0.001
"""The least span of an axis where losses are told apart, as a share of the loss."""

MOST_MARKERS = 10
"""Markers of a line over seconds, about."""


def comparison_figures(groups: Sequence[Group], yardstick: str | None = None) -> dict[str, list[Figure]]:
    """All figures of this file by section; one without data is left out.

    Args:
        groups: of the page.
        yardstick: the label of the group that the others are held against; the first by default.
    """
    sections: dict[str, list[Callable[[Sequence[Group]], Figure | None]]] = {
        "loss": [training_loss, validation_loss, lambda groups: difference(groups, yardstick)],
        "cost": [loss_against_bytes, loss_against_seconds],
        "history": [gradient_norm, loss_scale, skipped, worst_underflow, worst_overflow],
    }
    return {
        name: [figure for make in makers if (figure := make(groups)) is not None] for name, makers in sections.items()
    }


def training_loss(groups: Sequence[Group]) -> Figure | None:
    """Loss of the training batches over steps, smoothed or as it was."""
    lines = {group.place: group.lines("steps", "loss") for group in groups}
    longest = max((len(line) for found in lines.values() for line in found), default=0)
    half_life = max(1, longest // 100)
    raw = [curve_of(group, lines[group.place]) for group in groups]
    smoothed = [curve_of(group, [smooth(line, half_life) for line in lines[group.place]]) for group in groups]
    data = [
        *traces_of(smoothed, view="smoothed", name="training loss"),
        *traces_of(raw, view="raw", name="training loss"),
    ]
    if not data:
        return None
    how = (
        f"Lower is better. A line is the mean of a recipe's seeds, its band reaches from the lowest seed to the highest. "
        f"Smoothed, a step's weight halves after {half_life} step{'s' if half_life > 1 else ''}; raw shows every spike. "
        "A cross marks a loss that was not finite."
    )
    layout = layout_of("step", "loss (nats per token)", log_y=any_wide(smoothed))
    beyond = kept_in_view(smoothed, layout)
    how += f"{beyond} Raw shows all of it." if beyond else ""
    how += part_coinciding(smoothed, data, layout)
    return Figure(
        "training-loss", "Training loss", how, data, layout, (("smoothed", "Smoothed"), ("raw", "Raw")), ("xaxis",)
    )


def validation_loss(groups: Sequence[Group]) -> Figure | None:
    """Loss on held-out text over steps."""
    curves = [curve_of(group, group.lines("evals", "val_loss")) for group in groups]
    data = traces_of(curves, name="validation loss", markers=True)
    if not data:
        return None
    how = (
        "Lower is better: this is text the run never trained on, and the figure that decides. "
        "Bands reach from the lowest seed to the highest. A cross marks a loss that was not finite."
    )
    layout = layout_of("step", "loss (nats per token)", log_y=any_wide(curves))
    how += kept_in_view(curves, layout)
    how += part_coinciding(curves, data, layout)
    return Figure("validation-loss", "Validation loss", how, data, layout, log_axes=("xaxis",))


def difference(groups: Sequence[Group], yardstick: str | None = None) -> Figure | None:
    """Validation loss minus that of the yardstick with the same seed."""
    first = next((group for group in groups if group.label == yardstick), groups[0] if groups else None)
    if first is None or len(groups) < 2:
        return None
    theirs = first.seeds()
    curves = []
    for group in groups:
        pairs = [(run, theirs[seed]) for seed, run in group.seeds().items() if seed in theirs and group is not first]
        curves.append(curve_of(group, [_minus(*(column(run.evals, "val_loss") for run in pair)) for pair in pairs]))
    data = traces_of(curves, name="difference", markers=True)
    if not any(value is not None for curve in curves for value in curve.joined.mean):
        return None
    how = (
        f"Above the zero line a recipe is worse than {first.label}, below it better. Each seed is compared with the same "
        "seed, that is the same first weights and the same batches, so that what the seeds share cancels. A line is the "
        "mean of these differences, its band reaches from the lowest seed to the highest. That is no interval of "
        "confidence: whether a difference is more than chance, the table of costs says."
    )
    layout = layout_of("step", f"loss minus {first.label}")
    least = _least_reach(first)
    layout["yaxis"] |= {"zeroline": True, "autorangeoptions": {"include": [-least, least]}}
    how += _without_the_far(curves, layout, least)
    how += part_coinciding(curves, data, layout)
    return Figure("difference", f"Validation loss against {first.label}", how, data, layout)


def loss_against_bytes(groups: Sequence[Group]) -> Figure | None:
    """What each recipe reaches for its memory."""
    found: dict[int, list[tuple[float, float]]] = {}
    for group in groups:
        points = [(number((run.summary or {}).get("bytes_per_param")), final_loss(run)) for run in group.runs]
        found[group.place] = [(x, y) for x, y in points if x is not None and y is not None]
    drawn = [group for group in groups if found[group.place]]
    if not drawn:
        return None
    data = [_point(group, found[group.place]) for group in drawn]
    most = max(trace["x"][0] for trace in data)
    absent = ", ".join(group.label for group in groups if not found[group.place])
    how = (
        "Down and to the left is better: less loss for less memory. A bar reaches from the lowest seed to the highest; "
        "the memory axis begins at zero. Bytes are those of one parameter's weight, gradient and optimizer state. "
        "Points without room for a name have the colour and shape of the list on top."
        + (f" Left out, for want of a finished run with a finite loss: {absent}." if absent else "")
    )
    layout = layout_of("bytes per parameter", "validation loss (nats per token)")
    means = [trace["y"][0] for trace in data]
    middle = sum(means) / len(means)
    ends = [middle * (1 + sign * SMALLEST_SPAN / 2) for sign in (-1, 1)]
    layout["xaxis"] |= {"range": [0, 1.12 * most]}
    layout["yaxis"] |= {"autorangeoptions": {"include": ends}, "type": "log" if is_wide(means) else "linear"}
    reached = [*ends, *means] if is_wide(means) else [*ends, *(y for points in found.values() for _, y in points)]
    keep_apart(data, [0, 1.12 * most], [min(reached), max(reached)], log=is_wide(means))
    return Figure("loss-bytes", "Loss against bytes per parameter", how, data, layout)


def loss_against_seconds(groups: Sequence[Group]) -> Figure | None:
    """Validation loss over seconds of training, read as the verdict reads it."""
    trials = {group.place: [trial for trial in trials_of(group) if trial.curve.points] for group in groups}
    joined = {place: _read_as_one(found) for place, found in trials.items()}
    curves = [_by_the_clock(group, trials[group.place], joined[group.place]) for group in groups]
    data = traces_of(curves, name="validation loss")
    if not data:
        return None
    for trace in data:
        if "name" in trace:
            # The moments of several seeds stand close together: markers at all of them would be a smear.
            trace["mode"], trace["marker"]["maxdisplayed"] = "lines+markers", MOST_MARKERS
    how = _how_to_read_seconds(curves)
    if len({frozenset(trial.seed for trial in found) for found in joined.values() if found}) > 1:
        how += " Not all recipes have the same seeds here, and seeds can differ more than recipes: go by the verdict."
    layout = layout_of("seconds of training", "validation loss (nats per token)", log_y=any_wide(curves))
    how += kept_in_view(curves, layout)
    how += part_coinciding(curves, data, layout)
    return Figure("loss-seconds", "Loss against seconds", how, data, layout, log_axes=("xaxis",))


def _point(group: Group, points: Sequence[tuple[float, float]]) -> Row:
    losses = [y for _, y in points]
    mean = sum(losses) / len(losses)
    seeds = f"{len(losses)} seed{'s' if len(losses) > 1 else ''}"
    return {
        "type": "scatter",
        "x": [rounded(sum(x for x, _ in points) / len(points))],
        "y": [rounded(mean)],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [rounded(max(losses) - mean)],
            "arrayminus": [rounded(mean - min(losses))],
            "visible": len(losses) > 1,
            "color": colour(group.place),
        },
        "text": [plain(group.label)],
        "textfont": {"color": "@ink"},
        "cliponaxis": False,
        "marker": {"size": 11, "color": colour(group.place), "symbol": symbol_of(group.place)},
        "name": plain(group.label),
        "meta": {"group": group.place},
        "hovertemplate": f"loss %{{y:.5~g}} at %{{x:.4~g}} bytes per parameter, {seeds}<extra>{plain(group.label)}</extra>",
    }


def _least_reach(group: Group) -> float:
    """How far an axis of differences reaches at least to both sides of zero: noise of the last digits is to look small."""
    losses = [abs(loss) for run in group.runs if (loss := final_loss(run)) is not None]
    return SMALLEST_SPAN / 2 * sum(losses) / len(losses) if losses else 0.0


def _without_the_far(curves: Sequence[Curve], layout: Row, least: float) -> str:
    """End the axis of differences where one beyond a nat would flatten the others."""
    reach = {
        curve.group.label: max(map(abs, found))
        for curve in curves
        if (found := [value for side in (curve.joined.low, curve.joined.high) for value in side if value is not None])
    }
    near = [far for far in reach.values() if far <= 1]
    limit = max(least, 1.1 * max(near)) if near else 0.0
    beyond = [label for label, far in reach.items() if far > max(1, 10 * limit)]
    if not beyond or not limit:
        return ""
    layout["yaxis"] |= {"range": [-limit, limit]}
    return f" The axis ends where the others do; beyond it goes {', '.join(beyond)}."


def _minus(line: Series, other: Series) -> Series:
    theirs = dict(zip(other.x, other.y, strict=True))
    x = [place for place in line.x if place in theirs]
    mine = dict(zip(line.x, line.y, strict=True))
    pairs = [(mine[place], theirs[place]) for place in x]
    return Series(x, [None if a is None or b is None else a - b for a, b in pairs])


def _read_as_one(trials: Sequence[Trial]) -> list[Trial]:
    """The runs that the verdict reads at equal time; where it reads none, all that have a curve, or else a point."""
    curved = [trial for trial in trials if trial.has_curve]
    return [trial for trial in curved if trial.counts] or curved or list(trials)


def _by_the_clock(group: Group, trials: Sequence[Trial], joined: Sequence[Trial]) -> Curve:
    """A recipe over seconds: some runs as one, at the moments common to them; all else alone.

    A mean over other seeds would jump by the seeds' luck, which is larger than what recipes differ by.
    """
    found = on_one_clock([trial.curve for trial in joined])
    moments = [at for at, _ in found]
    lines = [Series(moments, [number(losses[place]) for _, losses in found]) for place in range(len(joined))]
    among = {id(trial) for trial in joined}
    alone = [
        (trial.seed, line) for trial in trials for line in _outside(trial.curve, moments if id(trial) in among else [])
    ]
    broken = {at for trial in trials for at, loss in trial.curve.points if not math.isfinite(loss)}
    return Curve(group, band(lines), sorted(broken), alone)


def _how_to_read_seconds(curves: Sequence[Curve]) -> str:
    """Of what is drawn, and of nothing else."""
    which = "thick line" if any(curve.alone for curve in curves) else "line"
    lines = any(len(curve.joined.x) > 1 for curve in curves)
    said = [
        f"At any moment the lowest {which} is ahead." if lines else "Lower and further to the left is better.",
        "Seconds are those of training steps on this machine, without evaluations and compilation.",
    ]
    if any(count > 1 for curve in curves for count in curve.joined.count):
        said.append(
            "A recipe's seeds are joined at equal moments, each read off its own line as in the verdict; the band reaches from "
            "the lowest to the highest."
        )
    if any(curve.alone for curve in curves):
        said.append(
            "Thin lines and lone points are single seeds: outside the moments that a recipe's seeds share, or of runs that "
            "diverged or have not ended."
        )
    said.append("Formats that this machine only emulates are faster where they are native.")
    return " ".join(said)


def _outside(clock: Clock, moments: Sequence[float]) -> list[Series]:
    """What a run's own line has before and after moments that lie on it; all of it where there are none."""
    if not moments:
        return [_line(clock.points)]
    first, last = ((at, clock.loss_at(at)) for at in (moments[0], moments[-1]))
    before = [point for point in clock.points if point[0] < moments[0]]
    after = [point for point in clock.points if point[0] > moments[-1]]
    return [_line(piece) for piece in ([*before, first], [last, *after]) if len(piece) > 1]


def _line(points: Sequence[tuple[float, float | None]]) -> Series:
    return Series([at for at, _ in points], [number(loss) for _, loss in points])
