"""``benchmarks/gpu.py``: without a GPU it ends with status 2; on a CPU its rehearsal runs, whatever
peers are missing.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from script_modules import benchmark_module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_module("gpu").main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1


@pytest.mark.filterwarnings("ignore::narrowgauge.matmul.gemm.EmulationNotice")
def test_the_rehearsal_fails_nowhere_but_at_peers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = benchmark_module("gpu")
    assert gpu.main(["--rehearse", "--json", str(tmp_path / "gpu.json")]) == 0
    tables = json.loads((tmp_path / "gpu.json").read_text())["tables"]
    assert len(tables) >= 4 and all(tables.values())  # peers that are installed have one more
    failures = {}
    for table in tables.values():
        for row in table:
            if "why not" in row:
                failures[row[""]] = row["why not"]
    ours = {
        gpu.FUSED,
        gpu.BFLOAT16,
        *gpu.TIMED_STORAGES,
        *gpu.TIMED_COMPUTES,
    }
    assert not failures.keys() & ours, failures
    for section in gpu.SECTIONS:  # the file has all, so none is run again
        monkeypatch.setattr(gpu, section, None)
    assert gpu.main(["--rehearse", "--json", str(tmp_path / "gpu.json")]) == 0
