"""Diagnosis of a run: the laws of the watch, asked of its record.

A run without a reading may still have a fault: shifted labels leave normal rows. So the diagnosis
lists what the record shows, and what it does not.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.laws import Laws
from narrowgauge.measuring.reading import Reading, Readings
from narrowgauge.measuring.step import Step
from narrowgauge.measuring.two_runs import TwoRuns
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import number

AREAS = {
    "losses": ("steps", "loss"), "gradient norms": ("steps", "grad_norm"), "skipped steps": ("steps", "skipped"),
    "throughput": ("steps", "tokens_per_second"), "evaluations": ("evals", "val_loss"),
    "gradients of tensors": ("steps", "arrived"), "stored updates": ("steps", "stored"), "audits": ("steps", "edq"),
    "casts of layers": ("gauges", "tensors"), "hashes of weights": ("fingerprints", "tensors"),
}  # fmt: skip
"""What a record may show, and the file and column that show it."""
FLAGS = {"casts of layers": "gauges_every=20", "hashes of weights": "fingerprints_every=20"}
"""Options of the recorder that some areas need."""
OUTSIDE = {
    "the gradient itself": "ng.check(model, optimizer, batch=…, loss=…)",
    "labels and masks": "",
}
"""What no record shows."""
_OF_ROWS = ("ng.watch", "recorder.step")
"""Who measures the kinds that the laws read again from the rows."""


class Diagnosis(Readings):
    """Hold the readings of one run; ``print`` shows a table.

    Args:
        run: the record.

    Attributes:
        readings: beyond their bound. Sorted by step, stage, and excess (largest first).
        unseen: areas that the record does not show.
        areas: areas that the record shows.
        is_finished: somebody said so, or the last planned step is written; true for a log of another
            program.
        verdict: the result in one sentence.
    """

    def __init__(self, run: Run) -> None:
        self.areas = [name for name, place in AREAS.items() if _is_shown(run, *place)]
        unseen = {name: FLAGS.get(name, "") for name in AREAS if name not in self.areas}
        for row in run.events:
            if row["what"] == "unseen":
                unseen[str(row.get("tensor"))] = str(row.get("text") or "").rstrip(".")
        super().__init__(readings_of(run), unseen=unseen | OUTSIDE)
        self.name = run.path.name or run.path.resolve().name
        self.is_finished = is_finished(run)
        rows = counted(len(run.steps), "row")
        if self.readings:
            number = counted(len(self), "reading")
            self.verdict = f"{number} beyond the bound, the first at step {self.readings[0].step}."
        elif self.areas:
            self.verdict = f"Nothing found: {rows} watched; looked at {', '.join(self.areas)}."
        else:
            self.verdict = f"Nothing was looked at: {rows} without a value that is read."
        if not self.is_finished:
            self.verdict += " The run is not finished."
        self.lines = [f"{self.name}: {self.verdict}"]
        self.lines += [f"Not read: {note}." for note in run.notes]

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as values for JSON."""
        return super().to_dict() | {
            "run": self.name,
            "verdict": self.verdict,
            "is_finished": self.is_finished,
            "looked_at": self.areas,
        }


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
        RecordError: the run is missing, or its record is damaged.

    Cost: about a second for 10,000 steps.

    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> from narrowgauge.runs import Record
        >>> with Record.create(folder, {"config": {"recipe": "bfloat16/word"}}) as record:
        ...     for step in range(1, 81):
        ...         _ = record.append("steps", {"step": step, "loss": 9.0 if step == 60 else 3.0 + 1.0 / step})
        >>> [(reading.step, reading.stage, reading.what) for reading in ng.diagnose(folder).readings]
        [(60, 'loss', 'spike')]
    """
    first = run if isinstance(run, Run) else read_run(run)
    if other is None:
        return Diagnosis(first)
    return TwoRuns(first, other if isinstance(other, Run) else read_run(other))


def is_finished(run: Run) -> bool:
    """Return whether somebody said that a run is finished, or its last planned step is written."""
    if run.is_foreign or run.summary is not None:
        return True
    planned = run.config.get("steps")
    return any(row["step"] == planned for row in run.steps[-1:])


# ── the readings ──────────────────────────────────────────────────────────────────────────────────


def steps_of(run: Run) -> list[Step]:
    """Return the steps that a record holds, samples of the gauges after the step that they are of."""
    steps = [*map(Step.of, run.steps), *map(Step.of_gauges, run.gauges)]
    return sorted(steps, key=lambda step: step.step)


def readings_of(run: Run) -> list[Reading]:
    """Return the readings of a run: the first of each kind and stage. Of a count over the run return
    the newest.

    The events hold those that need more than the rows.
    """
    laws = Laws(ignored(run))
    readings: dict[tuple[str, str], Reading] = {}
    last: list[Reading] = []
    for step in steps_of(run):
        last = laws.read(step)
        for reading in last:
            if KINDS[reading.what].over == "step":
                readings.setdefault((reading.what, reading.stage), reading)
    readings |= {(r.what, r.stage): r for r in last if KINDS[r.what].over != "step"}
    from_rows = {reading.what for reading in readings.values()}
    for row in run.events:
        kind = KINDS.get(row["what"])
        if kind is None or kind.by.startswith(_OF_ROWS) or kind.name in from_rows:
            continue
        tensor = str(row.get("tensor") or "")
        numbers = [number(row.get(name)) for name in ("value", "expected", "bound")]
        reading = Reading(row["step"], kind.stage, tensor, kind.name, *numbers)
        readings.setdefault((kind.name, tensor), reading)
    return [*readings.values()]


def ignored(run: Run) -> tuple[str, ...]:
    """Return the kinds that the recorded loop intends."""
    return tuple(run.run.get("watch", {}).get("ignore", ()))


def _is_shown(run: Run, table: str, name: str) -> bool:
    """Return whether a record has a column. Hashes of the start alone show nothing."""
    least = 1 if table == "fingerprints" else -1
    return any(row.get(name) is not None and row["step"] > least for row in getattr(run, table))
