"""Trainings of a tiny model, stopped, killed, damaged and refused in every way: what remains is always the same run.

Killing and interrupting happen in real processes, each forked from one that has loaded everything but computed nothing.
A process dies, or gets its signal, at a chosen system call, so every moment can be met again.
"""

from __future__ import annotations

import errno
import json
import math
import os
import random
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner, Result

import narrowgauge
from narrowgauge.cli import main
from narrowgauge.errors import DataError, RecordError
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import checkpoint, loop
from narrowgauge.trainer.config import TrainConfig

SHAPE = {
    "model_type": "llama", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "tie_word_embeddings": True,
}  # fmt: skip
TIMINGS = {"tokens_per_second", "seconds", "wall_seconds", "peak_memory_bytes"}
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(Path(narrowgauge.__file__).parents[1]), "OMP_NUM_THREADS": "1"}

# Reads a task a line: the words of a command, where its output goes, and which signal comes at which system call.
NURSERY = """
import json, os, signal, sys
import transformers.models.llama.modeling_llama
from narrowgauge.cli import main
import narrowgauge.trainer.loop

def watch(moments):
    count, words = 0, {text.encode(): number for text, number in moments.items() if not text.isdigit()}
    def due(function, writes):
        def call(*given, **named):
            nonlocal count
            count += 1
            number = moments.get(str(count))
            if writes:
                number = next((words.pop(text) for text in list(words) if text in given[1]), number)
            if number == signal.SIGKILL and writes:
                function(given[0], given[1][: len(given[1]) // 2])
            if number is not None:
                os.kill(os.getpid(), number)
            return function(*given, **named)
        return call
    for name in ("write", "fsync", "rename", "replace", "open", "mkdir", "unlink"):
        setattr(os, name, due(getattr(os, name), name == "write"))
    return lambda: count

for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        out = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        # The signal a terminal sends; a process started by a test runner may have been told to ignore it.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        calls = watch(task["moments"])
        try:
            main(task["words"])
        finally:
            number = calls()
            sys.stdout.flush(), sys.stderr.flush()
            with open(task["output"] + ".calls", "w") as file:
                file.write(str(number))
            os._exit(int(getattr(sys.exc_info()[1], "code", 1) or 0))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
"""


class Nursery:
    """Runs commands in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT
        )

    def __call__(self, *words: str, at: dict[str, signal.Signals] | None = None) -> int:
        """The status of a command; ``at`` names the system call, by number or by what is written, of each signal."""
        assert self.process.stdin is not None and self.process.stdout is not None
        moments = {moment: int(number) for moment, number in (at or {}).items()}
        task = {"words": words, "output": str(self.output), "moments": moments}
        print(json.dumps(task), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    @property
    def said(self) -> str:
        return self.output.read_text()

    @property
    def num_calls(self) -> int:
        return int(Path(f"{self.output}.calls").read_text())


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    made = Nursery(tmp_path_factory.mktemp("nursery"))
    with made.process:
        yield made
        assert made.process.stdin is not None
        made.process.stdin.close()


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model's shape and some text."""
    folder = tmp_path_factory.mktemp("place")
    (folder / "model").mkdir()
    (folder / "model" / "config.json").write_text(json.dumps(SHAPE))
    (folder / "text").mkdir()
    draw = random.Random(0)
    words = ["def", "return", "the", "quick", "brown", "fox", "jumps", "over", "import", "lazy", "dog", "self", "None"]
    for number in range(8):
        (folder / "text" / f"{number}.txt").write_text(" ".join(draw.choices(words, k=250)))
    return folder


def settings(place: Path, out: Path, **changes: Any) -> TrainConfig:
    given: dict[str, Any] = {
        "steps": 8, "batch_size": 4, "sequence_length": 16, "lr": 3e-3, "eval_every": 3, "eval_batches": 2,
        "checkpoint_every": 2, "audit_every": 2, "log_every": 1, "held_out": 0.2,
    }  # fmt: skip
    where = {"model": str(place / "model"), "data": str(place / "text"), "out": str(out)}
    return TrainConfig(**{**given, **where, **changes})


