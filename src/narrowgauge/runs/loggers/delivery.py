"""Delivery of rows to a logger that may be slow, or fail, without the run noticing.

A logger writes to a database, or to a server that may not answer for minutes. So each has a thread of its own, which takes rows
from a queue; training waits for it only at the very end. The first exception ends the logger, and is kept as a sentence that the
run records as one event. Rows are plain Python values, so what a logger does cannot change what the run computes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import suppress
from queue import SimpleQueue
from typing import Any

from narrowgauge.runs.loggers.available import Logger

MOST_WAITING = 20_000
"""Rows in the queue with which a logger is given up: it does not answer."""
PATIENCE_SECONDS = 300.0
"""How long the end of a run waits for a logger."""


class Delivery:
    """A logger, and the thread that hands rows on to it.

    Args:
        title: of the logger, for messages.
        make: makes the logger; called in the thread.

    Example:
        >>> class Shouting:
        ...     def step(self, row): print("step", row["step"])
        ...     def close(self): print("closed")
        >>> delivery = Delivery("Shouting", Shouting)
        >>> delivery.send("step", {"step": 1})
        >>> delivery.close(), delivery.failure
        step 1
        closed
        (None, '')
    """

    def __init__(self, title: str, make: Callable[[], Logger]) -> None:
        self.title, self.failure = title, ""
        """Why the logger has ended, in words; empty while it has not."""
        self._make = make
        self._waiting: SimpleQueue[tuple[str, tuple[Any, ...]] | None] = SimpleQueue()
        # A daemon: a server that does not answer must not keep the process.
        self._thread = threading.Thread(target=self._run, name=f"narrowgauge-{title}", daemon=True)
        self._thread.start()

    def send(self, method: str, *arguments: Any) -> None:
        """Queue a call of one of the logger's methods; returns at once."""
        if not self.failure:
            if self._waiting.qsize() >= MOST_WAITING:
                self.failure = f"{MOST_WAITING} rows wait for it"
            self._waiting.put((method, arguments))

    def close(self, patience: float = PATIENCE_SECONDS) -> None:
        """Wait until everything is handed on and the logger is closed.

        Args:
            patience: seconds after which it is given up.
        """
        self._waiting.put(None)
        self._thread.join(patience)
        if self._thread.is_alive() and not self.failure:
            self.failure = f"it has not ended after {patience:g} s"

    def _run(self) -> None:
        logger: Logger | None = None
        try:
            logger = self._make()
            while (waiting := self._waiting.get()) is not None and not self.failure:
                method, arguments = waiting
                getattr(logger, method)(*arguments)
            logger.close()
        except BaseException as error:  # a package may end with SystemExit
            reason = (str(error).strip() or type(error).__name__).splitlines()[0]
            self.failure = self.failure or reason.rstrip(".")
            # It may hold a process or a file.
            with suppress(BaseException):
                if logger is not None:
                    logger.close()
