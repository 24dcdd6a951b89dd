"""Diagnosis of one run: readings beyond their bound, earliest first, and areas that the record does
not show.

The laws that a watch asks while a loop runs are asked of the record, and then those of a whole run.
Events of the record are readings too. A run without a reading may still have a fault: shifted labels
leave normal rows. So the diagnosis lists the areas that it looked at, and the areas that this record
cannot show.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, overload

from narrowgauge.analysis.columns import column, loop_of, rows_of
from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.laws import Laws
from narrowgauge.analysis.log import reading_of
from narrowgauge.analysis.reading import STAGES, Reading, Readings, in_order
from narrowgauge.analysis.snapshot import Facts, snapshots_of
from narrowgauge.analysis.whole_run import (
    events_of,
    rows_per_step,
    skipped_steps,
    whole_run_readings,
)
from narrowgauge.errors import RecordError
from narrowgauge.measuring.two_runs import TwoRuns
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row, step_of
from narrowgauge.spec.toml import load_data


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

    Cost: below a second for 10,000 steps. It takes longer for sampled steps of many tensors.

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
    for name in ("gauges", "snapshots", "fingerprints"):
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
    readings = [*whole_run_readings(run, skipped)]
    # Of a diverged run these tell how it ended.
    has_ended = any(reading.what == "divergence" for reading in readings)
    for reading in _law_readings(run):
        if not (has_ended and reading.what == "divergence"):
            readings.append(reading)
    for reading in map(reading_of, run.events):
        if reading.severity != "note" or reading.what in KINDS:
            readings.append(reading)
    groups: dict[tuple[str, ...], list[Reading]] = {}
    for reading in readings:
        groups.setdefault((reading.what, reading.stage, reading.tensor), []).append(reading)
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


def _law_readings(run: Run) -> Iterator[Reading]:
    """Ask the laws of the snapshots that the record holds."""
    laws = Laws(Facts.of_run(run))
    for now in snapshots_of(run):
        yield from laws.read(now)
