"""The pages of ``narrowgauge plan``: the answer, tables and figures of a plan, of measured times, and of two launches."""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.planner.formatting import axes_text, duration_text
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.measured.launches import Attribution, attribution_lines
from narrowgauge.planner.measured.regression import Regression, regression_lines
from narrowgauge.planner.measured.scaling_law import Scaling, scaling_lines
from narrowgauge.planner.plan import sizes_of
from narrowgauge.planner.plan_report import Plan, terms_table
from narrowgauge.planner.question import MEMORY_GROUPS, STEP_GROUPS, Option
from narrowgauge.planner.time.roofline import Roof, roof_of
from narrowgauge.report.figures.palette import NUM_COLOURS, colour, plain, symbol_of
from narrowgauge.report.figures.traces import Figure
from narrowgauge.report.page import document
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Table


def render_plan(plan: Plan) -> str:
    """The page of a plan as one HTML document, which fetches nothing; 2 MB of it are Plotly."""
    name = plan.question.model
    return rendered(
        title=f"Plan of {name or 'a model'}",
        heading=name or "A model's state",
        subtitle=plan.title,
        sentences=plan.sentences(),
        figures=figures_of(plan, sizes_of(plan)),
        options=plan.tables()[0],
        terms=plan.explanation(),
    )


def render_scaling(scaling: Scaling, at: Sequence[int] = ()) -> str:
    """The page of measured times: the law through the points, and the times on the numbers of chips ``at``."""
    return rendered(
        title="Measured times",
        heading="Measured times",
        subtitle=", ".join(map(str, scaling.points)),
        sentences=scaling_lines(scaling, at),
        figures=[time_curve(scaling, at)],
    )


def render_attribution(found: Attribution) -> str:
    """The page of run folders: where their steps went."""
    return rendered(
        title="Measured runs",
        heading="Measured runs",
        subtitle=", ".join(step.name for step in found.steps),
        sentences=attribution_lines(found),
        figures=[step_bars(found)],
        terms=[terms_table(step.terms, "s", f"A step of {step.name}") for step in found.steps],
    )


def render_regression(found: Regression) -> str:
    """The page of two launches: each term of the step before and after."""
    pairs = ((found.before, found.before_step), (found.after, found.after_step))
    return rendered(
        title=f"{found.before.name} and {found.after.name}",
        heading="A launch changed",
        subtitle=f"{found.before.name}, then {found.after.name}",
        sentences=regression_lines(found),
        figures=[term_bars(found)],
        terms=[terms_table(step, "s", f"A step of {launch.name}") for launch, step in pairs],
    )


def rendered(
    *,
    title: str,
    heading: str,
    subtitle: str,
    sentences: Sequence[str],
    figures: Sequence[Figure],
    options: Table | None = None,
    terms: Sequence[Table] = (),
    parts: str = "Terms",
    made_from: str = "what was asked, formulas and published figures; nothing was trained for it",
) -> str:
    """A page of one answer: sentences, of which the first leads, figures and tables.

    Args:
        options: a table to sort.
        terms: tables to unfold, under the heading ``parts``.
        made_from: what the page was made from, for its footer.
    """
    links = {
        "verdict": "Answer",
        "options": "Options" if options else "",
        "figures": "Figures",
        "terms": terms and parts,
    }
    return document(
        "plan.html.j2",
        figures,
        title=title,
        heading=heading,
        subtitle=subtitle,
        sentences=[sentence.strip() for sentence in sentences],
        options=options,
        figures=figures,
        terms=terms,
        parts=parts,
        made_from=made_from,
        links={name: label for name, label in links.items() if label},
    )


# ── figures of a plan: memory and time of its options, the roofline of its best, and its scaling curve ────────────────────

_MOST_OPTIONS = 24
_LINE = 26
_TOKENS = 1e6


def figures_of(plan: Plan, sizes: Sequence[Option] = ()) -> list[Figure]:
    """The figures of a plan that have data; ``sizes`` are the best options on several numbers of chips, for the scaling curve."""
    shown = plan.options[:_MOST_OPTIONS]
    figures = [memory_bars(shown)]
    timed = [option for option in shown if option.step is not None and option.fits]
    if timed:
        figures.append(time_bars(timed))
    if plan.best.step is not None and plan.question.clusters:
        figures.append(roofline(roof_of(_best_job(plan))))
    if len(sizes) > 1:
        figures.append(scaling_curve(sizes))
    return figures


def _best_job(plan: Plan) -> Job:
    """The best option on its cluster, or on the whole of which that is a part: the chips are the same."""
    question, best = plan.question, plan.best
    named = {cluster.name: cluster for cluster in question.clusters}
    cluster = named.get(best.cluster, question.clusters[0])
    return Job(question.architecture, best.recipe, best.layout, cluster, best.sequence_length, question.shares)


def memory_bars(options: Sequence[Option]) -> Figure:
    """Bytes of the worst rank by group, and what the chips have."""
    values = {name: [option.memory.groups.get(name, 0.0) / 1e9 for option in options] for name in MEMORY_GROUPS}
    data = _bars(values, "GB")
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
    layout = _layout(_labels(options), "GB", "stack")
    return Figure("memory", "Memory of each option", how, data, layout, height=_height(options))


