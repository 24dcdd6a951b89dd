"""The labels of recipes, runs and folders, which are the same on the page and in compare.json."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

from analysis.comparison.made_runs import made, seeds, sentence
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.analysis.comparison.labels import recipe_name, run_labels, run_name
from narrowgauge.report.recipe_groups import groups_of


def test_names_of_recipes_and_folders() -> None:
    assert run_name("a/../b <script>", 3) == "a-..-b--script--seed3" and run_name("..", 0) == "recipe-seed0"
    assert recipe_name({"recipe": "bf16/word", "phase": [{"until": 0.5, "compute": "float8-row"}]}) == (
        "bfloat16/word with phase"
    )


def test_runs_of_one_recipe_that_differ_otherwise_are_recipes_of_their_own() -> None:
    runs = [made("bfloat16/word", 0, loss, config={"lr": lr}) for loss, lr in ((4.0, 1e-3), (4.1, 1e-4))]
    found = compare_runs(runs)
    assert [row["recipe"] for row in found.rows] == ["bfloat16/word, lr 0.001", "bfloat16/word, lr 0.0001"]
    assert "lr 0.001, 0.0001" in sentence(found, "The runs differ")


def test_settings_that_only_some_runs_record_stay_out_of_labels() -> None:
    many = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1}
    run = made("bfloat16/word", 0, 4.0)
    whole, own = ({**run.config, "steps": 12, **many}, {**run.config, "steps": 200})
    runs = [replace(run, run={"config": config}, path=Path(name)) for name, config in (("a", whole), ("b", own))]
    assert run_labels(runs) == ["bfloat16/word, steps 12", "bfloat16/word, steps 200"]
    own["steps"] = 12
    assert run_labels(runs) == ["bfloat16/word (a)", "bfloat16/word (b)"]


def test_the_page_and_compare_json_have_the_same_labels() -> None:
    table = {"recipe": "bf16/word", "keep": ["lm_head"]}
    runs = [made("", 0, 4.0, config={"recipe": recipe}) for recipe in ("bf16/word", "bfloat16/compact", table, "mine")]
    runs += [made("bfloat16/compact", 0, 4.1, config={"lr": 1e-4})]
    rows = [row["recipe"] for row in json.loads(compare_runs(runs).json())]
    assert rows == [group.label for group in groups_of(compare_runs(runs))] == run_labels(runs)
    assert rows[0] == "bfloat16/word" and rows[2] == "bfloat16/word with keep" and rows[4].endswith("lr 0.0001")


def test_the_same_run_in_two_comparisons_is_two_and_each_keeps_its_seeds_together() -> None:
    runs = [
        replace(run, path=Path(folder) / run.path)
        for folder in ("old", "new")
        for run in seeds("bfloat16/word", (4.0, 4.1))
    ]
    assert run_labels(runs) == ["bfloat16/word (old)"] * 2 + ["bfloat16/word (new)"] * 2


def test_runs_that_differ_in_nothing_else_are_labelled_by_their_folders() -> None:
    run = made("bfloat16/word", 0, 4.0)
    assert run_labels([replace(run, path=Path(name)) for name in ("a/one", "a/two")]) == [
        "bfloat16/word (one)", "bfloat16/word (two)",
    ]  # fmt: skip
    places = [Path("a/same/one"), Path("b/same/one")]
    assert run_labels([replace(run, path=place) for place in places]) == [
        f"bfloat16/word ({place})" for place in places
    ]