def words_of(config: TrainConfig) -> list[str]:
    """The command line that says the same."""
    words = ["train"]
    for name, value in config.to_dict().items():
        flag = name.replace("_", "-")
        words += [f"--{flag}" if value else f"--no-{flag}"] if isinstance(value, bool) else [f"--{flag}", str(value)]
    return words


def call(*words: str) -> Result:
    return CliRunner().invoke(main, list(words), prog_name="narrowgauge")


def lasting(row: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in row.items() if name not in TIMINGS}


def assert_same_run(one: Run, other: Run) -> None:
    assert [lasting(row) for row in one.steps] == [lasting(row) for row in other.steps]
    assert one.evals == other.evals
    assert one.summary is not None and other.summary is not None
    assert lasting(one.summary) == {**lasting(other.summary)}


CASES: dict[str, dict[str, Any]] = {
    "word, accumulated": {"recipe": "bfloat16/word", "gradient_accumulation_steps": 2},
    "split, checkpointed": {"recipe": "bfloat16/split", "activation_checkpointing": True},
    "naive": {"recipe": "bfloat16/naive"},
    "autocast": {"recipe": "bfloat16/float32", "schedule": "linear", "warmup_steps": 3},
}


@pytest.fixture(scope="module")
def whole(place: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Run]:
    """Each case, trained at once."""
    folder = tmp_path_factory.mktemp("whole")
    return {
        name: read_run(loop.train(settings(place, folder / str(k), **case)))
        for k, (name, case) in enumerate(CASES.items())
    }


