"""The report: runs in, one HTML file out, which opens from a disk without a network and can be sent by mail.

Everything is inside: the tables as plain HTML, which need no script; the figures as data; Plotly, compressed, which the
browser inflates. A policy in the head forbids the page to fetch anything and to run any script but the two of this
package, named by their digests. So a tensor's name, whatever it holds, can only ever be read.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Sequence
from importlib import resources
from typing import Any

from narrowgauge.comparison.comparison import Comparison, compare_runs
from narrowgauge.report.cost_tables import column_hints, cost_table, environment, equal_time_table
from narrowgauge.report.event_table import events_table
from narrowgauge.report.figures import comparison_figures
from narrowgauge.report.groups import Group, group_runs, run_names
from narrowgauge.report.heat_map_metrics import MEASURES
from narrowgauge.report.heat_maps import heat_maps
from narrowgauge.report.histograms import format_ranges, histograms
from narrowgauge.report.history_figures import absent, event_strip
from narrowgauge.report.marks import swatch
from narrowgauge.report.markup import text
from narrowgauge.report.packing import digest_of, packed, plotly_script
from narrowgauge.report.samples import Samples
from narrowgauge.report.traces import Figure
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row

_HISTOGRAM_HOW = (
    "How many values lie in each power of two, as a share; the axis of shares counts hundredfold steps. The thick bars on "
    "top are the ranges of number formats, the thin ones their subnormals, where precision fades to nothing. The shaded "
    "range is the format you chose: what lies left of the dotted line would become zero, whatever lies right of the shade "
    "overflows. A scale moves a histogram sideways, so it is the width that a format must hold; the place can be mended. "
    "What is smaller than 2⁻⁶⁴ stands in the first bar."
)
_EVENTS_HOW = (
    "One line per run over its steps. A mark is an event, its shape the kind; warm colours ask for attention. Point at a "
    "mark to read it; the table below says the same, with advice."
)


def render(
    runs: Sequence[Run],
    *,
    rows: Sequence[Row] = (),
    verdict: Sequence[str] = (),
    title: str = "",
    yardstick: str | None = None,
) -> str:
    """The report on some runs as one HTML document.

    Law: the document fetches nothing and shows every name and message as text. The same runs give the same document.

    Args:
        runs: finished or not, with gauges or without.
        rows: of ``compare.json``; without them the cost table is made from the runs.
        verdict: sentences to stand on top.
        title: of the page.
        yardstick: the recipe that the others are held against; by default the comparison's own choice.

    Returns:
        HTML.

    Raises:
        RecipeError: no run is of the yardstick.
        RecordError: a run's record is damaged.
        NarrowgaugeError: plotly is not installed.

    Cost: about a second per ten thousand steps; the document is 2 MB for Plotly and some 0.1 MB per run.
    """
    found = compare_runs(runs, yardstick) if runs else None
    rows = rows or (found.rows if found else ())
    groups = group_runs(runs, rows)
    named = run_names(groups)
    samples = [found for group in groups for found in group.samples]
    figures = comparison_figures(groups, found.yardstick if found else None)
    plotly = plotly_script()
    title = title or _default_title(groups)
    sections = [
        _section("verdict", "Verdict", _verdict(verdict)) if verdict else "",
        _section("costs", "Cost", cost_table(groups, rows, found) + _hints()),
        _section("loss", "Loss", _figures(figures["loss"]), "No run has written a loss yet."),
        _section(
            "price", "Loss for its price", _price(figures["cost"], groups, found), "It takes evaluations to draw these."
        ),
        *_gauge_sections(named, samples),
        _section("history", "Scale and overflow", _figures(figures["history"]) + _absent(groups, figures["history"])),
        _section("events", "Events", _event_strip(named) + events_table(named)),
        _section("environment", "Environment", environment(named), "These runs say nothing about theirs."),
    ]
    data = {
        "figures": {figure.name: _figure_data(figure) for found in figures.values() for figure in found},
        "strip": event_strip(named),
        "formats": format_ranges(),
    }
    gauges = json.dumps(_gauge_data(groups), allow_nan=False, separators=(",", ":"))
    scripts = {"data": embedded(data), "gauges": packed(gauges), "plotly": plotly.packed}
    body = f'<p class="subtitle">{text(_subtitle(runs))}</p>\n' + "\n".join(filter(None, sections))
    return _document(title, body, _legend(groups), scripts, plotly.digest)


def embedded(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin another.

    Raises:
        ValueError: a float is not finite.

    Example:
        >>> print(embedded({"a": "</script>"}))
        {"a":"\\u003c/script\\u003e"}
    """
    said = json.dumps(value, allow_nan=False, ensure_ascii=False, separators=(",", ":"))
    for letter in "<>&\u2028\u2029":
        said = said.replace(letter, f"\\u{ord(letter):04x}")
    return said


