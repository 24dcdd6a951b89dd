"""Rows have checksums, and a resume needs all rows that were written before its checkpoint."""

from __future__ import annotations

import json
import random
import shutil
import zlib
from pathlib import Path
from typing import Any

import pytest
import tomli_w

import narrowgauge.runs.writer as writer_module
from narrowgauge.errors import RecordError
from narrowgauge.runs.events import Event
from narrowgauge.runs.lines import ROW_FILES, line_of, line_steps, read_rows
from narrowgauge.runs.record import read_run, read_settings
from narrowgauge.runs.writer import RunWriter, require_rows, rows_lost

SETTINGS = {"recipe": "bfloat16/word", "seed": 0, "lr": 1e-3}
COUNTS = {"steps": 6, "evals": 3, "events": 2, "gauges": 2, "fingerprints": 2}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A run of eight steps, of which six lie before its checkpoint."""
    path = tmp_path / "run"
    with RunWriter.create(path, {"config": SETTINGS}) as writer:
        writer.event(Event("start", 0, "begun"))
        writer.event(Event("note", 0, "bits may differ"))
        for step in range(1, 9):
            writer.step({"step": step, "loss": 1 / step})
            if step % 2 == 0:
                writer.eval({"step": step, "val_loss": 3.0})
            if step % 3 == 0:
                writer.gauge({"step": step, "tensors": {"input:a": [float("nan"), 1.0]}})
                writer.fingerprint({"step": step, "tensors": {"weight:a": [2**64 - 1, 1.0, 8]}})
        assert writer.num_rows == {"steps": 8, "evals": 4, "events": 2, "gauges": 2, "fingerprints": 2}
    return path


def lines_of(folder: Path, kind: str) -> list[bytes]:
    return (folder / f"{kind}.jsonl").read_bytes().splitlines(keepends=True)


def change(folder: Path, kind: str, lines: list[bytes]) -> None:
    (folder / f"{kind}.jsonl").write_bytes(b"".join(lines))


def as_before_checksums(folder: Path) -> None:
    """What an older version would have written."""
    for kind in ROW_FILES:
        rows = [json.loads(line) for line in lines_of(folder, kind)]
        plain = [{key: value for key, value in row.items() if key not in ("crc32", "settings")} for row in rows]
        change(folder, kind, [json.dumps(row, separators=(",", ":")).encode() + b"\n" for row in plain])
    run = read_settings(folder)
    (folder / "run.toml").write_text(tomli_w.dumps({**run, "schema_version": 1}))


def test_a_row_carries_the_checksum_of_its_text(folder: Path) -> None:
    for kind in ROW_FILES:
        for line in lines_of(folder, kind):
            text, _, rest = line.rpartition(b',"crc32":')
            assert json.loads(line)["crc32"] == f"{zlib.crc32(text):08x}" and rest.endswith(b'"}\n')
        assert all("crc32" not in row for row in read_rows(folder / f"{kind}.jsonl"))


def test_the_first_row_holds_the_settings_and_readers_of_rows_do_not_see_them(folder: Path) -> None:
    run = read_run(folder)
    assert run.began_with == SETTINGS
    assert run.steps == [{"step": step, "loss": 1 / step} for step in range(1, 9)]
    assert [b"settings" in line for line in lines_of(folder, "steps")] == [True] + [False] * 7


def test_a_rewound_run_says_anew_what_it_begins_with(folder: Path) -> None:
    (folder / "run.toml").write_text((folder / "run.toml").read_text().replace("0.001", "0.002"))
    with RunWriter.open(folder) as writer:
        writer.rewind(0)
        writer.step({"step": 1, "loss": 1.0})
    assert read_run(folder).began_with == {**SETTINGS, "lr": 2e-3}


@pytest.mark.parametrize("kind", ROW_FILES)
def test_no_flipped_bit_goes_unnoticed(kind: str, folder: Path) -> None:
    file = folder / f"{kind}.jsonl"
    good, draw = file.read_bytes(), random.Random(kind)
    kept = sum(map(len, lines_of(folder, kind)[: COUNTS[kind]]))
    for place in draw.sample(range(kept * 8), 150):
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        try:
            run = read_run(folder)
            read = run.gauges, run.fingerprints  # these files are read on first use
            assert read and rows_lost(folder, 6, COUNTS), (place, bytes(flipped))
        except RecordError as error:
            assert f"{kind}.jsonl is damaged" in error.message


@pytest.mark.parametrize("kind", ROW_FILES)
def test_no_flipped_bit_of_the_last_row_goes_unnoticed(kind: str, folder: Path) -> None:
    file = folder / f"{kind}.jsonl"
    good = file.read_bytes()
    # The rows were written after the checkpoint of step 0, which counts none.
    begin = len(good) - len(lines_of(folder, kind)[-1])
    for place in range(begin * 8, len(good) * 8):
        flipped = bytearray(good)
        flipped[place // 8] ^= 1 << place % 8
        file.write_bytes(flipped)
        try:
            line_steps(file)
            # Later rows of the other kinds are written again from the checkpoint on; one of events must be missed.
            assert kind != "events" or rows_lost(folder, 0), (place, bytes(flipped[begin:]))
        except RecordError as error:
            assert f"{kind}.jsonl is damaged" in error.message


@pytest.mark.parametrize(
    ("kind", "gone", "expected"),
    [
        ("steps", [1], r"steps\.jsonl lacks step 2\."),
        ("steps", [1, 3, 4], r"steps\.jsonl lacks steps 2, 4 to 5\."),
        ("steps", range(8), r"steps\.jsonl lacks steps 1 to 6\."),
        ("steps", [4, 5, 6, 7], r"lacks steps 5 to 6\."),
        ("evals", [0], r"evals\.jsonl holds 2 of the 3 rows up to step 6 that were written"),
        ("gauges", [0, 1], r"gauges\.jsonl holds 0 of the 2 rows up to step 6"),
        ("events", [1], r"events\.jsonl holds 1 of the 2 rows that were written"),
    ],
)
def test_lost_rows_are_told_and_nothing_is_cut(kind: str, gone: Any, expected: str, folder: Path) -> None:
    change(folder, kind, [line for number, line in enumerate(lines_of(folder, kind)) if number not in gone])
    before = {file.name: file.read_bytes() for file in folder.iterdir()}
    with pytest.raises(RecordError, match=expected) as caught:
        require_rows(folder, 6, COUNTS)
    assert f"narrowgauge resume {folder} --accept-changes" in caught.value.advice
    assert {file.name: file.read_bytes() for file in folder.iterdir()} == before


def test_a_removed_file_is_told_and_rows_after_the_checkpoint_may_be_lost(folder: Path) -> None:
    change(folder, "steps", lines_of(folder, "steps")[:7])
    require_rows(folder, 6, COUNTS)
    (folder / "steps.jsonl").unlink()
    with pytest.raises(RecordError, match="lacks steps 1 to 6"):
        require_rows(folder, 6, COUNTS)


def test_rewind_cuts_nothing_where_rows_are_lost_unless_that_is_meant(folder: Path) -> None:
    change(folder, "steps", [line for number, line in enumerate(lines_of(folder, "steps")) if number != 2])
    before = (folder / "steps.jsonl").read_bytes()
    with RunWriter.open(folder) as writer:
        with pytest.raises(RecordError, match="lacks step 3"):
            writer.rewind(6)
        assert (folder / "steps.jsonl").read_bytes() == before
        writer.rewind(6, accept_lost=True)
    assert [row["step"] for row in read_run(folder).steps] == [1, 2, 4, 5, 6]


@pytest.mark.parametrize("accept_lost", [False, True])
def test_a_wrong_step_number_cuts_no_good_row(accept_lost: bool, folder: Path) -> None:
    """One bit in the number of a row without a checksum: 4 becomes 36 rows too late, and 5 rows were lost with it."""
    as_before_checksums(folder)
    lines = lines_of(folder, "steps")
    change(folder, "steps", [*lines[:3], lines[3].replace(b'"step":4', b'"step":36'), *lines[4:]])
    with (
        RunWriter.open(folder) as writer,
        pytest.raises(RecordError, match=r"line 5 of 8 is of step 5, after one of step 36"),
    ):
        writer.rewind(6, accept_lost=accept_lost)
    assert len(read_run(folder).steps) == 8


def test_an_older_run_is_read_and_goes_on(folder: Path) -> None:
    as_before_checksums(folder)
    run = read_run(folder)
    assert run.began_with is None and len(run.steps) == 8
    require_rows(folder, 6, {})
    with RunWriter.open(folder) as writer:
        writer.rewind(6)
        writer.step({"step": 7, "loss": 0.0})
    assert [row["step"] for row in read_run(folder).steps] == [1, 2, 3, 4, 5, 6, 7]
    assert b"crc32" in lines_of(folder, "steps")[6]


def test_a_new_run_must_have_checksums_before_its_checkpoint(folder: Path) -> None:
    lines = lines_of(folder, "evals")
    change(folder, "evals", [lines[0], b'{"step":4,"val_loss":2.0}\n', *lines[2:]])
    assert len(read_run(folder).evals) == 4
    assert rows_lost(folder, 6) == ["evals.jsonl has no checksum in line 2"]
    assert rows_lost(folder, 2) == []


def test_steps_are_found_without_parsing_and_are_those_of_the_rows(folder: Path) -> None:
    for kind in ROW_FILES:
        rows = read_rows(folder / f"{kind}.jsonl")
        found = line_steps(folder / f"{kind}.jsonl")
        assert [step for step, _, _ in found] == [row["step"] for row in rows]
        assert [length for _, length, _ in found] == [len(line) for line in lines_of(folder, kind)]
    assert line_of({"loss": 1.0, "step": 2}).startswith(b'{"loss"')
    change(folder, "evals", [line_of({"val_loss": 1.0, "step": 2})])
    assert line_steps(folder / "evals.jsonl")[0][0] == 2


# ── one maker ───────────────────────────────────────────────────────────────────────────────────────────────────────


def test_of_two_that_make_a_run_at_once_one_makes_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The other comes at every moment at which the first writes."""
    true_write, refused = writer_module.write_whole, []

    def write(path: Path, data: bytes, then: str) -> None:
        with pytest.raises(RecordError) as caught:
            RunWriter.create(tmp_path / "run", {"config": {"seed": 2}})
        refused.append(caught.value.message)
        true_write(path, data, then)

    monkeypatch.setattr(writer_module, "write_whole", write)
    with RunWriter.create(tmp_path / "run", {"config": {"seed": 1}}) as writer:
        writer.step({"step": 1})
        with pytest.raises(RecordError, match="a run is there already"):
            RunWriter.create(tmp_path / "run", {"config": {"seed": 2}})
    assert refused == [f"Cannot write the run {tmp_path / 'run'}: another process is writing it."]
    assert read_run(tmp_path / "run").config == {"seed": 1}


