"""The figures that compare recipes: what is drawn, on which axes, and how to read it.

Axes are chosen so that they do not mislead: a log scale where values span decades, zero where a length is compared, the
same colour for the same recipe in every figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from narrowgauge.analysis.comparison.run_stats import losses_at_common_times
from narrowgauge.report.figures.palette import colour, plain, symbol_of
from narrowgauge.report.figures.series import Series, accumulate, band, column, is_wide, rounded, series_of, smooth
from narrowgauge.report.figures.step_time_figure import time_of_a_step
from narrowgauge.report.figures.traces import Curve, Figure, any_wide, clip_diverged, curve_of, layout_of, traces_of
from narrowgauge.report.recipe_groups import Group, Samples, final_loss
from narrowgauge.runs.schema import Row, finite_number

SMALLEST_SPAN = 0.001
"""The least span of an axis of losses or of their differences, as a share of the loss."""
_LOSS = "loss (nats per token)"
_BAND = " A line is the mean over a recipe's seeds, its band the range from the lowest seed to the highest."


def comparison_figures(groups: Sequence[Group], baseline: str | None = None) -> dict[str, list[Figure]]:
    """Return all figures that have data, by section; ``baseline`` is the label of the group to compare with, None the first."""
    sections: dict[str, list[Callable[[Sequence[Group]], Figure | None]]] = {
        "loss": [training_loss, validation_loss, lambda groups: difference(groups, baseline)],
        "cost": [loss_against_bytes, loss_against_seconds, time_of_a_step],
        "storage": [unchanged_weights, lost_decay, wrong_moments],
        "history": [gradient_norm, loss_scale, skipped, worst_underflow, worst_overflow],
    }
    return {
        name: [figure for make in makers if (figure := make(groups)) is not None] for name, makers in sections.items()
    }


def _curves(groups: Sequence[Group], table: str, column: str) -> list[Curve]:
    return [curve_of(group, group.lines(table, column)) for group in groups]


# ── loss ──────────────────────────────────────────────────────────────────────────────────────────────────────────────────


def training_loss(groups: Sequence[Group]) -> Figure | None:
    """Draw the loss of the training batches over steps, smoothed and raw."""
    half_life = max(1, max((group.longest("steps", "loss") for group in groups), default=0) // 100)
    smoothed = [curve_of(g, g.lines("steps", "loss", lambda line: smooth(line, half_life))) for g in groups]
    data = traces_of(smoothed, view="smoothed", name="training loss")
    data += traces_of(_curves(groups, "steps", "loss"), view="raw", name="training loss")
    if not data:
        return None
    layout = layout_of("step", _LOSS, log_y=any_wide(smoothed))
    how = (
        f"Lower is better.{_BAND} Smoothed is an exponential moving average with a half-life of {half_life} "
        f"step{'s' if half_life > 1 else ''}; raw shows every spike. A cross marks a loss that is not finite."
    )
    if clipped := clip_diverged(smoothed, layout):
        how += f"{clipped} Raw shows all of it."
    views = (("smoothed", "Smoothed"), ("raw", "Raw"))
    return Figure("training-loss", "Training loss", how, data, layout, views, ("xaxis",))


def validation_loss(groups: Sequence[Group]) -> Figure | None:
    curves = _curves(groups, "evals", "val_loss")
    data = traces_of(curves, name="validation loss", markers=True)
    layout = layout_of("step", _LOSS, log_y=any_wide(curves))
    how = f"Lower is better. This is the loss on held-out text, by which recipes are compared.{_BAND}"
    how += " A cross marks a loss that is not finite." + clip_diverged(curves, layout)
    return Figure("validation-loss", "Validation loss", how, data, layout, log_axes=("xaxis",)) if data else None


def difference(groups: Sequence[Group], baseline: str | None = None) -> Figure | None:
    """Draw the validation loss minus that of the baseline with the same seed."""
    first = next((group for group in groups if group.label == baseline), groups[0] if groups else None)
    if first is None or len(groups) < 2:
        return None
    theirs, curves = first.seeds(), []
    for group in groups:
        pairs = [(run, theirs[seed]) for seed, run in group.seeds().items() if seed in theirs and group is not first]
        curves.append(curve_of(group, [_minus(*(column(run.evals, "val_loss") for run in pair)) for pair in pairs]))
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
        f"a confidence interval; the cost table has one.{_clip_far(curves, layout, least)}"
    )
    data = traces_of(curves, name="difference", markers=True)
    return Figure("difference", f"Validation loss against {first.label}", how, data, layout)


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


def loss_against_seconds(groups: Sequence[Group]) -> Figure | None:
    """Draw the validation loss over seconds of training at the times common to a recipe's seeds, as the verdict reads it."""
    curves = []
    for group in groups:
        curved = [run for run in group.stats if run.has_curve]
        runs = [run for run in curved if run.counts] or curved
        times = losses_at_common_times([run.curve for run in runs])
        lines = [series_of((at, losses[place]) for at, losses in times) for place in range(len(runs))]
        broken = sorted({at for run in curved for at, loss in run.curve.points if not math.isfinite(loss)})
        curves.append(Curve(group, band(lines), broken))
    data = traces_of(curves, name="validation loss")
    if not data:
        return None
    layout = layout_of("seconds of training", f"validation {_LOSS}", log_y=any_wide(curves))
    how = (
        "At any moment the lowest line is ahead. Seconds are those of training steps on this machine, without evaluation and "
        "compilation. A recipe's seeds are averaged at equal moments, each interpolated on its own line as in the verdict; the "
        "band is the range from the lowest seed to the highest. Formats that this machine emulates are faster on hardware that "
        f"supports them.{clip_diverged(curves, layout)}"
    )
    return Figure("loss-seconds", "Loss against seconds", how, data, layout, log_axes=("xaxis",))


