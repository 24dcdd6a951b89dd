"""The page of runs: one recipe or many, with costs, figures, findings, events and environment.

Its tables equal the terminal's. Lost updates are the audit's last values, as in the verdict. The first large steps dominate
sums over a run. Such sums hide losses at a small learning rate.

If the diagnosis fails, its section says so, and the measurements stay readable.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from markupsafe import Markup

from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.reading import Reading, reading_table
from narrowgauge.report.event_table import event_rows, event_strip
from narrowgauge.report.figures.curves import comparison_figures
from narrowgauge.report.figures.heat_maps import HEAT_MAPS, heat_maps
from narrowgauge.report.figures.histograms import SHOWN_FORMATS, format_ranges, histograms
from narrowgauge.report.figures.palette import colour, plain
from narrowgauge.report.figures.traces import Figure, mark
from narrowgauge.report.figures.verdict_figure import differences
from narrowgauge.report.page import document, template
from narrowgauge.report.recipe_groups import Group, Samples, groups_of, run_names
from narrowgauge.report.run_settings import environment
from narrowgauge.runs.finding import counted, told
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Table, name_columns, text_columns


def render(comparison: Comparison, title: str = "", live: bool = False) -> str:
    """Return the report on a comparison as one HTML document. Runs may be unfinished or without gauges.

    Invariant: the document fetches nothing and shows every name and message as text. The same runs give the same document.

    Cost: about two seconds per ten thousand steps, a third of them for the diagnosis. The document is 2 MB for
        Plotly plus about 0.1 MB per run.
    """
    words = page_words(comparison, groups_of(comparison), title)
    sections = sections_of(words)
    return document(
        "page.html.j2", **words, sections=sections, links={name: SECTIONS[name] for name in sections}, live=live
    )


SECTIONS: dict[str, str] = {
    "verdict": "Verdict",
    "diagnosis": "Diagnosis",
    "costs": "Cost",
    "loss": "Loss",
    "price": "Loss against cost",
    "layers": "Layers",
    "ranges": "Ranges",
    "storage": "Storage",
    "history": "Gradients",
    "events": "Events",
    "environment": "Environment",
}
"""Headings of the page's sections in order, by id."""


def sections_of(words: Mapping[str, Any]) -> dict[str, Markup]:
    """Return the non-empty sections by id, in order, each rendered separately.

    Args:
        words: result of :func:`page_words`.
    """
    macros: Any = template("sections.html.j2").make_module({**words, "headings": SECTIONS})
    rendered = {name: getattr(macros, f"{name}_section")().strip() for name in SECTIONS}
    return {name: Markup(html) for name, html in rendered.items() if html}


def page_words(comparison: Comparison, groups: Sequence[Group], title: str = "") -> dict[str, Any]:
    """Return the template's values and figures, as arguments of :func:`~narrowgauge.report.page.document`.

    Args:
        groups: groups of ``comparison``, with the lines of its figures.
    """
    named = run_names(groups)
    samples = [sampled for group in groups for sampled in group.samples]
    diagnosis = run_readings(groups)
    verdict = differences(groups, comparison)
    drawn = {"verdict": [verdict] if verdict is not None else [], **comparison_figures(groups, comparison.baseline)}
    figures = {name: [marked(figure, diagnosis) for figure in section] for name, section in drawn.items()}
    strip = event_strip(named)
    if strip is not None:
        strip["data"] += reading_marks(diagnosis)
    return {
        "drawn": [figure for section in figures.values() for figure in section],
        "strip": strip,
        "ranges": format_ranges(),
        "gauges": _gauge_data(groups, samples),
        "title": title or (groups[0].label if len(groups) == 1 else f"{len(groups)} recipes compared"),
        "subtitle": _subtitle([run for run, _ in named]),
        "groups": groups,
        "indices": {group.label: group.index for group in groups},
        "costs": comparison.table(),
        "comparison": comparison,
        "diagnosis": diagnosis,
        "figures": figures,
        "samples": samples,
        # The run whose worst tensor lost most at the end. For healthy runs, the first.
        "shown": min(range(len(samples)), key=lambda run: round(samples[run].lowest_edq, 1), default=0),
        "metrics": HEAT_MAPS,
        "named": named,
        "events": event_rows(named),
        "environment": environment(named),
        "formats": SHOWN_FORMATS,
    }


def _subtitle(runs: Sequence[Run]) -> str:
    """Return the common properties of all runs: model, text, length and device."""
    configs = [run.config for run in runs]
    shared = [
        [config.get("model") for config in configs],
        [config.get("data") for config in configs],
        [f"{config['steps']} steps" if "steps" in config else None for config in configs],
        [run.run.get("machine", {}).get("device") for run in runs],
    ]
    words = [str(values[0]) for values in shared if values and values[0] and len(set(map(str, values))) == 1]
    return " · ".join([*words, counted(len(runs), "run")])


