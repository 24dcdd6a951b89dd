"""What the cost table marks: recipes not to be used, and the best beyond chance."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest

from narrowgauge.comparison.comparison import compare_runs
from narrowgauge.report.cost_tables import cost_table
from narrowgauge.report.groups import group_runs
from narrowgauge.report.marks import swatch
from narrowgauge.report.standing import best_of, faults_of, late_of
from narrowgauge.runs.record import Run

MakeRun = Callable[..., Run]


def made(make_run: MakeRun, recipe: str, losses: list[float], **summary: Any) -> list[Run]:
    """A run per loss; other figures of the summary as given."""
    runs = [make_run(recipe, seed, loss=lambda step, loss=loss: loss) for seed, loss in enumerate(losses)]
    return [dataclasses.replace(run, summary={**(run.summary or {}), **summary}) for run in runs]


def bold(runs: list[Run]) -> dict[str, list[str]]:
    """By recipe what its row prints in bold."""
    found = compare_runs(runs)
    markup = cost_table(group_runs(runs, found.rows), found.rows, found)
    rows = re.findall(r'<th scope="row">(.*?)</th>(.*?)</tr>', markup, re.DOTALL)
    names = [re.sub("<[^>]*>", "", name.partition("<span")[0]) for name, _ in rows]
    return {name: re.findall("<strong>(.*?)</strong>", cells) for name, (_, cells) in zip(names, rows, strict=True)}


def losing(run: Run) -> Run:
    """A run whose updates arrive at first and are lost late."""
    steps = [row | {"edq": 1.0 if row["step"] < 90 else 0.25, "lost_fraction": 0.75} for row in run.steps]
    return dataclasses.replace(run, steps=steps, summary={**(run.summary or {}), "edq": 0.99, "lost_fraction": 0.2})


def test_a_loss_is_bold_only_where_the_seeds_tell_it_apart(make_run: MakeRun) -> None:
    master = made(make_run, "bfloat16/master", [3.0, 3.1, 3.2], bytes_per_param=16.0)
    even = made(make_run, "bfloat16/word", [2.99, 3.11, 3.19], bytes_per_param=8.04)
    assert bold(master + even) == {"bfloat16/master": [], "bfloat16/word": ["8.04"]}
    better = made(make_run, "bfloat16/word", [2.90, 3.01, 3.09], bytes_per_param=8.04)
    assert bold(master + better)["bfloat16/word"] == ["3.1000", "8.04"]
    # With one seed nothing is told apart.
    assert bold(master[:1] + better[:1])["bfloat16/word"] == ["8.04"]


def test_recipes_not_to_be_used_have_a_badge_and_nothing_in_bold(make_run: MakeRun) -> None:
    master = made(make_run, "bfloat16/master", [3.0, 3.1, 3.2], bytes_per_param=16.0)
    word = made(make_run, "bfloat16/word", [3.0, 3.1, 3.2], bytes_per_param=8.04)
    naive = [losing(run) for run in made(make_run, "bfloat16/naive", [2.5, 2.6, 2.7], bytes_per_param=8.0)]
    runs = master + word + naive
    found = compare_runs(runs)
    groups = group_runs(runs, found.rows)
    assert list(faults_of(found)) == ["bfloat16/naive"]
    assert bold(runs) == {"bfloat16/master": [], "bfloat16/word": ["8.04"], "bfloat16/naive": []}
    (row,) = (row for row in cost_table(groups, found.rows, found).split("<tr>") if "naive" in row)
    assert "not to be used" in row and "loses its updates" in row
    # What it lost late, as the verdict has it, and not the run's sums.
    assert "0.250" in row and "75 %" in row and "0.990" not in row


def test_late_readings_are_of_runs_that_count(make_run: MakeRun) -> None:
    (group,) = group_runs([losing(make_run())])
    assert late_of(group, "edq") == pytest.approx(0.25)
    assert late_of(None, "edq") is None


def test_speed_is_the_best_where_every_seed_agrees(make_run: MakeRun) -> None:
    def best(*rates: list[float]) -> frozenset[str]:
        runs = []
        for recipe, found in zip(("bfloat16/master", "bfloat16/word"), rates, strict=True):
            for seed, rate in enumerate(found):
                (run,) = made(make_run, recipe, [3.0], tokens_per_second=rate)
                run.run["config"]["seed"] = seed
                runs.append(run)
        rows = compare_runs(runs).rows
        members = {group.label: group for group in group_runs(runs)}
        return best_of("tokens_per_second", False, rows, members, {})

    assert best([100.0, 100.0, 100.0], [101.0, 102.0, 103.0]) == {"bfloat16/word"}
    assert best([100.0, 100.0, 100.0], [120.0, 130.0, 99.0]) == frozenset()
    # Half a percent is nothing to choose by, however well the seeds agree; nor is what is printed alike.
    assert best([100.0, 100.0], [100.4, 100.4]) == frozenset()
    assert best([100.0, 100.0], [101.0, 100.4]) == frozenset()
    assert best([1000.0, 1000.0], [1006.0, 1006.0]) == {"bfloat16/word"}
    assert best([100.0], [105.0]) == frozenset()
    assert best([100.0], [120.0]) == {"bfloat16/word"}


def test_what_is_printed_alike_is_not_in_bold(make_run: MakeRun) -> None:
    def memory(*sizes: float) -> dict[str, list[str]]:
        made_up = zip(("bfloat16/master", "bfloat16/word"), sizes, strict=True)
        return bold(
            [
                run
                for recipe, size in made_up
                for run in made(make_run, recipe, [3.0, 3.0], peak_memory_bytes=size * 2**20)
            ]
        )

    assert memory(740.12, 740.0) == {"bfloat16/master": [], "bfloat16/word": []}
    assert memory(750.0, 740.0)["bfloat16/word"] == ["740 MiB"]
    # More than half a percent, and yet the same on paper.
    assert memory(3.4, 2.6) == {"bfloat16/master": [], "bfloat16/word": []}
    worse = made(make_run, "bfloat16/master", [3.00002, 3.00002, 3.00002])
    better = made(make_run, "bfloat16/word", [3.00001, 3.00001, 3.00001])
    assert bold(worse + better) == {"bfloat16/master": [], "bfloat16/word": []}


def test_recipes_that_spend_the_same_share_the_bold(make_run: MakeRun) -> None:
    runs = made(make_run, "bfloat16/master", [3.0], bytes_per_param=16.0)
    runs += made(make_run, "bfloat16/word", [3.0], bytes_per_param=8.04)
    runs += made(make_run, "float8-row/word", [3.0], bytes_per_param=8.0)
    assert bold(runs) == {"bfloat16/master": [], "bfloat16/word": ["8.04"], "float8-row/word": ["8"]}
    assert bold(runs[1:]) == {"bfloat16/word": [], "float8-row/word": []}


def test_every_recipe_has_a_mark_of_its_own() -> None:
    assert len({swatch(place) for place in range(32)}) == 32
    assert swatch(None) == ""
