"""The run folder: rows come back as written, and no crash, full disk or second writer spoils what is there."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

import narrowgauge.runs.atomic_io
from narrowgauge.errors import RecordError
from narrowgauge.runs.atomic_io import write_whole
from narrowgauge.runs.events import KINDS, Event
from narrowgauge.runs.record import Run, read_run
from narrowgauge.runs.schema import VERSION
from narrowgauge.runs.writer import RunWriter

RUN = {"recipe": "bfloat16/word", "lr": 1e-3, "eval_every": None, "versions": {"torch": "2.13.0"}, "out": Path("a")}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run with four steps, two evaluations, one event and a summary."""
    path = tmp_path / "run"
    with RunWriter.create(path, RUN) as writer:
        for step in range(1, 5):
            writer.step({"step": step, "loss": 1 / step})
        for step in (2, 4):
            writer.eval({"step": step, "val_loss": 3.0})
        writer.event(Event("start", 0, "begun"))
        writer.summary({"steps": 4, "val_loss": float("inf")})
    return path


def test_everything_comes_back(folder: Path) -> None:
    run = read_run(folder)
    assert run.run == {
        "schema_version": VERSION,
        "recipe": "bfloat16/word",
        "lr": 1e-3,
        "versions": {"torch": "2.13.0"},
        "out": "a",
    }
    assert run.steps == [{"step": step, "loss": 1 / step} for step in range(1, 5)]
    assert [row["step"] for row in run.evals] == [2, 4]
    assert [Event.from_row(row) for row in run.events] == [Event("start", 0, "begun")]
    assert run.summary == {"schema_version": VERSION, "steps": 4, "val_loss": math.inf}


def test_not_finite_values_are_valid_json_and_come_back_as_floats(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", RUN) as writer:
        writer.step({"step": 1, "loss": math.nan, "audit": {"edq": [-math.inf, 0.5]}})
        writer.event(Event("divergence", 1, "inf", tensor="nan", value=math.inf))
    line = (tmp_path / "run" / "steps.jsonl").read_text()
    assert json.loads(line)["loss"] == "nan"
    run = read_run(tmp_path / "run")
    assert math.isnan(run.steps[0]["loss"])
    assert run.steps[0]["audit"] == {"edq": [-math.inf, 0.5]}
    assert Event.from_row(run.events[0]) == Event("divergence", 1, "inf", tensor="nan", value=math.inf)


def test_every_float_comes_back_exactly(tmp_path: Path) -> None:
    values = [0.1, 1e-320, 2**-1074, 1.7976931348623157e308, -0.0, 1 / 3]
    with RunWriter.create(tmp_path / "run", RUN) as writer:
        writer.step({"step": 1, "values": values})
    assert [value.hex() for value in read_run(tmp_path / "run").steps[0]["values"]] == [v.hex() for v in values]


@pytest.mark.parametrize("torn", [b'{"step":5,"lo', b'{"step":5}', b"\0" * 40])
def test_a_torn_last_line_is_dropped_and_cut_off(folder: Path, torn: bytes) -> None:
    with (folder / "steps.jsonl").open("ab") as stream:
        stream.write(torn)
    assert len(read_run(folder).steps) == 4
    with RunWriter.open(folder) as writer:
        writer.step({"step": 5, "loss": 0.0})
    assert [row["step"] for row in read_run(folder).steps] == [1, 2, 3, 4, 5]


def test_every_cut_of_the_file_leaves_the_whole_lines_before_it(folder: Path) -> None:
    data = (folder / "steps.jsonl").read_bytes()
    for length in range(len(data)):
        (folder / "steps.jsonl").write_bytes(data[:length])
        assert len(read_run(folder).steps) == data[:length].count(b"\n")


def test_a_damaged_line_in_the_middle_is_refused(folder: Path) -> None:
    data = (folder / "steps.jsonl").read_bytes()
    (folder / "steps.jsonl").write_bytes(data.replace(b'{"step":2', b'{"step:2'))
    with pytest.raises(RecordError, match=r"steps\.jsonl is damaged: line 2 of 4"):
        read_run(folder)


@pytest.mark.parametrize("line", [b"{]\n", b"5\n", b"\0" * 40 + b"\n"])
def test_a_damaged_line_at_the_end_is_refused_too(line: bytes, folder: Path) -> None:
    with (folder / "steps.jsonl").open("ab") as stream:
        stream.write(line)
    for read in (read_run, RunWriter.open):
        with pytest.raises(RecordError, match=r"steps\.jsonl is damaged: line 5 of 5"):
            read(folder)


def test_rewind_forgets_steps_and_evals_and_keeps_events(folder: Path) -> None:
    with RunWriter.open(folder) as writer:
        writer.rewind(3)
        writer.step({"step": 4, "loss": 9.0})
    run = read_run(folder)
    assert [(row["step"], row["loss"]) for row in run.steps] == [(1, 1.0), (2, 0.5), (3, 1 / 3), (4, 9.0)]
    assert [row["step"] for row in run.evals] == [2]
    assert len(run.events) == 1
    assert run.summary is None


def test_rewind_to_the_end_changes_nothing(folder: Path) -> None:
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with RunWriter.open(folder) as writer:
        writer.rewind(4)
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_an_existing_run_folder_or_file_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="a run is there already") as caught:
        RunWriter.create(folder, RUN)
    assert f"narrowgauge resume {folder}" in caught.value.advice
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "thesis.tex").touch()
    with pytest.raises(RecordError, match=r"not empty \(it holds thesis\.tex\)"):
        RunWriter.create(tmp_path / "other", RUN)
    with pytest.raises(RecordError, match="it is a file"):
        RunWriter.create(folder / "run.toml", RUN)


