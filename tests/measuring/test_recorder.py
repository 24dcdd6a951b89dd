"""A recorded loop has a row a step, can be resumed, and refuses what no record can hold."""

import math
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from narrowgauge.measuring.watch import recorder as recorder_module
from narrowgauge.measuring.watch.hooks import RunNotice
from ranks import run_ranks
from tensors import gaussian
from text.refusals import refused

LASTING = ("step", "loss", "lr", "grad_norm", "skipped", "tokens", "arrived")
"""Columns that a resume does not change."""


def begin(
    folder: Path, model: nn.Module | None = None, storage: str = "word", **options: Any
) -> ng.RunRecorder:
    """Record a model with torch's AdamW, or else a small one with ours."""
    if model is not None:
        return ng.RunRecorder(
            folder, model, torch.optim.AdamW(model.parameters(), lr=1e-2), **options
        )
    torch.manual_seed(0)
    settings = {"lr": 1e-2, "max_grad_norm": 1.0, "audit_every": 2}
    ours = ng.prepare(nn.Linear(8, 8), f"bfloat16/{storage}", **settings)
    return ng.RunRecorder(folder, *ours, **options)


def train(recorder: ng.RunRecorder, steps: range, scale: float = 1.0) -> None:
    dtype = next(recorder.model.parameters()).dtype
    for step in steps:
        batch = gaussian(4, 8, seed=step)
        loss = scale * recorder.model(batch.to(dtype)).float().square().mean()
        loss.backward()
        recorder.optimizer.step()
        recorder.optimizer.zero_grad()
        recorder.step(loss, tokens=4)


def lasting(run: Any) -> list[list[Any]]:
    return [[row.get(name) for name in LASTING] for row in run.steps]


def unseen_of(run: Any) -> set[str]:
    return {event["tensor"] for event in run.events if event["what"] == "unseen"}


def test_a_killed_loop_goes_on_from_its_checkpoint_with_the_same_record(tmp_path):
    with begin(tmp_path / "whole") as recorder:
        train(recorder, range(6))
        recorder.evaluate(2.5)
    killed = begin(tmp_path / "cut", fingerprints_every=3)
    train(killed, range(3))
    torch.save([killed.model.state_dict(), killed.optimizer.state_dict()], tmp_path / "checkpoint")
    train(killed, range(3, 5))
    killed._record.close()  # the lock ends with the process
    with begin(tmp_path / "cut", resume=True, fingerprints_every=3) as recorder:
        states = torch.load(tmp_path / "checkpoint")
        recorder.model.load_state_dict(states[0])
        recorder.optimizer.load_state_dict(states[1])
        with refused("a resumed record"):
            recorder.step(1.0)
        recorder.go_back(3)
        train(recorder, range(3, 6))
        recorder.evaluate(2.5)
    whole, cut = (ng.read_run(tmp_path / name) for name in ("whole", "cut"))
    assert lasting(whole) == lasting(cut) and whole.steps[-1]["tokens"] == 24
    assert whole.summary is not None and cut.summary is not None
    for name in ("tokens", "weights_fingerprint", "val_loss", "steps", "bytes_per_param"):
        assert whole.summary[name] == cut.summary[name], name
    assert whole.summary["edq"] > 0.99 and cut.config["recipe"] == "bfloat16/word"
    kinds = [event["what"] for event in cut.events if event["what"] != "unseen"]
    assert kinds == ["start", "resume", "finish"]
    assert ng.diagnose(cut).ok
    with begin(tmp_path / "cut", resume=True, fingerprints_every=3) as recorder:
        recorder.go_back(3)
        recorder.model.load_state_dict(states[0])  # later than it is told is as well
        recorder.optimizer.load_state_dict(states[1])
        train(recorder, range(3, 6))
    assert ng.diagnose(tmp_path / "cut").ok
    with begin(tmp_path / "cut", resume=True, fingerprints_every=3) as recorder:
        recorder.go_back(3)  # with new states
        train(recorder, range(3, 4))
    [reading] = ng.diagnose(tmp_path / "cut").readings
    assert (reading.what, reading.step, reading.value) == ("not-restored", 3, 4)


