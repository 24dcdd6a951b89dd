"""The definition of a step: in chunks, where there is no compiler, and as a GPU compiles it."""

from __future__ import annotations

import pytest

import narrowgauge as ng
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
        assert_same_bits(results[0], results[-1])


@pytest.mark.parametrize(
    ("rule", "storage"), [("adamw", "word"), ("lion", "states8"), ("muon", "word")]
)
def test_a_gpu_rounds_every_operation_and_moves_16_bytes_at_a_time(rule: str, storage: str) -> None:
    """Compiled without a GPU."""
    row = benchmark_module("gpu").compiled_row(*kernel_of(rule, storage), 90)
    assert row["passes"] == "yes", row