def test_what_the_caller_put_there_may_be_there(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    RunWriter.create(tmp_path, RUN, beside=("data",)).close()
    assert read_run(tmp_path).steps == []


def test_a_missing_damaged_or_newer_run_is_refused(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="there is no such folder"):
        read_run(tmp_path / "nowhere")
    with pytest.raises(RecordError, match=r"the folder has no run\.toml"):
        RunWriter.open(tmp_path)
    (folder / "run.toml").write_text(f"schema_version = {VERSION + 1}\n")
    with pytest.raises(RecordError, match=f"schema {VERSION + 1}; this version reads up to {VERSION}"):
        read_run(folder)
    (folder / "run.toml").write_text("schema_version = ")
    with pytest.raises(RecordError, match=r"run\.toml is damaged"):
        read_run(folder)
    (folder / "run.toml").write_text("recipe = 'a'")
    with pytest.raises(RecordError, match=r"run\.toml is damaged"):
        read_run(folder)


def test_a_second_writer_is_refused_while_the_first_lives(folder: Path) -> None:
    with RunWriter.open(folder):
        with pytest.raises(RecordError, match="another process is writing it"):
            RunWriter.open(folder)
        assert len(read_run(folder).steps) == 4
    RunWriter.open(folder).close()


def test_a_full_disk_leaves_whole_rows_and_a_clear_word(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real_write = os.write
    room = 10

    def write(descriptor: int, data: bytes) -> int:
        nonlocal room
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        taken = real_write(descriptor, data[:room])
        room -= taken
        return taken

    before = (folder / "steps.jsonl").read_bytes()
    with RunWriter.open(folder) as writer:
        monkeypatch.setattr(narrowgauge.runs.atomic_io.os, "write", write)
        with pytest.raises(RecordError, match=r"steps\.jsonl: the disk is full \([\d,]+ bytes free\)"):
            writer.step({"step": 5, "loss": 0.0})
    assert (folder / "steps.jsonl").read_bytes() == before


def test_a_whole_file_survives_a_failed_replacement(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    monkeypatch.setattr(narrowgauge.runs.atomic_io.os, "fsync", refuse)
    with pytest.raises(RecordError, match="the disk is full"):
        write_whole(folder / "summary.json", b"half")
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


WRITER = """
import os, signal, sys
from narrowgauge.runs.writer import RunWriter
with RunWriter.open(sys.argv[1]) as writer:
    for step in range(5, 1000):
        writer.step({"step": step, "loss": 0.0})
        if step == 700:
            os.kill(os.getpid(), signal.SIGKILL)
"""


def test_rows_and_lock_after_kill_9(folder: Path) -> None:
    source = str(Path(narrowgauge.runs.atomic_io.__file__).parents[2])
    done = subprocess.run([sys.executable, "-c", WRITER, str(folder)], env={**os.environ, "PYTHONPATH": source})
    assert done.returncode == -9
    assert [row["step"] for row in read_run(folder).steps] == list(range(1, 701))
    RunWriter.open(folder).close()


def test_an_unknown_event_kind_is_refused() -> None:
    assert "warning" in KINDS
    with pytest.raises(ValueError, match="Did you mean 'warning'"):
        Event("warnin", 1, "")


def test_numbers_of_other_libraries_are_written(tmp_path: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with RunWriter.create(tmp_path / "run", RUN) as writer:
        writer.step({"step": numpy.int64(1), "loss": numpy.float32(0.5), "norm": numpy.float32("nan")})
    row = read_run(tmp_path / "run").steps[0]
    assert (row["step"], row["loss"], math.isnan(row["norm"])) == (1, 0.5, True)


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ({}, r"no table \[config\]"),
        ({"config": 1, "data": {"fingerprint": "a"}}, "'config' is not a table"),
        ({"config": {}}, r"no table \[data\]"),
        ({"config": {}, "data": 1}, "'data' is not a table"),
        ({"config": {}, "data": {}}, r"\[data\] holds no fingerprint"),
        ({"config": {}, "data": {"fingerprint": 1}}, r"\[data\] holds the fingerprint 1"),
    ],
)
def test_what_a_resume_needs_is_there_or_the_record_is_damaged(
    run: dict[str, object], expected: str, tmp_path: Path
) -> None:
    RunWriter.create(tmp_path / "run", run).close()
    with pytest.raises(RecordError, match=rf"run\.toml is damaged: .*{expected}"):
        print(read_run(tmp_path / "run").config, read_run(tmp_path / "run").data_fingerprint)


@pytest.mark.parametrize(
    ("name", "line", "expected"),
    [
        ("steps", '{"step": 2, "loss": "low"}', "line 2 of 5 has loss = 'low', which is not a number"),
        ("steps", '{"step": 2, "edq": [1.0]}', r"edq = \[1\.0\], which is not a number"),
        ("steps", '{"loss": 1.0}', "line 2 of 5 has no step"),
        ("steps", '{"step": "2"}', "step = '2', which is not a whole number"),
        ("steps", '{"step": "nan"}', "step = nan, which is not a whole number"),
        ("evals", '{"step": 2, "val_loss": {}}', "val_loss = {}, which is not a number"),
        ("events", '{"kind": 3, "step": 1, "message": "a"}', "kind = 3, which is not text"),
        ("events", '{"kind": "note", "step": 1, "message": ["a"]}', "message = .* not text"),
        ("gauges", '{"step": 1, "tensors": 5}', "line 2 of 2 has tensors = 5, which is not a table"),
        ("gauges", '{"step": 1, "updates": {"a": 1}}', "a = 1 in updates, which is not a list"),
        (
            "gauges",
            '{"step": 1, "histograms": {"weight": [1, "x"]}}',
            "weight = .* in histograms, which are not numbers",
        ),
        ("gauges", '{"step": 1, "logits": {"max": "high"}}', "in logits, which are not numbers"),
    ],
)
def test_a_value_that_no_reader_could_reckon_with_is_refused_with_its_line(
    name: str, line: str, expected: str, folder: Path
) -> None:
    file = folder / f"{name}.jsonl"
    first, *others = file.read_text().splitlines() or ['{"step": 1}']
    file.write_text("\n".join([first, line, *others]) + "\n")
    with pytest.raises(RecordError, match=rf"{name}\.jsonl is damaged: .*{expected}"):
        print(read_run(folder).gauges)


@pytest.mark.parametrize(
    "line",
    [
        '{"step": 5, "loss": "inf", "own": {"a": ["b"]}, "saturated": null, "skipped": true}',
        '{"step": 5.0, "loss": "nan"}',
    ],
)
def test_what_nobody_reckons_with_may_be_anything(line: str, folder: Path) -> None:
    with (folder / "steps.jsonl").open("a") as stream:
        stream.write(line + "\n")
    assert len(read_run(folder).steps) == 5


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ('"abc"', "'abc' is not an object"),
        ("[1]", r"\[1\] is not an object"),
        ('{"val_loss": "abc"}', "val_loss = 'abc'"),
    ],
)
def test_a_summary_of_another_kind_is_refused(text: str, expected: str, folder: Path) -> None:
    (folder / "summary.json").write_text(text)
    with pytest.raises(RecordError, match=rf"summary\.json is damaged: .*{expected}"):
        read_run(folder)


