"""A run goes on as what it was begun as, or says what has changed: settings, rows, data, and who else is writing it."""

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
from trainer.tiny_runs import CASES, assert_same_run, call, settings, words_of

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = CASES["naive"]


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
    """What a resume that is refused says; it changes nothing."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = call("resume", str(folder), *words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), (
        result.exception
    )
    assert re.match("(Record|Data)Error: ", result.stderr)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return result.stderr


def test_a_setting_that_is_not_named_any_more_is_at_its_default(stopped: Path) -> None:
    edit(stopped, weight_decay=None, lr=None)
    loop.resume(stopped, stop_after=5)
    assert len(read_run(stopped).steps) == 5


def test_an_edited_setting_holds_from_there_on_and_is_told(stopped: Path) -> None:
    edit(stopped, lr=0.007, steps=6)
    assert call("resume", str(stopped)).exit_code == 0
    run = read_run(stopped)
    notes = [
        event["message"] for event in run.events if event["kind"] == "note" and event["step"] == 4
    ]
    assert notes == [
        "steps was 8 up to step 4 and is 6 from there on",
        "lr was 0.003 up to step 4 and is 0.007 from there on",
    ]
    assert len(run.steps) == 6 and run.steps[3]["lr"] < 0.003 and run.summary is not None
    state = json.loads((stopped / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert (state["settings"]["lr"], state["settings"]["steps"]) == (0.007, 6)


@pytest.mark.parametrize(
    ("edits", "words", "says"),
    [
        ({"seed": 7}, (), "seed 7, and the run began with"),
        ({"held_out": 0.4}, (), "held_out 0.4"),
        ({"sequence_length": 8}, (), "sequence_length 8"),
        ({"data": "/no/such"}, (), "no tokens.json is there"),
        ({"recipe": "bfloat16/exact"}, (), "exact"),
        ({}, ("--stop-after", "4"), "after step 4 because it has done 4 steps"),
    ],
)
def test_another_run_is_refused(
    stopped: Path, edits: dict[str, Any], words: tuple[str, ...], says: str
) -> None:
    edit(stopped, **edits)
    assert says in refused(stopped, *words)


def test_moved_folders_and_pauses_are_no_changes(place: Path, stopped: Path, finished: Run) -> None:
    tokens = shutil.copytree(place / "tokens", stopped.with_name("elsewhere"))
    moved = stopped.rename(stopped.with_name("moved"))
    edit(moved, out=str(moved), data=str(tokens), stop_after=None, verify_every=7)
    loop.resume(moved, stop_after=6)
    loop.resume(moved, stop_after=8)  # the last step, which is an end
    run = read_run(moved)
    assert_same_run(run, finished)
    assert not [event for event in run.events if event.get("detector") == "changed-settings"]


def changed_digit(first: bytes, *others: bytes) -> bytes:
    digit = first.index(b"loss") + 8
    return (
        first[:digit]
        + b"%d" % (9 - int(first[digit : digit + 1]))
        + first[digit + 1 :]
        + b"".join(others)
    )


@pytest.mark.parametrize(
    ("name", "change", "says"),
    [
        ("evals", lambda *rows: b"", "evals.jsonl is not as it was written"),
        ("evals", changed_digit, "evals.jsonl is not as it was written"),
        ("steps", changed_digit, "steps.jsonl is not as it was written"),
        (
            "steps",
            lambda *rows: rows[0] + rows[3],
            "from before its checkpoint of step 4: steps.jsonl lacks step 2",
        ),
    ],
)
def test_lost_and_changed_rows_are_refused(
    name: str, change: Any, says: str, stopped: Path
) -> None:
    file = stopped / f"{name}.jsonl"
    file.write_bytes(change(*file.read_bytes().splitlines(keepends=True)))
    assert says in refused(stopped)


def test_an_edited_interval_of_evaluations_holds_from_there_on(stopped: Path) -> None:
    edit(stopped, eval_every=2)
    loop.resume(stopped)
    assert [row["step"] for row in read_run(stopped).evals] == [3, 6, 8]


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
    folder, content = loop.train(config), (tokens / "tokens.bin").read_bytes()
    (tokens / "tokens.bin").write_bytes(content[2:] + content[:2])
    assert "are not those that it started with" in refused(folder)
    assert "are not those that it started with" in call(*words_of(config)).stderr
    (tokens / "tokens.bin").write_bytes(content)
    loop.resume(folder)
    assert_same_run(read_run(folder), finished)


def test_an_edited_batch_size_reads_on_where_the_run_was(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_batch, read = Dataset.batch, []

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
    true_open, told = loop.open_on_ranks, []

    def opened(*given: Any) -> Any:
        if not told:
            told.append(call("resume", str(stopped)).stderr)
        return true_open(*given)

    monkeypatch.setattr(loop, "open_on_ranks", opened)
    loop.resume(stopped, stop_after=5)
    assert told == [
        f"RecordError: Cannot write the run {stopped}: another process, or a recorder of this one that was not closed, is "
        "writing it. Close it, or wait until the process ends.\n"
    ]
