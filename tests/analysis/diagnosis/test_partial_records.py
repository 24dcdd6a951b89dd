"""Damaged, foreign and partial records: one clear line or an answer that says what is missing, never a guess or a traceback."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner

from analysis.diagnosis.records import healthy_run, written
from narrowgauge.cli.main import main


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A healthy run on the disk."""
    return written(healthy_run(seed=0, steps=160), tmp_path_factory.mktemp("whole") / "run")


def rows(*found: object) -> str:
    return "".join(f"{json.dumps(row)}\n" for row in found)


def write(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def keep_lines(count: int) -> Callable[[Path], object]:
    """Of every file of rows the first lines."""

    def cut(folder: Path) -> None:
        for name in ("steps", "gauges"):
            file = folder / f"{name}.jsonl"
            file.write_text("".join(file.read_text().splitlines(True)[:count]))

    return cut


def swap_lines(folder: Path) -> None:
    file = folder / "steps.jsonl"
    lines = file.read_text().splitlines(True)
    file.write_text("".join([lines[0], *lines[81:], *lines[1:81]]))


TOML = "schema_version = 2\n"
# What is done to the record, how the command ends, and what it says.
DAMAGES: dict[str, tuple[Callable[[Path], object], int, str]] = {
    "no settings": (lambda folder: (folder / "run.toml").unlink(), 2, "or a Hugging Face trainer_state.json"),
    "garbled settings": (write("run.toml", "schema_version = 2\n[config\n"), 2, "run.toml is damaged"),
    "settings that are none": (write("run.toml", f'{TOML}config = 3\nmachine = "x"\n'), 0, "not recorded: the recipe"),
    "an unknown recipe": (write("run.toml", f'{TOML}[config]\nrecipe = "foo/bar"\n'), 0, "not recorded: the recipe: "),
    "no row": (keep_lines(0), 0, "not known from this record, which holds no steps with a loss"),
    "one row": (keep_lines(1), 0, "not known from this record, which holds 1 step with a loss (20 are needed)"),
    "rows without a loss": (
        write("steps.jsonl", rows(*({"step": k, "loss": None} for k in range(1, 60)))), 0, "not recorded: the loss of 59 of",
    ),
    "not a number": (
        write("steps.jsonl", rows(*({"step": k, "loss": "nan"} for k in range(1, 60)))), 0, "the loss of step 1 is nan",
    ),
    "rows out of order": (swap_lines, 0, "not recorded: the order of the steps: row 81 is of step 2, after one of step 160"),
    "a broken row": (write("steps.jsonl", '{"step": 1\n{"step": 2}\n{"step": 3}\n'), 2, "line 1 of 3 is not a row"),
    "broken gauges": (write("gauges.jsonl", "xx\n{}\n"), 0, "not recorded: the gauges: "),
    "short gauges": (
        write("gauges.jsonl", rows({"step": 20, "tensors": {"grad:a": [None, 1], "weight:b": []}, "updates": {"x": ["nan"]}})),
        0, "",
    ),
    "events without words": (
        write("events.jsonl", rows({"kind": "loss_spike"}, {"step": 3}, {"kind": "resume", "step": 999})), 0, "go on to step 999",
    ),
}  # fmt: skip


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_record_is_refused_in_a_line_or_says_what_is_missing(
    whole: Path, tmp_path: Path, damage: str
) -> None:
    spoil, status, words = DAMAGES[damage]
    folder = tmp_path / "run"
    shutil.copytree(whole, folder)
    spoil(folder)
    for more in ((), ("--html", str(tmp_path / "page.html"))):
        said = CliRunner().invoke(main, ["diagnose", str(folder), *more])
        assert said.exit_code == status and words in said.output, said.output
        assert said.exception is None or isinstance(said.exception, SystemExit)


def test_another_file_is_told_what_can_be_read(tmp_path: Path) -> None:
    file = tmp_path / "losses.dat"
    file.write_text("step,loss\n1,2.0\n")
    said = CliRunner().invoke(main, ["diagnose", str(file)])
    assert said.exit_code == 2 and "no log that can be read" in said.output and "Lightning metrics.csv" in said.output


def test_the_only_run_of_a_zip_file_is_read_and_of_several_one_must_be_named(whole: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        shutil.copytree(whole, tmp_path / "both" / name)
    shutil.copytree(whole, tmp_path / "alone" / "one")
    for name, status, words in (("alone", 0, "one: no sign of a fault"), ("both", 2, "holds 2: one, two. Name one: ")):
        file = shutil.make_archive(str(tmp_path / name), "zip", tmp_path / name)
        for path in (file, str(tmp_path / name)):
            said = CliRunner().invoke(main, ["diagnose", path])
            assert said.exit_code == status and words in said.output, said.output
