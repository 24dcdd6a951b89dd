"""``benchmarks/gpu.py``: without a GPU it ends with status 2; on a CPU its rehearsal runs, whatever
peers are missing.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch

from script_modules import benchmark_module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_module("gpu").main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
def test_the_rehearsal_fails_nowhere_but_at_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = benchmark_module("gpu")
    tables: list[list[dict[str, Any]]] = []
    monkeypatch.setattr(gpu, "show", lambda title, rows: tables.append(rows))
    assert gpu.main(["--rehearse"]) == 0
    assert len(tables) == 5 and all(tables)
    failures = {}
    for row in itertools.chain(*tables):
        if "why not" in row:
            failures[row[""]] = row["why not"]
    ours = {gpu.FUSED, gpu.BFLOAT16, *gpu.TIMED_STORAGES, *gpu.TIMED_COMPUTES}
    assert not failures.keys() & ours, failures
