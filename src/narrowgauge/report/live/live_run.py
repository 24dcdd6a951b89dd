"""One run that is being written: its numbers as arrays, and whether it is running, has ended, or died.

The rows of a hundred thousand steps are a gigabyte as Python's dictionaries, and are ten megabytes as arrays of the columns
that the page draws. A process that writes a run holds a lock on its ``steps.jsonl``. Taking that lock to see whether it is
free could refuse the writer; Linux lists all locks in ``/proc/locks``, where reading disturbs nobody.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt

from narrowgauge.errors import RecordError
from narrowgauge.report.event_commands import resumption
from narrowgauge.report.figures.series import Array, Series
from narrowgauge.report.live.row_tail import RowTail
from narrowgauge.runs.older_events import with_detector
from narrowgauge.runs.record import Run, is_run, read_settings, read_summary
from narrowgauge.runs.schema import Row, finite_number

COLUMNS = (
    "loss", "grad_norm", "loss_scale", "skipped", "saturated", "imprecision_share", "lost_decay",
    "tokens_per_second", "seconds", "data_seconds", "communication_seconds", "peak_memory_bytes",
)  # fmt: skip
"""What the figures over steps read, and the state of a run."""

ABSENT = np.inf
"""In a column: the row lacks the entry. A value that is not finite is NaN."""

Places = npt.NDArray[np.int64]

_NONE = -1.7e308
"""A float that no row holds, for an entry that is not there."""

_BLOCK = 64
"""Rows of which :meth:`LiveRun.sketch` keeps the lowest and the highest."""

_RECENT = 50
"""Steps whose median duration is that of a step now."""
_ENDS = ("stop", "finish", "lost", "divergence", "corruption")
_LEAST_SILENCE, _SILENT_STEPS = 10.0, 5
"""A run without a writer counts as dead after that many seconds and that many steps' time: its lock may be that of another
machine, which is not listed here."""


@dataclass(frozen=True)
class State:
    """What a run is doing.

    Args:
        word: ``waiting``, ``running``, ``silent``, ``ended``, ``stopped`` or ``died``.
        said: a sentence on it; empty where the word says all.
        command: how to go on; empty where nothing is to be done.
        step, steps: done, and of how many; ``None`` where that is not known.
        seconds_left: of steps alone, without evaluations; ``None`` where that is not known.
    """

    word: str
    said: str = ""
    command: str = ""
    step: int = 0
    steps: int | None = None
    seconds_left: float | None = None


class LiveRun:
    """A run folder, read as it grows.

    Args:
        path: a run folder, which has a ``run.toml``.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.is_read = False
        """Whether everything that was in the folder at the last poll has been read."""
        self.evals: list[Row] = []
        self.events: list[Row] = []
        self.summary: Row | None = None
        self.trouble = ""
        """Why the settings or the summary cannot be read."""
        self.settings: Row = {}
        self._tails = {name: RowTail(path / f"{name}.jsonl") for name in ("steps", "evals", "events")}
        self._table = np.empty((len(COLUMNS) + 1, 1024))
        self._num_taken = 0
        self._num_absent = np.zeros(len(self._table), np.int64)
        self._sketched: dict[str, Places] = {}
        self._settings_seen: float | None = None
        self._read_settings()

    @property
    def num_steps(self) -> int:
        """How many rows of steps are known."""
        return len(self._tails["steps"])

    @property
    def last_row_at(self) -> float | None:
        """When the last step was written, in seconds since the epoch."""
        return self._tails["steps"].changed_at if self.num_steps else None

    @property
    def num_damaged(self) -> int:
        return sum(tail.num_damaged for tail in self._tails.values())

    @property
    def run(self) -> Run:
        """The run as a report takes it, without the rows of its steps; its evaluations and events grow with it."""
        run = Run(self.path, self.settings, [], self.evals, self.events, self.summary)
        # A cached property would read the file, which is the longest of all.
        run.__dict__["gauges"] = []
        return run

    def column(self, name: str) -> Array:
        """A column over the rows of steps, or ``step`` itself; not to be written to."""
        place = 0 if name == "step" else COLUMNS.index(name) + 1
        return self._table[place, : self.num_steps]

    def line(self, name: str) -> Series:
        """A column over the steps, as :func:`~narrowgauge.report.figures.series.column` reads it from rows."""
        steps, values = self.column("step"), self.column(name)
        absent = self._num_absent[COLUMNS.index(name) + 1]
        if not absent:
            return Series(steps, values)
        if absent == len(values):
            return Series(steps[:0], values[:0])
        is_there = values != ABSENT
        return Series(steps[is_there], values[is_there])

    def sketch(self, name: str, of: Callable[[Series], Series]) -> Series:
        """What ``of`` makes of a whole column, at the lowest, the highest, the first and the first missing row of each block.

        Cost: of ``of``; which rows these are is found once for each block, when it is complete.
        """
        line = self.line(name)
        if len(line) < 4 * _BLOCK:
            return of(line)
        known = self._sketched.get(name, np.empty(0, np.int64))
        first = (int(known[-1]) // _BLOCK + 1) * _BLOCK if len(known) else 0
        last = len(line) // _BLOCK * _BLOCK
        if last > first:
            known = self._sketched[name] = np.concatenate([known, first + _corners(line.y[first:last])])
        places = np.concatenate([known, np.arange(last, len(line))])
        made = of(line)
        return Series(made.x[places], made.y[places])

    def poll(self) -> bool:
        """Read what is new, at most some hundred kilobytes of each file; returns whether anything changed."""
        before = (self.summary, self.settings)
        lengths = [len(tail) for tail in self._tails.values()]
        found = [tail.read() for tail in self._tails.values()]
        changed = any(news.rows or news.kept < length for news, length in zip(found, lengths, strict=True))
        steps, evals, events = found
        self.evals[evals.kept :] = evals.rows
        self.events[events.kept :] = map(with_detector, events.rows)
        self._take(steps.kept, steps.rows)
        self._read_settings()
        self.is_read = steps.is_all and evals.is_all and events.is_all
        return changed or before != (self.summary, self.settings)

    def _take(self, kept: int, rows: list[Row]) -> None:
        """Put rows of steps after the first ``kept`` ones."""
        number = kept + len(rows)
        if kept < self._num_taken:
            self._sketched.clear()
            self._num_absent[:] = (self._table[:, :kept] == ABSENT).sum(axis=1)
        self._num_taken = number
        if number > self._table.shape[1]:
            grown = np.empty((self._table.shape[0], max(number, 2 * self._table.shape[1])))
            grown[:, :kept] = self._table[:, :kept]
            self._table = grown
        for place, name in enumerate(("step", *COLUMNS)):
            self._table[place, kept:number] = _values(rows, name)
            self._num_absent[place] += int((self._table[place, kept:number] == ABSENT).sum())

    def _read_settings(self) -> None:
        """Read ``run.toml`` where a resume has replaced it, and the summary where there is one."""
        file = self.path / "run.toml"
        try:
            at = file.stat().st_mtime
            if at != self._settings_seen:
                self.settings = read_settings(self.path)
                self._settings_seen = at
            is_there = (self.path / "summary.json").exists()
            if is_there != (self.summary is not None):
                self.summary = read_summary(self.path / "summary.json") if is_there else None
            self.trouble = ""
        except (OSError, RecordError) as error:
            self.trouble = str(error)

    # ── what it is doing ─────────────────────────────────────────────────────────────────────────────────────────────

    def step_seconds(self) -> float | None:
        """The median duration of the last steps."""
        recent = [value for value in self.column("seconds")[-_RECENT:].tolist() if value == value and value != ABSENT]
        return statistics.median(recent) if recent else None

    def state(self, now: float, has_writer: bool | None) -> State:
        """What the run is doing.

        Args:
            now: seconds since the epoch.
            has_writer: whether a process of this machine is writing it; ``None`` where that cannot be known.
        """
        step = int(self.column("step")[-1]) if self.num_steps and np.isfinite(self.column("step")[-1]) else 0
        total = finite_number((self.settings.get("config") or {}).get("steps"))
        steps = None if total is None else int(total)
        command = resumption(self.run)
        if self.summary is not None:
            return State("ended", step=step, steps=steps)
        ended = next((event for event in reversed(self.events) if event.get("kind") in (*_ENDS, "start", "resume")), {})
        if ended.get("kind") in _ENDS and not has_writer:
            kind = str(ended["kind"])
            word = {"stop": "stopped", "finish": "ended"}.get(kind, "died")
            return State(word, str(ended.get("message", "")), "" if word == "ended" else command, step, steps)
        duration = self.step_seconds()
        patience = max(_LEAST_SILENCE, _SILENT_STEPS * (duration or 0.0))
        files = [tail.changed_at for tail in self._tails.values() if tail.changed_at is not None]
        silence = now - max(files, default=now)
        left = None if duration is None or steps is None else max(0, steps - step) * duration
        if has_writer is False and silence > patience:
            return State("died", "No process of this machine is writing it.", command, step, steps)
        if not has_writer and silence > 4 * patience:
            return State("silent", "Its process may be gone.", command, step, steps)
        return State("running" if self.num_steps else "waiting", "", "", step, steps, left)


def _corners(values: Array) -> Places:
    """The places of the first, the lowest, the highest and the first missing value of each block of a whole number of them."""
    blocks = values.reshape(-1, _BLOCK)
    is_gap = np.isnan(blocks)
    starts = np.arange(len(blocks)) * _BLOCK
    lowest, highest = np.where(is_gap, np.inf, blocks).argmin(axis=1), np.where(is_gap, -np.inf, blocks).argmax(axis=1)
    return np.unique(np.concatenate([starts, starts + lowest, starts + highest, starts + is_gap.argmax(axis=1)]))


def _values(rows: list[Row], name: str) -> Array:
    """A column of rows; where all have a finite number, or none has any, without a look at each."""
    found = [row.get(name, _NONE) for row in rows]
    try:
        values = np.array(found, float)
    except (TypeError, ValueError, OverflowError):
        values = np.full(len(found), np.nan)
    is_absent = values == _NONE
    values[is_absent] = ABSENT
    for place in np.flatnonzero(~np.isfinite(values) & ~is_absent).tolist():
        own = rows[place].get(name)
        number = finite_number(own)
        values[place] = ABSENT if own is None else np.nan if number is None else number
    return values


def writers(paths: list[Path], locks: Path = Path("/proc/locks")) -> dict[Path, bool | None]:
    """Whether a process of this machine is writing each run; ``None`` where the system does not tell."""
    try:
        held = {line.split()[5] for line in locks.read_text(encoding="ascii").splitlines() if " FLOCK " in line}
    except (OSError, IndexError, ValueError):
        return dict.fromkeys(paths)
    return {path: _is_locked(path / "steps.jsonl", held) for path in paths}


def _is_locked(file: Path, held: set[str]) -> bool | None:
    try:
        stat = file.stat()
    except OSError:
        return None
    # Devices differ between the two where a file system has subvolumes; inodes are then told apart well enough.
    return any(place.rpartition(":")[2] == str(stat.st_ino) for place in held)


def runs_in(paths: list[Path]) -> list[Path]:
    """The run folders that paths are or hold, each once; a path that does not exist yet holds none."""
    found: dict[Path, None] = {}
    for path in paths:
        if is_run(path):
            found[path] = None
        elif path.is_dir():
            found |= dict.fromkeys(place for place in sorted(path.iterdir()) if place.is_dir() and is_run(place))
    return list(found)
