"""Lines of rows: how a row becomes a line that a flipped bit cannot change unseen, and how lines are read again.

A line is a JSON object whose last key, ``crc32``, is the checksum of the text before it. So a row can be read by any
program, and a damaged one is told from a true one; readers never see the key. Lines without it were written by an older
version, or by hand. A checksum does not tell that a whole line is gone: that is what :func:`lost_rows` is for, which
knows how many there were at a checkpoint, and that steps are numbered one by one.

Reading must stay as quick as parsing is: the checksum costs a thirtieth of it, and where only the number of the step is
asked for, a line that keeps its checksum is not parsed at all.
"""

from __future__ import annotations

import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, load_json
from narrowgauge.runs.row_types import TEXT, is_whole, wrong_type

Row = dict[str, Any]
T = TypeVar("T")

ROW_FILES = ("steps", "evals", "events", "gauges")
"""What rows there are; each kind has its file, ``steps.jsonl`` and so on."""
STEPWISE = ("steps", "evals", "gauges")
"""Those that a resume writes again from its checkpoint on."""

_CHECKSUM = "crc32"
_KEY = b',"crc32":"'
_TAIL = len(_KEY) + 8 + len(b'"}\n')
_STEP = re.compile(rb'\{"step":(\d{1,15})[,}]')
_NOT_FINITE = frozenset({"nan", "inf", "-inf"})
_QUOTED = tuple(f'"{name}"'.encode() for name in sorted(_NOT_FINITE))


def line_of(row: Row) -> bytes:
    """A row as the line of a file.

    Example:
        >>> line_of({"step": 1, "loss": float("nan")})
        b'{"step":1,"loss":"nan","crc32":"9db3cc41"}\\n'
    """
    text = json.dumps(plain(row), allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
    return text + _KEY + b'%08x"}\n' % zlib.crc32(text)


def has_checksum(line: bytes) -> bool:
    """Whether a line keeps its checksum; ``False`` where it has none.

    Raises:
        ValueError: it has one that is not its own.
    """
    text, tail = line[:-_TAIL], line[-_TAIL:]
    if not tail.startswith(_KEY):
        return False
    if tail[len(_KEY) :] != b'%08x"}\n' % zlib.crc32(text):
        raise ValueError("it does not match its checksum")
    return True


def whole_lines(file: Path) -> Iterator[tuple[bytes, Row]]:
    """Each whole line of a file with its newline, and its row; a torn last line is left out.

    Raises:
        RecordError: a line is damaged, or has text where readers reckon with a number.
    """

    def parsed(line: bytes) -> tuple[Row, str]:
        is_checked = has_checksum(line)
        row = load_json(line)
        if not isinstance(row, dict):
            raise ValueError("not an object")
        if is_checked:
            del row[_CHECKSUM]
        # A hundred thousand numbers of a long run need no look each.
        row = revived(row) if any(name in line for name in _QUOTED) else row
        return row, wrong_type(file.stem, row)

    return _read(file, parsed)


def read_rows(file: Path) -> list[Row]:
    """The rows of a file."""
    return [row for _, row in whole_lines(file)]


def line_steps(file: Path) -> list[tuple[int, int, bool]]:
    """Of each whole line its step, its length in bytes, and whether it has a checksum: without parsing where it has.

    Raises:
        RecordError: a line is damaged.
    """

    def stepped(line: bytes) -> tuple[tuple[int, int, bool], str]:
        is_checked = has_checksum(line)
        if is_checked and (match := _STEP.match(line)):
            return (int(match[1]), len(line), True), ""
        row = load_json(line)
        if not isinstance(row, dict):
            raise ValueError("not an object")
        wrong = wrong_type(file.stem, revived(row))
        step = row.get("step", 0)
        return (int(step) if is_whole(step) else 0, len(line), is_checked), wrong

    return [found for _, found in _read(file, stepped)]


def _read(file: Path, read: Callable[[bytes], tuple[T, str]]) -> Iterator[tuple[bytes, T]]:
    with disk_errors(file):
        lines = file.read_bytes().splitlines(keepends=True) if file.exists() else []
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("no end of line")
            found, wrong = read(line)
        # A line can be nested deeper than Python goes.
        except (ValueError, RecursionError) as error:
            if number == len(lines):
                return
            raise RecordError(
                f"{file} is damaged: line {number} of {len(lines)} is not a row ({error}).", "Delete that line."
            ) from error
        if wrong:
            raise RecordError(f"{file} is damaged: line {number} of {len(lines)} has {wrong}.", "Delete that line.")
        yield line, found


def lost_rows(folder: Path, step: int, counts: Mapping[str, int], *, checked: bool) -> list[str]:
    """What is missing of the rows that a checkpoint stands on, a sentence for each file.

    Args:
        folder: of the run.
        step: of the checkpoint.
        counts: rows of each file when it was written; a file that is not named may have any number.
        checked: whether every row must carry a checksum.
    Returns:
        Sentences without a full stop; none where nothing is missing.
    Raises:
        RecordError: rows are out of order, so it cannot be told which of them are later than the checkpoint.
    Cost: one read of the files, without parsing their rows.
    """
    sentences = []
    for kind in ROW_FILES:
        file = folder / f"{kind}.jsonl"
        lines = line_steps(file)
        kept = lines[: kept_lines(file, lines, step)] if kind in STEPWISE else lines
        plain = [number for number, (_, _, is_checked) in enumerate(kept, 1) if not is_checked]
        absent = sorted(set(range(1, step + 1)) - {number for number, _, _ in kept}) if kind == "steps" else []
        until = f" up to step {step}" if kind in STEPWISE else ""
        if absent:
            sentences.append(f"{file.name} lacks {_listed(absent)}")
        elif len(kept) < counts.get(kind, 0):
            sentences.append(f"{file.name} holds {len(kept)} of the {counts[kind]} rows{until} that were written")
        if checked and plain:
            sentences.append(f"{file.name} has no checksum in line {plain[0]}")
    return sentences


def kept_lines(file: Path, lines: list[tuple[int, int, bool]], step: int) -> int:
    """How many lines of a file are of ``step`` or before; all others must come after them, in order.

    Raises:
        RecordError: they do not.
    """
    number = next((place for place, (later, _, _) in enumerate(lines) if later > step), len(lines))
    for place in range(1, len(lines)):
        before, after = lines[place - 1][0], lines[place][0]
        if after < before or (file.stem == "steps" and after == before):
            raise RecordError(
                f"{file} is damaged: line {place + 1} of {len(lines)} is of step {after}, after one of step {before}.",
                "Restore the file from a copy, or delete the line whose step is wrong.",
            )
    return number


def _listed(steps: list[int]) -> str:
    """Steps in words: ``step 7``, ``steps 7 to 9``, ``steps 3, 7 to 9``; of very many the first."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    told = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans[:5]]
    more = f" and {len(spans) - 5} more" if len(spans) > 5 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(told)}{more}"


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def plain(value: Any) -> Any:
    """What JSON can say: numbers of numpy and torch as Python's, paths as text, non-finite floats as their names."""
    if isinstance(value, dict):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def revived(value: Any, key: str = "") -> Any:
    """The same read back: the names of floats that are not finite as floats, but where they are text."""
    if isinstance(value, dict):
        return {name: revived(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [revived(item, key) for item in value]
    if isinstance(value, str) and value in _NOT_FINITE and key not in TEXT:
        return float(value)
    return value


def without_none(value: Any) -> Any:
    """What TOML can say: without ``None``, paths as text."""
    if isinstance(value, dict):
        return {str(key): without_none(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [without_none(item) for item in value]
    return str(value) if isinstance(value, Path) else value
