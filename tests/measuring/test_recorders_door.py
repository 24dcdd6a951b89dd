"""The recorder's door: a number that no loop can mean is refused there, and a closed record stays
as it is. A summary has the fingerprint of all weights, or none.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from narrowgauge.errors import NarrowgaugeError
from narrowgauge.runs.record import read_run
from ranks import run_ranks


def recorder_in(folder: Path, **options: Any) -> ng.RunRecorder:
    model = nn.Linear(4, 4)
    return ng.RunRecorder(folder, model, ng.AdamW(model.parameters(), lr=1e-3), **options)


NO_COUNTS = (-1, 1.5, "5", True, float("nan"))
COUNTS: dict[str, Callable[[Path, Any], Any]] = {
    "gauges_every": lambda folder, n: recorder_in(folder, gauges_every=n),
    "fingerprints_every": lambda folder, n: recorder_in(folder, fingerprints_every=n),
    "tokens": lambda folder, n: recorder_in(folder).step(2.5, tokens=n),
    "step": lambda folder, n: recorder_in(folder).go_back(n),
}


@pytest.mark.parametrize("name", COUNTS)
def test_what_is_no_count_is_refused(name: str, tmp_path: Path) -> None:
    for place, number in enumerate(NO_COUNTS):
        with pytest.raises(NarrowgaugeError, match=f"{name} = "):
            COUNTS[name](tmp_path / str(place), number)


CALLS: dict[str, Callable[[ng.RunRecorder], Any]] = {
    "step": lambda recorder: recorder.step(2.5),
    "evaluate": lambda recorder: recorder.evaluate(2.5),
    "event": lambda recorder: recorder.event("note", "late"),
}


@pytest.mark.parametrize("call", CALLS)
def test_a_closed_record_refuses_and_stays(call: str, tmp_path: Path) -> None:
    recorder = recorder_in(tmp_path / "run")
    recorder.step(3.0)
    recorder.close()
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    with pytest.raises(NarrowgaugeError, match="record is closed"):
        CALLS[call](recorder)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def loops(rank: int, place: Path) -> list[str]:
    """Train a sharded model, with and without an evaluation at the end."""
    fingerprints = []
    mesh = init_device_mesh("cpu", (2,))
    for has_evaluation in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).bfloat16()
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        optimizer = ng.AdamW(model.parameters(), lr=1e-3)
        folder = place / f"run-{has_evaluation}"
        batch = torch.ones(4, 8).bfloat16()
        with ng.RunRecorder(folder, model, optimizer) as recorder:
            for _ in range(2):
                loss = model(batch).float().square().mean()
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                recorder.step(loss)
            if has_evaluation:
                with torch.no_grad():
                    recorder.evaluate(model(batch).float().square().mean())
        if rank == 0:
            summary = read_run(folder).summary
            fingerprints.append(summary["weights_fingerprint"])
    return fingerprints


def test_an_evaluation_changes_no_fingerprint_of_sharded_weights(tmp_path: Path) -> None:
    first, second = run_ranks(loops, 2, tmp_path / "ranks", tmp_path)[0]
    assert first == second
