"""The definition of a step: in chunks, where there is no compiler, and as a GPU compiles it."""

from __future__ import annotations

from pathlib import Path

import pytest

import narrowgauge as ng
from narrowgauge.optim import step_cpp
from narrowgauge.torch_support import cpp, proof
from optim.pairs import everything, kernel_of, parameters
from script_modules import benchmark_module
from tensors import assert_same_bits, take_steps


@pytest.mark.parametrize("storage", ["word", "compact"])
def test_a_chunk_boundary_changes_nothing(monkeypatch: pytest.MonkeyPatch, storage: str) -> None:
    results = []
    for chunk in (1 << 15, 1000, 30):
        monkeypatch.setattr("narrowgauge.numerics.chunks.CHUNK", chunk)
        optimizer = ng.AdamW(
            parameters(storage, [(30, 31), (20, 22)]), storage=storage, compile=False
        )
        take_steps(optimizer, range(12), scale=0.01)
        results.append(everything(optimizer))
    assert_same_bits(results[0], results[1])
    assert_same_bits(results[0], results[2])


def test_without_a_compiler_the_definition_runs_and_says_so(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    monkeypatch.setenv("NARROWGAUGE_CACHE", str(tmp_path))  # a library that is there is loaded
    monkeypatch.setattr("shutil.which", lambda name: None)
    cpp.build.cache_clear()
    monkeypatch.setattr(proof, "_reasons", {})
    step_cpp.functions.cache_clear()
    proof._warn_once.cache_clear()
    optimizer = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=True)
    with pytest.warns(UserWarning, match="no C\\+\\+ compiler"):
        take_steps(optimizer, range(2), scale=0.01)
    eager = ng.AdamW(parameters("word", [(80, 80)]), storage="word", compile=False)
    take_steps(eager, range(2), scale=0.01)
    assert_same_bits(everything(optimizer), everything(eager))


@pytest.mark.parametrize(
    ("rule", "storage"), [("adamw", "word"), ("lion", "states8"), ("muon", "word")]
)
def test_a_gpu_rounds_every_operation_and_moves_16_bytes_at_a_time(rule: str, storage: str) -> None:
    """Compiled without a GPU.

    ``./dev gpu --compile`` compiles all pairs, for three architectures.
    """
    row = benchmark_module("gpu").compiled_row(*kernel_of(rule, storage), 90)
    assert row["passes"] == "yes", row
