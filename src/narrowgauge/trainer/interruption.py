"""Interruption: the first signal saves a checkpoint after the current step, the second ends the process at once.

Python runs signal handlers between two bytecode instructions, so a handler cannot end a step that spends a minute in one call of
compiled code. The interpreter writes the signal's number to a pipe immediately (``signal.set_wakeup_fd``), and a thread reads
the other end whatever the main thread does. After the second signal it gives the main thread a moment to end by itself and then
ends the process. The files on the disk are consistent at any moment.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from narrowgauge.errors import Terminated

GRACE_SECONDS = 2.0
"""Time for the main thread to end by itself after the second signal."""
_ANSWER_SECONDS = 0.5
_AGAIN: dict[int, str] = {signal.SIGINT: "press Ctrl-C again", signal.SIGTERM: "send SIGTERM again"}
"""The signals that are answered, and how the second one is given."""


def stopped_by(number: int) -> KeyboardInterrupt:
    """The exception for a signal; the command line then exits with the status of that signal."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def interruptible(notify: Callable[[str], None]) -> Iterator[list[int]]:
    """Yield a list that receives the numbers of SIGINT and SIGTERM; a second signal ends the process at once.

    ``notify`` gets a line for the user, possibly from another thread or in the middle of a print.
    """
    received: list[int] = []
    answered = threading.Event()

    def answer(number: int) -> None:
        if not answered.is_set():
            answered.set()
            notify(f"Stopping after this step; {_AGAIN[number]} to stop immediately.")

    def note(number: int, frame: Any) -> None:
        if received:
            raise stopped_by(number)
        received.append(number)
        answer(number)

    try:
        before = {number: signal.signal(number, note) for number in _AGAIN}
    except ValueError:  # not in the main thread, which handles the signals
        yield received
        return
    read_end, write_end = os.pipe()
    os.set_blocking(write_end, False)
    earlier = signal.set_wakeup_fd(write_end, warn_on_full_buffer=False)
    watcher = threading.Thread(
        target=_watch_signals, args=(read_end, answered, answer), name="interruption", daemon=True
    )
    watcher.start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(earlier)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(write_end)
        watcher.join()
        os.close(read_end)


def _watch_signals(read_end: int, answered: threading.Event, answer: Callable[[int], None]) -> None:
    """Answer if the main thread cannot, and end the process if it does not."""
    received = 0
    while number := os.read(read_end, 1):
        if number[0] not in _AGAIN:
            continue
        received += 1
        if received == 1 and not answered.wait(_ANSWER_SECONDS):
            answer(number[0])
        if received >= 2:
            # The pipe is closed once the main thread has left the run.
            ended, _, _ = select.select([read_end], [], [], GRACE_SECONDS)
            if not ended or received > 2:
                os._exit(128 + number[0])
