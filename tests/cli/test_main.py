"""The command line: what it passes on, what it prints, and one line with status 2 for every
mistake.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

import narrowgauge.trainer
from narrowgauge.errors import Terminated
from narrowgauge.runs.writer import RunWriter
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.data.tokens import Document, load_tokenizer, write_tokens
from trainer.tiny_runs import ENVIRONMENT, call


class Calls(list[tuple[Any, ...]]):
    """What was asked of a part of the trainer that stands in for the true one."""

    answer: Any = None

    def __init__(self) -> None:
        super().__init__()
        self.options: list[dict[str, Any]] = []

    def __call__(self, *words: Any, **options: Any) -> Any:
        self.append(words)
        self.options.append(options)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Calls]:
    """Stand-ins for the trainer's verbs, in an empty folder."""
    monkeypatch.chdir(tmp_path)
    recorded: dict[str, Calls] = {}
    for module, verbs in {"loop": ("train_entry",), "export": ("export",)}.items():
        stand_in = ModuleType(f"narrowgauge.trainer.{module}")
        for verb in verbs:
            recorded[verb] = Calls()
            setattr(stand_in, verb, recorded[verb])
        monkeypatch.setitem(sys.modules, stand_in.__name__, stand_in)
        monkeypatch.setattr(narrowgauge.trainer, module, stand_in, raising=False)
    write_tokens([Document("a", "text")], *load_tokenizer(None), tmp_path / "tokens")
    return recorded


def asked(calls: dict[str, Calls], *words: str) -> dict[str, Any]:
    result = call("train", "--data", "tokens", *words)
    assert result.exit_code == 0, result.stderr
    [(entry,)] = calls["train_entry"]
    settings: dict[str, Any] = entry.config.to_dict()
    return settings


def test_a_flag_overrules_the_file_and_the_file_the_default(
    calls: dict[str, Calls], tmp_path: Path
) -> None:
    (tmp_path / "my.toml").write_text("steps = 7\nbatch_size = 4\n")
    settings = asked(calls, "--config", "my.toml", "--steps", "9")
    assert [settings[name] for name in ("steps", "batch_size")] == [9, 4]
    assert settings["sequence_length"] == TrainConfig().sequence_length


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
    "resume nowhere", "resume nowhere --stop-after 0", "resume odd", "train --out odd",
    "compare --recipes bfloat16/wrod", "compare --recipes bfloat16/word --model lama", "compare --out nowhere",
    "compare --recipes bfloat16/word --steps 0", "compare --recipes bfloat16/word --data nowhere", "compare --recpies x",
    "plan run --model llama-1m --recipe bfloat16/word --chip h101", "report nowhere", "show recipe nowhere",
    "train --out done --lr 1", "train --out done --seed 3", "resume done --stop-after 0",
]  # fmt: skip
FINISHED = ["train --out done", "resume done", "train --out done --steps 1"]


def test_what_is_refused_or_finished_says_so_before_torch_is_loaded(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "odd", {"config": {"nonsense": 1}}).close()
    tokens = write_tokens([Document("a", "text")], *load_tokenizer(None), tmp_path / "tokens")
    config = {"recipe": "bfloat16/word", "data": str(tokens), "steps": 1}
    run = {"config": config, "data": {"unigram_loss": 5.0}}
    with RunWriter.create(tmp_path / "done", run) as writer:
        writer.summary({"steps": 1, "val_loss": 4.0})
    process = subprocess.run(
        [sys.executable, "-c", WITHOUT_TORCH], input="\n".join(REFUSED_AT_ONCE + FINISHED), capture_output=True, text=True,
        check=False, cwd=tmp_path, env=ENVIRONMENT,
    )  # fmt: skip
    printed = [f"2 {line}" for line in REFUSED_AT_ONCE]
    for line in FINISHED:
        printed += ["done is finished: 1 step.", "done", f"0 {line}"]
    assert process.stdout.splitlines() == printed, process.stderr
    assert len(process.stderr.splitlines()) == len(REFUSED_AT_ONCE)


@pytest.mark.parametrize(
    "words", [("x" * 3000,), ("train", "--recipe", "x" * 3000), ("resume", "x" * 3000)], ids=len
)
def test_a_value_too_long_for_a_path_costs_one_line(words: tuple[str, ...]) -> None:
    result = call(*words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), (
        result.exception
    )


@pytest.mark.parametrize(("interruption", "status"), [(KeyboardInterrupt, 130), (Terminated, 143)])
def test_an_interruption_is_a_line(
    interruption: type[BaseException], status: int, calls: dict[str, Calls]
) -> None:
    calls["train_entry"].answer = interruption("saved at step 7.")
    result = call("train", "--data", "tokens")
    assert (result.exit_code, result.stderr) == (status, "Interrupted: saved at step 7.\n")


def test_a_fault_of_ours_is_not_hidden(calls: dict[str, Calls]) -> None:
    calls["train_entry"].answer = ZeroDivisionError("ours")
    assert isinstance(call("train", "--data", "tokens").exception, ZeroDivisionError)


def test_too_little_memory_costs_one_line_with_advice(calls: dict[str, Calls]) -> None:
    with pytest.raises(RuntimeError, match="can't allocate memory") as refusal:
        torch.empty(1 << 60)
    calls["train_entry"].answer = refusal.value
    result = call("train", "--data", "tokens")
    assert (result.exit_code, result.stderr.count("\n")) == (1, 1)
    assert "smaller batches" in result.stderr


def test_a_reader_that_leaves_early_is_no_error() -> None:
    command = [sys.executable, "-m", "narrowgauge", "show", "chips", "--json"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=ENVIRONMENT
    ) as process:
        process.stdout.close()
        assert process.stderr.read() == b""


LIMITED = """
import resource, sys
resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
from narrowgauge.cli.main import main
main(sys.argv[1:], prog_name="narrowgauge")
"""


@pytest.mark.skipif(sys.platform == "win32", reason="no limits on files")
def test_output_that_cannot_be_written_costs_one_line_and_status_1(tmp_path: Path) -> None:
    with (tmp_path / "out").open("wb") as out:
        result = subprocess.run(
            [sys.executable, "-B", "-c", LIMITED, "show", "chips"], stdout=out, stderr=subprocess.PIPE, text=True, check=False,
            env=ENVIRONMENT,
        )  # fmt: skip
    assert (result.returncode, result.stderr.count("\n")) == (1, 1)
    assert result.stderr.startswith("OSError: Cannot write to standard output: File too large.")
