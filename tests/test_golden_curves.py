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
