"""Hindsight: what was trained after the first sign of a fault, which detector raised it, and what would have shown it earlier.

Three moments count. The first *sign* is in the record. The first *alarm* is the first event that a detector raised for it while
the run was training. And ``narrowgauge diagnose`` would have *named* the cause from some step on: that step is found by
diagnosing shorter records. What was trained after each of them is what catching it there would have saved.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from narrowgauge.analysis.diagnosis.diagnosis import CauseFinding, diagnose
from narrowgauge.analysis.diagnosis.loop_terms import loop_of
from narrowgauge.analysis.diagnosis.signs.event_signs import AUDIT, GAUGES
from narrowgauge.analysis.diagnosis.signs.sign_table import SIGNS
from narrowgauge.analysis.monitor.detectors import SERIOUS
from narrowgauge.errors import RecordError
from narrowgauge.planner.formatting import duration_text
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, number, step_of
from narrowgauge.spec.tables import Table, text_columns

_SPIKES = ("loss_spike", "gradient_spike")


@dataclass(frozen=True, slots=True)
class Hindsight:
    """When a fault could have been known.

    Args:
        sign: the step of the first sign.
        alarm: the first event that was raised for it while training; ``None`` where none was.
        named: the step from which ``narrowgauge diagnose`` names the cause, of those tried.
    """

    sign: int
    alarm: Row | None
    named: int | None


def hindsight(finding: CauseFinding, run: Run) -> Hindsight | None:
    """When the fault behind a finding could have been known; ``None`` where it has no step, as settings have none.

    What a replay alone has measured has no such time either.

    Cost: four or five diagnoses of shorter records.
    """
    alarm = _first_alarm(finding, run)
    if finding.step is None or (finding.is_measured and alarm is None):
        return None
    return Hindsight(finding.step, alarm, _named_from(finding, run))


def _first_alarm(finding: CauseFinding, run: Run) -> Row | None:
    """The first recorded event, from the first sign on, of a kind that the finding's signs read; of a departure, its own."""
    if finding.is_measured:
        own = (event for event in run.events if event.get("detector") == finding.name)
        return next((event for event in own if step_of(event) == finding.step), None)
    reads = [read for sign in finding.chain for read in SIGNS[sign.sign].reads]
    kinds = {kind for table, _, kind in (read.partition(".") for read in reads) if table == "events"}
    alarms = [event for event in run.events if event.get("kind") in kinds and step_of(event) >= (finding.step or 0)]
    return min(alarms, key=step_of, default=None)


def _named_from(finding: CauseFinding, run: Run) -> int | None:
    """The first of the records that end 0, 1, 3, 7, … steps after the sign which names the cause."""
    steps = [row["step"] for row in run.steps if row["step"] >= (finding.step or 0)]
    ends = [steps[min(2**k, len(steps)) - 1] for k in range(len(steps).bit_length() + 1)] if steps else []
    place = bisect_left(ends, True, key=lambda end: finding.cause.name in _names(until(run, end)))
    return ends[place] if place < len(ends) else None


def _names(run: Run) -> list[str]:
    return [finding.cause.name for finding in diagnose(run).findings]


def until(run: Run, step: int) -> Run:
    """The record of a run as it was after a step."""
    steps, evals, events, gauges = (
        [row for row in rows if step_of(row) <= step] for rows in (run.steps, run.evals, run.events, gauges_of(run))
    )
    short = replace(run, steps=steps, evals=evals, events=events, summary=None)
    vars(short)["gauges"] = gauges
    return short


def gauges_of(run: Run) -> list[Row]:
    """The samples of the gauges; none where they are damaged."""
    try:
        return run.gauges
    except RecordError:
        return []


def trained_after(run: Run, step: int) -> str:
    """What was trained after a step: steps, tokens, time and their share of the run.

    Example:
        >>> from pathlib import Path
        >>> rows = [{"step": step, "tokens": 256 * step, "seconds": 0.5} for step in range(1, 11)]
        >>> trained_after(Run(Path("a"), {}, rows), 8)
        '2 steps, 512 tokens, 1 s: 20% of the run'
    """
    later = [row for row in run.steps if row["step"] > step]
    if not later:
        return "nothing: it was the last step"
    last = run.steps[-1]["step"]
    said = [counted(last - step, "step")]
    before = max((number(row.get("tokens")) or 0.0 for row in run.steps if row["step"] <= step), default=0.0)
    if (tokens := (number(run.steps[-1].get("tokens")) or 0.0) - before) > 0:
        said.append(f"{tokens:,.0f} tokens")
    if seconds := _seconds(later):
        said.append(duration_text(seconds))
    first = run.steps[0]["step"]
    return f"{', '.join(said)}: {(last - step) / (last - first + 1):.0%} of the run"


