"""Memory against the plan: what a run counted beside what the planner says of its settings, or why there is nothing."""

from __future__ import annotations

import html
import re
from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.report.memory_section import memory_beside_plan
from narrowgauge.runs.record import Run
from report.made_pages import group_runs, page_of

MakeRun = Callable[..., Run]
SETTINGS = {"model": "llama-1m", "batch_size": 4, "sequence_length": 64, "gradient_accumulation_steps": 1}
COUNTED = {"state_bytes": 8144896, "peak_tensor_bytes": 18465676}
"""What a run of these settings counted in bfloat16/word, on a CPU with AVX512, of 1,016,960 parameters."""


def made(make_run: MakeRun, counted: dict[str, Any], **config: Any) -> Run:
    run = make_run(config={**SETTINGS, **config})
    assert run.summary is not None
    run.summary.update(counted)
    return run


def test_a_run_that_was_counted_is_as_planned(make_run: MakeRun) -> None:
    found = memory_beside_plan(group_runs([made(make_run, COUNTED)]))
    assert found.table is not None and not found.lines
    (line,) = found.table.lines
    state, planned_state, peak, planned_peak = line.cells
    assert state.value == planned_state.value == 8144896 and state.spread == "±0.0 %"
    assert peak.value is not None and planned_peak.value is not None
    assert abs(peak.value / planned_peak.value - 1) < 0.001 and peak.spread == "+0.1 %"
    assert planned_peak.spread == "13.2 MiB to 18.2 MiB"


def test_a_count_beyond_the_plan_says_by_how_much(make_run: MakeRun) -> None:
    more, less = ({"state_bytes": factor * 8144896} for factor in (1.25, 0.5))
    tables = [memory_beside_plan(group_runs([made(make_run, counted)])).table for counted in (more, less)]
    assert [table and table.lines[0].cells[0].spread for table in tables] == ["+25.0 %", "−50.0 %"]
    # What was not counted is a dash beside its plan.
    assert tables[0] is not None and tables[0].lines[0].cells[2].text == "–"


def test_sums_of_micro_batches_and_more_ranks_are_in_the_plan(make_run: MakeRun) -> None:
    states = {}
    for name, settings in {"one": {}, "sums": {"gradient_accumulation_steps": 2}, "replaced": {"rule": "lion"}}.items():
        table = memory_beside_plan(group_runs([made(make_run, COUNTED, **settings)])).table
        assert table is not None
        states[name] = table.lines[0].cells[1].value or 0.0
    parameters = 1016960
    assert states["sums"] - states["one"] == pytest.approx(4 * parameters, rel=1e-3)
    assert states["replaced"] < states["one"]


def test_of_a_run_under_way_the_least_peak_of_its_counted_steps_is_shown(make_run: MakeRun) -> None:
    run = make_run(config=SETTINGS, finished=False)
    run.steps[2]["peak_tensor_bytes"], run.steps[3]["peak_tensor_bytes"] = 30_000_000, 18_465_676
    table = memory_beside_plan(group_runs([run])).table
    assert table is not None and table.lines[0].cells[2].value == 18_465_676
    assert table.lines[0].cells[0].value is None


@pytest.mark.parametrize(
    ("counted", "config", "why"),
    [
        ({}, {}, "no memory is recorded"),
        (COUNTED, {"model": "no/such/model"}, "no model and no config.json"),
        (COUNTED, {"batch_size": None}, "do not say batch_size"),
        (COUNTED, {"sequence_length": "long"}, "'long' tokens"),
        (COUNTED, {"rule": "sgd"}, "the update rule sgd"),
        (COUNTED, {"offload": True}, "--offload"),
        (COUNTED, {"batch_size": 3, "gradient_accumulation_steps": 2}, "2 micro-batches"),
    ],
)
def test_without_a_count_or_a_plan_nothing_is_drawn_and_a_sentence_says_why(
    make_run: MakeRun, counted: dict[str, Any], config: dict[str, Any], why: str
) -> None:
    run = made(make_run, counted, **config)
    found = memory_beside_plan(group_runs([run]))
    assert found.table is None
    (line,) = found.lines
    assert line.startswith("bfloat16/word") and why in line
    section = re.search(r'<section id="memory".*?</section>', page_of([run]), re.DOTALL)
    assert section is not None and why in html.unescape(section[0]) and "<table" not in section[0]
