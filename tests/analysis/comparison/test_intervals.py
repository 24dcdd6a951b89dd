"""The statistics of a comparison, against printed tables and by hand."""

from __future__ import annotations

import math

import pytest

from narrowgauge.analysis.comparison.intervals import interval


def test_the_interval_is_student_by_hand() -> None:
    # mean 0.02, standard deviation 0.01 exactly, n = 3: 4.303 · 0.01 / √3.
    mean, half = interval([0.01, 0.02, 0.03])
    assert mean == pytest.approx(0.02) and half == pytest.approx(4.302653 * 0.01 / 3**0.5)


def test_a_single_seed_has_no_interval_and_equal_ones_one_of_zero_width() -> None:
    assert interval([0.5]) == (0.5, math.inf)
    assert interval([0.5, 0.5]) == (0.5, 0.0)
    assert interval([0.5, math.nan])[1] == math.inf
