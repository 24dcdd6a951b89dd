"""The schema of the record: its columns, and what is refused."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import RecordError
from narrowgauge.runs.schema import REQUIRED, STEPWISE, TABLES, Column, Row, wrong_value
from narrowgauge.runs.writer import RunWriter
from tables import exhaustive, text_of

EXAMPLES: dict[str, Any] = {
    "step": 3, "count": 3, "number": 0.5, "flag": True, "text": "words", "recipe": "bfloat16/word", "object": {"a": 1},
    "lists": {"a": [1, None]},
}  # fmt: skip
WRONG: dict[str, tuple[Any, ...]] = {
    "step": ("three", "2", "nan"), "count": ("three",), "number": ("low", [1.0], {}), "flag": ({},), "text": (3, ["a"]),
    "lists": ({"a": ["low"]}, {"a": [1, "x"]}, {"a": 1}, 5),
}  # fmt: skip
COLUMNS = [(kind, column) for kind, table in TABLES.items() for column in table.values()]
CHECKED = {
    (kind, column.type): (kind, column)
    for kind, column in COLUMNS
    if column.type in WRONG and column.name != "step"
}
CHECKED |= {(kind, "step"): (kind, TABLES[kind]["step"]) for kind in STEPWISE}
"""One column of each type in each file."""


def row_of(kind: str, column: Column, value: Any) -> Row:
    return {**dict.fromkeys(REQUIRED.get(kind, ()), "text"), "step": 1, column.name: value}


@exhaustive(("kind", "column"), COLUMNS)
def test_every_column_takes_its_type_and_null(kind: str, column: Column) -> None:
    assert wrong_value(kind, row_of(kind, column, EXAMPLES[column.type])) == ""
    required = (*REQUIRED.get(kind, ()), "step")
    null = wrong_value(kind, row_of(kind, column, None))
    if column.name in required:
        assert null == f"no {column.name}"
    else:
        assert column.type == "lists" or null == ""
    assert column.type != "number" or wrong_value(kind, row_of(kind, column, float("nan"))) == ""


@pytest.mark.parametrize(("kind", "column"), CHECKED.values(), ids=text_of)
def test_a_value_of_another_type_is_refused(kind: str, column: Column, tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", {}) as writer:
        write = writer.summary if kind == "summary" else partial(writer.append, kind)
        for row in (row_of(kind, column, value) for value in WRONG[column.type]):
            message = wrong_value(kind, row)
            assert column.name in message and "which" in message
            with pytest.raises(
                RecordError, match=f"Cannot write this row of {kind} to .*which (is|are) not"
            ):
                write(row)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.toml"]


def test_a_row_without_a_step_is_not_written(tmp_path: Path) -> None:
    with (
        RunWriter.create(tmp_path / "run", {}) as writer,
        pytest.raises(RecordError, match="it has no step"),
    ):
        writer.append("steps", {"loss": 1.0})
