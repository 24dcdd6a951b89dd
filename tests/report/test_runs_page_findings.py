"""The diagnosis on the report: what was found, where it is marked, and a page whatever the diagnosis does."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.analysis.diagnosis import diagnosis
from narrowgauge.report import runs_page as section
from narrowgauge.report.runs_page import run_findings
from narrowgauge.runs.record import Run
from report.made_pages import group_runs, page_of
from report.test_page_in_browser import data_of

MakeRun = Callable[..., Run]


def spiked(step: int) -> float:
    return 9.0 if step == 60 else 2.0 + 5.0 * math.exp(-step / 30)


@pytest.fixture
def runs(make_run: MakeRun) -> list[Run]:
    """A healthy run, and one with a batch of noise at step 60."""
    event = {
        "kind": "loss_spike",
        "step": 60,
        "message": "the loss jumped to 9 (threshold 3, z = 40)",
        "detector": "loss-spike",
        "threshold": 3.0,
    }
    return [make_run(), make_run("bfloat16/master", loss=spiked, events=(event,))]


def test_a_finding_has_its_row_and_its_marks_and_healthy_runs_a_line(runs: list[Run]) -> None:
    found = run_findings(group_runs(runs))
    assert [(row.run, row.finding.name, row.finding.step) for row in found.rows] == [
        ("bfloat16/master", "bad-data", 60)
    ]
    assert found.rows[0].command == f"narrowgauge diagnose {runs[1].path}" and found.rows[0].finding.advice
    assert found.lines == ["No sign of a fault in bfloat16/word."]
    page = page_of(runs)
    assert '<table class="events findings"' in page and ">bad-data</span>" in page
    data = data_of(page)
    for name in section.MARKED:
        (mark,) = (trace for trace in data["figures"][name]["data"] if trace.get("yaxis") == "y2")
        assert mark["x"] == [60, 60] and "bad-data: first sign at step 60" in mark["hovertemplate"]
    (sign,) = (trace for trace in data["strip"]["data"] if trace["name"] == "first sign")
    assert (sign["x"], sign["y"]) == ([60], [found.rows[0].line])


def test_the_same_finding_of_several_seeds_is_one_row(runs: list[Run], make_run: MakeRun) -> None:
    later = make_run(
        "bfloat16/master", seed=1, loss=lambda step: spiked(step - 20), events=(runs[1].events[0] | {"step": 80},)
    )
    found = run_findings(group_runs([*runs, later]))
    assert [row.finding.step for row in found.rows] == [60, 80], "each has its mark"
    (shared,) = found.shared
    assert (shared.steps, shared.runs) == ("60–80", "bfloat16/master, 2 runs")
    page = page_of([*runs, later])
    assert (
        page.count('<span class="kind">bad-data</span>') == 1
        and "<td>60–80</td><td>bfloat16/master, 2 runs</td>" in page
    )
    of_each = page.partition("<summary>each run</summary>")[2].partition("</details>")[0]
    assert f"narrowgauge diagnose {later.path}" in of_each and ", step 80: " in of_each
    (alone,) = run_findings(group_runs(runs)).shared
    assert (alone.steps, alone.runs) == ("60", "bfloat16/master")


def test_a_record_that_does_not_tell_is_a_row_without_a_cause_and_without_a_mark(make_run: MakeRun) -> None:
    # Not falling, and nothing else: several causes explain that.
    run = make_run(steps=200, loss=lambda step: 3.0 + 0.01 * (step % 3))
    (row,) = run_findings(group_runs([run])).rows
    assert (
        row.finding.name == ""
        and row.finding.message.startswith("In question: ")
        and row.finding.advice.startswith("To tell: ")
    )
    assert "first sign of what" not in json.dumps(data_of(page_of([run])))


def test_a_diagnosis_that_fails_leaves_the_page_as_it_is(runs: list[Run], monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise ZeroDivisionError("<b>by zero</b>")

    monkeypatch.setattr(diagnosis, "observe", fail)
    page = page_of(runs)
    assert (
        page.count("the diagnosis failed, which concerns nothing else on this page (ZeroDivisionError: &lt;b&gt;by")
        == 2
    )
    assert "finding-table" not in page and 'id="cost-table"' in page
