"""The parts of a step: each is inside the step, and none is counted twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from narrowgauge.runs.record import read_run
from narrowgauge.trainer import loop
from narrowgauge.trainer import step as steps
from trainer.tiny_runs import settings

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_time_between_moments_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr(steps.time, "perf_counter", lambda: next(moments))
    clock = steps.StepClock(torch.device("cpu"))
    for _ in range(3):
        clock.mark()
    assert clock.seconds() == [0.5, 2.0]


def test_the_parts_of_every_step_are_inside_it(place: Path, tmp_path: Path) -> None:
    folder = loop.train(settings(place, tmp_path / "run", gradient_accumulation_steps=2))
    run = read_run(folder)
    for row in run.steps:
        parts = [row[name] for name in ("data_seconds", "gradient_seconds", "update_seconds")]
        assert min(parts) > 0 and sum(parts) <= row["seconds"], row
    assert run.evals and all(row["evaluation_seconds"] > 0 for row in run.evals)
    assert json.loads((folder / "summary.json").read_text())["steps"] == len(run.steps)
