"""Figures that compare recipes: their data, their axes, and their captions.

Axes must not mislead: a log scale for values over decades, zero for compared lengths, and one colour per recipe in every
figure.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from narrowgauge.analysis.columns import Series, column
from narrowgauge.report.figures.palette import colour, plain, symbol_of
from narrowgauge.report.figures.series import is_wide, rounded, smooth
from narrowgauge.report.figures.traces import (
    Curve,
    Figure,
    any_wide,
    clip_diverged,
    curve_of,
    faint,
    layout_of,
    traces_of,
)
from narrowgauge.report.recipe_groups import Group, final_loss
from narrowgauge.runs.schema import Row, finite_number

SMALLEST_SPAN = 0.001
"""Minimum span of an axis of losses or of their differences, as a fraction of the loss."""
_LOSS = "loss (nats per token)"
_BAND = " A line is the mean over a recipe's seeds, its band the range from the lowest seed to the highest."


def comparison_figures(groups: Sequence[Group], baseline: str | None = None) -> dict[str, list[Figure]]:
    """Return all figures with data, by section. ``baseline`` is the label of the group to compare with (None: the first)."""
    sections: dict[str, list[Figure | None]] = {
        "loss": [training_loss(groups), validation_loss(groups), difference(groups, baseline)],
        "cost": [loss_against_bytes(groups)],
        "storage": [over_steps(groups, "unchanged-weights"), over_steps(groups, "lost-decay")],
        "history": [over_steps(groups, "grad-norm"), loss_scale(groups), skipped(groups)],
    }
    return {name: [figure for figure in figures if figure is not None] for name, figures in sections.items()}


def _curves(groups: Sequence[Group], table: str, name: str) -> list[Curve]:
    return [curve_of(group, group.lines(table, name)) for group in groups]


# ── loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def training_loss(groups: Sequence[Group]) -> Figure | None:
    """Draw the loss of the training batches over steps, smoothed, with the raw loss in the background."""
    lines = {group.label: group.lines("steps", "loss") for group in groups}
    half_life = max(1, max((len(line) for group in lines.values() for line in group), default=0) // 100)
    smoothed = [curve_of(group, [smooth(line, half_life) for line in lines[group.label]]) for group in groups]
    data = traces_of(smoothed, name="training loss")
    if not data:
        return None
    layout = layout_of("step", _LOSS, log_y=any_wide(smoothed), can_log_x=True)
    how = (
        f"Lower is better.{_BAND} It is smoothed by an exponential moving average with a half-life of {half_life} "
        f"step{'s' if half_life > 1 else ''}; the thin line behind it is not, and shows every spike. A cross marks a loss "
        f"that is not finite.{clip_diverged(smoothed, layout) or _fit_lines(smoothed, layout)}"
    )
    raw = faint([curve_of(group, lines[group.label]) for group in groups])
    return Figure("training-loss", "Training loss", how, [*raw, *data], layout)


def _fit_lines(curves: Sequence[Curve], layout: Row) -> str:
    """End the axis at the smoothed lines, so that a single spike does not flatten them."""
    low, high = (
        reduce(np.concatenate(sides), initial=math.nan)
        for reduce, sides in (
            (np.fmin.reduce, [curve.low for curve in curves]), (np.fmax.reduce, [curve.high for curve in curves]),
        )
    )  # fmt: skip
    if not low < high:
        return ""
    margin = 0.15 * (high - low)
    ends = (low - margin, high + margin)
    if layout["yaxis"]["type"] == "log":
        margin = (high / low) ** 0.15
        ends = (math.log10(low / margin), math.log10(high * margin))
    layout["yaxis"] |= {"range": [rounded(float(end)) for end in ends]}
    return " Double-click to see spikes whole."


def validation_loss(groups: Sequence[Group]) -> Figure | None:
    curves = _curves(groups, "evals", "val_loss")
    data = traces_of(curves, name="validation loss", markers=True)
    layout = layout_of("step", _LOSS, log_y=any_wide(curves), can_log_x=True)
    how = f"Lower is better. This is the loss on held-out text, by which recipes are compared.{_BAND}"
    how += " A cross marks a loss that is not finite." + clip_diverged(curves, layout)
    return Figure("validation-loss", "Validation loss", how, data, layout) if data else None


def difference(groups: Sequence[Group], baseline: str | None = None) -> Figure | None:
    """Draw the validation loss minus the baseline's loss with the same seed."""
    first = next((group for group in groups if group.label == baseline), groups[0] if groups else None)
    if first is None or len(groups) < 2:
        return None
    theirs, curves = first.seeds(), []
    for group in groups:
        pairs = [(run, theirs[seed]) for seed, run in group.seeds().items() if seed in theirs and group is not first]
        curves.append(curve_of(group, [_minus(*(column(run, "evals", "val_loss") for run in pair)) for pair in pairs]))
    if not any(np.isfinite(curve.joined.mean).any() for curve in curves):
        return None
    # Noise in the last digits must look small.
    losses = [abs(loss) for run in first.runs if (loss := final_loss(run)) is not None]
    least = SMALLEST_SPAN / 2 * sum(losses) / len(losses) if losses else 0.0
    layout = layout_of(
        "step", f"loss minus {first.label}", zeroline=True, autorangeoptions={"include": [-least, least]}
    )
    how = (
        f"Above zero a recipe is worse than {first.label}, below zero better. Each run is compared with the run of the same "
        "seed, which has the same initial weights and the same batches, so most of the variation between seeds cancels. "
        "A line is the mean of these differences, its band the range from the lowest seed to the highest. The band is not "
        f"a confidence interval; the cost table has one."
    )
    data = traces_of(curves, name="difference", markers=True)
    return Figure("difference", f"Validation loss against {first.label}", how, data, layout)


