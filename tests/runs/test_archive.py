"""Zip files of runs: the same bytes from the same files, and one clear error for every file that must not be trusted."""

from __future__ import annotations

import bz2
import io
import os
import random
import stat
import tempfile
import tracemalloc
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.errors import RecordError
from narrowgauge.runs import archive
from narrowgauge.runs.archive import files_in, read_bytes, write_zip, zip_file_of
from narrowgauge.runs.record import Run, read_run

ROWS = [{"step": step, "loss": 8.0 / step, "grad_norm": float("inf")} for step in range(1, 40)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """One small run."""
    folder = tmp_path / "runs" / "first"
    with ng.runs.RunWriter.create(folder, {"config": {"recipe": "bfloat16/word", "seed": 0}}) as writer:
        for row in ROWS:
            writer.step(row)
        writer.summary({"steps": len(ROWS), "val_loss": 2.0})
    return folder


@pytest.fixture
def packed(folder: Path, tmp_path: Path) -> Path:
    write_zip(tmp_path / "runs.zip", {f"first/{file.name}": file for file in sorted(folder.iterdir())})
    return tmp_path / "runs.zip"


def made(
    path: Path, *members: tuple[zipfile.ZipInfo | str, bytes], change: Callable[[zipfile.ZipInfo], object] = id
) -> Path:
    """A zip file made by hand; ``change`` edits what its directory says about each member."""
    with warnings.catch_warnings(), zipfile.ZipFile(path, "w") as file:
        warnings.simplefilter("ignore")
        for name, content in members:
            file.writestr(name, content)
        for info in file.infolist():
            change(info)
    return path


def typed(name: str, kind: int) -> zipfile.ZipInfo:
    info = zipfile.ZipInfo(name)
    info.create_system, info.external_attr = 3, kind << 16
    return info


def plain(run: Run) -> tuple[object, ...]:
    return run.run, run.steps, run.evals, run.events, run.summary, run.gauges


# ── reading ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_a_run_in_a_zip_file_reads_as_its_folder(folder: Path, packed: Path) -> None:
    run = read_run(packed / "first")
    assert plain(run) == plain(read_run(folder)) and run.steps == ROWS
    assert run.path == packed / "first" and read_run(f"{packed}/first").summary == run.summary
    assert ng.compare_runs([run]).rows[0]["val_loss"] == 2.0


def test_files_are_found_by_path_in_the_order_of_the_zip_file(folder: Path, packed: Path) -> None:
    names = sorted(os.listdir(folder))
    assert files_in(packed) == files_in(packed / "first") == [packed / "first" / name for name in names]
    assert files_in(packed / "fir") == files_in(folder) == files_in(packed.parent / "absent") == []
    assert (
        read_bytes(packed / "first" / "run.toml")
        == read_bytes(folder / "run.toml")
        == (folder / "run.toml").read_bytes()
    )
    assert read_bytes(packed / "first" / "absent") is None and read_bytes(folder / "absent") is None
    assert (zip_file_of(packed), zip_file_of(packed / "first"), zip_file_of(folder)) == (packed, packed, None)


def test_a_zip_file_made_by_another_program_is_read(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "other.zip", "w", zipfile.ZIP_DEFLATED) as file:
        file.mkdir("runs") if hasattr(file, "mkdir") else file.writestr("runs/", b"")
        for each in folder.iterdir():
            file.write(each, f"runs/first/{each.name}")
        file.writestr("runs/first/checkpoints/step-1/weights.bin", bytes(100))
    assert plain(read_run(tmp_path / "other.zip" / "runs" / "first")) == plain(read_run(folder))


def test_a_zip_file_that_was_replaced_is_read_anew(packed: Path) -> None:
    assert files_in(packed)
    packed.unlink()
    write_zip(packed, {})
    assert files_in(packed) == []


def test_reading_writes_nothing_and_keeps_no_file_open(
    packed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    before = sorted(tmp_path.rglob("*"))
    _ = read_run(packed / "first").gauges
    assert sorted(tmp_path.rglob("*")) == before
    if Path("/proc/self/fd").exists():
        links = [entry for entry in Path("/proc/self/fd").iterdir() if entry.is_symlink()]
        assert not [link for link in links if os.path.realpath(link) == str(packed)]


# ── refusals ────────────────────────────────────────────────────────────────────────────────────────────────────────────

UNSAFE_NAMES = [
    "../run.toml", "first/../../run.toml", "/run.toml", "//host/run.toml", "first//run.toml", "./run.toml", "C:/run.toml",
    "C:run.toml", "..\\run.toml", "first\nrun.toml", "\x1b[2Jrun.toml", "..",
]  # fmt: skip


def set_field(**fields: int) -> Callable[[zipfile.ZipInfo], object]:
    return lambda info: [setattr(info, name, value) for name, value in fields.items()]


GOOD = ("first/run.toml", b"schema_version = 2\n")
REFUSED: dict[str, tuple[str, Callable[[Path], object]]] = {
    **{
        repr(name): ("not a plain relative path", lambda path, name=name: made(path, GOOD, (zipfile.ZipInfo(name), b"")))
        for name in UNSAFE_NAMES
    },
    "NUL": (
        "not a plain relative path",
        lambda path: path.write_bytes(made(path, GOOD, ("first/runX.toml", b"")).read_bytes().replace(b"X.", b"\0.")),
    ),
    "link": ("is a link or a device", lambda path: made(path, GOOD, (typed("first/steps.jsonl", stat.S_IFLNK), b"/etc"))),
    "device": ("is a link or a device", lambda path: made(path, GOOD, (typed("first/steps.jsonl", stat.S_IFCHR), b""))),
    "encrypted": ("is encrypted", lambda path: made(path, GOOD, change=set_field(flag_bits=1))),
    "bzip2": (
        "a method other than deflate",
        lambda path: made(path, ("a", bz2.compress(b"a")), change=set_field(compress_type=zipfile.ZIP_BZIP2)),
    ),
    "twice": ("two of its members have one name", lambda path: made(path, GOOD, GOOD)),
    "bomb": ("unpacked it would have 3,221,225,472 bytes", lambda path: made(path, GOOD, change=set_field(file_size=3 << 30))),
    "bombs": (
        "unpacked it would have 2,400,000,000 bytes",
        lambda path: made(path, *((f"{k}", b"") for k in range(3)), change=set_field(file_size=800_000_000)),
    ),
    "other header": (
        "is damaged: File name in directory",
        lambda path: path.write_bytes(made(path, GOOD).read_bytes().replace(b"first", b"worst", 1)),
    ),
    "text": ("is a file, but not a zip file", lambda path: path.write_text("notes")),
    "empty": ("is a file, but not a zip file", lambda path: path.write_bytes(b"")),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_files_that_cannot_be_trusted_are_refused_with_advice(case: str, tmp_path: Path) -> None:
    says, make = REFUSED[case]
    path = tmp_path / "runs.zip"
    make(path)
    for read in (files_in, lambda path: read_bytes(path / "first" / "run.toml"), lambda path: read_run(path / "first")):
        with pytest.raises(RecordError, match=says) as refusal:
            read(path)
        assert str(path) in refusal.value.message and refusal.value.advice and str(refusal.value).isprintable()


@pytest.mark.parametrize(
    ("limit", "says"), [("_MOST_MEMBERS", "has 3 members, and at most 2"), ("_MOST_BYTES", "at most 2")]
)
def test_sizes_are_bounded_when_reading_and_when_writing(
    limit: str, says: str, packed: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {name: folder / name for name in ("run.toml", "steps.jsonl", "summary.json")}
    write_zip(packed, files)
    monkeypatch.setattr(archive, limit, 2)
    archive._opened_once.cache_clear()
    before = packed.read_bytes()
    for refused in (lambda: files_in(packed), lambda: write_zip(packed, files)):
        with pytest.raises(RecordError, match=says):
            refused()
    assert packed.read_bytes() == before


def test_a_member_longer_than_its_header_says_is_not_unpacked_whole(tmp_path: Path) -> None:
    large = zipfile.ZipInfo("first/run.toml")
    large.compress_type = zipfile.ZIP_DEFLATED
    path = made(tmp_path / "a.zip", (large, bytes(50_000_000)), change=set_field(file_size=10))
    tracemalloc.start()
    with pytest.raises(RecordError, match=r"is damaged: first/run\.toml cannot be unpacked .*Get the file again"):
        read_bytes(path / "first" / "run.toml")
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 10_000_000


@pytest.mark.parametrize("num_bytes", [0, 10, 500, -200, -len(archive._COMMENT) - 1])
def test_a_file_that_was_cut_is_refused(num_bytes: int, packed: Path) -> None:
    packed.write_bytes(packed.read_bytes()[:num_bytes])
    with pytest.raises(RecordError, match=r"runs\.zip"):
        read_run(packed / "first")


def test_a_flipped_bit_is_refused_or_changes_nothing(packed: Path, tmp_path: Path) -> None:
    good, whole = packed.read_bytes(), plain(read_run(packed / "first"))
    draw, refused = random.Random(0), 0
    for number in range(400):
        data = bytearray(good)
        data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
        path = tmp_path / f"{number}.zip"
        path.write_bytes(data)
        try:
            assert plain(read_run(path / "first")) == whole
        except RecordError:
            refused += 1
    assert refused > 200


def test_checksums_of_rows_hold_in_a_zip_file(folder: Path, packed: Path) -> None:
    rows = (folder / "steps.jsonl").read_bytes()
    (folder / "steps.jsonl").write_bytes(rows.replace(b'"step":7,"loss":1', b'"step":7,"loss":2'))
    write_zip(packed, {f"first/{file.name}": file for file in folder.iterdir()})
    with pytest.raises(RecordError, match=r"runs\.zip/first/steps\.jsonl is damaged: line 7 of 39 .*its checksum"):
        read_run(packed / "first")


# ── writing ─────────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_bytes_depend_on_names_and_content_alone(folder: Path, packed: Path, tmp_path: Path) -> None:
    before = packed.read_bytes()
    for file in folder.iterdir():
        file.chmod(0o600)
        os.utime(file, (1e9, 1e9))
    files = {f"first/{file.name}": file for file in sorted(folder.iterdir())}
    write_zip(tmp_path / "again.zip", files)
    assert (tmp_path / "again.zip").read_bytes() == before
    with zipfile.ZipFile(io.BytesIO(before)) as found:
        assert found.namelist() == list(files) and b"narrowgauge report" in found.comment
        assert {(info.date_time, info.external_attr >> 16, info.create_system) for info in found.infolist()} == {
            ((1980, 1, 1, 0, 0, 0), stat.S_IFREG | 0o644, 3)
        }


def test_a_zip_file_takes_no_other_files_place(folder: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "mine.zip", "w") as mine:
        mine.writestr("first/run.toml", b"schema_version = 2")
    (tmp_path / "notes.txt").write_text("mine")
    for name in ("mine.zip", "notes.txt"):
        before = (tmp_path / name).read_bytes()
        with pytest.raises(RecordError, match=r"the file there was not written by --pack\. Name another"):
            write_zip(tmp_path / name, {"a/run.toml": folder / "run.toml"})
        assert (tmp_path / name).read_bytes() == before
    with pytest.raises(RecordError, match="it is a folder"):
        write_zip(tmp_path, {})
    with pytest.raises(RecordError, match="No such file or directory"):
        write_zip(tmp_path / "absent" / "a.zip", {})


@pytest.mark.parametrize("name", ["../a", "a\\b", "a\udcff", "/a"])
def test_names_that_would_be_refused_are_not_written(name: str, folder: Path, packed: Path) -> None:
    before = packed.read_bytes()
    with pytest.raises(RecordError, match=r"is no name for a zip file\. Rename the folder"):
        write_zip(packed, {f"{name}/run.toml": folder / "run.toml"})
    assert packed.read_bytes() == before


def test_a_failed_write_leaves_the_old_file_and_nothing_else(
    folder: Path, packed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before, names = packed.read_bytes(), sorted(os.listdir(packed.parent))

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(RecordError, match=r"the disk is full .* give the same command again"):
        write_zip(packed, {"first/run.toml": folder / "run.toml"})
    assert packed.read_bytes() == before and sorted(os.listdir(packed.parent)) == names


def test_a_file_that_comes_into_being_while_it_is_looked_for_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run's last process writes its summary while another one reads the run."""
    file, exists = tmp_path / "summary.json", Path.exists

    def late(path: Path) -> bool:
        if path == file and not exists(file):
            file.write_bytes(b"{}")
            return False
        return exists(path)

    monkeypatch.setattr(Path, "exists", late)
    assert read_bytes(file) == b"{}"
