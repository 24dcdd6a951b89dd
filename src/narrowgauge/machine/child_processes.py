"""Child processes that end when their parent does, even if that is killed by ``kill -9``.

A killed process cannot tell its children, so the operating system must. There are two ways. A *pipe* that the child reads, and
that nobody but the parent holds open, is closed when the parent is gone: this works everywhere and from any thread. The
*parent death signal* needs no thread in the child, but only Linux has it, and it is sent when the *thread* that started the
child ends, so it suits children of the main thread.

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
    """Start a Python process that ends with this one, and with it all processes that it has started.

    Its standard input is the pipe; its output is discarded.

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
    """End this process and the group it leads once standard input is closed: see :func:`start_tied`."""
    threading.Thread(target=_await_end, name="parent", daemon=True).start()


def _await_end() -> None:
    while os.read(0, 1):
        pass
    if sys.platform != "win32" and os.getpgrp() == os.getpid():
        os.killpg(os.getpgrp(), signal.SIGKILL)
    os._exit(1)


def die_with_parent(expected: int | None = None) -> None:
    """Have this process killed when the thread that started it ends. Linux only; elsewhere nothing happens.

    If ``expected``, the parent's process id, is given and that process has ended already, this one ends now.
    """
    _set_death_signal(signal.SIGKILL)
    if sys.platform == "linux" and expected is not None and os.getppid() != expected:
        os._exit(128 + signal.SIGKILL)


def outlive_parent() -> None:
    """Undo :func:`die_with_parent`: from now on this process watches its parent itself."""
    _set_death_signal(0)


def _set_death_signal(number: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, number)
