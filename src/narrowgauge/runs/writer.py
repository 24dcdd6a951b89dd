"""Write a run folder: append whole rows, and replace ``run.toml`` and ``summary.json``.

The open ``steps.jsonl`` is locked, so a run has one writer at a time. The lock ends with the process, however the process ends.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import zip_longest
from pathlib import Path
from typing import Any

import tomli_w

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import TEMPORARY, disk_errors, hash_of, sync, write_whole
from narrowgauge.runs.events import Event, emit
from narrowgauge.runs.record import (
    ROW_FILES,
    read_rows,
    read_settings,
    rows_with_lengths,
    toml_value,
    wrong_setting,
)
from narrowgauge.runs.schema import STEPWISE, VERSION, Row, wrong_value
from narrowgauge.spec.tables import json_value

if sys.platform != "win32":
    import fcntl

_FILES = [f"{name}.jsonl" for name in ROW_FILES]


class RunWriter:
    """Write a run folder, which :meth:`create` makes and :meth:`open` continues. Close it, or use it in a ``with`` block.

    A reader never sees half a row. A second writer is refused, and a row with a value of the wrong type.

    Args:
        path: the run folder.
    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "own")
        >>> with ng.runs.RunWriter.create(folder, {"config": {"recipe": "bfloat16/word", "seed": 0}}) as writer:
        ...     writer.append("steps", {"step": 1, "loss": 2.5})
        ...     writer.event(ng.Event("note", 1, "half of the data are seen"))
        >>> ng.read_run(folder).steps
        [{'step': 1, 'loss': 2.5}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptors: dict[str, int] = {}

    @classmethod
    def create(cls, path: str | Path, run: Row) -> RunWriter:
        """Make a run folder, absent or empty before, and write its ``run.toml``.

        Args:
            run: all settings. ``None`` values are left out, since TOML has none. ``schema_version`` is added.
        Raises:
            RecordError: the folder is not empty, another process is writing there, or the disk refuses.
        """
        writer = cls(path)
        require_free(writer.path)
        is_new = not writer.path.exists()
        with disk_errors(writer.path):
            writer.path.mkdir(parents=True, exist_ok=True)
        try:
            writer._open_rows()
            writer._hash_rows()
            require_free(writer.path)  # another writer may have finished since
            writer.amend(run)
        except BaseException:
            if not (writer.path / "run.toml").exists():
                for name in _FILES if writer._descriptors else ():
                    (writer.path / name).unlink(missing_ok=True)
                if is_new:
                    with suppress(OSError):  # another writer may use it by now
                        writer.path.rmdir()
            writer.close()
            raise
        return writer

    @classmethod
    def open(cls, path: str | Path) -> RunWriter:
        """Continue a run, which no other process may be writing. Cut off a torn last line of each file."""
        writer = cls(path)
        read_settings(writer.path)
        writer._open_rows()
        with ExitStack() as undo:
            undo.callback(writer.close)
            for name in ROW_FILES:
                writer._cut(name, None)
            writer._hash_rows()
            undo.pop_all()
        return writer

    def digests(self) -> dict[str, tuple[int, str]]:
        """Return the length of the files of steps and evaluations, and the hash of what was written there, for a checkpoint."""
        return {name: (self._length(name), rows.hexdigest()) for name, rows in self._hashes.items()}

    def rewind(
        self, step: int, *, first: int = 1, digests: Mapping[str, Sequence[Any]] | None = None
    ) -> None:
        """Delete the rows after a step, and the summary, because a resume from its checkpoint writes them again. Keep the events.

        Args:
            step: the last optimizer step to keep.
            first: the step of the first row.
            digests: what :meth:`digests` returned after that step; ``None`` if unknown.

        Raises:
            RecordError: rows up to ``step`` are missing or changed. The files stay unchanged.
        """
        expected = range(first, step + 1)
        steps = zip_longest(
            expected, [row["step"] for row in read_rows(self._file("steps"))][: len(expected)]
        )
        problem = next(
            (f"steps.jsonl lacks step {number}" for number, present in steps if present != number),
            "",
        )
        for name, (length, digest) in (digests or {}).items():
            if not problem and self._hash(name, length).hexdigest() != digest:
                problem = f"{name}.jsonl is not as it was written"
        if problem:
            raise RecordError(
                f"{self.path} has lost or changed rows from before its checkpoint of step {step}: {problem}.",
                "Restore the file from a copy, go back to an earlier checkpoint, or record into a new folder.",
            )
        for name in STEPWISE:
            self._cut(name, step)
        self._hash_rows()
        (self.path / "summary.json").unlink(missing_ok=True)

    def amend(self, run: Row) -> None:
        """Replace ``run.toml``, for a resume that changes its settings. ``run`` is as for :meth:`create`."""
        content = {**toml_value(run), "schema_version": VERSION}
        if wrong := wrong_setting(content):
            raise RecordError(f"Cannot write the run {self.path}: {wrong}.", "Give a whole number.")
        write_whole(self.path / "run.toml", tomli_w.dumps(content).encode())

    def append(self, kind: str, row: Row) -> None:
        """Append a row to ``KIND.jsonl``: ``"steps"``, ``"evals"``, ``"gauges"`` or ``"fingerprints"``. Cost: about 20 µs."""
        line = json.dumps(
            self._checked(kind, row), allow_nan=False, ensure_ascii=False, separators=(",", ":")
        )
        left = data = f"{line}\n".encode()
        descriptor, length = self._descriptors[kind], self._length(kind)
        with disk_errors(self._file(kind)):
            try:
                while left:
                    left = left[os.write(descriptor, left) :]
            except OSError:
                os.ftruncate(descriptor, length)
                raise
        if kind in self._hashes:
            self._hashes[kind].update(data)

    def event(self, event: Event) -> None:
        """Append an event to ``events.jsonl``, then call the callbacks of ``ng.on_event``."""
        self.append("events", event.row())
        emit(event)

    def summary(self, row: Row) -> None:
        """Write ``summary.json``, replacing an earlier one."""
        content = {"schema_version": VERSION, **self._checked("summary", row)}
        write_whole(
            self.path / "summary.json",
            json.dumps(content, indent=1, allow_nan=False).encode() + b"\n",
        )

    def sync(self) -> None:
        """Force all rows to the disk. Call it before a checkpoint, which must not outlive the rows before it."""
        for name in self._descriptors:
            with disk_errors(self._file(name)):
                sync(self._file(name))

    def close(self) -> None:
        """Release the folder. Writing afterwards is an error; closing twice is not."""
        while self._descriptors:
            descriptor = self._descriptors.popitem()[1]
            if sys.platform != "win32":
                with suppress(OSError):  # a forked process may have the file open
                    fcntl.flock(descriptor, fcntl.LOCK_UN)
            os.close(descriptor)

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _file(self, name: str) -> Path:
        return self.path / f"{name}.jsonl"

    def _open_rows(self) -> None:
        flags = os.O_RDWR | os.O_APPEND | os.O_CREAT | getattr(os, "O_BINARY", 0)
        for name in ROW_FILES:
            with disk_errors(self._file(name)):
                self._descriptors[name] = os.open(self._file(name), flags, 0o644)
        if sys.platform != "win32":
            try:
                fcntl.flock(self._descriptors["steps"], fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                self.close()
                who = "another process, or a recorder of this one that was not closed,"
                raise RecordError(
                    f"Cannot write the run {self.path}: {who} is writing it.",
                    "Close it, or wait until the process ends.",
                ) from error
            except OSError:  # a file system without locks
                pass

    def _cut(self, name: str, step: int | None) -> None:
        """Truncate a file before its first row after a step, or before a torn last line."""
        length = 0
        for size, row in rows_with_lengths(self._file(name)):
            if step is not None and row["step"] > step:
                break
            length += size
        with disk_errors(self._file(name)):
            os.ftruncate(self._descriptors[name], length)

    def _hash_rows(self) -> None:
        self._hashes = {name: self._hash(name, self._length(name)) for name in ("steps", "evals")}

    def _hash(self, name: str, length: int) -> hashlib.blake2b:
        with disk_errors(self._file(name)):
            return hash_of(self._file(name), length)

    def _length(self, name: str) -> int:
        return os.fstat(self._descriptors[name]).st_size

    def _checked(self, kind: str, row: Row) -> Row:
        """Convert the row to JSON values. Refuse a row that no reader would accept."""
        written: Row = json_value(row)
        if wrong := wrong_value(kind, written):
            message = f"Cannot write this row of {kind} to {self.path}: it has {wrong}."
            raise RecordError(message, "docs/reference.md lists the columns.")
        return written


def require_free(path: str | Path) -> None:
    """Refuse to create a run in a file or a non-empty folder. Files that a killed process leaves do not count."""
    path, problem = Path(path), ""
    with disk_errors(path):
        if path.exists() and not path.is_dir():
            problem = "it is a file"
        for name in sorted(os.listdir(path)) if path.is_dir() else ():
            if not name.startswith(TEMPORARY) and (
                name not in _FILES or (path / name).stat().st_size
            ):
                problem = problem or f"the folder is not empty (it holds {name})"
    if (path / "run.toml").exists():
        advice = f"Choose another folder, or go on with narrowgauge resume {path}"
        raise RecordError(f"Cannot create a run in {path}: a run is there already.", advice)
    if problem:
        raise RecordError(f"Cannot create a run in {path}: {problem}.", "Choose another folder.")
