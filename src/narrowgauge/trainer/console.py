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

        Notes say how a run differs from what was asked for: print them always.
        """
        self.say(f"{kind}: {sentence}.", always=kind == "note")

    def row(self, kind: str, row: Row) -> None:
        """Print a written row of an evaluation, and every ``log_every`` steps one of a step."""
        place = f"step {row['step']:>6}/{self.num_steps}"
        if kind == "evals":
            self.say(f"{place}  {EVAL['val_loss'].text(row)}")
        is_due = bool(self.log_every) and (
            row["step"] % self.log_every == 0 or row["step"] in (1, self.num_steps)
        )
        if kind == "steps" and is_due:
            self.say(
                "  ".join(
                    [place, *(STEP[name].text(row) for name in _LINE if row.get(name) is not None)]
                )
            )

    def summary(self, row: Row) -> None:
        columns = [
            Column(
                column.label,
                column.cell,
                code=column.type == "recipe",
                right=column.type != "recipe",
            )
            for column in SUMMARY.values()
            if column.label
        ]
        self.say(Table(tuple(columns), [row]).plain().rstrip())
