"""A recorded loop has the rows of the trainer's own run, computes the same bits as without, and can
be resumed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import narrowgauge as ng
from integrations.own_trainer import OwnRun, reference
from narrowgauge.measuring import recorder as recorder_module
from narrowgauge.measuring.hooks import RunNotice
from narrowgauge.runs.schema import METRICS

# Of the clock, or of the trainer or the recorder alone.
NOT_OF_BOTH = {
    "seconds",
    "tokens_per_second",
    "loader_seconds",
    "step_memory_bytes",
    "audit_sums",
    "kept",
}

AUDIT = list(METRICS["updates"])


class Loop:
    """A user's loop over the batches of a reference, which saves and loads what a user would."""

    def __init__(self, run: OwnRun) -> None:
        self.run = run
        self.model, self.optimizer = ng.prepare(run.model(), run.recipe, **run.prepare_settings)

    def take(self, steps: range, recorder: ng.RunRecorder | None) -> None:
        for step in steps:
            for group in self.optimizer.param_groups:
                group["lr"] = self.run.rates[step]
            loss = self.run.loss(self.model, self.run.batches[step])
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            if recorder is not None:
                recorder.step(
                    loss, tokens=self.run.settings.tokens_per_step, batch=self.run.batches[step]
                )

    def state(self) -> dict[str, Any]:
        return {
            "model": _copied(self.model.state_dict()),
            "optimizer": _copied(self.optimizer.state_dict()),
        }

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


def _copied(state: Any) -> Any:
    return torch.utils._pytree.tree_map(
        lambda leaf: leaf.clone() if isinstance(leaf, Tensor) else leaf, state
    )


