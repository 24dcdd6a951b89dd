"""Runs packed into one file make the page that their folders make, and only what it needs is packed."""

from __future__ import annotations

import shutil
import zipfile
from pathlib import Path

import pytest
from click.testing import CliRunner

from analysis.comparison.made_runs import MASTER, made, seeds
from narrowgauge.cli.main import main
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.report.publishing import pack, read_runs, report
from narrowgauge.runs.record import Run
from narrowgauge.runs.writer import RunWriter


def written(folder: Path, *runs: Run) -> Path:
    """A comparison on the disk, with all that lies in such a folder."""
    for run in runs:
        place = folder / run.path
        with RunWriter.create(place, run.run) as writer:
            for row in run.steps:
                writer.step(row)
            writer.gauge({"step": 5, "tensors": {"input:up": [4.0, 1.0, 0, 0.0, 0.0, 30.0, 5.0, 3.0, 1.5]}})
            if run.summary is not None:
                writer.summary(run.summary)
        for name in ("checkpoints/step-10/weights.safetensors", "data/tokens.bin", "tensorboard/events"):
            (place / name).parent.mkdir(parents=True)
            (place / name).write_bytes(bytes(100))
    (folder / "compare.toml").write_text('recipes = ["bfloat16/master"]')
    (folder / "compare.json").write_text("[]")
    (folder / "report.html").write_text("<html>")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two recipes, two seeds, one run not finished and torn."""
    folder = written(tmp_path / "there", *MASTER[:2], *seeds("bfloat16/word", (4.0, None)))
    with (folder / "bfloat16-word-seed1" / "steps.jsonl").open("ab") as stream:
        stream.write(b'{"step":11,"lo')
    return folder


def names_in(file: Path) -> list[str]:
    with zipfile.ZipFile(file) as found:
        return found.namelist()


def page(tmp_path: Path, *paths: Path) -> bytes:
    return report(list(paths), tmp_path / "page.html").read_bytes()


def test_a_comparison_makes_the_same_page_from_its_zip_file(folder: Path, tmp_path: Path) -> None:
    file = pack([folder], tmp_path / "there.zip")
    assert page(tmp_path, file) == page(tmp_path, folder)
    for one, other in zip(read_runs([file]), read_runs([folder]), strict=True):
        assert (one.path.name, one.run, one.steps, one.summary) == (
            other.path.name,
            other.run,
            other.steps,
            other.summary,
        )
        assert one.gauges == other.gauges and one.gauges


def test_only_what_a_report_needs_is_packed(folder: Path, tmp_path: Path) -> None:
    rows = [f"{kind}.jsonl" for kind in ("steps", "evals", "events", "gauges", "fingerprints")]
    names = names_in(pack([folder], tmp_path / "there.zip"))
    assert names[:2] == ["there/compare.toml", "there/compare.json"]
    run = [f"there/bfloat16-master-seed0/{name}" for name in ("run.toml", *rows, "summary.json")]
    assert names[2:9] == run
    with zipfile.ZipFile(tmp_path / "there.zip") as found:
        assert found.read(run[1]) == (tmp_path / run[1]).read_bytes()
    assert len(names) == 2 + 3 * 7 + 6  # the last run has no summary
    assert names_in(pack([folder / "bfloat16-word-seed0"], tmp_path / "one.zip")) == [
        f"bfloat16-word-seed0/{name}" for name in ("run.toml", *rows, "summary.json")
    ]


def test_the_same_folders_give_the_same_bytes(folder: Path, tmp_path: Path) -> None:
    first = pack([folder], tmp_path / "first.zip").read_bytes()
    moved = tmp_path / "elsewhere" / "there"
    shutil.copytree(folder, moved)
    assert pack([moved], tmp_path / "second.zip").read_bytes() == first
    assert pack([tmp_path / "first.zip"], tmp_path / "third.zip").read_bytes() == first
    assert pack([tmp_path / "first.zip"], tmp_path / "first.zip").read_bytes() == first


def test_a_relative_path_gives_the_same_bytes(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = pack([folder], tmp_path / "a.zip").read_bytes()
    monkeypatch.chdir(folder)
    for name in (".", "../there", "../there/."):
        assert pack([name], tmp_path / "b.zip").read_bytes() == before


def test_runs_of_several_folders_keep_their_order_and_names_that_differ(tmp_path: Path) -> None:
    losses = {"z": 4.0, "a": 4.1}
    folders = [
        written(tmp_path / name / "same", MASTER[0], made("bfloat16/word", 0, loss)) for name, loss in losses.items()
    ]
    file = pack(folders, tmp_path / "both.zip")
    tops = [f"{name}/same/{run}" for name in "za" for run in ("bfloat16-master-seed0", "bfloat16-word-seed0")]
    assert [str(run.path.relative_to(file)) for run in read_runs([file])] == tops
    assert {"z/same/compare.toml", "a/same/compare.toml"} < set(names_in(file))
    assert report([file], tmp_path / "one.html").stat().st_size


@pytest.mark.parametrize("names", [("z/first", "a/first"), ("z/second", "a/first"), ("z/first", "z/second")])
def test_runs_named_one_by_one_make_the_same_page_from_their_zip_file(names: tuple[str, ...], tmp_path: Path) -> None:
    folders = [tmp_path / name for name in names]
    for folder, run in zip(folders, (MASTER[0], made("bfloat16/master", 0, 4.1)), strict=True):
        shutil.copytree(written(tmp_path / "made" / folder.parent.name / folder.name, run) / run.path, folder)
    file = pack(folders, tmp_path / "runs.zip")
    assert page(tmp_path, file) == page(tmp_path, *folders)


def test_zip_files_and_folders_are_read_together(folder: Path, tmp_path: Path) -> None:
    parts = [folder / name for name in ("bfloat16-master-seed0", "bfloat16-master-seed1")]
    files = [pack([part], tmp_path / f"{number}.zip") for number, part in enumerate(parts)]
    word = folder / "bfloat16-word-seed0"
    assert page(tmp_path, files[0], word, files[1]) == page(tmp_path, parts[0], word, parts[1])
    inside = files[0] / "bfloat16-master-seed0"
    assert [run.path for run in read_runs([inside, files[0], inside])] == [inside]


def test_the_page_of_a_zip_file_is_written_next_to_it(folder: Path, tmp_path: Path) -> None:
    file = pack([folder], tmp_path / "mine.zip")
    before = sorted(tmp_path.iterdir())
    assert report([file]) == tmp_path / "mine.html"
    assert sorted(tmp_path.iterdir()) == sorted([*before, tmp_path / "mine.html"])
    (tmp_path / "mine.html").write_text("notes")
    with pytest.raises(RecordError, match="the file there is no HTML page"):
        report([file])
    with pytest.raises(NarrowgaugeError, match="Give --out"):
        report([file, folder])


def test_where_no_run_is_nothing_is_packed(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "notes").mkdir()
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as other:
        other.writestr("notes.txt", b"none")
    for path, says in (
        (tmp_path / "absent", "there is no such folder"),
        (tmp_path / "absent.zip", "there is no such folder"),
        (tmp_path / "notes", r"neither it nor a folder in it has a run\.toml"),
        (tmp_path / "other.zip", r"the zip file has no run\.toml"),
        (tmp_path / "other.zip" / "there", "there is no such folder"),
        (folder / "compare.toml", "it is a file, but not a zip file"),
    ):
        with pytest.raises(RecordError, match=f"No run in {path}: {says}.*Name a run folder"):
            pack([path], tmp_path / "runs.zip")
    (folder / "bfloat16-master-seed0" / "summary.json").write_text("{")
    with pytest.raises(RecordError, match=r"summary\.json is damaged"):
        pack([folder], tmp_path / "runs.zip")
    assert not (tmp_path / "runs.zip").exists()


def call(*words: str | Path, command: str = "report") -> tuple[int, str, str]:
    result = CliRunner().invoke(main, [command, *map(str, words)])
    return result.exit_code, result.stdout, result.stderr


def test_the_command_packs_and_opens(folder: Path, tmp_path: Path) -> None:
    file, html = tmp_path / "a.zip", tmp_path / "b.html"
    assert call(folder, "--pack", file) == (0, f"{file}\n", "")
    assert (folder / "report.html").read_text() == "<html>"
    assert call(folder, "--pack", file, "--out", html) == (0, f"{file}\n{html}\n", "")
    assert call(file) == (0, f"{tmp_path / 'a.html'}\n", "")
    assert (tmp_path / "a.html").read_bytes() == html.read_bytes()
    file.write_bytes(file.read_bytes()[:-200])
    status, out, error = call(file)
    assert (status, out, error.count("\n")) == (2, "", 1) and error.startswith(f"RecordError: No run in {file}: ")
    status, out, error = call(folder, "--pack", html)
    assert (status, out, error.count("\n")) == (2, "", 1) and "was not written by --pack" in error


@pytest.mark.parametrize(("command", "more"), [("resume", ()), ("export", ("out",)), ("sample", ("text",))])
@pytest.mark.parametrize("run", ["bfloat16-master-seed0", "bfloat16-word-seed1"])
def test_what_needs_checkpoints_refuses_runs_in_zip_files(
    command: str, more: tuple[str, ...], run: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    place = pack([folder], tmp_path / "a.zip") / "there" / run
    status, out, error = call(place, *more, command=command)
    assert (status, out, error.count("\n")) == (2, "", 1)
    assert (
        error
        == f"RecordError: {place} is in a zip file, which holds no checkpoints. Name the run folder that was packed.\n"
    )
