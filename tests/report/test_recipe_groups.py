"""Which runs form a group on a page, in which order, and their names."""

from __future__ import annotations

from collections.abc import Callable

from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.report.recipe_groups import final_loss, groups_of, run_names
from narrowgauge.runs.record import Run
from report.made_pages import group_runs

MakeRun = Callable[..., Run]


def test_seeds_of_a_recipe_stand_together(make_run: MakeRun) -> None:
    made = [make_run(recipe, seed) for seed in (0, 1) for recipe in ("bfloat16/word", "bfloat16/naive")]
    assert [(group.label, group.index, len(group.runs)) for group in group_runs(made)] == [
        ("bfloat16/word", 0, 2),
        ("bfloat16/naive", 1, 2),
    ]


def test_groups_have_the_order_of_the_comparison(make_run: MakeRun) -> None:
    made = [make_run("bfloat16/word"), make_run("bfloat16/naive"), make_run("bfloat16/master"), make_run(seed=1)]
    found = compare_runs(made)
    assert [group.label for group in groups_of(found)] == [row["recipe"] for row in found.rows]
    assert [group.label for group in groups_of(found)] == ["bfloat16/word", "bfloat16/naive", "bfloat16/master"]


def test_settings_that_differ_part_a_recipe(make_run: MakeRun) -> None:
    groups = group_runs([make_run(config={"lr": lr}) for lr in (1e-3, 1e-4)])
    assert len({group.label for group in groups}) == 2
    assert "0.001" in groups[0].label


def test_every_run_has_a_name_of_its_own(make_run: MakeRun) -> None:
    groups = group_runs([make_run(seed=0), make_run(seed=1), make_run("bfloat16/naive")])
    assert [name for _, name in run_names(groups)] == [
        "bfloat16/word · seed 0",
        "bfloat16/word · seed 1",
        "bfloat16/naive",
    ]


def test_an_unfinished_run_is_read_by_its_last_evaluation(make_run: MakeRun) -> None:
    run = make_run(loss=lambda step: float(step), finished=False)
    assert final_loss(run) == 100.1
    assert final_loss(make_run(steps=0, finished=False)) is None
