"""Student's t against printed tables, for the comparison's 95 % and for the audit's one false alarm
in 10,000.
"""

import pytest

from narrowgauge.spec.significance import student_t

FEW_PERCENT = {1: 12.706, 2: 4.303, 4: 2.776, 11: 2.201, 20: 2.086, 120: 2.086}
ONE_IN_10_000 = {4: 13.034, 10: 5.694, 19: 4.590}


def test_quantiles_are_those_of_printed_tables():
    for confidence, printed in ((0.95, FEW_PERCENT), (1 - 2e-4, ONE_IN_10_000)):
        for degrees, quantile in printed.items():
            assert student_t(degrees, confidence) == pytest.approx(quantile, abs=6e-4), degrees