def _minus(line: Series, baseline: Series) -> Series:
    x, mine, theirs = np.intersect1d(line.x, baseline.x, return_indices=True)
    return Series(x, line.y[mine] - baseline.y[theirs])


# ── loss against cost ─────────────────────────────────────────────────────────────────────────────────────────────────────


def loss_against_bytes(groups: Sequence[Group]) -> Figure | None:
    """Draw the final loss of each recipe over its memory."""
    points: dict[int, list[tuple[float, float]]] = {}
    for group in groups:
        pairs = [(finite_number((run.summary or {}).get("bytes_per_param")), final_loss(run)) for run in group.runs]
        points[group.index] = [(x, y) for x, y in pairs if x is not None and y is not None]
    data = [_point(group, points[group.index]) for group in groups if points[group.index]]
    if not data:
        return None
    means = [trace["y"][0] for trace in data]
    middle = sum(means) / len(means)
    absent = ", ".join(group.label for group in groups if not points[group.index])
    how = (
        "Down and to the left is better: less loss for less memory. An error bar is the range from the lowest seed to the "
        "highest. Bytes are those of weight, gradient and optimizer state per parameter; their axis begins at zero. "
        "Hover over a point for its recipe, or find its colour and shape in the legend at the top."
        + (f" Not shown, because no run finished with a finite loss: {absent}." if absent else "")
    )
    include = [middle * (1 + sign * SMALLEST_SPAN / 2) for sign in (-1, 1)]
    layout = layout_of(
        "bytes per parameter", f"validation {_LOSS}", log_y=is_wide(means), autorangeoptions={"include": include}
    )
    layout["xaxis"] |= {"range": [0, 1.12 * max(trace["x"][0] for trace in data)]}
    return Figure("loss-bytes", "Loss against bytes per parameter", how, data, layout)


def _point(group: Group, points: Sequence[tuple[float, float]]) -> Row:
    losses = [y for _, y in points]
    mean, name, tint = sum(losses) / len(losses), plain(group.label), colour(group.index)
    seeds = f"{len(losses)} seed{'s' if len(losses) > 1 else ''}"
    return {
        "type": "scatter", "mode": "markers", "name": name, "meta": {"group": group.index}, "cliponaxis": False,
        "x": [rounded(sum(x for x, _ in points) / len(points))], "y": [rounded(mean)],
        "error_y": {
            "type": "data", "symmetric": False, "array": [rounded(max(losses) - mean)],
            "arrayminus": [rounded(mean - min(losses))], "visible": len(losses) > 1, "color": tint,
        },
        "marker": {"size": 11, "color": tint, "symbol": symbol_of(group.index)},
        "hovertemplate": f"loss %{{y:.5~g}} at %{{x:.4~g}} bytes per parameter, {seeds}<extra>{name}</extra>",
    }  # fmt: skip


