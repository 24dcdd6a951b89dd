"""Where a run's figures go: the run folder, the screen, TensorBoard where it was asked for, and the detectors.

Everything passes here once, in the order in which it happens, and the folder comes first: what was told was written. The
detectors read the rows that were written and nothing else, so a run that is resumed rebuilds them from its own folder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.monitor.alarms import Alarms
from narrowgauge.monitor.spikes import StepJudgement
from narrowgauge.optim.auditing import Alarm
from narrowgauge.runs.events import Event
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.trainer.console import Screen


class Reporter:
    """Takes a run's rows and events, and hands them on.

    Args:
        writer: of the run folder.
        console: the screen.
        config: what was asked for, as ``run.toml`` has it.
        tensorboard: also write TensorBoard's files.
        step: steps done.
    """

    def __init__(
        self, writer: RunWriter, console: Screen, config: Row, tensorboard: bool = False, step: int = 0
    ) -> None:
        self.writer, self.console, self.config = writer, console, config
        self.alarms = Alarms(config)
        self.board: Any = None
        if tensorboard:
            # Only here: it is an extra, and takes a second to load.
            from narrowgauge.trainer.tensorboard import TensorBoard

            self.board = TensorBoard(writer.path / "tensorboard", step)

    @property
    def folder(self) -> Path:
        """The run folder."""
        return self.writer.path

    def go_back(self, step: int) -> Run:
        """Forget what came after ``step``, which will be done again; what is left."""
        self.writer.sync()
        self.writer.rewind(step)
        if self.board is not None:
            self.board.go_back(step)
        return self.rebuild()

    def rebuild(self) -> Run:
        """Begin anew from what the folder holds, which comes back."""
        run = read_run(self.folder)
        self.alarms = Alarms.rebuilt(self.config, run.steps, run.gauges)
        return run

    def step(self, row: Row, judgement: StepJudgement | None = None) -> None:
        """Write a row of ``steps.jsonl``, show it, and let the detectors read it."""
        self.writer.step(row)
        self.console.step(row)
        if self.board is not None:
            self.board.step(row)
        for event in self.alarms.on_step(row, judgement):
            self.event(event, shown=True)

    def evaluation(self, row: Row) -> None:
        """A row of ``evals.jsonl``."""
        self.writer.eval(row)
        self.console.evaluation(row)
        if self.board is not None:
            self.board.evaluation(row)

    def gauge(self, row: Row) -> None:
        """A row of ``gauges.jsonl``."""
        self.writer.gauge(row)
        if self.board is not None:
            self.board.gauge(row)
        for event in self.alarms.on_gauges(row):
            if event.kind != "lost_updates":  # the optimizer's own alarm knows how sure it is
                self.event(event, shown=True)

    def event(self, event: Event | Row, shown: bool = False) -> None:
        """An event, and a line of it on the screen where it is to be ``shown``."""
        self.writer.event(event)
        told = event if isinstance(event, Event) else Event.from_row(event)
        if shown:
            said = ". ".join(sentence.rstrip(".") for sentence in (told.message, told.advice) if sentence)
            self.console.say(f"{told.kind.replace('_', ' ')}: {said}.")
        if self.board is not None:
            self.board.event(told)

    def stalls(self, alarms: list[Alarm], step: int) -> None:
        """The optimizer's own alarms, which it raises with a confidence bound."""
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
        """Finish TensorBoard's files."""
        if self.board is not None:
            self.board.close()
