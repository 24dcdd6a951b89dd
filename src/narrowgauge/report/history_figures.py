"""The figures of what went on beneath the loss: gradient norms, loss scales, overflow, and the events on their steps."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from narrowgauge.report.groups import Group
from narrowgauge.report.series import Series, accumulate, is_wide, number
from narrowgauge.report.traces import Figure, curve_of, layout_of, plain, traces_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

ROUTINE = frozenset({"start", "resume", "stop", "finish", "checkpoint", "note"})
"""Kinds of events that belong to every healthy run; all others, unknown ones too, ask for attention."""


def gradient_norm(groups: Sequence[Group]) -> Figure | None:
    """Gradient norm over steps."""
    curves = [curve_of(group, group.lines("steps", "grad_norm")) for group in groups]
    data = traces_of(curves, name="gradient norm")
    if not data:
        return None
    log = all(value > 0 for curve in curves for value in curve.joined.low if value is not None)
    how = (
        f"Before clipping{'; the axis counts powers of ten' if log else ''}. A norm that climbs steadily, or leaps tenfold, "
        "often runs a few steps ahead of a loss spike. A cross marks a norm that was not finite."
    )
    return Figure(
        "grad-norm", "Gradient norm", how, data, layout_of("step", "gradient norm", log_y=log), log_axes=("xaxis",)
    )


def loss_scale(groups: Sequence[Group]) -> Figure | None:
    """The loss scale over steps, where a recipe has one."""
    curves = [curve_of(group, group.lines("steps", "loss_scale")) for group in groups]
    data = traces_of(curves, name="loss scale", shape="hv")
    if not data:
        return None
    how = (
        "Each halving is an overflow that cost a step; each doubling a long stretch without one. A scale that keeps "
        "falling announces a divergence, often long before the loss does."
    )
    layout = layout_of("step", "loss scale", log_y=True)
    layout["yaxis"] |= _powers_of_two(value for curve in curves for value in curve.joined.mean)
    return Figure("loss-scale", "Loss scale", how, data, layout)


def skipped(groups: Sequence[Group]) -> Figure | None:
    """Updates not applied, and values held at the end of their range, counted."""
    data = []
    for name, dash in (("skipped", "solid"), ("saturated", "dot")):
        lines = [[accumulate(line) for line in group.lines("steps", name)] for group in groups]
        if not any(line.y and line.y[-1] for found in lines for line in found):
            continue
        curves = [curve_of(group, found) for group, found in zip(groups, lines, strict=True)]
        data += traces_of(
            curves,
            name=f"steps {name} so far" if name == "skipped" else "values beyond a delayed scale so far",
            shape="hv",
            dash=dash,
        )
    if not data:
        return None
    how = (
        "Counted from the first step: solid, the updates that were not applied because a gradient was not finite; dotted, "
        "the values beyond a delayed scale, which were held at its end. A line that stays flat is a run in health."
    )
    values = [value for trace in data for value in trace["y"] if value]
    layout = layout_of("step", "count so far", log_y=False)
    if is_wide(values, 1000):
        layout["yaxis"] |= {"type": "log"}
        how += " The axis counts powers of ten; nothing counted is below it."
    return Figure("skipped", "Skipped steps and saturation", how, data, layout)


def worst_underflow(groups: Sequence[Group]) -> Figure | None:
    """Per sampled step, the tensor that loses most to zero."""
    how = (
        "Of all tensors of a step, the one with the largest share of values that its cast made zero; point at the line for "
        "its name. Gradients lose a few percent in good health; beyond about 5 % the format is too coarse for that tensor."
    )
    return _worst(groups, "underflow", "Worst underflow", how)


def worst_overflow(groups: Sequence[Group]) -> Figure | None:
    """Per sampled step, the tensor with the largest share beyond the end of its format."""
    how = (
        "Of all tensors of a step, the one with the largest share of values beyond the end of its cast; point at the line "
        "for its name. Formats with a scale per block cut off a few of the largest values, up to some percent, by the rule of "
        "their scales, which are powers of two. Under any other scale, what stays above zero says that the scale is too "
        "large or too old."
    )
    return _worst(groups, "overflow", "Worst overflow", how)


def absent(groups: Sequence[Group], figures: Sequence[Figure]) -> str:
    """Why figures of this file are not drawn, in sentences.

    Args:
        groups: of the page.
        figures: those drawn.
    """
    drawn = {figure.name for figure in figures}
    delayed = any(row.get("saturated") is not None for group in groups for run in group.runs for row in run.steps)
    said = {
        "grad-norm": "No run wrote down a gradient norm.",
        "loss-scale": "No recipe here has a loss scale.",
        # Only delayed scales are counted in every step; what a cast cuts off is sampled by the gauges.
        "skipped": f"No update was skipped{', and no value lay beyond a delayed scale' if delayed else ''}.",
        "worst-underflow": "No sampled cast lost values to zero, or none was sampled.",
        "worst-overflow": "No sampled cast overflowed, or none was sampled.",
    }
    return " ".join(sentence for name, sentence in said.items() if name not in drawn)


def event_strip(named: Sequence[tuple[Run, str]]) -> Row | None:
    """Events on the axis of steps, a line per run, a trace per kind."""
    kinds: dict[str, Row] = {}
    for line, (run, _) in enumerate(named):
        for event in run.events:
            step = number(event.get("step"))
            if step is None:
                continue
            told = str(event.get("kind", ""))
            kind = "routine" if told in ROUTINE else told
            trace = kinds.setdefault(kind, _kind_trace(kind, len(kinds)))
            trace["x"].append(step)
            trace["y"].append(line)
            trace["text"].append(plain(f"{told}: {event.get('message', '')}"[:200]))
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


def _worst(groups: Sequence[Group], name: str, title: str, how: str) -> Figure | None:
    data, absent = [], []
    for group in groups:
        found = [samples.worst.get(name, {}) for samples in group.samples]
        lines = [Series(list(worst), [value for _, value in worst.values()]) for worst in found if worst]
        if not any(value for line in lines for value in line.y):
            absent += [group.label] if lines else []
            continue
        curve = curve_of(group, lines)
        traces = traces_of([curve], name=name)
        names = {step: tensor for worst in found for step, (tensor, _) in worst.items()}
        traces[-1]["customdata"] = [plain(names.get(x, "")) for x in traces[-1]["x"]]
        traces[-1]["hovertemplate"] = "%{y:.3~p} of %{customdata}<extra>" + plain(group.label) + "</extra>"
        data += traces
    if not data:
        return None
    layout = layout_of("step", "share of the values")
    layout["yaxis"] |= {"tickformat": ".3~p", "rangemode": "tozero"}
    if absent:
        how += f" Zero throughout, and not drawn: {', '.join(absent)}."
    return Figure(f"worst-{name}", title, how, data, layout)


def _kind_trace(kind: str, place: int) -> Row:
    symbols = ("triangle-up", "square", "diamond", "x", "star", "pentagon", "hexagon", "triangle-down", "bowtie")
    routine = kind == "routine"
    symbol = "line-ns" if routine else symbols[place % len(symbols)]
    marker: Row = {"symbol": symbol, "size": 9 if routine else 10, "color": "@muted" if routine else "@alarm"}
    marker["line"] = {"width": 2 if routine else 1, "color": "@muted" if routine else "@paper"}
    return {
        "type": "scatter",
        "mode": "markers",
        "name": plain(kind),
        "x": [],
        "y": [],
        "text": [],
        "marker": marker,
        "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
    }


def _powers_of_two(values: Iterable[float | None]) -> Row:
    """At most eight ticks at powers of two."""
    exponents = [math.frexp(value)[1] - 1 for value in values if value]
    low, high = min(exponents, default=0), max(exponents, default=0)
    ticks = range(low, high + 1, (high - low) // 8 + 1)
    return {"tickvals": [2.0**tick for tick in ticks], "ticktext": [f"2<sup>{tick}</sup>" for tick in ticks]}
