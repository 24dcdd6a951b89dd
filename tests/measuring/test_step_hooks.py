"""Watched and recorded loops: sharded, with a loss scaler, and a model that minds being called."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import narrowgauge as ng
from measuring.plain_loop import Loop


@pytest.mark.parametrize("limit", [None, 0.25])
def test_a_sharded_loop_is_silent_and_says_what_is_not_watched(
    tmp_path: Path, limit: float | None
) -> None:
    from torch.distributed.fsdp import fully_shard

    class Sharded(Loop):
        told_clip = limit

        def prepare(self) -> None:
            fully_shard(self.model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
            options: Any = {"storage": "float32", "max_grad_norm": limit, "compile": False}
            self.optimizer = ng.AdamW(self.model.parameters(), **options)

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        loop = Sharded().run(4)
    finally:
        dist.destroy_process_group()
    assert not loop.readings and loop.watcher.meter.last["skipped"] is False
    assert "gradients that were not cleared" in loop.watcher.meter.unseen


@pytest.mark.parametrize("overflows", [(1,), (0, 2)])
def test_a_loop_that_skips_steps_as_a_grad_scaler_does_is_healthy(
    overflows: tuple[int, ...], tmp_path: Path
) -> None:
    loop = Loop(is_watched=False)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)

    def update() -> None:
        if loop.number - 1 in overflows:
            loop.model.head.weight.grad[0, 0] = math.inf  # type: ignore[index]
        scaler.step(loop.optimizer)
        scaler.update()

    loop.update = update  # type: ignore[method-assign]
    loop.backward = lambda loss: scaler.scale(loss).backward()  # type: ignore[method-assign]
    with ng.RunRecorder(tmp_path / "run", loop.model, loop.optimizer) as recorder:
        recorder_step = recorder.step
        loop.watcher = recorder
        recorder.step = lambda loss: recorder_step(loss, loss_scale=scaler.get_scale())  # type: ignore[assignment]
        loop.run(8)
    run = ng.read_run(tmp_path / "run")
    skipped = [row["step"] for row in run.steps if row.get("skipped")]
    assert skipped == [step + 1 for step in overflows]
    assert any(row.get("stored") for row in run.steps) and ng.diagnose(run).ok
