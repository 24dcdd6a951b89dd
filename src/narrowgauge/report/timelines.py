"""The figures of a diagnosis: columns over the steps, with the first sign and the live word; the chain of signs; two runs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

import numpy as np

from narrowgauge.analysis.diagnosis.diagnosis import Finding
from narrowgauge.analysis.diagnosis.evidence import step_of
from narrowgauge.analysis.diagnosis.pairs.first_difference import Parting
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns
from narrowgauge.report.hindsight import Hindsight
from narrowgauge.report.marks import colour, plain
from narrowgauge.report.series import Series, column, decimate, gaps, is_wide, json_list
from narrowgauge.report.traces import Figure, layout_of
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, Row

_SHOWN = {
    "loss": "Training loss",
    "grad_norm": "Gradient norm",
    "loss_scale": "Loss scale",
    "seconds": "Duration of a step",
}
"""The columns that are drawn, each with its title."""
_BUCKETS = 500
_HOW = (
    "A dotted upright line is the first sign of a finding, a dashed one the first event that a detector raised for it."
)
_CROSS = " A cross at the top is a value that is not finite."

Known = Sequence[tuple[Finding, Hindsight | None]]


def timelines(known: Known, run: Run) -> list[Figure]:
    """What a run did over its steps.

    Args:
        known: the findings, each with its hindsight.
        run: the record.
    Returns:
        A figure per column that the run has and that says anything.
    """
    return [figure for name in _SHOWN if (figure := _timeline(known, run, name)) is not None]


def _timeline(known: Known, run: Run, name: str) -> Figure | None:
    line = column(run.steps, name)
    values = line.y[np.isfinite(line.y)]
    if len(values) < 2 or (name == "loss_scale" and values.min() == values.max()):
        return None
    is_log = bool((values > 0).all()) and (name != "loss" or is_wide(values.tolist()))
    layout = layout_of("step", _words(name), log_y=is_log)
    layout["showlegend"] = True
    broken = gaps(line)
    marks = [each for place, (finding, when) in enumerate(known, 1) if when for each in _moments(finding, when, place)]
    how = (_HOW if marks else "") + (_CROSS if broken else "")
    data = [_line(line, name.replace("_", " "), 0), *_crosses(broken), *marks]
    return Figure(f"timeline-{name.replace('_', '-')}", _SHOWN[name], how, data, layout)


def _words(name: str) -> str:
    """A column's name and unit."""
    unit = STEP[name].unit
    return name.replace("_", " ") + (f" ({unit})" if unit and unit != "s" else "")


def _moments(finding: Finding, when: Hindsight, place: int) -> list[Row]:
    word = when.word
    if word is None:
        return [mark(when.sign, f"{finding.cause.name}: first sign, step {when.sign}", place, "dot")]
    at, kind = step_of(word), word.get("kind")
    if at == when.sign:
        return [mark(at, f"{finding.cause.name}: first sign and live word ({kind}), step {at}", place, "dot")]
    return [
        mark(when.sign, f"{finding.cause.name}: first sign, step {when.sign}", place, "dot"),
        mark(at, f"{kind}: live word, step {at}", place, "dash"),
    ]


def _line(line: Series, name: str, place: int) -> Row:
    thin = decimate(line, _BUCKETS)
    return {
        "type": "scatter", "mode": "lines", "x": json_list(thin.x, 9), "y": json_list(thin.y), "name": plain(name),
        "meta": {"group": -1}, "line": {"color": colour(place), "width": 1.5},
    }  # fmt: skip