def _default_title(groups: Sequence[Group]) -> str:
    if len(groups) == 1:
        return groups[0].label
    return f"{len(groups)} recipes compared"


def _subtitle(runs: Sequence[Run]) -> str:
    """What all runs share: model, text, length and device."""
    asked = [run.config for run in runs]
    machines = [run.run.get("machine", {}) for run in runs]
    found = [
        _shared([config.get("model") for config in asked]),
        _shared([config.get("data") for config in asked]),
        _shared([f"{config['steps']} steps" if "steps" in config else None for config in asked]),
        _shared([machine.get("device") for machine in machines]),
        f"{len(runs)} run{'' if len(runs) == 1 else 's'}",
    ]
    return " · ".join(filter(None, found))


def _shared(values: Sequence[Any]) -> str:
    return str(values[0]) if values and values[0] is not None and all(value == values[0] for value in values) else ""


def _section(name: str, heading: str, body: str, empty: str = "") -> str:
    body = body or (f'<p class="empty">{text(empty)}</p>' if empty else "")
    return f'<section id="{name}" aria-labelledby="{name}-heading"><h2 id="{name}-heading">{text(heading)}</h2>\n{body}</section>'


def _verdict(sentences: Sequence[str]) -> str:
    first, *others = sentences
    rest = "".join(f"<li>{text(sentence)}</li>" for sentence in others)
    return f'<p class="lead">{text(first)}</p>' + (f"<ul>{rest}</ul>" if rest else "")


def _hints() -> str:
    return f'<details class="hints"><summary>What the columns mean</summary><dl>{column_hints()}</dl></details>'


def _figures(figures: Sequence[Figure]) -> str:
    return f'<div class="grid">{"".join(map(_figure, figures))}</div>' if figures else ""


def _price(figures: Sequence[Figure], groups: Sequence[Group], found: Comparison | None) -> str:
    """The figures of costs, and beside them losses at equal time in numbers."""
    cards = "".join(map(_figure, figures)) + (equal_time_table(groups, found) if found else "")
    return f'<div class="grid">{cards}</div>' if cards else ""


def _figure(figure: Figure) -> str:
    buttons = [
        f'<button type="button" data-figure="{figure.name}" data-view="{view}" '
        f'aria-pressed="{"false" if place else "true"}">{text(label)}</button>'
        for place, (view, label) in enumerate(figure.views)
    ]
    buttons += [
        f'<button type="button" data-figure="{figure.name}" data-log="{axis}" aria-pressed="false">Log {axis[0]}</button>'
        for axis in figure.log_axes
    ]
    return _figure_card(figure.name, figure.title, figure.how, "".join(buttons), figure.height)


def _figure_card(name: str, title: str, how: str, controls: str = "", height: int = 340, wide: bool = False) -> str:
    return (
        f'<figure id="{name}" class="card{" wide" if wide else ""}"><div class="head"><h3>{text(title)}</h3>'
        f'<div class="controls needs-script">{controls}</div></div>'
        f'<div class="plot needs-script" data-plot="{name}" style="min-height:{height}px" role="img" aria-label="{text(title)}" '
        f'aria-describedby="{name}-how"></div><figcaption id="{name}-how">{text(how)}</figcaption></figure>'
    )


def _figure_data(figure: Figure) -> Row:
    views = [view for view, _ in figure.views]
    return {
        "data": figure.data,
        "layout": figure.layout | {"height": figure.height},
        "view": views[0] if views else None,
    }


def _gauge_sections(named: Sequence[tuple[Run, str]], samples: Sequence[Samples]) -> list[str]:
    if not any(found.num_rows for found in samples):
        return [
            _section(
                "layers",
                "Inside the layers",
                "",
                "Empty: the gauges.jsonl of these runs is missing or holds no step, so nothing was sampled per layer.",
            )
        ]
    sampled = [place for place, found in enumerate(samples) if found.num_rows]
    # The run whose worst tensor lost most at last is the one to look at first; of healthy runs the first is as good as any.
    shown = min(sampled, key=lambda place: round(samples[place].lowest_edq, 1))
    choice = "".join(
        f'<option value="{place}"{" selected" if place == shown else ""}>{text(named[place][1])}</option>'
        for place in sampled
    )
    run_choice = f'<label>Run <select data-choice="run">{choice}</select></label>'
    measures = "".join(f'<option value="{name}">{text(measure.title)}</option>' for name, measure in MEASURES.items())
    measure_choice = f'<label>Reading <select data-choice="measure">{measures}</select></label>'
    formats = "".join(
        f"<option{' selected' if row['name'] == 'float8_e4m3fn' else ''}>{row['name']}</option>"
        for row in format_ranges()
    )
    parts = []
    first = next(iter(MEASURES.values()))
    parts.append(
        _section(
            "layers",
            "Inside the layers",
            _figure_card("heat", "Every tensor over time", first.how, run_choice + measure_choice, 420, wide=True),
        )
    )
    if any(found.spans for found in samples):
        slider = (
            '<div class="slider"><label for="step-choice">Step</label><input type="range" id="step-choice" data-choice="step" '
            'min="0" max="0" value="0"><output for="step-choice" id="step-said" aria-live="polite"></output></div>'
        )
        controls = f'{run_choice}<label>Format <select data-choice="format">{formats}</select></label>{slider}'
        card = _figure_card("ranges-figure", "Exponents against formats", _HISTOGRAM_HOW, controls, 620, wide=True)
        parts.append(_section("ranges", "Ranges", card))
    else:
        parts.append(_section("ranges", "Ranges", "", "Empty: the gauges of these runs took no histograms."))
    return parts


