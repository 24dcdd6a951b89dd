"""A full disk gives the advice that fits: a run is gone on with, everything else is made again by
the same command.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

import narrowgauge
from checkpoints.test_saving import full
from narrowgauge.checkpoints import saving
from narrowgauge.runs.record import read_run
from narrowgauge.trainer import export, loop
from trainer.tiny_runs import CASES, assert_same_run, call, settings

pytestmark = pytest.mark.usefixtures("one_thread")


def hidden(*_: Any, **__: Any) -> None:
    """As safetensors says it."""
    raise SafetensorError(
        "Error while serializing: I/O error: No space left on device (os error 28)"
    )


def assert_refused(*words: str) -> None:
    refused = call(*words)
    assert (refused.exit_code, refused.stdout, refused.stderr.count("\n")) == (1, "", 1), (
        refused.exception
    )
    assert "the disk is full" in refused.stderr
    assert "give the same command again" in refused.stderr and "resume" not in refused.stderr


def test_in_the_preparation_of_data(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("narrowgauge.runs.places.sync", full)
    assert_refused("tokenize", str(place / "text"), str(tmp_path / "tokens"))
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize("fault", [full, hidden])
def test_in_an_export(
    fault: Any, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = loop.train(settings(place, tmp_path / "run", **CASES["naive"], steps=1))
    monkeypatch.setattr(export, "_write_tokenizer", fault)
    assert_refused("export", str(run), str(tmp_path / "out"))
    assert list(tmp_path.iterdir()) == [run]


def test_at_a_checkpoint_the_ones_before_stay(
    place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = settings(place, tmp_path / "run", **CASES["naive"])
    folder = loop.train(replace(config, stop_after=2))
    uninterrupted = loop.train(replace(config, out=str(tmp_path / "whole")))
    with monkeypatch.context() as patch:
        patch.setattr(saving, "_publish", full)
        refused = call("resume", str(folder))
    assert (refused.exit_code, refused.stderr.count("\n")) == (
        1,
        1,
    )
    assert "disk is full" in refused.stderr
    assert [path.name for path in (folder / "checkpoints").iterdir() if any(path.iterdir())] == [
        "step-00000002"
    ]
    loop.resume(folder)
    assert_same_run(read_run(folder), read_run(uninterrupted))


def test_in_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    narrowgauge.compare(lambda recipe, seed, log: 2.0, ["bfloat16/word"], out=tmp_path / "runs")
    monkeypatch.setattr("narrowgauge.runs.atomic_io.sync", full)
    assert_refused("report", str(tmp_path / "runs"), "--out", str(tmp_path / "page.html"))
    assert [path.name for path in tmp_path.iterdir()] == ["runs"]