def _crosses(steps: Sequence[float]) -> list[Row]:
    if not steps:
        return []
    shown = list(steps)[:: max(1, len(steps) // 200)]
    return [
        {
            "type": "scatter", "mode": "markers", "x": shown, "y": [0.97] * len(shown), "yaxis": "y2", "name": "not finite",
            "meta": {"group": -1}, "marker": {"symbol": "x-thin", "size": 9, "line": {"width": 2, "color": "@alarm"}},
        }
    ]  # fmt: skip


def mark(step: int, name: str, place: int, dash: str) -> Row:
    """An upright line at a step.

    Args:
        step: where.
        name: what it is, in the legend and where one hovers over its top.
        place: of its colour in the palette.
        dash: of the line.
    """
    return {
        "type": "scatter", "mode": "lines+markers", "x": [step, step], "y": [0, 0.98], "yaxis": "y2", "name": plain(name),
        "meta": {"group": -1}, "line": {"color": colour(place), "width": 2, "dash": dash},
        "marker": {"symbol": "triangle-down", "size": [0, 10], "color": colour(place), "opacity": 1},
        "hovertemplate": "%{fullData.name}<extra></extra>",
    }  # fmt: skip


def chain_figure(findings: Sequence[Finding]) -> list[Figure]:
    """The signs of the findings, each a line over the steps from where it begins.

    Args:
        findings: of a run.
    Returns:
        One figure; none where no two signs have different steps.
    """
    signs = [
        (place, sign) for place, finding in enumerate(findings, 1) for sign in finding.chain if sign.step is not None
    ]
    if len({sign.step for _, sign in signs}) < 2:
        return []
    data = [
        {
            "type": "scatter", "mode": "markers", "x": [sign.step], "y": [line], "meta": {"group": -1},
            "marker": {"symbol": "diamond", "size": 11, "color": colour(place)},
            "text": [plain(sign.sentence[:160])], "hovertemplate": "step %{x}<br>%{text}<extra></extra>",
        }
        for (place, sign), line in zip(signs, count(), strict=False)
    ]  # fmt: skip
    layout: Row = {
        "xaxis": {"title": {"text": "step of the first time"}},
        "yaxis": {
            "tickvals": list(range(len(signs))), "ticktext": [plain(sign.sign) for _, sign in signs],
            "range": [len(signs) - 0.5, -0.5],
        },
    }  # fmt: skip
    how = "What came first stands at the left: a cause, then its consequences. Hover over a mark to read what it says."
    return [Figure("chain-of-signs", "Which sign came first", how, data, layout, height=120 + 30 * len(signs))]


# ── two runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def pair_figures(found: TwoRuns, one: Run, other: Run) -> list[Figure]:
    """Two runs over their steps, and how far apart they are.

    Args:
        found: where they part.
        one, other: their records.
    """
    made = [_pair(found, one, other, name) for name in ("loss", "grad_norm")]
    return [figure for figure in (_apart(found, one, other), *made) if figure is not None]


def _marks(found: TwoRuns) -> list[Row]:
    alignment = found.alignment
    marks = [_parting(alignment.parting, "they part", 2, "dot")] if alignment.parting is not None else []
    if alignment.rounded is not None:
        marks.append(_parting(alignment.rounded, "they differ by rounding", 3, "dash"))
    return marks


def _parting(parting: Parting, words: str, place: int, dash: str) -> Row:
    return mark(parting.step, f"{words}: step {parting.step}", place, dash)


def _pair(found: TwoRuns, one: Run, other: Run, name: str) -> Figure | None:
    lines = [column(run.steps, name) for run in (one, other)]
    values = np.concatenate([line.y[np.isfinite(line.y)] for line in lines])
    if min(map(len, lines)) < 2 or not values.size:
        return None
    layout = layout_of(
        "step", _words(name), log_y=bool((values > 0).all()) and (name != "loss" or is_wide(values.tolist()))
    )
    layout["showlegend"] = True
    drawn = [_line(line, run, place) for place, (line, run) in enumerate(zip(lines, found.names, strict=True))]
    drawn[1]["line"] |= {"dash": "dash"}
    how = "The second run is dashed, so that the first is seen where both are the same."
    return Figure(f"pair-{name.replace('_', '-')}", _SHOWN[name], how, [*drawn, *_marks(found)], layout)


def _apart(found: TwoRuns, one: Run, other: Run) -> Figure | None:
    """The relative difference of the two losses; equal ones, which a log scale cannot show, are left out."""
    lines = [column(run.steps, "loss") for run in (one, other)]
    x, mine, theirs = np.intersect1d(lines[0].x, lines[1].x, return_indices=True)
    first, second = lines[0].y[mine], lines[1].y[theirs]
    with np.errstate(invalid="ignore", divide="ignore"):
        apart = np.abs(first - second) / np.maximum(np.abs(first), np.abs(second))
    apart[~(apart > 0)] = np.nan
    if np.isfinite(apart).sum() < 2:
        return None
    layout = layout_of("step", "relative difference", log_y=True)
    layout["showlegend"] = True
    layout["yaxis"] |= {"tickformat": "~e"}
    if np.nanmax(apart) < 100 * np.nanmin(apart):
        layout["yaxis"] |= {"dtick": "D2"}  # within two decades, their ends would be the only ticks
    num_equal = int((first == second).sum())
    how = (
        "The difference of the two losses over the larger one. Rounding alone begins near the last digit and grows slowly."
        + (f" {num_equal} steps have equal losses and are not drawn." if num_equal else "")
    )
    data = [_line(Series(x, apart), "difference", 0), *_marks(found)]
    return Figure("apart", "How far apart the losses are", how, data, layout)
