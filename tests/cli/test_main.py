"""The command line: what it passes on, what it prints, and one line with status 2 for every
mistake.
"""

from __future__ import annotations

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.runs.atomic_io import digest
from narrowgauge.runs.writer import Record
from narrowgauge.trainer import train as loop
from narrowgauge.trainer.settings import Settings
from narrowgauge.trainer.tokens import load_tokenizer, open_tokens, write_tokens
from planner.jobs import TITAN_CONFIG, TITAN_LOG
from trainer.tiny_runs import ENVIRONMENT, call


class Calls(list[tuple[Any, ...]]):
    """What was asked of a part of the trainer that stands in for the true one."""

    answer: Any = None

    def __call__(self, *words: Any, **_: Any) -> Any:
        self.append(words)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Calls:
    """What stands in for a training, in an empty folder with some tokens."""
    monkeypatch.chdir(tmp_path)
    recorded = Calls()
    monkeypatch.setattr(loop, "train", recorded)
    write_tokens(["text " * 2000], load_tokenizer(None), tmp_path / "tokens")
    return recorded


def asked(calls: Calls, *words: str) -> dict[str, Any]:
    result = call("train", "--data", "tokens", *words)
    assert result.exit_code == 0, result.stderr
    [(named,)] = calls
    return vars(Settings(**named))


def test_a_flag_overrules_the_file_and_the_file_the_default(calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "my.toml").write_text("steps = 7\nbatch_size = 4\n")
    settings = asked(calls, "--config", "my.toml", "--steps", "9")
    assert [settings[name] for name in ("steps", "batch_size")] == [9, 4]
    assert settings["sequence_length"] == Settings().sequence_length


WITHOUT_TORCH = """
import sys
sys.modules["torch"] = None  # from here on, to import it is an error
from narrowgauge.cli.main import main
for line in sys.stdin:
    try:
        main(line.split(), prog_name="narrowgauge")
    except SystemExit as end:
        print(end.code, line.strip(), flush=True)
"""
REFUSED_AT_ONCE = [
    "train --recipe bfloat16/wrod", "train --model lama", "train --steps 0", "train --data nowhere", "train --recpie x",
    "train --batch-size 7 --gradient-accumulation-steps 2", "train --config nowhere",
    "train --out odd", "train --out odd --data tokens", "export nowhere out",
    "compare --recipes bfloat16/wrod", "compare --recipes bfloat16/word --model lama", "compare --out nowhere",
    "compare --recipes bfloat16/word --steps 0", "compare --recipes bfloat16/word --data nowhere", "compare --recpies x",
    "plan run --model llama-1m --recipe bfloat16/word --chip h101", "report nowhere", "show recipe nowhere",
    "train --out done --lr 1", "train --out done --seed 3",
]  # fmt: skip
FINISHED = ["train --out done", "train --out done --steps 1"]


def test_what_is_refused_or_finished_says_so_before_torch_is_loaded(tmp_path: Path) -> None:
    Record.create(tmp_path / "odd", {"recorder": {"program": "mine.py"}}).close()
    tokens = write_tokens(["text " * 2000], load_tokenizer(None), tmp_path / "tokens")
    config = {"recipe": "bfloat16/word", "data": str(tokens), "steps": 1}
    with Record.create(tmp_path / "done", {"config": config}) as writer:
        writer.summary({"steps": 1, "val_loss": 4.0})
    checkpoint = tmp_path / "done" / "checkpoints" / "step-00000001"
    checkpoint.mkdir(parents=True)
    notes = {"step": 1, "settings": config, "tokens": open_tokens(tokens).fingerprint}
    (checkpoint / "notes.json").write_text(json.dumps(notes))
    manifest = {"notes.json": digest(checkpoint / "notes.json")}
    (checkpoint / "manifest.json").write_text(json.dumps(manifest))
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(REFUSED_AT_ONCE + FINISHED), capture_output=True, text=True,
        check=False, cwd=tmp_path, env=ENVIRONMENT,
    )  # fmt: skip
    printed = [f"2 {line}" for line in REFUSED_AT_ONCE]
    for line in FINISHED:
        printed += ["done is finished: 1 step.", f"0 {line}"]
    assert process.stdout.splitlines() == printed, process.stderr
    assert len(process.stderr.splitlines()) == len(REFUSED_AT_ONCE)


@pytest.mark.parametrize(
    "words",
    [("x" * 3000,), ("train", "--recipe", "x" * 3000), ("export", "x" * 3000, "y")],
    ids=len,
)
def test_a_value_too_long_for_a_path_costs_one_line(words: tuple[str, ...]) -> None:
    result = call(*words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), (
        result.exception
    )


def test_an_interruption_is_a_line(calls: Calls) -> None:
    calls.answer = KeyboardInterrupt()
    result = call("train", "--data", "tokens")
    assert (result.exit_code, result.stderr) == (130, "\nInterrupted: the command was stopped.\n")


def test_a_fault_of_ours_is_not_hidden(calls: Calls) -> None:
    calls.answer = ZeroDivisionError("ours")
    assert isinstance(call("train", "--data", "tokens").exception, ZeroDivisionError)


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "narrowgauge", "show", "chips", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


SHORT = ["--steps", "1", "--batch-size", "1", "--sequence-length", "8", "--eval-sequences", "1"]


def test_the_examples_of_the_help_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("a text. " * 400)
    log = {"log_history": [{"step": step, "loss": 2.0} for step in (1, 2)]}
    (tmp_path / "trainer_state.json").write_text(json.dumps(log))
    (tmp_path / "run.toml").write_text(
        'model = "llama-8b"\nchip = "H100-SXM"\nchips = 8\ntokens_per_second = 53336\n'
    )
    (tmp_path / "cluster.toml").write_text('chip = "H100-SXM"\nchips = 8\n')
    (tmp_path / "config.json").write_text('{"model_type": "llama", "num_hidden_layers": 2}')
    (tmp_path / "llama3_8b.toml").write_text(TITAN_CONFIG)
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
