"""What ``narrowgauge show environment`` prints for an issue: complete, private, and without PyTorch unless requested."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import numpy
import pytest
import torch
from click.testing import CliRunner

import narrowgauge
from narrowgauge import _torch
from narrowgauge.cli import environment
from narrowgauge.cli.main import main
from narrowgauge.machine.processor import pretending


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """The files of a machine with two GPUs."""
    files = {
        "cpuinfo": "processor\t: 0\nvendor_id\t: GenuineIntel\nmodel name\t: Intel(R) Xeon(R) Platinum 8481C\nprocessor\t: 1\n",
        "meminfo": "MemTotal:       131072000 kB\nMemFree: 12 kB\n",
        "driver/nvidia/version": "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.124.06  Wed Feb 26\nGCC version: gcc 12\n",
        "driver/nvidia/gpus/0000:01:00.0/information": "Model: \t\t NVIDIA H200\nIRQ:   12\n",
        "driver/nvidia/gpus/0000:02:00.0/information": "Model: \t\t NVIDIA GTX 1080\n",
    }
    for name, text in files.items():
        file = tmp_path / "proc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return tmp_path


def lines_of(text: str) -> dict[str, str]:
    return {name.strip(): value for name, _, value in (line.partition("  ") for line in text.splitlines())}


def test_a_machine_is_read_from_its_files(machine: Path) -> None:
    found = environment.collect(machine)
    assert found["processor"] == "Intel(R) Xeon(R) Platinum 8481C"
    assert found["memory_bytes"] == 131072000 * 1024
    assert found["gpu_driver"] == "570.124.06"
    assert found["gpus"] == [
        {"name": "NVIDIA H200", "chip": "H200-SXM-141GB"},
        {"name": "NVIDIA GTX 1080", "chip": None},
    ]
    lines = lines_of(environment.describe(found))
    assert lines["GPUs"].strip() == "NVIDIA H200 (H200-SXM-141GB); NVIDIA GTX 1080 (not in narrowgauge show chips)"
    assert "125.0 GiB of memory" in lines["processor"] and "570.124.06" in lines["GPU driver"]


def test_a_machine_without_any_information_is_described(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path / "none"))
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setattr(environment, "PACKAGES", ("no-such-package",))
    lines = lines_of(environment.describe(environment.collect(tmp_path)))
    assert lines["no-such-package"].strip() == "not installed"
    assert lines["GPUs"].strip() == "none found" and "GPU driver" not in lines
    assert "an unknown amount of memory" in lines["processor"]
    assert "run uncompiled" in lines["compiler"] and "0 kernels, 0.0 MB" in lines["kernel cache"]


@pytest.mark.parametrize(
    ("name", "chip"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-SXM4-80GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA H100", None),  # of which there are two
        ("NVIDIA", None),
    ],
)
def test_a_driver_name_is_recognised(name: str, chip: str | None) -> None:
    assert environment._chip(name) == chip


def test_variables_that_matter_are_shown_and_secrets_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    given = {
        "OMP_NUM_THREADS": "3", "ONEDNN_MAX_CPU_ISA": "AVX2", "TORCHINDUCTOR_CACHE_DIR": str(Path.home() / "cache"),
        "TORCH_HUB_TOKEN": "hidden", "MKL_LICENSE_KEY": "hidden", "SHELL": "hidden",
    }  # fmt: skip
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    variables = environment.collect()["variables"]
    assert variables["OMP_NUM_THREADS"] == "3" and variables["ONEDNN_MAX_CPU_ISA"] == "AVX2"
    assert variables["TORCHINDUCTOR_CACHE_DIR"] == f"~{os.sep}cache"
    assert "hidden" not in variables.values()


def test_the_kernel_cache_is_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "kernels").mkdir()
    for name, size in (("a.pt2", 1_500_000), ("b.pt2", 500_000), ("a.lock", 7)):
        (tmp_path / "kernels" / name).write_bytes(bytes(size))
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))
    found = environment.collect()
    assert (found["kernel_cache"]["num_kernels"], found["kernel_cache"]["bytes"]) == (2, 2_000_000)
    assert "2 kernels, 2.0 MB" in environment.describe(found)


def test_native_formats_are_those_that_the_processor_multiplies() -> None:
    with pretending("avx2"):
        assert environment.collect()["native_formats"] == ["float64", "float32"]
    with pretending("avx512_bf16"):
        assert "bfloat16" in environment.collect()["native_formats"]


def test_the_command_prints_a_paste_and_json() -> None:
    text = CliRunner().invoke(main, ["show", "environment"])
    assert text.exit_code == 0 and narrowgauge.__version__ in text.stdout
    assert lines_of(text.stdout)["torch"].split()[0] == torch.__version__
    as_json = CliRunner().invoke(main, ["show", "environment", "--torch", "--json"])
    [found] = json.loads(as_json.stdout)
    assert found["packages"]["torch"] == torch.__version__
    assert found["packages"]["numpy"] == numpy.__version__
    assert found["torch"]["num_threads"] == torch.get_num_threads()
    assert found["torch"]["cpu_capability"] == torch.backends.cpu.get_cpu_capability()
    assert f"{torch.get_num_threads()} threads" in lines_of(environment.describe(found))["torch reports"]


def test_it_is_answered_without_torch() -> None:
    script = (
        "import sys; from narrowgauge.cli.main import main; sys.argv = ['narrowgauge', 'show', 'environment']\n"
        "try: main()\nfinally: print([n for n in ('torch', 'numpy', 'transformers') if n in sys.modules], file=sys.stderr)"
    )
    source = str(Path(narrowgauge.__file__).parents[1])
    result = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, "PYTHONPATH": source},
        capture_output=True,
        text=True,
        check=True,
    )
    assert result.stderr.strip() == "[]" and result.stdout.startswith("narrowgauge")


# ── the PyTorch that is there, and those that were tested ───────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("version", "line"),
    [
        ("2.13.0+cpu", "2.13.0+cpu (tested with 2.11 to 2.15)"),
        ("2.15.1", "2.15.1 (tested with 2.11 to 2.15)"),
        ("2.16.0.dev20261101", "2.16.0.dev20261101 (NEWER than what narrowgauge was tested with, 2.11 to 2.15)"),
        (None, "not installed"),
    ],
)
def test_the_environment_names_what_was_tested(monkeypatch: pytest.MonkeyPatch, version: str | None, line: str) -> None:
    monkeypatch.setattr(environment, "_torch_version", lambda: version)
    assert lines_of(environment.describe(environment.collect()))["torch"].strip() == line


def test_a_newer_torch_is_told_of_once_for_a_run_and_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by every rank, nor by every process that loads data."""
    monkeypatch.delenv("RANK", raising=False)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        _torch._warn_of_release()
        monkeypatch.setattr(torch, "__version__", "2.99.1+cu140")
        monkeypatch.setenv("RANK", "3")
        _torch._warn_of_release()
    monkeypatch.setenv("RANK", "0")
    with pytest.warns(UserWarning, match=r"tested with PyTorch 2\.11 to 2\.15, and this is 2\.99\.1\+cu140"):
        _torch._warn_of_release()
