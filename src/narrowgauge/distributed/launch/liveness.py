"""Signs of life: which step each rank has reached, which rank reports an error, and which one is missing.

A rank that waits in a collective cannot tell why: a peer was killed, hangs, or is slow. So each rank has a thread with its own
connection to the group's store. The thread answers a roll call even while the main thread waits, and ends the process when the
main thread has made no progress for too long. A rank that does not answer was lost; if all answer, those that do not wait in a
collective hold up the others. Ranks that meet the same error at once agree through the store on the one that prints it.

Under the agent of ``narrowgauge train --nproc`` each rank also writes its step to a file of a few bytes, which outlives it, so
that the agent can name the step at which a rank was killed.

When the process that started the ranks is killed, the system kills the ranks too, except the first one of each host: its thread
sees that the parent has changed, reports it, and ends the process.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

from torch.distributed import Store  # type: ignore[attr-defined]  # public

from narrowgauge.distributed.launch.placement import Placement

ANSWER_SECONDS = 0.5
"""How often a thread looks for a roll call; ``size / 512`` seconds if that is more, to spare the store."""
GRACE_SECONDS = 3.0
"""How long a roll call waits for answers, beyond four looks."""
_CLAIM, _CALL = "narrowgauge/claim", "narrowgauge/call"


class Liveness:
    """The signs of life of one rank.

    Args:
        store: a connection to the group's store for this thread alone, since a store serves one caller at a time; None for one
            rank.
        folder: where the agent of this host reads steps; None without one.
        limit_seconds: the longest time without progress.
        expire: called from the thread after that time, with the ranks that hold up the others; it ends the process.
        parent: process id of what started the ranks, if this one is to watch it; a child of another process is an orphan.
        orphan: called from the thread once the parent has ended; it ends the process.
    """

    def __init__(
        self,
        placement: Placement,
        store: Store | None,
        folder: Path | None,
        limit_seconds: float,
        expire: Callable[[dict[int, str]], None],
        parent: int | None = None,
        orphan: Callable[[], None] = lambda: None,
    ) -> None:
        self.placement, self.step = placement, 0
        self._store, self._limit_seconds, self._expire = store, limit_seconds, expire
        self._parent, self._orphan = parent, orphan
        self._descriptor = None if folder is None else os.open(_step_file(folder, placement.rank), _FLAGS, 0o600)
        self._main, self._is_calling = threading.get_ident(), False
        self._interval = max(ANSWER_SECONDS, placement.size / 512)
        self._moment, self._left = time.monotonic(), threading.Event()
        self._thread = threading.Thread(target=self._watch, name="liveness", daemon=True)
        if folder is not None:
            (folder / f"attempt-{placement.attempt}").touch()
        self.beat(0)
        if store is not None or parent is not None:
            self._thread.start()

    def is_orphan(self) -> bool:
        """Whether the process that started the ranks, which this one watches, has ended."""
        return self._parent is not None and os.getppid() != self._parent

    def becomes_orphan(self) -> bool:
        """Whether :meth:`is_orphan` comes true within :data:`GRACE_SECONDS`; at once false if no parent is watched."""
        until = time.monotonic() + GRACE_SECONDS
        while self._parent is not None and not self.is_orphan() and time.monotonic() < until:
            time.sleep(0.05)
        return self.is_orphan()

    def beat(self, step: int) -> None:
        """Note that this rank has done ``step`` steps. Cost: about 2 µs."""
        self.step, self._moment = step, time.monotonic()
        if self._descriptor is not None:
            os.pwrite(self._descriptor, b"%-20d %-10d\n" % (step, os.getpid()), 0)

    def close(self) -> None:
        """End the thread; closing twice is not an error."""
        self._left.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def claim(self, status: int) -> bool:
        """Whether this rank, the first to ask, reports the error of its group; ``status`` is the command's exit status."""
        if self._store is None:
            return True
        mine = json.dumps([self.placement.rank, status])
        try:
            return bool(self._store.compare_set(_CLAIM, "", mine).decode() == mine)
        except RuntimeError:  # rank 0 held the store and has ended: it reported, or was killed
            return False

    def claimed(self, seconds: float) -> int | None:
        """The exit status of an error that another rank reports, if one does so within some seconds."""
        until = time.monotonic() + seconds
        while True:
            if self._store is not None and self._store.check([_CLAIM]):
                return int(json.loads(self._store.get(_CLAIM))[1])
            if time.monotonic() > until:
                return None
            time.sleep(0.05)

    def missing(self) -> dict[int, str]:
        """Call the roll: the ranks that do not answer, or, if all do, those that are at work while others wait for them.

        Returns:
            Ranks, each with the line of code where it is if it said so; empty if none stands out.
        Raises:
            RuntimeError: the store has gone, and so has rank 0, which held it.
        Cost: at most :data:`GRACE_SECONDS` and four looks.
        """
        assert self._store is not None
        self._is_calling = threading.get_ident() == self._main
        self._store.set(_CALL, "1")
        self._answer()
        others = range(self.placement.size)
        until = time.monotonic() + GRACE_SECONDS + 4 * self._interval
        while silent := [rank for rank in others if not self._store.check([_answer_key(rank)])]:
            if time.monotonic() > until:
                return dict.fromkeys(silent, "")
            time.sleep(0.05)
        return late_ranks([json.loads(self._store.get(_answer_key(rank))) for rank in others])

    def _answer(self) -> None:
        assert self._store is not None
        is_waiting, line = _position(self._main)
        self._store.set(_answer_key(self.placement.rank), json.dumps([self.step, self._is_calling or is_waiting, line]))

    def _watch(self) -> None:
        """Answer a roll call once, and end the process when nothing moves or its parent has gone."""
        has_answered = False
        while not self._left.wait(self._interval):
            if self.is_orphan():
                self._orphan()
            if self._store is None:
                continue
            with suppress(RuntimeError):
                if not has_answered and self._store.check([_CALL]):
                    self._answer()
                    has_answered = True
            if time.monotonic() - self._moment > self._limit_seconds:
                is_waiting, _ = _position(self._main)
                missing: dict[int, str] = {}
                with suppress(RuntimeError):
                    missing = self.missing() if is_waiting else {self.placement.rank: _position(self._main)[1]}
                self._expire(missing)


