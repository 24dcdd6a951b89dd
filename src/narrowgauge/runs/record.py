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
and the resumed run after any crash, finds valid rows and at worst one torn last line, which is dropped. A row's NaN and
infinities are kept as the strings ``"nan"``, ``"inf"``, ``"-inf"`` (JSON has no other word for them) and come back as
floats.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import tomli_w

from narrowgauge.errors import RecordError
from narrowgauge.runs.events import Event, tell
from narrowgauge.runs.files import append_whole, disk_errors, lock, sync_file, write_whole
from narrowgauge.runs.row_types import TEXT, is_whole, short, wrong_type

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

SCHEMA_VERSION = 1
"""The version of the layout above. A newer one is refused; an older one stays readable."""

Row = dict[str, Any]

_ROWS = ("steps", "evals", "events", "gauges")
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})
_QUOTED = tuple(f'"{name}"'.encode() for name in sorted(_NOT_FINITE))


@dataclass(frozen=True)
class Run:
    """A run folder, read.

    Args:
        path: the folder.
        run: ``run.toml``.
        steps, evals, events: the rows, in the order written.
        summary: the figures of the finished run, or ``None`` while it has none.
    """

    path: Path
    run: Row
    steps: list[Row] = field(default_factory=list)
    evals: list[Row] = field(default_factory=list)
    events: list[Row] = field(default_factory=list)
    summary: Row | None = None

    @cached_property
    def gauges(self) -> list[Row]:
        """The rows of ``gauges.jsonl``, read when they are asked for: they are the longest by far.

        Raises:
            RecordError: a line in the middle of the file is damaged.
        """
        return _read_rows(self.path / "gauges.jsonl")

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
    run = _read_run_toml(path)
    _require_settings(path / "run.toml", run)
    rows = {name: _read_rows(path / f"{name}.jsonl") for name in _ROWS if name != "gauges"}
    return Run(path, run, rows["steps"], rows["evals"], rows["events"], _read_summary(path / "summary.json"))


