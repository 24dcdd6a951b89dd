"""The statistics of a comparison, against printed tables and by hand."""

from __future__ import annotations

import math

import pytest

from narrowgauge.analysis.comparison.intervals import interval, shown_difference


def test_the_interval_of_one_cell_is_student_by_hand() -> None:
    # mean 0.02, standard deviation 0.01 exactly, n = 3: 4.303 · 0.01 / √3.
    mean, half = interval([[0.01, 0.02, 0.03]])
    assert mean == pytest.approx(0.02) and half == pytest.approx(4.302653 * 0.01 / 3**0.5)


def test_cells_of_equal_spread_pool_their_degrees_of_freedom() -> None:
    # Two cells of s² = 1, n = 3: variance 2 · (1/3) / 4, degrees (2/3)² / (2 · (1/9) / 2) = 4.
    mean, half = interval([[0.0, 1.0, 2.0], [10.0, 11.0, 12.0]])
    assert mean == pytest.approx(6.0) and half == pytest.approx(2.776445 * (2 / 3 / 4) ** 0.5)


def test_a_single_seed_has_no_interval_and_equal_ones_one_of_zero_width() -> None:
    assert interval([[0.5]]) == (0.5, math.inf)
    assert interval([[0.5, 0.5]]) == (0.5, 0.0)
    assert interval([[0.5, math.nan]])[1] == math.inf


@pytest.mark.parametrize(
    ("mean", "half", "text"),
    [
        # At a loss of 5 this is how ./dev train's verdict reads.
        (-0.00012, 0.00069, "−0.0001 ± 0.0007"),
        (0.00024, 0.00021, "+0.00024 ± 0.00021"),
        (-0.00002, 0.00051, "0.0000 ± 0.0005"),
        (0.01, 1e-16, "+0.0100 ± 0.0000"),
        (0.1080, 0.0086, "+0.1080 ± 0.0086"),
        (1.8e-6, 3.3e-5, "+1.8e-06 ± 3.3e-05"),
        (-3e29, 1e30, "−3.0e+29 ± 1.0e+30"),
        (0.0, 0.0, "0.0000 ± 0.0000"),
        (-0.0123, math.inf, "−0.0123"),
        (math.nan, math.inf, "+nan"),
    ],
)
def test_differences_have_the_digits_that_their_interval_justifies(mean: float, half: float, text: str) -> None:
    assert shown_difference(mean, half) == text.replace(" ", "\N{NO-BREAK SPACE}")
