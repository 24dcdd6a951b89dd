"""The report: runs in, one HTML file out, which opens from a disk without a network and can be sent by mail.

Everything is inside: the tables as plain HTML, which need no script; the figures as data; Plotly, compressed. A policy in
the head forbids the page to fetch anything and to run any script but the two of this package, named by their digests. The
template escapes everything that comes from a run, so a tensor's name, whatever it holds, can only be read.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from importlib import resources
from typing import Any

import jinja2
import markupsafe

from narrowgauge.analysis.comparison.comparison import Comparison
from narrowgauge.report.embedding import digest_of, embedded, packed, plotly_script
from narrowgauge.report.figures import comparison_figures
from narrowgauge.report.groups import Group, groups_of, run_names
from narrowgauge.report.heat_maps import HEAT_MAPS, heat_maps
from narrowgauge.report.histograms import SHOWN_FORMATS, format_ranges, histograms
from narrowgauge.report.history_figures import absent, event_strip
from narrowgauge.report.marks import DASHES, NUM_COLOURS, dash_of, symbol_of
from narrowgauge.report.page_tables import (
    COLUMN_HINTS,
    MAX_REPETITIONS,
    cost_table,
    environment,
    equal_time_table,
    event_rows,
)
from narrowgauge.report.rank_figures import RANK_COLUMNS, rank_rows
from narrowgauge.report.run_findings import marked, run_findings, sign_marks
from narrowgauge.report.samples import Samples
from narrowgauge.report.traces import Figure
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row


def render(found: Comparison, title: str = "") -> str:
    """The report on a comparison as one HTML document.

    Invariant: the document fetches nothing and shows every name and message as text. The same runs give the same document.

    Args:
        found: a comparison of runs, finished or not, with gauges or without.
        title: of the page.

    Raises:
        RecordError: a run's record is damaged.
        NarrowgaugeError: plotly is not installed.

    Cost: about two seconds per ten thousand steps, a third of them the diagnosis; the document is 2 MB for Plotly and some
        0.1 MB per run.
    """
    groups = groups_of(found)
    named = run_names(groups)
    samples = [sampled for group in groups for sampled in group.samples]
    diagnosis = run_findings(groups)
    drawn = comparison_figures(groups, found.baseline)
    figures = {name: [marked(figure, diagnosis.rows) for figure in section] for name, section in drawn.items()}
    plotly = plotly_script()
    strip = event_strip(named)
    if strip is not None:
        strip["data"] += sign_marks(diagnosis.rows)
    events, num_more = event_rows(named)
    ranks, num_more_ranks = rank_rows(named)
    data = {
        "figures": {figure.name: spec_of(figure) for section in figures.values() for figure in section},
        "strip": strip,
        "formats": format_ranges(),
    }
    script = asset("page.js")
    page = template("page.html.j2").render(
        title=title or (groups[0].label if len(groups) == 1 else f"{len(groups)} recipes compared"),
        subtitle=_subtitle([run for run, _ in named]),
        groups=groups,
        named=named,
        costs=cost_table(groups, found),
        hints=COLUMN_HINTS,
        equal_time=equal_time_table(groups, found),
        comparison=found,
        diagnosis=diagnosis,
        figures=figures,
        absent=absent(groups, figures["history"]),
        samples=samples,
        # First the run whose worst tensor lost most at the end; of healthy runs the first.
        shown=min(range(len(samples)), key=lambda run: round(samples[run].lowest_edq, 1), default=0),
        metrics=HEAT_MAPS,
        strip=strip,
        ranks=ranks,
        rank_columns=RANK_COLUMNS,
        num_more_ranks=num_more_ranks,
        events=events,
        num_more_events=num_more,
        environment=environment(named),
        policy=f"'{digest_of(script)}' '{plotly.digest}'",
        style=markupsafe.Markup(asset("page.css")),
        script=markupsafe.Markup(script),
        data=markupsafe.Markup(embedded(data)),
        gauges=packed(_gauge_data(groups, samples)),
        plotly=plotly.packed,
        formats=SHOWN_FORMATS,
    )
    return page.lstrip()


def _subtitle(runs: Sequence[Run]) -> str:
    """What all runs share: model, text, length and device."""
    configs = [run.config for run in runs]
    shared = [
        [config.get("model") for config in configs],
        [config.get("data") for config in configs],
        [f"{config['steps']} steps" if "steps" in config else None for config in configs],
        [run.run.get("machine", {}).get("device") for run in runs],
    ]
    words = [str(values[0]) for values in shared if values and values[0] and len(set(map(str, values))) == 1]
    return " · ".join([*words, f"{len(runs)} run{'' if len(runs) == 1 else 's'}"])


def spec_of(figure: Figure) -> Row:
    """A figure as the page's script takes it."""
    view = figure.views[0][0] if figure.views else None
    return {"data": figure.data, "layout": figure.layout | {"height": figure.height}, "view": view}


def _gauge_data(groups: Sequence[Group], samples: Sequence[Samples]) -> list[Row]:
    maps = heat_maps([found.steps for found in samples], [found.metrics for found in samples])
    bars = histograms(samples, [group.index for group in groups for _ in group.samples])
    return [{"heat": heat, "histogram": histogram} for heat, histogram in zip(maps, bars, strict=True)]


@functools.cache
def template(name: str) -> jinja2.Template:
    """A template of this package, which escapes everything."""
    environment = jinja2.Environment(
        loader=jinja2.FunctionLoader(asset),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["breakable"] = _breakable
    environment.globals |= {
        "symbol_of": symbol_of,
        "dash_of": dash_of,
        "num_colours": NUM_COLOURS,
        "solid": DASHES[0],
        "max_repetitions": MAX_REPETITIONS,
    }
    return environment.get_template(name)


def _breakable(text: Any) -> markupsafe.Markup:
    """Text whose long names may break after a dot, a slash or an underscore, and nowhere else."""
    return markupsafe.Markup(re.sub(r"(?<=\w)([._/])(?=[A-Za-z_])", r"\1<wbr>", str(markupsafe.escape(text))))


def asset(name: str) -> str:
    """A file of ``templates/``."""
    return (resources.files(__package__) / "templates" / name).read_text(encoding="utf-8").strip()
