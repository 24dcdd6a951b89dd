"""The audit of steps from outside: ``ng.RunRecorder(audit_every=…)`` and ``ng.check(…, step=…)``."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

import narrowgauge as ng
from narrowgauge.analysis.diagnosis.coverage import AREAS
from narrowgauge.analysis.monitor.detectors import DETECTORS
from narrowgauge.runs.departure_table import DEPARTURES, PIECES
from narrowgauge.runs.events import RAISED_BY
from narrowgauge.runs.finding import SEVERITIES
from recompute.audited_loop import Loop


def recorded(
    folder: Path, edit: Any = None, begin: Any = lambda loop: None, **options: Any
) -> tuple[ng.Run, torch.Tensor]:
    """A recorded loop, changed by ``begin`` before its first step and by ``edit`` after the third."""
    loop = Loop(every=0)
    begin(loop)
    with ng.RunRecorder(folder, loop.model, loop.optimizer, settings={"recipe": "mine"}, **options) as recorder:
        for number in range(6):
            if number == 3 and edit is not None:
                edit(loop)
            loop.run(1)
            recorder.step(1.0 / (number + 1))
    return ng.read_run(folder), loop.bits()


def wrong_rate(loop: Loop) -> None:
    before = loop.optimizer.param_groups[0]["params"][3]
    loop.after_backward = lambda: before.grad.mul_(1.5)  # type: ignore[method-assign]


def test_a_recorder_writes_departures_as_events_once(tmp_path: Path) -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run, _ = recorded(tmp_path / "run", wrong_rate, audit_every=2)
    found = [event for event in run.events if event.get("detector") == "gradient-scaled"]
    assert [(each["step"], each["tensor"]) for each in found] == [(4, "blocks.0.norm1.bias")], run.events
    assert any("1.5 times" in str(each.message) for each in seen)


def without_a_group(loop: Loop) -> None:
    params = [p for name, p in loop.model.named_parameters() if name != "head.weight"]
    loop.optimizer = torch.optim.AdamW(params, lr=1e-3)


@pytest.mark.filterwarnings("ignore::narrowgauge.gauges.RunNotice")
def test_what_is_found_after_a_step_is_an_event_of_that_step(tmp_path: Path) -> None:
    run, _ = recorded(tmp_path / "run", begin=without_a_group, audit_every=100)
    assert [event["step"] for event in run.events if event.get("detector") == "no-group"] == [2]
    assert [row["step"] for row in run.steps if "recomputed" in row] == [2]


def test_a_recorder_changes_no_bit_and_says_nothing_of_a_healthy_loop(tmp_path: Path) -> None:
    run, bits = recorded(tmp_path / "with", audit_every=2)
    other, own = recorded(tmp_path / "without")
    assert torch.equal(bits, own)
    assert [each["kind"] for each in run.events] == [each["kind"] for each in other.events]


def test_a_diagnosis_reads_what_the_audit_found(tmp_path: Path) -> None:
    wrong, _ = recorded(tmp_path / "wrong", wrong_rate, audit_every=2)
    found = ng.diagnose(wrong)
    assert [(each.name, each.step, each.tensor) for each in found.findings] == [
        ("gradient-scaled", 4, "blocks.0.norm1.bias")
    ], found.text()
    assert not found.is_healthy and "1.5 times" in found.verdict

    healthy, _ = recorded(tmp_path / "healthy", audit_every=2)
    assert [row["step"] for row in healthy.steps if "recomputed" in row] == [2, 4, 6]
    pieces = {"loss", "forward", "gradient", "clip", "update"}
    assert all(pieces <= set(row["recomputed"]["equal"]) for row in healthy.steps[1::2])
    again = ng.diagnose(healthy).recomputed
    assert again is not None and again.steps == (2, 4, 6) and pieces <= set(again.equal) and not again.unchecked


def shifted_twice(loop: Loop) -> None:
    """Each position predicts the token after the next."""

    def loss(tokens: torch.Tensor) -> torch.Tensor:
        logits = loop.model(tokens[:, :-1])[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 2:].flatten()) / loop.micro_batches

    loop.loss = loss  # type: ignore[method-assign]


@pytest.mark.filterwarnings("ignore::narrowgauge.integrations.SetUpWarning")
def test_the_calls_that_a_diagnosis_advises_show_shifted_labels(tmp_path: Path) -> None:
    area, loop = AREAS[-1], Loop(every=0)
    shifted_twice(loop)
    given = {"ng": ng, "model": loop.model, "optimizer": loop.optimizer}
    assert area.log == "ng.check(model, optimizer, step=2)"
    found = eval(area.log, given)
    loop.run(2)
    assert "labels-shifted" in [each.name for each in found]

    assert area.recorder == "ng.RunRecorder(…, audit_every=1000)"
    run, _ = recorded(tmp_path / "run", audit_every=1000, begin=shifted_twice)
    assert "labels-shifted" in [each.name for each in ng.diagnose(run).findings]


def test_a_recorder_leaves_no_hook(tmp_path: Path) -> None:
    loop = Loop(every=0)
    with ng.RunRecorder(tmp_path / "run", loop.model, loop.optimizer, audit_every=1):
        assert loop.model._forward_hooks
        loop.run(1)
    assert not loop.model._forward_hooks and not loop.optimizer._optimizer_step_post_hooks
    assert not any(p._post_accumulate_grad_hooks for p in loop.model.parameters())


def test_check_computes_one_step_again() -> None:
    loop = Loop(every=0)
    wrong_rate(loop)
    with ng.check(loop.model, loop.optimizer, step=2) as watched:
        loop.run(2)
    assert [(each.name, each.where) for each in watched if each.severity == "error"] == [
        ("gradient-scaled", "blocks.0.norm1.bias")
    ]
    healthy = Loop(every=0)
    with ng.check(healthy.model, healthy.optimizer, step=2) as watched:
        healthy.run(2)
    assert watched.ok and not healthy.model._forward_hooks


def test_check_declares_and_refuses() -> None:
    loop = Loop(every=0)
    with ng.check(loop.model, loop.optimizer, step=1, task=ng.task(decay_groups="matrices")) as watched:
        loop.run(1)
    assert "decay-unwanted" in [each.name for each in watched]
    with pytest.raises(ng.NarrowgaugeError, match="given 2"):
        ng.check(loop.model, [loop.optimizer, torch.optim.SGD(loop.model.head.parameters())], step=1)


def test_the_table_of_departures_is_whole() -> None:
    assert all(set(row.pieces) <= set(PIECES) and row.severity in SEVERITIES for row in DEPARTURES.values())
    assert all(row.message.endswith(".") and row.advice for row in DEPARTURES.values())
    assert {piece for row in DEPARTURES.values() for piece in row.pieces} == set(PIECES)
    assert not DEPARTURES.keys() & {*DETECTORS, *RAISED_BY}, "an event's detector tells what raised it"
