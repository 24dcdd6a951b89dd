"""What a run does about steps that go wrong: each fault is injected once, at a known step and
place.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from narrowgauge.runs.record import Run, read_run
from narrowgauge.trainer import language_model, loop
from narrowgauge.trainer.session import Session
from trainer.tiny_runs import settings

pytestmark = pytest.mark.usefixtures("one_thread")

QUIET = {"log_every": 100, "eval_every": 0, "eval_sequences": 4, "audit_every": 0}
SPIKE_STEP = 27


def spoil(
    monkeypatch: pytest.MonkeyPatch,
    batches: set[int],
    change: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Change the loss of some batches of the data, by their place in it."""
    true_loss = language_model.loss_sum
    true_batch = Session.batch
    is_bad = [False]

    def loss_sum(model: Any, tokens: torch.Tensor) -> torch.Tensor:
        loss = true_loss(model, tokens)
        return change(loss) if is_bad[0] and torch.is_grad_enabled() else loss

    def batch(self: Session) -> list[torch.Tensor]:
        is_bad[0] = self.step in batches
        return true_batch(self)

    monkeypatch.setattr(language_model, "loss_sum", loss_sum)
    monkeypatch.setattr(Session, "batch", batch)


def run_with(place: Path, folder: Path, **changes: Any) -> Run:
    """A run of 34 steps; the detectors know enough after 20."""
    return read_run(
        loop.train(
            settings(place, folder, **{**QUIET, "steps": 34, "checkpoint_every": 10, **changes})
        )
    )


def kinds(run: Run, *names: str) -> list[tuple[str, int]]:
    return [(e["what"], e["step"]) for e in run.events if e["what"] in names]


def test_a_spike_is_reported_at_its_step(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(monkeypatch, {SPIKE_STEP - 1}, lambda loss: loss * 20)
    reported = run_with(place, tmp_path / "reported")
    assert kinds(reported, "loss-spike", "skip") == [("loss-spike", SPIKE_STEP)]
    assert not any(row["skipped"] for row in reported.steps)
    assert "loss spike: " in capsys.readouterr().out


def test_a_nan_is_skipped_and_named(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, {4}, lambda loss: loss * math.nan)
    run = run_with(place, tmp_path / "run", steps=8)
    (skip,) = [event for event in run.events if event["what"] == "skip"]
    assert skip["step"] == 5 and "gradients are not finite in 'model." in skip["text"]
    assert kinds(run, "nonfinite") == [("nonfinite", 5)]
    assert [r["step"] for r in run.steps if r["skipped"]] == [5]


def test_a_run_that_goes_nowhere_is_said_to(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(monkeypatch, set(range(3, 99)), lambda loss: loss * math.nan)
    run = run_with(place, tmp_path / "run", gauges_every=0)
    assert kinds(run, "divergence") == [("divergence", 28)]