def _seconds(rows: list[Row]) -> float:
    return math.fsum(number(row.get("seconds")) or 0.0 for row in rows)


_COLUMNS = text_columns(moment="moment", what_it_says="says", trained_after_it="after")


def hindsight_table(finding: CauseFinding, run: Run, found: Hindsight) -> Table:
    """The three moments, each with what was trained after it."""
    sign = finding.chain[0] if finding.chain else None
    first = next((each for each in finding.chain if each.step is not None), sign)
    said = first.sentence if first else finding.message
    rows = [_row(f"first sign, step {found.sign}", said, trained_after(run, found.sign))]
    if found.alarm is not None:
        at = step_of(found.alarm)
        said = f"{found.alarm.get('kind')}: {found.alarm.get('message', '')}"
        rows.append(_row(f"first alarm while training, step {at}", said, trained_after(run, at)))
    else:
        rows.append(_row("first alarm while training", f"none: {_why_silent(finding, run)}", "–"))
    if found.named is not None:
        said = f"narrowgauge diagnose of the record so far names {finding.cause.name}"
        rows.append(_row(f"diagnosis, step {found.named} at the latest", said, trained_after(run, found.named)))
    return Table(_COLUMNS, rows, f"{finding.cause.name}: when it could have been known")


def _row(moment: str, says: str, after: str) -> Row:
    return {"moment": moment, "says": says, "after": after}


def _why_silent(finding: CauseFinding, run: Run) -> str:
    if run.is_foreign or not run.events:
        return "no detector ran with the training (narrowgauge.RunRecorder adds them to any loop)"
    reads = {read.partition(".")[0] for sign in finding.chain for read in SIGNS[sign.sign].reads}
    if "events" not in reads:
        return "no detector raises these signs, which compare steps or tensors; only the diagnosis reads them"
    return "what the detectors saw did not pass their thresholds in time"


def earlier(finding: CauseFinding, found: Hindsight, run: Run) -> list[str]:
    """Sentences on what would have shown the fault earlier, or acted on it, and at which cost."""
    said = _auditing(run, found.sign) if finding.is_measured else [_watching(run, found.sign), *_sampling(finding, run)]
    kinds = [str(found.alarm.get("kind"))] if found.alarm is not None else []
    loop = loop_of(run)
    if set(kinds) & set(_SPIKES) and loop == "trainer":
        said.append(
            f"--on-spike stop would have ended the run at step {step_of(found.alarm or {})}; --on-spike skip leaves such "
            "steps out, --on-spike rollback goes back to the last checkpoint."
        )
    elif set(kinds) & (set(SERIOUS) | set(_SPIKES)):
        said.append(
            "Nobody has to read the console: narrowgauge.on_event calls a function of yours with every event, which can stop "
            "the run or send a message"
            + ("; --log-to sends events to the loggers that you use." if loop == "trainer" else ".")
        )
    return [*said, "narrowgauge diagnose reads a run while it is training, and costs it nothing."]


def _auditing(run: Run, step: int) -> list[str]:
    """How much older a departure may be than the step that shows it."""
    before = max((step_of(row) for row in run.steps if row.get("recomputed") and step_of(row) < step), default=None)
    if before is None:
        return []
    return [f"Of the steps before, {before} was computed again last: a smaller audit_every dates it better."]


def _watching(run: Run, sign: int) -> str:
    samples = [row for row in gauges_of(run) if step_of(row) <= sign]
    watched, trained = _seconds(samples), _seconds([row for row in run.steps if row["step"] <= sign])
    if not watched or not trained:
        return "What shows it is in the rows of steps, which every run writes."
    return (
        f"The gauges up to the first sign, {len(samples)} samples, took {duration_text(watched)}: "
        f"{watched / (trained + watched):.1%} of the time of training."
    )


_PERIODS = {"gauges_every": ("--gauges-every", GAUGES), "audit_every": ("--audit-every", AUDIT)}
"""Of each sampling period, its flag and what a sign needs that is sampled by it."""


def _sampling(finding: CauseFinding, run: Run) -> list[str]:
    """How late a sampled sign may be, and what it costs to sample more often."""
    first = next((each for each in finding.chain if each.step is not None), None)
    needs = SIGNS[first.sign].needs if first is not None else ""
    said = []
    for name, (flag, sampled) in _PERIODS.items():
        config = run.run.get("config")
        period = config.get(name) if isinstance(config, dict) else None
        if needs == sampled and isinstance(period, int) and period > 1:
            sample = _seconds(gauges_of(run)) / max(1, len(gauges_of(run))) if name == "gauges_every" else 0.0
            cost = f", and costs {duration_text(sample)} a sample" if sample else ""
            said.append(
                f"The first sign was sampled every {period} steps, so it may be up to {period - 1} steps older; a smaller "
                f"{flag} dates it better{cost}."
            )
    return said
