"""The schema of a run's record: every column of every file in a run folder, defined once in
``data/columns.toml``.

The writer and the reader check rows against these tables. The console and the documentation print
them. Rows may hold further columns, which are not checked.

A row of ``gauges.jsonl`` names each tensor once, as ``KIND:NAME``, and lists its metrics in the
order of :data:`METRICS`::

    {"step": 20, "tensors": {"input:model.layers.0.mlp.down_proj": [4.2, 0.9, 0, ...]}, "updates": {...}, ...}

A metric that does not apply is null. An empty table is left out. Histograms count the binary
exponents of all tensors of a kind.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from narrowgauge.spec.toml import load_data

Row = dict[str, Any]
"""One row of a record: column to value."""

VERSION = 2
"""The version of the run folder. Other versions are refused."""

UNAVAILABLE = "unavailable"
"""Prefix in the table ``arithmetic`` of ``run.toml``: this machine cannot run the probe. Such
results are not compared.
"""

Type = Literal["step", "count", "number", "flag", "text", "recipe", "object", "lists"]


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a record: a row of ``data/columns.toml``, which explains the fields.

    ``metrics`` are the entries of each list of a ``lists`` column, in order.
    """

    name: str
    type: Type
    help: str
    unit: str = ""
    label: str = ""
    format: str = "{}"
    metrics: tuple[Column, ...] = ()

    def show(self, value: Any) -> str:
        """Format a value for the console."""
        if self.format == "MiB":
            return f"{value / 2**20:,.1f}"
        return self.format.format(value)

    def text(self, row: Row) -> str:
        """Return the label and the row's value as the console prints them."""
        return self.label.format(self.show(row[self.name]))

    def cell(self, row: Row) -> str:
        """Return the row's value in a table; a dash where it has none."""
        value = row.get(self.name)
        return "–" if value is None else self.show(value)


_DATA = load_data("columns", "runs")
TENSOR_KINDS: dict[str, str] = _DATA.pop("tensor_kinds")
"""Every kind of tensor that gauges watch, and its meaning."""


def _columns(table: Row, metrics: Mapping[str, dict[str, Column]]) -> dict[str, Column]:
    columns = {}
    for name, row in table.items():
        columns[name] = Column(name, **row, metrics=tuple(metrics.get(name, {}).values()))
    return columns


_METRICS: dict[str, dict[str, dict[str, Column]]] = {}
for _kind, _lists in _DATA.pop("metrics").items():
    _METRICS[_kind] = {name: _columns(table, {}) for name, table in _lists.items()}
TABLES = {kind: _columns(table, _METRICS.get(kind, {})) for kind, table in _DATA.items()}
"""The columns of each file, by the file's stem."""
STEP = TABLES["steps"]
EVAL = TABLES["evals"]
EVENT = TABLES["events"]
SUMMARY = TABLES["summary"]
METRICS = _METRICS["gauges"]
"""The entries of the lists of each table of a ``gauges.jsonl`` row, in order."""


def number(value: Any) -> float | None:
    """Return a number as a float, NaN and infinities too; ``None`` for anything else."""
    return float(value) if isinstance(value, (int, float)) else None


def finite_number(value: Any) -> float | None:
    """Return a number as a float where it is a finite one.

    Example:
        >>> finite_number(True), finite_number(float("nan")), finite_number("fast")
        (1.0, None, None)
    """
    try:
        real = number(value)
    except OverflowError:  # a whole number beyond every float
        return None
    return real if real is not None and math.isfinite(real) else None


def step_of(row: Row) -> int:
    step = row.get("step")
    return int(step) if isinstance(step, (int, float)) else 0


# ── the check of a row ────────────────────────────────────────────────────────────────────────────

