"""The tries of ``./dev bench faults``: all kinds come in turn, a few of them hold here, and what does not hold is told."""

from __future__ import annotations

import importlib.util
import json
import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmark_modules import BENCHMARKS, benchmark_module
from narrowgauge.runs.record import read_run
from narrowgauge.runs.writer import RunWriter
from trainer.tiny_runs import ENVIRONMENT


@pytest.fixture(scope="module")
def tries() -> Any:
    return benchmark_module("tries")


def test_some_of_them_in_processes_of_their_own(tmp_path: Path) -> None:
    command = [sys.executable, str(BENCHMARKS / "faults.py"), "--tries", "2", "--kills", "3", "--runs", "0"]
    done = subprocess.run(
        [*command, "--json", str(tmp_path / "told.json")], capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows, jobs = json.loads((tmp_path / "told.json").read_text())["tables"].values()
    assert sum(row["tries"] for row in rows) == 2 and sum(row["broken"] for row in rows) == 0
    assert sum(row["jobs"] for row in jobs) >= 3
    assert not any(row[what] for row in jobs for what in ("lost", "wrong", "left"))


def test_twenty_in_a_row_are_of_every_kind(tries: Any) -> None:
    assert {tries.kind_of(number) for number in range(20)} == set(tries.TRIES)
    assert tries.kind_of(1003) == tries.kind_of(3)


def test_another_run_and_a_traceback_are_told(tries: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, loss in (("whole", 2.0), ("same", 2.0), ("other", 2.5)):
        with RunWriter.create(tmp_path / name, {"config": {"seed": 0}}) as writer:
            writer.step({"step": 1, "loss": loss, "seconds": random.random()})
            writer.summary({"steps": 1, "val_loss": 2.0})
    place = tries.Place(tmp_path, read_run(tmp_path / "whole"), tmp_path, 0)
    tries.require_same(place, tmp_path / "same")
    with pytest.raises(tries.Broken, match="is another run"):
        tries.require_same(place, tmp_path / "other")

    def other(place: Any, draw: random.Random, at: Path) -> str:
        tries.require_same(place, tmp_path / "other")
        return "same run"

    kind = tries.kind_of(5)
    monkeypatch.setitem(tries.TRIES, kind, (other, 1))
    monkeypatch.setattr(tries, "kind_of", lambda number: kind)
    assert tries.attempt(place, 5, tmp_path / "try")[:2] == (kind, "BROKEN")
    assert not (tmp_path / "try").exists()


@pytest.fixture
def rank_tries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    return importlib.import_module("rank_tries")


def test_a_lost_checkpoint_and_a_wrong_bit_are_told(rank_tries: Any, tmp_path: Path) -> None:
    expected = rank_tries.undisturbed()
    saver = rank_tries.Saver(tmp_path)
    saver.save(4, expected[4], {})
    saver.close()
    assert rank_tries.newest(tmp_path, expected, 4) == 4
    with pytest.raises(rank_tries.Broken, match="lost: the newest checkpoint is of step 4"):
        rank_tries.newest(tmp_path, expected, 6)
    expected[4]["model.gain"].view(torch.int16)[3] ^= 1
    with pytest.raises(rank_tries.Broken, match="wrong: the checkpoint of step 4 has other bits"):
        rank_tries.newest(tmp_path, expected, 4)
    assert rank_tries.damage_newest(random.Random(0), tmp_path) == ("", 0)  # the only one is not damaged
