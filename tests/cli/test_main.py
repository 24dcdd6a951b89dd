"""The command line: what it passes on, and what it prints."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

from narrowgauge.trainer import train as loop
from narrowgauge.trainer.tokens import load_tokenizer, write_tokens
from planner.jobs import TITAN_LOG
from trainer.tiny_runs import ENVIRONMENT, call


@pytest.fixture
def train(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Mock:
    """What stands in for a training, in an empty folder with some tokens."""
    monkeypatch.chdir(tmp_path)
    write_tokens(["text " * 2000], load_tokenizer(None), tmp_path / "tokens")
    stand_in = Mock()
    monkeypatch.setattr(loop, "train", stand_in)
    return stand_in


def test_flags_that_were_named_are_passed_on(train):
    result = call("train", "--data", "tokens", "--steps", "9")
    assert result.exit_code == 0, result.stderr
    assert train.call_args.args == ({"data": "tokens", "steps": 9},)


def test_an_interruption_is_a_line(train):
    train.side_effect = KeyboardInterrupt
    result = call("train", "--data", "tokens")
    assert (result.exit_code, result.stderr) == (130, "\nInterrupted: the command was stopped.\n")


def test_a_fault_of_ours_is_not_hidden(train):
    train.side_effect = ZeroDivisionError
    assert isinstance(call("train", "--data", "tokens").exception, ZeroDivisionError)


def test_a_reader_that_leaves_early_is_no_error():
    command = [sys.executable, "-m", "narrowgauge", "show", "chips", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


SHORT = ["--steps", "1", "--batch-size", "1", "--sequence-length", "8", "--eval-sequences", "1"]


def test_the_examples_of_the_help_run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text. " * 400)
    log = {"log_history": [{"step": step, "loss": 2.0} for step in (1, 2)]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(log))
    (tmp_path / "run.toml").write_text(
        'model = "llama-8b"\nchip = "H100-SXM"\nchips = 8\ntokens_per_second = 53336\n'
    )
    (tmp_path / "mine.toml").write_text('like = "H100-SXM"\n')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    (tmp_path / "train.log").write_text(TITAN_LOG)
    lines = []
    for words in ("", "plan", "plan run", "plan next", "plan scaling"):
        for line in call(*words.split(), "--help").stdout.splitlines():
            if line.strip().startswith("narrowgauge "):
                lines.append(shlex.split(line)[1:])
    assert len(lines) >= 11
    for words in lines:
        more = SHORT if words[0] in ("train", "compare") else []
        result = call(*words, *more)
        assert result.exit_code == 0, (words, result.output)
