"""Processes that end with the one that started them, however that ends: by itself, by a signal, by ``kill -9``.

A process that is killed cannot tell its children, so the operating system must. Two means: the *pipe*, whose end a child reads
and which is closed when nobody holds the other end any more, works everywhere and whichever thread started the child; the
*parent's death signal* needs nothing of the child while it runs, but is Linux's, and is sent when the *thread* that started the
child ends, so it is for children of a main thread.

Source: pipe(7), prctl(2).
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence

_TIE = "from narrowgauge.machine.child_processes import end_with_parent; end_with_parent()"
_PR_SET_PDEATHSIG = 1


def start_tied(statements: Sequence[str]) -> subprocess.Popen[bytes]:
    """Start Python in another process that ends with this one, and with it whatever it has started itself.

    Args:
        statements: lines of Python. They print nothing.
    Raises:
        OSError: no process can be started.
    """
    return subprocess.Popen(
        [sys.executable, "-c", "\n".join([_TIE, *statements])],
        stdin=subprocess.PIPE,  # nothing is ever written: this process holds its end, and nobody else
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def end_with_parent() -> None:
    """End this process and all others of its session's first group once standard input is closed: see :func:`start_tied`."""
    threading.Thread(target=_await_end, name="parent", daemon=True).start()


def _await_end() -> None:
    while os.read(0, 1):
        pass
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def die_with_parent(expected: int | None = None) -> None:
    """Have this process killed when the thread that started it ends. Linux only; elsewhere nothing happens.

    Args:
        expected: process id of the parent, if known; if it has ended before, this process ends now.
    """
    _set_death_signal(signal.SIGKILL)
    if sys.platform == "linux" and expected is not None and os.getppid() != expected:
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`: this process watches its parent by itself from now on."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
