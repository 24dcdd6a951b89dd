"""Trainings of a tiny model, stopped, killed, damaged and refused in every way: what remains is
always the same run.

Killing and interrupting happen in real processes, each forked from one that has loaded everything
but computed nothing. A process dies, or gets its signal, at a chosen system call, so every moment
can be met again.
"""

from __future__ import annotations

import errno
import json
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

import numpy as np
import pytest
import tomli_w
import torch

from checkpoints.test_saving import flip_a_bit
from narrowgauge.checkpoints import saving
from narrowgauge.checkpoints.saving import Saver
from narrowgauge.errors import RecordError
from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer import loop, session
from trainer.tiny_runs import CASES, ENVIRONMENT, assert_same_run, call, lasting, settings, words_of

pytestmark = pytest.mark.usefixtures("one_thread")

# Reads a task a line: the words of a command, where its output goes, and which signal comes at
# which system call.
NURSERY = '''
import json, os, signal, sys, threading
import transformers.models.llama.modeling_llama
from narrowgauge.cli.main import main
import narrowgauge.trainer.loop

def watch(moments, places):
    """Count the calls on files that the command names: caches of compiled code take and poll locks as others use them."""
    count, files, lock = 0, set(), threading.Lock()
    words = {text.encode(): number for text, number in moments.items() if not text.isdigit()}
    def due(function, name):
        def call(*given, **named):
            nonlocal count
            ours = given[0] in files if name in ("write", "fsync") else str(given[0]).startswith(places)
            with lock:  # a checkpoint is written by another thread
                count += ours
                number = moments.get(str(count)) if ours else None
            if name == "write":
                number = next((words.pop(text) for text in list(words) if text in given[1]), number)
            if number == signal.SIGKILL and name == "write":
                function(given[0], given[1][: len(given[1]) // 2])
            if number is not None:
                os.kill(os.getpid(), number)
            result = function(*given, **named)
            if name == "open":
                (files.add if ours else files.discard)(result)
            return result
        return call
    for name in ("write", "fsync", "rename", "replace", "open", "mkdir", "unlink"):
        setattr(os, name, due(getattr(os, name), name))
    return lambda: count

for line in sys.stdin:
    task = json.loads(line)
    child = os.fork()
    if child == 0:
        out = os.open(task["output"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1), os.dup2(out, 2)
        # The signals a terminal sends; a process started by a test runner may have been told to ignore them.
        signal.signal(signal.SIGINT, signal.default_int_handler)
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        calls = watch(task["moments"], tuple(word for word in task["words"] if word.startswith("/")))
        try:
            main(task["words"])
        finally:
            number = calls()
            sys.stdout.flush(), sys.stderr.flush()
            with open(task["output"] + ".calls", "w") as file:
                file.write(str(number))
            os._exit(int(getattr(sys.exc_info()[1], "code", 1) or 0))
    print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)
'''


class Nursery:
    """Runs commands in processes of their own."""

    def __init__(self, folder: Path) -> None:
        self.output = folder / "output.txt"
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=ENVIRONMENT,
        )

    def __call__(self, *words: str, at: dict[str, signal.Signals] | None = None) -> int:
        """The status of a command; ``at`` names the system call, by number or by what is written,
        of each signal.
        """
        moments = {moment: int(number) for moment, number in (at or {}).items()}
        task = {"words": words, "output": str(self.output), "moments": moments}
        print(json.dumps(task), file=self.process.stdin, flush=True)
        return int(self.process.stdout.readline())

    @property
    def printed(self) -> str:
        return self.output.read_text()

    @property
    def num_calls(self) -> int:
        return int(Path(f"{self.output}.calls").read_text())


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nursery]:
    processes = Nursery(tmp_path_factory.mktemp("nursery"))
    with processes.process:
        yield processes
        processes.process.stdin.close()


# ── resume ────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("name", CASES)
def test_stopped_and_resumed_is_the_same_run(
    name: str, place: Path, uninterrupted: dict[str, Run], tmp_path: Path
) -> None:
    folder = loop.train(settings(place, tmp_path / "run", **CASES[name], stop_after=3))
    assert read_run(folder).summary is None and len(read_run(folder).steps) == 3
    loop.resume(folder, stop_after=5)
    loop.resume(folder)
    assert_same_run(read_run(folder), uninterrupted[name])
    kinds = []
    for e in read_run(folder).events:
        if e["severity"] == "note" and e["what"] not in ("note", "checkpoint"):
            kinds.append(e["what"])
    assert kinds == ["start", "stop", "resume", "stop", "resume", "finish"]


