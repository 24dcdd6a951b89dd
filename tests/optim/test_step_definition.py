"""The definition of a step: in chunks, where there is no compiler, and as a GPU compiles it."""

import importlib
import re

import pytest

import narrowgauge as ng
from narrowgauge.optim.step import step_cpp, step_triton
from narrowgauge.torch_support.triton import LAUNCH
from optim.pairs import everything, kernel_of, parameters
from tensors import assert_same_bits, take_steps


@pytest.mark.parametrize("storage", ["word", "compact"])
def test_a_chunk_boundary_changes_nothing(monkeypatch, storage):
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
def test_a_gpu_rounds_every_operation_and_moves_16_bytes_at_a_time(rule, storage):
    """Compiled without a GPU."""
    triton = pytest.importorskip("triton")
    types = {"table": "*i64", "tensor_of_program": "*i32", "numbers": "*fp32", "control": "*fp32"}
    values = {"row": step_cpp.row_of(*kernel_of(rule, storage))}
    aligned = {(place,): [["tt.divisibility", 16]] for place in range(len(types))}
    signature = types | {"row": "constexpr"}
    source = triton.compiler.ASTSource(step_triton.step, signature, values, aligned)
    target = importlib.import_module("triton.backends.compiler").GPUTarget("cuda", 90, 32)
    ptx = triton.compile(source, target=target, options=dict(LAUNCH)).asm["ptx"]
    assert not re.findall(r"\bfma\S*|\S+\.approx\S*|\S+\.ftz\S*", ptx)
    assert re.search(r"(?:ld|st)\.global\.v4\.b32\b", ptx)
