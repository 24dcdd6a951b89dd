"""Plans are as close to published training runs as documented, and their intervals are those of the
errors.
"""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from narrowgauge.planner.errors import ERRORS
from script_modules import benchmark_module


@pytest.fixture(scope="module")
def published() -> Any:
    return benchmark_module("published_runs")


def test_runs_in_view_asked_by_name_are_planned_as_documented(published: Any) -> None:
    facts = published.all_facts(published.load(held_out=False, kinds=("run",)))
    speeds = [fact for fact in facts if fact.what == "speed"]
    assert len(speeds) == 149
    errors = [abs(fact.error) for fact in speeds]
    assert statistics.mean(errors) < 0.23 and statistics.median(errors) < 0.13
    assert 0.75 <= statistics.mean(fact.is_inside for fact in speeds) <= 0.9
    for kind in ("dense", "mixture"):  # one publication left out
        chosen = [fact for fact in speeds if fact.kind == kind]
        assert published.held_by_others(chosen, 1.0) >= 0.65
        assert ERRORS["speed"][kind]["low"] < 1 < ERRORS["speed"][kind]["high"]


def test_the_memory_of_stated_layouts_is_planned_as_documented(published: Any) -> None:
    """All runs ran. Printed peaks are what the allocator reserved."""
    rows = [row for row in published.load(held_out=False) if len(row["fact"]) > 1]
    facts = published.all_facts(rows, stated=True)
    errors = [abs(fact.error) for fact in facts if fact.what == "memory"]
    assert len(errors) >= 30 and statistics.mean(errors) < 0.12


def test_the_intervals_of_synthetic_errors_by_hand(published: Any) -> None:
    facts = []
    for place in range(12):
        ratio = 0.9 + 0.02 * place
        facts.append(published.Fact("", str(place % 4), "dense", "speed", ratio, 1.0, (0, 2)))
    low, high = published.ends_of([fact.ratio for fact in facts])
    assert (low, high) == pytest.approx((0.922, 1.098))
    assert published.held_by_others(facts, 2.0) == 1.0
