"""The run folder: everything about a run, in files that a person can read and a crash cannot
damage.

::

    run.toml            all settings, with versions; a resume may replace it
    steps.jsonl         a row per optimizer step
    evals.jsonl         a row per evaluation
    events.jsonl        a row per event
    fingerprints.jsonl  a row per hashed step
    summary.json        the metrics of the finished run

The columns are in data/columns.toml. Rows are a log: readers drop a row that does not parse, with a
note. At any moment the last line may be torn, which is dropped without a note.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import damaged, disk_errors, read_bytes
from narrowgauge.runs.foreign_logs import SOURCE, read_log
from narrowgauge.runs.paths import is_run, only_run
from narrowgauge.runs.schema import VERSION
from narrowgauge.runs.text import plural
from narrowgauge.spec.tables import Row
from narrowgauge.spec.toml import load_toml

LARGE = 1 << 23
"""Bytes of a file of rows up to which it is read at once."""


@dataclass(frozen=True)
class Run:
    """Hold the content of a run folder, as :func:`read_run` returns it.

    Args:
        path: the folder.
        run: ``run.toml``.
        steps, evals, events: the rows, in the order written.
        summary: the metrics of the finished run; ``None`` before.
        notes: sentences about damaged rows that were dropped; of a large file once it was read.
    """

    path: Path
    run: Row
    steps: Rows = field(default_factory=list)
    evals: Rows = field(default_factory=list)
    events: Rows = field(default_factory=list)
    summary: Row | None = None
    notes: list[str] = field(default_factory=list)

    @cached_property
    def fingerprints(self) -> Rows:
        """Return the rows of ``fingerprints.jsonl``, read on first use."""
        return _rows(self.path / "fingerprints.jsonl", self.notes)

    @property
    def last_step(self) -> Row:
        """Return the row of the last step, which is empty without one."""
        if isinstance(self.steps, LargeFile):
            return self.steps.last
        return self.steps[-1] if self.steps else {}

    @property
    def is_foreign(self) -> bool:
        """Return whether it was read from another framework's log."""
        return SOURCE in self.run

    @property
    def config(self) -> Row:
        """Return the settings: the table ``[config]`` of ``run.toml``."""
        return dict(self.run.get("config", {}))

    @property
    def data_fingerprint(self) -> str:
        """Return the fingerprint of the tokens at the start of the run; empty if it is lost."""
        return str(self.run.get("data", {}).get("fingerprint", ""))


def read_run(path: str | Path) -> Run:
    """Read a run folder, finished or not, even while it is being written. Drop damaged rows.

    Args:
        path: the run folder, or a folder with one run. Or a Hugging Face ``trainer_state.json``, a
            Lightning ``metrics.csv``, or their folder, without a run of ours. Or a table (CSV).
            Such a log is of a finished run.
    Returns:
        Its content. Values that a log lacks are absent.
    Raises:
        RecordError: the run is missing, its ``run.toml`` or a log is damaged, or another version
            wrote it.
    Example:
        >>> import tempfile, narrowgauge as ng
        >>> folder = Path(tempfile.mkdtemp(), "first")
        >>> from narrowgauge.runs import Record
        >>> with Record.create(folder, {"config": {"recipe": "bfloat16/word"}}) as record:
        ...     _ = record.append("steps", {"step": 1, "loss": float("nan")})
        >>> read_run(folder).steps
        [{'step': 1, 'loss': nan}]
    """
    path = only_run(path)
    if not is_run(path):
        return Run(**read_log(path))
    notes: list[str] = []
    steps, evals, events = (
        _rows(path / f"{kind}.jsonl", notes) for kind in ("steps", "evals", "events")
    )
    return Run(path, read_settings(path), steps, evals, events, read_summary(path, notes), notes)


def read_settings(path: Path) -> Row:
    """Return ``run.toml`` of a run folder.

    Raise ``RecordError`` if it is missing, damaged, or of another version.
    """
    file = path / "run.toml"
    data = read_bytes(file)
    if data is None:
        raise RecordError(
            f"No run in {path}: it has no run.toml.", "Name the folder that was given as --out."
        )
    try:
        run = load_toml(data.decode())
    except ValueError as error:
        raise damaged(file, error) from error
    for name, table in run.items():
        if name != "schema_version" and not isinstance(table, dict):
            raise damaged(file, f"'{name}' is not a table")
    version = run.get("schema_version")
    if version != VERSION:
        raise SchemaError(
            f"{file} has record schema {version}; this version reads {VERSION}.",
            "Read it with the version that wrote it.",
        )
    return run


def read_summary(path: Path, notes: list[str]) -> Row | None:
    """Return the metrics of a finished run; without them, or if they are damaged, it is not finished."""
    data = read_bytes(path / "summary.json")
    if data is None:
        return None
    try:
        return dict(json.loads(data))
    except (ValueError, TypeError) as error:
        notes.append(f"summary.json is damaged ({error}) and was left out")
        return None


class SchemaError(RecordError):
    """A file of another version, which is whole and is not to be written again."""


def lines_in(file: Path) -> Iterator[tuple[bytes, Row | None]]:
    """Yield the lines of a file with their rows; ``None`` is the row of one that does not parse, and
    of a torn last one.
    """
    with disk_errors(file):
        if not file.is_file():
            return
        kind = file.stem
        with file.open("rb") as stream:
            for line in stream:
                yield line, _row_of(line, kind)


def _row_of(line: bytes, kind: str) -> Row | None:
    try:
        row = json.loads(line.decode())  # of bytes it takes twice the time
    except ValueError:
        return None
    if type(row) is not dict or not line.endswith(b"\n"):
        return None
    is_row = type(row.get("step")) is int and (kind != "events" or "what" in row)
    return row if is_row else None


def rows_in(file: Path, notes: list[str]) -> Iterator[Row]:
    """Yield the rows of a file. Drop lines that do not parse, with a note, and a torn last one."""
    wrong = []
    number = 0
    for number, (line, row) in enumerate(lines_in(file), 1):
        if row is not None:
            yield row
        elif line.endswith(b"\n"):
            wrong.append(number)
    if wrong:
        count = plural(len(wrong), "damaged row")
        note = f"{file.name} has {count} of {number}, the first in line {wrong[0]}; left out"
        if note not in notes:
            notes.append(note)


class LargeFile:
    """The rows of a file, read anew by each loop over them: a million would take gigabytes."""

    def __init__(self, file: Path, notes: list[str]) -> None:
        self.file = file
        self.notes = notes

    def __iter__(self) -> Iterator[Row]:
        return rows_in(self.file, self.notes)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    @cached_property
    def last(self) -> Row:
        """Return the last row, for which the file is read once."""
        rows = deque(self, 1)
        return rows[0] if rows else {}


Rows = list[Row] | LargeFile


def _rows(file: Path, notes: list[str]) -> Rows:
    with disk_errors(file):
        is_large = file.is_file() and file.stat().st_size > LARGE
    return LargeFile(file, notes) if is_large else [*rows_in(file, notes)]
