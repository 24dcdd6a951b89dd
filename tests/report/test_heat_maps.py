"""Heat maps: cells keep their worst value, too many tensors leave the most troubled, names lose what they share."""

from __future__ import annotations

import math

from narrowgauge.report.figures.heat_maps import heat_maps


def updates(step: int, **edq: float | None) -> dict[str, object]:
    return {"step": step, "updates": {name: [value, None, None, None, None, None] for name, value in edq.items()}}


def test_a_cell_is_a_value() -> None:
    rows = [updates(10, a=1.0, b=0.25), updates(20, a=0.5), updates(30, a=math.nan, b=2.5)]
    maps = heat_maps(rows)
    assert list(maps) == ["edq"]
    (trace,) = maps["edq"]["data"]
    assert trace["x"] == [10, 20, 30]
    assert trace["z"] == [[1.0, 0.5, None], [0.25, None, 2.5]]
    assert maps["edq"]["layout"]["yaxis"]["ticktext"] == ["a", "b"]
    assert "Shown are" not in maps["edq"]["how"]


def test_joined_steps_keep_the_value_farthest_from_health() -> None:
    values = [1.0] * 1000
    values[321], values[654] = 0.125, 1.75
    rows = [updates(step, a=value) for step, value in enumerate(values)]
    maps = heat_maps(rows)
    (cells,) = maps["edq"]["data"][0]["z"]
    assert len(cells) < 1000
    assert sorted(value for value in cells if value != 1.0) == [0.125, 1.75]
    assert "shows the worst" in maps["edq"]["how"]


def test_of_too_many_tensors_the_most_troubled_stay_in_order() -> None:
    names = [f"p{place:03d}" for place in range(200)]
    rows = [updates(1, **{name: 0.0 if name in ("p150", "p007") else 1.0 for name in names})]
    maps = heat_maps(rows)
    names = maps["edq"]["data"][0]["meta"]["names"]
    assert {"p007", "p150"} <= set(names)
    assert names == sorted(names)
    assert len(names) == 64
    assert "64 of 200" in maps["edq"]["how"]
