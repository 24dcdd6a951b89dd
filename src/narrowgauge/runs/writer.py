"""The writer of a run folder, and what it checks before it writes.

Rows are appended whole, with one write each; ``run.toml`` and ``summary.json`` are replaced, never edited. The open
``steps.jsonl`` is locked, so a run has one writer at a time, and the lock ends with its process however that ends.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Collection, Mapping
from contextlib import suppress
from pathlib import Path

import tomli_w

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import AGAIN, TEMPORARY, append_whole, disk_errors, lock, sync_file, write_whole
from narrowgauge.runs.events import Event, emit
from narrowgauge.runs.lines import (
    ROW_FILES,
    STEPWISE,
    json_value,
    kept_lines,
    line_of,
    line_steps,
    lost_rows,
    toml_value,
)
from narrowgauge.runs.record import SETTINGS, is_run, read_settings, read_summary
from narrowgauge.runs.schema import VERSION, Row, wrong_value

_UNFINISHED = re.compile(re.escape(TEMPORARY) + r"(data|run\.toml)(-\d+)?")


class RunWriter:
    """Writes a run folder.

    Invariant: a reader never sees half a row, and a second writer is refused while the first one is open. A row with a
    value of the wrong type is refused, and not written.

    Use :meth:`create` for a new run and :meth:`open` to continue one; close it, or use it in a ``with`` block.

    Args:
        path: the run folder.

    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "own")
        >>> with ng.runs.RunWriter.create(folder, {"config": {"recipe": "bfloat16/word", "seed": 0}}) as writer:
        ...     writer.step({"step": 1, "loss": 2.5})
        ...     writer.event(ng.Event("note", 1, "half of the data are seen"))
        >>> ng.read_run(folder).steps
        [{'step': 1, 'loss': 2.5}]
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

        Invariant: where several processes make a run in one folder at once, one succeeds and the others are refused; nothing
        is written before the folder is locked.

        Args:
            path: the folder; absent or empty.
            run: all settings. ``None`` values are left out, since TOML has none; ``schema_version`` is added.
            beside: names that the caller has already put there (``data``).

        Raises:
            RecordError: something else is there, another process is writing there, or the disk refuses.
        """
        writer = cls(path)
        require_free(writer.path, beside=(*beside, *leftovers(writer.path)))
        with disk_errors(writer.path):
            writer.path.mkdir(parents=True, exist_ok=True)
        writer._run = {**toml_value(run), "schema_version": VERSION}
        writer._open_rows()
        try:
            # Once more: another writer may have finished since.
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
        """Continue a run: a torn last line of each file is cut off.

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
        """Delete what came after a step, because a resume from its checkpoint writes it again.

        Deletes the rows of steps, evals, gauges and fingerprints after ``step``, and a summary of more steps. Events stay: they
        record what happened, including what was undone.

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

    def amend(self, run: Row) -> None:
        """Replace ``run.toml``, where a resume may change what it says.

        Args:
            run: all settings, as for :meth:`create`; ``schema_version`` stays the one that the run began with.

        Raises:
            RecordError: the disk refuses; the file is as it was.
        """
        self._run = {**toml_value(run), "schema_version": self._run["schema_version"]}
        write_whole(self.path / "run.toml", tomli_w.dumps(self._run).encode(), AGAIN)

    def _keep(self, name: str, lines: list[tuple[int, int, bool]], number: int) -> None:
        self.num_rows[name] = number
        with disk_errors(self.path / f"{name}.jsonl"):
            os.ftruncate(self._descriptors[name], sum(length for _, length, _ in lines[:number]))

    def step(self, row: Row) -> None:
        """Append a row to ``steps.jsonl``; ``row["step"]`` is the number of steps done. Cost: about 20 µs."""
        began_with = self._run.get("config")
        first = not self.num_rows["steps"] and isinstance(began_with, dict)
        self._append("steps", {**row, SETTINGS: began_with} if first else row)

    def eval(self, row: Row) -> None:
        """Append a row to ``evals.jsonl``."""
        self._append("evals", row)

    def event(self, event: Event | Row) -> None:
        """Append an event to ``events.jsonl``, then call the callbacks of ``ng.on_event``."""
        row = event.row() if isinstance(event, Event) else event
        # First: a row that is not an event is refused, and not written.
        self._checked("events", row)
        happened = event if isinstance(event, Event) else Event.from_row(row)
        self._append("events", row)
        emit(happened)

    def gauge(self, row: Row) -> None:
        """Append a row to ``gauges.jsonl``, as ``ng.attach_gauges`` passes it to ``on_row``."""
        self._append("gauges", row)

    def fingerprint(self, row: Row) -> None:
        """Append a row to ``fingerprints.jsonl``."""
        self._append("fingerprints", row)

    def summary(self, row: Row) -> None:
        """Write ``summary.json``, replacing an earlier one."""
        written = {"schema_version": VERSION, **self._checked("summary", row)}
        write_whole(self.path / "summary.json", json.dumps(written, indent=1, allow_nan=False).encode() + b"\n")

    def sync(self) -> None:
        """Force all rows to the disk; call it before a checkpoint, which must not outlive the rows before it."""
        for name in self._descriptors:
            file = self.path / f"{name}.jsonl"
            with disk_errors(file):
                sync_file(file)

    def close(self) -> None:
        """Release the folder. Writing afterwards is an error; closing twice is not."""
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
        append_whole(self._descriptors[name], self.path / f"{name}.jsonl", line_of(self._checked(name, row)))
        self.num_rows[name] += 1

    def _checked(self, kind: str, row: Row) -> Row:
        """The row as JSON has it; a row that no reader would accept is refused."""
        written: Row = json_value(row)
        if wrong := wrong_value(kind, written):
            raise RecordError(
                f"Cannot write this row of {kind} to {self.path}: it has {wrong}.", "docs/tables.md lists the columns."
            )
        return written


def append_event(path: Path, event: Event) -> None:
    """Append an event to a run whose writer cannot: it is gone, or is the very thread that hangs.

    Where that is not possible, nothing happens and nothing is raised: no run is there, its last row is torn, the disk is full.
    """
    file = path / "events.jsonl"
    with suppress(OSError, RecordError):
        descriptor = os.open(file, os.O_RDWR | os.O_APPEND | getattr(os, "O_BINARY", 0))
        try:
            length = os.fstat(descriptor).st_size
            if not length or os.pread(descriptor, 1, length - 1) == b"\n":
                append_whole(descriptor, file, line_of(json_value(event.row())))
                os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _names() -> list[str]:
    return [f"{name}.jsonl" for name in ROW_FILES]


def rows_lost(path: Path, step: int, counts: Mapping[str, int] | None = None) -> list[str]:
    """Which rows are missing that were written before a checkpoint (see :func:`lost_rows`).

    ``counts`` is :attr:`RunWriter.num_rows` at the checkpoint; ``None`` where that is not known.
    """
    return lost_rows(path, step, counts or {}, checked=read_settings(path)["schema_version"] >= 2)


def require_rows(path: Path, step: int, counts: Mapping[str, int] | None = None) -> None:
    """Refuse to resume from a checkpoint where :func:`rows_lost` finds something; nothing is changed."""
    if lost := rows_lost(path, step, counts):
        raise RecordError(
            f"{path} has lost rows from before its checkpoint of step {step}: {'; '.join(lost)}.",
            f"Restore the file from a copy, or go on without them: narrowgauge resume {path} --accept-changes",
        )


def leftovers(path: Path) -> list[str]:
    """Names that a killed process left in a folder before there was a run: unfinished and empty files."""
    if is_run(path) or not path.is_dir():
        return []
    with disk_errors(path):
        empty = [name for name in _names() if (path / name).is_file() and not (path / name).stat().st_size]
        return [*empty, *filter(_UNFINISHED.fullmatch, os.listdir(path))]


def remove_leftovers(path: Path) -> None:
    """Remove what :func:`leftovers` names; the caller must hold the folder."""
    for name in leftovers(path):
        with disk_errors(path / name):
            if (path / name).is_dir():
                shutil.rmtree(path / name)
            else:
                (path / name).unlink()


def require_free(path: str | Path, *, beside: Collection[str] = ()) -> None:
    """Refuse to create a run in a path that is a file, or a folder that holds anything but the names ``beside``."""
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