def test_a_skipped_step_and_a_spike_are_rows_and_warnings(tmp_path):
    with begin(tmp_path / "run") as recorder:
        train(recorder, range(25))
        train(recorder, range(1), scale=math.inf)
        with pytest.warns(RunNotice, match="step 27: The loss.* jumped to 1e"):
            recorder.optimizer.step()
            recorder.step(1e6)
        recorder.step(1.0, loss_scale=2.0)  # a step that torch.amp.GradScaler left out
    run = ng.read_run(tmp_path / "run")
    assert [row["skipped"] for row in run.steps] == [False] * 25 + [True, False, True]
    assert run.steps[25]["bad"] == ["bias", "weight"]
    assert [event["step"] for event in run.events if event["what"] == "spike"] == [27]
    assert run.summary is not None and run.summary["num_skipped"] == 2


@pytest.mark.parametrize(
    "columns",
    [
        {"batch": torch.ones(4, dtype=torch.int64)},
        {"names": ["a", "b"]},
        {"text": "x" * 201},
        {"loss": torch.ones(3)},
        {"tokens": -5},
        {"tokens": 2.5},
    ],
)
def test_a_column_of_a_user_is_a_number_or_a_short_text(columns, tmp_path):
    with begin(tmp_path / "run") as recorder:
        with refused("no value of a column", name=next(iter(columns))):
            recorder.step(**{"loss": 1.0, **columns})
        recorder.step(torch.tensor(2.0), mine=torch.tensor([3]).sum(), note="ä" * 100)
    (row,) = ng.read_run(tmp_path / "run").steps
    assert (row["loss"], row["mine"], row["note"]) == (2.0, 3, "ä" * 100)


def test_a_record_goes_back_to_one_of_its_steps(tmp_path):
    with begin(tmp_path / "run", resume=True) as recorder:
        recorder.go_back(3)  # from a checkpoint of another run
        train(recorder, range(2))
        with refused("a step below 0"):
            recorder.go_back(-1)
        recorder.go_back(4)
        with pytest.warns(RunNotice, match="steps 5 to 6 have no rows"):
            recorder.go_back(6)
        train(recorder, range(1))
    assert [row["step"] for row in ng.read_run(tmp_path / "run").steps] == [4, 7]
    rows = []
    with begin(None, on_row=lambda kind, row: rows.append(row)) as watch:
        for step in (30, 3):  # what is not finite is told of each
            watch.go_back(step, tokens=12)
            with pytest.warns(RunNotice, match="not finite"):
                watch.step(math.nan, loss_scale=64.0, tokens=4)
    assert [(row["step"], row["tokens"]) for row in rows if "tokens" in row] == [(31, 16), (4, 16)]
    assert not any(row.get("what") == "not-restored" for row in rows), "of the loss scale"


def test_a_step_that_the_loop_left_out_has_a_row(tmp_path):
    with begin(tmp_path / "run", nn.Linear(8, 8)) as recorder:
        train(recorder, range(1))
        (group,) = recorder.optimizer.param_groups
        group["lr"] = None  # as in transformers' Adafactor
        recorder.step(1.0)  # the loop left the optimizer's step out
        group["lr"] = 1e-2
        train(recorder, range(6))
    run = ng.read_run(tmp_path / "run")
    assert [row["step"] for row in run.steps] == [*range(1, 9)] and "lr" not in run.steps[1]


