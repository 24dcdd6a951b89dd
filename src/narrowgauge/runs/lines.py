"""Checksummed lines: how a row becomes a line of a file, and how lines are read back.

A line is a JSON object whose last key, ``crc32``, is the checksum of the text before it. Any program can read such a row, and
a damaged one is found; readers remove the key. Lines without it were written by an older version, or by hand. A checksum
does not show that a whole line is missing: :func:`lost_rows` finds that, from the number of rows at a checkpoint and the
steps, which are numbered one by one.

Reading must stay as fast as parsing: the checksum costs a thirtieth of it, and where only the step of a line is needed, a
line with a valid checksum is not parsed at all.

A row is appended by one write that ends with the newline. So a last line without one is torn, by a kill or a full disk, and is
left out; a last line that has one and is no row was damaged later, and is refused like any other.
"""

from __future__ import annotations

import contextlib
import json
import math
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from narrowgauge.errors import RecordError
from narrowgauge.runs.archive import read_bytes
from narrowgauge.runs.atomic_io import load_json
from narrowgauge.runs.schema import NOT_FINITE, TEXT, Row, is_whole, wrong_value

T = TypeVar("T")

ROW_FILES = ("steps", "evals", "events", "gauges", "fingerprints")
"""The kinds of rows; each has a file, ``steps.jsonl`` and so on."""
STEPWISE = ("steps", "evals", "gauges", "fingerprints")
"""The kinds that a resume writes again from its checkpoint on."""

_CHECKSUM = "crc32"
_KEY = b',"crc32":"'
_TAIL = len(_KEY) + 8 + len(b'"}\n')
_STEP = re.compile(rb'\{"step":(\d{1,15})[,}]')
_QUOTED = tuple(f'"{name}"'.encode() for name in sorted(NOT_FINITE))


def line_of(row: Row) -> bytes:
    """A row of JSON values (see :func:`json_value`) as a line of a file.

    Example:
        >>> line_of({"step": 1, "loss": "nan"})
        b'{"step":1,"loss":"nan","crc32":"9db3cc41"}\\n'
    """
    text = json.dumps(row, allow_nan=False, ensure_ascii=False, separators=(",", ":")).encode()[:-1]
    return text + _KEY + b'%08x"}\n' % zlib.crc32(text)


def has_checksum(line: bytes) -> bool:
    """Whether a line has a checksum; one that does not match the line raises ``ValueError``."""
    text, tail = line[:-_TAIL], line[-_TAIL:]
    if not tail.startswith(_KEY):
        return False
    if tail[len(_KEY) :] != b'%08x"}\n' % zlib.crc32(text):
        raise ValueError("it does not match its checksum")
    return True


def whole_lines(file: Path) -> Iterator[tuple[bytes, Row]]:
    """Each complete line of a file with its newline, and its row.

    A torn last line, which has no newline, is left out; a damaged line or a value of the wrong type raises ``RecordError``.
    """
    kind = file.stem

    def parsed(line: bytes) -> tuple[Row, str]:
        is_checked = has_checksum(line)
        row = load_json(line)
        if not isinstance(row, dict):
            raise ValueError("not an object")
        if is_checked:
            del row[_CHECKSUM]
        # Visiting each of the hundred thousand numbers of a long run would cost more than parsing them.
        row = restored(row) if any(name in line for name in _QUOTED) else row
        return row, wrong_value(kind, row)

    return _read(file, parsed)


def read_rows(file: Path) -> list[Row]:
    return [row for _, row in whole_lines(file)]


def line_steps(file: Path) -> list[tuple[int, int, bool]]:
    """The step of each complete line, its length in bytes, and whether it has a checksum; checksummed lines are not parsed."""

    def stepped(line: bytes) -> tuple[tuple[int, int, bool], str]:
        is_checked = has_checksum(line)
        if is_checked and (match := _STEP.match(line)):
            return (int(match[1]), len(line), True), ""
        row = load_json(line)
        if not isinstance(row, dict):
            raise ValueError("not an object")
        wrong = wrong_value(file.stem, restored(row))
        step = row.get("step", 0)
        return (int(step) if is_whole(step) else 0, len(line), is_checked), wrong

    return [found for _, found in _read(file, stepped)]


