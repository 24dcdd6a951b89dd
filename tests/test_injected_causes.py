"""Every cause of the diagnosis' table is injected, or says why not, and three that take little time are named first."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmark_modules import benchmark_module
from narrowgauge.analysis.diagnosis.causes import CAUSES, HEALTHY
from narrowgauge.analysis.diagnosis.signs.step_signs import level_of

injections = benchmark_module("injections")
matrix = benchmark_module("_matrix")
injected_runs = benchmark_module("_injected_runs")

pytestmark = pytest.mark.usefixtures("one_thread")

FAST = (
    "bad-data.plain.bfloat16-master",
    "dead-layer.strong.bfloat16-word",
    "lost-updates.strong.bfloat16-naive",
)


def test_each_cause_is_injected_or_says_why_not() -> None:
    injected = {row.expected for row in injections.INJECTIONS.values()}
    stated = injected | set(injections.NOT_INJECTED)
    assert stated == set(CAUSES) - {HEALTHY}, (
        "benchmarks/injections.py injects each cause, or says in NOT_INJECTED why not"
    )
    assert not injected & set(injections.NOT_INJECTED) and all(injections.NOT_INJECTED.values())
    assert {row.cause for row in injections.INJECTIONS.values()} == set(injections.LIVE)


def test_the_halves_share_nothing_and_each_has_every_cause() -> None:
    halves = {half: injections.of_half(half) for half in ("tuning", "aside")}
    names = {half: {row.name for row in rows} for half, rows in halves.items()}
    assert not names["tuning"] & names["aside"] and names["tuning"] | names["aside"] == set(injections.INJECTIONS)
    for rows in halves.values():
        assert {row.expected for row in rows} == {row.expected for row in injections.INJECTIONS.values()}
    # A hash of the name decides, and nothing else: what was kept aside stays so.
    assert all(injections.INJECTIONS[name].half == "tuning" for name in FAST)


@pytest.mark.parametrize("name", FAST)
def test_a_fast_injection_takes_effect_and_is_named_first(name: str, tmp_path: Path) -> None:
    injection = injections.INJECTIONS[name]
    injected_runs.prepare(tmp_path / "place")
    run = injected_runs.injected_run(tmp_path / "place", tmp_path / "run", injection)
    outcome = matrix.injected_outcome(run, injection)
    assert outcome.answer == "first", (outcome.named, outcome.sure)


def test_gradients_that_are_zero_have_no_level() -> None:
    # A flipped bit may leave no gradient but zero: nothing is so many times that.
    assert level_of([0.0] * 20) is None and level_of([2.0] * 20) == 2.0 and level_of([2.0]) is None
