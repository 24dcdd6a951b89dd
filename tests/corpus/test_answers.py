"""The confusion matrix of the corpus: what is read of each fault and of each healthy loop, held against the committed one.

``python -m pytest tests/corpus/test_answers.py --update-golden`` writes it again. Faults that no part of ours can see expect
silence.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from pathlib import Path

import torch

from corpus.answers import answers, verdict
from corpus.rows import FAULTS, HEALTHY

MATRIX = Path(__file__).with_name("matrix.json")


def test_the_confusion_matrix_is_the_committed_one(tmp_path: Path, update_golden: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    faults, healthy = {}, {}
    for number, row in enumerate(FAULTS):
        readings = answers(row, tmp_path / f"fault{number}")
        faults[row.name] = [verdict(row, readings), *sorted({r.what for r in readings})]
    for number, row in enumerate(HEALTHY):
        readings = answers(row, tmp_path / f"healthy{number}")
        healthy[row.name] = sorted({r.what for r in readings})
    torch.set_num_threads(threads)
    counts = Counter(found[0] for found in faults.values())
    accused = sum(map(bool, healthy.values()))
    print(f"faults: {dict(counts)} of {len(faults)}; healthy loops with a statement: {accused} of {len(healthy)}")
    matrix = {"counts": {**counts, "accused": accused}, "faults": faults, "healthy": healthy}
    if update_golden:
        a_row_per_line = re.sub(r"\[[^]]*\]", lambda row: " ".join(row[0].split()), json.dumps(matrix, indent=1))
        MATRIX.write_text(f"{a_row_per_line}\n", encoding="utf-8")
    assert matrix == json.loads(MATRIX.read_text(encoding="utf-8"))
