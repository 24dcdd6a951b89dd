"""The page of runs: one recipe or many, with costs, figures, findings, events and settings.

Its tables equal the terminal's. Lost updates are the audit's last values, as in the verdict: the
first large steps dominate sums over a run, which hide losses at a small learning rate. If the
diagnosis fails, its section says so.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
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
from narrowgauge.report.page_runs import PageRun, colours_of, page_runs
from narrowgauge.report.run_tables import (
    ROUTINE,
    event_table,
    frequencies_alone,
    setting_tables,
)
from narrowgauge.runs.finding import counted, listed, told
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Table, name_columns, text_columns

SECTIONS: dict[str, str] = {
    "verdict": "Verdict", "diagnosis": "Diagnosis", "costs": "Cost", "loss": "Loss", "layers": "Layers", "ranges": "Ranges",
    "history": "Gradients", "events": "Events", "environment": "Environment",
}  # fmt: skip
"""Headings of the page's sections in order, by id. A section with nothing to show is left out."""


def render(comparison: Comparison, refresh: int = 0) -> str:
    """Return the report on a comparison as one HTML document.

    Runs may be unfinished or without gauges. A browser loads the page again after ``refresh``
    seconds; 0 is never.

    Invariant: the document fetches nothing and shows every name and message as text. The same runs
    give the same document.

    Cost: about half a second per ten thousand steps, half of it for the diagnosis. The document is 2 MB for
        Plotly plus about 0.1 MB per run.
    """
    runs = page_runs(comparison)
    readings = run_readings(runs)
    verdict = differences(comparison)
    ranges = [ranges_figure(run.name, run.inside.histograms) for run in runs]
    figures = {"verdict": [verdict] if verdict else [], "ranges": list(filter(None, ranges))[:1]}
    figures |= comparison_figures(runs, comparison.baseline)
    data: Row = {"figures": {}, "gauges": [{"heat": run.inside.heat_maps} for run in runs]}
    for figure in chain(*figures.values()):
        layout = figure.layout | {"height": figure.height}
        data["figures"][figure.name] = {"data": figure.data, "layout": layout}
    differing, shared = setting_tables(runs)
    words: dict[str, Any] = {
        "title": title_of(runs), "subtitle": _subtitle(runs), "verdict": verdict_of(comparison, readings),
        "cost_table": comparison.table(), "colours": colours_of(comparison), "readings": readings,
        "figures": figures, "runs": runs, "metrics": HEAT_MAPS, "events": event_table(runs),
        "routine": ROUTINE, "settings_apart": differing, "settings": shared,
    }  # fmt: skip
    template = environment().get_template("sections.html.j2")
    macros: Any = template.make_module({**words, "headings": SECTIONS})
    sections = {}
    for name in SECTIONS:
        html = getattr(macros, f"{name}_section")().strip()
        if html:
            sections[name] = Markup(html)
    return document(data, **words, refresh=refresh, sections=sections, headings=SECTIONS)


def verdict_of(comparison: Comparison, readings: RunReadings) -> list[str]:
    """Return the sentences of the verdict: of one recipe, its loss and what its record shows."""
    if len(comparison.classes) != 1:
        return list(comparison.verdict)
    ((label, recipe),) = comparison.classes.items()
    words = [f"{label} is unfinished."]
    if recipe.row["val_loss"] is not None:
        words = [f"{label} has a validation loss of {recipe.row['val_loss']:.4f}."]
    words += frequencies_alone(recipe.runs[0].run.run)
    if readings.table.rows:
        words.append(
            f"{counted(len(readings.table.rows), 'kind')} of readings beyond their bound: below."
        )
    return [*words, *readings.lines]


def title_of(runs: Sequence[PageRun]) -> str:
    """Return the title of a page of runs."""
    models = dict.fromkeys(Path(str(run.run.config.get("model", "a model"))).name for run in runs)
    labels = dict.fromkeys(run.recipe for run in runs)
    recipes = listed(labels) if len(labels) <= 4 else f"{len(labels)} recipes"
    return f"{listed(models)} in {recipes}"


def _subtitle(runs: Sequence[PageRun]) -> str:
    """Return the common properties of all runs: text, length and device."""
    words = []
    for table, name in (("config", "data"), ("config", "steps"), ("machine", "device")):
        values = {run.run.run.get(table, {}).get(name) for run in runs}
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


def run_readings(runs: Iterable[PageRun]) -> RunReadings:
    """Return the diagnosis of a page's runs."""
    kinds: dict[tuple[str, str, str], list[tuple[int, Reading]]] = {}
    lines = []
    healthy: dict[str, list[str]] = {}
    for run in runs:
        diagnosis = run.inside.diagnosis
        if isinstance(diagnosis, str):
            lines.append(
                f"{run.name}: the diagnosis failed, which concerns nothing else on this page "
                f"({diagnosis})."
            )
        elif diagnosis.ok:
            healthy.setdefault(diagnosis.verdict, []).append(run.name)
        else:
            for reading in diagnosis.readings:
                kind = (run.recipe, reading.what, reading.stage)
                kinds.setdefault(kind, []).append((run.seed, reading))
    rows = []
    for _, same_recipe in groupby(kinds.items(), key=lambda item: item[0][0]):
        folded = [_folded(kind[0], members) for kind, members in same_recipe]
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
