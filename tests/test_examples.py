"""The examples run as they stand, and what they say in the end is true of what was asked."""

from __future__ import annotations

import json
import os
import random
import runpy
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

import narrowgauge
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
        return run("--model", "./tiny", "--data", "a text", *small, *words)

    def run(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["first_minute.py", *words])
        status = 0
        try:
            runpy.run_path(str(EXAMPLES / "first_minute.py"), run_name="__main__")
        except SystemExit as stop:
            status = int(stop.code or 0)
        return status, *capsys.readouterr()

    return start


def test_own_loop_learns_and_loses_little(capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "own_loop.py"), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    losses = [float(line.split()[3]) for line in lines[:-1]]
    assert len(losses) == 4 and losses[-1] < losses[0] and lines[-1].startswith("8.")


def test_recorded_loop_ends_with_a_run_folder_and_goes_on_where_it_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (EXAMPLES / "recorded_loop.py").read_text()
    monkeypatch.setattr(sys, "argv", ["recorded_loop.py", str(tmp_path / "mine")])
    said = []
    for _ in range(2):
        runpy.run_path(str(EXAMPLES / "recorded_loop.py"), run_name="__main__")
        said.append(capsys.readouterr().out.splitlines())
    run = read_run(tmp_path / "mine")
    assert len(text.splitlines()) <= 60 and said[0] == said[1]
    assert [row["step"] for row in run.steps] == list(range(1, 201)) and len(run.evals) == 4
    assert run.summary is not None and run.summary["val_loss"] < run.evals[0]["val_loss"]
    assert [event["kind"] for event in run.events] == ["start", "finish", "resume", "finish"]


def test_own_rule_fits_its_promise_and_learns_alike_in_every_storage(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "own_rule.py").read_text()
    rule = [line for line in text[text.index("def scalars") : text.index("OPTIONS")].splitlines() if line.strip()]
    assert len(rule) <= 15 and len(text.splitlines()) < 80
    runpy.run_path(str(EXAMPLES / "own_rule.py"), run_name="__main__")
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    losses, sizes = [float(line[-1]) for line in lines], [float(line[1]) for line in lines]
    assert max(losses) < 1.1 * losses[0] < 0.06 and sizes[0] == 20.0
    assert sizes == sorted(sizes, reverse=True) and sizes[-1] < 8


def test_first_minute_compares_three_recipes_and_ends_with_a_page(first_minute: Start, tmp_path: Path) -> None:
    status, said, _ = first_minute("--seeds", "2", "--out", "here")
    assert status == 0
    rows = json.loads((tmp_path / "here" / "compare.json").read_text())
    assert [row["recipe"] for row in rows] == ["bfloat16/master", "bfloat16/word", "bfloat16/naive"]
    assert all(row["num_seeds"] == 2 for row in rows)
    assert Path(said.splitlines()[-1]).resolve() == tmp_path / "here" / "report.html"
    page = (tmp_path / "here" / "report.html").read_text()
    assert all(row["recipe"] in page for row in rows)
    lines = [line for line in said.splitlines() if "validation loss" in line and line[0].isdigit()]
    assert [line.split()[0] for line in lines] == [f"{k}/6" for k in range(1, 7)]


def test_first_minute_goes_on_with_what_was_stopped(first_minute: Start, tmp_path: Path) -> None:
    first_minute("--seeds", "1", "--out", "here")
    before = (tmp_path / "here" / "compare.json").read_text()
    status, *_ = first_minute("--seeds", "1", "--out", "here")
    assert status == 0 and (tmp_path / "here" / "compare.json").read_text() == before


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
    by_row, by_codes, by_outlier = (float(line.rsplit(" ", 1)[1].rstrip("%")) for line in lines[:3])
    assert by_outlier < by_codes < by_row / 2
    assert "the same bits" in lines[3] and "it goes on with" in lines[4] and len(text.splitlines()) < 80


def test_a_run_of_two_ranks_goes_on_elsewhere_with_the_same_bits(capfd: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(EXAMPLES / "resume_elsewhere.py"), run_name="__main__")
    lines = [line for line in capfd.readouterr().out.splitlines() if line.startswith("two ranks, then")]
    (on_one, one), (on_three, three) = (line.split(": ") for line in lines)
    assert (on_one[-1], on_three[-1]) == ("1", "3") and one == three and len(one) == 16


def test_many_ranks_have_the_bits_of_one() -> None:
    text = (EXAMPLES / "many_ranks.py").read_text()
    source = str(Path(narrowgauge.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    words = [sys.executable, str(EXAMPLES / "many_ranks.py")]
    done = subprocess.run(words, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    one, two = (line.split("  ") for line in done.stdout.splitlines())
    assert (one[0], two[0]) == ("1 rank", "2 ranks") and one[1:] == two[1:] and len(text.splitlines()) < 90


@pytest.mark.frameworks
def test_lightning_training_learns(capsys: pytest.CaptureFixture[str]) -> None:
    text = (EXAMPLES / "lightning_training.py").read_text()
    runpy.run_path(str(EXAMPLES / "lightning_training.py"), run_name="__main__")
    losses, sizes = capsys.readouterr().out.splitlines()[-2:]
    first, last = (float(losses.split()[place]) for place in (1, 4))
    assert last < 0.8 * first and len(text.splitlines()) <= 60 and float(sizes.split()[0]) < 8.5
