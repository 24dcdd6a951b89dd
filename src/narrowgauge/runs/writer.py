"""Write a run folder: append whole rows, and replace ``run.toml`` and ``summary.json``.

The folder is locked, so a run has one writer at a time. The lock ends with the process, however the
process ends.
"""

from __future__ import annotations

import json
import math
import os
from collections import deque
from collections.abc import Iterator
from operator import itemgetter
from pathlib import Path
from typing import Any

import tomli_w

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, write_whole
from narrowgauge.runs.paths import ROW_FILES, lock, require_free, unlock
from narrowgauge.runs.record import lines_in, read_settings, rows_in
from narrowgauge.runs.schema import VERSION
from narrowgauge.spec import tables
from narrowgauge.spec.tables import Row


class Record:
    """Write a run folder, which :meth:`create` makes and :meth:`open` continues.

    Close it, or use it in a ``with`` block. A second writer is refused.

    Attributes:
        path: the run folder.
        notes: sentences about damaged rows.
    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "own")
        >>> with Record.create(folder, {"config": {"recipe": "bfloat16/word", "seed": 0}}) as record:
        ...     _ = record.append("steps", {"step": 1, "loss": 2.5})
        >>> ng.read_run(folder).steps
        [{'step': 1, 'loss': 2.5}]
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self.notes: list[str] = []
        self._lock = lock(self.path)
        self._is_open = True

    @classmethod
    def create(cls, path: str | Path, run: Row) -> Record:
        """Make a run folder, absent or empty before, and write its ``run.toml``.

        Args:
            run: all settings. ``None`` values are left out, since TOML has none. ``schema_version``
                is added.
        Raises:
            RecordError: the folder is not empty, another process is writing there, or the disk
                refuses.
        """
        with disk_errors(Path(path)):
            Path(path).mkdir(parents=True, exist_ok=True)
        record = cls(path)
        try:
            require_free(path)
            record.amend(run)
        except BaseException:
            record.close()
            raise
        return record

    @classmethod
    def open(cls, path: str | Path) -> Record:
        """Continue a run, which no other process may be writing.

        Remove damaged rows, with a note for each file.
        """
        read_settings(Path(path))
        record = cls(path)
        for kind in ROW_FILES:
            file = record.path / f"{kind}.jsonl"
            deque(rows_in(file, record.notes), 0)
            _cut(file, math.inf)
        return record

    def rewind(self, step: int) -> None:
        """Move the rows after a step, and the summary, to ``KIND.jsonl.cut`` and
        ``summary.json.cut``, because a resume from its checkpoint writes them again. Keep the events.
        """
        for kind in ROW_FILES:
            if kind != "events":
                _cut(self.path / f"{kind}.jsonl", step)
        _cut(self.path / "summary.json", step)

    def amend(self, run: Row) -> None:
        """Replace ``run.toml``, for a resume that changes its settings.

        ``run`` is as for :meth:`create`.
        """
        content = tomli_w.dumps(plain(run) | {"schema_version": VERSION})
        write_whole(self.path / "run.toml", content.encode())

    def append(self, kind: str, row: Row) -> Row:
        """Append a row to ``KIND.jsonl``, and return it as written. Cost: about 40 µs."""
        if not self._is_open:
            raise RecordError(
                f"Cannot write to {self.path} because its record is closed.",
                "Open it again: ng.RunRecorder(…, resume=True).",
            )
        content = plain(row)
        file = self.path / f"{kind}.jsonl"
        with disk_errors(file), file.open("ab") as stream:
            stream.write(_line(content))
        return content

    def summary(self, row: Row) -> None:
        """Write ``summary.json``, replacing an earlier one."""
        write_whole(self.path / "summary.json", json.dumps(plain(row), indent=1).encode())

    def close(self) -> None:
        """Release the folder. Writing afterwards is an error; closing twice is not."""
        if self._is_open:
            unlock(self._lock)
        self._is_open = False

    def __enter__(self) -> Record:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _cut(file: Path, last_step: float) -> None:
    """Move damaged lines, a torn last one, and rows after a step to ``FILE.cut``. If no line is
    left, remove the file.
    """

    def lines(are_kept: bool) -> Iterator[bytes]:
        for line, row in lines_in(file):
            if are_kept == (row is not None and row["step"] <= last_step):
                yield line

    if any(lines(are_kept=False)):
        cut = file.with_name(f"{file.name}.cut")
        with disk_errors(cut), cut.open("ab") as stream:
            for line in lines(are_kept=False):
                stream.write(line.rstrip(b"\n") + b"\n")
            os.fsync(stream.fileno())
        write_whole(file, lines(are_kept=True))
        if not file.stat().st_size:
            file.unlink()


def _line(row: Row) -> bytes:
    return f"{json.dumps(row, ensure_ascii=False, separators=(',', ':'))}\n".encode()


def plain(value: Any) -> Any:
    """Return a value that JSON and TOML have, as :func:`narrowgauge.spec.tables.plain` does, without
    ``None`` in tables. NaN and infinities stay.
    """
    return tables.plain(value, object_hook=_without_none)


def _without_none(table: Row) -> Row:
    return {name: value for name, value in table.items() if value is not None}


LISTED = 20
"""Tensors in a list of a row."""
ROW = 2000
"""Bytes of a row of ``steps.jsonl``."""
LONGEST = 200
"""Bytes of a text in a row."""


def shortened(row: Row) -> Row:
    """Return the row of a step with the first :data:`LISTED` names of each list of tensors, with the
    lowest values of an object, and with the ``counts`` of longer ones. If these take more than
    :data:`ROW` bytes, take fewer.
    """
    lists = {}
    for name, tensors in row.items():
        if isinstance(tensors, dict):
            lists[name] = sorted(tensors.items(), key=itemgetter(1))
        elif isinstance(tensors, list):
            lists[name] = tensors
    short = row
    for most in (LISTED, 10, 5, 2, 1):
        short = {**row}
        counts = {}
        for name, tensors in lists.items():
            short[name] = type(row[name])(tensors[:most])
            if len(tensors) > most:
                counts[name] = len(tensors)
        if counts:
            short["counts"] = counts
        if len(_line(short)) <= ROW:
            break
    return short


def require_columns(row: Row) -> None:
    """Refuse columns of a user's step that are not numbers or short texts, and fewer than no tokens."""
    for name, value in row.items():
        is_valid = value is None or isinstance(value, (int, float))
        if isinstance(value, str):
            is_valid = len(value.encode()) <= LONGEST
        elif name == "tokens" and value is not None:
            is_valid = isinstance(value, int) and value >= 0
        if not is_valid:
            raise RecordError(
                f"Cannot record '{name}' = {str(value)[:40]}.",
                f"Give one number, or a text of at most {LONGEST} bytes; tokens from 0 on.",
            )
