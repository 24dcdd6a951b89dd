"""Student's t against printed tables, for the comparison's 95 % and for the audit's one false alarm in 10,000."""

from __future__ import annotations

import pytest

from narrowgauge.spec.significance import student_t


@pytest.mark.parametrize(
    ("degrees", "printed"),
    # Any table of the t distribution, two-sided 5 %.
    [(1, 12.706), (2, 4.303), (4, 2.776), (11, 2.201), (120, 1.980)],
)
def test_quantiles_are_those_of_printed_tables(degrees: int, printed: float) -> None:
    assert student_t(degrees) == pytest.approx(printed, abs=6e-4)


@pytest.mark.parametrize(("degrees", "printed"), [(4, 13.034), (10, 5.694), (19, 4.590)])
def test_the_audits_quantile_is_that_of_printed_tables(degrees: int, printed: float) -> None:
    assert student_t(degrees, 1 - 2e-4) == pytest.approx(printed, abs=6e-4)
