"""Plans beside published runs are as close as documented, and four of five within their interval. Held-out runs are not read."""

from __future__ import annotations

import statistics
from typing import Any

import pytest

from narrowgauge.planner.efficiency import error_of
from script_modules import benchmark_module


@pytest.fixture(scope="module")
def benchmark() -> Any:
    return benchmark_module("published_runs")


@pytest.mark.parametrize(("assumed", "mean"), [(False, 0.115), (True, 0.178)])
def test_runs_in_view_are_planned_as_documented(benchmark: Any, assumed: bool, mean: float) -> None:
    points = benchmark.points_in_view(assumed=assumed)
    assert len(points) == 131
    errors = [abs(point.error) for point in points]
    assert statistics.mean(errors) < mean and statistics.median(errors) < 0.12
    assert 0.75 <= statistics.mean(point.is_inside for point in points) <= 0.85
    for kind in (False, True):
        ratios = [point.ratio for point in points if point.has_mixture == kind]
        written = error_of(has_mixture=kind, has_software=not assumed)
        assert benchmark.interval_of(ratios) == pytest.approx(written, abs=6e-4), "run published_runs.py --write"
    dense = [point for point in points if not point.has_mixture]
    assert 0.75 <= benchmark.held_by_others(dense) <= 0.85


def test_calculons_points_are_met_within_a_tenth(benchmark: Any) -> None:
    """Calculon itself meets its eight to 3.65 % in the mean and 8.87 % at worst; two of them are held out."""
    points = benchmark.points_in_view(assumed=False)
    errors = [abs(point.error) for point in points if point.name.startswith("megatron-2022")]
    assert len(errors) == 6
    assert statistics.mean(errors) < 0.05 and max(errors) < 0.1
