"""The window that knows its median, against sorting it anew."""

from __future__ import annotations

import random
from collections import deque
from statistics import median

import pytest

from narrowgauge.analysis.monitor.spikes import SortedWindow


@pytest.mark.parametrize("size", [1, 2, 30, 99])
def test_the_median_is_that_of_the_last_values(size: int) -> None:
    draw = random.Random(size)
    window, last = SortedWindow(size), deque[float](maxlen=size)
    for _ in range(400):
        value = draw.choice([draw.gauss(0, 1), float(draw.randrange(3)), float("inf")])
        window.add(value)
        last.append(value)
        assert window.median == median(last)
    window.clear()
    window.add(7.0)
    assert window.median == 7.0
