"""How small a difference a number of seeds shows: the power of the test by simulation, and what the verdict says of it."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from analysis.comparison.made_runs import made, seeds, words
from narrowgauge.analysis.comparison.classification import Rank
from narrowgauge.analysis.comparison.comparison import compare_runs
from narrowgauge.analysis.comparison.intervals import PairedDifference, interval
from narrowgauge.analysis.comparison.resolution import (
    MOST_SEEDS,
    POWER,
    SPEEDRUN_SCORE,
    largest_spread,
    pooled_spread,
    power,
    read,
    resolution,
    seeds_needed,
    speedrun_score,
    spread_of,
)
from narrowgauge.errors import NarrowgaugeError, RecipeError, RecordError
from narrowgauge.report.publishing import report
from narrowgauge.runs.record import DEFINITION_FILE, Run
from narrowgauge.spec.notation import parse
from narrowgauge.spec.significance import student_t
from narrowgauge.trainer.config import TrainConfig
from narrowgauge.trainer.experiment import training
from narrowgauge.trainer.experiment.definition import ExperimentConfig, config_of_flags, make_config
from narrowgauge.trainer.experiment.planned_runs import PlannedRun

MASTER = "bfloat16/master"


def simulated(true: float, num_seeds: int, count: int = 200_000) -> tuple[np.ndarray, np.ndarray]:
    """The ends of the 95 % intervals of many comparisons whose paired differences vary by 1 around ``true``."""
    found = np.random.default_rng(num_seeds).normal(true, 1.0, (count, num_seeds))
    half = student_t(num_seeds - 1) * found.std(1, ddof=1) / math.sqrt(num_seeds)
    return found.mean(1) - half, found.mean(1) + half


@pytest.mark.parametrize("num_seeds", [2, 3, 4, 6, 20])
def test_four_of_five_comparisons_tell_what_is_resolved(num_seeds: int) -> None:
    size = resolution(1.0, num_seeds)
    low, _ = simulated(size, num_seeds)
    _, high = simulated(0.0, num_seeds)
    assert np.mean(low > 0) == pytest.approx(POWER, abs=0.005)  # one that is worse by so much is shown to be worse
    assert np.mean(high < size) == pytest.approx(POWER, abs=0.005)  # one that is as good, not to be worse by so much


@pytest.mark.parametrize("degrees", [1, 2, 7])
@pytest.mark.parametrize("noncentrality", [0.0, 1.0, 5.0])
def test_the_power_is_that_of_simulated_comparisons(noncentrality: float, degrees: int) -> None:
    low, _ = simulated(noncentrality / math.sqrt(degrees + 1), degrees + 1)
    assert power(noncentrality, degrees) == pytest.approx(np.mean(low > 0), abs=0.004)


@pytest.mark.parametrize("difference", [0.5, 1.0, 2.0, 20.0])
def test_the_seeds_needed_are_the_fewest(difference: float) -> None:
    number = seeds_needed(1.0, difference)
    assert number is not None and resolution(1.0, number) <= difference
    assert number == 2 or resolution(1.0, number - 1) > difference
    assert largest_spread(difference, number) >= 1.0


def test_equal_differences_need_two_seeds_and_a_hopeless_one_none() -> None:
    assert seeds_needed(0.0, 1e-9) == 2
    assert seeds_needed(1.0, resolution(1.0, MOST_SEEDS) * 0.99) is None


def test_the_spread_is_that_of_the_pairs() -> None:
    pairs = [0.1, -0.2, 0.4, 0.05]
    assert spread_of(PairedDifference("a", *interval([pairs]), 4)) == pytest.approx(np.std(pairs, ddof=1))


@pytest.mark.parametrize(
    ("mean", "half", "claim"),
    [
        (0.004, 0.003, "worse"),
        (-0.004, 0.003, "better"),
        (0.001, 0.003, "no worse"),
        (-0.02, 0.03, ""),
        (0.003, 0.004, ""),
    ],
)
def test_a_difference_is_read_by_its_interval(mean: float, half: float, claim: str) -> None:
    assert read(PairedDifference("a", mean, half, 3), 0.005).claim == claim


def compared(word: tuple[float, ...], resolve: float | None) -> list[str]:
    runs = [*seeds(MASTER, (4.0, 4.1, 4.2)), *seeds("bfloat16/word", word)]
    return words(compare_runs(runs, resolve=resolve))


CLOSE = (4.001, 4.1, 4.199)
"""Within the noise of 4.0, 4.1, 4.2, with a standard deviation of 0.001: three seeds resolve 0.0033."""


def test_as_good_means_certainly_no_worse_than_what_was_asked() -> None:
    assert "is the cheapest within the noise" in compared(CLOSE, None)[0]
    assert "is the cheapest within the noise" in compared(CLOSE, 0.004)[0]
    assert compared(CLOSE, 0.004)[1] == "0.004 is resolved: four of five such comparisons tell differences of 0.0033."
    found = compared(CLOSE, 0.002)
    assert found[0] == (
        "3 seeds do not decide which is the cheapest: bfloat16/word (8.00 bytes per parameter, 0.0000 ± 0.0025) may end worse "
        "than bfloat16/master (16.00) by more than 0.002, or no worse. By their spread --seeds 5 resolves it, in four of five "
        "such comparisons."
    )
    assert found[1] == (
        "0.002 was to be resolved, and these seeds resolve 0.0033: a difference of 0.002 from bfloat16/master may well have "
        "gone unseen in bfloat16/word."
    )
    assert not any("resolve" in said for said in compared(CLOSE, None))


# ── the rule of speed-run records ───────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(("mean", "num_runs"), [(3.276, 1), (3.278, 4), (3.279, 16)])
def test_the_speedrun_rules_own_examples_are_at_its_bar(mean: float, num_runs: int) -> None:
    """Each is (3.28 - mean) * sqrt(n) = 0.004; 0.004 / 0.0013 is what the rule rounds to 3.09."""
    assert speedrun_score(mean, 3.28, num_runs, spread=0.0013) == pytest.approx(0.004 / 0.0013)
    assert round(SPEEDRUN_SCORE * 0.0013, 3) == 0.004
    assert math.erfc(SPEEDRUN_SCORE / math.sqrt(2)) / 2 == pytest.approx(0.001, abs=2e-6)


def test_a_mean_above_the_target_has_a_negative_score() -> None:
    assert speedrun_score(0.009, 0.005, 4, spread=0.002) == pytest.approx(-4.0)


def test_the_pooled_spread_weighs_by_degrees_of_freedom() -> None:
    first, second = [0.1, -0.2, 0.4, 0.05], [0.0, 0.3]
    pooled = math.sqrt((3 * np.var(first, ddof=1) + np.var(second, ddof=1)) / 4)
    both = [PairedDifference("a", *interval([pairs]), len(pairs)) for pairs in (first, second)]
    assert pooled_spread(both) == pytest.approx(pooled) and pooled_spread(both[:1]) == pytest.approx(spread_of(both[0]))


def test_a_comparison_reads_the_speedrun_rule_with_the_spread_it_uses() -> None:
    said = "By the rule of speed-run records, "
    # Pairs of 0.001, 0, -0.001: a mean of 0 and a standard deviation of 0.001.
    assert compared(CLOSE, 0.004)[2] == (
        "By the rule of speed-run records, (0.004 − difference) · √n must reach 3.09 standard deviations (p < 0.001), that of "
        "these pairs taken as known (0.00100): bfloat16/word 6.93, enough."
    )
    page = (Path(__file__).parents[3] / "docs" / "compare.md").read_text(encoding="utf-8")
    assert compared(CLOSE, 0.004)[2] in page.replace("\n", " ")
    assert compared(CLOSE, 0.001)[2].endswith("bfloat16/word 1.73, not enough.")
    assert not any(said in sentence for sentence in compared(CLOSE, None))
    assert not any(said in sentence for sentence in compared((4.0, 4.1, 4.2), 0.004))  # equal bits have no spread


def test_the_speedrun_rule_pools_recipes_without_a_fault() -> None:
    other = seeds("bfloat16/compact", (4.003, 4.1, 4.197))
    lost = seeds("bfloat16/naive", (4.5, 4.9, 4.6), edq=(0.1, 0.1, 0.1))
    runs = [*seeds(MASTER, (4.0, 4.1, 4.2)), *seeds("bfloat16/word", CLOSE), *other, *lost]
    (found,) = (said for said in words(compare_runs(runs, resolve=0.004)) if "speed-run" in said)
    assert "that pooled from 2 recipes taken as known (0.00224): " in found and "naive" not in found
    assert "bfloat16/word 3.1, enough" in found and "bfloat16/compact 3.1, enough" in found


def test_a_difference_far_below_the_spread_is_said_to_be_out_of_reach() -> None:
    found = compared((4.2, 4.0, 4.2), 1e-4)
    assert f"More than {MOST_SEEDS} seeds would be needed" in found[0]


def test_luck_asks_for_one_seed_more() -> None:
    """Their spread says that these seeds suffice, and their interval that they did not."""
    found = compared((4.0015, 4.1025, 4.2035), 0.004)
    assert "At a small but certain price" in " ".join(found)
    wide = (4.0027, 4.1010, 4.2027)
    runs = compare_runs([*seeds(MASTER, (4.0, 4.1, 4.2)), *seeds("bfloat16/word", wide)], resolve=0.0045)
    assert runs.classes["bfloat16/word"].rank is Rank.INCONCLUSIVE
    assert seeds_needed(spread_of(runs.differences[0]), 0.0045) == 3
    assert "--seeds 4 resolves it" in words(runs)[0]


# ── the definition of a comparison, and its page ────────────────────────────────────────────────────────────────────


def defined(**more: object) -> ExperimentConfig:
    recipes = [parse(MASTER), parse("bfloat16/word")]
    return make_config(recipes, TrainConfig(model="llama-1m", steps=5), **{"seeds": 3, **more})  # type: ignore[arg-type]


def test_it_is_kept_with_the_comparison_and_may_be_changed(tmp_path: Path) -> None:
    config = defined(resolve=0.005)
    config.write(tmp_path)
    assert ExperimentConfig.read(tmp_path).resolve == 0.005
    assert config_of_flags(None, {}, out=tmp_path).resolve == 0.005
    assert config_of_flags(None, {}, resolve=0.002, out=tmp_path).resolve == 0.002
    assert config_of_flags(None, {}, seeds=5, out=tmp_path).resolve == 0.005
    assert defined(resolve=0.002).extend(config, tmp_path).resolve == 0.002
    assert "resolve" not in defined().to_dict()


@pytest.mark.parametrize("resolve", [0.0, -1.0, math.inf, math.nan])
def test_what_is_no_difference_is_refused(resolve: float) -> None:
    with pytest.raises(RecipeError, match=r"resolve = .* was requested"):
        defined(resolve=resolve)
    with pytest.raises(RecipeError, match=r"resolve = .* was requested"):
        compare_runs([made(MASTER, 0, 4.0)], resolve=resolve)


def test_one_seed_resolves_nothing() -> None:
    with pytest.raises(NarrowgaugeError, match=r"--resolve 0\.005 was requested of one seed"):
        defined(resolve=0.005, seeds=1)


def test_before_the_runs_it_says_what_they_resolve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = defined(resolve=0.005)
    assert training._resolution(config, 0.005, tmp_path) == (
        "3 seeds resolve a difference of 0.005 where paired differences vary by at most 0.0015 from seed to seed (standard "
        "deviation); after them, the verdict says how many it takes."
    )
    ended = {run.path.name: run for run in [*seeds(MASTER, (4.0, 4.1, 4.2)), *seeds("bfloat16/word", CLOSE)]}
    monkeypatch.setattr(PlannedRun, "has_ended", property(lambda planned: planned.folder.name in ended))
    monkeypatch.setattr(training, "read_run", lambda folder: ended[folder.name])
    said = "By the spread of the 3 seeds there are, 5 seeds resolve a difference of 0.002."
    assert training._resolution(config, 0.002, tmp_path) == said
    assert "more than 1000 seeds would resolve" in training._resolution(config, 1e-6, tmp_path)


def test_a_page_of_the_folder_says_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[Run] = [*seeds(MASTER, (4.0, 4.1, 4.2)), *seeds("bfloat16/word", CLOSE)]
    monkeypatch.setattr("narrowgauge.report.publishing.read_runs", lambda paths: runs)
    (tmp_path / DEFINITION_FILE).write_text("resolve = 0.002\n")
    assert "0.002 was to be resolved" in report([tmp_path]).read_text(encoding="utf-8")
    (tmp_path / DEFINITION_FILE).write_text("resolve = [")
    with pytest.raises(RecordError, match="is damaged"):
        report([tmp_path])
