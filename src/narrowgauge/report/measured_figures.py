"""The figures of measured times: the law through the points, where steps went, and the terms of two launches side by side."""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.planner.attribution import Attribution
from narrowgauge.planner.regression import Regression
from narrowgauge.planner.scaling_law import Scaling, duration
from narrowgauge.report.marks import colour, plain, symbol_of
from narrowgauge.report.traces import Figure
from narrowgauge.runs.schema import Row

_MARKS = 49
_MOST_TERMS = 20
_LINE = 34
_UNITS = (("days", 86_400.0), ("hours", 3600.0), ("minutes", 60.0), ("seconds", 1.0), ("milliseconds", 1e-3))


def time_curve(scaling: Scaling, at: Sequence[int] = ()) -> Figure:
    """Time against the number of chips: the points, the law with its interval, what no number of chips goes below."""
    sizes = [*(point.chips for point in scaling.points), *at]
    low, high = max(1, min(sizes) / 2), 2 * max(sizes)
    chips = [low * (high / low) ** (place / (_MARKS - 1)) for place in range(_MARKS)]
    unit, scale = unit_of([point.seconds for point in scaling.points])
    first = scaling.points[0]
    data: list[Row] = [] if not scaling.fits else _law_traces(scaling, chips, scale, unit)
    data.append(_line("in proportion", chips, [first.seconds * first.chips / each / scale for each in chips], "dash"))
    data.append(_points("measured", [(p.chips, p.seconds / scale) for p in scaling.points], 0, unit))
    if at and scaling.fits:
        data.append(_points("asked for", [(each, scaling.seconds(each) / scale) for each in at], 1, unit))
    ticks = sorted(set(sizes))
    layout: Row = {
        "showlegend": True,
        "xaxis": {
            "title": {"text": "chips"}, "type": "log", "tickvals": ticks, "ticktext": [f"{number:,}" for number in ticks],
        },
        "yaxis": {"title": {"text": unit}, "type": "log"},
    }  # fmt: skip
    how = "Points are measured. The line is the law that fits them, its band holds four times out of five."
    if not scaling.fits:
        how = "Points are measured. No law fits them, so none is drawn."
    elif scaling.law.parts.get("constant"):
        how += " The horizontal line is what the law gives on any number of chips, however many."
    return Figure("scaling", "Time and the number of chips", how, data, layout, height=380)


def _law_traces(scaling: Scaling, chips: Sequence[float], scale: float, unit: str) -> list[Row]:
    ends = [scaling.interval(round(each)) for each in chips]
    band: Row = {
        "type": "scatter", "mode": "lines", "x": [*chips, *reversed(chips)], "meta": {"group": -1}, "fill": "toself",
        "y": [*(low / scale for low, _ in ends), *(high / scale for _, high in reversed(ends))],
        "fillcolor": colour(0, 0.18), "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False,
    }  # fmt: skip
    law: Row = {
        "type": "scatter", "mode": "lines", "name": plain(f"T(N) = {scaling.law}"), "x": list(chips), "meta": {"group": -1},
        "y": [scaling.law.seconds(each) / scale for each in chips], "line": {"color": colour(0), "width": 2},
        "hovertemplate": f"%{{x:.0f}} chips: %{{y:.3~g}} {unit}<extra></extra>",
    }  # fmt: skip
    least = scaling.law.parts.get("constant", 0.0)
    if not least:
        return [band, law]
    return [band, law, _line(f"never below {duration(least)}", chips, [least / scale] * len(chips), "dot")]


def _line(name: str, x: Sequence[float], y: Sequence[float], dash: str) -> Row:
    return {
        "type": "scatter", "mode": "lines", "name": plain(name), "x": list(x), "y": list(y), "meta": {"group": -1},
        "line": {"color": "@muted", "width": 1, "dash": dash}, "hoverinfo": "skip",
    }  # fmt: skip


def _points(name: str, points: Sequence[tuple[float, float]], place: int, unit: str) -> Row:
    return {
        "type": "scatter", "mode": "markers", "name": name, "x": [x for x, _ in points], "y": [y for _, y in points],
        "meta": {"group": -1}, "marker": {"size": 10, "color": "@ink", "symbol": symbol_of(place)},
        "hovertemplate": f"%{{x:,}} chips: %{{y:.4~g}} {unit}<extra>{name}</extra>",
    }  # fmt: skip


def step_bars(found: Attribution) -> Figure:
    """Seconds of a step of each run, by what was measured."""
    unit, scale = unit_of([step.terms.total for step in found.steps])
    names = dict.fromkeys(term.name for step in found.steps for term in step.terms)
    rows = [{term.name: term.value / scale for term in step.terms} for step in found.steps]
    data = [_bar(name, [row.get(name, 0.0) for row in rows], place, unit) for place, name in enumerate(names)]
    labels = [f"{step.name}, {step.num_ranks} ranks" for step in found.steps]
    how = "Time of a step of each run, as it was measured."
    return Figure(
        "steps", "Where the steps went", how, data, _layout(labels, unit, "stack"), height=150 + _LINE * len(rows)
    )


def term_bars(found: Regression) -> Figure:
    """Seconds of each term of the step that changed, in both launches, the largest change first."""
    shown = found.changes[:_MOST_TERMS]
    unit, scale = unit_of([max(change.before, change.after) for change in shown] or [1.0])
    data = [
        _bar(found.before.name, [change.before / scale for change in shown], 0, unit),
        _bar(found.after.name, [change.after / scale for change in shown], 1, unit),
    ]
    labels = [f"{change.group}: {change.name}" for change in shown]
    how = "Terms of a step by the model, for the same tokens, the largest change first. Terms that are equal are left out."
    height = 150 + 2 * _LINE * max(1, len(shown))
    return Figure("terms-changed", "Terms before and after", how, data, _layout(labels, unit, "group"), height=height)


def unit_of(seconds: Sequence[float]) -> tuple[str, float]:
    """The unit in which the largest of some times has two or more, and its seconds.

    Example:
        >>> unit_of([864000.0]), unit_of([30.0]), unit_of([0.2])
        (('days', 86400.0), ('seconds', 1.0), ('milliseconds', 0.001))
    """
    return next(((name, size) for name, size in _UNITS if max(seconds) >= 2 * size), _UNITS[-1])


def _bar(name: str, values: Sequence[float], place: int, unit: str) -> Row:
    return {
        "type": "bar", "orientation": "h", "name": plain(name), "x": [float(f"{value:.5g}") for value in values],
        "y": list(range(len(values))), "meta": {"group": -1}, "marker": {"color": colour(place)},
        "hovertemplate": f"{plain(name)} %{{x:.4~g}} {unit}<extra></extra>",
    }  # fmt: skip


def _layout(labels: Sequence[str], unit: str, mode: str) -> Row:
    return {
        "barmode": mode, "showlegend": True, "bargap": 0.3,
        "xaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": list(range(len(labels))), "ticktext": list(map(plain, labels)),
            "range": [len(labels) - 0.5, -0.5], "type": "linear",
        },
    }  # fmt: skip
