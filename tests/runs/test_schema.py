"""The schema of the record: its columns, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import RecordError
from narrowgauge.runs.schema import TABLES, Row, wrong_value
from narrowgauge.runs.writer import RunWriter
from tables import exhaustive

EXAMPLES: dict[str, Any] = {
    "step": 3, "count": 3, "number": float("nan"), "flag": True, "text": "words", "recipe": "bfloat16/word",
    "object": {"a": 1}, "lists": {"a": [1, None]},
}  # fmt: skip
WRONG: dict[str, Row] = {
    "steps": {"loss": "low"}, "evals": {"val_loss": [1.0]}, "events": {"text": 3}, "summary": {"steps": "ten"},
}  # fmt: skip


@exhaustive("kind", TABLES)
def test_every_column_takes_its_type_and_null(kind: str) -> None:
    columns = TABLES[kind].values()
    row = {column.name: EXAMPLES[column.type] for column in columns}
    assert wrong_value(kind, row) == ""
    nothing = {**dict.fromkeys(row), "step": 3}
    assert wrong_value(kind, nothing) == ""


@pytest.mark.parametrize("kind", WRONG)
def test_a_value_of_another_type_is_refused_and_a_row_without_a_step(
    kind: str, tmp_path: Path
) -> None:
    with RunWriter.create(tmp_path / "run", {}) as writer:

        def write(row: Row) -> None:
            writer.summary(row) if kind == "summary" else writer.append(kind, row)

        rows = [{"step": 1, **WRONG[kind]}]
        if kind != "summary":
            rows += [{"step": step} for step in ("three", None, 2.5, True)]
        for row in rows:
            with pytest.raises(RecordError, match=f"Cannot write this row of {kind} to .*not"):
                write(row)
    assert [file.name for file in (tmp_path / "run").iterdir()] == ["run.toml"]
