"""Starting ranks on one host: ``narrowgauge train --nproc N`` is torchrun's elastic agent with N processes of this command.

The agent starts the ranks, ends all when one fails, and restarts them where that is allowed. Beyond torchrun it prints one line
that says which rank was lost at which step and how to resume, in place of a report per rank; it passes a signal to each rank
once and gives the ranks time to save. No rank outlives the agent.

Source: docs.pytorch.org/docs/stable/elastic/agent.html, torch.distributed.launcher.
"""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import threading
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure
from torch.distributed.launcher.api import LaunchConfig, launch_agent

from narrowgauge.distributed.launch.failure_reporting import AGENT_FOLDER, AGENT_PROCESS, LOST, REPORTED
from narrowgauge.distributed.launch.liveness import read_beat
from narrowgauge.distributed.launch.placement import variables
from narrowgauge.errors import RankError, ReportedError, Terminated
from narrowgauge.machine.cpp_compiler import compiled_folder

_SIGNALS = tuple(getattr(signal, name) for name in ("SIGTERM", "SIGINT", "SIGHUP", "SIGQUIT") if hasattr(signal, name))
STOP_SECONDS = 600
"""How long ranks may take to finish a step and save, after a signal; then they are killed."""


def run_on_ranks(
    words: Sequence[str],
    num_ranks: int,
    *,
    max_restarts: int = 0,
    how_to_resume: Callable[[], str] = lambda: "",
    note_loss: Callable[[int, str], object] = lambda step, said: None,
    stop_seconds: int = STOP_SECONDS,
) -> None:
    """Run a Python command on N ranks of this host, and wait until they end.

    Invariant: every rank has ended when this returns or raises, and if this process is killed.

    Args:
        words: arguments of the interpreter, as in ``["-m", "narrowgauge", "train"]``.
        max_restarts: how often the ranks are restarted after one failed.
        how_to_resume: a sentence for the line about a lost rank.
        note_loss: records that line: takes the last step that was done, and what was lost.
        stop_seconds: how long the ranks may take to stop after a signal.
    Raises:
        RankError: a rank was lost; with its number, the reason and its step.
        ReportedError: a rank has printed an error.
        KeyboardInterrupt: after Ctrl-C; after SIGTERM :class:`~narrowgauge.errors.Terminated`.
    """
    with tempfile.TemporaryDirectory(prefix="narrowgauge-") as name, _quiet(), _handlers(), variables(_inherited(name)):
        folder = Path(name)
        try:
            launch_agent(_config(num_ranks, max_restarts, stop_seconds), sys.executable, list(words))
        except ChildFailedError as error:
            ended = _ended(error.failures, folder)
            if isinstance(ended, RankError):
                note_loss(read_beat(folder, 0)[0], ended.message)
                ended.advice = how_to_resume()
            raise ended from None
        except SignalException as error:
            raise _stopped(error, folder) from None


def _config(num_ranks: int, max_restarts: int, stop_seconds: int) -> LaunchConfig:
    return LaunchConfig(
        min_nodes=1,
        max_nodes=1,
        nproc_per_node=num_ranks,
        run_id=uuid.uuid4().hex,
        rdzv_backend="c10d",
        rdzv_endpoint="127.0.0.1:0",
        local_addr="127.0.0.1",
        max_restarts=max_restarts,
        monitor_interval=0.1,
        logs_specs=DefaultLogsSpecs(log_dir=os.devnull),
        signals_to_handle=",".join(number.name for number in _SIGNALS),
        shutdown_timeout=stop_seconds,
    )


@contextmanager
def _handlers() -> Iterator[None]:
    """Restore the handlers of signals that the agent replaces."""
    before = {number: signal.getsignal(number) for number in _SIGNALS}
    try:
        yield
    finally:
        if threading.current_thread() is threading.main_thread():
            for number, handler in before.items():
                signal.signal(number, handler)


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the agent's own reports of what one line will say."""
    # Each has a level of its own, so the parent's does not count.
    names = [name for name in logging.root.manager.loggerDict if name.startswith("torch.distributed.elastic")]
    levels = {name: logging.getLogger(name).level for name in names}
    for name in names:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    try:
        yield
    finally:
        for name, level in levels.items():
            logging.getLogger(name).setLevel(level)


def _inherited(folder: str) -> dict[str, str]:
    given = {AGENT_FOLDER: folder, AGENT_PROCESS: str(os.getpid())}
    # The store's connections are the agent's: that they break with it is one line, not the stacks of PyTorch's own log.
    given["TORCH_CPP_LOG_LEVEL"] = os.environ.get("TORCH_CPP_LOG_LEVEL", "ERROR")
    if sys.platform == "linux":
        given["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
    return given


# ── how they ended ──────────────────────────────────────────────────────────────────────────────────────────────────


def _ended(failures: Mapping[int, ProcessFailure], folder: Path) -> Exception:
    """The one error for failed ranks; a ``RankError`` where one was lost."""
    codes = {rank: failure.exitcode for rank, failure in failures.items()}
    first, code = next(iter(codes.items()))
    reported, lost = _last_note(folder, REPORTED), _last_note(folder, LOST)
    if reported:
        return ReportedError(int(reported))
    if lost:  # by the others: a rank that hangs is killed in the end
        return RankError(lost, status=1)
    killed = first_killed(codes)
    if killed is not None:
        return RankError(describe_killed(killed, -codes[killed], read_beat(folder, killed)[0]), status=1)
    if code in (2, 128 + signal.SIGINT, 128 + signal.SIGTERM):  # it has printed why
        return ReportedError(code)
    return RankError(f"rank {first} ended with status {code} in step {read_beat(folder, first)[0] + 1}.", status=1)


def _last_note(folder: Path, name: str) -> str:
    """What a rank of the last attempt wrote; empty without such a file."""
    attempts = [int(file.name.rpartition("-")[2]) for file in folder.glob("attempt-*")]
    file = folder / f"{name}-{max(attempts, default=0)}"
    return file.read_text() if file.exists() else ""


def first_killed(codes: Mapping[int, int]) -> int | None:
    """The first rank that a signal ended, other than the SIGTERM with which the agent ends the rest.

    Args:
        codes: exit codes by rank, in the order in which they were seen; negative for a signal.
    Example:
        >>> first_killed({0: 1, 3: -15, 2: -9})
        2
    """
    return next((rank for rank, code in codes.items() if code < 0 and code != -signal.SIGTERM), None)


def describe_killed(rank: int, number: int, step: int) -> str:
    """A sentence about a rank that signal ``number`` ended after ``step`` steps.

    Example:
        >>> describe_killed(2, 9, 57)
        'rank 2 was killed by signal 9 (SIGKILL: by hand, or the memory was full) in step 58.'
    """
    try:
        name = signal.Signals(number).name
    except ValueError:
        name = "unknown"
    why = ": by hand, or the memory was full" if number == signal.SIGKILL else ""
    if name in ("SIGBUS", "SIGILL"):
        why = f": compiled code may be damaged; remove {compiled_folder()} if it comes again"
    return f"rank {rank} was killed by signal {number} ({name}{why}) in step {step + 1}."


def _stopped(error: SignalException, folder: Path) -> BaseException:
    """What a signal raises here: an error already reported, if the first rank has said that it stopped."""
    is_terminated = error.sigval != signal.SIGINT
    if _last_note(folder, REPORTED):
        return ReportedError(128 + signal.SIGTERM if is_terminated else 128 + signal.SIGINT)
    return Terminated() if is_terminated else KeyboardInterrupt()
