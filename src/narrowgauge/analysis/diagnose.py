"""Diagnosis of one run: readings beyond their bound, earliest first, and areas that the record does
not show.

Events of the trainer and of ``ng.RunRecorder`` are alarms. Over any other record the detectors run
here. The diagnosis adds counts over the whole record, such as failed steps. A run without a reading
may still have a fault: shifted labels leave normal rows. So the diagnosis lists the areas that it
looked at, and the areas that this record cannot show.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np

from narrowgauge.analysis.alarms import Alarms
from narrowgauge.analysis.columns import column, loop_of, rows_of
from narrowgauge.analysis.comparison.classification import divergence, has_zero
from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import STAGE_OF, STAGES, Reading, Readings, in_order
from narrowgauge.analysis.settings import recipe_of
from narrowgauge.analysis.thresholds import FEWEST_BATCHES, FEWEST_STEPS, MAX_SKIPPED
from narrowgauge.analysis.two_runs import TwoRuns
from narrowgauge.errors import RecordError
from narrowgauge.runs.finding import counted, sentences
from narrowgauge.runs.fingerprint_rows import parted_in
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import METRICS, Row, number, step_of
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.toml import load_data

NOT_ALARMS = frozenset({"start", "resume", "stop", "finish", "checkpoint", "note", "skip"})
"""Kinds of events that are not alarms. Skipped steps are counted from their rows."""
CHANGES = frozenset({"changed-settings", "changed-software"})
"""Detectors of notes that do become readings: the software or settings changed at a resume."""
_SKIPPED = 3
"""Skipped steps without a reading beside ``MAX_SKIPPED``, after the search for a loss scale."""
_ORIGIN = (
    "Repeat the first of these steps with ng.ranked_places, which names the operation and its line."
)
_LASTING = 20
_LEAST_SECONDS = 10.0
"""Steps of a block whose median speed is compared, and the lost time below which other programs
explain a slow one.
"""


class Diagnosis(Readings):
    """Hold the findings about one run; ``print`` shows a table.

    Args:
        run: the record.

    Attributes:
        readings: beyond their bound. Sorted by step, stage, and excess (largest first).
        unseen: areas that the record cannot show, each with the one flag or call that records it;
            empty text if none does.
        areas: areas that the record shows.
        num_rows: recorded rows. A row of our records is a step; logs of other frameworks may skip
            steps.
        num_applied: rows with an applied update; ``None`` if the record does not tell.
        notes: unreadable parts of the record, a sentence each.
    """

    def __init__(self, run: Run) -> None:
        skipped = skipped_steps(run)
        self.areas, unseen = areas_of(run, skipped)
        super().__init__(recorded_readings(run, skipped), unseen=unseen)
        self.name = run.path.name or run.path.resolve().name
        self.notes = list(_notes(run, skipped))
        self.num_rows = len(run.steps)
        self.num_applied = None if skipped is None else self.num_rows - len(skipped)
        self._rows = counted(self.num_rows, "row" if run.is_foreign else "step")
        self.lines = [f"{self.name}: {self.verdict}"]

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        number = len(self.readings)
        if number:
            skipped = next(
                (reading for reading in self.readings if reading.what == "skipped-steps"), None
            )
            first = f"{skipped.value:,} of {self._rows} were skipped; " if skipped else ""
            readings = (
                "1 reading is beyond its" if number == 1 else f"{number} readings are beyond their"
            )
            since = (
                f"at step {self.readings[0].step}"
                if number == 1
                else f"from step {self.readings[0].step} on"
            )
            return f"{first}{readings} bound, {since}."
        if not self.areas:
            return f"Nothing was looked at: {self._rows} without a value that is read."
        applied = "" if self.num_applied is None else f", {self.num_applied:,} applied"
        return f"Nothing found: {self._rows} watched{applied}; looked at {', '.join(self.areas)}."

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as values for JSON."""
        return {
            "run": self.name,
            "verdict": self.verdict,
            "num_rows": self.num_rows,
            "num_applied": self.num_applied,
            "readings": [reading.to_dict() for reading in self.readings],
            "looked_at": self.areas,
            "unseen": self.unseen,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        return "\n".join([super().__str__(), *(f"Not recorded: {note}." for note in self.notes)])


@overload
def diagnose(run: str | Path | Run) -> Diagnosis: ...


@overload
def diagnose(run: str | Path | Run, other: str | Path | Run) -> TwoRuns: ...


def diagnose(run: str | Path | Run, other: str | Path | Run | None = None) -> Diagnosis | TwoRuns:
    """Show the readings of a run beyond their bound, or find the first difference of two runs.

    Nothing is guessed: each reading is a recorded number and its expected value or limit.

    Args:
        run: a run folder, the log of another framework, or a result of
            :func:`narrowgauge.read_run`.
        other: a second run that should have been equal.

    Returns:
        The readings beyond their bound, and the areas that the record cannot show. For two runs,
            their differences.

    Raises:
        RecordError: there is no run, or its record is damaged.

    Cost: below a second for 10,000 steps. It takes longer if detectors must first run over samples
    of many tensors.

    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> with ng.runs.RunWriter.create(folder, {"recipe": "bfloat16/word"}) as writer:
        ...     for step in range(1, 81):
        ...         writer.append("steps", {"step": step, "loss": 9.0 if step == 60 else 3.0 + 1.0 / step, "grad_norm": 1.0})
        >>> [(reading.step, reading.stage, reading.what) for reading in ng.diagnose(folder).readings]
        [(60, 'loss', 'loss-spike')]
    """
    runs = [
        one if isinstance(one, Run) else read_run(one) for one in (run, other) if one is not None
    ]
    return Diagnosis(*runs) if other is None else TwoRuns(*runs)


def _notes(run: Run, skipped: list[int] | None) -> Iterator[str]:
    for name in ("gauges", "fingerprints"):
        try:
            getattr(run, name)
        except RecordError as error:
            yield f"the {name}: {error.message.rstrip('.')}"
    steps = [step_of(row) for row in run.steps]
    if any(later <= before for before, later in pairwise(steps)):
        yield "the order of steps, some of which stand twice or after a later one"
    done = 0 if run.is_foreign or not steps else int((run.summary or {}).get("steps") or 0)
    if (lost := done - len({*steps})) > 0:
        yield f"{lost} of the {counted(done, 'step')} of its summary"
    if (number := rows_per_step(run, skipped or [])) > 1:
        yield f"a step in most rows: one in {number} has one, as where recorder.step() follows each micro-batch"
    missing = len(run.steps) - len(column(run, "steps", "loss"))
    if missing:
        yield f"the loss of {missing} of the {counted(len(run.steps), 'step')}"


# ── what was looked at ────────────────────────────────────────────────────────────────────────────


AREAS: dict[str, Row] = load_data("areas", "analysis")
"""The areas that a record may show: the columns that show each, and how to record it in each kind
of loop.
"""


def areas_of(run: Run, skipped: list[int] | None) -> tuple[list[str], dict[str, str]]:
    """Return the areas that the record shows, and the others with a way to record each; empty text
    if there is none.
    """
    shown = [name for name, area in AREAS.items() if _is_shown(run, area)]
    unseen = {name: area[loop_of(run)] for name, area in AREAS.items() if name not in shown}
    if "lost updates" in unseen and run.steps and len(skipped or ()) == len(run.steps):
        unseen["lost updates"] = "no step was applied"
    compared = [row["recomputed"] for row in run.steps if isinstance(row.get("recomputed"), dict)]
    reasons = (compared[-1].get("unseen") if compared else None) or {}
    watched = [e for e in run.events if e.get("detector") == "watch"]
    for event in watched[-1:]:
        _, _, missing = str(event.get("message") or "").partition("; not: ")
        if missing:
            unseen |= {f"by the watch: {missing}": ""}
    return shown, unseen | {f"{part} of the compared steps": why for part, why in reasons.items()}


def _is_shown(run: Run, area: Row) -> bool:
    places = (place.split(".") for place in area["reads"])
    for table, name in places:
        for row in rows_of(run, table):
            values = [row.get(name)]
            if name.endswith("*"):
                values = [value for key, value in row.items() if key.startswith(name[:-1])]
            for value in values:
                if value is not None and (not isinstance(value, dict) or value.get("compared", 1)):
                    return True
    return False


# ── alarms ────────────────────────────────────────────────────────────────────────────────────────


def recorded_readings(run: Run, skipped: list[int] | None) -> list[Reading]:
    """Return the readings of a run beyond their bounds, earliest first.

    Keep the first step of each tensor and ``what``.
    """
    recipe = recipe_of(run)
    groups: dict[tuple[str, str], list[Reading]] = {}
    out = skipped or []
    counts = (_steps(run, skipped), _losses(run, out), _scale(run, out), _ranks(run), _resumes(run), _audits(run, recipe),
              _slower(run), _batches(run), _rates(run, out))  # fmt: skip
    for reading in (
        *(reading for group in counts for reading in group),
        *map(_of_event, alarms_of(run, recipe)),
    ):
        groups.setdefault((reading.what, reading.tensor), []).append(reading)
    readings = [_first(group) for group in groups.values()]
    # One value that is not finite makes all later ones so. The first in the order of a step tells
    # the origin.
    bad = [r for r in readings if "nonfinite" in r.what]
    bad.sort(key=lambda r: (r.step, STAGES.index(r.stage), not r.tensor))
    if len(bad) > 1:
        readings = [r for r in readings if r not in bad]
        more = f" Later readings that follow from it: {len(bad) - 1}."
        readings.append(replace(bad[0], advice=bad[0].advice + more))
    return in_order(readings)


def _first(readings: list[Reading]) -> Reading:
    """Return the first of several readings of one thing.

    Add their number, and the last value, to its advice.
    """
    first, last = (pick(readings, key=lambda r: r.step) for pick in (min, max))
    if first.step == last.step:
        return first
    value = "" if last.value in (first.value, None) else f": {last.value:.3g}"
    times = len({reading.step for reading in readings})
    return replace(first, advice=f"{times} times, last at step {last.step}{value}. {first.advice}")


def alarms_of(run: Run, recipe: Recipe | None) -> list[Row]:
    """Return the recorded alarms of a run. If no detector ran, compute the alarms from the rows."""
    recorded = [
        e
        for e in run.events
        if e.get("detector") in CHANGES or e.get("kind") not in (*NOT_ALARMS, None)
    ]
    had_detectors = "recorder" in run.run or isinstance(run.run.get("data"), dict)
    if had_detectors and run.events:
        return recorded
    alarms = Alarms(recipe, is_audited=any(row.get("edq") is not None for row in run.steps))
    kinds = {event.get("kind") for event in recorded}
    raised = alarms.read(run.steps, rows_of(run, "gauges"))
    return recorded + [event.row() for event in raised if event.kind not in kinds]


def _of_event(event: Row) -> Reading:
    kind = str(event.get("kind") or "")
    detector = str(event.get("detector") or "")
    step = step_of(event)
    reading_name = "lost-updates" if detector == "audit" else detector or kind
    value, expected, bound = (
        number(event.get(name)) for name in ("value", "expected", "threshold")
    )
    if reading_name == "lost-updates":
        expected = 1.0
        bound = 1.0 - MIN_EDQ
    # The audit's message names the storage already.
    advice = sentences(
        str(event.get("message") or ""),
        "" if detector == "audit" else str(event.get("advice") or ""),
    )
    stage = (
        str(event["stage"])
        if event.get("stage") in STAGES
        else "between steps"
        if step
        else "start"
    )
    return Reading(
        step, stage, str(event.get("tensor") or ""), reading_name, value, expected, bound, advice
    )


# ── counts ────────────────────────────────────────────────────────────────────────────────────────


def skipped_steps(run: Run) -> list[int] | None:
    """Return the steps whose update was not applied, by the column ``skipped``; ``None`` if no row
    has it.
    """
    flags = column(run, "steps", "skipped")
    return (
        [int(step) for step, flag in zip(flags.x, flags.y, strict=True) if flag > 0]
        if len(flags)
        else None
    )


def rows_per_step(run: Run, skipped: list[int]) -> int:
    """Return the number of rows for each step, as of micro-batches: 1 unless steps come evenly and
    no loss is scaled.
    """
    applied = list[int]()
    out = set(skipped)
    for place, row in enumerate(run.steps):
        if row.get("loss_scale") is not None or row.get("spike") is not None:
            return 1
        applied += [place] * (step_of(row) not in out)
    gaps = {after - before for before, after in pairwise(applied)}
    has_reasons = any(event.get("kind") == "skip" for event in run.events)
    return gaps.pop() if len(gaps) == 1 and len(applied) > 2 and not has_reasons else 1


def _steps(run: Run, skipped: list[int] | None) -> Iterator[Reading]:
    """Yield the skipped steps, and the steps that are not finite."""
    total = len(run.steps)
    out = set(skipped or ())
    if out and rows_per_step(run, skipped or []) == 1:
        kind = KINDS["skipped-steps"]
        steps = list(map(step_of, run.steps))
        leading = next((place for place, step in enumerate(steps) if step not in out), total)
        bound = (
            0
            if leading == total
            else min(leading, int(kind.bound)) + _SKIPPED + int(MAX_SKIPPED * total)
        )
        if len(out) > bound:
            words = (
                str(event.get("message")).rstrip(".")
                for event in run.events
                if event.get("kind") == "skip"
            )
            more = f": {next(words, 'no weight changed in them')}"
            yield kind.reading("", len(out), 0, bound, min(out), count=total, more=more)
    losses, norms = (
        set(map(int, column(run, "steps", name).gaps)) - out for name in ("loss", "grad_norm")
    )
    if failed := losses | norms:
        unit = "rows" if run.is_foreign else "steps"
        since = min(failed)
        before = max(
            (step for row in run.steps if (step := step_of(row)) < since), default=since - 1
        )
        began = (
            f" They began after step {before}, at the latest at {since}."
            if before < since - 1
            else ""
        )
        unknown = (
            ""
            if skipped is not None
            else " The log does not tell whether their steps were skipped."
        )
        advice = f"{len(failed)} of {total} {unit} have a loss or a gradient norm that is not finite.{began}{unknown} {_ORIGIN}"
        # A loss scaler skips such norms, as long as they pass.
        severity = (
            "note" if unknown and not losses and step_of(run.steps[-1]) not in failed else "error"
        )
        stage = "loss" if since in losses else "gradient"
        yield Reading(since, stage, "", "nonfinite-step", len(failed), 0, 0, advice, severity)


def _losses(run: Run, skipped: list[int]) -> Iterator[Reading]:
    """Yield a divergence that no event tells, or a loss that does not fall."""
    is_recorded = any(event.get("kind") == "divergence" for event in run.events)
    if len(skipped) == len(run.steps) or is_recorded:
        return
    values = column(run, "steps", "loss").finite
    end = max(map(step_of, run.steps))
    if not has_zero(values.tolist()):
        return
    if reason := divergence(run):
        yield Reading(end, "loss", "", "divergence", advice=f"The run diverged: {reason}.")
    elif len(values) >= FEWEST_STEPS:
        first, last = (float(np.median(part)) for part in np.array_split(values, 4)[::3])
        if last >= (least := first * KINDS["flat-loss"].bound):
            yield KINDS["flat-loss"].reading("", last, None, least, end, first=first)


def _scale(run: Run, skipped: list[int]) -> Iterator[Reading]:
    """Detect restarts of the loss scale: from step to step it at most doubles, unless a resume
    forgets it.
    """
    scales = column(run, "steps", "loss_scale")
    for (before, low), (step, high) in pairwise(
        zip(map(int, scales.x), scales.y.tolist(), strict=True)
    ):
        if step > before and low > 0 and high > low * 2.0 ** min(step - before, 60):
            after = [s for s in skipped if step <= s < step + 20]
            more = f"; then steps {', '.join(map(str, after))} were skipped" if after else ""
            yield KINDS["loss-scale-anew"].reading(
                "", high, low, low, step, before=before, more=more
            )


def _ranks(run: Run) -> Iterator[Reading]:
    for row in rows_of(run, "fingerprints"):
        key, _, message = parted_in(row)
        if key:
            reading = KINDS["ranks-differ"].reading(key, step=step_of(row), message=f"{message}.")
            yield replace(reading, stage=STAGE_OF[key.partition(":")[0]], bound=None)


def _resumes(run: Run) -> Iterator[Reading]:
    """Compare hashes around a resume: it hashes the loaded state, which must equal the saved state
    bit for bit.
    """
    for before, row in pairwise(rows_of(run, "fingerprints")):
        first = before.get("tensors") or {}
        second = row.get("tensors") or {}
        key = next(
            (key for key in first if key in second and first[key][0] != second[key][0]), None
        )
        if key is not None and step_of(row) == step_of(before):
            norms = number(second[key][1]), number(first[key][1])
            yield KINDS["changed-by-resume"].reading(key, *norms, step=step_of(row) + 1)


def _audits(run: Run, recipe: Recipe | None) -> Iterator[Reading]:
    """Yield readings of the audit over all parameters: what detectors read of one tensor, of the
    whole model.
    """
    alarms = Alarms(recipe)
    names = METRICS["updates"]
    for row in (row for row in run.steps if not names.keys().isdisjoint(row)):
        values = [row.get(name) for name in names]
        for event in alarms.on_gauges({"step": step_of(row), "updates": {"the model": values}}):
            yield replace(_of_event(event.row()), tensor="")


def _slower(run: Run) -> Iterator[Reading]:
    """Yield the first lasting fall of tokens per second: a block of steps whose median is far below
    those before.

    The median of all blocks before counts, or of their first quarter: a slow fall departs from it.
    Single slow steps do not.
    """
    kind = KINDS["slower-steps"]
    rate = column(run, "steps", "tokens_per_second")
    seconds = column(run, "steps", "seconds")
    steps = rate.x[rate.y > 0]
    rates = rate.y[rate.y > 0]
    size = min(_LASTING, len(rates) // 2)
    if size < 2:
        return
    medians = np.median(rates[len(rates) % size :].reshape(-1, size), 1)
    for place in range(1, len(medians)):
        usual = max(float(np.median(medians[:place])), float(np.median(medians[: -(-place // 4)])))
        is_slow = medians[place:] < usual * (1 - kind.bound)
        if is_slow[0]:
            first = len(rates) % size + place * size
            end = first + size * int(np.argmin([*is_slow, False]))
            while rates[first - 1] < usual * (1 - kind.bound):
                first -= 1
            value = float(np.median(rates[first:end]))
            begun = int(steps[first])
            last = int(steps[end - 1])
            lost = seconds.y[(seconds.x >= begun) & (seconds.x <= last)].sum() * (1 - value / usual)
            if lost >= _LEAST_SECONDS or not len(seconds):
                words = {
                    "last": last,
                    "factor": usual / value,
                    "more": "".join(_changes(run, begun, last)),
                }
                yield kind.reading(
                    "", value, usual, kind.bound * usual, begun, first=begun, **words
                )
                return


def _batches(run: Run) -> Iterator[Reading]:
    """Compare the checksums of the batches: one batch for ever, or the rows of an earlier stretch
    in the same order.
    """
    rows = [(step_of(row), str(row["batch_crc"])) for row in run.steps if row.get("batch_crc")]
    if len(rows) < FEWEST_BATCHES:
        return
    checksums = [checksum for _, checksum in rows]
    if len({*checksums}) == 1:
        yield KINDS["same-batch"].reading("", len(rows), 1, step=rows[1][0])
        return
    first = {checksum: place for place, checksum in reversed([*enumerate(checksums)])}
    resumes = {int(e["step"]) for e in run.events if e.get("kind") == "resume" and e.get("step")}
    for place in range(1, len(rows) - FEWEST_BATCHES + 1):
        start = first[checksums[place]]
        length = 0
        while place + length < len(rows) and checksums[place + length] == checksums[start + length]:
            length += 1
        if start < place and length >= FEWEST_BATCHES:
            begun, _ = rows[place]
            end, _ = rows[place + length - 1]
            words = {
                "begun": begun,
                "end": end,
                "first": rows[start][0],
                "last": rows[start + length - 1][0],
            }
            reading = KINDS["repeated-batches"].reading("", length, 0, step=begun, **words)
            yield replace(reading, severity="warning") if begun - 1 in resumes else reading
            return


def _rates(run: Run, skipped: list[int]) -> Iterator[Reading]:
    """Yield the rows at a rate of zero after others."""
    rates = [(step_of(row), row["lr"]) for row in run.steps if number(row.get("lr")) is not None]
    moving = [place for place, (_, rate) in enumerate(rates) if rate]
    if not moving:
        return
    still = [step for step, _ in rates[moving[-1] + 1 :] if step not in {*skipped}]
    if len(still) >= FEWEST_BATCHES:
        yield KINDS["zero-rate"].reading("", len(still), 0, step=still[0])


def _changes(run: Run, first: int, last: int) -> Iterator[str]:
    """Yield the columns of time that changed with the throughput: their medians before and then."""
    for name in ("loader_seconds", "communication_seconds", "wait_seconds", "utilization"):
        values = column(run, "steps", name)
        parts = values.y[values.x < first], values.y[(values.x >= first) & (values.x <= last)]
        before, then = (float(np.median(part)) if len(part) else math.nan for part in parts)
        if max(before, then) > 1.5 * min(before, then):
            yield f"; {name} went from {before:.3g} to {then:.3g}"
