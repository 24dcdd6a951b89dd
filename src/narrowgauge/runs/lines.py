"""Read the lines of a run's files.

One write appends a row and its newline. So a last line without a newline is torn, and dropped. Any other line that does not
parse is refused. JSON lacks NaN and infinities, so they are stored as ``"nan"``, ``"inf"`` and ``"-inf"``.
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import date, time
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import load_json, read_bytes
from narrowgauge.runs.schema import NOT_FINITE, TEXT, Row, wrong_value

ROW_FILES = ("steps", "evals", "events", "gauges", "fingerprints")
"""The kinds of rows. Each has a file: ``steps.jsonl`` and so on."""
_QUOTED = tuple(f'"{name}"'.encode() for name in sorted(NOT_FINITE))


def read_rows(file: Path) -> list[Row]:
    """Return the rows of a file. Drop a torn last line, refuse a damaged line."""
    return [row for _, row in rows_with_lengths(file)]


def rows_with_lengths(file: Path) -> Iterator[tuple[int, Row]]:
    """Yield each row of a file with the length of its line in bytes."""
    *lines, _ = (read_bytes(file) or b"").split(b"\n")
    for number, line in enumerate(lines, 1):
        row: Any = None
        try:
            row = load_json(line)
            row = restored(row) if any(name in line for name in _QUOTED) else row
            problem = wrong_value(file.stem, row) if isinstance(row, dict) else "no object"
        except (ValueError, RecursionError) as error:
            problem = f"no row ({error})"
        if problem:
            raise RecordError(f"{file} is damaged: line {number} of {len(lines)} has {problem}.", "Delete that line.")
        yield len(line) + 1, row


def restored(value: Any, key: str = "") -> Any:
    """Turn the names of NaN and infinities back into floats. Leave columns of text unchanged."""
    if isinstance(value, dict):
        return {name: restored(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [restored(item, key) for item in value]
    if isinstance(value, str) and value in NOT_FINITE and key not in TEXT:
        return float(value)
    return value


def toml_value(value: Any) -> Any:
    """Return a value that TOML has: without ``None``, numbers of NumPy and PyTorch as Python's, all else as text."""
    value = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(value, dict):
        return {str(key): toml_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [toml_value(item) for item in value]
    return value if isinstance(value, (bool, int, float, str, date, time)) else str(value)
