"""Runs of other frameworks, read from their logs. Values that a log does not hold stay unknown.

Such a run has losses, learning rates and gradient norms at the logged steps, and is named after its
folder. A metric under a name that is not in ``data/log_names.toml`` is not read.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import disk_errors, load_json
from narrowgauge.runs.schema import EVAL, STEP, Row, is_whole, short
from narrowgauge.spec.toml import load_data

NAMES: dict[str, list[str]] = load_data("log_names", "runs")
"""The names of each column in a log, the best first, with shell wildcards."""
_STEPS = NAMES.pop("step")
SOURCE = "source"
"""The table of ``Run.run`` that names the log of another framework's run."""

Series = dict[str, dict[int, Any]]
"""The values of each name by step; the last of one step counts."""


def named(names: Iterable[str], column: str) -> str | None:
    """Return the best name of a column among those of a log.

    Example:
        >>> named(["epoch", "eval_loss", "lr-AdamW"], "val_loss"), named(["epoch", "lr-AdamW"], "lr"), named(["acc"], "loss")
        ('eval_loss', 'lr-AdamW', None)
    """
    plain = {name: name.lower().replace(" ", "_") for name in names}
    for pattern in NAMES[column]:
        for name in plain:
            if fnmatchcase(plain[name], pattern):
                return name
    return None


# ── readers: each raises ValueError for a damaged file ────────────────────────────────────────────


def _read_state(file: Path) -> Series:
    state = load_json(file.read_bytes())
    rows = state.get("log_history") if isinstance(state, dict) else None
    if not isinstance(rows, list) or {type(row) for row in rows} - {dict}:
        raise ValueError("it holds no list of objects")
    return _series(rows)


def _read_csv(file: Path) -> Series:
    """Read a table.

    Lightning's CSVLogger counts steps from 0: its step 9 is our step 10. Skip a last row being
    written.
    """
    text = file.read_text(encoding="utf-8-sig", errors="replace")
    table = csv.DictReader(io.StringIO(text), strict=True)
    try:
        names = table.fieldnames or []
        if len(names) == 1 and (";" in names[0] or "\t" in names[0]):
            raise RecordError(
                f"{file} has no commas between its columns.", "Write the table with commas."
            )
        rows = list(table)
    except csv.Error as error:
        raise ValueError(f"line {table.line_num}: {error}") from error
    if rows and None in rows[-1].values() and not text.endswith("\n"):
        rows.pop()
    for number, row in enumerate(rows, 2):
        if None in row or None in row.values():
            raise ValueError(f"line {number} has not as many values as the first line has names")
    return _series(rows, first=int(file.name == "metrics.csv"))


def _series(rows: list[Row], first: int = 0) -> Series:
    names: dict[str, Any] = {}
    for row in rows:
        for name in row:
            names.setdefault(str(name).strip().lower(), name)
    step_names = [names.pop(name) for name in _STEPS if name in names]
    if rows and not step_names:
        raise ValueError(f"it has no column of steps ({', '.join(_STEPS[2:])})")
    series: Series = {}
    for row in rows:
        step = _number(step_names[0], row.get(step_names[0]))
        if step is None:
            continue
        if not is_whole(step):
            raise ValueError(
                f"column '{step_names[0]}' holds {short(step)}, which is not a whole number"
            )
        for name in names.values():
            if row.get(name) not in (None, ""):
                series.setdefault(str(name).strip(), {})[int(step) + first] = row[name]
    return series


def _number(name: str, value: Any) -> float | None:
    if value in (None, ""):
        return None
    try:
        return float(value)
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"column '{name}' holds {short(value)}, which is not a number") from None


_READERS: dict[str, Callable[[Path], Series]] = {
    "trainer_state.json": _read_state,
    "metrics.csv": _read_csv,
    "*.csv": _read_csv,
}
"""The reader of each pattern of file names.

All but tables are looked for in a folder, which then names the run.
"""
LOGS = "Hugging Face trainer_state.json, Lightning metrics.csv, or table (.csv)"
"""All logs, to follow "a"."""


def _pattern_of(file: Path) -> str:
    return next((pattern for pattern in _READERS if fnmatchcase(file.name.lower(), pattern)), "")


def log_files(path: Path) -> list[Path]:
    if path.is_file():
        return list(filter(_pattern_of, [path]))
    for pattern in list(_READERS)[:-1]:
        # The newest checkpoint of Hugging Face's Trainer repeats earlier rows.
        checkpoints = list(path.glob(f"checkpoint-*/{pattern}"))
        checkpoints.sort(key=lambda file: (len(file.parent.name), file))
        files = sorted(filter(Path.is_file, path.glob(pattern))) or checkpoints[-1:]
        if files:
            return files
    return []


def is_log(path: Path) -> bool:
    with disk_errors(path):
        return bool(log_files(path))


def read_log(path: Path) -> dict[str, Any] | None:
    """Return the fields of the :class:`narrowgauge.Run` that a log describes; ``None`` without a
    log.

    The summary is ``None`` if the log says that the run has not ended.
    """
    with disk_errors(path):
        files = log_files(path)
        if not files:
            return None
        pattern = _pattern_of(files[0])
        values: Series = {}
        try:
            for file in files:
                for name, series in _READERS[pattern](file).items():
                    values.setdefault(name, {}).update(series)
            steps = _rows(values, STEP)
            evals = [row for row in _rows(values, EVAL) if "val_loss" in row]
            config, is_finished = _progress(files[0])
        except (ValueError, RecursionError) as error:
            raise RecordError(
                f"{files[0]} is damaged: {error}.", "Restore the file from a copy."
            ) from error
    if not steps and not evals:
        columns = ", ".join(sorted(values)[:8]) or "no rows with a step"
        raise RecordError(
            f"{files[0]} holds no loss. It has {columns}.",
            "If one of its columns is the loss, rename it to one of "
            f"{', '.join(NAMES['loss'][:3])}.",
        )
    summary: Row = {"steps": max(rows[-1]["step"] for rows in (steps, evals) if rows)}
    if evals:
        summary["val_loss"] = evals[-1]["val_loss"]
    if path.is_file() and pattern != "*.csv":
        path = path.parent
    row = {"path": path, "run": {"config": config, SOURCE: {"file": str(files[-1])}}}
    row |= {"steps": steps, "evals": evals}
    return row | {"summary": summary} if is_finished else row


def _progress(file: Path) -> tuple[Row, bool]:
    """Return the settings in a log, and whether its run has ended.

    Only Hugging Face's log says so.
    """
    if file.name != "trainer_state.json":
        return {}, True
    state = load_json(file.read_bytes())
    done = state.get("global_step")
    planned = state.get("max_steps")
    if isinstance(done, int) and isinstance(planned, int) and planned > 0:
        return {"steps": planned}, done >= planned
    return {}, True


def _rows(values: Series, columns: Mapping[str, Any]) -> list[Row]:
    """Return the rows of some columns, ascending. Losses that begin at step 0 are of step 1."""
    loss = named(values, "loss")
    first = int(loss is not None and min(values[loss]) == 0)
    by_step: dict[int, Row] = {}
    for column in NAMES:
        name = named(values, column)
        if name is not None and column in columns:
            for step, value in values[name].items():
                row = by_step.setdefault(step + first, {"step": step + first})
                row[column] = _number(name, value)
    return [by_step[step] for step in sorted(by_step)]
