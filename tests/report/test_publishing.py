"""From folders to a page and a file of rows."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from click.testing import CliRunner

from analysis.comparison.made_runs import COLUMNS, MASTER, close, seeds, sentence
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.cli.main import main
from narrowgauge.errors import NarrowgaugeError, RecordError
from narrowgauge.report.publishing import publish, read_runs, report, write_report
from narrowgauge.runs.record import read_run
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.tables import FORMS


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A comparison on the disk: two recipes, two seeds, one run not finished and torn."""
    for run in [*MASTER[:2], *seeds("bfloat16/word", (4.0, None))]:
        with RunWriter.create(tmp_path / "there" / run.path, run.run) as writer:
            for row in run.steps:
                writer.step(row)
            if run.summary is not None:
                writer.summary(run.summary)
    with (tmp_path / "there" / "bfloat16-word-seed1" / "steps.jsonl").open("ab") as stream:
        stream.write(b'{"step":11,"lo')
    return tmp_path / "there"


def test_runs_are_found_in_the_folder_of_a_comparison_and_by_name_once(folder: Path) -> None:
    names = ["bfloat16-master-seed0", "bfloat16-master-seed1", "bfloat16-word-seed0", "bfloat16-word-seed1"]
    assert [run.path.name for run in read_runs([folder])] == names
    assert [run.path.name for run in read_runs([folder / names[2], folder])] == [names[2], *names[:2], names[3]]
    found = compare_runs(read_runs([folder]))
    assert [row["num_seeds"] for row in found.rows] == [2, 1] and "(10 of 10 steps)" in sentence(found, "Not finished")


def test_where_no_run_is_the_refusal_says_so(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="there is no such folder"):
        read_runs([tmp_path / "nowhere"])
    with pytest.raises(RecordError, match=r"neither it nor a folder in it has a run\.toml"):
        read_runs([tmp_path])
    with pytest.raises(RecordError, match="no run was named"):
        compare_runs([])


def test_logs_that_a_folder_holds_are_to_be_named(tmp_path: Path) -> None:
    (tmp_path / "requirements.txt").write_text("torch\n")
    for read in (lambda: read_runs([tmp_path]), lambda: read_run(tmp_path)):
        with pytest.raises(RecordError) as none:
            read()
        assert "It holds" not in str(none.value)
    for name in ("log.csv", "train.log"):
        (tmp_path / name).write_text("step,loss\n1,2.0\n")
    for read in (lambda: read_runs([tmp_path]), lambda: read_run(tmp_path)):
        with pytest.raises(RecordError, match=r"It holds log\.csv and train\.log: name one of them\."):
            read()


def test_where_no_run_is_the_newest_ones_are_suggested(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(RecordError, match=r"The latest runs there: .*-seed[01], ") as raised:
        read_runs([folder / "bfloat16-wrd-seed0"])
    assert str(raised.value).count("-seed") == 1 + 3
    with pytest.raises(RecordError) as none:
        read_runs([tmp_path / "nowhere" / "at all"])
    assert "latest" not in str(none.value)


@pytest.mark.parametrize("form", ["md", "csv", "tex"])
def test_the_table_of_costs_is_printed_for_papers_and_spreadsheets(form: str, folder: Path) -> None:
    printed = CliRunner().invoke(main, ["report", str(folder), "--table", form])
    assert printed.exit_code == 0 and not (folder / "report.html").exists()
    assert printed.stdout == FORMS[form](compare_runs(read_runs([folder])).table())
    assert printed.stdout.count("bfloat16/word") == 1


def test_compare_json_is_a_list_of_rows_and_valid_whatever_the_figures(folder: Path, tmp_path: Path) -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (math.inf, math.nan))])
    page = publish(found, tmp_path)
    rows = json.loads((tmp_path / "compare.json").read_text(), parse_constant=lambda word: pytest.fail(word))
    assert [list(row) for row in rows] == [COLUMNS] * 2 and [row["diverged"] for row in rows] == [False, True]
    assert page == tmp_path / "report.html" and page.stat().st_size


def test_a_report_goes_into_the_one_folder_or_to_out(folder: Path, tmp_path: Path) -> None:
    assert report([folder]) == folder / "report.html" and "bfloat16/word" in (folder / "report.html").read_text()
    runs = [folder / "bfloat16-word-seed0", folder / "bfloat16-master-seed0"]
    assert report(runs, tmp_path / "both.html").is_file()
    with pytest.raises(NarrowgaugeError, match=r"2 folders were named.*--out page\.html"):
        report(runs)
    with pytest.raises(RecordError, match="it is a folder"):
        report(runs, tmp_path)


@pytest.mark.parametrize(("baseline", "shown"), [(None, "bfloat16/master"), ("bf16/word", "bfloat16/word")])
def test_the_page_has_the_baseline_of_its_comparison(tmp_path: Path, baseline: str | None, shown: str) -> None:
    runs = [*MASTER, *seeds("bfloat16/word", (4.0, 4.1, 4.2))]
    page = write_report(compare_runs(runs, baseline), tmp_path / "page.html").read_text()
    assert f">Minus {shown}</th>" in page and page.startswith("<!doctype html>")
    assert "<title>a model in bfloat16/master and bfloat16/word · Narrowgauge</title>" in page


@pytest.mark.parametrize("name", ["run.toml", "notes.txt"])
def test_a_report_takes_no_other_files_place(name: str, folder: Path) -> None:
    out = folder / "bfloat16-word-seed0" / name
    if not out.exists():
        out.write_text("mine")
    before = out.read_bytes()
    with pytest.raises(RecordError, match=r"the file there is no HTML page\. Name another"):
        report([folder], out)
    assert out.read_bytes() == before


@pytest.mark.parametrize("text", ["", "\n<!DOCTYPE html>\n<p>mine", "<html>"])
def test_a_report_takes_a_pages_place(text: str, folder: Path) -> None:
    (folder / "page.html").write_text(text)
    assert report([folder], folder / "page.html").stat().st_size > 1000


def test_a_report_on_no_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RecordError, match="no run was named"):
        report([], tmp_path / "page.html")


def test_a_run_that_may_not_be_looked_into_is_not_left_out_without_a_word(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed = folder / "bfloat16-word-seed0"
    close(monkeypatch, closed)
    for asked in (folder, closed):
        with pytest.raises(RecordError, match=f"Cannot use {closed}.*: Permission denied"):
            report([asked])
    assert not (folder / "report.html").exists()
