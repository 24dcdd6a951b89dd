"""Student's t against printed tables, for the comparison's 95 % and for the audit's one false alarm in 10,000."""

from __future__ import annotations

import pytest

from narrowgauge.spec.significance import student_t


@pytest.mark.parametrize(
    ("degrees", "printed"),
    # Any table of the t distribution, two-sided 5 %.
    [
        (1, 12.706),
        (2, 4.303),
        (4, 2.776),
        (10, 2.228),
        (11, 2.201),
        (15, 2.131),
        (20, 2.086),
        (60, 2.000),
        (120, 1.980),
    ],
)
def test_quantiles_are_those_of_printed_tables(degrees: int, printed: float) -> None:
    assert student_t(degrees) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize(("degrees", "printed"), [(4, 13.034), (10, 5.694), (19, 4.590)])
def test_the_audits_quantile_is_that_of_printed_tables(degrees: int, printed: float) -> None:
    assert student_t(degrees, 1 - 2e-4) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize(("confidence", "normal"), [(0.95, 1.959964), (1 - 2e-4, 3.719016)])
def test_quantiles_fall_toward_the_normal_one(confidence: float, normal: float) -> None:
    values = [student_t(degrees, confidence) for degrees in range(1, 200)]
    assert values == sorted(values, reverse=True)
    assert student_t(10_000, confidence) == pytest.approx(normal, rel=5e-4)
