"""Without a GPU ``benchmarks/gpu.py`` ends with status 2 and one line."""

from __future__ import annotations

import pytest
import torch

from benchmark_modules import benchmark_module


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_script_ends_with_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    assert benchmark_module("gpu").main([]) == 2
    assert capsys.readouterr().err.count("\n") == 1
