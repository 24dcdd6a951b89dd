"""The measured arithmetic of this machine: what parts it from itself under other settings, and how a run records it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from narrowgauge.errors import RecordError
from narrowgauge.gauges.probes import measured_arithmetic
from narrowgauge.gauges.probes.measured_arithmetic import arithmetic_of_run, settings_in_force
from narrowgauge.gauges.probes.roundings import FUNCTIONS, ROUNDINGS, across_exponents, max_error, measure_subnormals
from narrowgauge.gauges.probes.summation_order import SUMS, Sum, measure_sum
from narrowgauge.gauges.recording.provenance import describe_process
from narrowgauge.gauges.recording.provenance import differences as changes_since
from narrowgauge.machine import processor
from narrowgauge.runs.arithmetic import PROBES, Arithmetic, differences, read_arithmetic
from narrowgauge.runs.writer import RunWriter

CPU = torch.device("cpu")


@pytest.fixture
def fresh(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Nothing is known of this machine."""
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    monkeypatch.setattr(measured_arithmetic, "_seen", {})
    return tmp_path


@pytest.fixture
def one_thread() -> object:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


MEASURE = """
import json, torch
from narrowgauge.gauges.probes.measured_arithmetic import arithmetic_of_run
print(json.dumps(arithmetic_of_run(torch.device("cpu"), budget_seconds=600.0).to_toml()))
"""


