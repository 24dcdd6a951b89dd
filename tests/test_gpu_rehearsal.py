"""Every section of `./dev gpu` on a CPU in the GPU's place: it must run on the first day that one is there."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from benchmark_modules import BENCHMARKS, benchmark_module
from covering import exhaustive, whole
from narrowgauge.optim import compilation
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.spec.models import get_model
from narrowgauge.spec.notation import parse
from narrowgauge.spec.storages import STORAGES

Run = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The benchmark, which imports its sections when it is their turn, in the processes of ranks too."""
    monkeypatch.syspath_prepend(BENCHMARKS)
    return benchmark_module("gpu")


@pytest.fixture
def rehearse(gpu: ModuleType, tmp_path: Path) -> Run:
    """Rehearses sections; returns the status and what was written as JSON."""

    def run(*arguments: str) -> tuple[int, dict[str, Any]]:
        file = tmp_path / "gpu.json"
        status = gpu.main(["--rehearse", "--json", str(file), "--minutes", "1000", "--sections", *arguments])
        return status, json.loads(file.read_text())

    return run


# Each process of ranks imports PyTorch, each of models the trainer too; the others compile kernels, minutes from nothing.
SLOW = ("ranks", "models", "storages", "training", "steps")
CHECKED, TIMED = (
    ("storages", "casts", "products", "ranks", "gauges", "training"),
    ("steps", "layers", "models"),
)


@pytest.mark.parametrize("section", [pytest.param(name, marks=whole if name in SLOW else ()) for name in CHECKED])
def test_a_section_of_checks_runs_and_passes(section: str, rehearse: Run) -> None:
    status, found = rehearse(section)
    rows = [row for table in found["tables"].values() for row in table]
    assert rows and {row["passes"] for row in rows} == {"yes"}, rows
    assert status == 0


@pytest.mark.parametrize("section", [pytest.param(name, marks=whole if name in SLOW else ()) for name in TIMED])
def test_a_section_of_times_runs(section: str, rehearse: Run) -> None:
    status, found = rehearse(section)
    timed = [row for table in found["tables"].values() for row in table if "why not" not in row]
    assert timed and all(any(isinstance(value, float) for value in row.values()) for row in timed)
    assert not [line for line in found["notes"] if "did not run" in line], found["notes"]
    assert status == 0


def test_the_sections_are_those_that_are_rehearsed(gpu: ModuleType) -> None:
    assert (tuple(gpu.CHECKED), tuple(gpu.TIMED)) == (CHECKED, TIMED)


def test_what_is_only_done_in_full_names_rows_that_exist(gpu: ModuleType) -> None:
    optimizers, full = benchmark_module("_gpu_optimizers"), gpu.FULL
    assert set(optimizers.STALL_BOUNDS) == set(full.storages) == set(STORAGES)
    assert set(full.rules) == {*optimizers.RULES, *optimizers.MATRIX_RULES}
    assert set(full.computes) == set(COMPUTES) and set(full.rows) <= set(COMPUTES)
    assert [parse(name).name for name in full.recipes] == list(full.recipes)
    assert get_model(full.model) and get_model(full.training[0])
    assert full.layers in benchmark_module("narrow_linear").SETS


@exhaustive("storage", STORAGES)
def test_every_storage_takes_the_steps(storage: str, gpu: ModuleType) -> None:
    """Uncompiled: that compiled kernels give the same bits is tested where storages are."""
    optimizers, dtype = benchmark_module("_gpu_optimizers"), getattr(torch, STORAGES[storage].visible)
    make, shapes = optimizers._adamw(storage), ((130, 66), (65, 67), (7, 9), (5, 1), (1, 1), (9, 8))
    kept = optimizers.trained(make, torch.device("cpu"), 6, shapes=shapes, dtype=dtype, compile=False)
    steps = kept.bits["steps"].view(torch.float32).tolist()
    assert steps == [5.0] * len(shapes)  # of six, one has an infinite gradient
    assert "" in kept.readings


