"""Write a run folder: append whole rows, and replace ``run.toml`` and ``summary.json``.

The folder is locked, so a run has one writer at a time. The lock ends with the process, however the
process ends.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from contextlib import suppress
from datetime import date, time
from pathlib import Path
from typing import Any

import tomli_w

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, read_bytes, write_whole
from narrowgauge.runs.places import ROW_FILES, FolderLock, require_free
from narrowgauge.runs.record import read_settings, rows_in, wrong_setting
from narrowgauge.runs.schema import STEPWISE, VERSION, Row, wrong_value


class RunWriter:
    """Write a run folder, which :meth:`create` makes and :meth:`open` continues.

    Close it, or use it in a ``with`` block.

    A reader never sees half a row. A second writer is refused, and a row with a value of the wrong
    type.

    Args:
        path: the run folder.
    Attributes:
        notes: sentences about damaged rows.
    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "own")
        >>> with RunWriter.create(folder, {"config": {"recipe": "bfloat16/word", "seed": 0}}) as writer:
        ...     _ = writer.append("steps", {"step": 1, "loss": 2.5})
        >>> ng.read_run(folder).steps
        [{'step': 1, 'loss': 2.5}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        self._lock: FolderLock | None = None

    @classmethod
    def create(cls, path: str | Path, run: Row) -> RunWriter:
        """Make a run folder, absent or empty before, and write its ``run.toml``.

        Args:
            run: all settings. ``None`` values are left out, since TOML has none. ``schema_version``
                is added.
        Raises:
            RecordError: the folder is not empty, another process is writing there, or the disk
                refuses.
        """
        writer = cls(path)
        require_free(writer.path)
        is_new = not writer.path.exists()
        with disk_errors(writer.path):
            writer.path.mkdir(parents=True, exist_ok=True)
        try:
            writer._lock = FolderLock(writer.path)
            require_free(writer.path)  # another writer may have finished since
            writer.amend(run)
        except BaseException:
            if is_new:
                with suppress(OSError):  # another writer may use it by now
                    writer.path.rmdir()
            writer.close()
            raise
        return writer

    @classmethod
    def open(cls, path: str | Path) -> RunWriter:
        """Continue a run, which no other process may be writing.

        Remove damaged rows, with a note for each file.
        """
        writer = cls(path)
        read_settings(writer.path)
        writer._lock = FolderLock(writer.path)
        for name in ROW_FILES:
            writer._keep(name)
        return writer

    def rewind(self, step: int) -> None:
        """Delete the rows after a step, and the summary, because a resume from its checkpoint
        writes them again. Keep the events.
        """
        for name in STEPWISE:
            self._keep(name, step)
        (self.path / "summary.json").unlink(missing_ok=True)

    def amend(self, run: Row) -> None:
        """Replace ``run.toml``, for a resume that changes its settings.

        ``run`` is as for :meth:`create`.
        """
        content = {**toml_value(run), "schema_version": VERSION}
        wrong = wrong_setting(content)
        if wrong:
            raise RecordError(f"Cannot write the run {self.path}: {wrong}.", "Give a whole number.")
        write_whole(self.path / "run.toml", tomli_w.dumps(content).encode())

    def append(self, kind: str, row: Row) -> Row:
        """Append a row to ``KIND.jsonl``, and return it as written. Cost: about 40 µs."""
        if self._lock is None:
            raise RecordError(
                f"Cannot write to {self.path} because its record is closed.",
                "Open it again: ng.RunRecorder(…, resume=True).",
            )
        content = self._checked(kind, row)
        try:
            line = json.dumps(content, ensure_ascii=False, separators=(",", ":"))
        except TypeError as error:
            raise RecordError(
                f"Cannot write this row of {kind}: {error}.", "Give numbers and text."
            ) from error
        file = self.path / f"{kind}.jsonl"
        with disk_errors(file), file.open("ab", buffering=0) as stream:
            length = stream.seek(0, os.SEEK_END)
            unwritten = f"{line}\n".encode()
            try:
                while unwritten:
                    unwritten = unwritten[stream.write(unwritten) :]
            except OSError:
                stream.truncate(length)
                raise
        return content

    def summary(self, row: Row) -> None:
        """Write ``summary.json``, replacing an earlier one."""
        values = {name: x for name, x in self._checked("summary", row).items() if x is not None}
        content = {"schema_version": VERSION, **values}
        write_whole(self.path / "summary.json", json.dumps(content, indent=1).encode())

    def close(self) -> None:
        """Release the folder. Writing afterwards is an error; closing twice is not."""
        if self._lock is not None:
            self._lock.release()
        self._lock = None

    def __enter__(self) -> RunWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _keep(self, name: str, last_step: float = float("inf")) -> None:
        """Remove damaged lines, a torn last one, and rows after a step."""
        file = self.path / f"{name}.jsonl"
        kept_lines = []
        for line, row in rows_in(file, self.notes):
            if row is not None and row["step"] <= last_step:
                kept_lines.append(line + b"\n")
        content = b"".join(kept_lines)
        if content != (read_bytes(file) or b""):
            write_whole(file, content)

    def _checked(self, kind: str, row: Row) -> Row:
        """Convert the row to JSON values. Refuse a row that no reader would accept."""
        written: Row = plain(row)
        wrong = wrong_value(kind, written)
        if wrong:
            message = f"Cannot write this row of {kind} to {self.path}: it has {wrong}."
            raise RecordError(message, "docs/reference.md lists the columns.")
        return written


def plain(value: Any) -> Any:
    """Return a value for JSON: numbers of NumPy and PyTorch as Python's, paths as text.

    NaN and infinities stay, as Python's JSON has them.
    """
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return list(map(plain, value))
    if hasattr(value, "item"):
        try:
            return value.item()
        except (ValueError, RuntimeError) as error:
            raise RecordError(
                f"Cannot write a value that is not one number: {error}.", "Give numbers."
            ) from error
    return str(value) if isinstance(value, Path) else value


def toml_value(value: Any) -> Any:
    """Return a value that TOML has: without ``None``, numbers of NumPy and PyTorch as Python's, all
    else as text.
    """
    if hasattr(value, "tolist"):
        value = value.tolist()
    if isinstance(value, dict):
        return {str(key): toml_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [toml_value(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, date, time)) else str(value)
