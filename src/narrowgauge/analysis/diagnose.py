"""Diagnosis of one run: readings beyond their bound, earliest first, and areas that the record does
not show.

Events of the trainer and of ``ng.RunRecorder`` are readings. Any other record is read here, by the
same laws of rows. The diagnosis adds counts over the whole record, such as failed steps. A run
without a reading may still have a fault: shifted labels leave normal rows. So the diagnosis lists the
areas that it looked at, and the areas that this record cannot show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

import numpy as np

from narrowgauge.analysis.columns import column, loop_of, rows_of
from narrowgauge.analysis.comparison.classification import divergence, has_zero
from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.log import reading_of
from narrowgauge.analysis.reading import STAGE_OF, STAGES, Reading, Readings, in_order
from narrowgauge.analysis.row_laws import RowLaws
from narrowgauge.analysis.settings import recipe_of
from narrowgauge.analysis.thresholds import FEWEST_BATCHES, FEWEST_STEPS, MAX_SKIPPED
from narrowgauge.analysis.two_runs import TwoRuns
from narrowgauge.errors import RecordError
from narrowgauge.runs.finding import counted
from narrowgauge.runs.fingerprint_rows import parted_in
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import METRICS, Row, number, step_of
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.toml import load_data

_SKIPPED = 3
"""Skipped steps without a reading beside ``MAX_SKIPPED``, after the search for a loss scale."""
_ORIGIN = (
    "Repeat the first of these steps with ng.ranked_places, which names the operation and its line."
)
_LASTING = 20
_LEAST_SECONDS = 10.0
_SHARES = {"utilization": KINDS["idle-device"], "mfu": KINDS["idle-device"].case("mfu")}
"""Columns that hold a share of what the device could do, with the kind of a low one."""
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
        self.num_applied: int | None = None
        if skipped is not None:
            self.num_applied = self.num_rows - len(skipped)
        self._rows = counted(self.num_rows, "row" if run.is_foreign else "step")
        self.lines = [f"{self.name}: {self.verdict}"]

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        if not self.readings and not self.areas:
            return f"Nothing was looked at: {self._rows} without a value that is read."
        if not self.readings:
            applied = "" if self.num_applied is None else f", {self.num_applied:,} applied"
            return (
                f"Nothing found: {self._rows} watched{applied}; looked at {', '.join(self.areas)}."
            )
        since = self.readings[0].step
        sentence = f"1 reading is beyond its bound, at step {since}."
        if len(self.readings) > 1:
            sentence = (
                f"{len(self.readings)} readings are beyond their bound, from step {since} on."
            )
        for reading in self.readings:
            if reading.what == "skipped-steps":
                return f"{reading.value:,} of {self._rows} were skipped; {sentence}"
        return sentence

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as values for JSON."""
        return {
            "run": self.name,
            "verdict": self.verdict,
            "num_rows": self.num_rows,
            "num_applied": self.num_applied,
            "readings": list(map(asdict, self.readings)),
            "looked_at": self.areas,
            "unseen": self.unseen,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [super().__str__()]
        for note in self.notes:
            lines.append(f"Not recorded: {note}.")
        return "\n".join(lines)


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

    Cost: below a second for 10,000 steps. It takes longer for samples of the gauges that no recorder
    read, of many tensors.

    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> with ng.runs.RunWriter.create(folder, {"recipe": "bfloat16/word"}) as writer:
        ...     for step in range(1, 81):
        ...         writer.append("steps", {"step": step, "loss": 9.0 if step == 60 else 3.0 + 1.0 / step, "grad_norm": 1.0})
        >>> [(reading.step, reading.stage, reading.what) for reading in ng.diagnose(folder).readings]
        [(60, 'loss', 'loss-spike')]
    """
    first = run if isinstance(run, Run) else read_run(run)
    if other is None:
        return Diagnosis(first)
    return TwoRuns(first, other if isinstance(other, Run) else read_run(other))


def _notes(run: Run, skipped: list[int] | None) -> Iterator[str]:
    for name in ("gauges", "fingerprints"):
        try:
            getattr(run, name)
        except RecordError as error:
            yield f"the {name}: {error.message.rstrip('.')}"
    steps = list(map(step_of, run.steps))
    total = len(steps)
    if any(later <= before for before, later in pairwise(steps)):
        yield "the order of steps, some of which stand twice or after a later one"
    if steps and not run.is_foreign:
        done = int((run.summary or {}).get("steps") or 0)
        lost = done - len({*steps})
        if lost > 0:
            yield f"{lost} of the {counted(done, 'step')} of its summary"
    number = rows_per_step(run, skipped or [])
    if number > 1:
        reason = "as where recorder.step() follows each micro-batch"
        yield f"a step in most rows: one in {number} has one, {reason}"
    missing = total - len(column(run, "steps", "loss"))
    if missing:
        yield f"the loss of {missing} of the {counted(total, 'step')}"


# ── what was looked at ────────────────────────────────────────────────────────────────────────────


AREAS: dict[str, Row] = load_data("areas", "analysis")
"""The areas that a record may show: the columns that show each, and how to record it in each kind
of loop.
"""


def areas_of(run: Run, skipped: list[int] | None) -> tuple[list[str], dict[str, str]]:
    """Return the areas that the record shows, and the others with a way to record each; empty text
    if there is none.
    """
    loop = loop_of(run)
    shown = []
    unseen = {}
    for name, area in AREAS.items():
        if _is_shown(run, area):
            shown.append(name)
        else:
            unseen[name] = str(area.get(loop, area["recorder"]))
    if "lost updates" in unseen and run.steps and len(skipped or ()) == len(run.steps):
        unseen["lost updates"] = "no step was applied"
    for reading in events_of(run, "unseen"):
        unseen[reading.tensor] = reading.advice
    return shown, unseen


def _is_shown(run: Run, area: Row) -> bool:
    for place in area["reads"]:
        table, _, name = place.partition(".")
        for row in rows_of(run, table):
            if table == "fingerprints" and step_of(row) <= 1:
                continue  # hashes of the start alone
            values = [row.get(name)]
            if name.endswith("*"):
                values = [value for key, value in row.items() if key.startswith(name[:-1])]
            if any(value is not None for value in values):
                return True
    return False


# ── alarms ────────────────────────────────────────────────────────────────────────────────────────


def recorded_readings(run: Run, skipped: list[int] | None) -> list[Reading]:
    """Return the readings of a run beyond their bounds, earliest first.

    Keep the first step of each tensor and ``what``.
    """
    out = skipped or []
    readings = [*_steps(run, skipped), *_losses(run, out), *_scale(run, out), *_ranks(run)]
    readings += [*_resumes(run), *_audits(run), *_slower(run), *_idle(run)]
    readings += [*_batches(run), *_rates(run, out)]
    readings += alarms_of(run)
    groups: dict[tuple[str, str], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((reading.what, reading.tensor), []).append(reading)
    readings = list(map(_first, groups.values()))
    # One value that is not finite makes all later ones so. The first in the order of a step tells
    # the origin.
    bad = [r for r in readings if "nonfinite" in r.what]
    if len(bad) > 1:
        origin = min(bad, key=lambda r: (r.step, STAGES.index(r.stage), not r.tensor))
        readings = [r for r in readings if r not in bad]
        more = f" Later readings that follow from it: {len(bad) - 1}."
        readings.append(replace(origin, advice=origin.advice + more))
    return in_order(readings)


def _first(readings: list[Reading]) -> Reading:
    """Return the first of several readings of one thing.

    Add their number, and the last value, to its advice.
    """
    first = min(readings, key=lambda r: r.step)
    last = max(readings, key=lambda r: r.step)
    if first.step == last.step:
        return first
    value = "" if last.value in (first.value, None) else f": {last.value:.3g}"
    times = len({reading.step for reading in readings})
    return replace(first, advice=f"{times} times, last at step {last.step}{value}. {first.advice}")


def alarms_of(run: Run) -> list[Reading]:
    """Return the recorded readings of a run, and those of its rows if no recorder read them."""
    recorded = []
    for reading in map(reading_of, run.events):
        if reading.severity != "note" or reading.what in KINDS:
            recorded.append(reading)
    was_read = "recorder" in run.run or isinstance(run.run.get("data"), dict)
    if was_read and run.events:
        return recorded
    kinds = {"divergence", *(reading.what for reading in recorded)}  # _losses reads the former
    for reading in RowLaws(recipe_of(run)).read(run.steps, rows_of(run, "gauges")):
        if reading.what not in kinds:
            recorded.append(reading)
    return recorded


# ── counts ────────────────────────────────────────────────────────────────────────────────────────


def skipped_steps(run: Run) -> list[int] | None:
    """Return the steps whose update was not applied, by the column ``skipped``; ``None`` if no row
    has it.
    """
    flags = column(run, "steps", "skipped")
    if not len(flags):
        return None
    return [int(step) for step in flags.x[flags.y > 0]]


def rows_per_step(run: Run, skipped: list[int]) -> int:
    """Return the number of rows for each step, as of micro-batches: 1 unless steps come evenly and
    no loss is scaled.
    """
    applied = []
    out = set(skipped)
    for place, row in enumerate(run.steps):
        if row.get("loss_scale") is not None or row.get("spike") is not None:
            return 1
        if step_of(row) not in out:
            applied.append(place)
    gaps = {after - before for before, after in pairwise(applied)}
    if len(gaps) != 1 or len(applied) <= 2 or events_of(run, "skip"):
        return 1
    return gaps.pop()


def events_of(run: Run, what: str) -> list[Reading]:
    """Return the logged readings of a kind."""
    return [reading for reading in map(reading_of, run.events) if reading.what == what]


def _steps(run: Run, skipped: list[int] | None) -> Iterator[Reading]:
    """Yield the skipped steps, and the steps that are not finite."""
    out = set(skipped or ())
    if out and rows_per_step(run, skipped or []) == 1:
        yield from _skips(run, out)
    bad_losses = set(map(int, column(run, "steps", "loss").gaps)) - out
    failed = bad_losses | (set(map(int, column(run, "steps", "grad_norm").gaps)) - out)
    if not failed:
        return
    unit = "rows" if run.is_foreign else "steps"
    since = min(failed)
    before = -1
    for step in map(step_of, run.steps):
        if before < step < since:
            before = step
    if before < 0:
        before = since - 1
    advice = f"{len(failed)} of {len(run.steps)} {unit} have a loss or a gradient norm that is not"
    advice += " finite."
    if before < since - 1:
        advice += f" They began after step {before}, at the latest at {since}."
    severity = "error"
    if skipped is None:
        advice += " The log does not tell whether their steps were skipped."
        # A loss scaler skips such norms, as long as they pass.
        if not bad_losses and step_of(run.steps[-1]) not in failed:
            severity = "note"
    stage = "loss" if since in bad_losses else "gradient"
    advice = f"{advice} {_ORIGIN}"
    yield Reading(since, stage, "", "nonfinite-step", len(failed), 0, 0, advice, severity)


def _skips(run: Run, skipped: set[int]) -> Iterator[Reading]:
    kind = KINDS["skipped-steps"]
    total = len(run.steps)
    leading = 0  # skipped steps before the first that was applied
    while leading < total and step_of(run.steps[leading]) in skipped:
        leading += 1
    bound = 0
    if leading < total:
        bound = min(leading, int(kind.bound)) + _SKIPPED + int(MAX_SKIPPED * total)
    if len(skipped) > bound:
        reason = "no weight changed in them"
        for reading in events_of(run, "skip")[:1]:
            reason = reading.advice
        words = {"count": total, "more": f": {reason.rstrip('.')}"}
        yield kind.reading("", len(skipped), 0, bound, min(skipped), **words)


def _losses(run: Run, skipped: list[int]) -> Iterator[Reading]:
    """Yield a divergence that no event tells, or a loss that does not fall."""
    if len(skipped) == len(run.steps) or events_of(run, "divergence"):
        return
    values = column(run, "steps", "loss").finite
    end = max(map(step_of, run.steps))
    if not has_zero(values.tolist()):
        return
    reason = divergence(run)
    if reason:
        yield Reading(end, "loss", "", "divergence", advice=f"The run diverged: {reason}.")
    elif len(values) >= FEWEST_STEPS:
        kind = KINDS["constant-loss"].case("flat")
        quarters = np.array_split(values, 4)
        first = float(np.median(quarters[0]))
        last = float(np.median(quarters[-1]))
        least = first * kind.bound
        if last >= least:
            yield kind.reading("", last, None, least, end, first=first)


def _scale(run: Run, skipped: list[int]) -> Iterator[Reading]:
    """Detect restarts of the loss scale: from step to step it at most doubles, unless a resume
    forgets it.
    """
    scales = column(run, "steps", "loss_scale")
    rows = zip(map(int, scales.x), scales.y.tolist(), strict=True)
    for (before, low), (step, high) in pairwise(rows):
        if step > before and low > 0 and high > low * 2.0 ** min(step - before, 60):
            after = [str(s) for s in skipped if step <= s < step + 20]
            more = ""
            if after:
                more = f"; then steps {', '.join(after)} were skipped"
            words = {"before": before, "more": more}
            yield KINDS["loss-scale-anew"].reading("", high, low, low, step, **words)


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
    kind = KINDS["weights-written"].case("resume")
    for before, row in pairwise(rows_of(run, "fingerprints")):
        step = step_of(row)
        if step != step_of(before):
            continue
        saved = before.get("tensors") or {}
        loaded = row.get("tensors") or {}
        for key, entry in saved.items():
            if key in loaded and loaded[key][0] != entry[0]:
                yield kind.reading(key, number(loaded[key][1]), number(entry[1]), step=step + 1)
                break


def _audits(run: Run) -> Iterator[Reading]:
    """Read the audit over all parameters, as of one tensor."""
    laws = RowLaws(recipe_of(run))
    names = METRICS["updates"]
    for row in run.steps:
        if names.keys().isdisjoint(row):
            continue
        values = list(map(row.get, names))
        for reading in laws.of_sample({"step": step_of(row), "updates": {"the model": values}}):
            yield replace(reading, tensor="")
    if not events_of(run, "lost-updates"):
        yield from _unreported_losses(run)


def _unreported_losses(run: Run) -> Iterator[Reading]:
    """Yield the steps whose recorded audit stored too little, in a record without the audit's own
    events.
    """
    advice = "Take a storage that keeps what the weights' format cuts, such as 'word'."
    stored = column(run, "steps", "edq")
    for step, value in zip(stored.x, stored.y, strict=True):
        if value < MIN_EDQ:
            bound = 1.0 - MIN_EDQ
            yield Reading(
                int(step), "storage", "", "lost-updates", float(value), 1.0, bound, advice
            )


def _slower(run: Run) -> Iterator[Reading]:
    """Yield the first lasting fall of tokens per second: a block of steps whose median is far below
    those before.

    The median of all blocks before counts, or of their first quarter: a slow fall departs from it.
    Single slow steps do not.
    """
    kind = KINDS["slower-steps"]
    rate = column(run, "steps", "tokens_per_second")
    steps = rate.x[rate.y > 0]
    rates = rate.y[rate.y > 0]
    size = min(_LASTING, len(rates) // 2)
    if size < 2:
        return
    start = len(rates) % size
    medians = np.median(rates[start:].reshape(-1, size), 1)
    for place in range(1, len(medians)):
        quarter = medians[: -(-place // 4)]
        usual = max(float(np.median(medians[:place])), float(np.median(quarter)))
        least = usual * (1 - kind.bound)
        if medians[place] >= least:
            continue
        end = place
        while end < len(medians) and medians[end] < least:
            end += 1
        first = start + place * size
        while rates[first - 1] < least:
            first -= 1
        while rates[first] >= least:
            first += 1
        last = start + end * size - 1
        while rates[last] >= least:
            last -= 1
        value = float(np.median(rates[first : last + 1]))
        started = int(steps[first])
        ended = int(steps[last])
        seconds = column(run, "steps", "seconds")
        within = seconds.y[(seconds.x >= started) & (seconds.x <= ended)]
        lost = within.sum() * (1 - value / usual)
        if lost >= _LEAST_SECONDS or not len(seconds):
            more = "".join(_changes(run, started, ended))
            words = {"first": started, "last": ended, "factor": usual / value, "more": more}
            yield kind.reading("", value, usual, kind.bound * usual, started, **words)
            return


def _idle(run: Run) -> Iterator[Reading]:
    """Yield a device that was idle for most of the median step, and one far below its peak."""
    for name, kind in _SHARES.items():
        values = column(run, "steps", name)
        if len(values.y) < 2:
            continue
        shares = values.y
        if shares.max() > 1.5:  # in percent
            shares = shares / 100
        share = float(np.median(shares))
        if share < 1 - kind.bound:
            waits = "".join(_waits(run))
            step = int(values.x[np.argmax(shares < 1 - kind.bound)])
            yield kind.reading("", share, 1.0, step=step, more=waits)


def _waits(run: Run) -> Iterator[str]:
    """Yield the recorded times that a step waited, in the median."""
    for name in ("loader_seconds", "wait_seconds"):
        values = column(run, "steps", name)
        if len(values.y):
            yield f"; {name} is {float(np.median(values.y)):.3g}"


def _batches(run: Run) -> Iterator[Reading]:
    """Compare the checksums of the batches: one batch for ever, or the rows of an earlier stretch
    in the same order.
    """
    steps = []
    checksums = []
    for row in run.steps:
        if row.get("batch_crc"):
            steps.append(step_of(row))
            checksums.append(str(row["batch_crc"]))
    total = len(steps)
    if total < FEWEST_BATCHES:
        return
    if len({*checksums}) == 1:
        yield KINDS["equal-batches"].reading("", total, 1, step=steps[1])
        return
    first: dict[str, int] = {}
    for place, checksum in enumerate(checksums):
        first.setdefault(checksum, place)
    for place in range(1, total - FEWEST_BATCHES + 1):
        start = first[checksums[place]]
        length = 0
        while place + length < total and checksums[place + length] == checksums[start + length]:
            length += 1
        if start < place and length >= FEWEST_BATCHES:
            started = steps[place]
            words = {"begun": started, "end": steps[place + length - 1]}
            words |= {"first": steps[start], "last": steps[start + length - 1]}
            reading = (
                KINDS["equal-batches"]
                .case("repeated")
                .reading("", length, 0, step=started, **words)
            )
            resumes = [event.step for event in events_of(run, "resume")]
            if started > 1 and started - 1 in resumes:
                reading = replace(reading, severity="warning")
            yield reading
            return


def _rates(run: Run, skipped: list[int]) -> Iterator[Reading]:
    """Yield the rows at a rate of zero after others, and a rate that a whole run never reached."""
    still: list[int] = []
    has_moved = False
    highest = 0.0
    for row in run.steps:
        rate = number(row.get("lr"))
        highest = max(highest, rate or 0.0)
        if rate:
            has_moved = True
            still = []
        elif rate is not None and has_moved and step_of(row) not in skipped:
            still.append(step_of(row))
    if len(still) >= FEWEST_BATCHES:
        yield KINDS["learning-rate"].reading("", len(still), 0, step=still[0], words="")
    asked = _asked_rate(run)
    kind = KINDS["learning-rate"].case("not-reached")
    is_long = run.summary is not None and len(run.steps) >= FEWEST_STEPS
    if asked and is_long and 0 < highest < kind.bound * asked:
        step = step_of(run.steps[-1])
        yield kind.reading("", highest, None, kind.bound * asked, step, asked=asked)


def _asked_rate(run: Run) -> float:
    """Return the learning rate of the settings, or that of the optimizer before its schedule."""
    optimizer = run.run.get("optimizer")
    settings = run.run.get("config")
    for table, name in ((settings, "lr"), (run.run, "lr"), (optimizer, "initial_lr")):
        rate = number(table.get(name)) if isinstance(table, dict) else None
        if rate:
            return rate
    return 0.0


def _changes(run: Run, first: int, last: int) -> Iterator[str]:
    """Yield the columns of time that changed with the throughput: their medians before and then."""
    for name in ("loader_seconds", "communication_seconds", "wait_seconds", "utilization"):
        values = column(run, "steps", name)
        before = values.y[values.x < first]
        then = values.y[(values.x >= first) & (values.x <= last)]
        if len(before) and len(then):
            medians = [float(np.median(before)), float(np.median(then))]
            if max(medians) > 1.5 * min(medians):
                yield f"; {name} went from {medians[0]:.3g} to {medians[1]:.3g}"
