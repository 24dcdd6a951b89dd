"""Diagnosis of a run: the laws of the watch, asked of its record.

A run without a reading may still have a fault: shifted labels leave normal rows. So the diagnosis
lists what the record shows, and what it does not.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from narrowgauge.measuring.columns import rows_of
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.laws import Laws
from narrowgauge.measuring.reading import STAGES, Reading, Readings
from narrowgauge.measuring.step import Step
from narrowgauge.measuring.two_runs import TwoRuns
from narrowgauge.runs.finding import counted, sentences
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import number, step_of

AREAS = {
    "losses": "steps.loss", "gradient norms": "steps.grad_norm", "skipped steps": "steps.skipped",
    "throughput": "steps.tokens_per_second", "evaluations": "evals.val_loss", "gradients of tensors": "steps.arrived",
    "stored updates": "steps.stored", "audits": "steps.edq", "casts of layers": "gauges.tensors",
    "hashes of weights": "fingerprints.tensors",
}  # fmt: skip
"""What a record may show, and the column that shows it."""
FLAGS = {"casts of layers": "gauges_every=20", "hashes of weights": "fingerprints_every=20"}
"""Options of the recorder that some areas need."""
OUTSIDE = {
    "the gradient itself": "ng.check(model, optimizer, batch=…, loss=…)",
    "labels and masks": "",
}
"""What no record shows."""


class Diagnosis(Readings):
    """Hold the readings of one run; ``print`` shows a table.

    Args:
        run: the record.

    Attributes:
        readings: beyond their bound. Sorted by step, stage, and excess (largest first).
        unseen: areas that the record does not show.
        areas: areas that the record shows.
        num_rows: recorded rows. A row of our records is a step; logs of other frameworks may skip
            steps.
        num_applied: rows with an applied update; ``None`` if the record does not tell.
        is_finished: somebody said so, or the last planned step is written; true for a log of another
            program.
        notes: unreadable parts of the record, a sentence each.
    """

    def __init__(self, run: Run) -> None:
        self.areas = [name for name, place in AREAS.items() if _is_shown(run, place)]
        unseen = {name: FLAGS.get(name, "") for name in AREAS if name not in self.areas}
        for row in run.events:
            if row["what"] == "unseen":
                unseen[str(row.get("tensor"))] = str(row.get("text") or "").rstrip(".")
        super().__init__(readings_of(run), unseen=unseen | OUTSIDE)
        self.name = run.path.name or run.path.resolve().name
        self.notes = list(run.notes)
        self.num_rows = len(run.steps)
        self.is_finished = is_finished(run)
        flags = [row["skipped"] for row in run.steps if row.get("skipped") is not None]
        self.num_applied = self.num_rows - sum(map(bool, flags)) if flags else None
        self._rows = counted(self.num_rows, "row" if run.is_foreign else "step")
        self.lines = [f"{self.name}: {self.verdict}"]
        for row in run.events:
            if row.get("severity", "note") != "note" and row["what"] not in KINDS:
                words = sentences(str(row.get("text") or ""))
                self.lines.append(f"step {step_of(row)}: {row['what']}: {words}")

    @property
    def verdict(self) -> str:
        """Return the verdict in one sentence."""
        end = "" if self.is_finished else " The run is not finished."
        number = len(self.readings)
        if number == 1:
            return f"1 reading is beyond its bound, at step {self.readings[0].step}.{end}"
        if number:
            since = self.readings[0].step
            return f"{number} readings are beyond their bound, from step {since} on.{end}"
        if not self.areas:
            return f"Nothing was looked at: {self._rows} without a value that is read.{end}"
        applied = "" if self.num_applied is None else f", {self.num_applied:,} applied"
        areas = ", ".join(self.areas)
        return f"Nothing found: {self._rows} watched{applied}; looked at {areas}.{end}"

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as values for JSON."""
        return {
            "run": self.name,
            "verdict": self.verdict,
            "num_rows": self.num_rows,
            "num_applied": self.num_applied,
            "is_finished": self.is_finished,
            "readings": super().to_dict()["readings"],
            "looked_at": self.areas,
            "unseen": self.unseen,
            "notes": self.notes,
        }

    def __str__(self) -> str:
        lines = [super().__str__()]
        for note in self.notes:
            lines.append(f"Not recorded: {note}.")
        return "\n".join(lines)


