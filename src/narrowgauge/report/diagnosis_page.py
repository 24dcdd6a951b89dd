"""The page of a diagnosis: what went wrong, the timeline with the first sign, the chain of events, and what to change."""

from __future__ import annotations

import math
from collections.abc import Sequence

from narrowgauge.diagnosis.diagnosis import Diagnosis, Finding
from narrowgauge.diagnosis.observations import Observation
from narrowgauge.errors import RecordError
from narrowgauge.monitor.features import number
from narrowgauge.planner.scaling_law import duration
from narrowgauge.report.marks import colour, plain
from narrowgauge.report.plan_page import rendered
from narrowgauge.report.traces import Figure, layout_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, Row
from narrowgauge.spec.tables import Column, Table, text_columns

_SHOWN = ("loss", "grad_norm", "loss_scale", "seconds")
_MOST_POINTS = 2000


def render_diagnosis(found: Diagnosis, run: Run) -> str:
    """The page of a diagnosis as one HTML document, which fetches nothing.

    Args:
        found: of the run.
        run: its record.
    Returns:
        The document, 2 MB of which are Plotly.
    Raises:
        NarrowgaugeError: plotly is not installed.
    """
    figures = [figure for name in _SHOWN if (figure := _timeline(found, run, name)) is not None]
    return rendered(
        title=f"Diagnosis of {found.name}",
        heading=found.name,
        subtitle=" · ".join(
            str(word) for word in (run.run.get("config", {}).get("recipe"), f"{len(run.steps)} steps") if word
        ),
        sentences=[found.verdict, *_sentences(found, run)],
        figures=figures,
        terms=[*map(_chain, found.findings), *_all_signs(found)],
        parts="Evidence",
        made_from="the record of the run; nothing was computed again",
    )


def _sentences(found: Diagnosis, run: Run) -> list[str]:
    said = [part for finding in found.findings for part in _of_finding(finding, run)]
    if found.next_measurement is not None:
        tells = ", ".join(found.next_measurement.tells)
        said.append(f"Next measurement: {found.next_measurement.what.rstrip('.?')}, which distinguishes {tells}.")
    said += [f"Note: {note}." for note in found.notes]
    return [*said, *(f"Not recorded: {missing}." for missing in found.missing)]


def _of_finding(finding: Finding, run: Run) -> list[str]:
    said = [
        f"{finding.cause.title.capitalize()}: {finding.cause.effect}.",
        f"What to do: {finding.remedy}",
    ]
    others = ", ".join(f"{row.cause.name} {row.probability:.1%}" for row in finding.alternatives)
    if others:
        said.append(f"What else it could be: {others}.")
    if finding.against:
        said.append(
            f"What speaks against it: {', '.join(finding.against)} would be expected, and the record shows none."
        )
    if finding.step is not None and (cost := cost_since(run, finding.step)):
        said.append(cost)
    return said


def cost_since(run: Run, step: int) -> str:
    """What was trained after a first sign, and what watching for it cost: one sentence, or empty.

    Args:
        run: the record.
        step: of the first sign.
    """
    later = [row for row in run.steps if row["step"] > step]
    if not later or step <= run.steps[0]["step"]:
        return ""
    seconds = math.fsum(number(row.get("seconds")) or 0.0 for row in later)
    said = f"The first sign was at step {step}; the {len(later)} steps after it took {duration(seconds)}"
    watched = math.fsum(number(row.get("seconds")) or 0.0 for row in _gauges(run) if row["step"] <= step)
    return f"{said}, and {'the gauges up to it ' + duration(watched) if watched else 'the rows of steps showed it for nothing'}."


def _gauges(run: Run) -> list[Row]:
    try:
        return run.gauges
    except RecordError:
        return []


def _timeline(found: Diagnosis, run: Run, name: str) -> Figure | None:
    """A column over the steps, with a line where each finding begins."""
    rows = [
        (row["step"], value)
        for row in run.steps
        if (value := number(row.get(name))) is not None and math.isfinite(value)
    ]
    if len(rows) < 2:
        return None
    rows = rows[:: 1 + len(rows) // _MOST_POINTS]
    column = STEP[name]
    layout = layout_of(
        "step", f"{name.replace('_', ' ')}{f' ({column.unit})' if column.unit else ''}", log_y=name != "loss"
    )
    data: list[Row] = [
        {
            "type": "scatter", "mode": "lines", "x": [step for step, _ in rows], "y": [value for _, value in rows],
            "name": plain(name), "meta": {"group": -1}, "line": {"color": colour(0), "width": 1.5},
        }
    ]  # fmt: skip
    for place, finding in enumerate(found.findings):
        if finding.step is not None:
            data.append(_mark(finding.step, f"{finding.cause.name}: first sign", place + 1))
    layout["showlegend"] = True
    return Figure(f"timeline-{name.replace('_', '-')}", column.help[:1].upper() + column.help[1:], _HOW, data, layout)


_HOW = "The upright lines are the first signs of the findings."


def _mark(step: int, name: str, place: int) -> Row:
    return {
        "type": "scatter", "mode": "lines", "x": [step, step], "y": [0, 1], "yaxis": "y2", "name": plain(name),
        "meta": {"group": -1}, "line": {"color": colour(place), "width": 2, "dash": "dot"},
    }  # fmt: skip


_COLUMNS = (Column("step", "step", right=True), *text_columns(sign="sign", what_shows="says", tensor="tensor"))


def _table(title: str, signs: Sequence[Observation]) -> Table:
    rows = [
        {
            name: getattr(sign, key)
            for name, key in (("step", "step"), ("sign", "sign"), ("says", "sentence"), ("tensor", "tensor"))
        }
        for sign in signs
    ]
    return Table(_COLUMNS, rows, title)


def _chain(finding: Finding) -> Table:
    return _table(f"The chain of {finding.cause.name}", finding.chain)


def _all_signs(found: Diagnosis) -> list[Table]:
    return [_table("Every sign of the record", found.signs)] if found.signs else []
