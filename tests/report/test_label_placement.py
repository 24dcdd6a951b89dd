"""Names of points: on a free side or nowhere, at the width they were placed for and at every wider one."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest

from narrowgauge.report import figures
from narrowgauge.report.groups import group_runs
from narrowgauge.report.label_placement import WIDTHS, Box, Spot, sides
from narrowgauge.runs.record import Run

MakeRun = Callable[..., Run]


def spot(name: str, x: float, y: float, bar: float = 0.0) -> Spot:
    return Spot(name, x, y, y - bar, y + bar)


CROWD = [
    spot(f"bfloat16/recipe{place}", 0.05 + place * 37 % 90 / 100, 0.1 + place * 53 % 80 / 100, place % 3 / 40)
    for place in range(30)
]
# The same memory, and losses a point's height apart; a pair across; one far out at either end.
STACK = [spot(f"float8-{place}/word", 0.5, 0.5 + place * 0.04) for place in range(5)]
PAIR = [
    spot("left", 0.40, 0.2),
    spot("right", 0.42, 0.2),
    spot("a long name at the end", 0.9, 0.9),
    spot("0", 0.0, 0.1),
]


@pytest.mark.parametrize("spots", [CROWD, STACK, PAIR, CROWD[:3] + STACK + PAIR])
@pytest.mark.parametrize("width", WIDTHS)
def test_no_name_touches_a_point_a_bar_or_another_name(spots: list[Spot], width: int) -> None:
    found = sides(spots, width)
    assert any(found)
    # The page's print is larger from one of the widths on.
    for wide in range(width, 1500 if width >= 520 else 520, 7):
        inner = wide - 75.0
        labels = [(one, one.label(side, inner)) for one, side in zip(spots, found, strict=True) if side]
        for (_, label), (_, other) in itertools.combinations(labels, 2):
            assert not label.touches(other), wide
        for one, label in labels:
            assert not any(label.touches(other.mark(inner)) for other in spots if other is not one), (wide, one)
            assert not label.touches(one.bar(inner)), (wide, one)
            assert label.left >= 0 and label.right <= inner, (wide, one)


def test_a_name_stands_on_the_inner_side_where_it_is_free() -> None:
    assert sides([spot("a", 0.1, 0.5)], 500) == ["middle right"]
    assert sides([spot("a", 0.9, 0.5)], 500) == ["middle left"]
    # A neighbour on that side: the other; on both: above.
    assert sides([spot("a", 0.1, 0.5), spot("b", 0.13, 0.5)], 500)[0] == "middle left"
    crowded = [spot("abc", 0.3, 0.5), spot("b", 0.35, 0.5), spot("c", 0.25, 0.5)]
    assert sides(crowded, 500)[0] == "top center"
    # A bar is in the way as a point is.
    assert sides([spot("abc", 0.3, 0.5), spot("b", 0.35, 0.8, 0.3)], 500)[0] == "middle left"
    # Its own is, above it and below.
    assert sides([spot("abc", 0.3, 0.5, 0.2), *crowded[1:]], 500)[0] is None
    assert sides([spot("a" * 200, 0.5, 0.5)], 500) == [None]


def test_boxes_touch_where_they_share_a_dot() -> None:
    box = Box(0, 2, 0, 2)
    assert box.touches(Box(1, 3, 1, 3)) and box.touches(Box(0.5, 1, 0.5, 1))
    assert not box.touches(Box(2, 3, 0, 2)) and not box.touches(Box(0, 2, 2, 3))


def test_a_name_beside_a_neighbour_at_the_same_height_is_moved(make_run: MakeRun) -> None:
    """Two recipes with nearly the same memory and the same loss: the first one's name would lie on the second's point."""
    made = [make_run("bfloat16/master", bytes_per_param=16.0, loss=lambda step: 5.0)]
    made += [make_run("bfloat16/word", bytes_per_param=6.5), make_run("bfloat16/compact", bytes_per_param=7.5)]
    figure = figures.loss_against_bytes(group_runs(made))
    assert figure is not None
    by_name = {trace["name"]: trace for trace in figure.data}
    for width in WIDTHS:
        places = {
            name: [change for least, change in trace["meta"]["fits"] if least <= width][-1].get("textposition")
            for name, trace in by_name.items()
            if any(least <= width for least, _ in trace["meta"]["fits"])
        }
        assert places.get("bfloat16/word") != "middle right", width
        assert places.get("bfloat16/compact") != "middle left", width
    assert {name for name, trace in by_name.items() if trace["meta"]["fits"]} == set(by_name)
    assert all(trace["mode"] == "markers" for trace in figure.data)