def test_settings_of_another_kind_are_refused(tmp_path: Path) -> None:
    RunWriter.create(tmp_path / "run", {"config": {"recipe": "bfloat16/word", "seed": "one"}}).close()
    with pytest.raises(RecordError, match=r"run\.toml is damaged: its seed = 'one' is not a whole number"):
        read_run(tmp_path / "run")


@pytest.mark.skipif(sys.platform == "win32", reason="no pipes with names")
def test_a_pipe_or_a_folder_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    pipe, folder = tmp_path / "pipe", tmp_path / "folder"
    os.mkfifo(pipe)
    folder.mkdir()
    (tmp_path / "link").symlink_to(pipe)
    for place in (pipe, folder, tmp_path / "link"):
        with pytest.raises(RecordError, match="it is not a regular file"):
            write_whole(place, b"whole")
    assert pipe.is_fifo() and {path.name for path in tmp_path.iterdir()} == {"pipe", "folder", "link"}


def test_an_event_that_is_none_is_not_written(tmp_path: Path) -> None:
    with RunWriter.create(tmp_path / "run", RUN) as writer, pytest.raises(ValueError, match="Did you mean 'warning'"):
        writer.event({"kind": "warnin", "step": 1, "message": "told"})
    assert read_run(tmp_path / "run").events == []


