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

import narrowgauge as ng
from measuring.test_resume import loop
from narrowgauge.measuring.hooks import RunNotice

Objects = dict[str, Any]
Fault = Callable[[Objects], object]


def resumed(folder: Path, fault: Fault) -> list[str]:
    """Train, save to a file, load in fresh objects, strike them, and return what the recorder says
    at the resume.
    """
    file = folder / "last.pt"

    def recorder_of(objects: Objects, **options: Any) -> Any:
        return ng.RunRecorder(folder / "run", objects["model"], objects["optimizer"], **options)

    def others_of(objects: Objects) -> Objects:
        return {name: objects[name] for name in ("schedule", "scaler", "position")}

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        objects, step, save = loop()
        recorder = recorder_of(objects)
        for _ in range(3):
            step()
            recorder.step()
        torch.save(save(), file)
        recorder.saved(file, **others_of(objects))
        recorder.close(finished=False)
        fresh, fresh_step, _ = loop("", torch.load(file))
        recorder = recorder_of(fresh, resume=True)
    fault(fresh)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        recorder.go_back(3, **others_of(fresh))
        fresh_step()
        recorder.step()
        recorder.close()
    run = ng.read_run(folder / "run")
    logged = [e["text"].rstrip(".") for e in run.events if e["what"] == "not-restored"]
    notices = [str(w.message).rstrip(".") for w in caught if w.category is RunNotice]
    told = [x.removeprefix("not restored: ") for x in notices if x.startswith("not restored: ")]
    readings = [r for r in ng.diagnose(run).readings if r.what == "not-restored"]
    assert logged == told and len(readings) == len(told)
    return told


def no_fault(objects: Objects) -> None: ...


@torch.no_grad()
def everything(objects: Objects) -> None:
    for parameter, state in objects["optimizer"].state.items():
        parameter.copy_(parameter.bfloat16())
        state["exp_avg"].zero_()
        state["step"] = state["step"].bfloat16()
    objects["optimizer"].param_groups[0]["lr"] = 0.02
    objects["position"] = 0


CASES: dict[str, tuple[Fault, list[str]]] = {
    "all restored": (no_fault, []),
    "everything": (
        everything,
        ["optimizer.lr: 1 state, param_groups.0: 0.00729", "optimizer.step: 4 states, state.0: float32 of norm 3 #",
         "position: 3 was saved, 0 is there", "optimizer.exp_avg: 4 states, state.0: ",
         "weights: 4 states, 0.weight: float32 of norm "],
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_a_resume_says_what_was_not_restored_causes_first_and_nothing_else(
    case: str, tmp_path: Path
) -> None:
    fault, expected = CASES[case]
    sentences = resumed(tmp_path, fault)
    assert len(sentences) == len(expected), sentences
    for sentence, beginning in zip(sentences, expected, strict=True):
        assert sentence.startswith(beginning), sentences


def test_a_lost_certificate_is_said(tmp_path: Path) -> None:
    def lose(objects: Objects) -> None:
        (tmp_path / "last.pt.certificate.json").unlink()

    (sentence,) = resumed(tmp_path, lose)
    assert sentence.startswith("nothing was compared")
