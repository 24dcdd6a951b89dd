"""What the verdict says in plain cases."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest

from comparison.made_runs import MASTER, made, seeds, sentence, words
from narrowgauge.comparison.comparison import compare_runs
from narrowgauge.runs.record import Run


def test_the_cheapest_within_the_noise_wins_and_says_by_how_much() -> None:
    found = compare_runs(
        [*MASTER, *seeds("bfloat16/word", (4.01, 4.09, 4.2)), *seeds("bfloat16/compact", (4.013, 4.1, 4.197))]
    )
    assert words(found)[0] == (
        "bfloat16/compact is the cheapest within the noise: 7.00 bytes per parameter where bfloat16/master takes 16.00, and "
        "its validation loss differs from bfloat16/master's by +0.0033 ± 0.0211 (95 % interval over 3 seeds)."
    )
    assert sentence(found, "Also within the noise").endswith("bfloat16/word (0.0000 ± 0.0248).")
    assert not sentence(found, "Not to be used")


def test_equal_bytes_are_parted_by_time() -> None:
    runs = [
        *MASTER,
        *seeds("bfloat16/word", (4.0, 4.1, 4.2)),
        *seeds("float8-row/word", (4.0, 4.1, 4.2), step_seconds=0.3),
    ]
    assert compare_runs(runs).verdict[0].startswith("float8-row/word is the cheapest")


def test_what_ends_worse_beyond_the_noise_is_not_to_be_used() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (4.1, 4.2, 4.31))])
    assert found.verdict[0].startswith("bfloat16/master is the cheapest within the noise")
    said = sentence(found, "Not to be used")
    assert said.startswith(
        "Not to be used: bfloat16/word, which ends worse than bfloat16/master by +0.1033 ± 0.0143 (+2.5%"
    )


def test_a_certain_difference_too_small_to_matter_costs_nothing() -> None:
    # +0.0005 on 4.1 is an eighth of a thousandth.
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (4.0005, 4.1005, 4.2005))])
    assert found.differences[0].mean - found.differences[0].half > 0
    assert found.verdict[0].startswith("bfloat16/word is the cheapest")


def test_a_certain_loss_below_a_hundredth_is_a_price_and_no_verdict() -> None:
    word = seeds("bfloat16/word", (4.0, 4.1, 4.2))
    dear = seeds("bfloat16/compact", (4.02, 4.121, 4.22))
    found = compare_runs([*MASTER, *word, *dear])
    assert sentence(found, "At a small price in loss, which is certain: bfloat16/compact (+0.02")
    assert not sentence(found, "Not to be used") and sentence(found, "bfloat16/word is the cheapest within the noise")


def test_late_losses_of_updates_condemn_a_recipe_that_the_loss_does_not() -> None:
    # What the whole run's sums say (EDQ 1.0 in the summary) is ruled by its first steps.
    found = compare_runs([*MASTER, *seeds("bfloat16/naive", (4.0, 4.1, 4.2), edq=(1.0, 0.4, 0.3, 0.3))])
    assert found.verdict[0].startswith("bfloat16/master is the cheapest")
    assert "bfloat16/naive, which loses its updates (a late EDQ of 0.30" in sentence(found, "Not to be used")
    assert not sentence(found, "With care")


def test_noise_is_told_and_the_quieter_choice_named() -> None:
    noisy = seeds("bfloat16/compact", (4.0, 4.1, 4.2), noise=5.0)
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (4.0, 4.1, 4.2)), *noisy])
    assert found.verdict[0].startswith("bfloat16/compact is the cheapest")
    assert sentence(found, "The cheapest whose updates are not mostly noise is bfloat16/word")
    assert sentence(found, "With care: bfloat16/compact adds 5.0 times as much")


def test_skipped_steps_condemn_from_a_twentieth_on() -> None:
    for skipped, said in ((0, ""), (1, "skipped 3 of its 30 steps")):
        runs = [*MASTER, *seeds("float16/master", (4.0, 4.1, 4.2), skipped=skipped)]
        assert said in sentence(compare_runs(runs), "Not to be used") and bool(said) == bool(skipped)


def test_one_seed_gives_no_interval_and_says_so() -> None:
    found = compare_runs([*MASTER[:1], *seeds("bfloat16/word", (4.01,))])
    assert found.verdict[0].startswith("One seed each, so no interval can be given")
    assert "8.00 bytes per parameter and ended +0.0100 from" in found.verdict[1]
    assert "within the noise" not in found.text() and "±" not in found.text()


def test_one_seed_still_condemns_what_loses_its_updates() -> None:
    found = compare_runs([*MASTER[:1], *seeds("bfloat16/naive", (4.0,), edq=(0.1, 0.1, 0.1))])
    assert sentence(found, "Not to be used: bfloat16/naive")
    assert sentence(found, "bfloat16/master costs least of those without a fault")


def test_one_recipe_is_described_and_compared_with_nothing() -> None:
    assert compare_runs(MASTER).verdict[0] == (
        "bfloat16/master alone was run: validation loss 4.1000 with a standard deviation of 0.1000 over 3 seeds."
    )


def test_seeds_that_do_not_pair_are_not_judged() -> None:
    runs = [*MASTER, *seeds("bfloat16/word", (4.0, 4.1)), made("bfloat16/compact", 9, 4.0)]
    assert sentence(compare_runs(runs), "Not judged").endswith("with bfloat16/master: bfloat16/compact.")


def test_a_wide_interval_asks_for_more_seeds() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (3.94, 4.05, 4.18))])
    assert sentence(found, "The interval of bfloat16/word is wider than 1 %")


def test_at_equal_time_losses_are_those_when_the_fastest_was_done() -> None:
    slow = [made("bfloat16/master", k, 4.0, evals=[(2, 7.0), (10, 3.0)]) for k in (0, 1)]
    fast = [made("bfloat16/word", k, 4.0, evals=[(2, 7.0), (10, 4.0)], step_seconds=0.25) for k in (0, 1)]
    found = compare_runs([*slow, *fast])
    # The fast one ends at 2.5 s; the slow one is then 1.5 / 4 of the way from 7 to 3.
    rows = {row["recipe"]: row for row in found.equal_time}
    assert rows["bfloat16/word"]["val_loss"] == 4.0 and rows["bfloat16/master"]["val_loss"] == pytest.approx(5.5)
    assert rows["bfloat16/word"]["difference"] == pytest.approx(-1.5) and rows["bfloat16/word"]["half"] == 0.0
    assert sentence(found, "At equal time") == (
        "At equal time, after 2.5 s of training steps, bfloat16/word leads, better than bfloat16/master beyond the noise."
    )
    # How long runs are may have been asked for in seconds; then there is nothing to advise.
    assert sentence(found, "The slower ones") == (
        "The slower ones had not come to the end of their schedule by then: all take as many steps."
    )


def test_the_fastest_is_named_only_where_every_seed_agrees() -> None:
    word = seeds("bfloat16/word", (4.0, 4.1, 4.2), step_seconds=0.25)
    assert (
        "bfloat16/word is the fastest here, 2.00 times as fast as bfloat16/master."
        in compare_runs(MASTER + word).verdict
    )
    word[1] = made("bfloat16/word", 1, 4.1, step_seconds=0.75)
    assert "not with every seed" in sentence(compare_runs(MASTER + word), "bfloat16/word was the fastest")


def test_the_fastest_beats_every_recipe_with_every_seed_and_not_the_yardstick_alone() -> None:
    word = seeds("bfloat16/word", (4.0, 4.1, 4.2), step_seconds=0.25)
    near = [made("bfloat16/compact", seed, 4.0, step_seconds=step) for seed, step in enumerate((0.26, 0.24, 0.26))]
    assert sentence(compare_runs([*MASTER, *word, *near]), "bfloat16/word and bfloat16/compact are the fastest") == (
        "bfloat16/word and bfloat16/compact are the fastest here and cannot be ranked: bfloat16/word is 2.00 times as fast as "
        "bfloat16/master."
    )
    # Where the unquiet one is no recipe's better by a tenth, none is named.
    barely = seeds("bfloat16/word", (4.0, 4.1, 4.2), step_seconds=0.48)
    near = [made("bfloat16/compact", seed, 4.0, step_seconds=step) for seed, step in enumerate((0.49, 0.47, 0.49))]
    said = sentence(compare_runs([*MASTER, *barely, *near]), "No recipe is clearly the fastest here")
    assert said.endswith("by median bfloat16/word is, 1.04 times as fast as bfloat16/master, but not with every seed.")


@pytest.mark.parametrize(("step", "is_said"), [(0.49, False), (0.46, False), (0.45, True)])
def test_one_seed_ranks_speeds_only_by_a_margin(step: float, is_said: bool) -> None:
    found = compare_runs([*MASTER[:1], *seeds("bfloat16/word", (4.0,), step_seconds=step)])
    assert ("fastest" in found.text()) is is_said


# ── better, open, unknown ───────────────────────────────────────────────────────────────────────────────────────────


def test_what_certainly_ends_better_is_not_called_noise() -> None:
    better = seeds("bfloat16/word", (3.9, 4.001, 4.1))
    found = compare_runs([*MASTER, *better])
    assert words(found)[0].startswith(
        "bfloat16/word ends better than the yardstick and is the cheapest: 8.00 bytes per parameter where bfloat16/master "
        "takes 16.00, and its validation loss differs from bfloat16/master's by −0.0997 ± 0.0014 "
    )
    assert "noise" not in found.text()
    both = compare_runs([*MASTER, *better, *seeds("bfloat16/compact", (4.0, 4.1, 4.2))])
    assert words(both)[0].startswith("bfloat16/compact is the cheapest within the noise")
    assert sentence(both, "Ends better") == (
        "Ends better than bfloat16/master, and certainly: bfloat16/word (−0.0997 ± 0.0014)."
    )
    assert not sentence(both, "Also within the noise")


def test_a_certain_gain_too_small_to_matter_is_told_as_one() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (3.9995, 4.0995, 4.1995))])
    assert words(found)[0].startswith("bfloat16/word is the cheapest within a thousandth of the yardstick's loss: 8.00")
    beside = compare_runs(
        [*MASTER, *seeds("mine", (3.9995, 4.0995, 4.1995)), *seeds("bfloat16/compact", (4.0, 4.1, 4.2))]
    )
    assert sentence(beside, "Also within the noise of bfloat16/master, or within a thousandth of its loss: mine (")


def test_nothing_wins_that_may_be_worse_by_more_than_a_hundredth() -> None:
    # Two seeds: +0.0866 ± 0.1378 on 1.28, as a review met it.
    runs = [*seeds("bfloat16/master", (1.216, 1.344)), *seeds("float8-row/word", (1.2918, 1.4414))]
    found = compare_runs(runs)
    assert words(found)[0] == (
        "Which is the cheapest cannot be told with 2 seeds: float8-row/word (8.00 bytes per parameter, +0.0866 ± 0.1372) may "
        "end worse than bfloat16/master (16.00) by more than 1 % of the loss, or no worse. More seeds would say more."
    )
    assert "is the cheapest within" not in found.text() and "Not to be told" not in found.text()


def test_a_cheaper_one_of_which_too_little_is_known_does_not_hide_the_winner() -> None:
    unsure = seeds("bfloat16/compact", (4.2, 4.0, 4.2))
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (4.0, 4.1, 4.2)), *unsure])
    assert words(found)[0].startswith("bfloat16/word is the cheapest of those that these seeds can judge: 8.00 bytes")
    assert sentence(
        found, "Not to be told apart from bfloat16/master with 3 seeds: bfloat16/compact (+0.0333 ± 0.3795)"
    )
    # One that costs more than the winner takes nothing from it.
    dear = seeds("mine", (4.2, 4.0, 4.2))
    for run in dear:
        assert run.summary is not None
        run.summary["bytes_per_param"] = 12.0
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (4.0, 4.1, 4.2)), *dear])
    assert words(found)[0].startswith("bfloat16/word is the cheapest within the noise")


def test_recipes_that_diverged_are_not_said_to_have_no_finished_run() -> None:
    spoilt = seeds("bfloat16/word", (math.nan, math.nan, math.nan))
    assert words(compare_runs([*MASTER, *spoilt]))[0] == (
        "Every other recipe diverged with every seed: nothing can be held against bfloat16/master."
    )
    unfinished = seeds("bfloat16/compact", (None,))
    assert words(compare_runs([*MASTER, *spoilt, *unfinished]))[0].startswith(
        "No run of another recipe has ended in a loss"
    )
    assert words(compare_runs([*MASTER, made("bfloat16/word", 9, 4.0)]))[0].startswith(
        "No other recipe has a finished run"
    )


def test_three_seeds_of_the_yardstick_are_not_one_each() -> None:
    found = compare_runs([*MASTER, *seeds("bfloat16/word", (4.01,))])
    assert words(found)[0].startswith(
        "No recipe has two seeds in common with bfloat16/master, so no interval can be given"
    )


def test_without_an_audit_nothing_is_called_without_a_fault() -> None:
    found = compare_runs([made("bfloat16/master", 0, 4.0, edq=()), made("bfloat16/naive", 0, 4.0, edq=())])
    assert "without a fault" not in found.text() and sentence(found, "bfloat16/naive costs least: 8.00 bytes")
    assert sentence(found, "No step was audited")
    some = compare_runs([made("bfloat16/master", 0, 4.0), made("bfloat16/naive", 0, 4.0, edq=())])
    assert sentence(some, "Not audited, so nothing here says whether updates get lost: bfloat16/naive.")


# ── at equal time ───────────────────────────────────────────────────────────────────────────────────────────────────


def test_losses_at_equal_time_differ_by_what_is_told_as_their_difference() -> None:
    # With seed 0 the yardstick's first validation comes too late, and its loss is the higher one of the two seeds.
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
    assert sentence(found, "At equal time") == (
        "At equal time, after 2.5 s of training steps and over 1 of 2 seeds, bfloat16/word has the lowest loss. No interval "
        "says whether that is more than chance."
    )


def test_what_is_left_out_at_equal_time_is_named_and_seeds_that_one_lacks_are_not_lost_to_the_others() -> None:
    def runs(recipe: str, losses: Sequence[float], first: int = 2) -> list[Run]:
        return [made(recipe, k, loss, evals=[(first, 6.0), (10, loss)]) for k, loss in enumerate(losses)]

    late, few = runs("bfloat16/naive", (4.3, 4.4, 4.5), first=9), runs("bfloat16/compact", (4.1, 4.2))
    fast = [made("mine", k, 5.0, evals=[(2, 6.0), (10, 5.0)], step_seconds=0.25) for k in range(3)]
    found = compare_runs([*runs("bfloat16/master", (4.0, 4.1, 4.3)), *late, *few, *fast])
    rows = {row["recipe"]: row for row in found.equal_time}
    base = rows["bfloat16/master"]["val_loss"]
    assert all(row["val_loss"] - base == pytest.approx(row["difference"] or 0.0) for row in rows.values())
    assert rows["mine"]["num_seeds"] == 3 and rows["bfloat16/compact"]["num_seeds"] == 2
    assert sentence(found, "At equal time").endswith(
        "Left out, for want of a validation before that moment with the same seeds: bfloat16/naive."
    )


def test_runs_with_one_validation_have_no_loss_at_any_other_time() -> None:
    runs = [
        made(recipe, 0, 4.0, evals=[(10, 4.0)], step_seconds=step, config={"eval_every": 0})
        for recipe, step in (("bfloat16/master", 0.5), ("bfloat16/word", 0.4))
    ]
    found = compare_runs(runs)
    assert found.equal_time == () and sentence(found, "Losses at equal time cannot be given")


def test_the_same_runs_give_the_same_words() -> None:
    runs = [*MASTER, *seeds("bfloat16/word", (4.0, 4.1, 4.2))]
    assert compare_runs(runs) == compare_runs(runs)


def by_the_clock(recipe: str, middles: Sequence[float], *step_seconds: float) -> list[Run]:
    """Runs that all end at 4 and differ on the way there; a time per step for each, or one for all."""
    return [
        made(recipe, seed, 4.0, evals=[(5, middle), (10, 4.0)], step_seconds=(step_seconds * len(middles))[seed])
        for seed, middle in enumerate(middles)
    ]


def test_an_interval_at_equal_time_that_dwarfs_every_difference_is_told_as_the_machines() -> None:
    # When the fast one is done, with 4.0, the slow one is half way at 5.0 with one seed, and with the other on its way from
    # 3.1 to 4.0, at 3.7: differences of -1.0 and +0.3.
    fast = by_the_clock("bfloat16/word", (6.0, 6.0), 0.25)
    found = compare_runs([*by_the_clock("bfloat16/master", (5.0, 3.1), 0.5, 0.3), *fast])
    slow = compare_runs([*by_the_clock("bfloat16/master", (5.0, 3.1), 0.5, 0.5), *fast])
    assert found.equal_time[1]["half"] == pytest.approx(12.706205 * 0.65)
    assert sentence(found, "This machine was too unquiet") == (
        "This machine was too unquiet to say how bfloat16/word compares at equal time, after 2.5 s of training steps: no "
        "difference there is above 0.35, and the interval reaches ± 8.3. Run nothing else beside it, or take more seeds."
    )
    # The same with a clock that agrees with itself is not the machine's.
    assert sentence(slow, "These seeds are too few to say how bfloat16/word compares at equal time")
    for said in (found, slow):
        assert not sentence(said, "At equal time") and not sentence(said, "The slower ones")


def test_what_is_not_drowned_is_still_ranked_at_equal_time() -> None:
    runs = [*by_the_clock("bfloat16/master", (5.0, 5.0), 0.5), *by_the_clock("bfloat16/word", (5.1, 5.1), 0.5)]
    runs += by_the_clock("bfloat16/compact", (5.2, 3.9), 0.5)
    found = compare_runs([*runs, *by_the_clock("mine", (4.0, 4.0), 0.25)])
    assert sentence(found, "At equal time").endswith(
        "steps, mine leads, better than bfloat16/master beyond the noise. Worse than bfloat16/master beyond the noise: "
        "bfloat16/word."
    )
    assert "how bfloat16/compact compares" in sentence(found, "These seeds are too few")


def test_a_small_difference_with_a_small_interval_is_told_as_it_is() -> None:
    # ± 0.013 is far above a difference of 0, and far below what anybody asks about a loss of 4.
    ends = {"bfloat16/master": (4.001, 4.0), "bfloat16/word": (4.0, 4.001)}
    runs = [
        made(recipe, seed, loss, evals=[(5, 6.0), (10, loss)])
        for recipe, losses in ends.items()
        for seed, loss in enumerate(losses)
    ]
    found = compare_runs(runs)
    assert found.equal_time[1]["half"] == pytest.approx(0.0127, rel=1e-3)
    assert sentence(found, "At equal time").endswith(
        "steps, bfloat16/master has the lowest loss. Within the noise: bfloat16/word."
    )


def ended(recipe: str, *losses: float) -> list[Run]:
    """Runs of equal steps and times, so that what they end with is what they have at equal time."""
    return [made(recipe, seed, loss, evals=[(5, 6.0), (10, loss)]) for seed, loss in enumerate(losses)]


BASE = ended("bfloat16/master", 4.0, 4.1)
STANDINGS = [
    # Differences of the others from the yardstick, with each of two seeds; who stands how.
    ({"a": (0.1, 0.1), "b": (0.2, 0.2)}, "bfloat16/master leads. Worse beyond the noise: a and b."),
    ({"a": (-0.1, -0.1), "b": (-0.2, -0.2)}, "b leads, better than {Y} beyond the noise. Better than {Y} beyond the noise: a."),
    ({"a": (0.001, -0.001), "b": (0.2, 0.2)}, "{Y} has the lowest loss. Within the noise: a. Worse beyond the noise: b."),
    ({"a": (-0.003, 0.001)}, "a has the lowest loss, within the noise of {Y}."),
    (
        {"a": (0.001, -0.003), "b": (0.003, 0.003), "c": (-0.0005, -0.0003), "d": (0.2, 0.2)},
        "a has the lowest loss, within the noise of {Y}. Within the noise of {Y} or within a thousandth of the loss: c and b. "
        "Worse than {Y} beyond the noise: d.",
    ),
    (
        {"a": (-0.003, -0.003), "b": (0.0, 0.0)},
        "a has the lowest loss, within a thousandth of {Y}'s. Within the noise of {Y}: b.",
    ),
    (
        {"a": (0.1,), "b": (0.2, 0.2)},
        "{Y} has the lowest loss. Worse beyond the noise: b. Without an interval, for want of two seeds in common with {Y}: a.",
    ),
    ({"a": (-0.1,), "b": (0.2, 0.2)}, "a has the lowest loss, but no interval beside {Y}. Worse than {Y} beyond the noise: b."),
    ({"a": (0.1,), "b": (0.2,)}, "{Y} has the lowest loss. No interval says whether that is more than chance."),
]  # fmt: skip


@pytest.mark.parametrize(("differences", "said"), STANDINGS)
def test_at_equal_time_the_leader_and_those_behind_are_told_by_name(
    differences: dict[str, tuple[float, ...]], said: str
) -> None:
    others = [ended(name, *map(sum, zip((4.0, 4.1), apart, strict=False))) for name, apart in differences.items()]
    found = compare_runs([*BASE, *(run for group in others for run in group)], "bfloat16/master")
    told = said.replace("{Y}", "bfloat16/master")
    assert sentence(found, "At equal time") == f"At equal time, after 5 s of training steps, {told}"


def test_at_equal_time_a_dozen_that_are_all_behind_need_no_list() -> None:
    runs = [*BASE, *(run for name in "abcdefghijk" for run in ended(name, 4.1, 4.2))]
    assert sentence(compare_runs(runs, "bfloat16/master"), "At equal time").endswith(
        "bfloat16/master leads: every other recipe is worse beyond the noise."
    )
    # One that has no loss there is no other recipe that is worse.
    spoilt = [*runs, *ended("l", math.nan, math.nan)]
    assert "Worse beyond the noise: a, b, c" in sentence(compare_runs(spoilt, "bfloat16/master"), "At equal time")


def test_without_the_yardstick_at_that_moment_nothing_is_called_behind() -> None:
    late = [made("bfloat16/master", seed, 4.0, evals=[(9, 5.0), (10, 4.0)]) for seed in (0, 1)]
    fast = [made(name, seed, 5.0, evals=[(2, 6.0), (10, 5.0)], step_seconds=0.25) for name in "ab" for seed in (0, 1)]
    said = sentence(compare_runs([*late, *fast], "bfloat16/master"), "At equal time")
    assert "has the lowest loss. No interval says" in said and said.endswith("with the same seeds: bfloat16/master.")


def test_a_loss_at_equal_time_that_is_not_finite_is_none() -> None:
    broken = [made("bfloat16/word", k, 4.0, evals=[(5, math.nan), (10, 4.0)], step_seconds=0.75) for k in (0, 1)]
    assert [row["recipe"] for row in compare_runs([*BASE, *ended("a", 4.0, 4.1), *broken]).equal_time] == [
        "bfloat16/master",
        "a",
    ]


def test_a_yardstick_without_a_finished_run_is_said_to_have_none() -> None:
    runs = [*seeds("bfloat16/master", (None,)), *seeds("bfloat16/word", (4.0,))]
    assert compare_runs(runs, "bfloat16/master").verdict[0].startswith("No run of bfloat16/master has ended in a loss")
    assert compare_runs(runs[:1], "bfloat16/master").verdict[0].startswith("No run has ended in a loss")
