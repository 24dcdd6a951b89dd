"""Who watches an optimizer's step: one pair of hooks, and ``ng.RunRecorder``."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import narrowgauge as ng
from gauges.recording.plain_loop import Loop
from narrowgauge.torch_support.torch_hooks import Follower


class Derived(torch.optim.AdamW):
    """Calls its parent's step, which PyTorch hooks, too, once a plain one was made."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        return super().step(closure)


class FiveTimes(torch.optim.AdamW):
    """Takes five times the step of its last group."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        before = [p.clone() for p in self.param_groups[-1]["params"]]
        loss = super().step(closure)
        for p, old in zip(self.param_groups[-1]["params"], before, strict=True):
            p.copy_(old + 5 * (p - old))
        return loss


@pytest.fixture(autouse=True, scope="module")
def a_plain_optimizer_was_made() -> None:
    for kind in (
        torch.optim.AdamW,
        FiveTimes,
    ):  # PyTorch hooks the step of a class when one is made
        kind([torch.zeros(1, requires_grad=True)])


# ── the hooks ─────────────────────────────────────────────────────────────────────────────────────


def followed(kind: type[torch.optim.Optimizer]) -> tuple[torch.optim.Optimizer, list[str]]:
    weight = nn.Parameter(torch.ones(4))
    calls = list[str]()
    weight.grad = torch.ones(4)
    optimizer = kind([weight], lr=0.1)  # type: ignore[call-arg]
    Follower(optimizer, lambda _: calls.append("before"), lambda _: calls.append("after"))
    return optimizer, calls


@pytest.mark.parametrize("closure", [None, lambda: None])
def test_a_step_that_calls_its_parents_step_is_one_step(closure: Any) -> None:
    optimizer, calls = followed(Derived)
    for _ in range(2):
        optimizer.step(closure)
    assert calls == ["before", "after"] * 2


def test_a_copy_or_a_pickle_of_an_optimizer_has_no_followers() -> None:
    optimizer, calls = followed(torch.optim.SGD)
    for duplicate in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        duplicate.step()
        Follower(duplicate, lambda _: None, lambda _: None)
        duplicate.step()
    assert not calls


# ── names, sharded parameters ─────────────────────────────────────────────────────────────────────


def five_times(parameters: Any, **settings: Any) -> FiveTimes:
    *rest, last = parameters
    return FiveTimes(
        [{"params": rest}, {"params": [last, nn.Parameter(torch.ones(3))]}], **settings
    )


def test_a_fault_of_a_derived_optimizer_is_read_also_of_parameters_that_the_model_does_not_have() -> (
    None
):
    loop = Loop(optimizer=five_times, lr=1e-4)
    beside = loop.optimizer.param_groups[1]["params"][1]
    plain, loop.loss = loop.loss, lambda: plain() + beside.square().sum()  # type: ignore[method-assign]
    (reading,) = loop.run(2).readings
    assert (reading.what, reading.tensor) == ("step-factor", "head.weight and 1 other")
    assert abs(reading.value - 5) < 1e-2


def test_an_error_of_the_comparison_ends_no_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any) -> None:
        raise MemoryError("no room\nat line 2")

    monkeypatch.setattr("narrowgauge.gauges.recording.sampled.step_readings", fails)
    assert Loop().run(3).watcher.unseen["the optimizer's step"] == "MemoryError: no room"


@pytest.mark.parametrize("limit", [None, 0.25])
def test_sharded_parameters_are_compared_part_by_part(tmp_path: Path, limit: float | None) -> None:
    """What the optimizer clips is a norm over all ranks, which it tells."""
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group(
        "gloo", store=dist.FileStore(str(tmp_path / "store"), 1), rank=0, world_size=1
    )
    try:
        loop = Loop(watch=None)
        fully_shard(loop.model, mesh=dist.device_mesh.init_device_mesh("cpu", (1,)))
        loop.optimizer = ng.AdamW(
            loop.model.parameters(), storage="float32", max_grad_norm=limit, compile=False
        )
        loop.begin_watch(max_grad_norm=limit)
        loop.run(3)
    finally:
        dist.destroy_process_group()
    assert not loop.readings


def test_a_watched_model_is_neither_switched_nor_called() -> None:
    class Merging(nn.Linear):
        """Merges its adapter in ``train(False)``, as loralib's layers do."""

        def train(self, mode: bool = True) -> Merging:
            self.weight.data += 1.0
            return super().train(mode)

    model = nn.Sequential(nn.Linear(4, 8), Merging(8, 8))
    optimizer = torch.optim.AdamW(model.parameters())
    passes = list[int]()
    model.register_forward_hook(lambda *_: passes.append(1))
    watcher = ng.watch(model, optimizer)
    for _ in range(2):
        model(torch.ones(2, 4)).sum().backward()
        optimizer.step()
    watcher.remove()
    assert watcher.num_compared == 4 and passes == [1, 1]
    weights = [p.clone() for p in model.parameters()]
    ng.check(model, optimizer, batch=torch.ones(2, 4), loss=lambda model, batch: model(batch).sum())
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    assert all(module.training for module in model.modules())


# ── ng.RunRecorder ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("overflows", [(1,), (0, 2)])
def test_a_loop_that_skips_steps_as_a_grad_scaler_does_is_healthy(
    overflows: tuple[int, ...], tmp_path: Path
) -> None:
    loop = Loop(watch=None)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    plain = loop.loss
    number = iter(range(100))
    loop.loss = lambda: scaler.scale(plain())  # type: ignore[method-assign]

    def update() -> None:
        if next(number) in overflows:
            loop.model.head.weight.grad[0, 0] = math.inf  # type: ignore[index]
        scaler.step(loop.optimizer)
        scaler.update()

    loop.update = update  # type: ignore[method-assign]
    with ng.RunRecorder(tmp_path / "run", loop.model, loop.optimizer) as recorder:
        for _ in range(8):
            loop.run(1)
            recorder.step(1.0, loss_scale=scaler.get_scale())
    run = ng.read_run(tmp_path / "run")
    assert [row["step"] for row in run.steps if row.get("skipped")] == [
        step + 1 for step in overflows
    ]
    assert sum("compared" in row for row in run.steps) == 3 and ng.diagnose(run).ok


def test_a_recorder_writes_readings_as_events_once_and_a_diagnosis_reads_them(
    tmp_path: Path,
) -> None:
    loop = Loop(watch=None)
    with (
        pytest.warns(ng.gauges.RunNotice, match="The step is 5 times that"),
        ng.RunRecorder(tmp_path / "run", loop.model, loop.optimizer) as recorder,
    ):
        for number in range(6):
            loop.optimizer.__class__ = FiveTimes if number >= 2 else torch.optim.AdamW
            loop.run(1)
            recorder.step(1.0 / (number + 1))
    assert not loop.optimizer._optimizer_step_post_hooks
    run = ng.read_run(tmp_path / "run")
    assert [event["step"] for event in run.events if event["what"] == "step-factor"] == [3]
    (reading,) = ng.diagnose(run).readings
    assert (reading.what, reading.step, reading.stage, reading.expected) == (
        "step-factor",
        3,
        "optimizer step",
        1.0,
    )
