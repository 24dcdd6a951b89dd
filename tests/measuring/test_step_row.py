"""The record of a loop that is not the trainer's: on several ranks, and where it fails to make
progress.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import narrowgauge as ng
from narrowgauge.measuring.comparison import compare_runs
from narrowgauge.measuring.kinds import KINDS
from ranks import run_ranks
from trainer.tiny_runs import TIMINGS

pytestmark = pytest.mark.filterwarnings("ignore::narrowgauge.measuring.hooks.RunNotice")


def record(folder: Path, mesh: Any = None, loss: float = 1.0) -> int:
    """A recorded loop of four steps with given gradients, one of them infinite in a row of the
    first rank.
    """
    torch.manual_seed(0)
    model = nn.Linear(24, 18, bias=False).bfloat16()
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {
        "storage": "word",
        "max_grad_norm": 1.0,
        "audit_every": 1,
        "compile": False,
    }
    optimizer = ng.AdamW(model.named_parameters(), lr=1e-3, **options)
    with ng.RunRecorder(folder, model, optimizer, settings={"model": "matrix"}) as recorder:
        for step in range(4):
            gradient = torch.randn(18, 24, generator=torch.Generator().manual_seed(step)).bfloat16()
            gradient[0, 0] = math.inf if step == 2 else 1.0
            weight = model.weight
            weight.grad = (
                gradient if mesh is None else distribute_tensor(gradient, mesh, weight.placements)
            )
            optimizer.step()
            recorder.step(loss, tokens=8)
        recorder.evaluate(loss)
    return recorder.num_steps


OF_SAMPLES = {"arrived", "largest", "largest_in", "kept", "bad", "zero"}
"""Columns of the elements that a rank holds."""


def record_on_a_rank(rank: int, folder: Path) -> int:
    return record(folder, init_device_mesh("cpu", (2,)), loss=1.0 + rank)


def test_two_ranks_make_the_record_of_one_process_and_the_first_writes_it(tmp_path: Path) -> None:
    """The audit is that of all rows, wherever they lie; the loss, which differs here, is the first
    rank's.
    """
    record(tmp_path / "one")
    assert run_ranks(record_on_a_rank, 2, tmp_path, tmp_path / "two") == [4, 4]
    single, ranked = (ng.read_run(tmp_path / name) for name in ("one", "two"))

    def lasting(row: Any) -> dict[str, Any]:
        return {
            name: math.nan if value is None else value
            for name, value in row.items()
            if name not in TIMINGS and name not in OF_SAMPLES
        }

    assert [row["skipped"] for row in ranked.steps] == [False, False, True, False]
    assert {row["loss"] for row in ranked.steps} == {1.0} and ranked.steps[0]["edq"] > 0.99
    for row, expected in zip(ranked.steps, single.steps, strict=True):
        sums = row.pop("audit_sums", None)
        exact = expected.pop("audit_sums", None)
        assert sums == (None if exact is None else pytest.approx(exact, rel=1e-6))
        # Of float32 sums, in another order. The noise is the root of a small difference of them.
        for name, power, bound in (("edq", 1, 1e-4), ("noise", 2, 1e-6)):
            values = [lasting(row).get(name) for row in (row, expected)]
            if None not in values:
                powers = [value**power for value in values]
                assert powers[0] == pytest.approx(powers[1], abs=bound, nan_ok=True)
            else:
                assert values == [None, None]
            row.pop(name, None)
            expected.pop(name, None)
        assert lasting(row) == pytest.approx(lasting(expected), rel=1e-12, nan_ok=True)
    # On ranks the watch does not see all that it sees in one process.
    events = [
        [event for event in run.events if event["what"] not in ("note", "unseen")]
        for run in (single, ranked)
    ]
    assert [event["what"] for event in events[1]] == ["start", "finish"]
    assert events[1] == events[0]
    assert single.summary is not None and ranked.summary is not None
    for name in ("weights_fingerprint", "num_skipped", "tokens", "val_loss", "steps"):
        assert ranked.summary[name] == single.summary[name], name


FAILURES = int(KINDS["divergence"].bound)


def test_a_loop_that_fails_for_long_has_diverged(tmp_path: Path) -> None:
    model = nn.Linear(4, 4)
    with ng.RunRecorder(
        tmp_path / "run", model, torch.optim.SGD(model.parameters(), lr=0.1)
    ) as recorder:
        for loss in (*[math.nan] * (FAILURES - 1), 1.0, *[math.nan] * (FAILURES + 3)):
            recorder.step(loss)
        recorder.evaluate(2.0)
    run = ng.read_run(tmp_path / "run")
    (event,) = [event for event in run.events if event["what"] == "divergence"]
    assert event["step"] == 2 * FAILURES and "25 steps in a row failed" in event["text"]
    assert compare_runs([run]).rows[0]["diverged"]


def test_overflows_at_the_floor_of_the_loss_scale_are_failures(tmp_path: Path) -> None:
    """A step at 2 may lower the scale to 1. At 1 and below nothing is gained."""
    model = nn.Linear(4, 4, bias=False).half()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    options: dict[str, Any] = {"storage": "float16/split", "audit_every": 0, "compile": False}
    optimizer = ng.AdamW(model.named_parameters(), lr=1e-3, **options)
    with ng.RunRecorder(tmp_path / "run", model, optimizer) as recorder:
        for _ in range(FAILURES + 2):
            scaler.scale(model.weight.float().sum()).backward()
            model.weight.grad.fill_(math.inf)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            recorder.step(1.0)
    events = ng.read_run(tmp_path / "run").events
    assert [event["step"] for event in events if event["what"] == "divergence"] == [FAILURES + 1]