# ── over steps ────────────────────────────────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True)
class OverSteps:
    """Describe a figure of a column of ``steps``.

    Args:
        spans_decades: the vertical axis is logarithmic if its values allow it.
        axis: title of the vertical axis. ``layout`` has its other settings.
    """

    title: str
    column: str
    axis: str
    how: str
    layout: Mapping[str, Any] = field(default_factory=dict)
    spans_decades: bool = False


_SHARE: Mapping[str, Any] = {"tickformat": ".3~p"}
OVER_STEPS: dict[str, OverSteps] = {
    "unchanged-weights": OverSteps(
        "Weights that a step leaves unchanged", "imprecision_share", "share of all weights",
        "The share of all elements whose visible weight a step left as it was, on audited steps. High is healthy where "
        "something beside the visible weight (a tail, a master copy, a low part) keeps what does not show yet; where nothing "
        "does, what was intended there is lost. It is the imprecision percentage of the Collage paper (2405.03637).",
        {**_SHARE, "range": [0, 1]},
    ),
    "lost-decay": OverSteps(
        "Weight decay that is lost", "lost_decay", "share of the decay",
        "The share of the intended weight decay that the storage did not take, over all tensors, on audited steps: 0 where all "
        "arrives, 1 where none does. It is read by storing each update with and without its decay. A single step scatters; only "
        "a level counts. Half lost or more over a window raises lost_decay.",
        {**_SHARE, "autorangeoptions": {"include": [0, 1]}},
    ),
    "grad-norm": OverSteps(
        "Gradient norm", "grad_norm", "gradient norm",
        "Norm of all gradients before clipping. A norm that rises steadily, or jumps tenfold, often precedes a loss spike by a "
        "few steps. A cross marks a norm that is not finite.",
        spans_decades=True,
    ),
}  # fmt: skip
"""Figures of one column, by name on the page."""


def over_steps(groups: Sequence[Group], name: str) -> Figure | None:
    """Draw a column of the steps."""
    row = OVER_STEPS[name]
    curves = _curves(groups, "steps", row.column)
    data = traces_of(curves, name=row.title.lower())
    is_log = row.spans_decades and all((curve.low > 0).all() for curve in curves)
    layout = layout_of("step", row.axis, log_y=is_log, can_log_x=row.spans_decades, **row.layout)
    return Figure(name, row.title, row.how, data, layout) if data else None


def loss_scale(groups: Sequence[Group]) -> Figure | None:
    """Draw the loss scale over steps, as a power of two."""
    how = (
        "Each halving is an overflow that skipped a step; each doubling follows many steps without one. A scale that keeps "
        "falling often precedes divergence, long before the loss shows it."
    )
    curves = []
    for group in groups:
        lines = group.lines("steps", "loss_scale")
        curves.append(
            curve_of(group, [Series(line.x, np.log2(np.where(line.y > 0, line.y, np.nan))) for line in lines])
        )
    data = traces_of(curves, name="loss scale, as a power of two:", shape="hv")
    layout = layout_of("step", "loss scale", tickprefix="2<sup>", ticksuffix="</sup>")
    return Figure("loss-scale", "Loss scale", how, data, layout) if data else None


def skipped(groups: Sequence[Group]) -> Figure | None:
    """Draw counts of skipped steps and saturated values."""
    names = {"skipped": "skipped steps so far", "saturated": "values beyond a delayed scale so far"}
    data: list[Row] = []
    for key, dash in (("skipped", "solid"), ("saturated", "dot")):
        curves = [
            curve_of(group, [Series(line.x, np.nancumsum(line.y)) for line in group.lines("steps", key)])
            for group in groups
        ]
        if any(curve.high.max(initial=0.0) for curve in curves):
            data += traces_of(curves, name=names[key], shape="hv", dash=dash)
    how = (
        "Cumulative counts. Solid: steps skipped because a gradient was not finite. Dotted: values that exceeded a delayed "
        "scale and were saturated. A flat line is a healthy run."
    )
    is_log = is_wide([value for trace in data for value in trace["y"] if value], 1000)
    how += " The axis is logarithmic, so a count of zero is not drawn." if is_log else ""
    layout = layout_of("step", "cumulative count", log_y=is_log)
    return Figure("skipped", "Skipped steps and saturation", how, data, layout) if data else None
