"""The measured arithmetic of this machine: what parts it from itself under other settings, and how a run records it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from narrowgauge.gauges.probes.measured_arithmetic import settings_in_force
from narrowgauge.gauges.probes.roundings import measure_subnormals, measure_sum
from narrowgauge.gauges.recording.provenance import describe_process
from narrowgauge.gauges.recording.provenance import differences as changes_since
from narrowgauge.runs.arithmetic import Arithmetic, differences, read_arithmetic
from narrowgauge.runs.writer import RunWriter

CPU = torch.device("cpu")


@pytest.fixture
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_the_number_of_threads_changes_sums_of_whole_tensors_alone() -> None:
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        results = {name: measure_sum(name, CPU) for name in ("sum of a tensor", "sum of rows", "small linear float32")}
        found.append(Arithmetic(settings_in_force(CPU), results))
    parted = differences(*found)
    assert list(parted.results) == ["sum of a tensor"] and parted.settings == {"threads": ("1", "2")}
    assert parted.origin == "sums"


def test_flushed_subnormals_are_seen() -> None:
    assert measure_subnormals(CPU) == "results kept, operands kept"
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals to zero")
    try:
        assert "flushed" in measure_subnormals(CPU) and settings_in_force(CPU)["subnormals set"] == "flushed"
    finally:
        torch.set_flush_denormal(False)


def test_a_run_records_it_and_a_resume_elsewhere_says_what_differs(tmp_path: Path) -> None:
    present = describe_process(CPU)
    RunWriter.create(tmp_path / "run", {"config": {}, **present}).close()
    read = read_arithmetic(tmp_path / "run")
    assert read.to_toml() == present["arithmetic"] and read.settings["torch"] == torch.__version__
    other = {**present, "arithmetic": Arithmetic(read.settings, {**read.results, "softmax": "pairwise"}).to_toml()}
    started = {**present, "arithmetic": Arithmetic(read.settings, {**read.results, "softmax": "fused"}).to_toml()}
    assert changes_since(present, present) == changes_since({**present, "arithmetic": "none"}, present) == []
    assert changes_since(started, other) == ["this machine's arithmetic is not that of the run's start, in: softmax"]
