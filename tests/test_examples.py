"""The examples run as they stand, and what they say in the end is true of what was asked."""

from __future__ import annotations

import json
import random
import runpy
import shlex
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from narrowgauge.runs.record import read_run

EXAMPLES = Path(__file__).parents[1] / "examples"
SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 32, "tie_word_embeddings": True,
}  # fmt: skip
Start = Callable[..., tuple[int, str, str]]


@pytest.fixture
def first_minute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Start:
    """Runs the example on a little text and a little model; its status and what it said."""
    (tmp_path / "tiny").mkdir()
    (tmp_path / "tiny" / "config.json").write_text(json.dumps(SHAPE))
    (tmp_path / "a text").mkdir()
    draw = random.Random(0)
    for number in range(6):
        words = draw.choices(["def", "return", "import", "self", "None", "the", "fox"], k=200)
        (tmp_path / "a text" / f"{number}.txt").write_text(" ".join(words))
    monkeypatch.chdir(tmp_path)

    def start(*words: str) -> tuple[int, str, str]:
        small = ("--steps", "3", "--sequence-length", "16", "--batch-size", "2", "--eval-batches", "1")
        monkeypatch.setattr(sys, "argv", ["first_minute.py", "--model", "./tiny", "--data", "a text", *small, *words])
        status = 0
        try:
            runpy.run_path(str(EXAMPLES / "first_minute.py"), run_name="__main__")
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return start


def runs(place: Path) -> list[Path]:
    return sorted((place / "runs").iterdir())


def test_own_loop_learns_and_loses_little(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[3]) for line in lines[:-1]]
    assert len(losses) == 4 and losses[-1] < losses[0] and lines[-1].startswith("8.")


def test_own_rule_fits_its_promise_and_learns_alike_in_every_storage(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "own_rule.py").read_text()
    rule = [line for line in text[text.index("def scalars") : text.index("OPTIONS")].splitlines() if line.strip()]
    assert len(rule) <= 15 and len(text.splitlines()) < 80
    runpy.run_path(str(EXAMPLES / "own_rule.py"), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    losses, sizes = [float(line[-1]) for line in lines], [float(line[1]) for line in lines]
    assert max(losses) < 1.1 * losses[0] < 0.06 and sizes[0] == 20.0
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 8


def test_first_minute_compares_two_runs(first_minute: Start, tmp_path: Path) -> None:
    status, said, _ = first_minute("--audit-every", "1")
    assert status == 0
    assert [run.name for run in runs(tmp_path)] == ["tiny-bfloat16-naive-1", "tiny-bfloat16-word-1"]
    assert "bfloat16/naive" in said and "without a word" not in said
    script = shlex.split(said.splitlines()[-1].removeprefix("Next: "))[0]
    assert Path(script).is_file() and Path(script).parent == Path(sys.executable).parent


def test_first_minute_without_an_audit_claims_no_loss(first_minute: Start) -> None:
    status, said, _ = first_minute("--audit-every", "0")
    assert status == 0
    assert "was not audited" in said and "rounded" not in said


def test_first_minute_stopped_says_how_to_go_on(first_minute: Start, tmp_path: Path) -> None:
    status, said, _ = first_minute("--stop-after", "1")
    assert status == 0
    assert "bytes/param" not in said and "Next" not in said
    assert [shlex.split(line)[1:] for line in said.splitlines()[-2:]] == [
        ["resume", f"runs/{run.name}"] for run in runs(tmp_path)
    ]


def test_first_minute_takes_a_file_of_settings_and_flags_overrule_it(first_minute: Start, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("steps = 50\nlr = 0.25\nseed = 7\n")
    status, *_ = first_minute("--config", "mine.toml", "--seed", "8")
    assert status == 0
    config = read_run(runs(tmp_path)[0]).config
    assert (config["steps"], config["lr"], config["seed"]) == (3, 0.25, 8)


@pytest.mark.parametrize("words", [("--wrong", "1"), ("--out", "here"), ("--recipe", "float32"), ("--data", "")])
def test_first_minute_refuses_before_it_trains(words: tuple[str, ...], first_minute: Start, tmp_path: Path) -> None:
    status, said, complained = first_minute(*words)
    assert (status, said) == (2, "") and words[0] in complained
    assert [path.name for path in sorted(tmp_path.iterdir())] == ["a text", "tiny"]


def test_float8_training_learns_and_counts(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "float8_training.py").read_text()
    runpy.run_path(str(EXAMPLES / "float8_training.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    for line in lines[:3]:
        first, last = (float(line.split()[place].rstrip(";")) for place in (2, 4))
        assert last < first / 50
    assert len(text.splitlines()) < 80 and "float8-row multiplies" in lines[3]


def test_int8_inference_loses_little_where_outliers_stay_wide(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "int8_inference.py").read_text()
    runpy.run_path(str(EXAMPLES / "int8_inference.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    by_row, by_outlier = (float(line.rsplit(" ", 1)[1].rstrip("%")) for line in lines[:2])
    assert by_outlier < by_row / 2
    assert "the same bits" in lines[2] and "it goes on with" in lines[3] and len(text.splitlines()) < 80