def test_gauges_go_on_and_fingerprints_have_a_row_for_each_start(
    place: Path, tmp_path: Path
) -> None:
    runs = []
    every = {"gauges_every": 2, "fingerprints_every": 2, "recipe": "bfloat16/word"}
    for name, stops in (("whole", [None]), ("parts", [3, 6, None])):
        folder = tmp_path / name
        loop.train(settings(place, folder, **every, stop_after=stops[0]))
        for stop in stops[1:]:
            loop.resume(folder, stop_after=stop)
        runs.append(read_run(folder))
    uninterrupted, parts = runs
    assert len(uninterrupted.gauges) > 2
    assert [lasting(row) for row in parts.gauges] == [lasting(row) for row in uninterrupted.gauges]
    steps = []
    for run in runs:
        steps.append([row["step"] for row in run.fingerprints])
    assert sorted(set(steps[1]) - set(steps[0])) == [3]
    assert len(steps[1]) == len(steps[0]) + 2


def test_a_killed_run_is_the_same(
    place: Path, uninterrupted: dict[str, Run], nursery: Nursery, tmp_path: Path
) -> None:
    name = "word, accumulated"
    config = settings(place, tmp_path / "counted", **CASES[name])
    assert nursery(*words_of(config)) == 0, nursery.printed
    assert_same_run(read_run(tmp_path / "counted"), uninterrupted[name])
    draw = random.Random(name)
    last = nursery.num_calls
    for moment in draw.sample(range(last // 4, last - 4), 3):
        folder = tmp_path / str(moment)
        command = words_of(replace(config, out=str(folder)))
        assert nursery(*command, at={str(moment): signal.SIGKILL}) == -signal.SIGKILL, (
            nursery.printed
        )
        if read_run(folder).summary is not None:
            continue
        again = nursery("resume", str(folder), at={str(draw.randrange(1, 40)): signal.SIGKILL})
        assert again in (0, -signal.SIGKILL), nursery.printed
        if again and read_run(folder).summary is None:
            assert nursery("resume", str(folder)) == 0, nursery.printed
        assert_same_run(read_run(folder), uninterrupted[name])


JITTERING = {
    "model_type": "phimoe", "vocab_size": 280, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_key_value_heads": 2, "max_position_embeddings": 64, "num_local_experts": 4,
    "router_jitter_noise": 0.5, "input_jitter_noise": 0.5,
}  # fmt: skip


def test_a_resumed_model_draws_the_same_random_numbers(place: Path, tmp_path: Path) -> None:
    (tmp_path / "jittering").mkdir()
    (tmp_path / "jittering" / "config.json").write_text(json.dumps(JITTERING))
    changes = {"model": str(tmp_path / "jittering"), "gradient_accumulation_steps": 2}
    uninterrupted = read_run(loop.train(settings(place, tmp_path / "whole", **changes)))
    torch.rand(3), random.random(), np.random.rand()
    folder = loop.train(settings(place, tmp_path / "stopped", **changes, stop_after=5))
    torch.rand(7)
    loop.resume(folder)
    assert_same_run(read_run(folder), uninterrupted)


# ── signals ───────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_an_interruption_saves_and_says_how_to_go_on(
    number: signal.Signals,
    place: Path,
    uninterrupted: dict[str, Run],
    nursery: Nursery,
    tmp_path: Path,
) -> None:
    name = "naive"
    folder = tmp_path / "run"
    config = settings(place, folder, **CASES[name], checkpoint_every=0)
    assert nursery(*words_of(config), at={'{"step":3,"loss"': number}) == (
        130 if number == signal.SIGINT else 143
    )
    lines = nursery.printed.splitlines()
    assert f"narrowgauge resume {folder}" in lines[-2] and lines[-1].startswith("Interrupted: ")
    assert sum("Stopping after this step" in line for line in lines) == 1
    run = read_run(folder)
    assert run.events[-1]["what"] == "stop" and len(run.steps) == 3
    assert os.listdir(folder / "checkpoints").count("step-00000003") == 1
    assert nursery("resume", str(folder)) == 0, nursery.printed
    assert_same_run(read_run(folder), uninterrupted[name])


def test_a_second_interruption_ends_at_once(place: Path, nursery: Nursery, tmp_path: Path) -> None:
    config = settings(place, tmp_path / "run", recipe="bfloat16/naive", checkpoint_every=0)
    at = {'{"step":3,"loss"': signal.SIGINT, "Ctrl-C again": signal.SIGINT}
    assert nursery(*words_of(config), at=at) == -signal.SIGINT
    assert "Traceback" not in nursery.printed
    assert not (tmp_path / "run" / "checkpoints").exists()
    assert len(read_run(tmp_path / "run").steps) == 2


def test_an_interruption_before_the_first_step_leaves_nothing(
    place: Path, nursery: Nursery, tmp_path: Path
) -> None:
    assert nursery(*words_of(settings(place, tmp_path / "run")), at={"8": signal.SIGINT}) == 130
    assert "Traceback" not in nursery.printed and not (tmp_path / "run").exists()


# ── damage ────────────────────────────────────────────────────────────────────────────────────────


def test_a_damaged_checkpoint_is_passed_over_and_named(
    place: Path, uninterrupted: dict[str, Run], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = "word, accumulated"
    folder = loop.train(settings(place, tmp_path / "run", **CASES[name], stop_after=4))
    flip_a_bit(
        folder / "checkpoints" / "step-00000004" / "shard-00001-model-00001-of-00001.safetensors"
    )
    capsys.readouterr()
    loop.resume(folder)
    output = capsys.readouterr().out
    assert "damaged checkpoint: step-00000004 is damaged" in output and "checksum" in output
    events = {e["what"]: e for e in read_run(folder).events}
    assert "step-00000004" in events["damaged-checkpoint"]["text"]
    assert events["resume"]["step"] == 2
    assert_same_run(read_run(folder), uninterrupted[name])


def flip_all(folder: Path) -> None:
    for state in folder.glob("checkpoints/*/state.json"):
        flip_a_bit(state)


def lose(folder: Path) -> None:
    shutil.rmtree(folder / "checkpoints")


def lose_and_edit(folder: Path) -> None:
    """Lose the checkpoints, and edit when the first was due."""
    lose(folder)
    record = load_toml((folder / "run.toml").read_text())
    record["config"]["checkpoint_every"] = 1000
    (folder / "run.toml").write_text(tomli_w.dumps(record))


def lose_and_leave_a_begun_one(folder: Path) -> None:
    """Lose the checkpoints, where a kill during a save has left an empty folder."""
    lose(folder)
    (folder / "checkpoints" / ".tmp-step-00000004").mkdir(parents=True)


def lose_with_its_events(folder: Path) -> None:
    """Lose the checkpoints and the events that tell of them."""
    lose(folder)
    (folder / "events.jsonl").unlink()


LOSSES = [flip_all, lose, lose_and_edit, lose_and_leave_a_begun_one, lose_with_its_events]


@pytest.fixture(scope="module")
def paused(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 3 of 8, never to be changed."""
    out = tmp_path_factory.mktemp("paused") / "run"
    return loop.train(settings(place, out, **CASES["naive"], stop_after=3))


@pytest.fixture
def stopped(paused: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(paused, tmp_path / "run"))


@pytest.mark.parametrize("fault", LOSSES)
def test_a_run_without_checkpoints_is_refused_and_trained_anew(
    fault: Any, stopped: Path, uninterrupted: dict[str, Run], tmp_path: Path
) -> None:
    fault(stopped)
    with pytest.raises(RecordError, match="no good checkpoint"):
        session.load(stopped)
    before = (stopped / "steps.jsonl").read_bytes()
    for words in (["resume", str(stopped)], ["train", "--out", str(stopped)]):
        refused = call(*words)
        assert refused.exit_code == 2
        assert f"train --config {stopped}/run.toml --out OTHER" in refused.stderr
        assert refused.stderr.count("\n") == 1
    assert (stopped / "steps.jsonl").read_bytes() == before
    if fault is lose:
        words = ["--config", str(stopped / "run.toml"), "--out", str(tmp_path / "anew")]
        assert call("train", *words, "--stop-after", "8").exit_code == 0
        assert_same_run(read_run(tmp_path / "anew"), uninterrupted["naive"])


def without_tables(text: bytes) -> bytes:
    """Cut a ``run.toml`` after its settings, where it is still valid."""
    return text[: text.index(b"\n[", text.index(b"[config]"))]


@pytest.mark.parametrize(
    "change",
    [lambda text: text[1:], lambda text: b"", without_tables, lambda text: text[:-40], None],
)
def test_a_run_goes_on_from_its_checkpoint_alone(
    change: Any, stopped: Path, uninterrupted: dict[str, Run]
) -> None:
    """Its run.toml is damaged, or gone: the checkpoint holds the same."""
    file = stopped / "run.toml"
    before = file.read_bytes()
    file.unlink()
    if change is not None:
        file.write_bytes(change(before))
    loop.resume(stopped)
    assert_same_run(read_run(stopped), uninterrupted["naive"])


def test_settings_that_end_too_early_are_refused_without_a_checkpoint(stopped: Path) -> None:
    lose(stopped)
    file = stopped / "run.toml"
    file.write_bytes(without_tables(file.read_bytes()))
    refused = call("resume", str(stopped))
    assert refused.exit_code == 2 and "run.toml is damaged: it ends too early" in refused.stderr


def test_its_command_begins_a_run_again_that_has_no_checkpoint_yet(
    place: Path, uninterrupted: dict[str, Run], nursery: Nursery, tmp_path: Path
) -> None:
    """As torchrun and Slurm give it again."""
    words = words_of(settings(place, tmp_path / "run", **CASES["naive"]))
    kill = {'{"step":1,"loss"': signal.SIGKILL}
    assert nursery(*words, at=kill) == -signal.SIGKILL, nursery.printed
    assert nursery(*words) == 0, nursery.printed
    assert_same_run(read_run(tmp_path / "run"), uninterrupted["naive"])


# ── a save that fails ─────────────────────────────────────────────────────────────────────────────


def test_a_failed_save_ends_the_run_at_the_next_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def has_ended(saver: Saver) -> bool:
        """Wait for the save, so that it ends before the next step does."""
        if saver._thread is not None:
            saver._thread.join()
        return saver._thread is not None

    monkeypatch.setattr(saving, "_publish", fail)
    monkeypatch.setattr(Saver, "has_ended", property(has_ended))
    config = settings(place, tmp_path / "run", **CASES["naive"], checkpoint_every=5)
    with pytest.raises(RecordError, match="the disk is full"):
        loop.train(config)
    run = read_run(tmp_path / "run")
    assert len(run.steps) == 6 and not [e for e in run.events if e["what"] == "checkpoint"]


def test_each_checkpoint_is_an_event_once_it_is_there(
    uninterrupted: dict[str, Run], tmp_path: Path
) -> None:
    for run in uninterrupted.values():
        steps = []
        for event in run.events:
            if event["what"] == "checkpoint":
                steps.append(event["step"])
        assert steps == [2, 4, 6, 8]
    run = uninterrupted["naive"]
    copy = Path(shutil.copytree(run.path, tmp_path / "run"))
    lines = (copy / "events.jsonl").read_text().splitlines(keepends=True)
    last = max(place for place, line in enumerate(lines) if '"checkpoint"' in line)
    (copy / "events.jsonl").write_text("".join(lines[:last]))
    (copy / "summary.json").unlink()  # as after a kill between a rename and its event
    loop.resume(copy)
    events = [(e["what"], e["step"]) for e in read_run(copy).events]
    assert events[-2:] == [("resume", 8), ("finish", 8)]
    (copy / "summary.json").unlink()
    lose(copy)  # the event of the resume says that there was one
    assert call("resume", str(copy)).exit_code == 2


# ── another machine ───────────────────────────────────────────────────────────────────────────────


def test_what_has_changed_since_the_run_began_is_told(
    stopped: Path, uninterrupted: dict[str, Run], capsys: pytest.CaptureFixture[str]
) -> None:
    record = load_toml((stopped / "run.toml").read_text())
    now = record["versions"]["torch"]
    record["versions"]["torch"] = "2.0.1"
    record["machine"] |= {"num_threads": 64, "capability": "ABACUS", "device": "NVIDIA H200"}
    (stopped / "run.toml").write_text(tomli_w.dumps(record))
    capsys.readouterr()
    loop.resume(stopped)
    notes = []
    for e in read_run(stopped).events:
        if e["what"] == "changed-software":
            notes.append(e["text"])
    ends = ": bits may differ from an uninterrupted run"
    assert notes[0] == f"the run started with torch 2.0.1 and resumes with {now}{ends}"
    assert len(notes) == 4 and "started with num_threads 64 and resumes with 1" in notes[2]
    assert "ABACUS" in notes[1] and "NVIDIA H200" in notes[3]
    lines = capsys.readouterr().out.splitlines()
    assert [line for line in lines if line.startswith("changed software: ")] == [
        f"changed software: {message}." for message in notes
    ]
    assert_same_run(read_run(stopped), uninterrupted["naive"])
