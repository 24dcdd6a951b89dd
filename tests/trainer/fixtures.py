"""What the tests of whole trainings stand on: a tiny model's shape, some text, and each case
trained at once.
"""

import json
import random
from pathlib import Path

import pytest

from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer.tokens import load_tokenizer, read_texts, write_tokens
from trainer.tiny_runs import CASES, JITTERING, SHAPE, trained


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's shape, some text and its tokens."""
    folder = tmp_path_factory.mktemp("place")
    for name, shape in (("model", SHAPE), ("jittering", JITTERING)):
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(shape))
    (folder / "text").mkdir()
    draw = random.Random(0)
    words = ["def", "return", "the", "quick", "brown", "fox", "import", "None"]
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=250)))
    write_tokens(read_texts(folder / "text"), load_tokenizer(None), folder / "tokens")
    return folder


@pytest.fixture(scope="module")
def uninterrupted(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Each case, trained at once."""
    folder = tmp_path_factory.mktemp("whole")
    runs = {}
    for k, (name, case) in enumerate(CASES.items()):
        runs[name] = read_run(trained(place, folder / str(k), **case))
    return runs
