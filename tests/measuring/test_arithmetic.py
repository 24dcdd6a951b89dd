"""The measured arithmetic of this machine: it tells settings apart, and a run records it."""

import pytest
import torch

from narrowgauge.measuring import provenance
from narrowgauge.measuring.arithmetic import measure_arithmetic
from narrowgauge.measuring.diagnose.settings_diff import settings_diff
from narrowgauge.measuring.provenance import describe_process

CPU = torch.device("cpu")


def test_a_measurement_repeats_and_leaves_every_setting():
    before = torch.get_num_threads()
    with torch.autocast("cpu", torch.bfloat16):
        machine = measure_arithmetic(CPU)
    assert torch.get_num_threads() == before and measure_arithmetic(CPU) == machine


def test_flushed_subnormals_are_seen():
    subnormal = measure_arithmetic(CPU)
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush subnormals to zero")
    try:
        flushed = measure_arithmetic(CPU)
    finally:
        torch.set_flush_denormal(False)
    changes = settings_diff({"arithmetic": subnormal}, {"arithmetic": flushed})
    assert "arithmetic.subnormals" in changes


def test_the_recorded_chip_is_that_of_the_model(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device=None: f"chip {device}")
    monkeypatch.setattr(provenance, "measure_arithmetic", lambda device: {})
    assert describe_process(torch.device("cuda:1"))["machine"]["device"] == "chip cuda:1"
