"""The statistics of a comparison, against printed tables and by hand."""

from __future__ import annotations

import math

import pytest

from narrowgauge.analysis.comparison.intervals import interval, seeds_needed


def test_the_interval_is_student_by_hand() -> None:
    # mean 0.02, standard deviation 0.01 exactly, n = 3: 4.303 · 0.01 / √3.
    mean, half = interval([0.01, 0.02, 0.03])
    assert mean == pytest.approx(0.02) and half == pytest.approx(4.302653 * 0.01 / 3**0.5)


def test_a_single_seed_has_no_interval_and_equal_ones_one_of_zero_width() -> None:
    assert interval([0.5]) == (0.5, math.inf)
    assert interval([0.5, 0.5]) == (0.5, 0.0)
    assert interval([0.5, math.nan])[1] == math.inf


@pytest.mark.parametrize(("difference", "seeds"), [(11.6, 2), (11.5, 3), (3.3, 3), (1.7, 5), (1e-3, None)])
def test_the_fewest_seeds_that_tell_a_difference_by_hand(difference: float, seeds: int | None) -> None:
    # Four of five times: 16.334 / √2 = 11.55, 5.653 / √3 = 3.26, 3.761 / √5 = 1.68 standard deviations.
    assert seeds_needed(1.0, difference) == seeds
