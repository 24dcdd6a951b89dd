"""The certificate of a checkpoint: a resume that restores everything is silent; else it says what
differs, causes first.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import narrowgauge as ng
from narrowgauge.measuring.hooks import RunNotice


class Loop:
    """A loop with dropout, a schedule, a scaler of losses and an order of data, which saves all of
    it.
    """

    def __init__(self, storage: str = "") -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5), nn.Linear(8, 1))
        parameters = self.model.parameters()
        self.optimizer: Any = (
            ng.AdamW(parameters, lr=1e-2, storage=storage)
            if storage
            else torch.optim.AdamW(parameters, lr=1e-2)
        )
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.1, 20)
        self.order, self.batch = torch.Generator().manual_seed(1), torch.zeros(4, 8)
        self.draw()

    def draw(self) -> None:
        self.batch = torch.randn(4, 8, generator=self.order)

    @property
    def objects(self) -> dict[str, Any]:
        return {"scheduler": self.scheduler, "generator": self.order, "batch": self.batch}

    def train(self, recorder: ng.RunRecorder, steps: int) -> None:
        for _ in range(steps):
            loss = self.model(self.batch.to(self.model[0].weight.dtype)).float().square().mean()
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            recorder.step(loss)
            self.scheduler.step()
            self.draw()

    def save(self) -> dict[str, Any]:
        parts = {
            name: getattr(self, name).state_dict() for name in ("model", "optimizer", "scheduler")
        }
        generators = {"order": self.order.get_state(), "torch": torch.get_rng_state()}
        return {**parts, **generators, "batch": self.batch.clone()}

    def load(self, saved: dict[str, Any]) -> None:
        for name in ("model", "optimizer", "scheduler"):
            getattr(self, name).load_state_dict(saved[name])
        self.order.set_state(saved["order"])
        torch.set_rng_state(saved["torch"])
        self.batch = saved["batch"].clone()


Fault = Callable[[Loop], object]


def resumed(folder: Path, fault: Fault, storage: str = "") -> list[str]:
    """Train, save to a file, load in fresh objects, strike them, and return what the recorder says
    at the resume.
    """
    file = folder / "last.pt"
    first = Loop(storage)
    again = Loop(storage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        recorder = ng.RunRecorder(folder / "run", first.model, first.optimizer)
        first.train(recorder, 3)
        torch.save(first.save(), file)
        recorder.saved(file, **first.objects)
        recorder.close(finished=False)
        recorder = ng.RunRecorder(folder / "run", again.model, again.optimizer, resume=True)
    again.load(torch.load(file))
    fault(again)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder.go_back(3, **again.objects)
        again.train(recorder, 1)
        recorder.close()
    run = ng.read_run(folder / "run")
    logged = [e["text"].rstrip(".") for e in run.events if e["what"] == "not-restored"]
    readings = [r for r in ng.diagnose(run).readings if r.what == "not-restored"]
    notices = [str(w.message).rstrip(".") for w in caught if w.category is RunNotice]
    sentences = [
        notice.removeprefix("not restored: ")
        for notice in notices
        if notice.startswith("not restored: ")
    ]
    assert logged == sentences and len(readings) == len(sentences)
    return sentences


def no_fault(loop: Loop) -> None: ...


def other_rate(loop: Loop) -> None:
    loop.optimizer.param_groups[0]["lr"] = 0.02


def other_step(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["step"].zero_()


def narrow_step(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["step"] = state["step"].bfloat16()


def lost_moments(loop: Loop) -> None:
    for state in loop.optimizer.state.values():
        state["exp_avg"].zero_()


@torch.no_grad()
def rounded_weights(loop: Loop) -> None:
    for parameter in loop.model.parameters():
        parameter.copy_(parameter.bfloat16())


def everything(loop: Loop) -> None:
    for fault in (rounded_weights, lost_moments, narrow_step, other_rate):
        fault(loop)
    loop.draw()


CASES: dict[str, tuple[Fault, list[str]]] = {
    "all restored": (no_fault, []),
    "another rate": (
        other_rate, ["optimizer.lr: 1 state, param_groups.0: 0.008649999999999998 was saved, 0.02 is there after the load"],
    ),
    "the schedule began anew": (
        lambda loop: setattr(loop.scheduler, "last_epoch", 0), ["scheduler: 1 state, last_epoch: 3 was saved, 0 is there"],
    ),
    "the count of steps began anew": (
        other_step, ["optimizer.step: 4 states, state.0: float32 of norm 3 was saved, float32 of norm 0 is there"],
    ),
    "a count of steps in another format": (
        narrow_step, ["optimizer.step: 4 states, state.0: float32 of norm 3 was saved, bfloat16 of norm 3 is there"],
    ),
    "a generator that dropout draws from": (lambda loop: torch.rand(1), ["generators: 1 state, torch: state "]),
    "another next batch": (lambda loop: setattr(loop, "batch", loop.batch + 1), ["batch: float32 of norm "]),
    "lost moments": (lost_moments, ["optimizer.exp_avg: 4 states, state.0: "]),
    "rounded weights": (rounded_weights, ["weights: 4 states, 0.weight: float32 of norm "]),
    "everything": (
        everything, ["optimizer.lr: ", "optimizer.step: ", "generator: ", "batch: ", "optimizer.exp_avg: ", "weights: "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_resume_says_what_was_not_restored_causes_first_and_nothing_else(
    case: str, tmp_path: Path
) -> None:
    fault, expected = CASES[case]
    sentences = resumed(tmp_path, fault)
    assert len(sentences) == len(expected) and all(map(str.startswith, sentences, expected)), (
        sentences
    )


def test_optimizers_of_this_package_are_certified_with_their_packed_states(tmp_path: Path) -> None:
    assert resumed(tmp_path, no_fault, "word") == []


def test_a_lost_certificate_is_said_and_a_run_without_one_is_silent(tmp_path: Path) -> None:
    def lose(loop: Loop) -> None:
        (tmp_path / "last.pt.certificate.json").unlink()

    (sentence,) = resumed(tmp_path, lose)
    assert sentence.startswith("nothing was compared")
