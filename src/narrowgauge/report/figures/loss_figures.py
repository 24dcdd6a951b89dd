"""The figures that compare recipes: what is drawn, on which axes, and how to read it.

Axes are chosen so that they do not mislead: a log scale where values span decades, zero where a length is compared, the
same colour for the same recipe in every figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np

from narrowgauge.analysis.comparison.run_stats import LossCurve, RunStats, losses_at_common_times
from narrowgauge.report.figures.history_figures import (
    gradient_norm,
    loss_scale,
    skipped,
    worst_overflow,
    worst_underflow,
)
from narrowgauge.report.figures.palette import colour, plain, symbol_of
from narrowgauge.report.figures.rank_figures import rank_figures
from narrowgauge.report.figures.series import Series, band, column, is_wide, rounded, series_of, smooth
from narrowgauge.report.figures.step_time_figure import time_of_a_step
from narrowgauge.report.figures.storage_figures import lost_decay, unchanged_weights, wrong_moments
from narrowgauge.report.figures.traces import (
    Curve,
    Figure,
    any_wide,
    clip_diverged,
    curve_of,
    dash_overlapping,
    layout_of,
    traces_of,
)
from narrowgauge.report.recipe_groups import Group, final_loss
from narrowgauge.runs.schema import Row, finite_number

SMALLEST_SPAN = 0.001
"""The least span of an axis of losses or of their differences, as a share of the loss."""

MOST_MARKERS = 10
"""About how many markers a line over seconds has."""


def comparison_figures(groups: Sequence[Group], baseline: str | None = None) -> dict[str, list[Figure]]:
    """All figures that have data, by section; ``baseline`` is the label of the group to compare with, None the first."""
    sections: dict[str, list[Callable[[Sequence[Group]], Figure | None]]] = {
        "loss": [training_loss, validation_loss, lambda groups: difference(groups, baseline)],
        "cost": [loss_against_bytes, loss_against_seconds, time_of_a_step],
        "storage": [unchanged_weights, lost_decay, wrong_moments],
        "history": [gradient_norm, loss_scale, skipped, worst_underflow, worst_overflow],
    }
    drawn = {
        name: [figure for make in makers if (figure := make(groups)) is not None] for name, makers in sections.items()
    }
    return {**drawn, "ranks": rank_figures(groups)}


def training_loss(groups: Sequence[Group]) -> Figure | None:
    """Loss of the training batches over steps, smoothed and raw."""
    half_life, smoothing = smoothed_by(groups)
    raw = [curve_of(group, group.lines("steps", "loss")) for group in groups]
    smoothed = [curve_of(group, group.lines("steps", "loss", smoothing)) for group in groups]
    data = [
        *traces_of(smoothed, view="smoothed", name="training loss"),
        *traces_of(raw, view="raw", name="training loss"),
    ]
    if not data:
        return None
    layout = layout_of("step", "loss (nats per token)", log_y=any_wide(smoothed))
    clipped = clip_diverged(smoothed, layout)
    how = (
        "Lower is better. A line is the mean over a recipe's seeds, its band the range from the lowest seed to the highest. "
        f"Smoothed is an exponential moving average with a half-life of {half_life} step{'s' if half_life > 1 else ''}; "
        "raw shows every spike. A cross marks a loss that is not finite."
        f"{clipped and clipped + ' Raw shows all of it.'}{dash_overlapping(smoothed, data, layout)}"
    )
    views = (("smoothed", "Smoothed"), ("raw", "Raw"))
    return Figure("training-loss", "Training loss", how, data, layout, views, ("xaxis",))


def smoothed_by(groups: Sequence[Group]) -> tuple[int, Callable[[Series], Series]]:
    """The half-life in steps by which a page smooths training losses, and that smoothing."""
    half_life = max(1, max((group.longest("steps", "loss") for group in groups), default=0) // 100)
    return half_life, lambda line: smooth(line, half_life)


def validation_loss(groups: Sequence[Group]) -> Figure | None:
    curves = [curve_of(group, group.lines("evals", "val_loss")) for group in groups]
    data = traces_of(curves, name="validation loss", markers=True)
    if not data:
        return None
    layout = layout_of("step", "loss (nats per token)", log_y=any_wide(curves))
    how = (
        "Lower is better. This is the loss on held-out text, by which recipes are compared. "
        "A band is the range from the lowest seed to the highest. A cross marks a loss that is not finite."
        f"{clip_diverged(curves, layout)}{dash_overlapping(curves, data, layout)}"
    )
    return Figure("validation-loss", "Validation loss", how, data, layout, log_axes=("xaxis",))


def difference(groups: Sequence[Group], baseline: str | None = None) -> Figure | None:
    """Validation loss minus that of the baseline with the same seed."""
    first = next((group for group in groups if group.label == baseline), groups[0] if groups else None)
    if first is None or len(groups) < 2:
        return None
    theirs = first.seeds()
    curves = []
    for group in groups:
        pairs = [(run, theirs[seed]) for seed, run in group.seeds().items() if seed in theirs and group is not first]
        curves.append(curve_of(group, [_minus(*(column(run.evals, "val_loss") for run in pair)) for pair in pairs]))
    data = traces_of(curves, name="difference", markers=True)
    if not any(np.isfinite(curve.joined.mean).any() for curve in curves):
        return None
    layout = layout_of("step", f"loss minus {first.label}")
    least = _least_reach(first)
    layout["yaxis"] |= {"zeroline": True, "autorangeoptions": {"include": [-least, least]}}
    how = (
        f"Above zero a recipe is worse than {first.label}, below zero better. Each run is compared with the run of the same "
        "seed, which has the same initial weights and the same batches, so most of the variation between seeds cancels. "
        "A line is the mean of these differences, its band the range from the lowest seed to the highest. The band is not "
        "a confidence interval; the cost table has one."
        f"{_clip_far(curves, layout, least)}{dash_overlapping(curves, data, layout)}"
    )
    return Figure("difference", f"Validation loss against {first.label}", how, data, layout)


def loss_against_bytes(groups: Sequence[Group]) -> Figure | None:
    """The final loss of each recipe over its memory."""
    found: dict[int, list[tuple[float, float]]] = {}
    for group in groups:
        points = [(finite_number((run.summary or {}).get("bytes_per_param")), final_loss(run)) for run in group.runs]
        found[group.index] = [(x, y) for x, y in points if x is not None and y is not None]
    drawn = [group for group in groups if found[group.index]]
    if not drawn:
        return None
    data = [_point(group, found[group.index]) for group in drawn]
    means = [trace["y"][0] for trace in data]
    middle = sum(means) / len(means)
    absent = ", ".join(group.label for group in groups if not found[group.index])
    how = (
        "Down and to the left is better: less loss for less memory. An error bar is the range from the lowest seed to the "
        "highest. Bytes are those of weight, gradient and optimizer state per parameter; their axis begins at zero. "
        "Hover over a point for its recipe, or find its colour and shape in the legend at the top."
        + (f" Not shown, because no run finished with a finite loss: {absent}." if absent else "")
    )
    layout = layout_of("bytes per parameter", "validation loss (nats per token)", log_y=is_wide(means))
    layout["xaxis"] |= {"range": [0, 1.12 * max(trace["x"][0] for trace in data)]}
    layout["yaxis"] |= {"autorangeoptions": {"include": [middle * (1 + sign * SMALLEST_SPAN / 2) for sign in (-1, 1)]}}
    return Figure("loss-bytes", "Loss against bytes per parameter", how, data, layout)


def loss_against_seconds(groups: Sequence[Group]) -> Figure | None:
    """Validation loss over seconds of training, read as the verdict reads it."""
    stats = {group.index: [run for run in group.stats if run.curve.points] for group in groups}
    joined = {index: _averaged(found) for index, found in stats.items()}
    curves = [_over_seconds(group, stats[group.index], joined[group.index]) for group in groups]
    data = traces_of(curves, name="validation loss")
    if not data:
        return None
    for trace in data:
        if "name" in trace:
            # The points of several seeds stand close together: markers at all of them would be a smear.
            trace["mode"], trace["marker"]["maxdisplayed"] = "lines+markers", MOST_MARKERS
    how = _how_to_read_seconds(curves)
    if len({frozenset(run.seed for run in found) for found in joined.values() if found}) > 1:
        how += " Not all recipes have the same seeds here, and seeds can differ more than recipes: rely on the verdict."
    layout = layout_of("seconds of training", "validation loss (nats per token)", log_y=any_wide(curves))
    how += clip_diverged(curves, layout) + dash_overlapping(curves, data, layout)
    return Figure("loss-seconds", "Loss against seconds", how, data, layout, log_axes=("xaxis",))


def _point(group: Group, points: Sequence[tuple[float, float]]) -> Row:
    losses = [y for _, y in points]
    mean = sum(losses) / len(losses)
    seeds = f"{len(losses)} seed{'s' if len(losses) > 1 else ''}"
    return {
        "type": "scatter",
        "mode": "markers",
        "x": [rounded(sum(x for x, _ in points) / len(points))],
        "y": [rounded(mean)],
        "error_y": {
            "type": "data",
            "symmetric": False,
            "array": [rounded(max(losses) - mean)],
            "arrayminus": [rounded(mean - min(losses))],
            "visible": len(losses) > 1,
            "color": colour(group.index),
        },
        "cliponaxis": False,
        "marker": {"size": 11, "color": colour(group.index), "symbol": symbol_of(group.index)},
        "name": plain(group.label),
        "meta": {"group": group.index},
        "hovertemplate": f"loss %{{y:.5~g}} at %{{x:.4~g}} bytes per parameter, {seeds}<extra>{plain(group.label)}</extra>",
    }


def _least_reach(group: Group) -> float:
    """How far an axis of differences reaches at least to both sides of zero, so that noise in the last digits looks small."""
    losses = [abs(loss) for run in group.runs if (loss := final_loss(run)) is not None]
    return SMALLEST_SPAN / 2 * sum(losses) / len(losses) if losses else 0.0


def _clip_far(curves: Sequence[Curve], layout: Row, least: float) -> str:
    """End the axis of differences where one beyond a nat would flatten the others."""
    sides = {curve.group.label: np.concatenate([curve.low, curve.high]) for curve in curves}
    reach = {label: float(np.abs(values).max()) for label, values in sides.items() if values.size}
    near = [far for far in reach.values() if far <= 1]
    limit = max(least, 1.1 * max(near)) if near else 0.0
    beyond = [label for label, far in reach.items() if far > max(1, 10 * limit)]
    if not beyond or not limit:
        return ""
    layout["yaxis"] |= {"range": [-limit, limit]}
    return f" The axis ends where the others do. Beyond it: {', '.join(beyond)}."


def _minus(line: Series, other: Series) -> Series:
    x, mine, theirs = np.intersect1d(line.x, other.x, return_indices=True)
    return Series(x, line.y[mine] - other.y[theirs])


def _averaged(stats: Sequence[RunStats]) -> list[RunStats]:
    """The runs that the verdict reads at equal time; where it reads none, all that have a curve, or else a point."""
    curved = [run for run in stats if run.has_curve]
    return [run for run in curved if run.counts] or curved or list(stats)


def _over_seconds(group: Group, stats: Sequence[RunStats], joined: Sequence[RunStats]) -> Curve:
    """A recipe over seconds: the mean of some runs at the moments common to them; all else run by run.

    A mean over other seeds would jump by the variation between seeds, which is larger than that between recipes.
    """
    found = losses_at_common_times([run.curve for run in joined])
    moments = [at for at, _ in found]
    lines = [series_of((at, losses[index]) for at, losses in found) for index in range(len(joined))]
    among = {id(run) for run in joined}
    alone = [(run.seed, line) for run in stats for line in _outside(run.curve, moments if id(run) in among else [])]
    broken = {at for run in stats for at, loss in run.curve.points if not math.isfinite(loss)}
    return Curve(group, band(lines), sorted(broken), alone)


def _how_to_read_seconds(curves: Sequence[Curve]) -> str:
    which = "thick line" if any(curve.alone for curve in curves) else "line"
    lines = any(len(curve.joined.x) > 1 for curve in curves)
    sentences = [
        f"At any moment the lowest {which} is ahead." if lines else "Lower and further to the left is better.",
        "Seconds are those of training steps on this machine, without evaluation and compilation.",
    ]
    if any((curve.joined.count > 1).any() for curve in curves):
        sentences.append(
            "A recipe's seeds are averaged at equal moments, each interpolated on its own line as in the verdict; the band is "
            "the range from the lowest seed to the highest."
        )
    if any(curve.alone for curve in curves):
        sentences.append(
            "Thin lines and lone points are single seeds: outside the moments that a recipe's seeds share, or of runs that "
            "diverged or have not finished."
        )
    sentences.append("Formats that this machine emulates are faster on hardware that supports them.")
    return " ".join(sentences)


def _outside(curve: LossCurve, moments: Sequence[float]) -> list[Series]:
    """What a run's own line has before and after moments that lie on it; all of it where there are none."""
    if not moments:
        return [series_of(curve.points)]
    first, last = ((at, curve.loss_at(at)) for at in (moments[0], moments[-1]))
    before = [point for point in curve.points if point[0] < moments[0]]
    after = [point for point in curve.points if point[0] > moments[-1]]
    return [series_of(piece) for piece in ([*before, first], [last, *after]) if len(piece) > 1]
