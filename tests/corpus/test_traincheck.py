"""TrainCheck's public faults: what our tools say of each and of its twin, held against the committed
answers.

``python -m pytest -n0 tests/corpus/test_traincheck.py --update-golden`` writes them again.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

import pytest
import torch

from corpus.traincheck import PROGRAMS
from corpus.traincheck_answers import Answer, answer_of, answers_on_ranks, verdict
from ranks import run_ranks

ANSWERS = Path(__file__).with_name("traincheck.json")
"""The answer of each program: kinds of readings and their tensors, by tool."""
ALONE = [program for program in PROGRAMS if program.num_ranks == 1]
PARTS = 2  # of the programs without ranks, so that several processes share them


def committed() -> dict[str, Answer]:
    answers: dict[str, Answer] = json.loads(ANSWERS.read_text(encoding="utf-8"))
    return answers


def hold(answers: dict[str, Answer], update_golden: bool) -> None:
    """Compare answers with the committed ones."""
    if update_golden:
        everything = {**committed(), **answers}
        lines = []
        for program in PROGRAMS:
            answer = json.dumps(everything.get(program.name, {}))
            lines.append(f" {json.dumps(program.name)}: {answer}")
        text = ",\n".join(lines)
        ANSWERS.write_text(f"{{\n{text}\n}}\n", encoding="utf-8")
    expected = committed()
    assert answers == {name: expected[name] for name in answers}


@pytest.mark.parametrize("part", range(PARTS))
def test_the_answers_about_one_process_are_the_committed_ones(
    part: int, tmp_path: Path, update_golden: bool
) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    answers = {}
    with torch.random.fork_rng(devices=[]):
        for program in ALONE[part::PARTS]:
            answers[program.name] = answer_of(program, tmp_path)
    torch.set_num_threads(threads)
    hold(answers, update_golden)


def test_the_answers_about_ranks_are_the_committed_ones(
    tmp_path: Path, update_golden: bool
) -> None:
    first, second = run_ranks(answers_on_ranks, 2, tmp_path, tmp_path)
    assert first == second
    hold(first, update_golden)


def test_the_counts_of_the_page() -> None:
    answers = committed()
    assert [*answers] == [program.name for program in PROGRAMS]
    best = Counter[str]()
    accused = []
    for program in PROGRAMS:
        answer = answers[program.name]
        verdicts = [verdict(program, answer, tool) for tool in ("check", "record", "watch")]
        best[min(verdicts, key=["right", "wrong", "silent"].index)] += 1
        if any("twin" in tool for tool in answer):
            accused.append(program.name)
    assert best == {"right": 7, "silent": 7}, "docs/faults.md and RESULTS.md"
    assert not accused
