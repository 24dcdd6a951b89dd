"""Ten losses of each storage and each compute equal the recorded ones, bit for bit on the same kind of processor.

``./dev test --update-golden`` records them again and prints which moved and by how much. ``golden_files.py`` defines the same
kind of processor, ``golden_curves.py`` what is trained.
"""

from __future__ import annotations

import math
import shutil
import subprocess
import sys
from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import pytest

from golden_curves import STEPS, curve, recipes
from golden_files import CURVES, check, deviation, machine_key, read_curves, tolerance_of, update_curves

HERE = Path(__file__).parent


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


def test_an_update_prints_what_moved_and_removes_it_from_other_keys(tmp_path: Path) -> None:
    path = tmp_path / "curves.json"
    curves = {"a": [4.0, 2.0], "b": [3.0, 1.0]}

    def update(key: str, **found: list[float]) -> list[str]:
        return update_curves(path, [(key, name, [loss.hex() for loss in of]) for name, of in found.items()])

    assert update("here", **curves) == ["curves.json: 0 curves with the same bits, 2 new, 0 moved"]
    assert update("there", **curves) == ["curves.json: 0 curves with the same bits, 2 new, 0 moved"]
    before = path.read_text()
    assert update("here", **curves) == ["curves.json: 2 curves with the same bits, 0 new, 0 moved"]
    assert path.read_text() == before
    assert update("here", a=[4.0, 2.5]) == [
        "curves.json: 0 curves with the same bits, 0 new, 1 moved",
        "a: from step 2 on, by up to 2.5e-01 (2.000000 → 2.500000); removed from 1 other keys",
    ]
    assert read_curves(path) == {"here": {"a": [4.0, 2.5], "b": [3.0, 1.0]}, "there": {"b": [3.0, 1.0]}}
    update("here", b=[3.0, 1.5])
    assert list(read_curves(path)) == ["here"]


def test_the_option_records_what_workers_found(tmp_path: Path) -> None:
    for file in ("conftest.py", "golden_files.py", "golden_curves.py", "test_golden_curves.py"):
        shutil.copy(HERE / file, tmp_path)
    (tmp_path / "golden").mkdir()
    key, losses = machine_key(), [9.0] * STEPS
    update_curves(tmp_path / "golden" / "curves.json", [(key, "float32/float32", [loss.hex() for loss in losses])])
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-n1",
        "-q",
        "--update-golden",
        "--import-mode=importlib",
        "-k",
        "float32/float32 and not tfloat32",
    ]
    result = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert result.returncode == 0, result.stdout + result.stderr
    assert "0 curves with the same bits, 0 new, 1 moved" in result.stdout
    assert "float32/float32: from step 1 on, by up to" in result.stdout
    assert read_curves(tmp_path / "golden" / "curves.json") == {key: {"float32/float32": curve("float32/float32")}}
