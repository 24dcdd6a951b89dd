"""Stopping a run from outside: asked once it saves a checkpoint after the step it is in, asked twice it ends at once.

Python runs a signal's handler between two of its own instructions, so a handler alone cannot end a step that spends a minute
in one call of compiled code. The interpreter does write the signal's number to a pipe at once (``signal.set_wakeup_fd``), and
a thread that waits at the other end hears of it whatever the main thread does. After the second asking it gives the main
thread a moment to end by itself, and then ends the process; whatever is on the disk is whole at any moment.
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
"""What the main thread has, after the second asking, to end by itself."""
_ANSWER_SECONDS = 0.5
_NUMBERS = (signal.SIGINT, signal.SIGTERM)


def stopped_by(number: int) -> KeyboardInterrupt:
    """What to raise for a signal, after which the command line has the status that the signal's own would have been."""
    return Terminated() if number == signal.SIGTERM else KeyboardInterrupt()


@contextmanager
def interruptible(tell: Callable[[str], None]) -> Iterator[list[int]]:
    """A list that is no longer empty once Ctrl-C or a termination was asked for; a second one ends at once.

    Args:
        tell: is given a line for the person who asked; it may be called from another thread, or in the middle of a print.
    """
    received: list[int] = []
    answered = threading.Event()

    def answer() -> None:
        if not answered.is_set():
            answered.set()
            tell("Stopping after this step; Ctrl-C again ends at once.")

    def note(number: int, frame: Any) -> None:
        if received:
            raise stopped_by(number)
        received.append(number)
        answer()

    try:
        before = {number: signal.signal(number, note) for number in _NUMBERS}
    except ValueError:  # not in the main thread: signals are somebody else's
        yield received
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    earlier = signal.set_wakeup_fd(told, warn_on_full_buffer=False)
    watch = threading.Thread(target=_watch, args=(heard, answered, answer), name="interruption", daemon=True)
    watch.start()
    try:
        yield received
    finally:
        signal.set_wakeup_fd(earlier)
        for number, handler in before.items():
            signal.signal(number, handler)
        os.close(told)
        watch.join()
        os.close(heard)


def _watch(heard: int, answered: threading.Event, answer: Callable[[], None]) -> None:
    """Answer where the main thread cannot, and end the process where it does not."""
    asked = 0
    while number := os.read(heard, 1):
        if number[0] not in _NUMBERS:
            continue
        asked += 1
        if asked == 1 and not answered.wait(_ANSWER_SECONDS):
            answer()
        if asked >= 2:
            # The pipe is closed once the main thread has left the run.
            ended, _, _ = select.select([heard], [], [], GRACE_SECONDS)
            if not ended or asked > 2:
                os._exit(128 + number[0])
