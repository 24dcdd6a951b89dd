"""The chip table: whole, plausible, sourced; names found or suggested."""

from __future__ import annotations

import dataclasses
import json

import pytest

from narrowgauge.errors import ChipError
from narrowgauge.spec.chips import CHIPS, get_chip
from narrowgauge.spec.formats import FORMATS


def test_the_table_is_whole() -> None:
    assert len(CHIPS) >= 17
    for name, chip in CHIPS.items():
        assert chip.name == name and chip.source
        assert chip.peak_tflops and chip.peak_tflops.keys() <= FORMATS.keys()
        assert 8 <= chip.memory_gb <= 512 and 100 <= chip.bandwidth_gb_per_second <= 20_000
        json.dumps(dataclasses.asdict(chip))
        rates = chip.peer_gb_per_second, chip.host_gb_per_second, *chip.peak_tflops.values()
        assert all(rate is None or 0 < rate < 1e5 for rate in rates), name


def test_memory_is_what_drivers_report() -> None:
    """nvidia-smi, MiB, where it is more than 3 % below what is printed."""
    reported = {"B300-SXM": 275_040, "L4": 23_034, "L40": 46_068, "L40S": 46_068, "T4": 15_360}
    assert {
        name: chip.memory_bytes >> 20 for name, chip in CHIPS.items() if chip.reachable_mib
    } == reported


def test_names() -> None:
    assert get_chip("mi300x") is CHIPS["MI300X"]
    assert get_chip("L4") is CHIPS["L4"]
    assert get_chip("H200") is CHIPS["H200-SXM-141GB"]
    with pytest.raises(ChipError, match="H100-SXM5-80GB, H100-PCIe-80GB begin with it"):
        get_chip("h100")
    assert get_chip("RTX4090") is CHIPS["RTX-4090"]
    assert get_chip("h100sxm") is CHIPS["H100-SXM5-80GB"]
    assert get_chip("L40").peak_tflops["bfloat16"] == 181
    for name in ("A10", "MI300", "H2", "V10", "GB30"):  # other chips, or none: no beginnings
        with pytest.raises(ChipError, match=f"no chip is named '{name}'"):
            get_chip(name)
    with pytest.raises(ChipError, match="Did you mean 'RTX-4090'"):
        get_chip("rtx-4080")
    with pytest.raises(ChipError, match=r"no chip is named 'gaudi3'\. \(narrowgauge show chips"):
        get_chip("gaudi3")
    with pytest.raises(ChipError, match="no chip is named ''"):
        get_chip("")
