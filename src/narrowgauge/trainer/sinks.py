"""Where a run's rows and events go: the run folder, the console, TensorBoard if requested, and the detectors.

Everything passes through here once, in the order in which it happens. The run folder comes first, so whatever was shown was
written. The detectors read only rows that were written, so a resumed run restores them from its own folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.monitor.alarms import Alarms
from narrowgauge.monitor.spikes import StepJudgement
from narrowgauge.optim.audit import Alarm
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.recipes import Recipe
from narrowgauge.trainer.console import Screen


class Reporter:
    """Passes the rows and events of a run to all sinks.

    Args:
        writer: of the run folder.
        console: shows progress.
        recipe: the run's.
        tensorboard: also write TensorBoard's files.
        step: steps done.
    """

    def __init__(
        self, writer: RunWriter, console: Screen, recipe: Recipe, tensorboard: bool = False, step: int = 0
    ) -> None:
        self.writer, self.console, self.recipe = writer, console, recipe
        self.alarms = Alarms(recipe, is_audited=True)
        self.tensorboard: Any = None
        if tensorboard:
            # Imported here, since it is an optional dependency and takes a second to load.
            from narrowgauge.trainer.tensorboard import TensorBoard

            self.tensorboard = TensorBoard(writer.path / "tensorboard", step)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.writer.path

    def go_back(self, step: int) -> Run:
        """Delete what came after ``step``, and return what is left."""
        self.writer.sync()
        self.writer.rewind(step)
        if self.tensorboard is not None:
            self.tensorboard.go_back(step)
        return self.rebuild()

    def rebuild(self) -> Run:
        """Restore the detectors from the run folder, which the first rank reads, and return its content."""
        run = all_ranks().of_first(lambda: read_run(self.folder))
        self.alarms = Alarms.rebuilt(self.recipe, run.steps, run.gauges, is_audited=True)
        return run

    def step(self, row: Row, judgement: StepJudgement | None = None) -> None:
        """Write a row of ``steps.jsonl``, show it, and let the detectors read it."""
        self.writer.step(row)
        self.console.step(row)
        if self.tensorboard is not None:
            self.tensorboard.step(row)
        for event in self.alarms.on_step(row, judgement):
            self.event(event, shown=True)

    def evaluation(self, row: Row) -> None:
        """Write a row of ``evals.jsonl`` and show it."""
        self.writer.eval(row)
        self.console.evaluation(row)
        if self.tensorboard is not None:
            self.tensorboard.evaluation(row)

    def gauge(self, row: Row) -> None:
        """Write a row of ``gauges.jsonl``, show it, and let the detectors read it."""
        self.writer.gauge(row)
        if self.tensorboard is not None:
            self.tensorboard.gauge(row)
        for event in self.alarms.on_gauges(row):
            self.event(event, shown=True)

    def event(self, event: Event | Row, shown: bool = False) -> None:
        """Write an event, and print it if ``shown``."""
        self.writer.event(event)
        written = event if isinstance(event, Event) else Event.from_row(event)
        if shown:
            text = ". ".join(sentence.rstrip(".") for sentence in (written.message, written.advice) if sentence)
            self.console.say(f"{written.kind.replace('_', ' ')}: {text}.")
        if self.tensorboard is not None:
            self.tensorboard.event(written)

    def lost_updates(self, alarms: list[Alarm], step: int) -> None:
        """Write an event for each alarm of the optimizer's audit, and print the worst."""
        for alarm in alarms:
            self.event(
                Event(
                    "lost_updates",
                    step,
                    alarm.message,
                    tensor=alarm.tensor,
                    value=alarm.reading.edq,
                    advice=f"storage '{alarm.cure}'",
                )
            )
        worst = min(alarms, key=lambda a: a.reading.edq)
        more = f" (and {len(alarms) - 1} more tensors, see events.jsonl)" if len(alarms) > 1 else ""
        self.console.say(f"warning: {worst.message}{more}")

    def close(self) -> None:
        """Close TensorBoard's files."""
        if self.tensorboard is not None:
            self.tensorboard.close()
