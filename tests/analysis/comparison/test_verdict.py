"""The sentences of the verdict: five whole texts, and which sentence answers which case. Classes are tested elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from analysis.comparison.made_runs import MASTER, made, seeds, sentence, words
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.runs.record import Run

GOLDEN = Path(__file__).parents[2] / "golden" / "verdicts"
EQUAL = (4.0, 4.1, 4.2)


def timed(recipe: str, losses: tuple[float, ...], step_seconds: float, middle: float = 1.0) -> list[Run]:
    """Runs with a validation half way."""
    return [
        made(recipe, seed, loss, evals=[(5, loss + middle), (10, loss)], step_seconds=step_seconds)
        for seed, loss in enumerate(losses)
    ]


def with_threads(runs: list[Run], number: int) -> list[Run]:
    for run in runs:
        run.run["machine"] = {"device": "cpu", "num_threads": number}
    return runs


TEXTS = {
    "a-cheapest": [
        *timed("bfloat16/master", EQUAL, 0.5),
        *timed("bfloat16/word", (4.01, 4.09, 4.2), 0.25),
        *seeds("bfloat16/compact", (4.013, 4.1, 4.197), noise=5.0),
        *seeds("bfloat16/naive", (4.1, 4.2, 4.31), edq=(1.0, 0.4, 0.3, 0.3), skipped=1),
        *seeds("float8-row/word", (4.02, 4.121, 4.22)),
    ],
    "too-few-seeds": [
        *seeds("bfloat16/master", (1.216, 1.344)),
        *seeds("float8-row/word", (1.2918, 1.4414)),
        *seeds("bfloat16/word", (1.21, 1.35), edq=()),
    ],
    "one-seed": [
        *seeds("bfloat16/master", (4.0,)),
        *seeds("bfloat16/word", (4.01,)),
        *seeds("bfloat16/naive", (4.0,), edq=(0.1, 0.1, 0.1)),
    ],
    "better-and-unlike": [
        *with_threads(seeds("bfloat16/master", EQUAL, config={"lr": 0.003}), 2),
        *with_threads(seeds("bfloat16/word", (3.9, 4.001, 4.1), config={"lr": 0.003, "batch_size": 8}), 1),
        *seeds("bfloat16/compact", (3.9995, 4.0995, 4.1995), config={"lr": 0.003, "batch_size": 4}),
        *seeds("unit/word", (4.2, 4.0, None), config={"lr": 0.5, "steps": 25}),
        made("mine", 9, 4.0),
    ],
    "equal-time": [
        *timed("bfloat16/master", EQUAL, 0.5, middle=3.0),
        *timed("bfloat16/word", EQUAL, 0.25),
        *timed("bfloat16/compact", (4.3, 4.4, 4.5), 0.26),
        *timed("bfloat16/naive", (math.nan, math.nan, math.nan), 0.25),
    ],
}


@pytest.mark.parametrize("name", TEXTS)
def test_a_whole_verdict_reads_as_it_did(name: str, update_golden: bool) -> None:
    file, text = GOLDEN / f"{name}.txt", "\n".join([*words(compare_runs(TEXTS[name])), ""])
    if update_golden:
        file.write_text(text, encoding="utf-8")
    assert text == file.read_text(encoding="utf-8")


SPOILT = seeds("bfloat16/word", (math.nan, math.nan, math.nan))


@pytest.mark.parametrize(
    ("runs", "baseline", "first"),
    [
        (seeds("bfloat16/word", (None, None)), None, "No run has ended in a loss that counts"),
        (seeds("bfloat16/master", (None,)), "bfloat16/master", "No run has ended in a loss that counts"),
        (
            [*seeds("bfloat16/master", (None,)), *seeds("bfloat16/word", (4.0,))],
            "bfloat16/master",
            "No run of bfloat16/master has ended in a loss that counts: nothing can be compared with it.",
        ),
        (
            MASTER,
            None,
            "bfloat16/master alone was run: validation loss 4.1000 with a standard deviation of 0.1000 over 3 seeds.",
        ),
        (
            [*MASTER, *SPOILT],
            None,
            "Every other recipe diverged with every seed: nothing can be compared with bfloat16/master.",
        ),
        (
            [*MASTER, *SPOILT, *seeds("bfloat16/compact", (None,))],
            None,
            "No run of another recipe has ended in a loss that counts: nothing can be compared with bfloat16/master.",
        ),
        ([*MASTER, made("bfloat16/word", 9, 4.0)], None, "No other recipe has a finished run with the seeds of"),
        # Three seeds of the baseline are not one each.
        (
            [*MASTER, *seeds("bfloat16/word", (4.01,))],
            None,
            "No recipe has two seeds in common with bfloat16/master, so no interval can be given",
        ),
        ([*MASTER[:1], *seeds("bfloat16/word", (4.01,))], None, "One seed each, so no interval can be given"),
        (
            [*seeds("bfloat16/master", EQUAL, edq=(0.1,) * 3), *seeds("bfloat16/word", EQUAL, edq=(0.1,) * 3)],
            None,
            "No recipe is fit for use here, bfloat16/master included.",
        ),
    ],
)
def test_a_verdict_without_a_winner_says_first_why(runs: list[Run], baseline: str | None, first: str) -> None:
    assert words(compare_runs(runs, baseline))[0].startswith(first)


@pytest.mark.parametrize(
    ("runs", "first"),
    [
        ([*MASTER, *seeds("bfloat16/word", EQUAL)], "bfloat16/word is the cheapest within the noise: 8.00"),
        (
            [*MASTER, *seeds("bfloat16/word", (3.9, 4.001, 4.1))],
            "bfloat16/word ends better than the baseline and is the cheapest: 8.00 bytes per parameter instead of the 16.00 of "
            "bfloat16/master. Its validation loss differs from that of bfloat16/master by −0.0997 ± 0.0014 (95 %",
        ),
        (
            [*MASTER, *seeds("bfloat16/word", (3.9995, 4.0995, 4.1995))],
            "bfloat16/word is the cheapest within a thousandth of the baseline's loss: 8.00",
        ),
        (
            [*MASTER, *seeds("bfloat16/word", EQUAL), *seeds("bfloat16/compact", (4.2, 4.0, 4.2))],
            "bfloat16/word is the cheapest of those that these seeds can rank: 8.00",
        ),
        (
            [*MASTER, *seeds("bfloat16/word", (4.1, 4.2, 4.31))],
            "bfloat16/master is the cheapest within the noise: 16.00",
        ),
    ],
)
def test_the_first_sentence_names_the_cheapest_and_its_rank(runs: list[Run], first: str) -> None:
    assert words(compare_runs(runs))[0].startswith(first)


def test_a_better_recipe_is_not_called_noise() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (3.9, 4.001, 4.1))])
    assert "noise" not in found.text()
    both = compare_runs([*MASTER, *seeds("bfloat16/word", (3.9, 4.001, 4.1)), *seeds("bfloat16/compact", EQUAL)])
    assert sentence(both, "Ends better than bfloat16/master, with certainty: bfloat16/word (−0.0997 ± 0.0014).")
    assert not sentence(both, "Also within the noise")


def test_certain_differences_too_small_to_matter_are_listed_with_the_noise() -> None:
    beside = compare_runs([*MASTER, *seeds("mine", (3.9995, 4.0995, 4.1995)), *seeds("bfloat16/compact", EQUAL)])
    assert sentence(beside, "Also within the noise of bfloat16/master, or within a thousandth of its loss: mine (")


def test_what_the_first_sentence_names_as_undecided_is_not_named_again() -> None:
    runs = [*seeds("bfloat16/master", (1.216, 1.344)), *seeds("float8-row/word", (1.2918, 1.4414))]
    assert not sentence(compare_runs(runs), "Not statistically distinguishable")
    hidden = compare_runs([*MASTER, *seeds("bfloat16/word", EQUAL), *seeds("bfloat16/compact", (4.2, 4.0, 4.2))])
    assert sentence(
        hidden,
        "Not statistically distinguishable from bfloat16/master with 3 seeds: bfloat16/compact (+0.0333 ± 0.3795)",
    )


def test_one_seed_ranks_nothing_by_its_loss() -> None:
    found = compare_runs([*MASTER[:1], *seeds("bfloat16/word", (4.01,))])
    assert "8.00 bytes per parameter and ended +0.0100 from" in found.verdict[1]
    assert "within the noise" not in found.text() and "±" not in found.text()
    naive = compare_runs([*MASTER[:1], *seeds("bfloat16/naive", (4.0,), edq=(0.1, 0.1, 0.1))])
    assert sentence(naive, "bfloat16/master costs least of those without a fault")


def test_seeds_that_do_not_pair_are_not_ranked() -> None:
    runs = [*MASTER, *seeds("bfloat16/word", (4.0, 4.1)), made("bfloat16/compact", 9, 4.0)]
    assert sentence(compare_runs(runs), "Not ranked").endswith("with bfloat16/master: bfloat16/compact.")


def test_a_wide_interval_asks_for_more_seeds() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (3.94, 4.05, 4.18))])
    assert sentence(found, "The interval of bfloat16/word is wider than 1 %")


def test_without_an_audit_no_recipe_is_called_faultless() -> None:
    found = compare_runs([made("bfloat16/master", 0, 4.0, edq=()), made("bfloat16/naive", 0, 4.0, edq=())])
    assert "without a fault" not in found.text() and sentence(found, "bfloat16/naive costs least: 8.00 bytes")
    assert sentence(found, "No step was audited")
    some = compare_runs([made("bfloat16/master", 0, 4.0), made("bfloat16/naive", 0, 4.0, edq=())])
    assert sentence(some, "Not audited, so lost updates would not be seen: bfloat16/naive.")


def test_a_fault_is_reported_once_and_not_as_noise_too() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/naive", EQUAL, edq=(0.3, 0.3, 0.3), noise=5.0)])
    assert sentence(found, "Not to be used: bfloat16/naive, which loses its updates") and not sentence(
        found, "With care"
    )


def test_the_same_runs_give_the_same_words() -> None:
    runs = [*MASTER, *seeds("bfloat16/word", EQUAL)]
    assert compare_runs(runs) == compare_runs(runs)
