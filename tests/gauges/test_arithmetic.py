"""The measured arithmetic of this machine: it tells settings apart, and a run records it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from narrowgauge.gauges.arithmetic import PROBES, measure_arithmetic
from narrowgauge.gauges.recording.provenance import describe_process
from narrowgauge.gauges.recording.provenance import differences as changes_since
from narrowgauge.runs import arithmetic
from narrowgauge.runs.arithmetic import Arithmetic, arithmetic_of, differences
from narrowgauge.runs.record import read_settings
from narrowgauge.runs.writer import RunWriter

CPU = torch.device("cpu")


def test_the_number_of_threads_changes_sums_of_whole_tensors_alone() -> None:
    before, machines = torch.get_num_threads(), []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            machines.append(measure_arithmetic(CPU))
    finally:
        torch.set_num_threads(before)
    assert list(PROBES) == list(arithmetic.PROBES)
    differing = differences(*machines)
    assert list(differing.results) == ["sum of a tensor"] and differing.settings == {"threads": ("1", "2")}
    assert differing.origin == "sums"


def test_flushed_subnormals_are_seen() -> None:
    kept = measure_arithmetic(CPU)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals to zero")
    try:
        flushed = measure_arithmetic(CPU)
    finally:
        torch.set_flush_denormal(False)
    assert "subnormals" in differences(kept, flushed).results


def test_a_run_records_it_and_a_resume_elsewhere_says_what_differs(tmp_path: Path) -> None:
    present = describe_process(CPU)
    RunWriter.create(tmp_path / "run", {"config": {}, **present}).close()
    read = arithmetic_of(read_settings(tmp_path / "run"))
    assert read.to_toml() == present["arithmetic"] and read.settings["torch"] == torch.__version__
    other = {**present, "arithmetic": Arithmetic(read.settings, {**read.results, "softmax": "pairwise"}).to_toml()}
    started = {**present, "arithmetic": Arithmetic(read.settings, {**read.results, "softmax": "fused"}).to_toml()}
    assert changes_since(present, present) == changes_since({**present, "arithmetic": "none"}, present) == []
    assert changes_since(started, other) == ["this machine's arithmetic is not that of the run's start, in: softmax"]