@whole
@pytest.mark.parametrize("rule", ["Adam", "SGD", "Adafactor", "GaLore"])
def test_every_rule_runs(rule: str, gpu: ModuleType, rehearse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "QUICK", dataclasses.replace(gpu.QUICK, storages=(), rules=(rule,)))
    status, found = rehearse("storages")
    assert [row["passes"] for table in found["tables"].values() for row in table if "rule" in row] == ["yes"]
    assert status == 0


@pytest.fixture
def one_storage(gpu: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """The optimizers' part, where two storages are all that is checked."""
    optimizers = benchmark_module("_gpu_optimizers")
    monkeypatch.setattr(gpu, "QUICK", dataclasses.replace(gpu.QUICK, storages=("word", "kahan"), rules=()))
    monkeypatch.setattr(optimizers, "ACCUMULATIONS", {})
    return optimizers


def test_a_wrong_bit_fails_the_check_and_nothing_is_timed(
    one_storage: ModuleType, rehearse: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = one_storage.trained

    def wrong(*given: Any, compile: bool, **options: Any) -> Any:
        kept = trained(*given, compile=False, **options)
        kept.bits["3 exp_avg"][..., -1] += int(compile)
        return kept

    monkeypatch.setattr(one_storage, "trained", wrong)
    status, found = rehearse("storages", "steps")
    bits = next(rows for title, rows in found["tables"].items() if title.startswith("storages"))
    assert [(row["worst"], row["passes"]) for row in bits] == [("3 exp_avg", "NO")] * 2
    assert status == 1 and found["notes"][-1] == "a check failed, so nothing was timed"


def test_each_storage_that_runs_uncompiled_is_named(
    one_storage: ModuleType, rehearse: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch's warning comes once in a process, whatever the storage."""
    monkeypatch.setattr(compilation, "_KERNELS", {})
    monkeypatch.setattr(compilation, "_load_or_compile", lambda name, definition: None)
    status, found = rehearse("storages")
    bits = next(rows for title, rows in found["tables"].items() if title.startswith("storages"))
    assert [(row["differing"], row["passes"]) for row in bits] == [(0, "NO")] * 2
    assert all(row["uncompiled"] == row["kernels"] > 0 for row in bits)
    assert [line.startswith("RUNS UNCOMPILED on cpu: ") for line in found["notes"][:2]] == [True, True]
    assert status == 1


def test_what_raises_fails_alone(one_storage: ModuleType, rehearse: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    row = one_storage.bits_row
    monkeypatch.setattr(
        one_storage, "bits_row", lambda setting, name: {}[name] if name == "word" else row(setting, name)
    )
    status, found = rehearse("storages")
    bits = next(rows for title, rows in found["tables"].items() if title.startswith("storages"))
    assert [row["passes"] for row in bits] == ["NO", "yes"] and "did not run" in bits[0]["why"]
    assert status == 1


def test_what_does_not_begin_in_time_is_named(gpu: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "gpu.json"
    assert gpu.main(["--rehearse", "--json", str(file), "--minutes", "0"]) == 0
    notes = json.loads(file.read_text())["notes"]
    assert notes == [
        "sections: left out after 0 minutes: 6 of 6, from storages on",
        "sections: left out after 0 minutes: 3 of 3, from steps on",
    ]


def test_without_a_gpu_it_says_so(
    gpu: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpu.torch.cuda, "is_available", lambda: False)
    assert gpu.main([]) == 2
    assert "./dev gpu needs a CUDA device" in capsys.readouterr().err


def test_no_benchmark_hides_the_package_of_a_peer() -> None:
    """A script finds its neighbours before what is installed."""
    peers = benchmark_module("peers")
    packages = {peer.package.replace("-", "_") for peer in (*peers.PEERS, *peers.CUDA_PEERS)}
    scripts = {path.stem for path in Path(peers.__file__).parent.glob("*.py")}
    assert "flashoptim" in packages and not packages & scripts
