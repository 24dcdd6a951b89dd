"""What a path holds decides: each command takes what it can use, and changes nothing else."""

import json
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.report.publishing import read_runs
from narrowgauge.runs.paths import lock, only_run
from narrowgauge.runs.writer import Record
from narrowgauge.trainer.tokens import load_tokenizer, write_tokens
from text.refusals import refused
from trainer.tiny_runs import bytes_of, call


def run_at(folder: Path) -> Path:
    """A run of one step."""
    with Record.create(folder, {"config": {"recipe": "bfloat16/word"}}) as writer:
        writer.append("steps", {"step": 1, "loss": 2.5})
    return folder


def tokens_at(folder: Path) -> Path:
    return write_tokens(["text " * 99], load_tokenizer(None), folder)


def file_at(path: Path) -> Path:
    path.write_text("mine")
    return path


def pages_at(folder: Path) -> Path:
    """Files of a user with the names of ours."""
    folder.mkdir()
    (folder / "report.html").write_text("<html>mine")
    (folder / "compare.json").write_text(json.dumps({"my": 1}))
    return folder


def runs_at(folder: Path) -> Path:
    """A folder with a run, and a file that is not ours."""
    folder.mkdir()
    run_at(folder / "first")
    file_at(folder / "thesis.tex")
    return folder


def log_at(folder: Path) -> Path:
    folder.mkdir()
    rows = [{"step": 1, "loss": 2.0}]
    (folder / "trainer_state.json").write_text(json.dumps({"log_history": rows}))
    return folder


HOLD = {
    "a file": file_at, "a run": run_at,
    "tokens": tokens_at, "pages of another program": pages_at, "runs and a file": runs_at, "a log": log_at,
}  # fmt: skip
"""What a user may name by mistake."""
TRAIN = "--model llama-1m --steps 1 --batch-size 1 --sequence-length 8"
WRITE = {
    "train": f"train {TRAIN} --data tokens --out PLACE",
    "compare": f"compare --recipes bfloat16/word {TRAIN} --data tokens --out PLACE",
    "report": "report first --out PLACE",
    "tokenize": "tokenize text.txt PLACE",
    "export": "export first PLACE",
}


OVERWRITES_NOTHING = {
    "compare": ("tokens", "a log", "runs and a file"),
    "tokenize": HOLD.keys() - {"a file", "tokens"},
}


@pytest.mark.parametrize("held", HOLD)
@pytest.mark.parametrize("command", WRITE)
def test_what_is_not_ours_to_write_is_refused_and_unchanged(command, held, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    file_at(tmp_path / "text.txt")
    tokens_at(tmp_path / "tokens")
    run_at(tmp_path / "first")
    place = HOLD[held](tmp_path / "place")
    if held in OVERWRITES_NOTHING.get(command, ()):
        pytest.skip("the command overwrites nothing there")
    if place.is_dir():
        lock(place)  # another process writes there
    before = bytes_of(tmp_path)
    result = call(*WRITE[command].replace("PLACE", "place").split())
    assert (result.exit_code, result.stderr.count("\n")) == (2, 1), result.output
    assert bytes_of(tmp_path) == before


def test_a_page_of_ours_is_replaced_and_no_other(tmp_path):
    run = run_at(tmp_path / "run")
    assert call("report", str(run)).exit_code == 0
    first = (run / "report.html").read_bytes()
    assert call("report", str(run)).exit_code == 0
    assert (run / "report.html").read_bytes() == first
    quoting = b"mine " * 1000 + first
    (run / "report.html").write_bytes(quoting)
    assert call("report", str(run)).exit_code == 2
    assert (run / "report.html").read_bytes() == quoting
    file_at(run / "report.html")
    assert call("report", str(run)).exit_code == 2
    assert (run / "report.html").read_text() == "mine"


def test_a_damaged_run_of_a_folder_is_left_out_in_one_line(tmp_path):
    first, second = run_at(tmp_path / "first"), run_at(tmp_path / "second")
    (second / "run.toml").write_text("schema_version = ")
    with pytest.warns(UserWarning, match="^second is left out: .*damaged.*$"):
        assert [run.path for run in read_runs([tmp_path])] == [first]
    with refused("a damaged run"):
        read_runs([first, second])
    (first / "run.toml").write_bytes((second / "run.toml").read_bytes())
    with pytest.warns(UserWarning), refused("a damaged run"):
        read_runs([tmp_path])


def test_our_record_wins_over_a_log_beside_it(tmp_path):
    """As a Trainer leaves them: a log, others in its checkpoints, a record of the callback."""
    out = log_at(tmp_path / "out")
    log_at(out / "checkpoint-8")
    assert only_run(out) == out and ng.read_run(out).is_foreign
    record = run_at(out / "narrowgauge")
    run_at(tmp_path / "second")
    for name in ("trainer_state.json", "nothing"):
        assert only_run(out) == record and not ng.read_run(out).is_foreign
        (out / name).unlink(missing_ok=True)
    with refused("two runs"):
        ng.read_run(run_at(tmp_path / "first").parent)