def time_bars(options: Sequence[Option]) -> Figure:
    """Seconds per million tokens by group."""
    scales = [_TOKENS / option.tokens_per_step for option in options]
    steps = [option.step.groups if option.step is not None else {} for option in options]
    values = {
        name: [groups.get(name, 0.0) * scale for groups, scale in zip(steps, scales, strict=True)]
        for name in STEP_GROUPS
    }
    how = "Seconds for a million tokens of all chips together, since the steps of the options differ in size."
    data = _bars(values, "s")
    layout = _layout(_labels(options), "s per million tokens", "stack")
    return Figure("time", "Time of each option", how, data, layout, height=_height(options))


def _bars(values: dict[str, list[float]], unit: str) -> list[Row]:
    shown = [(name, found) for name, found in values.items() if any(found)]
    return [_bar(name, found, place, unit) for place, (name, found) in enumerate(shown)]


def _labels(options: Sequence[Option]) -> list[str]:
    clusters = len({option.cluster for option in options}) > 1
    recipes = len({option.recipe for option in options}) > 1
    parts = [
        (option.recipe.title if recipes else axes_text(option.layout), option.cluster * clusters) for option in options
    ]
    return [" · ".join(filter(None, each)) for each in parts]


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


# ── figures of measured times: the law through the points, where steps went, terms of two launches ────────────────────────

_MARKS = 49
_MOST_TERMS = 20
_PART_LINE = 34
_UNITS = ((86_400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"), (1e-3, "milliseconds"))


def time_curve(scaling: Scaling, at: Sequence[int] = ()) -> Figure:
    """Time against the number of chips: the points, the law with its interval, what no number of chips goes below."""
    sizes = [*(point.chips for point in scaling.points), *at]
    low, high = max(1, min(sizes) / 2), 2 * max(sizes)
    chips = [low * (high / low) ** (place / (_MARKS - 1)) for place in range(_MARKS)]
    scale, unit = time_unit_of([point.seconds for point in scaling.points])
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
    how = "Points are measured. The line is the law that fits them, its band is the 80 % interval."
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
    return [band, law, _line(f"never below {duration_text(least)}", chips, [least / scale] * len(chips), "dot")]


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
    scale, unit = time_unit_of([step.terms.total for step in found.steps])
    names = dict.fromkeys(term.name for step in found.steps for term in step.terms)
    rows = [{term.name: term.value / scale for term in step.terms} for step in found.steps]
    data = [_bar(name, [row.get(name, 0.0) for row in rows], place, unit) for place, name in enumerate(names)]
    labels = [f"{step.name}, {step.num_ranks} ranks" for step in found.steps]
    how = "Time of a step of each run, as it was measured."
    return Figure(
        "steps", "Where the steps went", how, data, _layout(labels, unit, "stack"), height=150 + _PART_LINE * len(rows)
    )


def term_bars(found: Regression) -> Figure:
    """Seconds of each term of the step that changed, in both launches, the largest change first."""
    shown = found.changes[:_MOST_TERMS]
    scale, unit = time_unit_of([max(change.before, change.after) for change in shown] or [1.0])
    data = [
        _bar(found.before.name, [change.before / scale for change in shown], 0, unit),
        _bar(found.after.name, [change.after / scale for change in shown], 1, unit),
    ]
    labels = [f"{change.group}: {change.name}" for change in shown]
    how = "Terms of a step by the model, for the same tokens, the largest change first. Terms that are equal are left out."
    height = 150 + 2 * _PART_LINE * max(1, len(shown))
    return Figure("terms-changed", "Terms before and after", how, data, _layout(labels, unit, "group"), height=height)


def time_unit_of(seconds: Sequence[float]) -> tuple[float, str]:
    """The seconds and the name of the unit in which the largest of some times is at least two.

    Example:
        >>> time_unit_of([864000.0]), time_unit_of([30.0]), time_unit_of([0.2])
        ((86400.0, 'days'), (1.0, 'seconds'), (0.001, 'milliseconds'))
    """
    return next((unit for unit in _UNITS if max(seconds) >= 2 * unit[0]), _UNITS[-1])


def _bar(name: str, values: Sequence[float], place: int, unit: str) -> Row:
    return {
        "type": "bar", "orientation": "h", "name": plain(name), "x": [float(f"{value:.5g}") for value in values],
        "y": list(range(len(values))), "meta": {"group": -1},
        "marker": {"color": colour(place, None if place < NUM_COLOURS else 0.5)},
        "hovertemplate": f"{plain(name)} %{{x:.4~g}} {unit}<extra></extra>",
    }  # fmt: skip


def _layout(labels: Sequence[str], title: str, mode: str) -> Row:
    return {
        "barmode": mode, "showlegend": True, "bargap": 0.3,
        "xaxis": {"title": {"text": title}, "rangemode": "tozero"},
        "yaxis": {
            "tickvals": list(range(len(labels))), "ticktext": list(map(plain, labels)),
            "range": [len(labels) - 0.5, -0.5], "type": "linear",
        },
    }  # fmt: skip
