"""Calibration: shares that a machine was made with are found again from its times, and the intervals hold."""

from __future__ import annotations

import itertools
import json
import math
import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import ChipError, DataError
from narrowgauge.planner.inputs.clusters import cluster_of
from narrowgauge.planner.inputs.efficiency import Share, Shares, shares_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.planner.inputs.layouts import Layout
from narrowgauge.planner.inputs.model_configs import read_architecture
from narrowgauge.planner.measured.calibration import (
    HERE,
    Observation,
    calibrate,
    calibration_lines,
    deviations,
    fit_shares,
    keep,
    kept,
    processor,
    step_observation,
)
from narrowgauge.planner.measured.launches import LaunchedJob
from narrowgauge.planner.terms import Term, Terms
from narrowgauge.planner.time.step_time import step_terms
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.chips import Chip, get_chip
from narrowgauge.spec.notation import parse

SHAPES = list(
    itertools.product(
        ("llama-1m", "llama-8m", "llama-35m"), ("float32/float32", "bfloat16/word", "bfloat16/master"), (2, 8)
    )
)


def changed(shares: Shares, factors: dict[str, float]) -> Shares:
    rows = {name: shares[name].value * factor for name, factor in factors.items()}
    return shares.replaced({name: Share(value, value, value, "made up") for name, value in rows.items()})


def launches(chip: Chip, true: Shares, noise: float = 0.0, seed: int = 0) -> Iterator[LaunchedJob]:
    """Measured steps of a machine whose shares are known."""
    draw = random.Random(seed)
    for model, recipe, sequences in SHAPES:
        job = Job(read_architecture(model), parse(recipe), Layout(micro_batch=sequences), cluster_of(chip, 1), 256)
        launch = LaunchedJob(f"{model} {recipe} {sequences}", job, Terms((Term("step", "", 1.0, ""),)))
        seconds = step_observation(launch).predict(true) * math.exp(draw.gauss(0, noise))
        yield LaunchedJob(launch.name, job, Terms((Term("step", "", seconds, ""),)))


FACTORS = {"matmul.float32": 0.5, "matmul.bfloat16": 0.7, "bandwidth": 0.6, "kernel_seconds": 3.0}


def test_priors_give_way_to_a_machine_a_thousand_times_slower() -> None:
    chip = processor("AVX2", 1)
    published = shares_of(chip)
    true = changed(published, {"matmul.float32": 1e-3, "matmul.bfloat16": 1e-3, "bandwidth": 1e-3})
    seen = [step_observation(launch) for launch in launches(chip, true)]
    found = fit_shares(seen, published, deviations(published, chip), "made up")
    assert found.error < 0.05


@pytest.mark.parametrize("chip", [get_chip("L40S"), processor("AVX2", 2)], ids=["of the table", "a processor"])
def test_known_shares_predict_what_was_not_seen(chip: Chip) -> None:
    published = shares_of(chip)
    true = changed(published, FACTORS)
    seen = [step_observation(launch) for launch in launches(chip, true)]
    before = max(abs(o.log_error(published)) for o in seen)
    found = fit_shares(seen[::2], published, deviations(published, chip), "made up")
    after = max(abs(o.log_error(found.shares)) for o in seen[1::2])
    assert before > 0.3 and after < 0.03
    assert found.error < 0.03


def test_shares_that_nothing_depends_on_stay_published() -> None:
    chip = get_chip("L40S")
    published = shares_of(chip)
    seen = [step_observation(launch) for launch in launches(chip, published)]
    found = fit_shares(seen, published, deviations(published, chip), "made up")
    assert "matmul.int8" not in found.names and "link" not in found.names
    assert found.shares["matmul.int8"] == published["matmul.int8"]
    assert {"matmul.float32", "matmul.bfloat16"} <= set(found.names)


