"""A step over what FSDP2 shards, on eight ranks that are not there: the same collectives on each, and no wait."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cuda import sharded_host
from cuda.lowering import kept_folder
from optional_packages import needs_triton

pytestmark = needs_triton
CASES: dict[str, dict[str, Any]] = {
    "word": {"storage": "word", "audit_every": 0},
    "word, clipped": {"storage": "word", "audit_every": 0, "max_grad_norm": 1.0},
    "compact, clipped": {"storage": "compact", "audit_every": 0, "max_grad_norm": 1.0},
}
LAUNCHES = {"word": 2, "word, clipped": 2, "compact, clipped": 4}
"""Of the step's kernels: one for rows of 16 words and one for others, and for scales of rows as many again."""
RANKS = (0, 4, 7)
"""The first has a part of every parameter, the fifth the last row of one, the last has none of three."""
PLANTED = {"rank": 0, "options": CASES["word, clipped"], "turned": True}


@pytest.fixture(scope="module")
def steps() -> dict[tuple[str, int], dict[str, Any]]:
    keys = [(name, rank) for name in CASES for rank in RANKS]
    cases = json.dumps([*({"rank": rank, "options": CASES[name]} for name, rank in keys), PLANTED])
    places = [str(Path(__file__).parents[1]), *filter(None, sys.path)]
    given = {**os.environ, "PYTHONPATH": os.pathsep.join(places), "OMP_NUM_THREADS": "1"}
    kept_folder().mkdir(mode=0o700, parents=True, exist_ok=True)
    command = [sys.executable, "-m", "cuda.sharded_host", str(kept_folder()), "sm_90", cases]
    done = subprocess.run(command, env=given, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return dict(zip([*keys, ("planted", 0)], json.loads(done.stdout), strict=True))


def test_shards_are_equal_unequal_and_empty(steps: Any) -> None:
    shards = {rank: steps["word", rank]["shards"] for rank in RANKS}
    assert shards[0] != shards[4] != shards[7]
    assert [0 in shape for shape in shards[7]] == [False, True, True, False, True, False]
    assert len(shards[0]) == len(sharded_host.SHAPES) and not any(0 in shape for shape in shards[0])


@pytest.mark.parametrize("name", CASES)
def test_every_rank_sends_the_same_kinds_of_tensors(name: str, steps: Any) -> None:
    """Whatever it holds: else ranks wait for each other for ever, or read each other's bytes as another type."""
    first, *others = (steps[name, rank]["sent"] for rank in RANKS)
    assert all(other == first for other in others)
    assert bool(first) == ("clipped" in name)
    for _, tensors in first:
        assert tensors and all(device == "cuda" and in_one_piece for _, _, device, in_one_piece in tensors)


@pytest.mark.parametrize("name", [name for name in CASES if "clipped" in name])
def test_norms_are_summed_as_integers(name: str, steps: Any) -> None:
    """Two collectives: of the largest magnitudes, and of sums that are the same in any order."""
    assert steps[name, 0]["sent"] == [
        ["allreduce_", [["torch.int64", [1], "cuda", True]]],
        ["allreduce_", [["torch.int64", [2, 1], "cuda", True]]],
    ]


@pytest.mark.parametrize("name", CASES)
def test_a_sharded_step_waits_for_nothing_and_launches_few_kernels(name: str, steps: Any) -> None:
    for rank in RANKS:
        step = steps[name, rank]
        assert step["waits"] == []
        assert 0 < step["given"].count("kernel adamw ") <= LAUNCHES[name]


def test_a_collective_of_another_type_is_noticed(steps: Any) -> None:
    assert steps["planted", 0]["sent"] != steps["word, clipped", 0]["sent"]
