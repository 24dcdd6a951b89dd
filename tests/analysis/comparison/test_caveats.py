"""Differences between runs that should not be there, and unfinished runs: reported where they exist, and only there."""

from __future__ import annotations

from typing import Any

import pytest

from analysis.comparison.made_runs import MASTER, SIZES, made, seeds, sentence
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.runs.record import Run


def test_an_unfinished_run_is_named_and_left_out() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (4.0, 4.1, None), config={"steps": 40})])
    assert found.rows[1]["num_seeds"] == 2 and not found.rows[1]["diverged"]
    assert sentence(found, "Not finished") == (
        "Not finished, and left out of every number: bfloat16/word, seed 2 (10 of 40 steps)."
    )


def test_settings_that_an_older_version_did_not_have_are_no_difference() -> None:
    word = seeds("bfloat16/word", (4.0, 4.1, 4.2), config={"new": 1})
    assert not sentence(compare_runs([*MASTER, *word]), "The runs differ")


@pytest.mark.parametrize("key", ["gauges_every", "tensorboard", "log_to", "max_rollbacks"])
def test_settings_that_change_no_bit_may_differ(key: str) -> None:
    word = seeds("bfloat16/word", (4.0, 4.1, 4.2), config={key: 1})
    master = seeds("bfloat16/master", (4.0, 4.1, 4.2), config={key: 2})
    assert not sentence(compare_runs([*master, *word]), "The runs differ")


def test_the_limit_of_rollbacks_counts_where_a_run_rolled_back() -> None:
    back = [{"kind": "rollback", "step": 7, "to_step": 5, "batches": 2}]
    runs = [made(name, 0, 4.0, events=back, config={"max_rollbacks": n}) for n, name in enumerate(SIZES, 1)][:2]
    assert "(max_rollbacks 1, 2)" in sentence(compare_runs(runs), "The runs differ")


def test_different_numbers_of_steps_are_reported() -> None:
    def text(**more: Any) -> str:
        evals = [(5, 5.0), (10, 4.0)]
        runs = seeds("bfloat16/master", (4.0, 4.1, 4.2), evals=evals)
        runs += seeds("bfloat16/word", (4.0, 4.1, 4.2), config={"steps": 25}, **more)
        return sentence(
            compare_runs(runs), "They took different numbers of steps (bfloat16/master 10, bfloat16/word 25)"
        )

    assert text(evals=[(10, 4.0)], step_seconds=0.53).endswith(": fair at equal time, not at equal tokens.")
    # A calibration that was wrong by more than a tenth is reported, and nothing is called fair.
    assert text(evals=[(10, 4.0)], step_seconds=0.6).endswith(
        " and different times (bfloat16/master 5 s, bfloat16/word 6 s): their final losses are fair neither at equal tokens "
        "nor at equal time."
    )
    assert text().endswith(": not fair at equal tokens.")


def test_a_unit_scaled_model_among_others_is_reported_as_another_parametrization() -> None:
    master = seeds("bfloat16/master", (4.0, 4.1), config={"lr": 0.003})
    unit = seeds("unit/master", (3.9, 4.0), config={"lr": 0.5})
    assert sentence(compare_runs([*master, *unit]), "unit/master is another") == (
        "unit/master is another parametrization of the model, with its own initial weights and learning rate (lr 0.5, the "
        "others 0.003): a difference is not due to the format alone."
    )
    assert "parametrization" not in compare_runs([*unit, *seeds("unit/word", (4.0, 4.1))]).text()


def with_tables(runs: list[Run], **tables: dict[str, Any]) -> list[Run]:
    """The same runs, with more in their ``run.toml``."""
    for run in runs:
        run.run.update(tables)
    return runs


def test_texts_that_differ_between_seeds_are_no_difference() -> None:
    runs = [*seeds("bfloat16/master", (4.0, 4.1, 4.2)), *seeds("bfloat16/word", (4.0, 4.1, 4.2))]
    for run in runs:
        with_tables([run], data={"fingerprint": f"{run.config['seed']:032x}"})
    assert not sentence(compare_runs(runs), "The runs differ")


def test_texts_that_differ_within_a_seed_are_reported_without_their_fingerprints() -> None:
    master, word = seeds("bfloat16/master", (4.0, 4.1, 4.2)), seeds("bfloat16/word", (4.0, 4.1, 4.2))
    with_tables(master, data={"fingerprint": "a" * 32})
    with_tables(word[:2], data={"fingerprint": "b" * 32})
    with_tables(word[2:], data={"fingerprint": "a" * 32})
    found = compare_runs([*master, *word])
    assert sentence(found, "The runs differ") == (
        "The runs differ in more than recipe and seed (the text of seeds 0 and 1): a difference is not due to the recipe alone."
    )
    assert "aaaa" not in found.text() and "bbbb" not in found.text()


def test_settings_are_compared_within_a_seed_and_not_across() -> None:
    def runs(*sizes: tuple[str, int, int]) -> list[Run]:
        return [made(recipe, seed, 4.0, config={"batch_size": size}) for recipe, seed, size in sizes]

    across = runs(*((recipe, seed, 8 << seed) for recipe in SIZES for seed in (0, 1)))
    assert not sentence(compare_runs(across), "The runs differ")
    within = runs(
        ("bfloat16/master", 0, 8), ("bfloat16/word", 0, 8), ("bfloat16/master", 1, 8), ("bfloat16/word", 1, 16)
    )
    assert "(batch_size 8, 16)" in sentence(compare_runs(within), "The runs differ")


def test_machines_are_compared_within_a_seed_and_not_across() -> None:
    master, word = seeds("bfloat16/master", (4.0, 4.1)), seeds("bfloat16/word", (4.0, 4.1))
    with_tables([master[0], word[0]], machine={"device": "cpu", "num_threads": 2})
    with_tables([master[1], word[1]], machine={"device": "cuda"})
    assert not sentence(compare_runs([*master, *word]), "The runs differ")
    with_tables([word[0]], machine={"device": "cpu", "num_threads": 1})
    assert "(threads 2, 1)" in sentence(compare_runs([*master, *word]), "The runs differ")