class RunWriter:
    """The one writer of a run folder.

    Law: a reader never sees half a row; a second writer is refused while the first lives.

    Use :meth:`create` for a new run and :meth:`open` for one that goes on; close it, or use it in a ``with`` block.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._descriptors: dict[str, int] = {}

    @classmethod
    def create(cls, path: str | Path, run: Row, *, beside: Collection[str] = ()) -> RunWriter:
        """Make a run folder and write its ``run.toml``.

        Args:
            path: the folder; absent or empty.
            run: everything that was asked for. ``None`` values are left out, since TOML has none;
                ``schema_version`` is added.
            beside: names the caller itself has already put there (``data``).

        Raises:
            RecordError: something else is there, or the disk refuses.
        """
        writer = cls(path)
        require_free(writer.path, beside=beside)
        with disk_errors(writer.path):
            writer.path.mkdir(parents=True, exist_ok=True)
        text = tomli_w.dumps({"schema_version": SCHEMA_VERSION, **_without_none(run)})
        write_whole(writer.path / "run.toml", text.encode())
        writer._open_rows()
        return writer

    @classmethod
    def open(cls, path: str | Path) -> RunWriter:
        """Go on writing a run: a torn last line of each file is cut off.

        Raises:
            RecordError: no run is there, it is newer than this version, or another process is writing it.
        """
        writer = cls(path)
        _read_run_toml(writer.path)
        writer._open_rows()
        for name in _ROWS:
            file = writer.path / f"{name}.jsonl"
            with disk_errors(file):
                os.ftruncate(writer._descriptors[name], sum(len(line) for line, _ in _whole_lines(file)))
        return writer

    def rewind(self, step: int) -> None:
        """Forget what came after a step, because a resume from its checkpoint will write it again.

        Rows of steps, evals and gauges from the first one beyond ``step`` on are deleted and kept nowhere, and so is a summary
        of more steps. Events stay: they tell what happened, including what was undone.

        Args:
            step: the last optimizer step to keep.
        """
        for name in ("steps", "evals", "gauges"):
            file = self.path / f"{name}.jsonl"
            length = 0
            for line, row in _whole_lines(file):
                if row.get("step", 0) > step:
                    break
                length += len(line)
            with disk_errors(file):
                os.ftruncate(self._descriptors[name], length)
        summary = _read_summary(self.path / "summary.json")
        if summary is not None and summary.get("steps", 0) > step:
            (self.path / "summary.json").unlink()

    def step(self, row: Row) -> None:
        """Append a row to ``steps.jsonl``; ``row["step"]`` is the number of steps done. Cost: about 20 µs."""
        self._append("steps", row)

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
        text = json.dumps({"schema_version": SCHEMA_VERSION, **_plain(row)}, indent=1, allow_nan=False)
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
        for name in _ROWS:
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
        line = json.dumps(_plain(row), allow_nan=False, ensure_ascii=False, separators=(",", ":"))
        append_whole(self._descriptors[name], self.path / f"{name}.jsonl", line.encode() + b"\n")


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


def _read_run_toml(path: Path) -> Row:
    file = path / "run.toml"
    if not is_run(path):
        found = "the folder has no run.toml" if path.is_dir() else "there is no such folder"
        raise RecordError(f"No run in {path}: {found}.", "Name the folder that was given as --out.")
    try:
        with disk_errors(file):
            run: Row = tomllib.loads(file.read_bytes().decode())
        version = int(run["schema_version"])
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise RecordError(f"{file} is damaged: {error}.", "Restore the file from a copy.") from error
    _require_known(version, path)
    return run


def _require_known(version: int, path: Path) -> None:
    if version > SCHEMA_VERSION:
        raise RecordError(
            f"The run {path} has record schema {version}; this version reads up to {SCHEMA_VERSION}.",
            "Upgrade with pip install --upgrade narrowgauge.",
        )


def _read_rows(file: Path) -> list[Row]:
    return [row for _, row in _whole_lines(file)]


def _whole_lines(file: Path) -> Iterator[tuple[bytes, Row]]:
    """Each whole line with its newline, and its row."""
    with disk_errors(file):
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
            row = json.loads(line)
            if not isinstance(row, dict):
                raise ValueError("not an object")
            # A hundred thousand numbers of a long run need no look each.
            row = _revived(row) if any(name in line for name in _QUOTED) else row
            wrong = wrong_type(file.stem, row)
        # A line can be nested deeper than Python goes.
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise RecordError(
                f"{file} is damaged: line {number} of {len(lines)} is not a row ({error}).", "Delete that line."
            ) from error
        if wrong:
            raise RecordError(f"{file} is damaged: line {number} of {len(lines)} has {wrong}.", "Delete that line.")
        yield line, row


def _require_settings(file: Path, run: Row) -> None:
    """What readers reckon with among the settings."""
    config: Any = run.get("config")
    for key in ("seed", "steps") if isinstance(config, dict) else ():
        if key in config and not is_whole(config[key]):
            reason = f"its {key} = {short(config[key])} is no whole number"
            raise RecordError(f"{file} is damaged: {reason}.", "Restore the file from a copy.")


def _read_summary(file: Path) -> Row | None:
    if not file.exists():
        return None
    try:
        with disk_errors(file):
            summary: Row = _revived(json.loads(file.read_bytes()))
        if not isinstance(summary, dict):
            raise ValueError(f"{short(summary)} is not an object")
        if wrong := wrong_type("summary", summary):
            raise ValueError(f"it has {wrong}")
    except (ValueError, RecursionError) as error:
        advice = "Delete it; narrowgauge resume writes it again."
        raise RecordError(f"{file} is damaged: {error}.", advice) from error
    _require_known(summary.get("schema_version") or 0, file.parent)
    return summary


def _plain(value: Any) -> Any:
    """What JSON can say: numbers of numpy and torch as Python's, paths as text, non-finite floats as their names."""
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def _revived(value: Any, key: str = "") -> Any:
    if isinstance(value, dict):
        return {name: _revived(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [_revived(item, key) for item in value]
    if isinstance(value, str) and value in _NOT_FINITE and key not in TEXT:
        return float(value)
    return value


def _without_none(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [_without_none(item) for item in value]
    return str(value) if isinstance(value, Path) else value
