"""The new rows of a file that another process is writing, read by byte offset.

A poll costs one ``stat`` where nothing changed, and else reads what was appended. Rows end with a newline, so the rest after
the last newline is left for the next poll. A resume after a rollback cuts rows off and writes others in their place, perhaps
as many bytes as before: so the last row read is compared with the file at each poll, and where it differs, the rows that are
still there are found by bisection over the checksums of all rows, with a few short reads. A step that is
taken again has another row, since rows hold times; one that is equal, at an equal place, counts as the same.

Files are opened for reading only, and never locked. A line that is no row adds nothing but is counted: the page goes on, and
``narrowgauge report`` names the line.
"""

from __future__ import annotations

import json
import os
import zlib
from array import array
from pathlib import Path
from typing import NamedTuple

from narrowgauge.runs.lines import restored
from narrowgauge.runs.schema import NOT_FINITE, Row

CHUNK_BYTES = 1 << 18
"""The most that one poll reads: a long record is read in many polls, so that the page can answer in between."""

_QUOTED = tuple(f'"{name}"'.encode() for name in sorted(NOT_FINITE))


class News(NamedTuple):
    """What a poll found.

    Args:
        kept: how many of the rows that were read before are still in the file.
        rows: the rows after them.
        is_all: whether the end of the file was reached.
    """

    kept: int
    rows: list[Row]
    is_all: bool


class RowTail:
    """The rows of one file, read as they are appended.

    Args:
        file: it need not exist yet.

    Example:
        >>> import tempfile
        >>> file = Path(tempfile.mkdtemp(), "steps.jsonl")
        >>> tail = RowTail(file)
        >>> _ = file.write_bytes(b'{"step":1}\\n{"step":')
        >>> tail.read()
        News(kept=0, rows=[{'step': 1}], is_all=True)
    """

    def __init__(self, file: Path) -> None:
        self.file = file
        self.num_damaged = 0
        """Lines that are no rows."""
        self.changed_at: float | None = None
        """When the file was last written, in seconds since the epoch; ``None`` where there is none."""
        self._ends = array("q")  # of each row, in bytes from the start of the file
        self._checksums = array("L")
        self._seen: tuple[int, int] | None = None

    def __len__(self) -> int:
        return len(self._ends)

    def read(self, most_bytes: int = CHUNK_BYTES) -> News:
        """The rows that were appended since the last call, of at most that many bytes; never raises for what a file holds."""
        try:
            stat = self.file.stat()
        except OSError:
            self.changed_at, self._seen = None, None
            self._keep(0)
            return News(0, [], True)
        self.changed_at = stat.st_mtime
        if self._seen == (stat.st_size, stat.st_mtime_ns):
            return News(len(self), [], True)
        with self.file.open("rb", buffering=0) as stream:
            self._keep(self._num_kept(stream.fileno()))
            kept, start = len(self), self._ends[-1] if self._ends else 0
            text = os.pread(stream.fileno(), most_bytes, start)
            while text and b"\n" not in text and start + len(text) < stat.st_size:
                text += os.pread(stream.fileno(), most_bytes, start + len(text))
        rows = self._parsed(text[: text.rfind(b"\n") + 1], start)
        is_all = start + len(text) >= stat.st_size
        # A file that is written within one tick of the clock keeps its time: only a poll without news may skip the next.
        self._seen = (stat.st_size, stat.st_mtime_ns) if is_all else None
        return News(kept, rows, is_all)

    def _parsed(self, text: bytes, start: int) -> list[Row]:
        lines = text.splitlines(keepends=True) if b"\r" not in text else [f + b"\n" for f in text.split(b"\n")[:-1]]
        try:
            rows = json.loads(b"[" + b",".join(lines) + b"]")
        except (ValueError, RecursionError):
            rows = [_row_of(line) for line in lines]
        if any(name in text for name in _QUOTED):
            rows = restored(rows)
        for line in lines:
            start += len(line)
            self._ends.append(start)
            self._checksums.append(zlib.crc32(line))
        # A line that is no row keeps its place, as an empty row.
        found = [row if isinstance(row, dict) else {} for row in rows]
        self.num_damaged += sum(not row for row in found)
        for row in found:
            row.pop("crc32", None)
        return found

    def _keep(self, number: int) -> None:
        del self._ends[number:], self._checksums[number:]

    def _num_kept(self, descriptor: int) -> int:
        """How many of the known rows the file still begins with: all before the first that differs."""
        if self._is_there(descriptor, len(self) - 1):
            return len(self)
        low, high = 0, len(self) - 1
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if self._is_there(descriptor, middle) else (low, middle)
        return low

    def _is_there(self, descriptor: int, place: int) -> bool:
        if place < 0:
            return True
        start = self._ends[place - 1] if place else 0
        return zlib.crc32(os.pread(descriptor, self._ends[place] - start, start)) == self._checksums[place]


def _row_of(line: bytes) -> object:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None