# ── resume ──────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", CASES)
def test_stopped_and_resumed_is_the_same_run(name: str, place: Path, whole: dict[str, Run], tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", **CASES[name], stop_after=3))
    assert read_run(folder).summary is None and len(read_run(folder).steps) == 3
    loop.resume(folder, stop_after=5)
    loop.resume(folder)
    assert_same_run(read_run(folder), whole[name])
    assert [e["kind"] for e in read_run(folder).events] == ["start", "stop", "resume", "stop", "resume", "finish"]


@pytest.mark.parametrize("name", ["word, accumulated", "naive"])
def test_killed_at_any_moment_is_the_same_run(
    name: str, place: Path, whole: dict[str, Run], nursery: Nursery, tmp_path: Path
) -> None:
    config = settings(place, tmp_path / "counted", **CASES[name])
    assert nursery(*words_of(config)) == 0, nursery.said
    assert_same_run(read_run(tmp_path / "counted"), whole[name])
    draw, last = random.Random(name), nursery.num_calls
    for moment in draw.sample(range(last // 4, last - 4), 5):
        folder = tmp_path / str(moment)
        command = words_of(replace(config, out=str(folder)))
        assert nursery(*command, at={str(moment): signal.SIGKILL}) == -signal.SIGKILL, nursery.said
        if read_run(folder).summary is not None:
            continue
        again = nursery("resume", str(folder), at={str(draw.randrange(1, 40)): signal.SIGKILL})
        assert again in (0, -signal.SIGKILL), nursery.said
        if again and read_run(folder).summary is None:
            assert nursery("resume", str(folder)) == 0, nursery.said
        assert_same_run(read_run(folder), whole[name])


def test_a_kill_from_outside_is_survived(place: Path, nursery: Nursery, tmp_path: Path) -> None:
    config = settings(place, tmp_path / "run", steps=60, checkpoint_every=5, eval_every=0)
    expected = read_run(loop.train(replace(config, out=str(tmp_path / "whole"))))
    command = [sys.executable, "-m", "narrowgauge", *words_of(config)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=ENVIRONMENT) as process:
        assert process.stdout is not None
        while "step      8/60" not in process.stdout.readline():
            assert process.poll() is None
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert nursery("resume", str(tmp_path / "run")) == 0, nursery.said
    assert_same_run(read_run(tmp_path / "run"), expected)


def test_a_run_is_resumed_from_any_folder(place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(place)
    out = os.path.relpath(tmp_path / "run", place)
    loop.train(replace(settings(Path(), Path(out), stop_after=2), model="model", data="text"))
    monkeypatch.chdir(tmp_path)
    loop.resume("run")
    assert len(read_run(tmp_path / "run").steps) == 8


def test_a_kill_before_the_summary_only_writes_the_summary(place: Path, whole: dict[str, Run], tmp_path: Path) -> None:
    name = "naive"
    shutil.copytree(whole[name].path, tmp_path / "run")
    (tmp_path / "run" / "summary.json").unlink()
    loop.resume(tmp_path / "run")
    assert_same_run(read_run(tmp_path / "run"), whole[name])


# ── signals ─────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_an_interruption_saves_and_says_how_to_go_on(
    number: signal.Signals, place: Path, whole: dict[str, Run], nursery: Nursery, tmp_path: Path
) -> None:
    name, folder = "naive", tmp_path / "run"
    config = settings(place, folder, **CASES[name], checkpoint_every=0)
    assert nursery(*words_of(config), at={'{"step":3,"loss"': number}) == 130
    lines = nursery.said.splitlines()
    assert f"narrowgauge resume {folder}" in lines[-2] and lines[-1].startswith("Interrupted: ")
    assert sum("Ctrl-C again" in line for line in lines) == 1
    run = read_run(folder)
    assert run.events[-1]["kind"] == "stop" and len(run.steps) == 3
    assert os.listdir(folder / "checkpoints").count("step-00000003") == 1
    assert nursery("resume", str(folder)) == 0, nursery.said
    assert_same_run(read_run(folder), whole[name])


def test_a_second_interruption_ends_at_once(place: Path, nursery: Nursery, tmp_path: Path) -> None:
    config = settings(place, tmp_path / "run", recipe="bfloat16/naive", checkpoint_every=0)
    at = {'{"step":3,"loss"': signal.SIGINT, "Ctrl-C again": signal.SIGINT}
    assert nursery(*words_of(config), at=at) == 130
    assert "Traceback" not in nursery.said
    assert not (tmp_path / "run" / "checkpoints").exists() and len(read_run(tmp_path / "run").steps) == 2


def test_an_interruption_before_the_first_step_leaves_nothing(place: Path, nursery: Nursery, tmp_path: Path) -> None:
    assert nursery(*words_of(settings(place, tmp_path / "run")), at={"8": signal.SIGINT}) == 130
    assert "Traceback" not in nursery.said and not (tmp_path / "run").exists()


# ── damage ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def flip_last_byte(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def test_a_damaged_checkpoint_is_passed_over_and_named(
    place: Path, whole: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "word, accumulated"
    folder = loop.train(settings(place, tmp_path / "run", **CASES[name], stop_after=4))
    flip_last_byte(folder / "checkpoints" / "step-00000004" / "tensors.safetensors")
    capsys.readouterr()
    loop.resume(folder)
    said = capsys.readouterr().err
    assert said.count("\n") == 1 and said.startswith("note: step-00000004 is damaged") and "checksum" in said
    events = {e["kind"]: e for e in read_run(folder).events}
    assert "step-00000004" in events["checkpoint_damaged"]["message"]
    assert events["resume"]["step"] == 2
    assert_same_run(read_run(folder), whole[name])


def test_without_a_good_checkpoint_the_run_starts_again(place: Path, whole: dict[str, Run], tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", **CASES["naive"], stop_after=2))
    flip_last_byte(folder / "checkpoints" / "step-00000002" / "state.json")
    with pytest.raises(RecordError, match="no good checkpoint"):
        loop.load(folder)
    loop.resume(folder)
    assert_same_run(read_run(folder), whole["naive"])


def test_changed_data_are_refused_and_lost_ones_made_again(place: Path, whole: dict[str, Run], tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", **CASES["naive"], stop_after=2))
    before = sorted(p.name for p in folder.rglob("*"))
    tokens = folder / "data" / "train.bin"
    good = tokens.read_bytes()
    flip_last_byte(tokens)
    refused = call("resume", str(folder))
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert "train.bin is not what was written" in refused.stderr
    assert sorted(p.name for p in folder.rglob("*")) == before
    tokens.write_bytes(good)
    shutil.rmtree(folder / "data")
    loop.resume(folder)
    assert_same_run(read_run(folder), whole["naive"])


def full_disk(*_: Any, **__: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_a_full_disk_costs_one_line_and_no_checkpoint(
    place: Path, whole: dict[str, Run], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = loop.train(settings(place, tmp_path / "run", **CASES["naive"], stop_after=2))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "save_file", full_disk)
        refused = call("resume", str(folder))
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1
    assert refused.stderr.startswith("RecordError: ") and "space" in refused.stderr
    assert [p.name for p in (folder / "checkpoints").iterdir() if p.name != ".lock"] == ["step-00000002"]
    loop.resume(folder)
    assert_same_run(read_run(folder), whole["naive"])


@pytest.mark.parametrize("at", range(1, 9))
@pytest.mark.parametrize("existed", [False, True])
def test_a_full_disk_at_the_start_leaves_nothing(
    at: int, existed: bool, place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    true_fsync, count, folder = os.fsync, 0, tmp_path / "run"
    if existed:
        folder.mkdir()

    def fsync(descriptor: int) -> None:
        nonlocal count
        count += 1
        if count == at:
            full_disk()
        true_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    refused = call(*words_of(settings(place, folder, steps=1, eval_batches=1)))
    assert refused.exit_code == 2 and refused.stderr.count("\n") == 1, refused.stderr
    if not (folder / "run.toml").exists():
        assert folder.exists() == existed and not (existed and os.listdir(folder))


# ── bad input ───────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("--sequence-length", "10000", "--batch-size", "1"), "sequence_length 10000 needs 10001 tokens"),
        (("--data", "{empty}"), "no text"),
        (("--data", "{blank}"), "has no text"),
        (("--model", "{empty}"), "config.json"),
        (("--model", "{nonsense}"), "nonsense"),
        (("--out", "{taken}"), "is not empty"),
        (("--recipe", "{recipe}"), "matches no module"),
    ],
)
def test_what_cannot_be_is_refused_before_anything_is_written(
    words: tuple[str, ...], says: str, place: Path, tmp_path: Path
) -> None:
    names = {name: tmp_path / name for name in ("empty", "blank", "nonsense", "taken")}
    for path in names.values():
        path.mkdir()
    (names["blank"] / "a.txt").write_text("")
    (names["nonsense"] / "config.json").write_text('{"model_type": "nonsense"}')
    (names["taken"] / "mine").write_text("mine")
    (tmp_path / "recipe.toml").write_text('recipe = "bfloat16/word"\nkeep = ["nothing"]\n')
    named = {name: str(path) for name, path in {**names, "recipe": tmp_path / "recipe.toml"}.items()}
    before = sorted(tmp_path.rglob("*"))
    refused = call(*words_of(settings(place, tmp_path / "run")), *(word.format(**named) for word in words))
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (2, "", 1)
    assert says in refused.stderr
    assert sorted(tmp_path.rglob("*")) == before


def test_a_finished_run_is_not_resumed(whole: dict[str, Run]) -> None:
    refused = call("resume", str(whole["naive"].path))
    assert refused.exit_code == 2 and "is finished: 8 steps" in refused.stderr and refused.stderr.count("\n") == 1


def test_an_existing_run_is_not_overwritten(place: Path, whole: dict[str, Run]) -> None:
    refused = call(*words_of(settings(place, whole["naive"].path)))
    assert refused.exit_code == 2 and f"narrowgauge resume {whole['naive'].path}" in refused.stderr


def test_a_stop_in_the_past_is_refused(place: Path, tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", stop_after=2))
    with pytest.raises(RecordError, match=r"has done 2 steps, and a stop after step 2"):
        loop.resume(folder, stop_after=2)
    assert read_run(folder).events[-1]["kind"] == "stop"


def test_no_run_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no such folder"):
        loop.resume(tmp_path / "nowhere")
    with pytest.raises(DataError):
        loop.train(settings(tmp_path, tmp_path / "run"))
    assert not any(tmp_path.iterdir())


# ── the record ──────────────────────────────────────────────────────────────────────────────────────────────────────


def test_the_record_holds_what_was_promised(whole: dict[str, Run]) -> None:
    run = whole["word, accumulated"]
    assert run.summary is not None
    summary = run.summary
    assert summary["recipe"] == "bfloat16/word" and summary["steps"] == 8
    assert summary["tokens"] == 8 * 4 * 16
    assert 0 < summary["val_loss"] < math.log(280) + 0.5
    assert 7.9 < summary["bytes_per_param"] < 9
    assert summary["tokens_per_second"] > 0 and summary["wall_seconds"] > 0
    assert summary["peak_memory_bytes"] > 1 << 20
    assert abs(summary["edq"] - 1) < 0.01 and 0 <= summary["noise"] < 0.5 and 0 <= summary["lost_fraction"] < 0.2
    assert len(summary["weights_fingerprint"]) == 16 and int(summary["weights_fingerprint"], 16)
    assert [row["step"] for row in run.evals] == [3, 6, 8]
    assert summary["val_loss"] == run.evals[-1]["val_loss"]
    for number, row in enumerate(run.steps, 1):
        assert row["step"] == number and row["tokens"] == number * 64
        assert row["loss"] > 0 and row["lr"] > 0 and row["grad_norm"] > 0 and row["skipped"] is False
        assert row["tokens_per_second"] > 0 and row["seconds"] > 0 and row["peak_memory_bytes"] > 0
        assert ("edq" in row) == (number % 2 == 0)
    assert run.steps[-1]["loss"] < run.steps[0]["loss"]
    assert run.run["config"]["recipe"] == "bfloat16/word" and run.run["versions"]["torch"] == torch.__version__
    assert run.run["model"]["num_parameters"] > 0 and run.run["data"]["tokens"] > 0


def test_micro_batches_add_up_to_the_batch(place: Path, tmp_path: Path) -> None:
    parts = [
        read_run(
            loop.train(settings(place, tmp_path / str(k), recipe="float32", gradient_accumulation_steps=k, steps=3))
        )
        for k in (1, 4)
    ]
    for one, other in zip(*(run.steps for run in parts), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-4)


def test_a_step_at_rate_zero_intends_nothing_and_is_no_error(place: Path, tmp_path: Path) -> None:
    run = read_run(loop.train(settings(place, tmp_path / "run", min_lr_ratio=0.0)))
    assert run.steps[-1]["lr"] == 0.0 and run.steps[-1]["edq"] is None and run.steps[-2].get("edq", 0) == 0
    assert run.summary is not None and run.summary["edq"] > 0.99


def test_a_lost_update_is_an_event_that_names_tensor_and_cure(
    place: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = settings(place, tmp_path / "run", recipe="bfloat16/naive", lr=1e-6, schedule="constant", audit_every=1)
    run = read_run(loop.train(config))
    warnings = [e for e in run.events if e["kind"] == "warning"]
    assert any("mlp.down_proj.weight" in e["tensor"] for e in warnings)
    assert all(e["advice"] == "storage 'word'" and e["value"] < 0.9 for e in warnings)
    assert all("'bfloat16'" not in e["message"] and e["tensor"] in e["message"] for e in warnings)
    assert "warning: " in capsys.readouterr().out
    assert run.summary is not None and run.summary["lost_fraction"] > 0.5


def test_a_step_without_a_finite_gradient_is_skipped_and_told(
    place: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from narrowgauge.trainer.session import Session

    true_batch = Session.batch

    def batch(self: Session) -> list[torch.Tensor]:
        scale = math.inf if self.step == 2 else 1.0
        loss = self.__dict__.setdefault("true_loss", self.loss)
        self.loss = lambda tokens: loss(tokens) * scale
        return true_batch(self)

    monkeypatch.setattr(Session, "batch", batch)
    run = read_run(loop.train(settings(place, tmp_path / "run", recipe="bfloat16/word", eval_every=0)))
    assert [row["skipped"] for row in run.steps] == [False, False, True, *[False] * 5]
    assert [e["step"] for e in run.events if e["kind"] == "skip"] == [3]
    assert run.summary is not None and run.summary["num_skipped"] == 1 and math.isfinite(run.summary["val_loss"])


def test_a_pipe_sees_plain_lines(place: Path, tmp_path: Path) -> None:
    result = call(*words_of(settings(place, tmp_path / "run")))
    assert result.exit_code == 0 and result.stderr == ""
    assert "\x1b" not in result.stdout and "\r" not in result.stdout
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines if " tokens/s  lr " in line] == [f"{k}/8" for k in range(1, 9)]
    assert lines[-1] == str(tmp_path / "run") and lines[-3].startswith("recipe ")
