"""The pages of ``narrowgauge plan``: the answer, tables and figures of a plan, of measured times, and of two launches."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import markupsafe

from narrowgauge.planner.attribution import Attribution, attribution_lines
from narrowgauge.planner.plan import sizes_of
from narrowgauge.planner.plan_report import Plan, terms_table
from narrowgauge.planner.regression import Regression, regression_lines
from narrowgauge.planner.scaling_answer import lines
from narrowgauge.planner.scaling_law import Scaling
from narrowgauge.report.embedding import digest_of, embedded, packed, plotly_script
from narrowgauge.report.measured_figures import step_bars, term_bars, time_curve
from narrowgauge.report.plan_figures import figures_of
from narrowgauge.report.render import asset, spec_of, template
from narrowgauge.report.traces import Figure
from narrowgauge.runs.atomic_io import AGAIN, write_whole
from narrowgauge.runs.schema import Row
from narrowgauge.spec.tables import Table


def write_page(text: str, page: Path) -> Path:
    """Write a page.

    Args:
        text: the document.
        page: the file; one that exists is replaced.
    Returns:
        The file.
    Raises:
        RecordError: it cannot be written.
    """
    write_whole(page, text.encode(), AGAIN)
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
    """The page of measured times: the law through the points.

    Args:
        scaling: the fit.
        at: numbers of chips whose time was asked for.
    """
    return rendered(
        title="Measured times",
        heading="Measured times",
        subtitle=", ".join(map(str, scaling.points)),
        sentences=lines(scaling, at),
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
    """A page of one answer: sentences, figures and tables.

    Args:
        title, heading, subtitle: of the page.
        sentences: the answer; the first one leads.
        figures: drawn under it.
        options: a table to sort.
        terms: tables to unfold.
        parts: the heading of those.
        made_from: what the page was made from, for its footer.
    """
    script, plotly = asset("page.js"), plotly_script()
    data: Row = {"figures": {figure.name: spec_of(figure) for figure in figures}, "strip": None, "formats": []}
    links = {
        "verdict": "Answer",
        "options": "Options" if options else "",
        "figures": "Figures",
        "terms": terms and parts,
    }
    page = template("plan.html.j2").render(
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
        policy=f"'{digest_of(script)}' '{plotly.digest}'",
        style=markupsafe.Markup(asset("page.css")),
        script=markupsafe.Markup(script),
        data=markupsafe.Markup(embedded(data)),
        gauges=packed([]),
        plotly=plotly.packed,
    )
    return page.lstrip()
