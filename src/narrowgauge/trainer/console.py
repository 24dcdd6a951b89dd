"""The console of a run: plain lines."""

from __future__ import annotations

import sys
from typing import TextIO

from narrowgauge.runs.schema import EVAL, STEP, SUMMARY, Row
from narrowgauge.spec.tables import Column, Table

_LINE = ("loss", "tokens_per_second", "lr", "edq")


class Console:
    """Print the progress of one run: a line every ``log_every`` steps; with 0 only notes.

    ``is_quiet`` prints nothing.

    Attributes:
        failure: why a line could not be written: its reader has left, or the disk is full. No line
            follows.
    """

    def __init__(
        self, num_steps: int, log_every: int, stream: TextIO | None = None, is_quiet: bool = False
    ) -> None:
        self.num_steps = num_steps
        self.log_every = log_every
        self.stream = stream
        self.is_quiet = is_quiet
        self.failure: OSError | None = None

    def say(self, line: str, always: bool = False) -> None:
        if self.is_quiet or self.failure is not None or not (self.log_every or always):
            return
        try:
            print(line, file=self.stream or sys.stdout, flush=True)
        except OSError as error:
            self.failure = error

    def event(self, kind: str, sentence: str) -> None:
        """Print an event.

        Notes and changes say how a run differs from what was asked for: print them always.
        """
        is_asked = kind.startswith(("note", "changed"))
        self.say(f"{kind}: {sentence.rstrip('.')}.", always=is_asked)

    def row(self, kind: str, row: Row) -> None:
        """Print a written row of an evaluation, and every ``log_every`` steps one of a step."""
        step = row["step"]
        words = [f"step {step:>6}/{self.num_steps}"]
        if kind == "evals":
            words.append(EVAL["val_loss"].text(row))
        elif kind == "steps" and self.log_every:
            is_due = step % self.log_every == 0 or step in (1, self.num_steps)
            for name in _LINE if is_due else ():
                if row.get(name) is not None:
                    words.append(STEP[name].text(row))
        if len(words) > 1:
            self.say("  ".join(words))

    def summary(self, row: Row) -> None:
        columns = []
        for column in SUMMARY.values():
            if column.label:
                is_name = column.type == "recipe"
                columns.append(Column(column.label, column.cell, code=is_name, right=not is_name))
        self.say(Table(tuple(columns), [row]).plain().rstrip())
