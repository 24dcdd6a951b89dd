"""The page of a plan: its answer, options and terms as tables, and bars, roofline and scaling curve as figures."""

from __future__ import annotations

from pathlib import Path

import markupsafe

from narrowgauge.planner.plan import sizes_of
from narrowgauge.planner.plan_report import Plan
from narrowgauge.report.embedding import digest_of, embedded, packed, plotly_script
from narrowgauge.report.plan_figures import figures_of
from narrowgauge.report.render import asset, spec_of, template
from narrowgauge.runs.atomic_io import AGAIN, write_whole
from narrowgauge.runs.schema import Row


def write_plan(plan: Plan, page: Path) -> Path:
    """Write the page of a plan.

    Args:
        plan: to show.
        page: the file; one that exists is replaced.
    Returns:
        The file.
    Raises:
        RecordError: it cannot be written.
    """
    write_whole(page, render_plan(plan).encode(), AGAIN)
    return page


def render_plan(plan: Plan) -> str:
    """The page of a plan as one HTML document, which fetches nothing.

    Args:
        plan: to show.
    Returns:
        The document, 2 MB of which are Plotly.
    Raises:
        NarrowgaugeError: plotly is not installed.
    """
    figures = figures_of(plan, sizes_of(plan))
    script, plotly = asset("page.js"), plotly_script()
    data: Row = {"figures": {figure.name: spec_of(figure) for figure in figures}, "strip": None, "formats": []}
    links = {"verdict": "Answer", "options": "Options", "figures": "Figures", "terms": "Terms"}
    page = template("plan.html.j2").render(
        title=f"Plan of {plan.question.model or 'a model'}",
        heading=plan.question.model or "A model's state",
        subtitle=plan.title,
        sentences=plan.sentences(),
        options=plan.tables()[0],
        figures=figures,
        terms=plan.explanation(),
        links=links,
        policy=f"'{digest_of(script)}' '{plotly.digest}'",
        style=markupsafe.Markup(asset("page.css")),
        script=markupsafe.Markup(script),
        data=markupsafe.Markup(embedded(data)),
        gauges=packed([]),
        plotly=plotly.packed,
    )
    return page.lstrip()
