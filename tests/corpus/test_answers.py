"""The confusion matrix of the corpus: what is read of each fault and of each healthy loop, held against the committed one.

``python -m pytest -n0 tests/corpus/test_answers.py --update-golden`` writes it again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from corpus.answers import answer
from corpus.rows import FAULTS, HEALTHY, Row

MATRIX = Path(__file__).with_name("matrix.json")
"""Names of rows by verdict and kinds of readings. Healthy loops without a reading are left out."""
ROWS = (*FAULTS, *HEALTHY)


def committed() -> dict[str, str]:
    """Return the committed answer of each row that has one."""
    answers = {}
    for text, names in json.loads(MATRIX.read_text(encoding="utf-8")).items():
        answers |= dict.fromkeys(names, text)
    return answers


def write(answers: dict[str, str]) -> None:
    """Write the matrix, rows in their order."""
    matrix: dict[str, list[str]] = {}
    for row in ROWS:
        if answers.get(row.name):
            matrix.setdefault(answers[row.name], []).append(row.name)
    lines = [f" {json.dumps(text)}: {json.dumps(names)}" for text, names in sorted(matrix.items())]
    MATRIX.write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
def test_the_confusion_matrix_is_the_committed_one(
    row: Row, tmp_path: Path, update_golden: bool
) -> None:
    told = answer(row, tmp_path / "run")
    if update_golden:
        write({**committed(), row.name: told})
    assert told == committed().get(row.name, "")


def test_every_row_with_an_answer_is_in_the_corpus() -> None:
    names = [row.name for row in ROWS]
    assert len(set(names)) == len(names) and set(committed()) <= set(names)
    assert {row.name for row in FAULTS} <= set(committed()), "a fault has an answer, or is silent"