# ── what a storage did to a run ───────────────────────────────────────────────────────────────────────────────────────────


def unchanged_weights(groups: Sequence[Group]) -> Figure | None:
    """Draw the source's imprecision percentage over steps."""
    how = (
        "The share of all elements whose visible weight a step left as it was, on audited steps. High is healthy where "
        "something beside the visible weight (a tail, a master copy, a low part) keeps what does not show yet; where nothing "
        "does, what was intended there is lost. It is the imprecision percentage of the Collage paper (2405.03637)."
    )
    data = traces_of(_curves(groups, "steps", "imprecision_share"), name="unchanged weights")
    layout = layout_of("step", "share of all weights", tickformat=".3~p", range=[0, 1])
    return Figure("unchanged-weights", "Weights that a step leaves unchanged", how, data, layout) if data else None


def lost_decay(groups: Sequence[Group]) -> Figure | None:
    """Draw the share of weight decay that was not stored, over steps."""
    how = (
        "The share of the intended weight decay that the storage did not take, over all tensors, on audited steps: 0 where all "
        "arrives, 1 where none does. It is read by storing each update with and without its decay. A single step scatters; only "
        "a level counts. Half lost or more over a window raises lost_decay."
    )
    data = traces_of(_curves(groups, "steps", "lost_decay"), name="lost decay")
    layout = layout_of("step", "share of the decay", tickformat=".3~p", autorangeoptions={"include": [0, 1]})
    return Figure("lost-decay", "Weight decay that is lost", how, data, layout) if data else None


def wrong_moments(groups: Sequence[Group]) -> Figure | None:
    """Draw per sampled step the tensor whose second moments are farthest from exact ones."""
    how = (
        "Of all sampled tensors, the one whose stored second moments are farthest from the same ones kept in float32, as a "
        "factor. Hover for its name. Steps shrink with its square root: at 1.5 they are 18 % too short. EDQ cannot show that, "
        "since the storage takes all of an update that was computed too small."
    )
    data, _ = _named(groups, _farthest_bias, "second moments", "%{y:.3~g} times the exact ones in %{customdata}")
    layout = layout_of("step", "stored over exact", log_y=True, autorangeoptions={"include": [0.8, 1.25]})
    return Figure("wrong-moments", "Second moments over exact ones", how, data, layout) if data else None


def _farthest_bias(samples: Samples) -> dict[float, tuple[str, float]]:
    """Return by step the tensor whose second moments are off by the largest factor, up or down, and their bias."""
    biases = samples.metrics.get("bias")
    if biases is None:
        return {}
    with np.errstate(divide="ignore", invalid="ignore"):
        factors = np.abs(np.log(biases.values))
    factors[np.isnan(factors)] = -np.inf
    return {
        step: (biases.names[row], float(biases.values[row, place]))
        for place, (step, row) in enumerate(zip(samples.steps, factors.argmax(axis=0).tolist(), strict=True))
        if factors[row, place] > -np.inf
    }


def _named(
    groups: Sequence[Group], worst: Callable[[Samples], Mapping[float, tuple[str, float]]], name: str, hover: str
) -> tuple[list[Row], list[str]]:
    """Return curves of the worst tensor per sampled step, with its name on hovering, and the labels of recipes that are all 0."""
    data: list[Row] = []
    zero = []
    for group in groups:
        by_step = [values for samples in group.samples if (values := worst(samples))]
        lines = [series_of((step, value) for step, (_, value) in values.items()) for values in by_step]
        if not any(np.nan_to_num(line.y).any() for line in lines):
            zero += [group.label] if lines else []
            continue
        traces = traces_of([curve_of(group, lines)], name=name)
        names = {step: tensor for values in by_step for step, (tensor, _) in values.items()}
        traces[-1]["customdata"] = [plain(names.get(x, "")) for x in traces[-1]["x"]]
        traces[-1]["hovertemplate"] = f"{hover}<extra>{plain(group.label)}</extra>"
        data += traces
    return data, zero