def _gauge_data(groups: Sequence[Group], samples: Sequence[Samples]) -> list[Row]:
    maps = heat_maps([sample.steps for sample in samples], [sample.metrics for sample in samples])
    bars = histograms(samples, [group.index for group in groups for _ in group.samples])
    return [{"heat": heat, "histogram": histogram} for heat, histogram in zip(maps, bars, strict=True)]


# ── readings: a row for each kind and recipe, one line for the runs without any, and marks in the figures ─────────────────

MARKED = ("training-loss", "validation-loss", "grad-norm")
"""Figures over steps that mark each run's first reading."""
_HOW = " A dotted upright line is the first reading beyond its bound; hover over its top."
_READING_COLUMNS = (
    *name_columns(recipe="recipe"), *text_columns(seeds="seeds"),
    *reading_table([]).columns, *text_columns(what_to_do="advice"),
)  # fmt: skip


@dataclass(frozen=True)
class RunReadings:
    """Hold the readings section of a page.

    Args:
        table: readings beyond their bound, a row for each recipe and kind: the first step, and the numbers of the worst.
        first: for each run with a reading: its recipe's number, its name, its number on the page, and its first reading.
        lines: sentences about the other runs.
    """

    table: Table
    first: Sequence[tuple[int, str, int, Reading]]
    lines: Sequence[str]


def run_readings(groups: Iterable[Group]) -> RunReadings:
    """Return the diagnosis of a page's runs.

    Cost: of :func:`narrowgauge.diagnose` for each run, without reading its record again.
    """
    rows, first, lines = list[Row](), [], []
    healthy: dict[str, list[str]] = {}
    line = 0
    for group in groups:
        kinds: dict[tuple[str, str], list[tuple[int, Reading]]] = {}
        for stats, (_, name), diagnosis in zip(group.stats, group.named, group.diagnoses, strict=True):
            if isinstance(diagnosis, str):
                lines.append(f"{name}: the diagnosis failed, which concerns nothing else on this page ({diagnosis}).")
            elif diagnosis.ok:
                healthy.setdefault(diagnosis.verdict, []).append(name)
            else:
                first.append((group.index, name, line, diagnosis.readings[0]))
                for reading in diagnosis.readings:
                    kinds.setdefault((reading.what, reading.stage), []).append((stats.seed, reading))
            line += 1
        rows += sorted((_folded(group.label, members) for members in kinds.values()), key=lambda row: row["step"])
    lines += [f"{told(names, 6)}: {verdict}" for verdict, names in healthy.items()]
    return RunReadings(Table(_READING_COLUMNS, rows), first, lines)


def _folded(recipe: str, members: Sequence[tuple[int, Reading]]) -> Row:
    """Return one row for the readings of one kind: of several tensors, seeds and steps."""
    readings = [reading for _, reading in members]
    worst = max(readings, key=lambda reading: reading.excess)
    return {
        **worst.to_dict(),
        "recipe": recipe,
        "seeds": ", ".join(map(str, sorted({seed for seed, _ in members}))),
        "step": min(reading.step for reading in readings),
        "tensor": told((reading.tensor for reading in readings if reading.tensor), 1),
    }


def marked(figure: Figure, readings: RunReadings) -> Figure:
    """Add an upright line at each run's first reading to a figure over steps, if it is one of :data:`MARKED`."""
    if figure.name not in MARKED or not readings.first:
        return figure
    marks = [_mark(group, name, reading) for group, name, _, reading in readings.first]
    return dataclasses.replace(figure, data=[*figure.data, *marks], how=figure.how + _HOW)


def _mark(group: int, name: str, reading: Reading) -> Row:
    line = {"color": colour(group, 0.8), "width": 1.5, "dash": "dot"}
    words = f"{plain(reading.what)}: step {reading.step}<extra>{plain(name)}</extra>"
    return mark(reading.step, group, colour(group), line, words)


def reading_marks(readings: RunReadings) -> list[Row]:
    """Return the first readings as marks on the figure of events, which has a line per run."""
    if not readings.first:
        return []
    return [
        {
            "type": "scatter", "mode": "markers", "name": "first reading", "x": [row[3].step for row in readings.first],
            "y": [row[2] for row in readings.first], "text": [plain(row[3].what) for row in readings.first],
            "marker": {"symbol": "triangle-down", "size": 13, "color": "@accent", "line": {"width": 1, "color": "@paper"}},
            "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
        }
    ]  # fmt: skip
