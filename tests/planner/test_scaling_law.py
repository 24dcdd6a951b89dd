"""Scaling from measured times: two points fit the law and say so, more points check it."""

import pytest

from narrowgauge.planner.scaling import read_points, scaling_row

DAY = 86400.0


def test_two_points_fit_and_nothing_checks_them():
    points = read_points("128:10d,256:7d")
    row = scaling_row(points, [512])
    assert row["law"] == pytest.approx({"divided": 768 * DAY, "constant": 4 * DAY, "error": 0})
    assert "nothing checks this law" in row["sentences"][-2]
    assert row["seconds"] == pytest.approx({512: 5.5 * DAY})


MEANINGS = {
    "64:16d,128:10d,256:7d": "misses the measured times by at most",
    "64:5d,128:10d,256:3d": "measure again",
    "128:7d,256:10d": "measure again",
    "128:10d,256:5d": "nothing checks",
}


@pytest.mark.parametrize(("text", "says"), MEANINGS.items())
def test_other_times_say_what_they_mean(text, says):
    row = scaling_row(read_points(text))
    assert any(says in line for line in row["sentences"])
    assert bool(row["seconds"]) == (says != "measure again")