def nested(depth: int) -> str:
    return f'{{"step":5,"loss":1.0,"histograms":{{"weight":{"[" * depth}"nan"{"]" * depth}}}}}\n'


@pytest.mark.parametrize("name", ["steps", "evals", "events", "gauges"])
def test_a_line_that_is_nested_too_deep_is_damaged(name: str, folder: Path) -> None:
    with (folder / f"{name}.jsonl").open("a") as stream:
        stream.write(nested(100_000) * 2)
    with pytest.raises(RecordError, match=rf"{name}\.jsonl is damaged: line .* \(maximum recursion depth"):
        read_run(folder).gauges  # noqa: B018


@pytest.mark.parametrize("depth", range(100, 1000, 50))
def test_a_line_that_is_nested_as_deep_as_python_goes_is_a_row_or_damaged(depth: int, folder: Path) -> None:
    """Reading goes less deep than parsing."""
    (folder / "steps.jsonl").write_text(nested(depth) * 2)
    (folder / "gauges.jsonl").write_text(nested(depth) * 2)
    for read in (lambda: read_run(folder), lambda: Run(folder, {}).gauges):
        with suppress(RecordError):
            read()


def test_a_table_or_summary_that_is_nested_too_deep_is_damaged(folder: Path) -> None:
    (folder / "summary.json").write_text('{"a":' + "[" * 100_000 + "]" * 100_000 + "}")
    with pytest.raises(RecordError, match=r"summary\.json is damaged: maximum recursion depth exceeded"):
        read_run(folder)
    (folder / "run.toml").write_text("a = " + "[" * 100_000 + "]" * 100_000)
    # tomli, before Python 3.11, limits the depth itself.
    with pytest.raises(RecordError, match=r"run\.toml is damaged: (maximum recursion depth|TOML inline arrays/tables)"):
        read_run(folder)


def test_a_newer_summary_is_refused(folder: Path) -> None:
    (folder / "summary.json").write_text(f'{{"schema_version": {VERSION + 1}, "steps": 4}}')
    with pytest.raises(RecordError, match=f"has record schema {VERSION + 1}; this version reads up to"):
        read_run(folder)
    (folder / "summary.json").write_text('{"schema_version": "two", "steps": 4}')
    with pytest.raises(RecordError, match=r"schema_version = 'two', which is not a number"):
        read_run(folder)
    (folder / "summary.json").write_text('{"steps": 4}')
    assert read_run(folder).summary == {"steps": 4}
