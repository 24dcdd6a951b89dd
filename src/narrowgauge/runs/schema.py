"""The schema of a run's record: every column of every file in a run folder, defined once in
``data/columns.toml``.

The console and the documentation print these tables. Rows may hold further columns.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from narrowgauge.spec.tables import Row
from narrowgauge.spec.toml import load_data

VERSION = 2
"""The version of the run folder. Other versions are refused."""


@dataclass(frozen=True, slots=True)
class Column:
    """One column of a record: a row of ``data/columns.toml``, which explains the fields."""

    name: str
    type: str = "number"
    help: str = ""
    label: str = ""
    format: str = "{}"
    stage: str = "between steps"
    unit: str = "time"
    area: str = ""
    curve: Sequence[str] = ()
    axis: Sequence[float] = (0.0,)
    over: str = ""

    def text(self, row: Row) -> str:
        """Return the label and the row's value as the console prints them."""
        return self.label.format(self.cell(row))

    def cell(self, row: Row) -> str:
        """Return the row's value in a table; a dash where it has none."""
        value = row.get(self.name)
        if value is None:
            return "–"
        if self.format == "MiB":
            return f"{value / 2**20:,.1f}"
        return self.format.format(value)


def _columns(table: Row) -> dict[str, Column]:
    return {name: Column(name, **row) for name, row in table.items()}


_DATA = load_data("columns", "runs")
HASHED = _columns(_DATA.pop("hashed"))
"""The kinds of tensors in a row of ``fingerprints.jsonl``."""
TABLES = {kind: _columns(table) for kind, table in _DATA.items()}
"""The columns of each file, by the file's stem."""
STEP = TABLES["steps"]
EVAL = TABLES["evals"]
SUMMARY = TABLES["summary"]


def number(value: Any) -> float | None:
    """Return a number as a float, NaN and infinities too; ``None`` for anything else.

    Example:
        >>> number(True), number(float("nan")), number("fast")
        (1.0, nan, None)
    """
    try:
        return float(value) if isinstance(value, (int, float)) else None
    except OverflowError:  # a whole number beyond every float
        return None


def numbers_of(kind: str, row: Row) -> dict[str, float]:
    """Return the numbers of a row under their tags, as experiment trackers draw them.

    Args:
        kind: ``"steps"`` or ``"evals"``; others have none.
    Example:
        >>> numbers_of("steps", {"step": 3, "loss": 2}), numbers_of("evals", {"step": 3, "val_loss": 2.5})
        ({'train/loss': 2.0}, {'val_loss': 2.5})
    """
    numbers = {}
    if kind == "steps":
        for name, value in row.items():
            if name in STEP and STEP[name].type == "number" and value is not None:
                numbers[f"train/{name}"] = float(value)
    elif kind == "evals":
        numbers["val_loss"] = float(row["val_loss"])
    return numbers
