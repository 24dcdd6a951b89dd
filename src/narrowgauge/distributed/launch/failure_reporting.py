"""One failure, one report: one rank prints why the run ends, at once; the others exit silently with the same status.

An error may be raised on one rank, whose absence then breaks the collectives of the others, or on all at the same time. The rank
that asks the store first reports it. It prints before anything else, since its agent may end it the moment another rank has left.
If no rank has an error of its own, one was lost: a roll call (``liveness.py``) finds the missing one. If the process that
started the ranks was killed, the first rank of its host says so. What was lost is also noted where the run is recorded.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
import threading
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path

import torch.distributed as dist

from narrowgauge.distributed.launch.liveness import Liveness, end_rank
from narrowgauge.distributed.launch.placement import Placement
from narrowgauge.errors import NarrowgaugeError, RankError, ReportedError, Terminated, shortened

AGENT_FOLDER, AGENT_PROCESS = "NARROWGAUGE_AGENT_FOLDER", "NARROWGAUGE_AGENT_PROCESS"
"""Variables that the agent of ``--nproc`` sets for its ranks: where they write what it reads, and its process id."""
REPORTED, LOST = "reported", "lost"
"""Files in that folder, followed by the number of the attempt: a rank has printed its error; ranks are found missing."""

_BROKEN = re.compile(
    r"gloo|connection (was )?(closed|reset|refused)|broken pipe|timed out waiting|nccl|tcpstore|processgroup",
    re.IGNORECASE,
)
_STORE_LOST = {0: ""}
"""The missing rank if the store does not answer: rank 0 held it."""


def agent_folder() -> Path | None:
    """Where the agent of this host reads what its ranks write; None without an agent."""
    name = os.environ.get(AGENT_FOLDER)
    return Path(name) if name else None


class FailureReporter:
    """Reports why this rank ends, or leaves the report to another rank.

    Args:
        folder: of the agent; None without one.
        timeout_seconds: the longest time without progress, for the message.
        note_loss: records what was lost: takes the last step that was done, and a sentence. Called by one rank.
    """

    alive: Liveness
    """The signs of life of this rank; set once they exist."""

    def __init__(
        self,
        here: Placement,
        folder: Path | None,
        timeout_seconds: float,
        how_to_resume: Callable[[], str],
        note_loss: Callable[[int, str], object] = lambda step, said: None,
    ) -> None:
        self.here, self.folder = here, folder
        self._waited, self._how_to_resume, self._note_loss = f"{timeout_seconds:g} s", how_to_resume, note_loss
        self._orphaned = threading.Lock()

    def reported(self, error: BaseException) -> BaseException:
        """Report an error, if no other rank does, and return what this rank raises."""
        if self.alive.is_orphan():
            self.orphan()
        if self.here.size == 1 or isinstance(error, ReportedError):
            return error
        if isinstance(error, KeyboardInterrupt):
            return self._interrupted(error)
        if isinstance(error, SystemExit) and not error.code:
            return error
        if is_broken(error):
            return self._broken(error)
        if isinstance(error, BrokenPipeError):  # the reader of the output has left, which is no error of a command
            self.alive.claim(1)
            self._note(REPORTED, "1")
            return ReportedError(1)
        status = _status_of(error)
        if self.alive.claim(status):
            if isinstance(error, NarrowgaugeError):
                _print(error)
            else:
                print(f"rank {self.here.rank}:", file=sys.stderr)
                traceback.print_exception(error)
            self._note(REPORTED, str(status))
        return ReportedError(status)

    def expire(self, missing: dict[int, str]) -> None:
        """End the process from another thread, after the longest time without progress."""
        with suppress(BaseException):
            self._lost(missing, self._waited)
        os._exit(1)

    def orphan(self) -> None:
        """Say that the process that started the ranks has ended, and end this one, from whichever thread sees it first."""
        self._orphaned.acquire()  # never released: the first one ends the process
        with suppress(BaseException):
            said = f"the process that started the ranks was killed in step {self.alive.step + 1}."
            if self.folder is not None:
                shutil.rmtree(self.folder, ignore_errors=True)  # which it would have removed
            self._note_loss(self.alive.step, said)
            _print(RankError(said, self._how_to_resume()))
        os._exit(1)

    def _interrupted(self, error: KeyboardInterrupt) -> BaseException:
        """All ranks have stopped after the same step; the command of the first one says so."""
        status = 143 if isinstance(error, Terminated) else 130
        if not self.here.is_first:
            return ReportedError(status)
        self._note(REPORTED, str(status))
        return error

    def _broken(self, error: BaseException) -> ReportedError:
        """A collective failed: because another rank has an error, or because one was lost."""
        missing: dict[int, str] = _STORE_LOST
        with suppress(RuntimeError):
            if (status := self.alive.claimed(1.0)) is not None:
                return ReportedError(status)
            missing = self.alive.missing()
        # Whoever holds the store of an agent's ranks is the agent, whose other ranks die a moment before it has a successor.
        if missing is _STORE_LOST and self.alive.becomes_orphan():
            self.orphan()
        said = str(error).lower()
        return self._lost(missing, self._waited if "timed out" in said or "timeout" in said else "")

    def _lost(self, missing: dict[int, str], waited: str) -> ReportedError:
        """Name the lost ranks on one rank: on the console, or in a file for the agent, which knows how a process ended."""
        # Without the store ranks cannot agree on the one that reports.
        is_mine = self.here.rank == 1 if missing is _STORE_LOST else self.alive.claim(1)
        message = describe_lost(missing, self.alive.step, waited)
        if is_mine and self.folder is None:
            self._note_loss(self.alive.step, message)
            _print(RankError(message, self._how_to_resume()))
        elif is_mine and self.folder is not None and waited:
            self._note(LOST, message)
            for rank in missing:
                end_rank(self.folder, rank)
        return ReportedError(1)

    def _note(self, name: str, text: str) -> None:
        """Tell the agent; of a job that was started anew, it reads what the last attempt wrote."""
        if self.folder is not None:
            (self.folder / f"{name}-{self.here.attempt}").write_text(text)


def _print(error: NarrowgaugeError) -> None:
    print(f"{type(error).__name__}: {shortened(' '.join(str(error).split()))}", file=sys.stderr, flush=True)


def is_broken(error: BaseException) -> bool:
    """Whether an error says that a collective failed, rather than what this rank itself did."""
    if isinstance(error, NarrowgaugeError):
        return False
    is_group = isinstance(error, (dist.DistBackendError, dist.DistNetworkError, dist.DistStoreError))
    return is_group or (isinstance(error, RuntimeError) and _BROKEN.search(str(error)) is not None)


def _status_of(error: BaseException) -> int:
    if isinstance(error, RankError):
        return error.status
    return 2 if isinstance(error, NarrowgaugeError) else 1


def describe_lost(missing: Mapping[int, str], step: int, waited: str = "") -> str:
    """A sentence about ranks that do not answer.

    Args:
        missing: the ranks, each with the line of code where it is; empty if all wait at the same place.
        step: the last one that all have done.
        waited: for how long, with its unit; empty if the connection broke.
    Example:
        >>> describe_lost({2: "data.py:30"}, 57, "30 s")
        'rank 2 (at data.py:30) did not arrive within 30 s in step 58; --timeout allows more.'
    """
    named = [f"{rank} (at {line})" if line else str(rank) for rank, line in missing.items()]
    who = f"rank{'s' if len(named) > 1 else ''} {', '.join(named)}" if named else "a rank"
    if waited:
        return f"{who} did not arrive within {waited} in step {step + 1}; --timeout allows more."
    return f"{who} {'were' if len(named) > 1 else 'was'} lost in step {step + 1}."