def test_two_optimizers_have_one_record(tmp_path):
    """A critic that steps twice for each step of its generator; a schedule steps before the row."""
    model = nn.ModuleDict({"critic": nn.Linear(4, 4), "generator": nn.Linear(4, 4)})
    critic, generator = (torch.optim.SGD(part.parameters(), lr=0.5) for part in model.values())
    schedule = torch.optim.lr_scheduler.ExponentialLR(generator, 0.5)
    watch = ng.watch(model, [critic, generator], record=tmp_path / "run")
    for step in range(4):
        for name, optimizer in (("critic", critic), ("critic", critic), ("generator", generator)):
            loss = model[name](torch.randn(2, 4)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()
        if step == 2:
            watch.step(loss)
    assert isinstance(watch, ng.RunRecorder)
    watch.close()
    run = ng.read_run(tmp_path / "run")
    assert [row["lr"] for row in run.steps] == [0.5] * 4, "the largest rate of all groups"
    assert ["loss" in row for row in run.steps] == [False, False, True, False]
    assert {event.get("severity") for event in run.events} == {"note"}
    assert "casts of layers" not in unseen_of(run)
    assert run.summary is not None and run.summary["weights_fingerprint"]


@pytest.mark.parametrize("has_block", [True, False])
def test_a_loop_that_gives_up_is_not_finished(has_block, tmp_path):
    """Neither in a block, which closes the record, nor without one, where nothing happens at exit."""
    recorder = begin(tmp_path / "run", settings={"steps": 3})
    with pytest.raises(SystemExit), recorder if has_block else nullcontext():
        train(recorder, range(2))
        sys.exit(1)
    run = ng.read_run(tmp_path / "run")
    assert run.summary is None and not ng.diagnose(run).is_finished
    assert ("stop" in [event["what"] for event in run.events]) is has_block


# ── the door ──────────────────────────────────────────────────────────────────────────────────────


def test_the_recipe_is_read_and_a_recorder_that_fails_leaves_nothing(tmp_path):
    recorder = begin(tmp_path / "run", storage="split")
    recorder.close(finished=False)
    assert ng.read_run(tmp_path / "run").config["recipe"] == "bfloat16/split"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "Fingerprints", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            begin(tmp_path / "other", recorder.model)
    assert not (tmp_path / "other").exists() and not recorder.model._forward_hooks
    with refused("a folder that is there", name="run.toml"):
        begin(tmp_path / "run")


def test_a_closed_record_refuses_and_stays(tmp_path):
    recorder = begin(tmp_path / "run")
    recorder.step(3.0)
    recorder.close()
    before = {path: path.read_bytes() for path in (tmp_path / "run").iterdir()}
    calls = (recorder.step, recorder.evaluate, lambda loss: recorder.event("note", "late"))
    for call in calls:
        with refused("a closed record"):
            call(2.5)
    assert {path: path.read_bytes() for path in (tmp_path / "run").iterdir()} == before


def loops(rank: int, place: Path) -> list[Any]:
    """Train a sharded model, with and without an evaluation at the end; what rank 0 wrote."""
    runs = []
    mesh = init_device_mesh("cpu", (2,))
    for has_evaluation in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)).bfloat16()
        for module in (model[0], model):
            fully_shard(module, mesh=mesh)
        optimizer = ng.AdamW(model.parameters(), lr=1e-3)
        folder = place / f"run-{has_evaluation}"
        with ng.RunRecorder(folder, model, optimizer) as recorder:
            train(recorder, range(3))
            if has_evaluation:
                with torch.no_grad():
                    recorder.evaluate(model(torch.ones(4, 8).bfloat16()).float().mean())
        runs.append(ng.read_run(folder))
    return runs


def test_sharded_weights_have_one_fingerprint_and_what_is_not_followed_is_said(
    tmp_path,
):
    first, second = run_ranks(loops, 2, tmp_path / "ranks", tmp_path)[0]
    assert first.summary["weights_fingerprint"] == second.summary["weights_fingerprint"]
    assert [row["step"] for row in first.steps] == [1, 2, 3]
    assert {"norms and weights over ranks", "gradients that were not cleared"} <= unseen_of(first)
