"""The section on ranks: only of runs that have some, with the slow one in sight and every number of the record in the table."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.report.figures.loss_figures import comparison_figures
from narrowgauge.report.figures.rank_figures import MOST_RANKS, MOST_RUNS, rank_figures, rank_rows
from narrowgauge.report.recipe_groups import run_names
from narrowgauge.runs.record import Run
from report.made_pages import group_runs, page_of

MakeRun = Callable[..., Run]
EVERY = 10


def on_ranks(run: Run, num_last: list[int], late: float = 0.1, until: int | None = None) -> Run:
    """A run of steps of half a second, a quarter of it in collectives, with these tables of ranks."""
    ranks = range(len(num_last))
    for row in run.steps[:until]:
        row |= {"communication_bytes": 3.0 * 2**20, "communication_seconds": 0.125, "wait_seconds": 0.05}
        if row["step"] % EVERY == 0:
            row["ranks"] = {
                "num_steps": EVERY,
                "communication_bytes": [3.0 * 2**20 + rank for rank in ranks],
                "communication_seconds": [0.125 + rank / 1000 for rank in ranks],
                "wait_seconds": [0.01 * rank for rank in ranks],
                "num_last": num_last,
                "late_seconds": [late if count else 0.0 for count in num_last],
            }
    return run


def test_a_page_of_runs_without_ranks_has_no_such_section(make_run: MakeRun) -> None:
    page = page_of([make_run()])
    assert 'id="ranks"' not in page and 'href="#ranks"' not in page


def test_a_page_of_ranks_has_the_section_and_its_link(make_run: MakeRun) -> None:
    page = page_of([on_ranks(make_run(), [1, 9])])
    assert 'id="ranks"' in page and 'href="#ranks"' in page and 'id="rank-table"' in page
    assert "3 MiB" in page and "0.135 s" not in page and "0.126 s" in page


def test_shares_of_a_step_are_drawn(make_run: MakeRun) -> None:
    figure = rank_figures(group_runs([on_ranks(make_run(), [5, 5])]))[0]
    inside, waiting = figure.data
    assert (inside["name"], inside["line"]["dash"], set(inside["y"])) == ("bfloat16/word", "solid", {0.25})
    assert (waiting["line"]["dash"], set(waiting["y"])) == ("dot", {0.1})


def test_the_row_of_the_slow_rank_is_bright(make_run: MakeRun) -> None:
    """It was late by 0.1 s in 9 of 10 steps of 0.5 s."""
    figure = rank_figures(group_runs([on_ranks(make_run(), [1, 0, 9])]))[1]
    (trace,) = figure.data
    assert trace["x"] == [*range(EVERY, 101, EVERY)]
    assert [set(row) for row in trace["z"]] == [{0.02}, {0.0}, {0.18}]
    assert trace["zmax"] == 0.18 and figure.layout["yaxis"]["ticktext"] == ["rank 0", "rank 1", "rank 2"]


def test_noise_stays_dark(make_run: MakeRun) -> None:
    (trace,) = rank_figures(group_runs([on_ranks(make_run(), [5, 5], late=0.001)]))[1].data
    assert trace["zmax"] == 0.05


def test_the_table_has_the_means_over_the_run(make_run: MakeRun) -> None:
    rows, left_out = rank_rows([(on_ranks(make_run(), [1, 9]), "one")])
    assert left_out == 0 and [(row.run, row.rank) for row in rows] == [("one", 0), ("one", 1)]
    assert [text for text, _ in rows[1].cells] == ["3 MiB", "0.126 s", "0.01 s", "90%", "0.1 s"]
    assert [value for _, value in rows[1].cells] == pytest.approx([3.0 * 2**20 + 1, 0.126, 0.01, 0.9, 0.1])


def test_a_run_that_went_on_with_fewer_ranks_counts_those_that_are_left(make_run: MakeRun) -> None:
    run = on_ranks(on_ranks(make_run(), [9, 1]), [1, 0, 9], until=50)
    rows, _ = rank_rows([(run, "one")])
    assert [row.rank for row in rows] == [0, 1] and rows[0].cells[3] == ("90%", 0.9)
    (trace,) = rank_figures(group_runs([run]))[1].data
    assert trace["z"][2] == [0.18] * 5 + [None] * 5


def test_of_many_ranks_and_runs_the_slowest_are_shown(make_run: MakeRun) -> None:
    many = [*range(MOST_RANKS + 6)]
    runs = [on_ranks(make_run(seed=seed), many) for seed in range(MOST_RUNS + 2)]
    groups = group_runs(runs)
    figures = comparison_figures(groups)["ranks"]
    assert len(figures) == 1 + MOST_RUNS
    assert figures[1].layout["yaxis"]["ticktext"] == [f"rank {rank}" for rank in range(6, MOST_RANKS + 6)]
    assert "2 more runs have no map" in figures[1].how and f"{MOST_RANKS} of {MOST_RANKS + 6} ranks" in figures[1].how
    _, left_out = rank_rows(run_names(groups))
    assert left_out == 6 * len(runs)


@pytest.mark.parametrize("table", [{}, None, [1], {"num_steps": 3}])
def test_a_foreign_column_of_that_name_is_passed_over(table: Any, make_run: MakeRun) -> None:
    run = make_run(more={"ranks": table})
    assert rank_figures(group_runs([run])) == [] and rank_rows([(run, "one")]) == ([], 0)
