"""The sinks of a run's rows and events: the run folder, the screen, the callback ``on_row``, and the detectors.

Every row and event passes through here once, in order. The trainer and users' loops (:class:`narrowgauge.RunRecorder`) both use
it. The run folder comes first, so everything shown was written before. The detectors read only written rows.
So a resumed run restores them from its own folder. On several ranks rank 0 writes and shows. The others
have a writer and a screen that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Protocol, cast

from narrowgauge.analysis.alarms import Alarms
from narrowgauge.analysis.detectors import KINDS_OF_ALARMS
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.gauges.attach import Gauges
from narrowgauge.gauges.recording.fingerprints import Fingerprints
from narrowgauge.optim.audit import Alarm
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.recipes import Recipe


class Screen(Protocol):
    """Shows the progress of a run."""

    def stage(self, name: str) -> None:
        """Show a stage before the first step."""

    def start(self, name: str, step: int) -> None:
        """Begin to count steps, after ``step``."""

    def say(self, line: str) -> None:
        """Print one line."""

    def step(self, row: Row) -> None:
        """Show a row of ``steps.jsonl``."""

    def evaluation(self, row: Row) -> None:
        """Show a row of ``evals.jsonl``."""

    def summary(self, rows: list[Row]) -> None:
        """Show a table of finished runs."""


OnRow = Callable[[str, Row], object]
"""Takes each written row: the kind, named as its file (steps, evals, gauges, events), and the row."""


class Reporter:
    """Pass the rows and events of a run to all sinks.

    Args:
        on_row: called with the kind and the row after each row of steps, evaluations, gauges and events was written, only on
            rank 0. After a rollback the steps since the checkpoint are repeated.
        is_audited: the optimizer's audit raises ``lost_updates``, so no detector does.
    """

    def __init__(
        self,
        writer: RunWriter,
        console: Screen,
        recipe: Recipe | None,
        on_row: OnRow | None = None,
        is_audited: bool = True,
    ) -> None:
        self.writer, self.console, self.recipe, self.is_audited = writer, console, recipe, is_audited
        self.alarms = Alarms(recipe, is_audited=is_audited)
        self._alarms: list[str] = []
        self._on_row = on_row if on_row is not None and all_ranks().is_first else lambda kind, row: None

    @property
    def folder(self) -> Path:
        return self.writer.path

    def go_back(self, step: int, accept_lost: bool = False) -> Run:
        """Delete everything after ``step``, and return the remaining run."""
        self.writer.sync()
        self.writer.rewind(step, accept_lost=accept_lost)
        return self.rebuild()

    def rebuild(self) -> Run:
        """Restore the detectors from the run folder, which rank 0 reads. Return its content."""
        run = all_ranks().of_first(lambda: read_run(self.folder))
        self.alarms = Alarms(self.recipe, is_audited=self.is_audited)
        self.alarms.read(run.steps, run.gauges)
        return run

    def step(self, row: Row, gauges: Gauges | None = None) -> None:
        """Take a row of ``steps.jsonl`` and the gauges' newest reading."""
        self.writer.step(row)
        self.console.step(row)
        self._on_row("steps", row)
        for event in self.alarms.on_step(row):
            self.event(event, shown=True)
        if gauges is not None and gauges.last is not None:
            reading, gauges.last = gauges.last, None
            self.gauge(reading)

    def evaluation(self, row: Row) -> None:
        self.writer.eval(row)
        self.console.evaluation(row)
        self._on_row("evals", row)

    def gauge(self, row: Row) -> None:
        """Write a row of ``gauges.jsonl``, show it, and let the detectors read it."""
        self.writer.gauge(row)
        self._on_row("gauges", row)
        for event in self.alarms.on_gauges(row):
            self.event(event, shown=True)

    def fingerprint(self, prints: Fingerprints) -> None:
        """Take the newest row of ``fingerprints.jsonl``, if the step has one."""
        if prints.last is not None:
            reading, prints.last = prints.last, None
            self.writer.fingerprint(reading)

    def event(self, event: Event, shown: bool = False) -> None:
        """Write an event, and print it if ``shown``."""
        self.writer.event(event)
        if event.kind in KINDS_OF_ALARMS and event.kind not in self._alarms:
            self._alarms.append(event.kind)
        if shown:
            self.console.say(f"{event.kind.replace('_', ' ')}: {event.sentence}.")
        self._on_row("events", event.row())

    def lost_updates(self, alarms: list[Alarm], step: int, shown: bool = True) -> None:
        """Write an event for each alarm of the optimizer's audit. Print the worst if ``shown``."""
        for alarm in alarms:
            advice, value = f"storage '{alarm.fallback}'", alarm.reading.edq
            self.event(Event("lost_updates", step, alarm.message, alarm.tensor, value, advice=advice, detector="audit"))
        worst = min(alarms, key=lambda a: a.reading.edq)
        more = f" (and {len(alarms) - 1} more tensors, see events.jsonl)" if len(alarms) > 1 else ""
        if shown:
            self.console.say(f"warning: {worst.message}{more}")

    def finish(self, summary: Row) -> None:
        """Write the last event and ``summary.json``, and show it."""
        loss = summary.get("val_loss")
        message = f"after {summary['steps']} steps" if loss is None else f"validation loss {loss:.4f}"
        # Write the summary last: it makes the run finished. A finished run is not resumed to add missing parts.
        self.event(Event("finish", summary["steps"], message))
        self.writer.summary(summary)
        self.console.summary([summary])

    def advise(self) -> None:
        """After a run with an alarm, name the command that shows where it happened."""
        if self._alarms:
            kinds = ", ".join(kind.replace("_", " ") for kind in self._alarms)
            self.console.say(f"{kinds}: narrowgauge diagnose {self.folder} shows where")


# ── ranks beside the first: nothing is written or shown ─────────────────────────────────────────────────────────────


def _nothing(*_: Any, **__: Any) -> None:
    pass


class NullScreen:
    """A :class:`Screen` that shows nothing."""

    stage = start = say = step = evaluation = summary = _nothing


class NullWriter(AbstractContextManager[Any]):
    """A :class:`~narrowgauge.runs.writer.RunWriter` that writes nothing. Rank 0 writes the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path

    step = eval = gauge = fingerprint = event = summary = amend = rewind = sync = close = __exit__ = _nothing


def first_writer(folder: Path, make: Callable[[], RunWriter]) -> RunWriter:
    """Return the writer of a run folder on rank 0, and a null writer on the others. All ranks call it.

    An error of ``make`` is raised on all ranks.
    """
    writers: list[RunWriter] = []
    all_ranks().of_first(lambda: writers.append(make()))
    return writers[0] if writers else cast(RunWriter, NullWriter(folder))
