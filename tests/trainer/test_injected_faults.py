"""Every fault of ``benchmarks/_faults.py``, in a tiny run: told of in time, by the right name, and not before.

The table of faults lies with the benchmark that publishes it at full size, and is loaded from there, by its path:
the names of other benchmarks are those of modules that tests import.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from benchmark_modules import benchmark_module
from narrowgauge.analysis.detectors import SERIOUS
from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import loop
from trainer.tiny_runs import settings

pytestmark = pytest.mark.usefixtures("one_thread")


faults = benchmark_module("_faults")
EVERY, AT = 4, 25
NEEDS_WIDTH = {
    "noise above the updates": "a tiny model's updates at that rate are a third of the noise that the alarm begins at",
}
SEEN_LATER = {"attention logits that grow": 8}
"""Steps between samples where a tiny model takes longer: its logits begin at a hundredth of a large one's."""
UNSTRUCK = ["bfloat16/word", "float16/split", "float8-row/word", "int8-row/word"]
"""The faults' recipes, but for ``naive`` and ``stochastic``: these lose updates unstruck, and say so rightly."""
FAULTS = [name for name in faults.FAULTS if name not in NEEDS_WIDTH]


def run_with(place: Path, folder: Path, within: Any, **changes: Any) -> Run:
    quiet = {"log_every": 1000, "eval_every": 0, "eval_batches": 1, "checkpoint_every": 0, "schedule": "constant"}
    with within:
        return read_run(loop.train(settings(place, folder, **{**quiet, "gauges_every": EVERY, **changes})))


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_told_in_time_and_by_name(place: Path, tmp_path: Path, name: str) -> None:
    fault = faults.FAULTS[name]
    at, every = fault.at(AT), fault.settings.get("gauges_every", SEEN_LATER.get(name, EVERY))
    by = fault.deadline(at, every)
    run = run_with(
        place, tmp_path / "run", faults.struck(fault, at), **{"steps": by, "gauges_every": every, **fault.settings}
    )
    told = fault.first_event(run.events, at)
    seen = [(event["kind"], event["step"], event.get("tensor")) for event in run.events]
    assert told is not None and told["step"] <= by, seen
    assert not [event for event in run.events if event["kind"] in fault.kinds and event["step"] < at], seen


@pytest.mark.parametrize("recipe", UNSTRUCK)
def test_the_same_runs_unstruck_raise_nothing_serious(place: Path, tmp_path: Path, recipe: str) -> None:
    run = run_with(place, tmp_path / "run", nullcontext(), steps=60, recipe=recipe)
    assert [event for event in run.events if event["kind"] in SERIOUS] == [] and len(run.gauges) == 15
