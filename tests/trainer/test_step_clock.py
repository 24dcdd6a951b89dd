"""The parts of a step: each is inside the step, and none is counted twice."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from narrowgauge.runs.record import read_run
from narrowgauge.trainer import loop, step_clock
from trainer.tiny_runs import settings

pytestmark = pytest.mark.usefixtures("one_thread")


def test_the_time_between_moments_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    moments = iter([1.0, 1.5, 3.5])
    monkeypatch.setattr(step_clock.time, "perf_counter", lambda: next(moments))
    clock = step_clock.StepClock(torch.device("cpu"))
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


def test_on_a_device_moments_are_events_that_are_read_in_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            said.append("record")

        def synchronize(self) -> None:
            said.append("wait")

        def elapsed_time(self, other: Event) -> float:
            return 250.0

    monkeypatch.setattr(step_clock.torch.cuda, "Event", Event)
    clock = step_clock.StepClock(torch.device("cuda"))
    clock.mark()
    clock.mark()
    assert said == ["record", "record"] and clock.seconds() == [0.25] and said[2:] == ["wait"]
