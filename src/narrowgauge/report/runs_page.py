"""The page of runs: one recipe or many, with costs, figures, findings, events and settings.

Its tables equal the terminal's. Lost updates are the audit's last values, as in the verdict: the
first large steps dominate sums over a run, which hide losses at a small learning rate. If the
diagnosis fails, its section says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter, itemgetter
from pathlib import Path
from typing import Any

from markupsafe import Markup

from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.analysis.reading import Reading, reading_table
from narrowgauge.report.figures.curves import comparison_figures
from narrowgauge.report.figures.heat_maps import HEAT_MAPS
from narrowgauge.report.figures.ranges import ranges_figure
from narrowgauge.report.figures.verdict_figure import differences
from narrowgauge.report.page import document, environment
from narrowgauge.report.recipe_groups import Group, RunDetails, groups_of
from narrowgauge.report.run_tables import (
    ROUTINE,
    event_table,
    frequencies_alone,
    range_table,
    setting_tables,
)
from narrowgauge.runs.finding import counted, listed, told
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Table, name_columns, text_columns

SECTIONS: dict[str, str] = {
    "verdict": "Verdict", "diagnosis": "Diagnosis", "costs": "Cost", "loss": "Loss", "layers": "Layers", "ranges": "Ranges",
    "history": "Gradients", "events": "Events", "environment": "Environment",
}  # fmt: skip
"""Headings of the page's sections in order, by id. A section with nothing to show is left out."""


def render(comparison: Comparison) -> str:
    """Return the report on a comparison as one HTML document.

    Runs may be unfinished or without gauges.

    Invariant: the document fetches nothing and shows every name and message as text. The same runs
    give the same document.

    Cost: about half a second per ten thousand steps, half of it for the diagnosis. The document is 2 MB for
        Plotly plus about 0.1 MB per run.
    """
    groups = groups_of(comparison)
    readings = run_readings(groups)
    named: list[tuple[Run, str]] = []
    details: list[RunDetails] = []
    indices = {}
    for group in groups:
        named += group.named
        details += group.details
        indices[group.label] = group.index
    runs = [run for run, _ in named]
    verdict = differences(groups, comparison)
    figures = {"verdict": [verdict] if verdict else []}
    figures |= comparison_figures(groups, comparison.baseline)
    drawn_ranges = [
        ranges_figure(name, run.histograms) for (_, name), run in zip(named, details, strict=True)
    ]
    figures["ranges"] = list(filter(None, drawn_ranges))[:1]
    data: Row = {"figures": {}, "gauges": []}
    for figure in chain(*figures.values()):
        layout = figure.layout | {"height": figure.height}
        data["figures"][figure.name] = {"data": figure.data, "layout": layout}
    for run in details:
        data["gauges"].append({"heat": run.heat_maps})
    differing, shared = setting_tables(named)
    words: dict[str, Any] = {
        "title": title_of(runs, list(indices)),
        "subtitle": _subtitle(runs),
        "verdict": verdict_of(comparison, groups, readings), "cost_table": comparison.table(),
        "groups": groups, "indices": indices, "comparison": comparison,
        "readings": readings, "figures": figures, "details": details,
        "metrics": HEAT_MAPS, "named": named, "events": event_table(named), "routine": ROUTINE,
        "settings_apart": differing, "settings": shared, "ranges": range_table(named, details),
    }  # fmt: skip
    template = environment().get_template("sections.html.j2")
    macros: Any = template.make_module({**words, "headings": SECTIONS})
    sections = {}
    for name in SECTIONS:
        html = getattr(macros, f"{name}_section")().strip()
        if html:
            sections[name] = Markup(html)
    return document(data, **words, sections=sections, headings=SECTIONS)


def verdict_of(comparison: Comparison, groups: Sequence[Group], readings: RunReadings) -> list[str]:
    """Return the sentences of the verdict: of one recipe, its loss and what its record shows."""
    if len(groups) != 1:
        return list(comparison.verdict)
    row = comparison.rows[0]
    words = [f"{groups[0].label} is unfinished."]
    if row["val_loss"] is not None:
        words = [f"{groups[0].label} has a validation loss of {row['val_loss']:.4f}."]
    words += frequencies_alone(groups[0].runs[0].run)
    if readings.table.rows:
        words.append(
            f"{counted(len(readings.table.rows), 'kind')} of readings beyond their bound: below."
        )
    return [*words, *readings.lines]


def title_of(runs: Sequence[Run], labels: Sequence[str]) -> str:
    """Return the title of a page of runs."""
    models = dict.fromkeys(Path(str(run.config.get("model", "a model"))).name for run in runs)
    recipes = listed(labels) if len(labels) <= 4 else f"{len(labels)} recipes"
    return f"{listed(models)} in {recipes}"


def _subtitle(runs: Sequence[Run]) -> str:
    """Return the common properties of all runs: text, length and device."""
    words = []
    for table, name in (("config", "data"), ("config", "steps"), ("machine", "device")):
        values = {run.run.get(table, {}).get(name) for run in runs}
        if len(values) == 1 and values != {None}:
            words.append(f"{values.pop()} steps" if name == "steps" else str(values.pop()))
    return " · ".join([*words, counted(len(runs), "run")])


# ── readings: a row for each kind and recipe, and one line for the runs without any

_READING_COLUMNS = (
    *name_columns(recipe="recipe"), *text_columns(seeds="seeds"),
    *reading_table([]).columns, *text_columns(what_to_do="advice"),
)  # fmt: skip


@dataclass(frozen=True)
class RunReadings:
    """Hold the readings section of a page.

    Args:
        table: readings beyond their bound, a row for each recipe and kind: the first step, and the
            numbers of the worst.
        lines: sentences about the other runs.
    """

    table: Table
    lines: Sequence[str]


def run_readings(groups: Iterable[Group]) -> RunReadings:
    """Return the diagnosis of a page's runs."""
    rows = list[Row]()
    lines = []
    healthy: dict[str, list[str]] = {}
    for group in groups:
        kinds: dict[tuple[str, str], list[tuple[int, Reading]]] = {}
        for stats, (_, name), details in zip(group.stats, group.named, group.details, strict=True):
            diagnosis = details.diagnosis
            if isinstance(diagnosis, str):
                lines.append(
                    f"{name}: the diagnosis failed, which concerns nothing else on this page "
                    f"({diagnosis})."
                )
            elif diagnosis.ok:
                healthy.setdefault(diagnosis.verdict, []).append(name)
            else:
                for reading in diagnosis.readings:
                    kind = (reading.what, reading.stage)
                    kinds.setdefault(kind, []).append((stats.seed, reading))
        folded = [_folded(group.label, members) for members in kinds.values()]
        rows += sorted(folded, key=itemgetter("step"))
    for verdict, names in healthy.items():
        lines.append(f"{told(names, 6)}: {verdict}")
    return RunReadings(Table(_READING_COLUMNS, rows), lines)


def _folded(recipe: str, members: Sequence[tuple[int, Reading]]) -> Row:
    """Return one row for the readings of one kind: of several tensors, seeds and steps."""
    seeds, readings = zip(*members, strict=True)
    worst = max(readings, key=attrgetter("excess"))
    return {
        **worst.to_dict(),
        "recipe": recipe,
        "seeds": ", ".join(map(str, sorted(set(seeds)))),
        "step": min(map(attrgetter("step"), readings)),
    }