def test_one_wrong_observation_does_not_decide() -> None:
    chip = processor("AVX2", 1)
    published = shares_of(chip)
    seen = [step_observation(launch) for launch in launches(chip, changed(published, FACTORS))]
    spoilt = [Observation("spoilt", 3 * seen[4].seconds, seen[4].predict)]
    found = fit_shares([*seen[:4], *spoilt, *seen[5:]], published, deviations(published, chip), "made up")
    assert found.worst[0] == "spoilt"
    assert sorted(abs(o.log_error(found.shares)) for o in seen)[len(seen) // 2] < 0.03


def test_intervals_hold_four_times_out_of_five() -> None:
    chip = processor("AVX2", 1)
    published = shares_of(chip)
    inside = tries = 0
    for seed in range(2):
        seen = list(launches(chip, changed(published, FACTORS), 0.05, seed))
        for half in (0, 1):
            own = [step_observation(launch) for launch in seen[half::2]]
            found = fit_shares(own, published, deviations(published, chip), "made up")
            for launch in seen[1 - half :: 2]:
                assert launch.measured is not None
                terms = step_terms(replace(launch.job, shares=found.shares))
                low, high = terms.interval
                inside += low <= launch.measured.total <= high
                tries += 1
    assert inside >= 0.8 * tries


def run(folder: Path, name: str, seconds: float, machine: dict[str, Any] | None = None, **config: Any) -> Path:
    settings = {"model": "llama-1m", "recipe": "bfloat16/word", "batch_size": 8, "sequence_length": 256, **config}
    settings.setdefault("gradient_accumulation_steps", 1)
    here = machine or {"device": "cpu", "processor": "x86_64", "capability": "AVX2", "num_threads": 1}
    with RunWriter.create(folder / name, {"config": settings, "machine": here}) as writer:
        for step in range(1, 11):
            writer.step({"step": step, "seconds": seconds})
    return folder / name


def test_run_folders_calibrate_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "cache"))
    paths = [run(tmp_path, "small", 0.5), run(tmp_path, "large", 1.0, batch_size=16)]
    found = calibrate(paths)
    assert found.name == HERE and found.error < 0.05
    assert keep(found) == tmp_path / "cache" / "calibrations" / "here.json"
    again = kept()
    assert again.fitted == found.fitted and again.sources == tuple(map(str, paths))
    assert {name: again.shares[name] for name in again.fitted} == {name: found.shares[name] for name in found.fitted}
    assert again.chip == found.chip
    said = calibration_lines(again)
    assert "2 sources" in said[0] and "cannot tell" in said[-1]


def test_runs_of_a_known_chip(tmp_path: Path) -> None:
    machine = {"device": "NVIDIA L40S", "processor": "x86_64", "num_threads": 8}
    assert calibrate([run(tmp_path, "first", 0.01, machine)]).chip == get_chip("L40S")
    with pytest.raises(ChipError, match="of 'NVIDIA T1000', which is not one chip"):
        calibrate([run(tmp_path, "second", 0.01, {"device": "NVIDIA T1000"})])


def test_runs_of_two_machines_are_refused(tmp_path: Path) -> None:
    other = {"device": "cpu", "processor": "aarch64", "capability": "DEFAULT", "num_threads": 4}
    with pytest.raises(DataError, match="of several"):
        calibrate([run(tmp_path, "first", 0.5), run(tmp_path, "second", 0.5, other)])


def profile(tmp_path: Path, **changed: Any) -> Path:
    layer = {"pattern": "model.layers.*.mlp.up_proj", "out_features": 320, "in_features": 128, "count": 4}
    layer |= {"parts_seconds": {"output": 2e-3, "grad_input": 2e-3, "grad_weight": 2e-3, "output.left": 1e-4}}
    row = {
        "recipe": "float32/float32",
        "num_sequences": 8,
        "sequence_length": 256,
        "layers": [layer],
        "predicted": False,
    }
    file = tmp_path / "profile.json"
    file.write_text(json.dumps([{**row, **changed}]))
    return file


def test_profiles_calibrate_matmuls(tmp_path: Path) -> None:
    found = calibrate([profile(tmp_path)], processor("AVX2", 1))
    flops = 2 * 8 * 256 * 320 * 128
    share = found.shares.matmul("float32").value * found.chip.peak_tflops["float32"] * 1e12
    assert flops / share + found.shares["kernel_seconds"].value == pytest.approx(2e-3, rel=0.05)


def test_what_is_no_measurement_is_refused_in_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    chip = processor("AVX2", 1)
    with pytest.raises(DataError, match="is a prediction"):
        calibrate([profile(tmp_path, predicted=True)], chip)
    (tmp_path / "other.json").write_text("[{}]")
    with pytest.raises(DataError, match="it holds no profile"):
        calibrate([tmp_path / "other.json"], chip)
    with pytest.raises(DataError, match="No such file"):
        calibrate([tmp_path / "none.json"], chip)
    with pytest.raises(ChipError, match="nothing was calibrated as that"):
        kept()
    (tmp_path / "calibrations").mkdir()
    (tmp_path / "calibrations" / "here.json").write_text("{}")
    with pytest.raises(ChipError, match="is damaged"):
        kept()