def late_ranks(answers: Sequence[tuple[int, bool, str]]) -> dict[int, str]:
    """The ranks for which others wait, with the line of code where each is: those with the fewest steps; among equals, those that
    do not wait.

    Args:
        answers: of each rank, the steps it has done, whether it waits in a collective, and where.
    Example:
        >>> late_ranks([(57, True, ""), (57, False, "data.py:30"), (57, True, "")])
        {1: 'data.py:30'}
    """
    fewest = min(step for step, _, _ in answers)
    if any(step > fewest for step, _, _ in answers):
        return {rank: line for rank, (step, _, line) in enumerate(answers) if step == fewest}
    return {rank: line for rank, (_, waits, line) in enumerate(answers) if not waits}


def _position(thread: int) -> tuple[bool, str]:
    """Whether a thread is inside a call of torch.distributed, and the line of code that it runs."""
    frame = sys._current_frames().get(thread)
    line = "" if frame is None else f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("torch.distributed."):
            return True, line
        frame = frame.f_back
    return False, line


_FLAGS = os.O_RDWR | os.O_CREAT | getattr(os, "O_CLOEXEC", 0)


def _answer_key(rank: int) -> str:
    return f"narrowgauge/answer/{rank}"


def _step_file(folder: Path, rank: int) -> Path:
    return folder / f"step-{rank}"


def read_beat(folder: Path, rank: int) -> tuple[int, int | None]:
    """What a rank of an agent's run wrote last: the number of steps done, and its process id; 0 and None if nothing."""
    try:
        step, process = _step_file(folder, rank).read_text().split()
    except (OSError, ValueError):
        return 0, None
    return int(step), int(process)


def end_rank(folder: Path, rank: int) -> None:
    """Kill a rank of this host that does not answer: the agent would first wait for it to end by itself."""
    process = read_beat(folder, rank)[1]
    if process is not None:
        with suppress(OSError):
            os.kill(process, signal.SIGKILL)
