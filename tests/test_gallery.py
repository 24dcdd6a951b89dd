"""The gallery's runs are runs like any other, hold nothing about the machine they lay on, and become pages."""

from __future__ import annotations

import re
import zipfile
from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.report.publishing import pack, read_runs
from narrowgauge.runs.archive import files_in, read_bytes
from script_modules import script_module

ROOT = Path(__file__).parents[1]
ZIP_FILES = sorted((ROOT / "docs" / "gallery").glob("*.zip"))
FILES = [file for zip_file in ZIP_FILES for file in files_in(zip_file)]
FOLDERS = [file.parent for file in FILES if file.name == "run.toml"]

# A path from the root of a Unix or a Windows disk; a text may hold a slash.
ABSOLUTE = re.compile(r"""(?:^|["'\s(=])(?:~?/[\w.~-]+/|[A-Za-z]:\\)""", re.MULTILINE)


gallery = script_module("docs/gallery.py")


def text_of(file: Path) -> str:
    return (read_bytes(file) or b"").decode()


def test_every_page_has_runs_and_every_zip_file_a_page() -> None:
    assert {file.stem for file in ZIP_FILES} == {folder.parent.name for folder in FOLDERS} == set(gallery.TITLES)
    assert all(folder.parent.name == folder.parents[1].stem for folder in FOLDERS)
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(gallery/([\w-]+)\.html\)", page)) == set(gallery.TITLES)
    assert set(re.findall(r"\(gallery/([\w-]+)\.zip\)", page)) == set(gallery.TITLES)


@pytest.mark.parametrize("file", ZIP_FILES, ids=lambda file: file.stem)
def test_a_zip_file_is_what_the_command_packs(file: Path, tmp_path: Path) -> None:
    # Not byte for byte: another version of zlib may compress otherwise.
    def members(path: Path) -> list[tuple[object, ...]]:
        with zipfile.ZipFile(path) as found:
            return [(each.filename, each.date_time, each.external_attr, each.CRC) for each in found.infolist()]

    assert members(pack([file], tmp_path / "again.zip")) == members(file)


def test_runs_are_whole() -> None:
    for folder in FOLDERS:
        run = ng.read_run(folder)
        assert run.summary is not None, folder
        assert len(run.steps) == run.summary["steps"] == run.config["steps"], folder
        assert run.evals[-1]["val_loss"] == run.summary["val_loss"], folder
        assert [row["step"] for row in run.steps] == list(range(1, len(run.steps) + 1)), folder


def test_no_file_holds_an_absolute_path() -> None:
    sampled = [file for file in FILES if file.name == "gauges.jsonl"]
    assert len(FILES) == 5 * len(FOLDERS) + len(sampled) and sampled
    held = {file.name: found[0] for file in FILES if (found := ABSOLUTE.findall(text_of(file)))}
    assert not held


@pytest.mark.parametrize(
    "text", ['out = "/tmp/a/b"', '{"message":"in /home/me/runs"}', 'data = "C:\\\\texts"', "x=~/a/b"]
)
def test_an_absolute_path_would_be_seen(text: str) -> None:
    assert ABSOLUTE.search(text)


def test_they_are_thin() -> None:
    assert sum(len(read_bytes(file) or b"") for file in FILES) < 6_000_000
    assert sum(file.stat().st_size for file in ZIP_FILES) < 1_200_000


def test_the_script_makes_a_page_of_them() -> None:
    html = gallery.page("storages-8m")
    assert len(html) < 5_000_000
    assert gallery.TITLES["storages-8m"] in html
    for recipe in ("bfloat16/master", "bfloat16/word", "bfloat16/compact"):
        assert recipe in html
    assert "Not to be used: bfloat16/naive, which loses its updates" in html


def test_a_run_that_is_taken_keeps_its_verdict_and_loses_its_paths(tmp_path: Path) -> None:
    text = text_of(ROOT / "docs" / "gallery" / "storages-8m.zip" / "storages-8m" / "bfloat16-word-seed0" / "run.toml")
    folder = tmp_path / "from" / "here"
    folder.mkdir(parents=True)
    text = text.replace('out = "bfloat16-word-seed0"', 'out = "/home/me/runs/word"')
    (folder / "run.toml").write_text(text.replace('data = "stdlib"', 'data = "/home/me/books"'), encoding="utf-8")
    rows = '{"step":1,"loss":2.123456789,"grad_norm":"inf","skipped":true,"peak_memory_bytes":7}\n'
    (folder / "steps.jsonl").write_text(rows, encoding="utf-8")
    taken = gallery.take(folder, tmp_path / "runs")
    run = ng.read_run(taken)
    assert (run.config["out"], run.config["data"]) == ("bfloat16-word-seed0", "books")
    assert run.steps == [{"step": 1, "loss": 2.123457, "grad_norm": float("inf"), "skipped": True}]
    assert not ABSOLUTE.search((taken / "run.toml").read_text(encoding="utf-8"))


def test_a_run_is_added_to_those_of_a_page(tmp_path: Path) -> None:
    names = ["bfloat16-compact-seed0", "bfloat16-word-seed0"]
    packed = ROOT / "docs" / "gallery" / "storages-8m.zip" / "storages-8m"
    for name in names:
        folder = tmp_path / "from" / name
        folder.mkdir(parents=True)
        for file in files_in(packed / name):
            (folder / file.name).write_bytes(read_bytes(file) or b"")
    file = tmp_path / "gallery" / "storages.zip"
    file.parent.mkdir()
    for name in reversed(names):
        gallery.add([tmp_path / "from" / name], file)
    runs = read_runs([file])
    assert [run.path for run in runs] == [file / "storages" / name for name in names]
    assert [run.steps for run in runs] == [ng.read_run(packed / name).steps for name in names]
