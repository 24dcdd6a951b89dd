"""Memory against the plan: what a run counted beside what the planner says of its settings, or why there is nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from narrowgauge.report.memory_section import memory_beside_plan
from narrowgauge.runs.record import Run
from report.made_pages import group_runs

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
    section = memory_beside_plan(group_runs([made(make_run, COUNTED)]))
    (row,) = section.table.rows
    assert not section.lines and row["recipe"] == "bfloat16/word"
    assert (row["state"], row["state_plan"]) == ("7.8 MiB (±0.0 %)", "7.8 MiB")
    assert (row["peak"], row["peak_plan"]) == ("17.6 MiB (+0.1 %)", "17.6 MiB")
    assert row["interval"] == "13.2 MiB to 18.2 MiB"
