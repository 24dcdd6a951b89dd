"""Runs of other frameworks, read from their logs. Values that a log does not hold stay unknown.

Such a run has losses, learning rates and gradient norms at the logged steps, and is named after its
folder. A metric under a name that is not in ``data/log_names.toml`` is not read.
"""

import csv
import io
import json
import re
from collections.abc import Iterable
from fnmatch import fnmatchcase
from itertools import chain
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import damaged, disk_errors
from narrowgauge.spec.tables import Row
from narrowgauge.spec.toml import load_data

NAMES = load_data("log_names", "runs")
"""The names of each column in a log, the best first, with shell wildcards."""
SOURCE = "source"
"""The table of ``Run.run`` that names the log of another framework's run."""
LOGS = "Hugging Face trainer_state.json, Lightning metrics.csv, table (.csv), or torchtitan's log (.log, .txt)"
"""All logs, to follow "a"."""
_STATE = "trainer_state.json"
_METRICS = "metrics.csv"
_OF_ONE_CHIP = ("tps", "throughput(tps)")
"""Names under which torchtitan writes the tokens per second of one chip."""
_COLOR = re.compile(r"\x1b\[[\d;]*m")
_VALUE = re.compile(r"(\w+):\s*([-+\d.,e]+|nan|inf)(GiB)?")


def named(names: Iterable[str], column: str) -> str | None:
    """Return the best name of a column among those of a log.

    Example:
        >>> named(["epoch", "eval_loss", "lr-AdamW"], "val_loss"), named(["epoch", "lr-AdamW"], "lr"), named(["acc"], "loss")
        ('eval_loss', 'lr-AdamW', None)
    """
    plain = {str(name).strip().lower().replace(" ", "_"): name for name in names}
    for pattern in NAMES[column]:
        for name in plain:
            if fnmatchcase(name, pattern):
                return plain[name]
    return None


def log_file(path: Path) -> Path | None:
    """Return the log at a path: the file itself, known by its content, or the one in a folder, which
    names the run.

    A folder may hold many tables, so none of them is its log.
    """
    with disk_errors(path):
        for file in filter(Path.is_file, (path, path / _STATE, path / _METRICS)):
            is_table = file.suffix.lower() in (".csv", ".log", ".txt")
            if is_table or file.name == _STATE or _is_state(file):
                return file
    return None


def _is_state(file: Path) -> bool:
    """Return whether a file is a ``trainer_state.json``, under any name."""
    return file.suffix.lower() == ".json" and b'"log_history"' in file.read_bytes()


def read_log(path: Path) -> Row:
    """Return the fields of the :class:`narrowgauge.runs.record.Run` that a log describes."""
    file = log_file(path) or path
    with disk_errors(file):
        try:
            rows = _rows_of(file)
            names = dict.fromkeys(chain.from_iterable(rows))
            columns = {column: named(names, column) for column in NAMES}
            by_step = _by_step(rows, columns, is_from_zero=file.name == _METRICS)
        except (ValueError, LookupError, TypeError, AttributeError, csv.Error) as error:
            raise damaged(file, error) from error
    steps = []
    evals = []
    for step, row in by_step.items():
        val_loss = row.pop("val_loss", None)
        if val_loss is not None:
            evals.append({"step": step, "val_loss": val_loss})
        if row:
            steps.append({"step": step, **row})
    if not steps and not evals:
        held = ", ".join(sorted(map(str, names))[:8]) or "no rows"
        raise RecordError(
            f"{file} holds no loss at a step. It has {held}.",
            "Name its column of losses loss. Hugging Face's Trainer writes losses to trainer_state.json.",
        )
    summary = {"steps": max(by_step)}
    if evals:
        summary["val_loss"] = evals[-1]["val_loss"]
    is_of_one_chip = columns["tokens_per_second"] in _OF_ONE_CHIP
    return {
        "path": file.parent if file.name in (_STATE, _METRICS) else path,
        "run": {SOURCE: {"file": str(file), "of_one_chip": is_of_one_chip}},
        "steps": steps,
        "evals": evals,
        "summary": summary,
    }


def _rows_of(file: Path) -> list[Row]:
    if _is_state(file):
        return list(json.loads(file.read_bytes())["log_history"])
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    if file.suffix.lower() != ".csv":
        return [_titan_row(line) for line in text.splitlines() if "step:" in line]
    rows = list(csv.DictReader(io.StringIO(text), strict=True))
    # A row with other values than names is damaged, or being written.
    return [row for row in rows if None not in row and None not in row.values()]


def _titan_row(line: str) -> Row:
    """Return the values of a line of torchtitan's log, ``step: 10  loss: 7.1  memory: 44.84GiB``."""
    row = {}
    plain = _COLOR.sub("", line)
    for name, number, unit in _VALUE.findall(plain[plain.index("step:") :]):
        row[name] = number.replace(",", "")
        if unit:
            row["peak_memory_bytes"] = float(row.pop(name)) * 2**30
    if "validate step:" in plain:  # its rate and memory are those of the evaluation
        return {"step": row.get("step"), "val_loss": row.get("loss")}
    return row


def _by_step(rows: list[Row], columns: Row, is_from_zero: bool) -> dict[int, Row]:
    """Return the known columns of rows by step, from 1 on; the last value of one step counts.

    Lightning counts steps from 0: its step 9 is our step 10. So does a log whose first loss is of
    step 0.
    """
    by_step: dict[int, Row] = {}
    for row in rows:
        values = {}
        for column, name in columns.items():
            value = _number(row.get(str(name)))
            if value is not None:
                values[column] = value
        step = values.pop("step", 0.5)
        if step.is_integer():
            by_step.setdefault(int(step), {}).update(values)
    first = int(is_from_zero or "loss" in by_step.get(0, {}))
    return {step + first: by_step[step] for step in sorted(by_step)}


def _number(value: Any) -> float | None:
    """Return a value of a log as a number; ``None`` if it is none."""
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        return None
