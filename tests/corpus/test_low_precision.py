"""No healthy loop in low precision is accused by ``ng.check`` of its batch."""

from __future__ import annotations

import pytest

from corpus.low_precision import LOOPS


@pytest.mark.parametrize("name", LOOPS)
def test_a_healthy_loop_in_low_precision_is_not_accused(name: str) -> None:
    readings = LOOPS[name].check()
    assert readings.ok, readings