def _read(file: Path, read: Callable[[bytes], tuple[T, str]]) -> Iterator[tuple[bytes, T]]:
    # Not splitlines(): a flipped bit may also make a carriage return.
    *lines, torn = (read_bytes(file) or b"").split(b"\n")
    if _was_whole(torn):
        lines.append(torn)
    for number, text in enumerate(lines, 1):
        line = text + b"\n"
        try:
            found, wrong = read(line)
        # A line may be nested deeper than Python recurses.
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"{file} is damaged: line {number} of {len(lines)} is not a row ({error}).", "Delete that line."
            ) from error
        if wrong:
            raise RecordError(f"{file} is damaged: line {number} of {len(lines)} has {wrong}.", "Delete that line.")
        yield line, found


def _was_whole(rest: bytes) -> bool:
    """Whether the text after the last newline is not a torn line but a whole one with a damaged newline: a row is one write."""
    with contextlib.suppress(ValueError):
        return has_checksum(rest[:-1] + b"\n")
    return False


def lost_rows(folder: Path, step: int, counts: Mapping[str, int], *, checked: bool) -> list[str]:
    """Which rows are missing that were written before a checkpoint: a sentence for each file, without a full stop.

    Args:
        counts: rows of each file at the checkpoint; a file without a count may have any number.
        checked: whether every row must have a checksum.

    Raises:
        RecordError: rows are out of order, so that those after the checkpoint cannot be identified.
    """
    sentences = []
    for kind in ROW_FILES:
        file = folder / f"{kind}.jsonl"
        lines = line_steps(file)
        kept = lines[: kept_lines(file, lines, step)] if kind in STEPWISE else lines
        unchecked = [number for number, (_, _, is_checked) in enumerate(kept, 1) if not is_checked]
        absent = sorted(set(range(1, step + 1)) - {number for number, _, _ in kept}) if kind == "steps" else []
        until = f" up to step {step}" if kind in STEPWISE else ""
        if absent:
            sentences.append(f"{file.name} lacks {_listed(absent)}")
        elif len(kept) < counts.get(kind, 0):
            sentences.append(f"{file.name} holds {len(kept)} of the {counts[kind]} rows{until} that were written")
        if checked and unchecked:
            sentences.append(f"{file.name} has no checksum in line {unchecked[0]}")
    return sentences


def kept_lines(file: Path, lines: list[tuple[int, int, bool]], step: int) -> int:
    """How many lines of a file belong to ``step`` or earlier steps; lines that are out of order raise ``RecordError``."""
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
    """Steps as text: ``step 7``, ``steps 7 to 9``, ``steps 3, 7 to 9``; at most the first five ranges."""
    spans: list[list[int]] = []
    for step in steps:
        if spans and spans[-1][1] == step - 1:
            spans[-1][1] = step
        else:
            spans.append([step, step])
    ranges = [f"{first}" if first == last else f"{first} to {last}" for first, last in spans[:5]]
    more = f" and {len(spans) - 5} more" if len(spans) > 5 else ""
    return f"step{'s' if len(steps) > 1 else ''} {', '.join(ranges)}{more}"


# ── values ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


def json_value(value: Any) -> Any:
    """A value that JSON has: numbers of NumPy and PyTorch as Python's, paths as text, floats that are not finite by name."""
    if isinstance(value, dict):
        return {str(key): json_value(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return str(float(value))
    return value


def restored(value: Any, key: str = "") -> Any:
    """The inverse for floats that are not finite: their names become floats again, except in columns of text."""
    if isinstance(value, dict):
        return {name: restored(item, name) for name, item in value.items()}
    if isinstance(value, list):
        return [restored(item, key) for item in value]
    if isinstance(value, str) and value in NOT_FINITE and key not in TEXT:
        return float(value)
    return value


def toml_value(value: Any) -> Any:
    """A value that TOML has: without ``None``, paths as text."""
    if isinstance(value, dict):
        return {str(key): toml_value(item) for key, item in value.items() if item is not None}
    if isinstance(value, (list, tuple)):
        return [toml_value(item) for item in value]
    return str(value) if isinstance(value, Path) else value