def elsewhere(**variables: str) -> subprocess.Popen[str]:
    """Measure in a process with other settings."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **variables}
    return subprocess.Popen([sys.executable, "-c", MEASURE], env=environment, stdout=subprocess.PIPE, text=True)


def test_every_row_of_the_table_is_measured_under_its_name() -> None:
    measured = {*ROUNDINGS, *(f"function {name}" for name in FUNCTIONS), *SUMS, "sums by threads"}
    assert measured == set(PROBES) and all(
        probe.affects and probe.settings and probe.source for probe in PROBES.values()
    )


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"),
    reason="ATEN_CPU_CAPABILITY and ONEDNN_MAX_CPU_ISA choose among the vector instructions of x86 processors",
)
@pytest.mark.usefixtures("fresh", "one_thread")
def test_limited_instruction_sets_are_told_by_what_they_change() -> None:
    """PyTorch's own vector code follows the one variable, oneDNN the other, MKL's matmuls neither."""
    processes = {
        variable: elsewhere(**{variable: value})
        for variable, value in (("ATEN_CPU_CAPABILITY", "default"), ("ONEDNN_MAX_CPU_ISA", "SSE41"))
    }
    here = arithmetic_of_run(CPU, budget_seconds=600.0)
    for variable, process in processes.items():
        found = differences(here, Arithmetic.from_toml(json.loads(process.communicate(timeout=300)[0]), variable))
        assert found and all(variable in {name for name, *_ in difference.settings} for difference in found), found
        names = {difference.probe.name for difference in found}
        assert not names & {"small linear float32", "weight gradient float32", "function sqrt"}
        expected = {"softmax", "function silu"} if variable == "ATEN_CPU_CAPABILITY" else {"function gelu"}
        assert expected <= names


@pytest.mark.usefixtures("one_thread")
def test_the_number_of_threads_changes_sums_of_whole_tensors_alone() -> None:
    found = []
    for number in (1, 2):
        torch.set_num_threads(number)
        results = {name: measure_sum(name, CPU) for name in ("sum of a tensor", "sum of rows", "small linear float32")}
        found.append(Arithmetic(settings_in_force(CPU), results))
    parted = differences(*found)
    assert [(difference.probe.name, difference.settings) for difference in parted] == [
        ("sum of a tensor", (("threads", "1", "2"),))
    ]


def test_flushed_subnormals_are_seen() -> None:
    assert measure_subnormals(CPU) == "results kept, operands kept"
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals to zero")
    try:
        assert "flushed" in measure_subnormals(CPU) and settings_in_force(CPU)["subnormals set"] == "flushed"
    finally:
        torch.set_flush_denormal(False)


def test_a_run_measures_within_its_budget_and_reads_what_is_known(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    random = torch.get_rng_state()
    assert arithmetic_of_run(CPU, budget_seconds=0.0).results == {} and not list(fresh.rglob("*.json"))
    found = arithmetic_of_run(CPU, budget_seconds=600.0)
    assert set(found.results) == {name for name, probe in PROBES.items() if probe.in_runs}
    assert torch.equal(random, torch.get_rng_state())
    # A new process has the file alone.
    monkeypatch.setattr(measured_arithmetic, "_seen", {})
    monkeypatch.setattr(measured_arithmetic, "_MEASUREMENTS", {})
    assert arithmetic_of_run(CPU) == found
    # A damaged file is measured anew.
    next(fresh.rglob("*.json")).write_text("{")
    monkeypatch.setattr(measured_arithmetic, "_seen", {})
    assert arithmetic_of_run(CPU, budget_seconds=0.0).results == {}


def test_a_probe_that_takes_too_long_or_fails_does_not_end_a_run(fresh: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(device: torch.device, until: float) -> str:
        raise RuntimeError("not implemented for 'Half'\nat line 3")

    with pytest.raises(TimeoutError):
        measure_sum("sum of rows", CPU, until=0.0)
    monkeypatch.setattr(measured_arithmetic, "_MEASUREMENTS", dict.fromkeys(PROBES, refused))
    found = arithmetic_of_run(CPU)
    assert set(found.results.values()) == {"unavailable: not implemented for 'Half'"}
    assert differences(found, Arithmetic({}, {"softmax": "pairwise"})) == []


def test_a_run_records_it_and_a_resume_elsewhere_says_what_differs(tmp_path: Path) -> None:
    present = describe_process(CPU)
    RunWriter.create(tmp_path / "run", {"config": {}, **present}).close()
    read = read_arithmetic(tmp_path / "run")
    assert read.to_toml() == present["arithmetic"] and read.settings["torch"] == torch.__version__
    other = {**present, "arithmetic": Arithmetic(read.settings, {**read.results, "softmax": "pairwise"}).to_toml()}
    started = {**present, "arithmetic": Arithmetic(read.settings, {**read.results, "softmax": "fused"}).to_toml()}
    assert changes_since(present, present) == changes_since({**present, "arithmetic": "none"}, present) == []
    assert changes_since(started, other) == ["this machine's arithmetic is not that of the run's start, in: softmax"]


def test_a_run_records_which_formats_its_machine_multiplies() -> None:
    found = {}
    for sets in (("avx2",), ("avx2", "avx512_bf16")):
        with processor.pretending(*sets):
            found[sets[-1]] = describe_process(CPU)["machine"]["multiplies"]
    assert found == {"avx2": ["float64", "float32"], "avx512_bf16": ["float64", "float32", "bfloat16"]}


def test_errors_are_counted_in_units_in_the_last_place() -> None:
    exact = torch.tensor([1.0, 1.75, 3.0], dtype=torch.float64)
    assert max_error((exact + torch.tensor([0.0, 2.0**-23, 0.0])).float(), exact) == 1.0
    assert max_error(exact.float(), exact) == 0.0


def test_a_sum_without_a_tree_is_told_by_its_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    def scaled(rows: torch.Tensor) -> torch.Tensor:
        return (rows / 3).sum(-1)

    monkeypatch.setitem(SUMS, "softmax", Sum(scaled, 8, tuple(range(8)), 4))
    assert measure_sum("softmax", CPU).startswith("no tree of additions, bits #")


def test_a_file_that_holds_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "empty.toml").write_text("[config]\n")
    with pytest.raises(RecordError, match="no measured arithmetic"):
        read_arithmetic(tmp_path / "empty.toml")


def test_operands_have_every_exponent_up_to_the_end_equally_often() -> None:
    """An older record holds what the same operands gave: others would look like another machine."""
    _, exponents = torch.frexp(across_exponents(-3, 5, 64))
    assert torch.bincount(exponents - 1 + 3).tolist() == [8] * 8
