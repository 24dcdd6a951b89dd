"""The page of a diagnosis, the postmortem of a run: what went wrong, when it began and what followed, what to change, what else
it could be, when it could have been known, and ten lines for a ticket. Of two runs: where they first differ, and why.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import count

import numpy as np

from narrowgauge.analysis.diagnosis.diagnosis import CauseFinding, Diagnosis
from narrowgauge.analysis.diagnosis.loop_terms import in_terms_of
from narrowgauge.analysis.diagnosis.pairs.first_difference import FirstDifference
from narrowgauge.analysis.diagnosis.pairs.two_runs import TwoRuns
from narrowgauge.analysis.diagnosis.replay_findings import RESULT_COLUMNS, variant_results
from narrowgauge.analysis.diagnosis.signs.replay_signs import SIGNS_OF_REPLAYS
from narrowgauge.analysis.diagnosis.signs.sign import Observation
from narrowgauge.report.figures.palette import colour, plain
from narrowgauge.report.figures.series import Series, column, decimate, gaps, is_wide, json_list
from narrowgauge.report.figures.traces import Figure, layout_of, mark
from narrowgauge.report.hindsight import Hindsight, earlier, hindsight, hindsight_table, trained_after
from narrowgauge.report.page import capitalized, document
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import STEP, Row, step_of
from narrowgauge.spec.tables import Table, number_columns, text_columns


@dataclass(frozen=True)
class Section:
    """A section of the page.

    Args:
        name: its anchor.
        link: what its link says; the title if empty.
        text: shown as it is, to be copied.
        chains: signs by step, each list with its caption.
        sentences: a list.
        folded: whether its tables are unfolded by a click.
    """

    name: str
    title: str
    link: str = ""
    text: str = ""
    chains: Sequence[tuple[str, Sequence[Observation]]] = ()
    figures: Sequence[Figure] = ()
    tables: Sequence[Table] = ()
    sentences: Sequence[str] = ()
    reading: str = ""
    folded: bool = False

    @property
    def label(self) -> str:
        return self.link or self.title

    @property
    def is_empty(self) -> bool:
        return not (self.text or self.chains or self.figures or self.tables or self.sentences)


def render_diagnosis(found: Diagnosis, run: Run) -> str:
    """The page of a diagnosis as one HTML document, which fetches nothing; 2 MB of it are Plotly.

    Cost: that of the diagnosis some five times for each finding, which finds when it could have been made.
    """
    known = [(finding, hindsight(finding, run)) for finding in found.findings]
    parts = [
        Section("change", "What to change", sentences=_changes(found)),
        Section("timeline", "Timeline", figures=timelines(known, run)),
        Section(
            "chain",
            "The chain of events",
            "Chain",
            chains=[(finding.cause.name, finding.chain) for finding in found.findings if finding.chain],
            figures=chain_figure(found.findings),
        ),
        Section("replay", "The step, computed again", "Replay", tables=_replays(found), sentences=_replay_lines(found)),
        Section("else", "What else it could be", "Alternatives", tables=_alternatives(found), sentences=_doubts(found)),
        Section("earlier", "Caught earlier", tables=_hindsights(known, run), sentences=_earlier(known, run)),
        Section("ticket", "For a ticket", "Ticket", text=found.text()),
        Section("missing", "What was checked, and what the record does not say", "Checked", sentences=_missing(found)),
        Section("signs", "Every sign of the record", "Signs", tables=_signs(found), folded=True),
    ]
    config = run.run.get("config")
    recipe = config.get("recipe") if isinstance(config, dict) else None
    rule = config.get("rule", "adamw") if isinstance(config, dict) else "adamw"
    stepped = f"by {rule}" if rule != "adamw" else ""
    return _document(
        heading=found.name,
        subtitle=" · ".join(str(word) for word in (recipe, stepped, f"{len(run.steps):,} steps") if word),
        lead=found.verdict[:1].upper() + found.verdict[1:],
        sentences=[f"{capitalized(finding.cause.title)}: {finding.cause.effect}." for finding in found.findings],
        parts=parts,
        made_from="the record of the run; "
        + ("nothing was computed for it" if found.replay is None else f"step {found.replay.step} was computed again"),
    )


def render_two(found: TwoRuns, one: Run, other: Run) -> str:
    """The page of two runs as one HTML document, which fetches nothing; 2 MB of it are Plotly."""
    difference = found.alignment.first_difference
    remedy = [found.remedy] if found.remedy else []
    parts = [
        Section("change", "What to do", sentences=[*remedy, *([_next_step(found)] if found.next_measurement else [])]),
        Section("timeline", "Timeline", figures=pair_figures(found, one, other)),
        Section("evidence", "Evidence", sentences=[capitalized(said) for said in found.evidence]),
        Section("else", "What else it could be", "Alternatives", tables=_reasons(found)),
        Section("given", "Settings, data and software that differ", "Differences", tables=_differences(found)),
        Section(
            "earlier",
            "Caught earlier",
            sentences=_since(found, difference, one, other) if difference is not None else (),
        ),
        Section("ticket", "For a ticket", "Ticket", text=found.text()),
        Section("missing", "What the records do not say", "Missing", sentences=found.alignment.notes),
    ]
    return _document(
        heading=" and ".join(found.names),
        subtitle=f"{counted(found.alignment.num_common, 'step')} in common",
        lead=found.verdict,
        sentences=[],
        parts=parts,
        made_from="the records of the two runs" + (", computed again" if found.alignment.replayed is not None else ""),
    )


def _document(
    *, heading: str, subtitle: str, lead: str, sentences: Sequence[str], parts: Sequence[Section], made_from: str
) -> str:
    shown = [part for part in parts if not part.is_empty]
    return document(
        "diagnosis.html.j2",
        [figure for part in shown for figure in part.figures],
        title=f"Diagnosis of {heading}",
        heading=heading,
        subtitle=subtitle,
        lead=lead,
        sentences=sentences,
        parts=shown,
        made_from=made_from,
    )


# ── one run ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _changes(found: Diagnosis) -> list[str]:
    several = len(found.findings) > 1
    said = [f"{finding.cause.name}: {finding.remedy}" if several else finding.remedy for finding in found.findings]
    dated = sorted((finding.step, finding.cause.name) for finding in found.findings if finding.step is not None)
    if len({step for step, _ in dated}) > 1:
        said.append(f"Begin with {dated[0][1]}: its first sign, at step {dated[0][0]}, came before the others.")
    if not said and found.next_measurement is not None:
        said.append(f"Nothing yet. Measure first: {found.next_measurement.what.rstrip('.?')}.")
    return said


_RANKED = text_columns(cause="cause", what_it_does="does")
"""The likeliest first. By how much is not shown: the weights of the rules were not calibrated, and so are no probabilities."""


def _alternatives(found: Diagnosis) -> list[Table]:
    """The rivals of each finding; where the record does not tell, the causes in question."""
    tables = []
    for finding in found.findings:
        rows = [{"cause": row.cause.name, "does": row.cause.effect} for row in finding.alternatives if row.cause.effect]
        if rows:
            tables.append(Table(_RANKED, rows, f"Instead of {finding.cause.name}, the likeliest first"))
    if not found.findings and not found.is_healthy:
        rows = [{"cause": row.cause.name, "does": row.cause.effect} for row in found.causes[:4]]
        tables.append(Table(_RANKED, rows, "In question, the likeliest first"))
    return tables


def _doubts(found: Diagnosis) -> list[str]:
    said = [
        f"What speaks against {finding.cause.name}: {', '.join(finding.against)} would be expected, and the record shows none."
        for finding in found.findings
        if finding.against
    ]
    if (measure := found.next_measurement) is not None:
        said.append(f"Next measurement: {measure.what.rstrip('.?')}, which distinguishes {', '.join(measure.tells)}.")
    return said


def _hindsights(known: Sequence[tuple[CauseFinding, Hindsight | None]], run: Run) -> list[Table]:
    return [hindsight_table(finding, run, when) for finding, when in known if when is not None]


def _earlier(known: Sequence[tuple[CauseFinding, Hindsight | None]], run: Run) -> list[str]:
    dated = [(finding, when) for finding, when in known if when is not None]
    first = min(dated, key=lambda pair: pair[1].sign, default=None)
    said = earlier(*first, run) if first is not None else []
    said += [
        f"{finding.cause.name} is a matter of settings and was there before the first step: narrowgauge diagnose after some "
        "steps says so."
        for finding, when in known
        if when is None and not _is_of_replay(finding)
    ]
    return said


_OF_REPLAYS = {sign.name for sign in SIGNS_OF_REPLAYS}


def _is_of_replay(finding: CauseFinding) -> bool:
    """Whether a replay showed it or a sign of it, so that no earlier record could have."""
    return finding.is_measured or any(sign.sign in _OF_REPLAYS for sign in finding.chain)


def _replay_lines(found: Diagnosis) -> list[str]:
    return [] if found.replay is None else [f"{capitalized(line.strip())}." for line in found.replay.every_line()]


def _replays(found: Diagnosis) -> list[Table]:
    rows = variant_results(found.replay.variants) if found.replay is not None else []
    caption = "Relative differences to the step in float32; of other-order to the run's own step"
    return [Table(RESULT_COLUMNS, rows, caption)] if rows else []


def _missing(found: Diagnosis) -> list[str]:
    notes = [f"Note: {note}." for note in found.notes]
    return [
        *notes,
        *(f"{capitalized(said)}." for said in found.coverage()),
        *(f"Not recorded: {each}." for each in found.missing),
    ]


_SIGN = (
    *text_columns(sign="sign"),
    *number_columns(step="step"),
    *text_columns(what_shows="sentence", tensor="tensor"),
    *number_columns(value="value", threshold="threshold"),
)


def _signs(found: Diagnosis) -> list[Table]:
    names = ("sign", "step", "sentence", "tensor", "value", "threshold")
    rows = [{name: getattr(sign, name) for name in names} for sign in found.signs]
    return [Table(_SIGN, rows, "All signs that are present")] if rows else []


# ── two runs ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _next_step(found: TwoRuns) -> str:
    return f"Next measurement: {found.next_measurement}."


_REASON = text_columns(reason="reason", what_it_is="is", remedy="remedy")


def _reasons(found: TwoRuns) -> list[Table]:
    rows = [
        {"reason": reason.name, "is": reason.title, "remedy": in_terms_of(found.loop, reason.remedy)}
        for reason, share in found.reasons
        if share >= 0.001
    ]
    return [Table(_REASON, rows, "Reasons, the likeliest first")] if len(rows) > 1 else []


_GIVEN = text_columns(what="name", table="table", first="first", second="second")


def _differences(found: TwoRuns) -> list[Table]:
    rows = [
        {"name": each.name, "table": each.table, "first": each.values[0], "second": each.values[1]}
        for each in found.alignment.differences
    ]
    return [Table(_GIVEN, rows, "Differences")] if rows else []


def _since(found: TwoRuns, difference: FirstDifference, one: Run, other: Run) -> list[str]:
    said = [
        f"Trained after the first difference, by {name}: {trained_after(run, difference.step)}."
        for name, run in zip(found.names, (one, other), strict=True)
    ]
    if not found.alignment.has_fingerprints and found.loop == "trainer":
        said.append(
            "--fingerprints-every N in both names the tensor, at the cost of one more read of every tensor in each N-th step."
        )
    return [*said, "narrowgauge diagnose RUN OTHER reads two runs while they are training, and costs them nothing."]


# ── figures: columns over the steps with the first sign and the first alarm, the chain of signs, two runs ───────────────────

_SHOWN = {
    "loss": "Training loss",
    "grad_norm": "Gradient norm",
    "loss_scale": "Loss scale",
    "seconds": "Duration of a step",
}
"""The columns that are drawn, with their titles."""
_BUCKETS = 500
_HOW = (
    "A dotted upright line is the first sign of a finding, a dashed one the first event that a detector raised for it."
)
_CROSS = " A cross at the top is a value that is not finite."

Known = Sequence[tuple[CauseFinding, Hindsight | None]]


def timelines(known: Known, run: Run) -> list[Figure]:
    """A figure over the steps for each column that the run has and that says anything."""
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
    unit = STEP[name].unit
    return name.replace("_", " ") + (f" ({unit})" if unit and unit != "s" else "")


def _moments(finding: CauseFinding, when: Hindsight, place: int) -> list[Row]:
    alarm = when.alarm
    if alarm is None:
        return [_mark(when.sign, f"{finding.cause.name}: first sign, step {when.sign}", place, "dot")]
    at, kind = step_of(alarm), alarm.get("kind")
    if at == when.sign:
        return [_mark(at, f"{finding.cause.name}: first sign and first alarm ({kind}), step {at}", place, "dot")]
    return [
        _mark(when.sign, f"{finding.cause.name}: first sign, step {when.sign}", place, "dot"),
        _mark(at, f"{kind}: first alarm, step {at}", place, "dash"),
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


def _mark(step: int, name: str, place: int, dash: str) -> Row:
    """An upright line at a step; ``name`` shows in the legend and on hovering over its top, ``place`` chooses its colour."""
    line = {"color": colour(place), "width": 2, "dash": dash}
    return mark(step, -1, colour(place), line, "%{fullData.name}<extra></extra>") | {"name": plain(name)}


def chain_figure(findings: Sequence[CauseFinding]) -> list[Figure]:
    """The signs of the findings, each a line over the steps from where it begins; no figure where no two have different steps."""
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
    """Two runs over their steps, and how far apart they are."""
    made = [_pair(found, one, other, name) for name in ("loss", "grad_norm")]
    return [figure for figure in (_apart(found, one, other), *made) if figure is not None]


def _marks(found: TwoRuns) -> list[Row]:
    alignment = found.alignment
    marks = (
        [_parting(alignment.first_difference, "first difference", 2, "dot")]
        if alignment.first_difference is not None
        else []
    )
    if alignment.rounded is not None:
        marks.append(_parting(alignment.rounded, "they differ by rounding", 3, "dash"))
    return marks


def _parting(difference: FirstDifference, words: str, place: int, dash: str) -> Row:
    return _mark(difference.step, f"{words}: step {difference.step}", place, dash)


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
