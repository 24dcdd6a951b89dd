"""A run goes on as what it was begun as, or says what has changed: settings, rows, data, and who
else is writing it.
"""

from __future__ import annotations

import json
import re
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from narrowgauge.runs.record import Run, read_run
from narrowgauge.spec.toml import load_toml
from narrowgauge.trainer import loop
from narrowgauge.trainer.data.dataset import Dataset
from trainer.tiny_runs import CASES, assert_same_run, bytes_of, call, lasting, settings, words_of

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = {**CASES["naive"], "gauges_every": 2}


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(loop.train(settings(place, tmp_path_factory.mktemp("whole") / "run", **CASE)))


@pytest.fixture(scope="module")
def paused(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 4 of 8, never to be changed."""
    return loop.train(
        settings(place, tmp_path_factory.mktemp("paused") / "run", **CASE, stop_after=4)
    )


@pytest.fixture
def stopped(paused: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(paused, tmp_path / "run"))


def edit(folder: Path, **changes: Any) -> None:
    record = load_toml((folder / "run.toml").read_text())
    record["config"] = {
        key: value for key, value in {**record["config"], **changes}.items() if value is not None
    }
    (folder / "run.toml").write_text(tomli_w.dumps(record))


def refused(folder: Path, *words: str) -> str:
    """What a command that is refused says, by default a resume; it changes nothing."""
    before = bytes_of(folder)
    result = call(*(words or ("resume", str(folder))))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), (
        result.exception
    )
    assert re.match("(Record|Data)Error: ", result.stderr)
    assert bytes_of(folder) == before
    return result.stderr


def test_a_setting_that_is_not_named_any_more_is_at_its_default(stopped: Path) -> None:
    edit(stopped, weight_decay=None, lr=None)
    loop.resume(stopped, stop_after=5)
    assert len(read_run(stopped).steps) == 5


def test_an_edited_setting_holds_from_there_on_and_is_told(stopped: Path) -> None:
    edit(stopped, lr=0.007, steps=6)
    assert call("resume", str(stopped)).exit_code == 0
    run = read_run(stopped)
    notes = []
    for event in run.events:
        if event["what"] == "changed-settings" and event["step"] == 4:
            notes.append(event["text"])
    assert notes == [
        "steps was 8 up to step 4 and is 6 from there on",
        "lr was 0.003 up to step 4 and is 0.007 from there on",
        "the learning rate was 1.65e-03 in step 4 and is 1.12e-03 in the next",
    ]
    assert len(run.steps) == 6 and run.steps[3]["lr"] < 0.003 and run.summary is not None
    state = json.loads((stopped / "checkpoints" / "step-00000006" / "state.json").read_text())
    saved = load_toml(state["run"])["config"]
    assert (saved["lr"], saved["steps"]) == (0.007, 6)


def changes_of(run: Run) -> list[str]:
    """Return what is told about changed settings, without the rate that follows from them."""
    return [e["text"] for e in run.events if e["text"].endswith(" from there on")]


DOORS = {
    "resume": lambda folder: ["resume", str(folder)],
    "train": lambda folder: ["train", "--out", str(folder)],
}


@pytest.mark.parametrize("door", DOORS)
def test_omitted_flags_change_nothing(door: str, stopped: Path, finished: Run) -> None:
    """A run of other settings than the defaults: rate, batch, intervals."""
    assert call(*DOORS[door](stopped)).exit_code == 0
    run = read_run(stopped)
    assert_same_run(run, finished)
    assert not changes_of(run) and run.config["lr"] == 0.003


GIVEN = {
    "steps": ("8", "9"), "lr": ("0.003", "0.007"), "weight_decay": ("0.1", "0.0"),
    "keep_checkpoints": ("2", "3"), "log_every": ("1", "2"), "warmup_steps": ("not set", "2"),
}  # fmt: skip


def test_flags_that_are_given_hold_from_there_on_and_are_told(stopped: Path) -> None:
    words = []
    told = []
    for name, (before, value) in GIVEN.items():
        words += [f"--{name.replace('_', '-')}", value]
        told.append(f"{name} was {before} up to step 4 and is {value} from there on")
    assert call("train", "--out", str(stopped), *words, "--stop-after", "5").exit_code == 0
    assert sorted(changes_of(read_run(stopped))) == sorted(told)
    assert call("resume", str(stopped)).exit_code == 0  # and hold in the next sitting
    run = read_run(stopped)
    assert sorted(changes_of(run)) == sorted(told)
    assert {name: str(run.config[name]) for name in GIVEN} == {n: v for n, (_, v) in GIVEN.items()}


OTHERS = {
    "--seed 7": "with seed = 7 because it began with 0",
    "--held-out 0.4": "with held_out = 0.4 because",
    "--sequence-length 8": "with sequence_length = 8 because",
    "--recipe bfloat16/exact": "with recipe = 'bfloat16/exact' because",
    "--model llama-1m": "with model = ",
    "--data /no/such": "no tokens.json is there",
    "--stop-after 4": "so early because it has done 4 steps",
}
"""Settings that make another run, and what is said."""


@pytest.mark.parametrize("words", OTHERS)
def test_another_run_is_refused(words: str, stopped: Path) -> None:
    assert OTHERS[words] in refused(stopped, "train", "--out", str(stopped), *words.split())


@pytest.mark.parametrize("is_edited", [False, True])
def test_a_finished_run_is_made_longer(is_edited: bool, finished: Run, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(finished.path, tmp_path / "run"))
    assert "is finished: 8 steps" in call("train", "--out", str(copy)).stdout
    assert "is finished: 8 steps" in call("resume", str(copy)).stdout
    refused_change = call("train", "--out", str(copy), "--lr", "0.01")
    assert refused_change.exit_code == 2 and "Cannot change lr" in refused_change.stderr
    too_short = call("train", "--out", str(copy), "--steps", "4")
    assert too_short.exit_code == 2 and "Cannot change steps" in too_short.stderr
    words = ["train", "--out", str(copy)]
    if is_edited:
        edit(copy, steps=11)
    else:
        words += ["--steps", "11"]
    assert call(*words).exit_code == 0
    run = read_run(copy)
    assert [row["step"] for row in run.steps] == list(range(1, 12))
    assert [lasting(row) for row in run.steps[:8]] == [lasting(row) for row in finished.steps]
    assert run.summary["steps"] == 11
    assert changes_of(run) == ["steps was 8 up to step 8 and is 11 from there on"]


def test_moved_folders_and_pauses_are_no_changes(place: Path, stopped: Path, finished: Run) -> None:
    tokens = shutil.copytree(place / "tokens", stopped.with_name("elsewhere"))
    moved = stopped.rename(stopped.with_name("moved"))
    edit(moved, out=str(moved), data=str(tokens), stop_after=None)
    loop.resume(moved, stop_after=6)
    loop.resume(moved, stop_after=8)  # the last step, which is an end
    run = read_run(moved)
    assert_same_run(run, finished)
    assert not [event for event in run.events if event["what"] == "changed-settings"]


def harm(folder: Path, name: str, change: Any) -> None:
    """Change the bytes of a file of rows."""
    file = folder / f"{name}.jsonl"
    file.write_bytes(change(file.read_bytes()))


ROW_FAULTS = {
    "a brace": ("steps", lambda text: text.replace(b'{"step":2', b'"step":2', 1), 1),
    "a later step": ("steps", lambda text: text.replace(b'"step":2', b'"step":7', 1), 1),
    "a step twice": ("steps", lambda text: text.replace(b'"step":3', b'"step":2', 1), 1),
    "two rows in one": ("steps", lambda text: text.replace(b"}\n", b"}J", 1), 2),
    "rows that are gone": ("steps", lambda text: b"".join(text.splitlines(keepends=True)[2:]), 2),
    "a name": ("evals", lambda text: text.replace(b'"val_loss"', b'"val_losq"', 1), 0),
    "an evaluation": ("evals", lambda text: text.replace(b'"val_loss"', b'"val_loss', 1), 0),
    "a gauge": ("gauges", lambda text: b"{" + text, 0),
    "an event": ("events", lambda text: text.replace(b'"what"', b'"whit"', 1), 0),
}


@pytest.mark.parametrize("fault", ROW_FAULTS)
def test_a_damaged_row_costs_that_row_and_is_told(
    fault: str, place: Path, stopped: Path, finished: Run
) -> None:
    name, change, num_lost = ROW_FAULTS[fault]
    harm(stopped, name, change)
    result = call("resume", str(stopped))
    assert result.exit_code == 0, result.stderr
    assert f"note: {name}.jsonl " in result.stdout, result.stdout
    run = read_run(stopped)
    assert run.summary["weights_fingerprint"] == finished.summary["weights_fingerprint"]
    rows = [lasting(row) for row in run.steps]
    expected = [lasting(row) for row in finished.steps]
    assert len(rows) == len(expected) - num_lost and all(row in expected for row in rows)
    assert not run.notes and len(run.gauges) + 1 >= len(finished.gauges)


@pytest.mark.parametrize("name", ["steps", "evals", "gauges"])
def test_a_lost_file_of_rows_is_told_and_changes_no_later_row(
    name: str, place: Path, stopped: Path, finished: Run
) -> None:
    (stopped / f"{name}.jsonl").unlink()
    result = call("resume", str(stopped))
    assert result.exit_code == 0 and f"note: {name}.jsonl lacks " in result.stdout, result.stdout
    run = read_run(stopped)
    assert run.summary["weights_fingerprint"] == finished.summary["weights_fingerprint"]
    for kind in ("steps", "evals"):
        expected = [lasting(row) for row in getattr(finished, kind)]
        assert all(lasting(row) in expected for row in getattr(run, kind))


def test_a_damaged_summary_is_made_again(finished: Run, tmp_path: Path) -> None:
    copy = Path(shutil.copytree(finished.path, tmp_path / "run"))
    (copy / "summary.json").write_text("{")
    assert "summary.json is damaged" in call("diagnose", str(copy)).stderr
    loop.resume(copy)
    assert_same_run(read_run(copy), finished)


def test_a_model_that_has_another_shape_since_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "model", tmp_path / "model")
    config = replace(
        settings(place, tmp_path / "run", **CASE, stop_after=2), model=str(tmp_path / "model")
    )
    folder = loop.train(config)
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**shape, "intermediate_size": 32}))
    assert "of shape (32, 16) (it is (24, 16) there)" in refused(folder)


def test_other_tokens_are_refused(place: Path, finished: Run, tmp_path: Path) -> None:
    tokens = Path(shutil.copytree(place / "tokens", tmp_path / "tokens"))
    config = replace(settings(place, tmp_path / "run", **CASE, stop_after=2), data=str(tokens))
    folder = loop.train(config)
    content = (tokens / "tokens.bin").read_bytes()
    (tokens / "tokens.bin").write_bytes(content[2:] + content[:2])
    assert "are not those that it started with" in refused(folder)
    assert "are not those that it started with" in call(*words_of(config)).stderr
    (tokens / "tokens.bin").write_bytes(content)
    loop.resume(folder)
    assert_same_run(read_run(folder), finished)


def test_an_edited_batch_size_reads_on_where_the_run_was(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_batch = Dataset.batch
    read = []

    def batch(self: Dataset, first: int, number: int, *more: int) -> Any:
        read.append((first, number))
        return true_batch(self, first, number, *more)

    monkeypatch.setattr(Dataset, "batch", batch)
    edit(stopped, batch_size=2)
    loop.resume(stopped, stop_after=6)
    edit(stopped, batch_size=4)
    loop.resume(stopped, stop_after=7)
    assert read == [(16, 2), (18, 2), (20, 4)]


def test_a_second_resume_at_once_is_refused(stopped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    true_step = loop.train_step
    messages = []

    def step(*arguments: Any) -> Any:
        if not messages:
            messages.append(call("resume", str(stopped)).stderr)
        return true_step(*arguments)

    monkeypatch.setattr(loop, "train_step", step)
    loop.resume(stopped, stop_after=5)
    assert messages == [
        f"RecordError: Cannot write the run {stopped}: another process, or a recorder of this one "
        "that was not closed, is "
        "writing it. Close it, or wait until the process ends.\n"
    ]
