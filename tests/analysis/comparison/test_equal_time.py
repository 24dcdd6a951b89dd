"""Recipes at equal time: their losses and ranks, and which recipe is called the fastest."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from analysis.comparison.made_runs import MASTER, made, seeds, sentence
from narrowgauge.analysis.comparison.classification import Rank
from narrowgauge.analysis.comparison.comparison import Comparison, compare_runs
from narrowgauge.runs.record import Run


def ranks(found: Comparison) -> dict[str, Rank]:
    """At equal time, the lowest loss first."""
    return {one.label: one.rank_at_equal_time for one in found.classes.at_equal_time}


def losses(found: Comparison) -> dict[str, float]:
    return {row["recipe"]: row["val_loss"] for row in found.equal_time}


# ── losses ──────────────────────────────────────────────────────────────────────────────────────────────────────────


def test_losses_at_equal_time_are_those_when_the_fastest_finished() -> None:
    slow = [made("bfloat16/master", k, 4.0, evals=[(2, 7.0), (10, 3.0)]) for k in (0, 1)]
    fast = [made("bfloat16/word", k, 4.0, evals=[(2, 7.0), (10, 4.0)], step_seconds=0.25) for k in (0, 1)]
    found = compare_runs([*slow, *fast])
    # The fast one ends at 2.5 s; the slow one is then 1.5 / 4 of the way from 7 to 3.
    assert losses(found) == {"bfloat16/master": pytest.approx(5.5), "bfloat16/word": 4.0}
    word = found.classes["bfloat16/word"].equal_time
    assert word is not None and word["difference"] == pytest.approx(-1.5) and word["half"] == 0.0
    assert ranks(found) == {"bfloat16/word": Rank.BETTER, "bfloat16/master": Rank.BASELINE}
    # The length may have been given in seconds, so there is no advice.
    assert sentence(found, "The slower ones had not reached the end of their schedule by then: all take the same")


def test_losses_at_equal_time_differ_by_their_reported_difference() -> None:
    # With seed 0 the baseline's first validation comes too late, and its loss is the higher one of the two seeds.
    master = [
        made("bfloat16/master", 0, 6.0, evals=[(8, 7.0), (10, 6.0)]),
        made("bfloat16/master", 1, 4.0, evals=[(2, 6.0), (10, 4.0)]),
    ]
    word = [
        made("bfloat16/word", seed, loss, evals=[(2, 7.0), (10, loss)], step_seconds=0.25)
        for seed, loss in ((0, 5.9), (1, 3.9))
    ]
    found = compare_runs([*master, *word])
    rows = {row["recipe"]: row for row in found.equal_time}
    assert rows["bfloat16/master"]["val_loss"] == pytest.approx(5.25) and rows["bfloat16/word"]["num_seeds"] == 1
    assert rows["bfloat16/word"]["val_loss"] == pytest.approx(3.9)
    assert rows["bfloat16/word"]["difference"] == pytest.approx(3.9 - 5.25)
    assert ranks(found) == {"bfloat16/word": Rank.NO_INTERVAL, "bfloat16/master": Rank.BASELINE}
    assert "after 2.5 s of training steps and over 1 of 2 seeds" in sentence(found, "At equal time")


def test_recipes_left_out_at_equal_time_are_named_and_a_missing_seed_costs_the_others_nothing() -> None:
    def runs(recipe: str, losses: Sequence[float], first: int = 2) -> list[Run]:
        return [made(recipe, k, loss, evals=[(first, 6.0), (10, loss)]) for k, loss in enumerate(losses)]

    late, few = runs("bfloat16/naive", (4.3, 4.4, 4.5), first=9), runs("bfloat16/compact", (4.1, 4.2))
    fast = [made("mine", k, 5.0, evals=[(2, 6.0), (10, 5.0)], step_seconds=0.25) for k in range(3)]
    found = compare_runs([*runs("bfloat16/master", (4.0, 4.1, 4.3)), *late, *few, *fast])
    rows = {row["recipe"]: row for row in found.equal_time}
    base = rows["bfloat16/master"]["val_loss"]
    assert all(row["val_loss"] - base == pytest.approx(row["difference"] or 0.0) for row in rows.values())
    assert rows["mine"]["num_seeds"] == 3 and rows["bfloat16/compact"]["num_seeds"] == 2
    assert found.classes["bfloat16/naive"].equal_time is None
    left_out = sentence(found, "At equal time").partition("Left out, ")[2]
    assert left_out.endswith("with the same seeds: bfloat16/naive.")


def test_runs_with_one_validation_have_no_loss_at_any_other_time() -> None:
    runs = [
        made(recipe, 0, 4.0, evals=[(10, 4.0)], step_seconds=step, config={"eval_every": 0})
        for recipe, step in (("bfloat16/master", 0.5), ("bfloat16/word", 0.4))
    ]
    found = compare_runs(runs)
    assert found.equal_time == () and ranks(found) == {}
    assert "(--eval-every)" in sentence(found, "Losses at equal time cannot be given")


def test_a_loss_at_equal_time_that_is_not_finite_is_none() -> None:
    broken = [made("bfloat16/word", k, 4.0, evals=[(5, math.nan), (10, 4.0)], step_seconds=0.75) for k in (0, 1)]
    assert list(losses(compare_runs([*BASE, *ended("a", 4.0, 4.1), *broken]))) == ["bfloat16/master", "a"]


def test_without_the_baseline_at_that_moment_nothing_is_ranked() -> None:
    late = [made("bfloat16/master", seed, 4.0, evals=[(9, 5.0), (10, 4.0)]) for seed in (0, 1)]
    fast = [made(name, seed, 5.0, evals=[(2, 6.0), (10, 5.0)], step_seconds=0.25) for name in "ab" for seed in (0, 1)]
    found = compare_runs([*late, *fast], "bfloat16/master")
    assert ranks(found) == {"a": Rank.NO_INTERVAL, "b": Rank.NO_INTERVAL}
    assert sentence(found, "At equal time").endswith("with the same seeds: bfloat16/master.")


# ── ranks ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def ended(recipe: str, *losses: float) -> list[Run]:
    """Runs of equal steps and times, so that their final losses are those at equal time."""
    return [made(recipe, seed, loss, evals=[(5, 6.0), (10, loss)]) for seed, loss in enumerate(losses)]


BASE = ended("bfloat16/master", 4.0, 4.1)
M, A, B, C, D = "bfloat16/master", "a", "b", "c", "d"
W, X, L, N, U = Rank.WORSE, Rank.BETTER, Rank.WITHIN_NOISE, Rank.NEGLIGIBLE, Rank.NO_INTERVAL
RANKS: list[tuple[dict[str, tuple[float, ...]], list[tuple[str, Rank]], str]] = [
    # Differences of the others from the baseline, with each of two seeds; the ranks, the lowest loss first; the words.
    ({A: (0.1, 0.1), B: (0.2, 0.2)}, [(A, W), (B, W)], f"{M} leads. Worse beyond the noise: a and b."),
    (
        {A: (-0.1, -0.1), B: (-0.2, -0.2)},
        [(B, X), (A, X)],
        f"b leads, better than {M} beyond the noise. Better than {M} beyond the noise: a.",
    ),
    (
        {A: (0.001, -0.001), B: (0.2, 0.2)},
        [(A, L), (B, W)],
        f"{M} has the lowest loss. Within the noise: a. Worse beyond the noise: b.",
    ),
    ({A: (-0.003, 0.001)}, [(A, L)], f"a has the lowest loss, within the noise of {M}."),
    (
        {A: (0.001, -0.003), B: (0.003, 0.003), C: (-0.0005, -0.0003), D: (0.2, 0.2)},
        [(A, L), (C, L), (B, N), (D, W)],
        f"a has the lowest loss, within the noise of {M}. Within the noise of {M} or within a thousandth of the loss: c and "
        f"b. Worse than {M} beyond the noise: d.",
    ),
    (
        {A: (-0.003, -0.003), B: (0.0, 0.0)},
        [(A, N), (B, L)],
        f"a has the lowest loss, within a thousandth of {M}'s. Within the noise of {M}: b.",
    ),
    (
        {A: (0.1,), B: (0.2, 0.2)},
        [(A, U), (B, W)],
        f"{M} has the lowest loss. Worse beyond the noise: b. Without an interval, having fewer than two seeds in common with "
        f"{M}: a.",
    ),
    (
        {A: (-0.1,), B: (0.2, 0.2)},
        [(A, U), (B, W)],
        f"a has the lowest loss, but no interval relative to {M}. Worse than {M} beyond the noise: b.",
    ),
    (
        {A: (0.1,), B: (0.2,)},
        [(A, U), (B, U)],
        f"{M} has the lowest loss. No interval shows whether that is more than chance.",
    ),
]


@pytest.mark.parametrize(("differences", "ranked", "words"), RANKS)
def test_recipes_have_ranks_at_equal_time_and_are_named_by_them(
    differences: dict[str, tuple[float, ...]], ranked: list[tuple[str, Rank]], words: str
) -> None:
    others = [ended(name, *map(sum, zip((4.0, 4.1), pairs, strict=False))) for name, pairs in differences.items()]
    found = compare_runs([*BASE, *(run for group in others for run in group)], M)
    assert [(label, rank) for label, rank in ranks(found).items() if label != M] == ranked
    assert sentence(found, "At equal time") == f"At equal time, after 5 s of training steps, {words}"


def test_a_dozen_recipes_that_are_all_behind_are_not_listed() -> None:
    runs = [*BASE, *(run for name in "abcdefghijk" for run in ended(name, 4.1, 4.2))]
    assert sentence(compare_runs(runs, M), "At equal time").endswith(
        "bfloat16/master leads: every other recipe is worse beyond the noise."
    )
    # A recipe without a loss there is not worse.
    spoilt = [*runs, *ended("l", math.nan, math.nan)]
    assert "Worse beyond the noise: a, b, c" in sentence(compare_runs(spoilt, M), "At equal time")


def half_way(recipe: str, middles: Sequence[float], *step_seconds: float) -> list[Run]:
    """Runs that all end at 4 and differ on the way there; a time per step for each, or one for all."""
    return [
        made(recipe, seed, 4.0, evals=[(5, middle), (10, 4.0)], step_seconds=(step_seconds * len(middles))[seed])
        for seed, middle in enumerate(middles)
    ]


def test_an_interval_that_dwarfs_every_difference_is_inconclusive_for_noisy_timings_or_few_seeds() -> None:
    # When the fast one finishes at 4.0, the slow one is half way at 5.0 with one seed, and with the other on its way from
    # 3.1 to 4.0, at 3.7: differences of -1.0 and +0.3.
    fast = half_way("bfloat16/word", (6.0, 6.0), 0.25)
    noisy = compare_runs([*half_way(M, (5.0, 3.1), 0.5, 0.3), *fast])
    steady = compare_runs([*half_way(M, (5.0, 3.1), 0.5, 0.5), *fast])
    assert noisy.equal_time[1]["half"] == pytest.approx(12.706205 * 0.65)
    assert sentence(noisy, "Timings are too noisy to rank bfloat16/word at equal time, after 2.5 s").endswith(
        "no difference is above 0.35, and the interval reaches ± 8.3. Run nothing else on this machine, or use more seeds."
    )
    assert sentence(steady, "There are too few seeds to rank bfloat16/word at equal time")
    for found in (noisy, steady):
        assert ranks(found)["bfloat16/word"] is Rank.INCONCLUSIVE
        assert not sentence(found, "At equal time") and not sentence(found, "The slower ones")


def test_what_is_not_inconclusive_is_still_ranked() -> None:
    runs = [*half_way(M, (5.0, 5.0), 0.5), *half_way("bfloat16/word", (5.1, 5.1), 0.5)]
    runs += half_way("bfloat16/compact", (5.2, 3.9), 0.5)
    found = compare_runs([*runs, *half_way("mine", (4.0, 4.0), 0.25)])
    assert ranks(found) == {
        "mine": Rank.BETTER, "bfloat16/compact": Rank.INCONCLUSIVE, M: Rank.BASELINE, "bfloat16/word": Rank.WORSE,
    }  # fmt: skip
    assert "bfloat16/compact" not in sentence(found, "At equal time")
    assert sentence(found, "There are too few seeds to rank bfloat16/compact at equal time")


def test_a_small_difference_with_a_small_interval_is_conclusive() -> None:
    # ± 0.013 is far above a difference of 0, and far below what matters for a loss of 4.
    found = compare_runs([*ended(M, 4.001, 4.0), *ended("bfloat16/word", 4.0, 4.001)])
    assert found.equal_time[1]["half"] == pytest.approx(0.0127, rel=1e-3)
    assert ranks(found) == {M: Rank.BASELINE, "bfloat16/word": Rank.WITHIN_NOISE}


# ── the fastest ─────────────────────────────────────────────────────────────────────────────────────────────────────

WORD = seeds("bfloat16/word", (4.0, 4.1, 4.2), step_seconds=0.25)
BARELY = seeds("bfloat16/word", (4.0, 4.1, 4.2), step_seconds=0.48)


def wavering(recipe: str, *step_seconds: float) -> list[Run]:
    return [made(recipe, seed, 4.0, step_seconds=step) for seed, step in enumerate(step_seconds)]


@pytest.mark.parametrize(
    ("others", "words"),
    [
        (WORD, "bfloat16/word is the fastest here, 2.00 times as fast as bfloat16/master."),
        (
            wavering("bfloat16/word", 0.25, 0.75, 0.25),
            "bfloat16/word was the fastest by median, but not by 0.5% with every seed: timings are too noisy to rank.",
        ),
        (
            [*WORD, *wavering("bfloat16/compact", 0.26, 0.24, 0.26)],
            "bfloat16/word and bfloat16/compact are the fastest here and cannot be ranked: bfloat16/word is 2.00 times as fast "
            "as bfloat16/master.",
        ),
        # None is named where the best of those that cannot be ranked gains less than a tenth.
        (
            [*BARELY, *wavering("bfloat16/compact", 0.49, 0.47, 0.49)],
            "No recipe is clearly the fastest here: by median bfloat16/word is, 1.04 times as fast as bfloat16/master, but not "
            "with every seed.",
        ),
    ],
)
def test_the_fastest_beats_every_recipe_with_every_seed(others: list[Run], words: str) -> None:
    assert words in compare_runs([*MASTER, *others]).verdict


@pytest.mark.parametrize(("step", "is_named"), [(0.49, False), (0.46, False), (0.45, True)])
def test_one_seed_ranks_speeds_only_by_a_margin(step: float, is_named: bool) -> None:
    found = compare_runs([*MASTER[:1], *seeds("bfloat16/word", (4.0,), step_seconds=step)])
    assert ("fastest" in found.text()) is is_named


def test_of_equal_speeds_none_is_the_fastest() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (4.0, 4.1, 4.2))])
    assert "fastest" not in found.text() and "times as fast" not in found.text()
