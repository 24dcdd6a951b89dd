"""Lightning's ``metrics.csv``, which its CSVLogger writes, of Trainer and Fabric alike."""

from __future__ import annotations

import csv
import io
from pathlib import Path

from narrowgauge.runs.foreign_names import Log

FILE = "metrics.csv"


def find(path: Path) -> list[Path]:
    """The file itself, or that of the folder (``lightning_logs/version_0``)."""
    if path.name == FILE and path.is_file():
        return [path]
    return [path / FILE] if (path / FILE).is_file() else []


def read(files: list[Path]) -> Log:
    """The columns; Lightning counts steps from 0 and we from 1, so a row of its step 9 is of our step 10.

    Raises:
        ValueError: it is damaged.
    """
    table = csv.DictReader(io.StringIO(files[0].read_text(encoding="utf-8"), newline=""), strict=True)
    if "step" not in (table.fieldnames or ()):
        raise ValueError("it has no column 'step'")
    log = Log()
    for line in _rows(table):
        step = _number("step", line["step"])
        for name, value in line.items():
            if name not in ("step", "epoch") and value:
                log.add(name, step + 1, _number(name, value))
    return log


def _rows(table: csv.DictReader[str]) -> list[dict[str, str]]:
    try:
        rows = list(table)
    except csv.Error as error:
        raise ValueError(f"line {table.line_num}: {error}") from error
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"line {number} has not as many values as the first line has names")
    return rows


def _number(name: str, value: str) -> float:
    try:
        return float(value)
    except ValueError as error:
        raise ValueError(f"column '{name}' holds {value!r}, which is not a number") from error
