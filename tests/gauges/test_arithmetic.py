"""The measured arithmetic of this machine: it tells settings apart, and a run records it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from narrowgauge.analysis.settings import settings_diff
from narrowgauge.gauges.arithmetic import PROBES, measure_arithmetic
from narrowgauge.gauges.recording import provenance
from narrowgauge.gauges.recording.provenance import describe_process
from narrowgauge.gauges.recording.provenance import differences as changes_since
from narrowgauge.runs.record import read_run
from narrowgauge.runs.writer import RunWriter
from narrowgauge.spec.toml import load_data

CPU = torch.device("cpu")


def test_the_number_of_threads_changes_sums_of_whole_tensors_alone() -> None:
    before = torch.get_num_threads()
    machines = []
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            with torch.autocast(
                "cpu", torch.bfloat16, enabled=number == 2
            ):  # the measurement leaves it
                machines.append(measure_arithmetic(CPU))
    finally:
        torch.set_num_threads(before)
    assert list(PROBES) == list(load_data("probes", "runs"))
    single_thread, two_threads = ({"arithmetic": machine} for machine in machines)
    assert [difference.name for difference in settings_diff(single_thread, two_threads)] == [
        "sum of a tensor"
    ]
    assert [machine["settings"]["threads"] for machine in machines] == ["1", "2"]


def test_flushed_subnormals_are_seen() -> None:
    subnormal = measure_arithmetic(CPU)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals to zero")
    try:
        flushed = measure_arithmetic(CPU)
    finally:
        torch.set_flush_denormal(False)
    changes = settings_diff({"arithmetic": subnormal}, {"arithmetic": flushed})
    assert "subnormals" in [difference.name for difference in changes]


def test_a_run_records_it_and_a_resume_elsewhere_says_what_differs(tmp_path: Path) -> None:
    present = describe_process(CPU)
    RunWriter.create(tmp_path / "run", {"config": {}, **present}).close()
    table = read_run(tmp_path / "run").run["arithmetic"]
    assert table == present["arithmetic"] and table["settings"]["torch"] == torch.__version__
    started, resumed = (
        {**present, "arithmetic": {**table, "results": {**table["results"], "softmax": text}}}
        for text in ("fused", "pairwise")
    )
    assert (
        changes_since(present, present)
        == changes_since({**present, "arithmetic": "none"}, present)
        == []
    )
    assert changes_since(started, resumed) == [
        "this machine's arithmetic is not that of the run's start, in: softmax"
    ]


def test_the_recorded_chip_is_that_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"chip {device}")
    monkeypatch.setattr(provenance, "measure_arithmetic", lambda device: {})
    assert describe_process(torch.device("cuda:1"))["machine"]["device"] == "chip cuda:1"
