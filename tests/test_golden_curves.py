"""Ten losses of each storage and each compute equal the recorded ones, bit for bit on the same kind of processor.

``./dev test --update-golden`` records them again and prints which moved and by how much. ``golden_files.py`` defines the same
kind of processor, ``golden_curves.py`` what is trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import combinations

import pytest

from golden_curves import STEPS, curve, recipes
from golden_files import CURVES, check, deviation, machine_key, read_curves, tolerance_of


@pytest.mark.parametrize("recipe", recipes())
def test_a_curve_is_as_recorded(
    recipe: str, update_golden: bool, record_property: Callable[[str, object], None]
) -> None:
    found = curve(recipe)
    assert len(found) == STEPS and all(map(math.isfinite, found)) and found[-1] < found[0]
    if update_golden:
        record_property("golden_curve", [machine_key(), recipe, [loss.hex() for loss in found]])
    elif wrong := check(recipe, found, read_curves(CURVES), machine_key()):
        pytest.fail(f"{wrong}. If this is meant: ./dev test --update-golden", pytrace=False)


def test_recorded_curves_agree_between_machines_and_are_of_recipes_that_exist() -> None:
    recorded = read_curves(CURVES)
    assert len(recorded) >= 2
    for one, other in combinations(recorded.values(), 2):
        for name in one.keys() & other.keys():
            assert deviation(one[name], other[name]) <= tolerance_of(name), name
    assert set().union(*recorded.values()) == set(recipes())


RECORDED = {
    "here": {"a": [4.0, 2.0, 1.0], "a/weight8": [4.0, 2.0, 1.0]},
    "there": {"a": [4.0, 2.001, 1.0], "b": [3.0, 2.0, 1.0]},
}


@pytest.mark.parametrize(
    ("name", "found", "key", "says"),
    [
        ("a", [4.0, 2.0, 1.0], "here", ""),
        ("a", [4.0, math.nextafter(2.0, 3.0), 1.0], "here", "other bits than were recorded on 'here': from step 2 on"),
        ("a", [4.0, 2.001, 1.0], "here", "by up to 5.0e-04"),
        ("a", [4.0, 2.0], "here", "from step 3 on, by up to inf"),
        ("a", [4.0, 2.0, math.nan], "here", "from step 3 on, by up to inf"),
        ("a", [4.0, 2.001, 1.0], "elsewhere", ""),
        ("a", [4.0, 2.003, 1.0], "elsewhere", "'a' is 1.5e-03 off what was recorded on 'here', and 0.001 is allowed"),
        ("a", [4.0, 2.0, math.inf], "elsewhere", "'a' is inf off"),
        ("b", [3.0, 2.0, 1.0005], "here", ""),
        ("b", [3.0, 2.0, 1.1], "here", "1.0e-01 off what was recorded on 'there'"),
        ("a/weight8", [4.0, 2.003, 1.0], "elsewhere", ""),
        (
            "a/weight8",
            [4.0, 2.005, 1.0],
            "elsewhere",
            "'a/weight8' is 2.5e-03 off what was recorded on 'here', and 0.002 is",
        ),
        ("c", [3.0], "here", "no curve of 'c' is recorded"),
    ],
)
def test_the_comparison_can_fail(name: str, found: list[float], key: str, says: str) -> None:
    wrong = check(name, found, RECORDED, key)
    assert says in wrong and bool(wrong) == bool(says)
