"""What a step asks of a GPU: a number of launches that does not grow with the model, and nothing for which the host waits."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda.lowering import kept_folder
from optional_packages import needs_triton

pytestmark = needs_triton
CASES: dict[str, tuple[dict[str, Any], int]] = {
    "word": ({"storage": "word"}, 6),
    "word, clipped": ({"storage": "word", "max_grad_norm": 1.0}, 12),
    "compact": ({"storage": "compact"}, 10),
    "compact, clipped": ({"storage": "compact", "max_grad_norm": 1.0}, 16),
    "stochastic": ({"storage": "stochastic"}, 6),
}
"""Options of an optimizer, and how many operations a step may give the device."""
LAYERS = (1, 4)
WAITS = {"layers": 1, "options": {"storage": "word"}, "waits": True}
"""A planted fault."""


@pytest.fixture(scope="module")
def steps(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], dict[str, list[str]]]:
    """The last step of each case with each number of layers, in a process that believes that it has a GPU."""
    keys = [(name, layers) for name in CASES for layers in LAYERS]
    cases = json.dumps([*({"layers": layers, "options": CASES[name][0]} for name, layers in keys), WAITS])
    places = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "cuda.host", str(kept_folder()), "sm_90", cases]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip([*keys, ("planted", 1)], json.loads(done.stdout), strict=True))


@pytest.mark.parametrize("name", CASES)
def test_a_step_has_few_launches_whatever_the_model(name: str, steps: Any) -> None:
    few, many = (steps[name, layers]["given"] for layers in LAYERS)
    assert few == many
    assert 0 < len(many) <= CASES[name][1]


@pytest.mark.parametrize("name", CASES)
def test_a_step_waits_for_nothing(name: str, steps: Any) -> None:
    """Reading a value of the device would have failed: what else waits is a copy that is not queued."""
    assert [steps[name, layers]["waits"] for layers in LAYERS] == [[], []]


def test_a_copy_that_is_waited_for_is_noticed(steps: Any) -> None:
    assert set(steps["planted", 1]["waits"]) == {"aten::_to_copy"}
