"""The sections of a live page that need the whole record: costs, diagnosis, layers, ranges, storage, ranks.

They take about two seconds per ten thousand steps, so they are made in a process of their own, at low priority, by the same
code as ``narrowgauge report``; it reads the run folders, and writes what it made to its standard output as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.report.figures.traces import Figure
from narrowgauge.report.page import spec_of, template
from narrowgauge.report.publishing import resolve_of, title_of
from narrowgauge.report.recipe_groups import groups_of
from narrowgauge.report.runs_page import MARKED, links_of, marked, page_words, run_findings, sections_of, sign_marks
from narrowgauge.runs.record import read_run


def whole_report(folders: Sequence[Path], named: Sequence[Path]) -> dict[str, Any]:
    """What a page of these runs shows beside the figures over steps.

    Args:
        folders: of the runs.
        named: the paths that led to them.

    Returns:
        ``sections``, HTML by id; ``figures`` and ``gauges``, as the page's script takes them; ``marks`` and ``signs``: the first
        signs of what the diagnosis found, as traces for figures over steps and for the figure of events.
    """
    found = compare_runs([read_run(folder) for folder in folders], resolve=resolve_of(named))
    groups = groups_of(found)
    diagnosis = run_findings(groups)
    words = page_words(found, groups, title_of(found), diagnosis)
    sections = sections_of(words)
    nav = template("nav.html.j2").render(links=links_of(sections), live=())
    empty = [Figure(name, "", "", [], {}) for name in MARKED]
    return {
        "sections": {"nav": nav.strip(), **sections},
        "figures": {figure.name: spec_of(figure) for figure in words["drawn"]},
        "gauges": words["gauges"],
        "marks": {figure.name: marked(figure, diagnosis.rows).data for figure in empty},
        "signs": sign_marks(diagnosis.rows),
    }


def main() -> None:
    """Print the report on folders and the paths that led to them, a JSON object of both on standard input."""
    with contextlib.suppress(AttributeError, OSError):
        os.nice(10)
    asked = json.load(sys.stdin)
    try:
        made = whole_report(*([Path(path) for path in asked[name]] for name in ("folders", "named")))
    except NarrowgaugeError as error:
        made = {"trouble": str(error)}
    json.dump(made, sys.stdout, allow_nan=False)


if __name__ == "__main__":
    main()
