"""The figures of a plan: memory and time of its options, the roofline of its best, and its scaling curve."""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.options import MEMORY_GROUPS, STEP_GROUPS, Option
from narrowgauge.planner.plan_report import Plan
from narrowgauge.planner.roofline_points import Roof, roof_of
from narrowgauge.planner.words import axes_text
from narrowgauge.report.marks import colour, plain, symbol_of
from narrowgauge.report.traces import Figure
from narrowgauge.runs.schema import Row

_MOST_OPTIONS = 24
_LINE = 26
_TOKENS = 1e6


def figures_of(plan: Plan, sizes: Sequence[Option] = ()) -> list[Figure]:
    """The figures of a plan; one without data is left out.

    Args:
        plan: to draw.
        sizes: the best option on each of several numbers of chips, for the scaling curve.
    """
    shown = plan.options[:_MOST_OPTIONS]
    figures = [memory_bars(shown)]
    timed = [option for option in shown if option.step is not None and option.fits]
    if timed:
        figures.append(time_bars(timed))
    if plan.best.step is not None and plan.question.clusters:
        figures.append(roofline(roof_of(plan.question.architecture, plan.best, _cluster(plan))))
    if len(sizes) > 1:
        figures.append(scaling_curve(sizes))
    return figures


def _cluster(plan: Plan) -> Cluster:
    """The cluster of the best option; a part of one has the same chips."""
    named = {cluster.name: cluster for cluster in plan.question.clusters}
    return named.get(plan.best.cluster, plan.question.clusters[0])


def memory_bars(options: Sequence[Option]) -> Figure:
    """Bytes of the worst rank by group, and what the chips have."""
    values = {name: [option.memory.groups.get(name, 0.0) / 1e9 for option in options] for name in MEMORY_GROUPS}
    data = _bars(options, values, "GB")
    capacities = [option.capacity_bytes for option in options]
    if any(capacities):
        data.append(
            {
                "type": "scatter", "mode": "markers", "name": "the chip has", "y": list(range(len(options))),
                "x": [capacity and capacity / 1e9 for capacity in capacities], "meta": {"group": -1},
                "marker": {"symbol": "line-ns", "size": 16, "line": {"width": 2, "color": "@ink"}},
                "hovertemplate": "the chip has %{x:.4~g} GB<extra></extra>",
            }
        )  # fmt: skip
    how = "Memory of the rank that needs most. A bar that passes its mark does not fit. 1 GB is 10⁹ bytes."
    return Figure("memory", "Memory of each option", how, data, _bar_layout(options, "GB"), height=_height(options))


def time_bars(options: Sequence[Option]) -> Figure:
    """Seconds per million tokens by group."""
    scales = [_TOKENS / option.tokens_per_step for option in options]
    steps = [option.step.groups if option.step is not None else {} for option in options]
    values = {
        name: [groups.get(name, 0.0) * scale for groups, scale in zip(steps, scales, strict=True)]
        for name in STEP_GROUPS
    }
    how = "Seconds for a million tokens of all chips together, since the steps of the options differ in size."
    data = _bars(options, values, "s")
    return Figure(
        "time", "Time of each option", how, data, _bar_layout(options, "s per million tokens"), height=_height(options)
    )


def _bars(options: Sequence[Option], values: dict[str, list[float]], unit: str) -> list[Row]:
    shown = [(name, found) for name, found in values.items() if any(found)]
    return [
        {
            "type": "bar", "orientation": "h", "name": name, "x": [float(f"{value:.5g}") for value in found],
            "y": list(range(len(options))), "meta": {"group": -1},
            "marker": {"color": colour(place, None if place < 8 else 0.5)},
            "hovertemplate": f"{name} %{{x:.4~g}} {unit}<extra></extra>",
        }
        for place, (name, found) in enumerate(shown)
    ]  # fmt: skip


def _bar_layout(options: Sequence[Option], title: str) -> Row:
    clusters = len({option.cluster for option in options}) > 1
    recipes = len({option.recipe for option in options}) > 1
    labels = [
        plain(
            " · ".join(
                filter(None, [option.recipe.title if recipes else axes_text(option.layout), option.cluster * clusters])
            )
        )
        for option in options
    ]
    places = list(range(len(options)))
    return {
        "barmode": "stack", "showlegend": True, "bargap": 0.3,
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {"tickvals": places, "ticktext": labels, "range": [len(options) - 0.5, -0.5], "type": "linear"},
    }  # fmt: skip


