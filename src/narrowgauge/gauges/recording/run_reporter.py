"""Where a run's rows and events go: the run folder, the screen, the loggers that were requested, and the detectors.

Everything passes through here once, in the order in which it happens, whether the trainer runs the loop or a user does
(:class:`narrowgauge.RunRecorder`). The run folder comes first, so whatever was shown was written. The detectors read only rows
that were written, so a resumed run restores them from its own folder. On several ranks the first writes and shows; the others
have a writer and a screen that do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

from narrowgauge.analysis.monitor.alarms import Alarms
from narrowgauge.analysis.monitor.detectors import SERIOUS
from narrowgauge.analysis.monitor.spikes import StepJudgement
from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.gauges.attach import Gauges
from narrowgauge.gauges.recording.fingerprints import Fingerprints, require_alike
from narrowgauge.gauges.recording.step_row import what_saturated
from narrowgauge.matmul.swapping import NarrowLayers
from narrowgauge.optim.audit import Alarm
from narrowgauge.runs.events import Event
from narrowgauge.runs.loggers.logger import LOGGERS, Delivery
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.recipes import Recipe


class Screen(Protocol):
    """Shows the progress of a run."""

    def stage(self, what: str) -> None:
        """Show what happens before the first step."""

    def start(self, name: str, step: int) -> None:
        """Begin to count steps, after ``step``."""

    def compiling(self, what: str, number: int) -> None:
        """Show that a ``"kernel"`` or ``"graph"`` compiles, which takes seconds; ``number`` counts those of the run, from 1."""

    def say(self, line: str) -> None:
        """Print one line."""

    def step(self, row: Row) -> None:
        """Show a row of ``steps.jsonl``."""

    def evaluation(self, row: Row) -> None:
        """Show a row of ``evals.jsonl``."""

    def stopping(self, line: str) -> None:
        """Show one line from a signal handler, which may interrupt any other output."""

    def summary(self, rows: list[Row]) -> None:
        """Show a table of finished runs."""


class Reporter:
    """Passes the rows and events of a run to all sinks.

    Args:
        loggers: names in :data:`narrowgauge.runs.loggers.logger.LOGGERS`; given on the first rank alone.
        settings: of the run, for the loggers.
        is_audited: the optimizer's audit raises ``lost_updates``, so no detector does.
    """

    def __init__(
        self,
        writer: RunWriter,
        console: Screen,
        recipe: Recipe | None,
        loggers: Iterable[str] = (),
        settings: Row | None = None,
        step: int = 0,
        is_audited: bool = True,
    ) -> None:
        self.writer, self.console, self.recipe, self.is_audited = writer, console, recipe, is_audited
        self.alarms = Alarms(recipe, is_audited=is_audited)
        self.has_saturated = False
        self._step = step
        self._serious: list[str] = []
        self._deliveries = [self._delivery(name, settings or {}, step) for name in loggers]

    @property
    def folder(self) -> Path:
        return self.writer.path

    def go_back(self, step: int, accept_lost: bool = False) -> Run:
        """Delete what came after ``step``, and return what is left."""
        self.writer.sync()
        self.writer.rewind(step, accept_lost=accept_lost)
        self._send("go_back", step)
        return self.rebuild()

    def rebuild(self) -> Run:
        """Restore the detectors from the run folder, which the first rank reads, and return its content."""
        run = all_ranks().of_first(lambda: read_run(self.folder))
        self.alarms = Alarms.rebuilt(self.recipe, run.steps, run.gauges, is_audited=self.is_audited)
        self.has_saturated = self.has_saturated or any(row.get("saturated") for row in run.steps)
        return run

    def step(
        self,
        row: Row,
        judgement: StepJudgement | None = None,
        linears: NarrowLayers | None = None,
        gauges: Gauges | None = None,
    ) -> None:
        """Take a row of ``steps.jsonl`` and the gauges' newest reading.

        ``judgement`` is given where the step was judged before its update; the narrow layers in
        ``linears`` name what saturated.
        """
        self._step = row["step"]
        self.writer.step(row)
        self.console.step(row)
        self._send("step", row)
        for event in self.alarms.on_step(row, judgement):
            self.event(event, shown=True)
        if row.get("saturated") and linears is not None and not self.has_saturated:
            self.has_saturated = True
            self.event(Event("warning", row["step"], what_saturated(linears, row["step"])))
        if gauges is not None and gauges.last is not None:
            reading, gauges.last = gauges.last, None
            self.gauge(reading)
        self._report_failures()

    def evaluation(self, row: Row) -> None:
        self.writer.eval(row)
        self.console.evaluation(row)
        self._send("evaluation", row)

    def gauge(self, row: Row) -> None:
        """Write a row of ``gauges.jsonl``, show it, and let the detectors read it."""
        self.writer.gauge(row)
        self._send("gauge", row)
        for event in self.alarms.on_gauges(row):
            self.event(event, shown=True)

    def fingerprint(self, prints: Fingerprints, must_agree: bool = False) -> None:
        """Take the newest row of ``fingerprints.jsonl``, if the step has one.

        Raises:
            CorruptionError: ranks hold different values and ``must_agree``; raised on all ranks.
        """
        if prints.last is not None:
            reading, prints.last = prints.last, None
            self.writer.fingerprint(reading)
            if must_agree:
                require_alike(reading)

    def event(self, event: Event | Row, shown: bool = False) -> None:
        """Write an event, and print it if ``shown``."""
        self.writer.event(event)
        written = event if isinstance(event, Event) else Event.from_row(event)
        if written.kind in SERIOUS and written.kind not in self._serious:
            self._serious.append(written.kind)
        if shown:
            self.console.say(f"{written.kind.replace('_', ' ')}: {written.sentence}.")
        self._send("event", written)

    def lost_updates(self, alarms: list[Alarm], step: int, shown: bool = True) -> None:
        """Write an event for each alarm of the optimizer's audit, and print the worst if ``shown``."""
        for alarm in alarms:
            self.event(
                Event(
                    "lost_updates",
                    step,
                    alarm.message,
                    tensor=alarm.tensor,
                    value=alarm.reading.edq,
                    advice=f"storage '{alarm.fallback}'",
                    detector="audit",
                )
            )
        worst = min(alarms, key=lambda a: a.reading.edq)
        more = f" (and {len(alarms) - 1} more tensors, see events.jsonl)" if len(alarms) > 1 else ""
        if shown:
            self.console.say(f"warning: {worst.message}{more}")

    def finish(self, summary: Row) -> None:
        """Write the last event and ``summary.json``, and show it; the loggers end before."""
        loss = summary.get("val_loss")
        told = f"after {summary['steps']} steps" if loss is None else f"validation loss {loss:.4f}"
        # The summary comes last: it makes the run finished, and a finished run is not resumed to add what is missing.
        self.event(Event("finish", summary["steps"], told))
        self.close()
        self.writer.summary(summary)
        self.console.summary([summary])

    def advise(self) -> None:
        """At the end of a run in which something serious happened, say which command names the cause."""
        if self._serious:
            kinds = ", ".join(kind.replace("_", " ") for kind in self._serious)
            self.console.say(f"{kinds}: narrowgauge diagnose {self.folder} names the cause")

    def close(self) -> None:
        """Close the loggers, once they have everything."""
        for delivery in self._deliveries:
            delivery.close()
        self._report_failures()
        self._deliveries.clear()

    # ── the loggers ─────────────────────────────────────────────────────────────────────────────────────────────────

    def _delivery(self, name: str, settings: Row, step: int) -> Delivery:
        # The package is imported here, when it is needed, and not in the thread: two threads that import may deadlock.
        row = LOGGERS[name]
        try:
            make = row.load()
        except Exception as error:
            return Delivery(row.title, partial(_raise, error))
        return Delivery(row.title, partial(make, self.folder, settings, step))

    def add(self, delivery: Delivery) -> None:
        """Send rows and events from now on to one more logger, such as a framework's own."""
        self._deliveries.append(delivery)

    def _send(self, method: str, *arguments: object) -> None:
        for delivery in self._deliveries:
            delivery.send(method, *arguments)

    def _report_failures(self) -> None:
        """Write one event for each logger that has failed; it gets nothing more."""
        failed = [delivery for delivery in self._deliveries if delivery.failure]
        self._deliveries = [delivery for delivery in self._deliveries if not delivery.failure]
        for delivery in failed:
            message = f"{delivery.title} receives nothing more: {delivery.failure}"
            advice = "The run folder has everything, and the run goes on"
            self.event(Event("warning", self._step, message, advice=advice), shown=True)


def _raise(error: Exception) -> NoReturn:
    raise error


# ── ranks beside the first: nothing is written or shown ─────────────────────────────────────────────────────────────


class _Null(AbstractContextManager[Any]):
    """Enters as itself, and does nothing."""

    def __exit__(self, *_: object) -> None:
        pass

    def _nothing(self, *_: Any, **__: Any) -> None:
        pass


class NullWriter(_Null):
    """A :class:`~narrowgauge.runs.writer.RunWriter` that writes nothing; the first rank writes the folder."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_rows: dict[str, int] = {}

    step = eval = gauge = fingerprint = event = summary = amend = rewind = sync = close = _Null._nothing


class NullScreen(_Null):
    """A :class:`Screen` that shows nothing."""

    stage = start = compiling = say = step = evaluation = stopping = summary = _Null._nothing


def first_writer(folder: Path, make: Callable[[], RunWriter]) -> RunWriter:
    """The writer of a run folder on the first rank, and a null writer on the others; all call it.

    An error of ``make`` is raised on all ranks.
    """
    made: list[RunWriter] = []
    all_ranks().of_first(lambda: made.append(make()))
    return made[0] if made else cast(RunWriter, NullWriter(folder))