STEPWISE = ("steps", "evals", "gauges", "fingerprints")
"""The kinds of rows that have a step each. A resume rewrites them from its checkpoint on."""
REQUIRED = {**dict.fromkeys(STEPWISE, ("step",)), "events": ("what", "step")}
"""Columns that each row of a kind has."""
_TOTALS = ("tokens", "seconds", "peak_memory_bytes")
"""Numbers of a step that no curve needs."""
_NUMBER: frozenset[type] = frozenset({int, float, bool, type(None)})
_NUMERIC = ("count", "number", "flag")


def wrong_value(kind: str, row: Row) -> str:
    """Describe the first value in a row that does not have the type of its column.

    Empty if all have.

    Example:
        >>> wrong_value("evals", {"step": 3, "val_loss": "low"}), wrong_value("evals", {"step": 3, "val_loss": 2.5})
        ("val_loss = 'low', which is not a number", '')
    """
    columns = TABLES[kind]
    for name, value in row.items():
        column = columns.get(name)
        if column is None or (type(value) in _NUMBER and column.type in _NUMERIC):
            continue  # most values, three times as fast
        reason = _why_wrong(column, value)
        if reason:
            return reason
    for name in REQUIRED.get(kind, ()):
        if row.get(name) is None:
            return f"no {name}"
    step = row.get("step", 0)
    if not is_whole(step):
        return f"step = {short(step)}, which is not a whole number"
    return ""


def _why_wrong(column: Column, value: Any) -> str:
    if column.type in _NUMERIC and type(value) not in _NUMBER:
        return f"{column.name} = {short(value)}, which is not a number"
    if column.type == "text" and not isinstance(value, str | None):
        return f"{column.name} = {short(value)}, which is not text"
    if column.type != "lists":
        return ""
    if not isinstance(value, dict):
        return f"{column.name} = {short(value)}, which is not a table"
    for name, numbers in value.items():
        if numbers is None:
            continue
        if not isinstance(numbers, list):
            return f"{name} = {short(numbers)} in {column.name}, which is not a list"
        if not _NUMBER.issuperset(map(type, numbers)):
            return f"{name} = {short(numbers)} in {column.name}, which are not numbers"
    return ""


def is_whole(value: Any) -> bool:
    """Return whether a value is a whole number, also as a float. ``True`` does not count."""
    return type(value) is int or (type(value) is float and value.is_integer())


def short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 40 else f"{text[:37]}..."


def gauge_metrics(row: Row) -> Iterator[tuple[str, str, dict[str, float | None]]]:
    """Yield the metrics of every tensor in a row of ``gauges.jsonl``: table, tensor, and values by
    name.

    Example:
        >>> list(gauge_metrics({"step": 1, "attention": {"w": [1.25]}}))
        [('attention', 'w', {'max_logit': 1.25})]
    """
    for table, names in METRICS.items():
        for name, values in (row.get(table) or {}).items():
            yield table, name, dict(zip(names, map(number, values or ()), strict=False))


def numbers_of(kind: str, row: Row) -> dict[str, float]:
    """Return the numbers of a row under their tags, as experiment trackers draw them.

    Args:
        kind: ``"steps"``, ``"evals"``, ``"gauges"`` or ``"events"``. The number of an event is its
            value, or 1.
    Example:
        >>> numbers_of("evals", {"step": 3, "val_loss": 2.5}), numbers_of("gauges", {"step": 1, "updates": {"w": [1.0]}})
        ({'validation/loss': 2.5}, {'edq/w': 1.0})
    """
    numbers: dict[str, float | None] = {}
    if kind == "events":
        value = row.get("value")
        numbers[f"events/{row['what']}"] = 1.0 if value is None else value
    elif kind == "evals":
        numbers["validation/loss"] = row.get("val_loss")
    elif kind == "gauges":
        for table, tensor, metrics in gauge_metrics(row):
            if table == "updates":
                numbers[f"edq/{tensor}"] = metrics.get("edq")
    else:
        for name, value in row.items():
            if name in STEP and STEP[name].type == "number" and name not in _TOTALS:
                numbers[f"train/{name}"] = value
    return {tag: float(value) for tag, value in numbers.items() if value is not None}
