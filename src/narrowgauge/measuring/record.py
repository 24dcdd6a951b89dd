"""The record of a loop: write every row once, in order, and read it by the laws.

:class:`narrowgauge.RunRecorder` and :func:`narrowgauge.compare` use it. The run folder comes first, so
everything shown was written before. The laws read only written rows, so a resumed run restores what
they remember from its own folder. On several ranks all ranks make all calls. Rank 0 writes and shows.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import nn

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.measuring.casts import Gauges
from narrowgauge.measuring.diagnose import ignored, steps_of
from narrowgauge.measuring.fingerprints import Fingerprints
from narrowgauge.measuring.hooks import Hub
from narrowgauge.measuring.laws import Laws
from narrowgauge.measuring.reading import Reading, measured
from narrowgauge.measuring.step import Step
from narrowgauge.measuring.step_row import StepReader, why_skipped
from narrowgauge.numerics.metrics import UPDATE_SUMS
from narrowgauge.optim.audit import MOST_AT_END, Alarm, figures_of, unwrapped
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.runs.finding import counted
from narrowgauge.runs.record import read_run
from narrowgauge.runs.schema import Row
from narrowgauge.runs.writer import RunWriter
from narrowgauge.torch_support.torch_names import unwrapped_model

OnRow = Callable[[str, Row], object]
"""Takes each written row: the kind, named as its file (steps, evals, gauges, events), and the row.
"""


class Record(AbstractContextManager["Record"]):
    """The record of one loop.

    Args:
        open_folder: creates or opens the run folder, on rank 0. Its error is raised on all ranks.
        say: shows an event, its kind and a sentence, on rank 0.
        on_row: called with the kind and the row after each row of steps, evaluations, gauges and
            events was written, on rank 0. After a rollback the steps since the checkpoint are
            repeated.

    Attributes:
        num_steps, tokens, seconds: of all steps so far.
        laws: which read the rows.
        undo: what leaves the model and the optimizer as they were.
    """

    def __init__(
        self,
        open_folder: Callable[[], RunWriter],
        say: Callable[[str, str], object],
        on_row: OnRow | None = None,
    ) -> None:
        self.here = all_ranks()
        self.say = say
        self.writer: RunWriter | None = None

        def open_first() -> Path:
            self.writer = open_folder()
            return self.writer.path

        self.folder = self.here.of_first(open_first)
        self._on_row = on_row or (lambda kind, row: None)
        self.reader = StepReader()
        self.laws = Laws(say=self.note)
        self.undo = ExitStack()
        self.gauges: Gauges | None = None
        self.num_steps = 0
        self.tokens = 0
        self.seconds = 0.0
        self._seconds_before = 0.0
        self._began = time.perf_counter()

    def watch(
        self, model: nn.Module, optimizer: Any, *, every: int = 20, hub: Hub | None = None
    ) -> None:
        """Record columns of an optimizer in each step, its alarms, and the gauges of its model.

        Args:
            model: before it is compiled, if gauges are to see it.
            optimizer: ours (with an audit) or torch's (without).
            every: steps between samples of the gauges; 0 for none.
            hub: of the loop, if it has one.
        Raises:
            NarrowgaugeError: another optimizer is watched already.
        """
        if self.reader.optimizer is not None:
            raise NarrowgaugeError(
                "Cannot record a second optimizer, because a row has one learning rate.",
                "Record each in a folder of its own.",
            )
        self.reader = StepReader(model, optimizer)
        ours = self.reader.ours
        if ours is not None:
            ours.name_parameters(model)
            if self.here.size > 1:
                ours.auditor.is_joined = True
            self._hear(ours)
        if every:
            inner = unwrapped(optimizer)
            hub = hub or Hub(unwrapped_model(model), [inner])
            self.gauges = Gauges(hub, inner, every, self.gauge)
            self.undo.callback(hub.undo.close)
            self.undo.callback(self.gauges.end)

    def _hear(self, optimizer: Optimizer) -> None:
        """Log the alarms of an optimizer's audit, in addition to its user's callback."""
        before = optimizer.on_alarm

        def alarmed(alarms: list[Alarm]) -> None:
            before(alarms)
            step = self.num_steps + 1
            for alarm in alarms:
                self.log(_reading_of(alarm, step))

        optimizer.on_alarm = alarmed
        self.undo.callback(setattr, optimizer, "on_alarm", before)

    # ── rows ──────────────────────────────────────────────────────────────────────────────────────

    def step(self, columns: Mapping[str, Any], measured_row: Row | None = None) -> Row:
        """Record an optimizer step, and return its row. Call it before the schedule's step.

        Args:
            columns: ``loss``, and any of ``lr``, ``grad_norm``, ``tokens`` (so far), ``edq``, …
                They replace those read here.
            measured_row: what a meter measured, which the others replace.
        """
        reader = self.reader
        columns = numbers(columns, "step")
        if "step" in columns:
            raise NarrowgaugeError(
                "step was given a column 'step', which the record counts itself.", "Leave it out."
            )
        row = reader.row(self.num_steps + 1, columns, tokens_before=self.tokens)
        for name, value in (measured_row or {}).items():
            if row.get(name) is None:
                row[name] = value
        self.num_steps = int(row["step"])
        self.tokens = row.get("tokens") or self.tokens
        self.seconds += row["seconds"] or 0.0
        self._append("steps", row)
        self._read(Step.of(row))
        if reader.ours is not None and reader.was_skipped:
            self.event("skip", why_skipped(reader.ours, self.here))
        if self.gauges is not None and self.gauges.step != self.num_steps:
            self.gauges.step = self.num_steps  # the loop did not call the optimizer
        reader.begin()
        return row

    def fingerprint(self, prints: Fingerprints) -> None:
        """Write the newest row of ``fingerprints.jsonl``, if the step has one.

        Expect the next step.
        """
        row = prints.take(self.num_steps)
        if row is not None and self.writer is not None:
            self.writer.append("fingerprints", row)

    def eval(self, columns: Mapping[str, Any]) -> None:
        """Record a validation: ``val_loss``, and any other metric.

        Its time does not count as a step's.
        """
        row: Row = {"step": self.num_steps, "seconds": self.seconds}
        if self.tokens:
            row["tokens"] = self.tokens
        self._append("evals", row | numbers(columns, "eval"))
        self.reader.restart_clock()

    def gauge(self, row: Row) -> None:
        """Write a row of ``gauges.jsonl``, and let the laws read it."""
        self._append("gauges", row)
        self._read(Step.of_gauges(row))

    def _read(self, step: Step) -> None:
        """Let the laws read a step, and log and show what is new."""
        for reading in self.laws.fresh(self.laws.read(step)):
            self.log(reading, shown=reading.severity != "note")

    def log(self, reading: Reading, *, shown: bool = False) -> None:
        """Log a reading."""
        row = {name: x for name, x in reading.to_dict().items() if x not in (None, "")}
        self._append("events", row)
        if shown and self.writer is not None:
            words = reading.text.removesuffix(".")
            if reading.tensor:
                words = f"{reading.tensor}: {words}"
            self.say(f"step {reading.step}: {reading.what}", words)

    def event(
        self, what: str, text: str, *, step: int | None = None, shown: bool = False, **fields: Any
    ) -> None:
        """Log something that happened.

        Args:
            what: its kind, such as ``"note"``.
            text: what happened and what to do, in sentences.
            step: optimizer steps done; ``None`` takes those recorded.
            fields: further columns of ``events.jsonl``. The ``severity`` is ``"note"`` if not given.
        """
        number = self.num_steps if step is None else step
        stage = "between steps" if number else "start"
        row: Row = {"step": number, "stage": stage, "what": what, "severity": "note"}
        row |= {name: x for name, x in fields.items() if x not in (None, "")}
        self._append("events", row | {"text": text})
        if shown and self.writer is not None:
            self.say(what.replace("-", " "), text.removesuffix("."))

    def note(self, text: str) -> None:
        """Log a note, and show it."""
        self.event("note", text, shown=True)

    def _append(self, kind: str, row: Row) -> None:
        if self.writer is not None:
            self.writer.append(kind, row)
            self._on_row(kind, row)

    # ── start and end ─────────────────────────────────────────────────────────────────────────────

    def go_back(self, step: int, *, first: int = 1) -> None:
        """Continue after ``step``. Delete later rows, since the loop repeats these steps.

        Damaged rows, and missing ones from step ``first`` to ``step``, are a note each.
        """

        def rewind() -> None:
            if self.writer is not None:
                self.writer.rewind(step, first=first)

        self.here.of_first(rewind)
        if self.writer is not None:
            for note in self.writer.notes:
                self.event("note", note, step=step, shown=True)
            self.writer.notes.clear()
        run = self.here.of_first(lambda: read_run(self.folder))
        self.laws = Laws(self.laws.ignore or ignored(run), steps_of(run), self.note)
        self.num_steps = step
        self.tokens = 0
        self.seconds = 0.0
        for row in run.steps:
            self.tokens = row.get("tokens") or self.tokens
            self.seconds += row.get("seconds") or 0.0
        if self.gauges is not None:
            self.gauges.step = step
        self._seconds_before = self.seconds
        self._began = time.perf_counter()
        self.reader.begin()

    def summary(self, **columns: Any) -> Row:
        """Return ``summary.json`` with these ``columns``, from the folder's rows.

        So resuming does not change it.
        """
        run = self.here.of_first(lambda: read_run(self.folder))
        total = torch.zeros(len(UPDATE_SUMS), dtype=torch.float64, device="cpu")
        rates = []
        memory = 0
        num_skipped = 0
        for row in run.steps:
            sums = row.get("audit_sums")
            if sums:
                total += total.new_tensor([sums.get(name, 0.0) for name in UPDATE_SUMS])
            if row.get("tokens_per_second") is not None:
                rates.append(row["tokens_per_second"])
            memory = max(memory, row.get("peak_memory_bytes") or 0)
            num_skipped += bool(row.get("skipped"))
        losses = [row["val_loss"] for row in run.evals if row.get("val_loss") is not None]
        values = {
            "val_loss": losses[-1] if losses else None,
            "steps": self.num_steps,
            "tokens": self.tokens or None,
            "bytes_per_param": self.reader.bytes_per_param(),
            "step_memory_bytes": memory or None,
            "num_skipped": num_skipped,
            "wall_seconds": self._seconds_before + time.perf_counter() - self._began,
            **columns,
        }
        summary = {name: value for name, value in values.items() if value is not None}
        summary["tokens_per_second"] = statistics.median_high(rates) if rates else None
        return summary | figures_of(total)

    def finish(self, summary: Row) -> None:
        """Write the last event and ``summary.json``."""
        loss = summary.get("val_loss")
        text = f"after {counted(summary['steps'], 'step')}"
        if loss is not None:
            text = f"validation loss {loss:.4f}"
        self.event("finish", text, step=summary["steps"])
        # Write the summary last: it makes the run finished. A finished run is not resumed to add
        # missing parts.
        if self.writer is not None:
            self.writer.summary(summary)

    def stop(self, text: str = "the loop ended before its last step") -> None:
        """Record that the loop stopped early."""
        self.event("stop", text)

    def close(self) -> None:
        """Release the folder, and leave the model and the optimizer as they were."""
        if self.writer is not None:
            self.writer.close()
        self.undo.close()

    def __exit__(self, *_: object) -> None:
        self.close()


def _reading_of(alarm: Alarm, step: int) -> Reading:
    """Return an alarm of an audit as a reading."""
    updates = alarm.reading
    if updates.at_end > MOST_AT_END:
        return measured("range-end", alarm.tensor, updates.at_end, step=step)
    return measured("lost-updates", alarm.tensor, updates.edq, 1.0, step=step)


def numbers(row: Any, caller: str) -> Row:
    """Return a row of plain values; it may hold tensors of one number."""
    if not isinstance(row, Mapping):
        raise NarrowgaugeError(
            f"{caller} was given {row!r:.60}.", 'It takes a dict, for instance {"loss": 2.5}.'
        )
    plain: Row = {}
    try:
        for key, value in row.items():
            plain[str(key)] = value.item() if hasattr(value, "item") else value
        return plain
    except (ValueError, RuntimeError) as error:
        raise NarrowgaugeError(
            f"{caller} was given a value that is not one number: {error}.", "Give numbers."
        ) from error
