"""The sections of a live page that need the whole record: costs, diagnosis, layers, ranges, storage, ranks.

They take about two seconds per ten thousand steps, so they are made in a process of their own, at low priority, by the same
code as ``narrowgauge report``; it reads the run folders, and writes what it made to its standard output as JSON.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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
from narrowgauge.report.runs_page import MARKED, marked, page_words, run_findings, sign_marks
from narrowgauge.runs.record import read_run

_SECTION = re.compile(r'<section id="([^"]+)".*?</section>', re.DOTALL)
_NAVIGATION = re.compile(r"<nav .*?</nav>", re.DOTALL)


def sections_of(page: str) -> dict[str, str]:
    """The sections of a page's HTML, by id and in order, and ``nav``, its links.

    Example:
        >>> sections_of('<nav a></nav><section id="loss"><p>Low</p></section>')
        {'nav': '<nav a></nav>', 'loss': '<section id="loss"><p>Low</p></section>'}
    """
    links = _NAVIGATION.search(page)
    found = {"nav": links[0]} if links else {}
    return found | {match[1]: match[0] for match in _SECTION.finditer(page)}


def body_of(words: dict[str, Any], live: Any) -> str:
    """A live page's HTML without its scripts and data, which do not change."""
    empty = dict.fromkeys(("policy", "style", "script", "live_script", "data", "gauges", "plotly"), "")
    return template("page.html.j2").render(**{**words, **empty}, live=live)


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
    empty = [Figure(name, "", "", [], {}) for name in MARKED]
    return {
        "sections": sections_of(body_of(words, live=())),
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