def _height(options: Sequence[Option]) -> int:
    return 150 + _LINE * len(options)


def roofline(roof: Roof) -> Figure:
    """The chip's roof, and the matmuls of the best option under it."""
    low = min([1.0, *(point.intensity for point in roof.points)])
    high = 4 * max(
        [point.intensity for point in roof.points]
        + [peak * 1e12 / roof.bytes_per_second for peak in roof.peaks.values()]
    )
    data: list[Row] = []
    for place, (name, peak) in enumerate(roof.peaks.items()):
        ridge = peak * 1e12 / roof.bytes_per_second
        data.append(
            {
                "type": "scatter", "mode": "lines", "name": plain(name), "meta": {"group": -1},
                "x": [low, ridge, high], "y": [low * roof.bytes_per_second / 1e12, peak, peak],
                "line": {"color": colour(place), "width": 2},
                "hovertemplate": f"{plain(name)}: at most %{{y:.4~g}} TFLOP/s<extra></extra>",
            }
        )  # fmt: skip
    data.append(
        {
            "type": "scatter", "mode": "markers", "name": "matmuls", "meta": {"group": -1},
            "x": [point.intensity for point in roof.points], "y": [point.tflops for point in roof.points],
            "customdata": [plain(f"{point.name} ({point.shape})") for point in roof.points],
            "marker": {"size": 9, "color": "@ink", "symbol": symbol_of(0)},
            "hovertemplate": "%{customdata}<br>%{x:.3~g} FLOP/B, %{y:.4~g} TFLOP/s<extra></extra>",
        }
    )  # fmt: skip
    layout: Row = {
        "showlegend": True,
        "xaxis": {"title": {"text": "operations per byte of memory traffic"}, "type": "log"},
        "yaxis": {"title": {"text": "TFLOP/s"}, "type": "log"},
    }
    how = (
        f"Lines are what {roof.chip} reaches: memory bandwidth on the left, a format's rate on the right, both times their "
        "measured shares. Points are the matmuls of the best option, forward; those on the slope wait for memory."
    )
    return Figure("roofline", "Roofline of the best option", how, data, layout, height=380)


def scaling_curve(sizes: Sequence[Option]) -> Figure:
    """Tokens per second against the number of chips, beside proportional growth."""
    chips = [option.num_chips for option in sizes]
    rates = [option.tokens_per_second or 0.0 for option in sizes]
    bands = [option.confidence()["tokens_per_second"] for option in sizes]
    ideal = [rates[0] * number / chips[0] for number in chips]
    shares = [rate / best for rate, best in zip(rates, ideal, strict=True)]
    data: list[Row] = [
        {
            "type": "scatter", "mode": "lines", "x": [*chips, *reversed(chips)], "meta": {"group": -1}, "fill": "toself",
            "y": [*(low for low, _ in bands), *(high for _, high in reversed(bands))], "fillcolor": colour(0, 0.18),
            "line": {"width": 0}, "hoverinfo": "skip", "showlegend": False,
        },
        {
            "type": "scatter", "mode": "lines", "name": "in proportion", "x": chips, "y": ideal, "meta": {"group": -1},
            "line": {"color": "@muted", "width": 1, "dash": "dash"}, "hoverinfo": "skip",
        },
        {
            "type": "scatter", "mode": "lines+markers", "name": plain(sizes[0].recipe.title), "x": chips, "y": rates,
            "meta": {"group": -1}, "line": {"color": colour(0), "width": 2},
            "customdata": [f"{plain(axes_text(o.layout))}, efficiency {s:.0%}" for o, s in zip(sizes, shares, strict=True)],
            "hovertemplate": "%{x} chips: %{y:,.4~g} tokens/s<br>%{customdata}<extra></extra>",
        },
    ]  # fmt: skip
    layout: Row = {
        "showlegend": True,
        "xaxis": {
            "title": {"text": "chips"},
            "type": "log",
            "tickvals": chips,
            "ticktext": [f"{number:,}" for number in chips],
        },
        "yaxis": {"title": {"text": "tokens per second"}, "type": "log", "dtick": "D2", "tickformat": "~s"},
    }
    how = (
        "Each point is the best layout on that many chips, from the smallest number on which the model fits. The band holds four "
        "times out of five."
    )
    return Figure("scaling", "More and fewer chips", how, data, layout, height=380)