def diagnose(run: str | Path | Run, other: str | Path | Run | None = None) -> Diagnosis | TwoRuns:
    """Show the readings of a run beyond their bound, or find the first difference of two runs.

    Nothing is guessed: each reading is a recorded number and its expected value or limit.

    Args:
        run: a run folder, the log of another framework, or a result of
            :func:`narrowgauge.read_run`.
        other: a second run that should have been equal.

    Returns:
        The readings beyond their bound, and the areas that the record does not show. For two runs,
            their differences.

    Raises:
        RecordError: there is no run, or its record is damaged.

    Cost: about a second for 10,000 steps.

    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> from narrowgauge.runs import RunWriter
        >>> with RunWriter.create(folder, {"config": {"recipe": "bfloat16/word"}}) as writer:
        ...     for step in range(1, 81):
        ...         _ = writer.append("steps", {"step": step, "loss": 9.0 if step == 60 else 3.0 + 1.0 / step})
        >>> [(reading.step, reading.stage, reading.what) for reading in ng.diagnose(folder).readings]
        [(60, 'loss', 'loss-spike')]
    """
    runs = []
    for one in (run, other):
        if one is not None:
            runs.append(one if isinstance(one, Run) else read_run(one))
    return Diagnosis(*runs) if other is None else TwoRuns(*runs)


def is_finished(run: Run) -> bool:
    """Return whether somebody said that a run is finished, or its last planned step is written."""
    if run.is_foreign or run.summary is not None:
        return True
    planned = run.config.get("steps")
    return bool(planned) and bool(run.steps) and step_of(run.steps[-1]) == planned


# ── the readings ──────────────────────────────────────────────────────────────────────────────────


def steps_of(run: Run) -> list[Step]:
    """Return the steps that a record holds, samples of the gauges after the step that they are of."""
    steps = [*map(Step.of, run.steps), *map(Step.of_gauges, rows_of(run, "gauges"))]
    return sorted(steps, key=lambda step: step.step)


def readings_of(run: Run) -> list[Reading]:
    """Return the readings of a run: of each kind the first, or the newest of a count over the run."""
    laws = Laws(ignored(run))
    first: dict[str, Reading] = {}
    last: list[Reading] = []
    for step in steps_of(run):
        last = laws.read(step)
        for reading in last:
            if KINDS[reading.what].over != "run":
                first.setdefault(reading.what, reading)
    readings = [*first.values()]
    readings += [reading for reading in last if KINDS[reading.what].over == "run"]
    by_laws = {reading.what for reading in readings}
    readings += [reading for reading in _logged(run) if reading.what not in by_laws]
    return readings


def ignored(run: Run) -> tuple[str, ...]:
    """Return the kinds that the recorded loop intends."""
    table = run.run.get("watch")
    return tuple(map(str, table.get("ignore", ()))) if isinstance(table, dict) else ()


def _logged(run: Run) -> Iterator[Reading]:
    """Yield the readings in the events of a record that need more than its rows."""
    told = set()
    for row in run.events:
        what = str(row["what"])
        tensor = str(row.get("tensor") or "")
        if what not in KINDS or what in _OF_ROWS or (what, tensor) in told:
            continue
        told.add((what, tensor))
        stage = row["stage"] if row.get("stage") in STAGES else KINDS[what].stage
        numbers = [number(row.get(name)) for name in ("value", "expected", "bound")]
        yield Reading(step_of(row), stage, tensor, what, *numbers)


_OF_ROWS = {
    name for name, kind in KINDS.items() if kind.by.startswith(("ng.watch", "recorder.step"))
}
_OF_ROWS.discard("lost-updates")
"""Kinds that the laws read again."""


def _is_shown(run: Run, place: str) -> bool:
    """Return whether a record has a column. Hashes of the start alone show nothing."""
    table, _, name = place.partition(".")
    least = 1 if table == "fingerprints" else -1
    return any(row.get(name) is not None and step_of(row) > least for row in rows_of(run, table))