def test_a_run_that_could_not_be_made_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise RecordError("the disk is full.")

    monkeypatch.setattr(writer_module, "write_whole", refuse)
    with pytest.raises(RecordError, match="the disk is full"):
        RunWriter.create(tmp_path, {"config": {}})
    assert list(tmp_path.iterdir()) == []


def test_what_a_kill_left_before_there_was_a_run_is_in_nobodys_way(tmp_path: Path) -> None:
    for name in ("steps.jsonl", "evals.jsonl", ".tmp-run.toml-77"):
        (tmp_path / name).touch()
    (tmp_path / ".tmp-data-77").mkdir()
    shutil.copytree(tmp_path, tmp_path.with_name("other"))
    RunWriter.create(tmp_path, {"config": {}}).close()
    assert read_run(tmp_path).steps == []
    other = tmp_path.with_name("other")
    writer_module.remove_leftovers(other)
    assert list(other.iterdir()) == []
    (other / ".tmp-mine").touch()
    with pytest.raises(RecordError, match=r"not empty \(it holds \.tmp-mine\)"):
        RunWriter.create(other, {"config": {}})
    (other / ".tmp-mine").unlink()
    (other / "steps.jsonl").write_text('{"step":1}\n')
    with pytest.raises(RecordError, match=r"not empty \(it holds steps\.jsonl\)"):
        RunWriter.create(other, {"config": {}})
    writer_module.remove_leftovers(other)
    assert (other / "steps.jsonl").exists()


# ── run.toml ────────────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("version", ["inf", "-inf", "nan", "1.5", "true", "'1'", "[1]", "2026-01-01"])
def test_a_schema_version_that_is_no_whole_number_is_damage(version: str, folder: Path) -> None:
    text = (folder / "run.toml").read_text().replace("schema_version = 2", f"schema_version = {version}")
    (folder / "run.toml").write_text(text)
    with pytest.raises(RecordError, match=r"run\.toml is damaged: its schema_version = .* is not a whole number"):
        read_run(folder)
