"""The gallery's run folders are runs like any other, say nothing about the machine they lay on, and become pages."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

import narrowgauge as ng

ROOT = Path(__file__).parents[1]
RUNS = ROOT / "docs" / "gallery" / "runs"
FOLDERS = sorted(file.parent for file in RUNS.glob("*/*/run.toml"))

# A path from the root of a Unix or a Windows disk; a text may hold a slash.
ABSOLUTE = re.compile(r"""(?:^|["'\s(=])(?:~?/[\w.~-]+/|[A-Za-z]:\\)""", re.MULTILINE)


def load_script() -> ModuleType:
    """``docs/gallery.py``, which is in no package."""
    spec = importlib.util.spec_from_file_location("gallery", ROOT / "docs" / "gallery.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


gallery = load_script()


def test_every_page_has_runs_and_every_folder_a_page() -> None:
    assert {folder.parent.name for folder in FOLDERS} == set(gallery.TITLES)
    page = (ROOT / "docs" / "gallery.md").read_text(encoding="utf-8")
    assert set(re.findall(r"\(gallery/([\w-]+)\.html\)", page)) == set(gallery.TITLES)


def test_runs_are_whole() -> None:
    for folder in FOLDERS:
        run = ng.read_run(folder)
        assert run.summary is not None, folder
        assert len(run.steps) == run.summary["steps"] == run.config["steps"], folder
        assert run.evals[-1]["val_loss"] == run.summary["val_loss"], folder
        assert [row["step"] for row in run.steps] == list(range(1, len(run.steps) + 1)), folder


def test_no_file_holds_an_absolute_path() -> None:
    files = [file for file in RUNS.rglob("*") if file.is_file()]
    sampled = [file for file in files if file.name == "gauges.jsonl"]
    assert len(files) == 5 * len(FOLDERS) + len(sampled) and sampled
    held = {file.name: found[0] for file in files if (found := ABSOLUTE.findall(file.read_text(encoding="utf-8")))}
    assert not held


@pytest.mark.parametrize(
    "text", ['out = "/tmp/a/b"', '{"message":"in /home/me/runs"}', 'data = "C:\\\\texts"', "x=~/a/b"]
)
def test_an_absolute_path_would_be_seen(text: str) -> None:
    assert ABSOLUTE.search(text)


def test_they_are_thin() -> None:
    assert sum(file.stat().st_size for file in RUNS.rglob("*") if file.is_file()) < 6_000_000


def test_the_script_makes_a_page_of_them() -> None:
    html = gallery.page("storages-8m")
    assert len(html) < 5_000_000
    assert gallery.TITLES["storages-8m"] in html
    for recipe in ("bfloat16/master", "bfloat16/word", "bfloat16/compact"):
        assert recipe in html
    assert "Not to be used: bfloat16/naive, which loses its updates" in html


def test_a_run_that_is_taken_keeps_its_verdict_and_loses_its_paths(tmp_path: Path) -> None:
    text = (RUNS / "storages-8m" / "bfloat16-word-seed0" / "run.toml").read_text(encoding="utf-8")
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