# ── scale and overflow ────────────────────────────────────────────────────────────────────────────────────────────────────


def gradient_norm(groups: Sequence[Group]) -> Figure | None:
    curves = _curves(groups, "steps", "grad_norm")
    data = traces_of(curves, name="gradient norm")
    is_log = all((curve.low > 0).all() for curve in curves)
    how = (
        f"Norm of all gradients before clipping{', on a log scale' if is_log else ''}. A norm that rises steadily, or jumps "
        "tenfold, often precedes a loss spike by a few steps. A cross marks a norm that is not finite."
    )
    layout = layout_of("step", "gradient norm", log_y=is_log)
    return Figure("grad-norm", "Gradient norm", how, data, layout, log_axes=("xaxis",)) if data else None


def loss_scale(groups: Sequence[Group]) -> Figure | None:
    """Draw the loss scale over steps, where a recipe has one."""
    how = (
        "Each halving is an overflow that skipped a step; each doubling follows many steps without one. A scale that keeps "
        "falling often precedes divergence, long before the loss shows it."
    )
    curves = _curves(groups, "steps", "loss_scale")
    data = traces_of(curves, name="loss scale", shape="hv")
    powers = [math.log2(value) for curve in curves for value in curve.joined.mean.tolist() if value > 0]
    layout = layout_of("step", "loss scale", log_y=True)
    if powers:
        low, high = math.floor(min(powers)), math.ceil(max(powers))
        ticks = list(range(low, high + 1, max(1, (high - low) // 8)))
        layout["yaxis"] |= {"tickvals": [2.0**tick for tick in ticks], "ticktext": [f"2<sup>{t}</sup>" for t in ticks]}
    return Figure("loss-scale", "Loss scale", how, data, layout) if data else None


def skipped(groups: Sequence[Group]) -> Figure | None:
    """Draw counts of skipped steps and saturated values."""
    names = {"skipped": "skipped steps so far", "saturated": "values beyond a delayed scale so far"}
    data: list[Row] = []
    for key, dash in (("skipped", "solid"), ("saturated", "dot")):
        curves = [curve_of(group, group.lines("steps", key, accumulate)) for group in groups]
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


def worst_underflow(groups: Sequence[Group]) -> Figure | None:
    """Draw per sampled step the tensor with the largest underflow."""
    how = (
        "Of all tensors sampled at a step, the one with the largest share of nonzero values that its cast rounds to zero. "
        "Hover for its name. A few percent in gradients is normal; above about 5 % the format is too coarse for that tensor."
    )
    return _worst(groups, "underflow", "Worst underflow", how)


def worst_overflow(groups: Sequence[Group]) -> Figure | None:
    """Draw per sampled step the tensor with the largest overflow."""
    how = (
        "Of all tensors sampled at a step, the one with the largest share of values beyond the range of its cast. Hover for "
        "its name. Formats with power-of-two block scales saturate some of the largest values by design, up to a few percent. "
        "With any other scale, a share that stays above zero means that the scale is too large or stale."
    )
    return _worst(groups, "overflow", "Worst overflow", how)


def _worst(groups: Sequence[Group], metric: str, title: str, how: str) -> Figure | None:
    worst = lambda samples: samples.worst.get(metric, {})  # noqa: E731
    data, zero = _named(groups, worst, metric, "%{y:.3~p} of %{customdata}")
    if zero:
        how += f" Zero throughout, and not drawn: {', '.join(zero)}."
    layout = layout_of("step", "share of values", tickformat=".3~p", rangemode="tozero")
    return Figure(f"worst-{metric}", title, how, data, layout) if data else None


def absent(groups: Sequence[Group], figures: Sequence[Figure]) -> str:
    """Say why figures of scale and overflow are missing."""
    is_counted = any(group.longest("steps", "saturated") for group in groups)
    reasons = {
        "grad-norm": "No run recorded a gradient norm.",
        "loss-scale": "No recipe here has a loss scale.",
        # Only delayed scales are counted in every step; overflow of other casts is sampled by the gauges.
        "skipped": f"No step was skipped{', and no value exceeded a delayed scale' if is_counted else ''}.",
        "worst-underflow": "No sampled cast underflowed, or none was sampled.",
        "worst-overflow": "No sampled cast overflowed, or none was sampled.",
    }
    drawn = {figure.name for figure in figures}
    return " ".join(reason for name, reason in reasons.items() if name not in drawn)
