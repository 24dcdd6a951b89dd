"""Scaling from measured times: two points fit two unknowns and say so, more points are checked, intervals hold."""

from __future__ import annotations

import itertools
import random

import pytest

from narrowgauge.errors import DataError
from narrowgauge.planner.measured.scaling_law import SHAPES, MeasuredTime, fit, read_points, scaling_dict, scaling_lines

DAY = 86400.0


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("", "no time"),
        ("128:10d", "128 chips only"),
        ("128:10d,128:11d", "128 chips only"),
        ("128:10,256:7", "CHIPS:TIME"),
        ("128:10y,256:7y", "CHIPS:TIME"),
        ("a:10d,256:7d", "CHIPS:TIME"),
        ("0:10d,256:7d", "above zero"),
        ("128:-1d,256:7d", "above zero"),
        ("128:nan d,256:7d", "above zero"),
    ],
)
def test_what_is_no_measured_time_is_refused_in_one_line(text: str, what: str) -> None:
    with pytest.raises(DataError, match=what) as refused:
        read_points(text)
    assert "128:10d,256:7d" in refused.value.advice and "\n" not in str(refused.value)


def test_the_worked_question() -> None:
    """128 units 10 days, 256 units 7 days: T = 768/N + 4."""
    found = fit(read_points("128:10d,256:7d"))
    assert found.law.parts == pytest.approx({"divided": 768 * DAY, "constant": 4 * DAY})
    assert found.speed_up(128, 256) == pytest.approx(10 / 7)
    assert f"{found.efficiency(128, 256):.0%}" == "71%"
    assert found.seconds(512) == pytest.approx(5.5 * DAY)
    assert found.seconds(64) == pytest.approx(16 * DAY)
    assert not found.is_checked
    said = "\n".join(scaling_lines(found, [512, 64]))
    for words in ("1.43 ×", "71%", "768 d / N + 4 d", "nothing checks", "5.5 d", "16 d", "Measure a third size"):
        assert words in said


def test_two_points_keep_every_law_of_two_unknowns() -> None:
    found = fit(read_points("128:10d,256:7d"))
    assert [tuple(law.parts) for law in found.laws] == [("divided", name) for name in list(SHAPES)[1:]]
    for law, point in itertools.product(found.laws, found.points):
        assert law.seconds(point.chips) == pytest.approx(point.seconds)
    low, high = found.interval(512)
    assert low < 5.5 * DAY and high > 7.5 * DAY  # a rest that grows with N gives 7.5
    near, far = (found.interval(chips)[1] - found.interval(chips)[0] for chips in (256, 1024))
    assert far > 5 * near


def test_a_third_point_checks_the_law() -> None:
    found = fit(read_points("64:16d,128:10d,256:7d"))
    assert found.is_checked and tuple(found.law.parts) == ("divided", "constant")
    assert all("linear" not in law.parts for law in found.laws)
    assert "Measure a third size" not in "\n".join(scaling_lines(found, [512]))


def test_a_third_point_can_choose_another_law() -> None:
    law = {64: 18.0, 128: 10.0, 256: 7.0}  # what a rest that grows with N gives
    found = fit([MeasuredTime(chips, days * DAY) for chips, days in law.items()])
    assert tuple(found.law.parts) == ("divided", "linear")


def test_times_of_different_jobs_are_not_extrapolated() -> None:
    faster, slower = (scaling_lines(fit(read_points(text)), [512]) for text in ("128:10d,256:4d", "128:7d,256:20d"))
    assert "faster than in proportion" in faster[1] and "do not extrapolate" in faster[1]
    assert "not of one job" in slower[1]
    assert not any("512" in line for line in faster + slower)


def test_perfect_scaling_has_no_rest() -> None:
    found = fit(read_points("128:10d,256:5d"))
    assert found.law.parts == pytest.approx({"divided": 1280 * DAY})
    assert "Nothing that would not shrink" in "\n".join(scaling_lines(found))


def test_jobs_that_more_chips_slow_down_have_a_rest_that_grows() -> None:
    found = fit(read_points("128:7d,256:10d"))
    assert [tuple(law.parts) for law in found.laws] == [("divided", "linear")]
    assert "shared links" in "\n".join(scaling_lines(found))


def test_order_and_units_do_not_matter() -> None:
    assert fit(read_points("256:168h,128:14400min")).law.parts == pytest.approx(
        fit(read_points("128:10d,256:7d")).law.parts
    )


def _held_out(sizes: tuple[int, ...], at: int, seed: int) -> tuple[int, int]:
    """How many of 300 random laws, measured with noise, have their true time within the interval; and of how many."""
    draw = random.Random(seed)
    inside = 0
    for _ in range(300):
        rest = draw.choice(["constant", "logarithmic", "linear"])
        share = draw.uniform(0.02, 0.5)  # of the time on the smallest size
        scale = {"divided": (1 - share) * sizes[0], rest: share / SHAPES[rest](sizes[0])}

        def true(chips: int, scale: dict[str, float] = scale) -> float:
            return sum(value * SHAPES[name](chips) for name, value in scale.items())

        found = fit([MeasuredTime(chips, true(chips) * draw.gauss(1, 0.02)) for chips in sizes])
        low, high = found.interval(at)
        inside += low <= true(at) <= high
    return inside, 300


@pytest.mark.parametrize(
    ("sizes", "at"), [((128, 256), 512), ((128, 256), 64), ((8, 16, 32), 128), ((8, 16, 32, 64), 256)]
)
def test_intervals_hold_four_times_out_of_five(sizes: tuple[int, ...], at: int) -> None:
    inside, tries = _held_out(sizes, at, seed=at)
    assert inside >= 0.8 * tries


def test_the_values_are_those_of_the_sentences() -> None:
    found = fit(read_points("128:10d,256:7d"))
    values = scaling_dict(found, [512])
    assert values["sentences"] == scaling_lines(found, [512])
    assert values["predictions"][0]["seconds"] == pytest.approx(5.5 * DAY)
    assert values["is_checked"] is False
    assert {"communication", "synchronization", "failures"} <= {cause["name"] for cause in values["causes"]}
