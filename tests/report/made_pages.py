"""Recipes and pages of runs that a test made up."""

from __future__ import annotations

from collections.abc import Sequence

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.recipe_groups import Group, groups_of
from narrowgauge.report.runs_page import render
from narrowgauge.runs.record import Run


def group_runs(runs: Sequence[Run]) -> list[Group]:
    """The recipes of a page of these runs."""
    return groups_of(compare_runs(runs))


def page_of(runs: Sequence[Run]) -> str:
    """The page of these runs."""
    return render(compare_runs(runs))
