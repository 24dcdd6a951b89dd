"""What the ranks beside the first one write and show: nothing. Rank 0 writes the run folder and speaks to the console."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from narrowgauge.runs.events import Event
from narrowgauge.runs.schema import Row


class SilentWriter:
    """A :class:`~narrowgauge.runs.writer.RunWriter` that writes nothing.

    Args:
        path: the run folder, which the first rank writes.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.num_rows: dict[str, int] = {}

    def __enter__(self) -> SilentWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def step(self, row: Row) -> None:
        """Not written."""

    def eval(self, row: Row) -> None:
        """Not written."""

    def gauge(self, row: Row) -> None:
        """Not written."""

    def fingerprint(self, row: Row) -> None:
        """Not written."""

    def event(self, event: Event | Row) -> None:
        """Not written."""

    def summary(self, row: Row) -> None:
        """Not written."""

    def amend(self, run: Row) -> None:
        """The first rank does."""

    def rewind(self, step: int, *, accept_lost: bool = False) -> None:
        """The first rank does."""

    def sync(self) -> None:
        """Nothing to flush."""

    def close(self) -> None:
        """Nothing is open."""


class SilentScreen:
    """A :class:`~narrowgauge.trainer.console.Screen` that shows nothing."""

    def __enter__(self) -> SilentScreen:
        return self

    def __exit__(self, *_: Any) -> None:
        pass

    def stage(self, what: str) -> None:
        """Not shown."""

    def start(self, name: str, step: int) -> None:
        """Not shown."""

    def say(self, line: str) -> None:
        """Not shown."""

    def step(self, row: Row) -> None:
        """Not shown."""

    def evaluation(self, row: Row) -> None:
        """Not shown."""

    def stopping(self, line: str) -> None:
        """Not shown."""

    def summary(self, rows: list[Row]) -> None:
        """Not shown."""
