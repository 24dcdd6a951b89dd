"""What the diagnosis says of the runs of a page: a row per finding, one line for all healthy runs, and marks in the figures.

A page shows measurements, and they stay readable whatever the diagnosis does: where it fails, its section says so.
"""

from __future__ import annotations

import dataclasses
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowgauge.analysis.comparison.labels import listed
from narrowgauge.analysis.diagnosis.diagnosis import Diagnosis
from narrowgauge.report.groups import Group
from narrowgauge.report.marks import colour, plain
from narrowgauge.report.traces import Figure
from narrowgauge.runs.schema import Row

MARKED = ("training-loss", "validation-loss", "grad-norm")
"""Figures over steps in which first signs are marked."""
_SHOWN_SIGNS, _ASKED = 3, 4
_NAMED = 12
"""Healthy runs that are named."""
_HOW = " A dotted upright line is the first sign of what the diagnosis found; hover over its top."


@dataclass(frozen=True)
class FindingRow:
    """A row of the section: one finding of a run, or that its record does not tell.

    Args:
        run: its name on the page.
        group: the number of its recipe on the page.
        line: its number among the runs of the page.
        cause: its name; empty where none is known.
        what: the cause in words with its probability, or the causes in question.
        step: of the first sign.
        signs: what shows it.
        remedy: what to do, or what to measure.
        command: that tells more.
    """

    run: str
    group: int
    line: int
    cause: str
    what: str
    step: int | None
    signs: Sequence[str]
    remedy: str
    command: str


@dataclass(frozen=True)
class RunFindings:
    """The section of a page.

    Args:
        rows: the findings, by run.
        lines: about runs that have none, a sentence each.
    """

    rows: Sequence[FindingRow]
    lines: Sequence[str]


def run_findings(groups: Iterable[Group]) -> RunFindings:
    """What the diagnosis found in the runs of a page.

    Args:
        groups: of the page.
    Returns:
        A row per finding, and a line for all healthy runs.

    Cost: of :func:`narrowgauge.diagnose` for each run, without reading its record again.
    """
    rows: list[FindingRow] = []
    healthy, lines = [], []
    named = [
        (group.index, run, name, found)
        for group in groups
        for (run, name), found in zip(group.named, group.diagnoses, strict=True)
    ]
    for line, (index, run, name, found) in enumerate(named):
        if isinstance(found, str):
            lines.append(f"{name}: the diagnosis failed, which concerns nothing else on this page ({found}).")
        elif found.is_healthy:
            healthy.append(name)
        elif not found.findings and not found.is_enough:
            lines.append(f"{name}: {found.verdict}")
        else:
            command = f"narrowgauge diagnose {shlex.quote(str(run.path))}"
            rows += _rows(found, name, index, line, command)
    return RunFindings(rows, [*([_healthy(healthy, len(named))] if healthy else []), *lines])


def _healthy(names: Sequence[str], num_runs: int) -> str:
    if num_runs == 1:
        return "No sign of a fault."
    of = listed(names) if len(names) <= _NAMED else f"{len(names)} of the {num_runs} runs"
    return f"No sign of a fault in {of}."


def _rows(found: Diagnosis, name: str, group: int, line: int, command: str) -> list[FindingRow]:
    if not found.findings:
        step = next((sign.step for sign in found.signs if sign.step is not None), None)
        measure = found.next_measurement
        said = [sign.sentence for sign in found.signs[:_SHOWN_SIGNS]]
        advice = f"To tell: {measure.what.rstrip('?')}." if measure is not None else ""
        asked = [f"{row.cause.name} {row.probability:.0%}" for row in found.causes[:_ASKED] if row.probability >= 0.05]
        return [FindingRow(name, group, line, "", f"In question: {', '.join(asked)}", step, said, advice, command)]
    return [
        FindingRow(
            name,
            group,
            line,
            finding.cause.name,
            f"{_sentence(finding.cause.title)} ({finding.probability:.0%})",
            finding.step,
            [sign.sentence for sign in finding.chain[:_SHOWN_SIGNS]],
            finding.remedy,
            command,
        )
        for finding in found.findings
    ]


def _sentence(text: str) -> str:
    return text[:1].upper() + text[1:]


def marked(figure: Figure, rows: Sequence[FindingRow]) -> Figure:
    """A figure over steps with an upright line at every first sign.

    Args:
        figure: one of :data:`MARKED`; others are returned as they are.
        rows: of the page.
    """
    signs: dict[tuple[int, int], list[FindingRow]] = {}
    for row in rows:
        if row.cause and row.step is not None:
            signs.setdefault((row.group, row.step), []).append(row)
    if figure.name not in MARKED or not signs:
        return figure
    marks = [_mark(group, step, found) for (group, step), found in signs.items()]
    return dataclasses.replace(figure, data=[*figure.data, *marks], how=figure.how + _HOW)


def _mark(group: int, step: int, rows: Sequence[FindingRow]) -> Row:
    """An upright line in the recipe's colour, whose top can be hovered over: what the rows found there."""
    causes = ", ".join(dict.fromkeys(plain(row.cause) for row in rows))
    runs = ", ".join(dict.fromkeys(plain(row.run) for row in rows))
    return {
        "type": "scatter", "mode": "lines+markers", "x": [step, step], "y": [0, 0.98], "yaxis": "y2",
        "meta": {"group": group}, "line": {"color": colour(group, 0.8), "width": 1.5, "dash": "dot"},
        "marker": {"symbol": "triangle-down", "size": [0, 10], "color": colour(group), "opacity": 1},
        "hovertemplate": f"{causes}: first sign at step {step}<extra>{runs}</extra>",
    }  # fmt: skip


def sign_marks(rows: Sequence[FindingRow]) -> list[Row]:
    """First signs on the figure of events, which has a line for each run.

    Args:
        rows: of the page.
    """
    known = [row for row in rows if row.cause and row.step is not None]
    if not known:
        return []
    return [
        {
            "type": "scatter", "mode": "markers", "name": "first sign", "x": [row.step for row in known],
            "y": [row.line for row in known],
            "text": [plain(f"first sign of {row.cause}") for row in known],
            "marker": {"symbol": "triangle-down", "size": 13, "color": "@accent", "line": {"width": 1, "color": "@paper"}},
            "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
        }
    ]  # fmt: skip