def _gauge_data(groups: Sequence[Group]) -> list[Row]:
    samples = [found for group in groups for found in group.samples]
    places = [group.place for group in groups for _ in group.samples]
    found = zip(heat_maps(samples), histograms(samples, places), strict=True)
    return [{"heat": heat, "histogram": histogram} for heat, histogram in found]


def _absent(groups: Sequence[Group], figures: Sequence[Figure]) -> str:
    said = absent(groups, figures)
    return f'<p class="empty">{text(said)}</p>' if said else ""


def _event_strip(named: Sequence[tuple[Run, str]]) -> str:
    if not any(run.events for run, _ in named):
        return ""
    return _figure_card("strip", "When it happened", _EVENTS_HOW, height=150 + 26 * len(named), wide=True)


def _legend(groups: Sequence[Group]) -> str:
    if len(groups) < 2:
        return ""
    buttons = "".join(
        f'<button type="button" data-group="{group.place}" aria-pressed="true" title="Hide or show it in every figure">'
        f"{swatch(group.place)}{text(group.label)}</button>"
        for group in groups
    )
    return f'<div class="legend needs-script" role="group" aria-label="Recipes shown">{buttons}</div>'


def _document(title: str, body: str, legend: str, scripts: dict[str, str], digest: str) -> str:
    script, style = _asset("page.js"), _asset("page.css")
    policy = (
        f"default-src 'none'; script-src '{digest_of(script)}' '{digest}'; style-src 'unsafe-inline'; img-src data: blob:; "
        "base-uri 'none'; form-action 'none'"
    )
    links = "".join(
        f'<a href="#{name}">{label}</a>' for name, label in _LINKS.items() if f'<section id="{name}"' in body
    )
    return f"""<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta name="color-scheme" content="light dark">
<meta name="generator" content="Narrowgauge">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>{text(title)} · Narrowgauge</title>
<style>{style}</style>
</head>
<body>
<a class="skip" href="#main">Skip to the content</a>
<header>
<div class="bar"><a class="brand" href="#main">{_MARK}<span>Narrowgauge</span></a>
<nav aria-label="Sections">{links}</nav>
<button type="button" id="theme" class="needs-script" aria-label="Dark or light">◐</button></div>
{legend}
</header>
<main id="main">
<h1>{text(title)}</h1>
<noscript><p class="empty">The figures need JavaScript; the tables do not.</p></noscript>
<p class="empty" id="trouble" role="alert" hidden></p>
{body}
</main>
<footer>Made by Narrowgauge from the files of these runs.
Figures are drawn by Plotly, which is inside this page; nothing is fetched.</footer>
<script type="application/json" id="data">{scripts["data"]}</script>
<script type="text/plain" id="gauges">{scripts["gauges"]}</script>
<script type="text/plain" id="plotly">{scripts["plotly"]}</script>
<script>{script}</script>
</body>
</html>
"""


_LINKS = {
    "verdict": "Verdict",
    "costs": "Cost",
    "loss": "Loss",
    "price": "Price",
    "layers": "Layers",
    "ranges": "Ranges",
    "history": "Scale",
    "events": "Events",
    "environment": "Environment",
}

_MARK = (
    '<svg viewBox="0 0 24 24" width="22" height="22" aria-hidden="true" fill="none" stroke="currentColor" '
    'stroke-linecap="round"><path stroke-width="2" d="M9.5 2 7 22M14.5 2 17 22"/>'
    '<path stroke-width="1.6" d="M6.8 6h10.4M5.8 12h12.4M4.6 18h14.8"/></svg>'
)


@functools.cache
def _asset(name: str) -> str:
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8").strip()
