"""``benchmarks/gpu.py``: without a GPU it ends with status 2; on a CPU its rehearsal runs."""

import pytest
import torch

from script_modules import benchmark_module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_ends_with_status_2(capsys):
    assert benchmark_module("gpu").main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
def test_the_rehearsal_has_each_row_of_ours(monkeypatch):
    """A row that fails is left out."""
    gpu = benchmark_module("gpu")
    speed = benchmark_module("speed")
    tables = []
    for module in (gpu, speed):
        monkeypatch.setattr(module, "show", lambda title, rows: tables.append(rows))
    assert gpu.main(["--rehearse"]) == 0
    shown = [[row[""] for row in rows] for rows in tables]
    checks, steps, *layers = shown
    assert len(checks) == 3
    assert {speed.FUSED, speed.FUSED_BFLOAT16, *speed.STORAGES} <= set(steps)
    assert layers == [[speed.LINEAR, *speed.LAYERS["cpu"]]]
