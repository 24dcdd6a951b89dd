"""The figures of a run's history besides its loss: gradient norm, loss scale, skipped steps, overflow, and the events."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from narrowgauge.report.figures.palette import plain
from narrowgauge.report.figures.series import accumulate, is_wide, series_of
from narrowgauge.report.figures.traces import Figure, curve_of, layout_of, traces_of
from narrowgauge.report.recipe_groups import Group
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, finite_number

ROUTINE = frozenset({"start", "resume", "stop", "finish", "checkpoint", "note"})
"""Kinds of events that every healthy run has; all others, unknown ones too, need attention."""


def gradient_norm(groups: Sequence[Group]) -> Figure | None:
    curves = [curve_of(group, group.lines("steps", "grad_norm")) for group in groups]
    data = traces_of(curves, name="gradient norm")
    if not data:
        return None
    is_log = all((curve.low > 0).all() for curve in curves)
    how = (
        f"Norm of all gradients before clipping{', on a log scale' if is_log else ''}. A norm that rises steadily, or jumps "
        "tenfold, often precedes a loss spike by a few steps. A cross marks a norm that is not finite."
    )
    layout = layout_of("step", "gradient norm", log_y=is_log)
    return Figure("grad-norm", "Gradient norm", how, data, layout, log_axes=("xaxis",))


def loss_scale(groups: Sequence[Group]) -> Figure | None:
    """The loss scale over steps, where a recipe has one."""
    curves = [curve_of(group, group.lines("steps", "loss_scale")) for group in groups]
    data = traces_of(curves, name="loss scale", shape="hv")
    if not data:
        return None
    how = (
        "Each halving is an overflow that skipped a step; each doubling follows many steps without one. A scale that keeps "
        "falling often precedes divergence, long before the loss shows it."
    )
    layout = layout_of("step", "loss scale", log_y=True)
    layout["yaxis"] |= _powers_of_two(value for curve in curves for value in curve.joined.mean.tolist())
    return Figure("loss-scale", "Loss scale", how, data, layout)


def skipped(groups: Sequence[Group]) -> Figure | None:
    """Skipped steps and saturated values, counted."""
    names = {"skipped": "skipped steps so far", "saturated": "values beyond a delayed scale so far"}
    data = []
    for column, dash in (("skipped", "solid"), ("saturated", "dot")):
        lines = [group.lines("steps", column, accumulate) for group in groups]
        if any(len(line) and line.y[-1] for found in lines for line in found):
            curves = [curve_of(group, found) for group, found in zip(groups, lines, strict=True)]
            data += traces_of(curves, name=names[column], shape="hv", dash=dash)
    if not data:
        return None
    how = (
        "Cumulative counts. Solid: steps skipped because a gradient was not finite. Dotted: values that exceeded a delayed "
        "scale and were saturated. A flat line is a healthy run."
    )
    layout = layout_of("step", "cumulative count")
    if is_wide([value for trace in data for value in trace["y"] if value], 1000):
        layout["yaxis"] |= {"type": "log"}
        how += " The axis is logarithmic, so a count of zero is not drawn."
    return Figure("skipped", "Skipped steps and saturation", how, data, layout)


def worst_underflow(groups: Sequence[Group]) -> Figure | None:
    """Per sampled step, the tensor with the largest underflow."""
    how = (
        "Of all tensors sampled at a step, the one with the largest share of nonzero values that its cast rounds to zero. "
        "Hover for its name. A few percent in gradients is normal; above about 5 % the format is too coarse for that tensor."
    )
    return _worst(groups, "underflow", "Worst underflow", how)


def worst_overflow(groups: Sequence[Group]) -> Figure | None:
    """Per sampled step, the tensor with the largest overflow."""
    how = (
        "Of all tensors sampled at a step, the one with the largest share of values beyond the range of its cast. Hover for "
        "its name. Formats with power-of-two block scales saturate some of the largest values by design, up to a few percent. "
        "With any other scale, a share that stays above zero means that the scale is too large or stale."
    )
    return _worst(groups, "overflow", "Worst overflow", how)


def absent(groups: Sequence[Group], figures: Sequence[Figure]) -> str:
    """Why figures of this section are missing, in sentences."""
    drawn = {figure.name for figure in figures}
    delayed = any(row.get("saturated") is not None for group in groups for run in group.runs for row in run.steps)
    reasons = {
        "grad-norm": "No run recorded a gradient norm.",
        "loss-scale": "No recipe here has a loss scale.",
        # Only delayed scales are counted in every step; overflow of other casts is sampled by the gauges.
        "skipped": f"No step was skipped{', and no value exceeded a delayed scale' if delayed else ''}.",
        "worst-underflow": "No sampled cast underflowed, or none was sampled.",
        "worst-overflow": "No sampled cast overflowed, or none was sampled.",
    }
    return " ".join(reason for name, reason in reasons.items() if name not in drawn)


def event_strip(named: Sequence[tuple[Run, str]]) -> Row | None:
    """Events over steps, a line per run, a trace per kind."""
    kinds: dict[str, Row] = {}
    for line, (run, _) in enumerate(named):
        for event in run.events:
            step = finite_number(event.get("step"))
            if step is None:
                continue
            own = str(event.get("kind", ""))
            kind = "routine" if own in ROUTINE else own
            trace = kinds.setdefault(kind, _kind_trace(kind, len(kinds)))
            trace["x"].append(step)
            trace["y"].append(line)
            trace["text"].append(plain(f"{own}: {event.get('message', '')}"[:200]))
    if not kinds:
        return None
    layout = {
        "xaxis": {"title": {"text": "step"}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": list(range(len(named))),
            "ticktext": [plain(name) for _, name in named],
            "range": [len(named) - 0.5, -0.5],
            "zeroline": False,
        },
        "showlegend": True,
        "height": 150 + 26 * len(named),
    }
    return {"data": [kinds[kind] for kind in sorted(kinds, key=lambda kind: kind != "routine")], "layout": layout}


def _worst(groups: Sequence[Group], metric: str, title: str, how: str) -> Figure | None:
    data, zero = [], []
    for group in groups:
        found = [samples.worst.get(metric, {}) for samples in group.samples]
        lines = [series_of((step, value) for step, (_, value) in worst.items()) for worst in found if worst]
        if not any(np.nan_to_num(line.y).any() for line in lines):
            zero += [group.label] if lines else []
            continue
        traces = traces_of([curve_of(group, lines)], name=metric)
        names = {step: tensor for worst in found for step, (tensor, _) in worst.items()}
        traces[-1]["customdata"] = [plain(names.get(x, "")) for x in traces[-1]["x"]]
        traces[-1]["hovertemplate"] = "%{y:.3~p} of %{customdata}<extra>" + plain(group.label) + "</extra>"
        data += traces
    if not data:
        return None
    layout = layout_of("step", "share of values")
    layout["yaxis"] |= {"tickformat": ".3~p", "rangemode": "tozero"}
    if zero:
        how += f" Zero throughout, and not drawn: {', '.join(zero)}."
    return Figure(f"worst-{metric}", title, how, data, layout)


def _kind_trace(kind: str, index: int) -> Row:
    symbols = ("triangle-up", "square", "diamond", "x", "star", "pentagon", "hexagon", "triangle-down", "bowtie")
    routine = kind == "routine"
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(kind),
        "x": [],
        "y": [],
        "text": [],
        "marker": {
            "symbol": "line-ns" if routine else symbols[index % len(symbols)],
            "size": 9 if routine else 10,
            "color": "@muted" if routine else "@alarm",
            "line": {"width": 2, "color": "@muted"} if routine else {"width": 1, "color": "@paper"},
        },
        "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
    }


def _powers_of_two(values: Iterable[float]) -> Row:
    """At most eight ticks at powers of two."""
    exponents = [math.frexp(value)[1] - 1 for value in values if value > 0]
    low, high = min(exponents, default=0), max(exponents, default=0)
    ticks = range(low, high + 1, (high - low) // 8 + 1)
    return {"tickvals": [2.0**tick for tick in ticks], "ticktext": [f"2<sup>{tick}</sup>" for tick in ticks]}
