"""Plans are as close to published training runs as documented."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from narrowgauge.planner.errors import error_of
from narrowgauge.spec.chips import CHIPS
from script_modules import benchmark_module


@pytest.fixture(scope="module")
def planned() -> Any:
    return benchmark_module("published_runs")


@pytest.mark.parametrize(("assumed", "mean"), [(False, 0.12), (True, 0.17)])
def test_runs_in_view_are_planned_as_documented(planned: Any, assumed: bool, mean: float) -> None:
    points = planned.points_in_view(assumed=assumed)
    assert len(points) == 145
    errors = [abs(point.error) for point in points]
    assert statistics.mean(errors) < mean and statistics.median(errors) < 0.13
    assert statistics.mean(point.is_inside for point in points) >= 0.8


def test_the_error_bars_are_those_of_the_residuals(planned: Any) -> None:
    """Of a few synthetic residuals by hand: quantiles, all of a few values, and a publication that
    the others must hold.
    """
    rows = []
    for place in range(12):
        rows.append(planned.Residual("dense", str(place % 4), 0.9 + 0.02 * place))
    assert planned.widening_of(rows) >= 1 and planned.held_by_others(rows, 2.0) == 1.0
    low, high = planned.interval_of([row.ratio for row in rows])
    assert low == pytest.approx(0.922) and high == pytest.approx(1.098)
    for quantity in ("speed", "memory"):
        for kind in ("dense", "long", "adapters"):
            ends = error_of(quantity, kind, CHIPS["A100-SXM4-80GB"])
            assert ends is not None and ends[0] < ends[1], "run published_runs.py --write"


def test_the_memory_of_published_runs_is_planned_as_documented(planned: Any) -> None:
    """All runs ran. Printed peaks are what the allocator reserved."""
    points = planned.points_in_view(assumed=False)
    stated = [point for point in points if "recompute" in point.run.step]
    assert statistics.mean(point.job.fits for point in stated) >= 0.95
    errors = []
    for point in points:
        if point.peak:
            errors.append(abs(point.job.reserved_bytes / point.peak - 1))
    assert len(errors) == 23 and statistics.mean(errors) < 0.07 and max(errors) < 0.2


def test_calculons_points_are_met_within_a_tenth(planned: Any) -> None:
    """Calculon itself meets its eight to 3.65 % in the mean and 8.87 % at worst; two of them are
    held out.
    """
    points = planned.points_in_view(assumed=False)
    errors = []
    for point in points:
        if point.name.startswith("megatron-2022"):
            errors.append(abs(point.error))
    assert len(errors) == 6
    assert statistics.mean(errors) < 0.05 and max(errors) < 0.1
