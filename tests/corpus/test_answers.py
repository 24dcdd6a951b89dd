"""The confusion matrix of the corpus: what is read of each fault and of each healthy loop, held against the committed one.

``python -m pytest tests/corpus/test_answers.py --update-golden`` writes it again.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path

import torch

from corpus.answers import judged, verdict
from corpus.rows import FAULTS, HEALTHY

MATRIX = Path(__file__).with_name("matrix.json")
"""Names of rows by verdict and kinds of readings. Healthy loops without a reading are left out."""


def test_the_confusion_matrix_is_the_committed_one(tmp_path: Path, update_golden: bool) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    matrix = defaultdict(list)
    surprises = {}
    for row in (*FAULTS, *HEALTHY):
        readings, surprise = judged(row, tmp_path / row.name)
        if surprise:
            surprises[row.name] = surprise
        if row.stage or readings:
            place = verdict(row, readings) if row.stage else "accused"
            matrix[f"{place}: {' '.join(sorted({r.what for r in readings}))}"].append(row.name)
    torch.set_num_threads(threads)
    counts = Counter(answer.partition(":")[0] for answer, names in matrix.items() for _ in names)
    print(f"{dict(counts)} of {len(FAULTS)} faults and {len(HEALTHY)} healthy loops")
    if update_golden:
        lines = ",\n".join(
            f" {json.dumps(answer)}: {json.dumps(names)}"
            for answer, names in sorted(matrix.items())
        )
        MATRIX.write_text(f"{{\n{lines}\n}}\n", encoding="utf-8")
    assert not surprises, "what a loss teaches is not what its row says"
    assert matrix == json.loads(MATRIX.read_text(encoding="utf-8"))
