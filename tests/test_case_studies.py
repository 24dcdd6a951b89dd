"""The case studies of the documentation: the stored records say what the page says, and hold nothing of their machine."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import narrowgauge as ng
from benchmark_modules import benchmark_module
from narrowgauge.runs.archive import files_in, read_bytes
from script_modules import script_module

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


studies = script_module("docs/case_studies.py")


@pytest.mark.parametrize("name", studies.STUDIES)
def test_the_stored_runs_are_diagnosed_as_the_page_says(name: str) -> None:
    markdown = (DOCS / "case-studies.md").read_text(encoding="utf-8")
    told = re.search(rf"<!-- diagnosis: {name} -->\n```text\n(.*?)```", markdown, re.DOTALL)
    assert told is not None and f"case-studies/{name}.html" in markdown
    study = studies.STUDIES[name]
    found = ng.diagnose(*studies.shown_runs(name)).to_dict()
    known = {row["cause"]: row for row in found.get("findings", ())} or {
        max(found["reasons"], key=found["reasons"].get): found
    }
    assert study.cause in known, found["verdict"]
    mend = known[study.cause]
    assert f"({study.cause})" in told[1] and f"step {mend['step']}" in told[1] and mend["tensor"] in told[1]
    *_, mended = study.runs
    path = studies.STUDIES_AT / f"{name}.zip" / name / mended
    same = ng.diagnose(studies.shown_runs(name)[0], path).to_dict() if len(study.shown) == 2 else {}
    assert same["same"] if same else ng.diagnose(path).is_healthy


def test_the_records_are_small_and_hold_no_path() -> None:
    files = sorted(studies.STUDIES_AT.glob("*.zip"))
    assert {file.stem for file in files} == set(studies.STUDIES)
    assert sum(file.stat().st_size for file in files) < 300_000
    for file in files:
        texts = {path: (read_bytes(path) or b"").decode() for path in files_in(file)}
        assert not any("/work/" in text or "/tmp/" in text or "/home/" in text for text in texts.values())
    assert json.loads((studies.STUDIES_AT / "tiny" / "config.json").read_text())["hidden_size"] == 64


def test_pages_are_made_of_one_run_and_of_two() -> None:
    assert "Diagnosis of rate-0.1" in studies.page("overflow")
    assert "Diagnosis of before and after" in studies.page("scaled-gradient")


def test_the_sixteen_questions_are_rows_of_the_benchmark_and_say_right_what_is_right() -> None:
    rows = {row.name: row for row in benchmark_module("public_bugs").ROWS}
    table = (
        (DOCS / "case-studies.md")
        .read_text(encoding="utf-8")
        .partition("<!-- sixteen -->\n")[2]
        .strip()
        .splitlines()[2:]
    )
    assert len(table) == 16
    for line in table:
        _, link, *answers = (cell.strip() for cell in line.strip("|").split("|"))
        found = re.fullmatch(r"\[(.+)\]\((.+)\)", link)
        assert found is not None and rows[found[1]].source == found[2], line
        row = rows[found[1]]
        for answer, right in zip(answers, (row.audit, row.pair, row.rows), strict=True):
            said = re.fullmatch(r"–|`(.+?)`( \(wrong\))?", answer)
            assert said is not None and (not said[1] or (said[1] in right) is not bool(said[2])), line
