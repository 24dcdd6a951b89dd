"""A run goes on as what it was begun as, or says what has changed: settings, rows, data, and who else is writing it."""

from __future__ import annotations

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import tomli_w

from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import digest
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import exporting, loop
from narrowgauge.trainer.data.dataset import open_data
from trainer.tiny_runs import CASES, assert_same_run, call, settings, words_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

pytestmark = pytest.mark.usefixtures("one_thread")
CASE = CASES["naive"]


@pytest.fixture(scope="module")
def finished(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Run:
    return read_run(loop.train(settings(place, tmp_path_factory.mktemp("whole") / "run", **CASE)))


@pytest.fixture(scope="module")
def paused(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was stopped after step 4 of 8, never to be changed."""
    return loop.train(settings(place, tmp_path_factory.mktemp("paused") / "run", **CASE, stop_after=4))


@pytest.fixture
def stopped(paused: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(paused, tmp_path / "run"))


def edit(folder: Path, **changes: Any) -> None:
    record = tomllib.loads((folder / "run.toml").read_text())
    record["config"] = {key: value for key, value in {**record["config"], **changes}.items() if value is not None}
    (folder / "run.toml").write_text(tomli_w.dumps(record))


def refused(folder: Path, *words: str) -> str:
    """What a resume that is refused says; it changes nothing."""
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    result = call("resume", str(folder), *words)
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.exception
    assert result.stderr.startswith("RecordError: ")
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before
    return result.stderr


# ── settings ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"lr": 0.007}, "lr is 0.007, and the run started with 0.003"),
        ({"seed": 1}, "seed is 1, and the run started with 0"),
        ({"steps": 60}, "steps is 60, and the run started with 8"),
        ({"weight_decay": None}, None),  # it was at its default
        (
            {"beta1": 0.8, "schedule": "linear"},
            "schedule is 'linear', and the run started with 'cosine'; beta1 is 0.8",
        ),
        (
            {"recipe": "bfloat16/stochastic"},
            "recipe is 'bfloat16/stochastic', and the run started with 'bfloat16/naive'",
        ),
        ({"lr": None}, "lr is 0.003, and"),
    ],
)
def test_a_changed_setting_is_an_error_that_names_it(changes: dict[str, Any], says: str | None, stopped: Path) -> None:
    edit(stopped, **changes)
    if says is None or changes == {"lr": None}:
        loop.resume(stopped, stop_after=5)
        return
    told = refused(stopped)
    assert f"{stopped / 'run.toml'} was changed: " in told and says in told
    assert f"narrowgauge resume {stopped} --accept-changes" in told


def test_before_the_first_checkpoint_the_first_row_says_what_the_settings_were(stopped: Path) -> None:
    shutil.rmtree(stopped / "checkpoints")
    edit(stopped, seed=1)
    assert "seed is 1, and the run started with 0" in refused(stopped)


def test_a_change_that_is_meant_goes_on_and_is_told(stopped: Path) -> None:
    edit(stopped, lr=0.007, steps=6)
    assert call("resume", str(stopped), "--accept-changes").exit_code == 0
    run = read_run(stopped)
    notes = [event["message"] for event in run.events if event["kind"] == "note" and event["step"] == 4]
    assert notes == [
        "steps was 8 up to step 4 and is 6 from there on",
        "lr was 0.003 up to step 4 and is 0.007 from there on",
    ]
    assert len(run.steps) == 6 and run.steps[3]["lr"] < 0.003 and run.summary is not None
    state = json.loads((stopped / "checkpoints" / "step-00000006" / "state.json").read_text())
    assert (state["settings"]["lr"], state["settings"]["steps"]) == (0.007, 6)


def test_where_a_run_lies_and_where_it_pauses_are_no_changes(stopped: Path, finished: Run) -> None:
    moved = stopped.rename(stopped.with_name("moved"))
    edit(moved, out=str(moved), stop_after=None)
    loop.resume(moved, stop_after=6)
    loop.resume(moved)
    assert_same_run(read_run(moved), finished)


def test_a_run_of_an_older_version_goes_on_as_ever(stopped: Path, finished: Run) -> None:
    """Without checksums, settings in its rows and checkpoints, and with its old fingerprint of the data."""
    record = tomllib.loads((stopped / "run.toml").read_text())
    head = json.loads((stopped / "data" / "data.json").read_text())
    (stopped / "data" / "data.json").write_text(json.dumps({**head, "schema_version": 1}, indent=1))
    record["data"]["fingerprint"] = open_data(stopped).fingerprint
    (stopped / "run.toml").write_text(tomli_w.dumps({**record, "schema_version": 1}))
    for file in stopped.glob("*.jsonl"):
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        plain = [{key: value for key, value in row.items() if key not in ("crc32", "settings")} for row in rows]
        file.write_text("".join(json.dumps(row, separators=(",", ":")) + "\n" for row in plain))
    for checkpoint in (stopped / "checkpoints").glob("step-*"):
        state = json.loads((checkpoint / "state.json").read_text())
        kept = {key: value for key, value in state.items() if key not in ("settings", "rows")}
        (checkpoint / "state.json").write_text(json.dumps(kept, indent=1))
        manifest = json.loads((checkpoint / "manifest.json").read_text())
        file = checkpoint / "state.json"
        manifest["files"]["state.json"] = {"bytes": file.stat().st_size, "blake2b": digest(file)}
        (checkpoint / "manifest.json").write_text(json.dumps(manifest, indent=1))
    shutil.copytree(stopped, stopped.with_name("without data"))
    loop.resume(stopped)
    assert_same_run(read_run(stopped), finished)
    # Its data, made again, have the new fingerprint and are the same tokens.
    shutil.rmtree(stopped.with_name("without data") / "data")
    loop.resume(stopped.with_name("without data"), stop_after=5)


# ── rows ────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_lost_rows_are_refused_and_going_on_without_them_is_told(stopped: Path) -> None:
    lines = (stopped / "steps.jsonl").read_bytes().splitlines(keepends=True)
    (stopped / "steps.jsonl").write_bytes(lines[0] + lines[3])
    (stopped / "evals.jsonl").unlink()
    told = refused(stopped)
    assert "lost rows from before its checkpoint of step 4" in told
    assert "steps.jsonl lacks steps 2 to 3; evals.jsonl holds 0 of the 1 rows up to step 4" in told
    loop.resume(stopped, accept_changes=True)
    run = read_run(stopped)
    assert [row["step"] for row in run.steps] == [1, 4, 5, 6, 7, 8]
    assert "steps.jsonl lacks steps 2 to 3" in [event["message"] for event in run.events]


def test_a_flipped_bit_in_a_step_number_costs_no_row(stopped: Path) -> None:
    data = (stopped / "steps.jsonl").read_bytes()
    (stopped / "steps.jsonl").write_bytes(data.replace(b'{"step":2,', b'{"step":6,'))
    assert "steps.jsonl is damaged: line 2 of 4 is not a row (it does not match its checksum)" in refused(stopped)


def test_a_damaged_last_row_is_refused_too(stopped: Path) -> None:
    data = (stopped / "steps.jsonl").read_bytes()
    (stopped / "steps.jsonl").write_bytes(data.replace(b'{"step":4,', b'{"step":5,'))
    assert "steps.jsonl is damaged: line 4 of 4 is not a row (it does not match its checksum)" in refused(stopped)


# ── data and models ─────────────────────────────────────────────────────────────────────────────────────────────────


def without(key: str) -> Any:
    return lambda head: {name: value for name, value in head.items() if name != key}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        *(
            (without(key), f"data.json lacks '{key}'")
            for key in ("vocab_size", "end_of_text", "dtype", "files", "notes")
        ),
        (lambda head: {**head, "vocab_size": 300}, "not those the run started with"),
        (lambda head: {**head, "end_of_text": 7}, "not those the run started with"),
        (lambda head: {**head, "dtype": "uint32"}, "the run"),
        (lambda head: {**head, "schema_version": 1}, "not those the run started with"),
        (lambda head: {**head, "dtype": "float64"}, "dtype = 'float64'; tokens are uint16 or uint32"),
        (lambda head: {**head, "vocab_size": "many"}, "vocab_size = 'many'"),
        (lambda head: {**head, "schema_version": float("inf")}, "schema_version = inf"),
        (lambda head: {**head, "schema_version": None}, "schema_version = None"),
        (lambda head: {**head, "request": {}}, "lacks 'held_out'"),
        (lambda head: {**head, "files": {}}, "lacks 'train.bin'"),
        (lambda head: {**head, "files": {"train.bin": {"bytes": None}, "valid.bin": 3}}, "Cannot use the data"),
        (
            lambda head: {**head, "files": {name: {**said, "bytes": None} for name, said in head["files"].items()}},
            "does not match its checksum",
        ),
        (lambda head: [head], "not an object"),
    ],
)
def test_a_changed_head_of_the_data_is_refused_in_one_line(change: Any, says: str, stopped: Path) -> None:
    file = stopped / "data" / "data.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))
    assert says in refused(stopped)
    exported = call("export", str(stopped), str(stopped.with_name("out")))
    assert (exported.exit_code, exported.stderr.count("\n")) == (2, 1) and says in exported.stderr, exported.exception


NESTED = "[" * 100_000 + "]" * 100_000


@pytest.mark.parametrize(
    "name", ["run.toml", "data/data.json", "checkpoints/step-00000004/manifest.json", "steps.jsonl"]
)
def test_brackets_nested_too_deep_are_damage(name: str, stopped: Path) -> None:
    (stopped / name).write_text(f"a = {NESTED}" if name == "run.toml" else f'{{"schema_version": {NESTED}}}\n' * 2)
    if "manifest" in name:
        loop.resume(stopped, stop_after=6)
        assert "step-00000004 is damaged (its manifest.json is damaged" in str(read_run(stopped).events)
    else:
        assert "maximum recursion depth exceeded" in refused(stopped)


@pytest.mark.parametrize("command", [("train", "--config"), ("train", "--recipe"), ("show", "recipe")])
def test_so_are_those_in_a_file_of_settings(command: tuple[str, ...], tmp_path: Path) -> None:
    (tmp_path / "deep.toml").write_text(f"a = {NESTED}")
    result = call(*command, str(tmp_path / "deep.toml"))
    assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1), result.exception
    assert "cannot be read: maximum recursion depth exceeded" in result.stderr


@pytest.mark.parametrize("value", [None, "12", 1.5, [], True])
def test_a_manifest_whose_sizes_are_no_numbers_is_damage(value: Any, stopped: Path) -> None:
    file = stopped / "checkpoints" / "step-00000004" / "manifest.json"
    manifest = json.loads(file.read_text())
    manifest["files"]["state.json"]["bytes"] = value
    file.write_text(json.dumps(manifest))
    loop.resume(stopped, stop_after=6)
    told = next(event["message"] for event in read_run(stopped).events if event["kind"] == "checkpoint_damaged")
    assert "its manifest.json is damaged (sizes must be integers" in told


def test_a_model_that_has_another_shape_since_is_refused(place: Path, tmp_path: Path) -> None:
    shutil.copytree(place / "model", tmp_path / "model")
    config = replace(settings(place, tmp_path / "run", **CASE, stop_after=2), model=str(tmp_path / "model"))
    folder = loop.train(config)
    shape = json.loads((tmp_path / "model" / "config.json").read_text())
    (tmp_path / "model" / "config.json").write_text(json.dumps({**shape, "intermediate_size": 32}))
    assert "of shape (32, 16) (it is (24, 16) there)" in refused(folder)


# ── two at once ─────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_second_train_in_the_same_folder_is_refused_while_the_first_prepares(
    place: Path, finished: Run, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    config, told = settings(place, tmp_path / "run", **CASE), []
    true_prepared, true_build = loop._prepared_data, loop.build

    def meanwhile() -> None:
        result = call(*words_of(replace(config, seed=1)))
        assert (result.exit_code, result.stdout, result.stderr.count("\n")) == (2, "", 1)
        told.append(result.stderr)

    def prepared(*given: Any) -> Any:
        meanwhile()
        return true_prepared(*given)

    def build(*given: Any) -> Any:
        meanwhile()
        return true_build(*given)

    monkeypatch.setattr(loop, "_prepared_data", prepared)
    monkeypatch.setattr(loop, "build", build)
    loop.train(config)
    assert "another process is writing it" in told[0] and "is writing it" in told[1]
    assert read_run(tmp_path / "run").config["seed"] == 0
    assert_same_run(read_run(tmp_path / "run"), finished)


def test_a_second_resume_is_refused_before_it_reads_what_the_first_writes(
    stopped: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    true_open, told = loop.open_data, []

    def opened(folder: Path) -> Any:
        if not told:
            told.append(call("resume", str(folder)).stderr)
        return true_open(folder)

    monkeypatch.setattr(loop, "open_data", opened)
    loop.resume(stopped, stop_after=5)
    assert told == [
        f"RecordError: Cannot write the run {stopped}: another process is writing it. Wait until it ends, or stop it, then "
        "narrowgauge resume.\n"
    ]


def test_the_same_command_goes_on_where_one_was_killed_while_it_made_the_run(
    place: Path, finished: Run, tmp_path: Path
) -> None:
    folder = tmp_path / "run"
    (folder / ".tmp-data-4711").mkdir(parents=True)
    (folder / ".tmp-data-4711" / "train.bin").touch()
    for name in ("steps.jsonl", "evals.jsonl", ".tmp-run.toml-4711"):
        (folder / name).touch()
    assert call(*words_of(settings(place, folder, **CASE))).exit_code == 0
    assert_same_run(read_run(folder), finished)
    assert not list(folder.glob(".tmp-*"))


def test_an_export_of_changed_data_is_refused(stopped: Path, tmp_path: Path) -> None:
    exporting.export(stopped, tmp_path / "good")
    record = tomllib.loads((stopped / "run.toml").read_text())
    record["data"]["fingerprint"] = "0" * 32
    (stopped / "run.toml").write_text(tomli_w.dumps(record))
    with pytest.raises(RecordError, match="not those the run started with"):
        exporting.export(stopped, tmp_path / "out")
