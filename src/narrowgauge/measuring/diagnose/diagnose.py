"""Diagnosis of a run: the laws of the watch, asked of its record.

A run without a reading may still have a fault: shifted labels leave normal rows. So the diagnosis
lists what the record shows, and what it does not.
"""

import heapq
from collections.abc import Iterable, Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

from narrowgauge.measuring.diagnose.first_difference import FirstDifference, first_difference
from narrowgauge.measuring.diagnose.laws import Laws
from narrowgauge.measuring.diagnose.settings_diff import recipe_of
from narrowgauge.measuring.diagnose.step_metrics import COLUMNS, StepMetrics
from narrowgauge.measuring.kinds import KINDS
from narrowgauge.measuring.reading import Reading, Readings, measured
from narrowgauge.runs.foreign_logs import NAMES
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.text import join_names, plural
from narrowgauge.spec.tables import Row

FLAGS = {
    "losses": "recorder.step(loss)", "throughput": "recorder.step(tokens=)", "the clip": "max_grad_norm=",
    "whether gradient norms are finite": "recorder.step(grad_norm=)", "whether evaluations are finite": "recorder.evaluate(loss)",
    "audits": "audit_every=10",
}  # fmt: skip
"""Calls and options that some areas need."""
STATES = ("exp_avg", "state:")
"""What the keys of states in a row of fingerprints begin with."""
FIRST = 2
"""Rows at the start that may lack what compares a step with the one before."""
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
        is_finished: somebody said so, or the last planned step is written; true for a log of another
            program.
        verdict: the result in one sentence.
    """

    also = ("verdict", "is_finished")

    def __init__(self, run: Run) -> None:
        laws = Laws(ignored(run))
        readings = readings_of(run, laws)
        looked_at = laws.looked_at()
        areas = areas_of(run, laws)
        self.areas = [area for area in areas if area in looked_at]
        super().__init__(readings, unseen=_unseen(run, laws, areas, readings))
        self.name = run.path.name or run.path.resolve().name
        self.is_finished = is_finished(run)
        rows = plural(laws.num_rows, "row")
        if self.readings:
            number = plural(len(self), "reading")
            self.verdict = f"{number} beyond the bound, the first at step {self[0].step}."
        elif self.areas:
            places = [_shown(area, laws, self.unseen) for area in self.areas]
            self.verdict = f"Nothing found: {rows} watched; looked at {', '.join(places)}."
        else:
            self.verdict = f"Nothing was looked at: {rows} without a value that is read."
        if not self.is_finished:
            self.verdict += " The run is not finished."
        self.lines = [f"{self.name}: {self.verdict}"]
        for rank, names in run.run.get("unlike_ranks", {}).items():
            self.lines.append(
                f"Rank {rank} rounds otherwise than most ranks, in {join_names(names)}."
            )
        self.lines += [f"Not read: {note}." for note in run.notes]

    def to_dict(self) -> dict[str, Any]:
        """Return the diagnosis as values for JSON."""
        return super().to_dict() | {"run": self.name, "looked_at": self.areas}


def diagnose(
    run: str | Path | Run, other: str | Path | Run | None = None
) -> Diagnosis | FirstDifference:
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
    return first_difference(first, other if isinstance(other, Run) else read_run(other))


def is_finished(run: Run) -> bool:
    """Return whether somebody said that a run is finished, or its last planned step is written."""
    if run.is_foreign or run.summary is not None:
        return True
    planned = run.config.get("steps")
    return planned is not None and run.last_step.get("step") == planned


# ── the readings ──────────────────────────────────────────────────────────────────────────────────


def steps_of(run: Run) -> Iterator[StepMetrics]:
    """Yield the steps that a record holds."""
    return map(StepMetrics.of, heapq.merge(run.steps, run.evals, key=itemgetter("step")))


def areas_of(run: Run, laws: Laws) -> list[str]:
    """Return the areas that a run could have shown: those of the columns that a log of another program
    may have, or else those of a recorded loop.
    """
    if run.is_foreign:
        names = {*NAMES}
    else:
        has_audits = "storage" in run.run.get("optimizer", {}) or recipe_of(run) is not None
        absent = {"utilization", "stored" if has_audits else "edq"}
        if run.run.get("machine", {}).get("ranks", 1) == 1:
            absent |= {"apart", "unsummed", "same_data"}
        names = COLUMNS.keys() - absent | laws.columns
    areas = [column.area for name, column in COLUMNS.items() if name in names]
    return [*filter(None, dict.fromkeys(areas))]


def _unseen(run: Run, laws: Laws, areas: list[str], readings: list[Reading]) -> dict[str, str]:
    """Return what was not looked at: counts below their bound, areas, what the watch could not measure, and
    what it told of an earlier step and not of the last.
    """
    unseen = {}
    for reading in laws.usual:
        name = f"{reading.what} of {reading.tensor or 'the run'}"
        unseen[name] = reading.text.partition(". ")[0]
    looked_at = laws.looked_at()
    flags = {} if run.is_foreign else FLAGS
    recorded = {COLUMNS[name].area for name in laws.columns}
    for area in areas:
        if area not in looked_at:
            unseen[area] = "too few rows" if area in recorded else flags.get(area, "")
    told = {reading.what for reading in readings}
    for row in run.events:
        name = str(row.get("tensor") or "the run")
        if row["what"] == "unseen":
            unseen.pop(name.partition(" by ")[0], None)  # of an area only a part was not seen
            unseen[name] = str(row.get("text") or "").rstrip(".")
        elif row["what"] in KINDS.keys() - told:
            words = f"was told of step {row['step']}, not of the last"
            unseen.setdefault(f"{row['what']} of {name}", words)
    return unseen | OUTSIDE


def _shown(area: str, laws: Laws, unseen: Iterable[str]) -> str:
    """Return an area, the part of it that was not seen, and in how many rows it was, if not in all."""
    rows = laws.looked_at()[area]
    parts = [name.removeprefix(f"{area} ") for name in unseen if name.startswith(f"{area} by ")]
    if parts:
        area = f"{area} (but those {', '.join(parts)})"
    if area == COLUMNS["val_loss"].area or rows >= laws.num_rows - FIRST:
        return area
    return f"{area} ({rows:,} of {laws.num_rows:,} rows)"


def readings_of(run: Run, laws: Laws) -> list[Reading]:
    """Return the readings of a run: the first of each kind and stage. Of a count over the run return
    the newest.
    """
    first = dict[tuple[str, str], Reading]()
    counts = first.copy()
    for step in steps_of(run):
        counts = {}
        for reading in laws.read(step):
            key = reading.what, reading.stage
            if KINDS[reading.what].over == "step":
                first.setdefault(key, reading)
            else:
                counts[key] = reading
    readings = [*{**first, **counts}.values()]
    if "not-restored" not in laws.ignore:
        readings += _not_restored(run)
    return readings


def _not_restored(run: Run) -> Iterator[Reading]:
    """Yield the states with which a resume begins, where the step before it left others.

    Weights are left out: a loop may change them between a step and its checkpoint.
    """
    before: dict[int, Row] = {}
    for row in run.fingerprints:
        earlier = before.setdefault(row["step"], row["tensors"])
        names = []
        for key, entry in earlier.items():
            if key.startswith(STATES) and row["tensors"].get(key, [0])[0] != entry[0]:
                names.append(key)
        if names:
            yield measured("not-restored", names, len(names), 0.0, step=row["step"])


def ignored(run: Run) -> tuple[str, ...]:
    """Return the kinds that the recorded loop intends."""
    return tuple(run.run.get("watch", {}).get("ignore", ()))
