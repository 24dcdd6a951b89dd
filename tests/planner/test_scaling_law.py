"""Scaling from measured times: two points fit two unknowns and say so, more points are checked,
intervals hold.
"""

from __future__ import annotations

import itertools
import math
import random

import pytest

from narrowgauge.planner.scaling_laws import SHAPES, fit, read_points

DAY = 86400.0


def test_two_points_keep_every_law_of_two_unknowns() -> None:
    scaling = fit(read_points("128:10d,256:7d"))
    assert [tuple(law.parts) for law in scaling.laws] == [
        ("divided", name) for name in list(SHAPES)[1:]
    ]
    for law, point in itertools.product(scaling.laws, scaling.points):
        assert law.seconds(point[0]) == pytest.approx(point[1])
    low, high = scaling.interval(512)
    assert low < 5.5 * DAY and high > 7.5 * DAY  # a rest that grows with N gives 7.5
    assert "1,280 chip-days become 1,792, 1.4 × as many" in scaling.sentences()[0]
    near, far = (scaling.interval(chips)[1] - scaling.interval(chips)[0] for chips in (256, 1024))
    assert far > 5 * near


def test_a_third_point_checks_the_law() -> None:
    scaling = fit(read_points("64:16d,128:10d,256:7d"))
    assert tuple(scaling.laws[0].parts) == ("divided", "constant")
    assert all("linear" not in law.parts for law in scaling.laws)
    for law in scaling.laws:  # three points and two unknowns leave one residual to judge by
        misses = []
        for chips, seconds in scaling.points:
            misses.append(law.seconds(chips) / seconds - 1)
        assert law.error == pytest.approx(math.hypot(*misses))
    assert "Measure a third size" not in "\n".join(scaling.sentences())


def test_a_third_point_can_choose_another_law() -> None:
    law = {64: 18.0, 128: 10.0, 256: 7.0}  # what a rest that grows with N gives
    scaling = fit([(chips, days * DAY) for chips, days in law.items()])
    assert tuple(scaling.laws[0].parts) == ("divided", "linear")


def test_perfect_scaling_has_no_rest() -> None:
    scaling = fit(read_points("128:10d,256:5d"))
    assert scaling.laws[0].parts == pytest.approx({"divided": 1280 * DAY})
    assert "No number of chips takes less" not in "\n".join(scaling.sentences())


def test_jobs_that_more_chips_slow_down_have_a_rest_that_grows() -> None:
    scaling = fit(read_points("128:7d,256:10d"))
    assert [tuple(law.parts) for law in scaling.laws] == [("divided", "linear")]


def _held_out(sizes: tuple[int, ...], at: int, seed: int) -> tuple[int, int]:
    """How many of 300 random laws, measured with noise, have their true time within the interval;
    and of how many.
    """
    draw = random.Random(seed)
    inside = 0
    for _ in range(300):
        rest = draw.choice(["constant", "logarithmic", "linear"])
        share = draw.uniform(0.02, 0.5)  # of the time on the smallest size
        scale = {"divided": (1 - share) * sizes[0], rest: share / SHAPES[rest](sizes[0])}

        def true(chips: int, scale: dict[str, float] = scale) -> float:
            return sum(value * SHAPES[name](chips) for name, value in scale.items())

        scaling = fit([(chips, true(chips) * draw.gauss(1, 0.02)) for chips in sizes])
        low, high = scaling.interval(at)
        inside += low <= true(at) <= high
    return inside, 300


@pytest.mark.parametrize(
    ("sizes", "at"),
    [((128, 256), 512), ((128, 256), 64), ((8, 16, 32), 128), ((8, 16, 32, 64), 256)],
)
def test_intervals_hold_four_times_out_of_five(sizes: tuple[int, ...], at: int) -> None:
    inside, tries = _held_out(sizes, at, seed=at)
    assert inside >= 0.8 * tries