def lasting(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [{name: value for name, value in row.items() if name not in NOT_OF_BOTH} for row in rows]


def recorded(run: OwnRun, folder: Path, **options: Any) -> Loop:
    loop = Loop(run)
    steps = len(run.losses)
    options |= {
        "recipe": run.recipe,
        "settings": {"model": "tiny", "seed": run.settings.seed, "steps": steps},
    }
    with ng.RunRecorder(folder, loop.model, loop.optimizer, **options) as recorder:
        loop.take(range(steps), recorder)
        recorder.evaluate(run.losses[-1])
    return loop


def test_a_recorded_loop_has_the_rows_and_the_bits_of_the_trainer(tmp_path: Path) -> None:
    run = reference()
    loop = recorded(run, tmp_path / "mine", gauges_every=2)
    record = ng.read_run(tmp_path / "mine")
    for row, expected in zip(lasting(record.steps), lasting(run.rows), strict=True):
        assert {name: row[name] for name in expected} == expected
    assert all(
        torch.equal(loop.model.state_dict()[name], tensor) for name, tensor in run.state.items()
    )
    assert [row["step"] for row in record.gauges] == [2, 4, 6] and "updates" in record.gauges[0]
    assert [event["what"] for event in record.events] == ["start", "unseen", "finish"]
    assert record.config["recipe"] == "bfloat16/word" and record.config["steps"] == 6
    assert record.summary is not None and 8 <= record.summary["bytes_per_param"] < 8.2
    assert record.summary["edq"] > 0.99 and record.summary["tokens"] == 6 * 128


def test_a_killed_loop_goes_on_from_its_checkpoint_with_the_same_record(tmp_path: Path) -> None:
    run = reference()
    uninterrupted = recorded(run, tmp_path / "whole")
    loop = Loop(run)
    options: dict[str, Any] = {"recipe": run.recipe, "settings": {"model": "tiny"}}
    recorder = ng.RunRecorder(tmp_path / "cut", loop.model, loop.optimizer, **options)
    loop.take(range(3), recorder)
    checkpoint = loop.state()
    loop.take(range(3, 5), recorder)
    recorder._writer.close()  # type: ignore[union-attr]  # the lock ends with the process
    again = Loop(run)
    again.load(checkpoint)
    with ng.RunRecorder(
        tmp_path / "cut", again.model, again.optimizer, **options, resume=True
    ) as recorder:
        with pytest.raises(ng.errors.RecordError, match="go_back"):
            recorder.step(1.0)
        recorder.go_back(3)
        again.take(range(3, 6), recorder)
        recorder.evaluate(run.losses[-1])
    reference_run, resumed_run = (ng.read_run(tmp_path / name) for name in ("whole", "cut"))
    for row, expected in zip(lasting(resumed_run.steps), lasting(reference_run.steps), strict=True):
        # The audit's own moments begin anew.
        assert {**row, **{name: expected.get(name) for name in AUDIT if name in row}} == expected
    assert reference_run.summary is not None and resumed_run.summary is not None
    for name in ("tokens", "weights_fingerprint", "val_loss", "steps"):
        assert reference_run.summary[name] == resumed_run.summary[name], name
    assert all(
        torch.equal(again.model.state_dict()[n], t)
        for n, t in uninterrupted.model.state_dict().items()
    )
    kinds = [event["what"] for event in resumed_run.events if event["what"] != "unseen"]
    assert kinds == ["start", "resume", "finish"]


def small(storage: str = "word") -> tuple[nn.Module, ng.Optimizer]:
    return ng.prepare(nn.Linear(8, 8), f"bfloat16/{storage}", lr=1e-2, max_grad_norm=1.0)


def train(
    model: nn.Module, optimizer: Any, recorder: ng.RunRecorder, steps: int, scale: float = 1.0
) -> None:
    for _ in range(steps):
        loss = (
            scale
            * model(torch.ones(4, 8, dtype=next(model.parameters()).dtype)).float().square().mean()
        )
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        recorder.step(loss)


def test_the_recipe_is_known_without_being_named_and_a_wrong_one_is_refused(tmp_path: Path) -> None:
    model, optimizer = small("split")
    ng.RunRecorder(tmp_path / "run", model, optimizer).close(finished=False)
    assert ng.read_run(tmp_path / "run").config["recipe"] == "bfloat16/split"
    with pytest.raises(ng.errors.RecipeError, match="storage is 'split'"):
        ng.RunRecorder(tmp_path / "other", model, optimizer, recipe="bfloat16/word")
    assert not (tmp_path / "other").exists()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(recorder_module, "Gauges", lambda *_, **__: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            ng.RunRecorder(tmp_path / "other", model, optimizer, gauges_every=1)
    ng.RunRecorder(tmp_path / "other", model, optimizer).close(
        finished=False
    )  # nothing was left, no lock either
    with pytest.raises(ng.errors.RecordError, match="a run is there already"):
        ng.RunRecorder(tmp_path / "run", model, optimizer)


def test_a_skipped_step_and_a_spike_are_events_and_warnings(tmp_path: Path) -> None:
    model, optimizer = small()
    with ng.RunRecorder(tmp_path / "run", model, optimizer, settings={"steps": 6}) as recorder:
        train(model, optimizer, recorder, 25)
        train(model, optimizer, recorder, 1, scale=float("inf"))
        with pytest.warns(RunNotice, match="step 27: The loss jumped to 1e"):
            optimizer.step()
            recorder.step(1e6)
        recorder.step(1.0)  # a step that torch.amp.GradScaler left out
    record = ng.read_run(tmp_path / "run")
    assert [row["skipped"] for row in record.steps] == [False] * 25 + [True, False, True]
    assert record.steps[25]["bad"] == ["bias", "weight"]
    assert [event["step"] for event in record.events if event["what"] == "loss-spike"] == [27]
    assert record.summary is not None and record.summary["num_skipped"] == 2


def test_rows_of_gauges_have_the_steps_of_the_record(tmp_path: Path) -> None:
    model = nn.Linear(8, 8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    with ng.RunRecorder(tmp_path / "run", model, optimizer, gauges_every=4) as recorder:
        train(model, optimizer, recorder, 1)
        optimizer.param_groups[0]["lr"] = None  # as in transformers' Adafactor
        recorder.step(1.0)  # the loop left the optimizer's step out
        optimizer.param_groups[0]["lr"] = 1e-2
        train(model, optimizer, recorder, 6)
        with pytest.raises(ng.errors.NarrowgaugeError, match="'step'"):
            recorder.step(1.0, step=9)
    record = ng.read_run(tmp_path / "run")
    assert [row["step"] for row in record.gauges] == [4, 8] and [
        row["step"] for row in record.steps
    ][-1] == 8
    assert [row["skipped"] for row in record.steps] == [False, True] + [
        False
    ] * 6 and "lr" not in record.steps[1]


def test_two_optimizers_have_one_record(tmp_path: Path) -> None:
    """A critic that steps twice for each step of its generator."""
    model = nn.ModuleDict({"critic": nn.Linear(4, 4), "generator": nn.Linear(4, 4)})
    critic, generator = (torch.optim.SGD(part.parameters(), lr=0.1) for part in model.values())
    generator.param_groups[0]["lr"] = 0.05
    watch = ng.watch(model, [critic, generator], record=tmp_path / "run")
    for _ in range(5):
        for name, optimizer in (("critic", critic), ("critic", critic), ("generator", generator)):
            model[name](torch.randn(2, 4)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    assert isinstance(watch, ng.RunRecorder)
    watch.close()
    run = ng.read_run(tmp_path / "run")
    assert [row["lr"] for row in run.steps] == [0.05] * 5
    assert {event.get("severity") for event in run.events} == {"note"}
    assert run.summary is not None and run.summary["weights_fingerprint"]


def test_a_watch_with_a_folder_writes_a_row_for_each_step(tmp_path: Path) -> None:
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
    watch = ng.watch(model, optimizer, record=tmp_path / "run")
    for step in range(4):
        loss = model(torch.ones(2, 4)).square().mean()
        loss.backward()
        optimizer.step()
        if step == 2:
            watch.step(loss)
        schedule.step()
        optimizer.zero_grad()
    assert isinstance(watch, ng.RunRecorder)
    watch.close()
    run = ng.read_run(tmp_path / "run")
    assert [row["lr"] for row in run.steps] == [0.5, 0.25, 0.125, 0.0625]
    assert ["loss" in row for row in run.steps] == [False, False, True, False]
