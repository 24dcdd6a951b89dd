"""The run folder: everything a run knew and did, in files a person can read and a crash cannot spoil.

::

    run.toml         what was asked for, all of it, with versions; written once
    steps.jsonl      a row per optimizer step
    evals.jsonl      a row per evaluation
    events.jsonl     a row per event (see events.py)
    gauges.jsonl     a row per step that the gauges sampled (see readings.py)
    summary.json     the figures of the finished run
    checkpoints/     see trainer/checkpoint.py
    data/            see trainer/data.py

Rows are appended whole, with one write each; the two whole files are replaced, never edited. So a reader at any moment,
and the resumed run after any crash, finds valid rows and at worst one torn last line, which is dropped. Each row carries a
checksum (see rows.py), and the first one of ``steps.jsonl`` the settings that the run began with, so that a resume can tell
whether somebody has changed ``run.toml`` since. A row's NaN and infinities are kept as the strings ``"nan"``, ``"inf"``,
``"-inf"`` (JSON has no other word for them) and come back as floats.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import AGAIN, TEMPORARY, append_whole, disk_errors, lock, sync_file, write_whole
from narrowgauge.runs.events import Event, tell
from narrowgauge.runs.rows import (
    ROW_FILES,
    STEPWISE,
    kept_lines,
    line_of,
    line_steps,
    lost_rows,
    plain,
    read_rows,
    without_none,
)
from narrowgauge.runs.whole_files import SCHEMA_VERSION as SCHEMA_VERSION
from narrowgauge.runs.whole_files import read_settings, read_summary, require_numbers, schema_of

Row = dict[str, Any]

_BEGAN_WITH = "settings"
_UNFINISHED = re.compile(re.escape(TEMPORARY) + r"(data|run\.toml)(-\d+)?")


@dataclass(frozen=True)
class Run:
    """A run folder, read.

    Args:
        path: the folder.
        run: ``run.toml``.
        steps, evals, events: the rows, in the order written.
        summary: the figures of the finished run, or ``None`` while it has none.
        began_with: the settings that its first step was taken with; ``None`` where no row says so.
    """

    path: Path
    run: Row
    steps: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    summary: Row | None = None
    began_with: Row | None = None

    @cached_property
    def gauges(self) -> list[Row]:
        """The rows of ``gauges.jsonl``, read when they are asked for: they are the longest by far.

        Raises:
            RecordError: a line in the middle of the file is damaged.
        """
        return read_rows(self.path / "gauges.jsonl")

    @property
    def config(self) -> Row:
        """What was asked for, the ``[config]`` table.

        Raises:
            RecordError: ``run.toml`` has no such table.
        """
        return self._table("config")

    @property
    def data_fingerprint(self) -> str:
        """Of the tokens the run began with.

        Raises:
            RecordError: ``run.toml`` does not say it.
        """
        fingerprint = self._table("data").get("fingerprint")
        if not isinstance(fingerprint, str):
            found = "no fingerprint" if fingerprint is None else f"the fingerprint {fingerprint!r}"
            raise self._damaged(f"its table [data] holds {found}")
        return fingerprint

    def _table(self, name: str) -> Row:
        table = self.run.get(name)
        if not isinstance(table, dict):
            raise self._damaged(f"it has no table [{name}]" if table is None else f"'{name}' is not a table")
        return table

    def _damaged(self, reason: str) -> RecordError:
        return RecordError(f"{self.path / 'run.toml'} is damaged: {reason}.", "Restore the file from a copy.")


def is_run(path: Path) -> bool:
    """Whether a run lies in a folder, finished or not.

    Args:
        path: a folder, or anything.
    Raises:
        RecordError: nobody may look into it.
    """
    with disk_errors(path):
        return (path / "run.toml").is_file()


def read_run(path: str | Path) -> Run:
    """Read a run folder, finished or not, even one that is being written.

    Law: a torn last line is dropped; a damaged line anywhere else is refused, and so is a whole one that has text or a
    table where readers reckon with a number.

    Args:
        path: the run folder.

    Returns:
        Its content.

    Raises:
        RecordError: no run is there, a file is damaged, or it was written by a newer version.

    Example:
        >>> import tempfile
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> with RunWriter.create(folder, {"recipe": "bfloat16/word"}) as writer:
        ...     writer.step({"step": 1, "loss": float("nan")})
        >>> read_run(folder).steps
        [{'step': 1, 'loss': nan}]
    """
    path = Path(path)
    run = read_settings(path)
    require_numbers(path / "run.toml", run)
    steps, evals, events = (read_rows(path / f"{name}.jsonl") for name in ("steps", "evals", "events"))
    began_with = steps[0].pop(_BEGAN_WITH, None) if steps else None
    return Run(path, run, steps, evals, events, read_summary(path / "summary.json"), began_with)


class RunWriter:
    """The one writer of a run folder.

    Law: a reader never sees half a row; a second writer is refused while the first lives.

    Use :meth:`create` for a new run and :meth:`open` for one that goes on; close it, or use it in a ``with`` block.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.num_rows = dict.fromkeys(ROW_FILES, 0)
        """Rows that each file holds."""
        self._run: Row = {}
        self._descriptors: dict[str, int] = {}

    @classmethod
    def create(cls, path: str | Path, run: Row, *, beside: Collection[str] = ()) -> RunWriter:
        """Make a run folder and write its ``run.toml``.

        Law: of several that make a run in one folder at once, one makes it and the others are refused; nothing is written
        before the folder is this writer's alone.

        Args:
            path: the folder; absent or empty.
            run: everything that was asked for. ``None`` values are left out, since TOML has none;
                ``schema_version`` is added.
            beside: names the caller itself has already put there (``data``).

        Raises:
            RecordError: something else is there, another process is writing there, or the disk refuses.
        """
        writer = cls(path)
        require_free(writer.path, beside=(*beside, *leftovers(writer.path)))
        with disk_errors(writer.path):
            writer.path.mkdir(parents=True, exist_ok=True)
        writer._run = {**without_none(run), "schema_version": SCHEMA_VERSION}
        writer._open_rows()
        try:
            # Once more: another writer may have come and gone since.
            require_free(writer.path, beside=(*beside, *leftovers(writer.path)))
            write_whole(writer.path / "run.toml", tomli_w.dumps(writer._run).encode(), AGAIN)
        except BaseException:
            if not is_run(writer.path):
                for name in _names():
                    (writer.path / name).unlink(missing_ok=True)
            writer.close()
            raise
        return writer

    @classmethod
    def open(cls, path: str | Path) -> RunWriter:
        """Go on writing a run: a torn last line of each file is cut off.

        Raises:
            RecordError: no run is there, it is newer than this version, or another process is writing it.
        """
        writer = cls(path)
        writer._run = read_settings(writer.path)
        writer._open_rows()
        for name in ROW_FILES:
            lines = line_steps(writer.path / f"{name}.jsonl")
            writer._keep(name, lines, len(lines))
        return writer

    def rewind(self, step: int, *, accept_lost: bool = False) -> None:
        """Forget what came after a step, because a resume from its checkpoint will write it again.

        Rows of steps, evals and gauges from the first one beyond ``step`` on are deleted and kept nowhere, and so is a summary
        of more steps. Events stay: they tell what happened, including what was undone.

        Args:
            step: the last optimizer step to keep.
            accept_lost: go on although rows up to ``step`` are missing.

        Raises:
            RecordError: rows up to ``step`` are missing, or not all that would be cut come after it; nothing is cut.
        """
        if not accept_lost:
            require_rows(self.path, step)
        found = {name: line_steps(self.path / f"{name}.jsonl") for name in STEPWISE}
        kept = {name: kept_lines(self.path / f"{name}.jsonl", lines, step) for name, lines in found.items()}
        for name, lines in found.items():
            self._keep(name, lines, kept[name])
        summary = read_summary(self.path / "summary.json")
        if summary is not None and summary.get("steps", 0) > step:
            (self.path / "summary.json").unlink()

    def _keep(self, name: str, lines: list[tuple[int, int, bool]], number: int) -> None:
        """Cut a file behind so many of its lines."""
        self.num_rows[name] = number
        with disk_errors(self.path / f"{name}.jsonl"):
            os.ftruncate(self._descriptors[name], sum(length for _, length, _ in lines[:number]))

    def step(self, row: Row) -> None:
        """Append a row to ``steps.jsonl``; ``row["step"]`` is the number of steps done. Cost: about 20 µs."""
        began_with = self._run.get("config")
        first = not self.num_rows["steps"] and isinstance(began_with, dict)
        self._append("steps", {**row, _BEGAN_WITH: began_with} if first else row)

    def eval(self, row: Row) -> None:
        """Append a row to ``evals.jsonl``."""
        self._append("evals", row)

    def event(self, event: Event | Row) -> None:
        """Append an event to ``events.jsonl``, and tell it to those who asked (``ng.on_event``)."""
        # First of all: what is no event is refused, and not written.
        told = event if isinstance(event, Event) else Event.from_row(event)
        self._append("events", event.row() if isinstance(event, Event) else event)
        tell(told)

    def gauge(self, row: Row) -> None:
        """Append a row to ``gauges.jsonl``; see :mod:`narrowgauge.runs.readings`."""
        self._append("gauges", row)

    def summary(self, row: Row) -> None:
        """Write ``summary.json``, in place of an earlier one."""
        text = json.dumps({"schema_version": SCHEMA_VERSION, **plain(row)}, indent=1, allow_nan=False)
        write_whole(self.path / "summary.json", text.encode() + b"\n")

    def sync(self) -> None:
        """Force all rows to the disk; call it before a checkpoint, which must not outlive the rows before it."""
        for name in self._descriptors:
            file = self.path / f"{name}.jsonl"
            with disk_errors(file):
                sync_file(file)

    def close(self) -> None:
        """Let go of the folder. Writing afterwards is an error; closing twice is not."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _open_rows(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        for name in ROW_FILES:
            file = self.path / f"{name}.jsonl"
            with disk_errors(file):
                self._descriptors[name] = os.open(file, flags, 0o644)
        if not lock(self._descriptors["steps"], wait=False):
            self.close()
            raise RecordError(
                f"Cannot write the run {self.path}: another process is writing it.",
                "Wait until it ends, or stop it, then narrowgauge resume.",
            )

    def _append(self, name: str, row: Row) -> None:
        append_whole(self._descriptors[name], self.path / f"{name}.jsonl", line_of(row))
        self.num_rows[name] += 1


def _names() -> list[str]:
    return [f"{name}.jsonl" for name in ROW_FILES]


def rows_lost(path: Path, step: int, counts: Mapping[str, int] | None = None) -> list[str]:
    """What is missing of the rows that a checkpoint stands on, a sentence for each file; none where all are there.

    Args:
        path: the run folder.
        step: of the checkpoint.
        counts: rows of each file when it was written (:attr:`RunWriter.num_rows`); ``None`` where nobody knows.

    Raises:
        RecordError: rows are damaged or out of order.
    """
    return lost_rows(path, step, counts or {}, checked=schema_of(read_settings(path)) >= 2)


def require_rows(path: Path, step: int, counts: Mapping[str, int] | None = None) -> None:
    """Refuse to go on from a checkpoint where :func:`rows_lost` finds something; nothing is changed."""
    if lost := rows_lost(path, step, counts):
        raise RecordError(
            f"{path} has lost rows that its checkpoint of step {step} stands on: {'; '.join(lost)}.",
            f"Restore the file from a copy, or go on without them: narrowgauge resume {path} --accept-changes",
        )


def leftovers(path: Path) -> list[str]:
    """Names in a folder that a killed process left before there was a run: unfinished files, and rows of none."""
    if is_run(path) or not path.is_dir():
        return []
    with disk_errors(path):
        empty = [name for name in _names() if (path / name).is_file() and not (path / name).stat().st_size]
        return [*empty, *filter(_UNFINISHED.fullmatch, os.listdir(path))]


def remove_leftovers(path: Path) -> None:
    """Remove what :func:`leftovers` names; only for who holds the folder."""
    for name in leftovers(path):
        with disk_errors(path / name):
            if (path / name).is_dir():
                shutil.rmtree(path / name)
            else:
                (path / name).unlink()


def require_free(path: str | Path, *, beside: Collection[str] = ()) -> None:
    """Refuse a place where something lies already; changes nothing.

    Args:
        path: where a run is to be created.
        beside: names that may be there.

    Raises:
        RecordError: a file, or a folder that is not empty.
    """
    path = Path(path)
    with disk_errors(path):
        if path.exists() and not path.is_dir():
            raise RecordError(f"Cannot create a run in {path}: it is a file.", "Choose another folder.")
        found = sorted(set(os.listdir(path)) - set(beside)) if path.exists() else []
    if "run.toml" in found:
        advice = f"Choose another folder, or go on with narrowgauge resume {path}"
        raise RecordError(f"Cannot create a run in {path}: a run is there already.", advice)
    if found:
        raise RecordError(
            f"Cannot create a run in {path}: the folder is not empty (it holds {found[0]}).", "Choose another folder."
        )
