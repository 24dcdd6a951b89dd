"""The confusion matrix of the corpus: what is read of each fault and of each healthy loop, held against the committed one.

``python -m pytest -n0 tests/corpus/test_answers.py --update-golden`` writes it again.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from corpus.answers import answers, verdict
from corpus.rows import FAULTS, HEALTHY, Row

MATRIX = Path(__file__).with_name("matrix.json")
"""Names of rows by verdict and kinds of readings. Healthy loops without a reading are left out."""
ROWS = (*FAULTS, *HEALTHY)
PARTS = 8  # of the rows, so that several processes share them


def committed() -> dict[str, str]:
    """Return the committed answer of each row that has one."""
    answers = {}
    for answer, names in json.loads(MATRIX.read_text(encoding="utf-8")).items():
        for name in names:
            answers[name] = answer
    return answers


def write(answers: dict[str, str]) -> None:
    """Write the matrix, rows in their order."""
    matrix: dict[str, list[str]] = {}
    for row in ROWS:
        if row.name in answers:
            matrix.setdefault(answers[row.name], []).append(row.name)
    lines = []
    for answer, names in sorted(matrix.items()):
        lines.append(f" {json.dumps(answer)}: {json.dumps(names)}")
    text = ",\n".join(lines)
    MATRIX.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")


def answer_of(row: Row, folder: Path) -> str | None:
    """Return the row's answer; ``None`` for a healthy loop without a reading."""
    readings = answers(row, folder)
    if not row.stage and not readings:
        return None
    place = verdict(row, readings) if row.stage else "accused"
    return f"{place}: {' '.join(sorted({r.what for r in readings}))}"


@pytest.mark.parametrize("part", range(PARTS))
def test_the_confusion_matrix_is_the_committed_one(
    part: int, tmp_path: Path, update_golden: bool
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    of_rows = {}
    for row in ROWS[part::PARTS]:
        answer = answer_of(row, tmp_path / row.name)
        if answer is not None:
            of_rows[row.name] = answer
    torch.set_num_threads(threads)
    names = {row.name for row in ROWS[part::PARTS]}
    committed_elsewhere = {
        name: answer for name, answer in committed().items() if name not in names
    }
    if update_golden:
        write({**committed_elsewhere, **of_rows})
    assert {**committed_elsewhere, **of_rows} == committed()


def test_every_row_with_an_answer_is_in_the_corpus() -> None:
    rows = {row.name: row for row in ROWS}
    assert len(rows) == len(ROWS) and set(committed()) <= set(rows)
    assert {row.name for row in FAULTS} <= set(committed()), "a fault has an answer, or is silent"
