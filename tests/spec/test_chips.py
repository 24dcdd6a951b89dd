"""The chip table: whole, plausible, sourced; names found or suggested."""

import dataclasses
import json

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.spec.chips import CHIPS, get_chip
from text.refusals import refused


def test_the_table_is_whole():
    assert len(CHIPS) >= 17
    for name, chip in CHIPS.items():
        assert chip.name == name and chip.source
        assert 8 <= chip.memory_gb <= 512 and 100 <= chip.bandwidth_gb_per_second <= 20_000
        json.dumps(dataclasses.asdict(chip))
        assert max(chip.host_gb_per_second, *chip.peak_tflops.values()) < 1e5, name


WRONG = (
    {"memory_gb": -5}, {"bandwidth_gb_per_second": 0}, {"link_gb_per_second": "fast"}, {"chips_per_node": 0.5},
    {"peak_tflops": {"bfloat16": 1, "nvfp4": 1}}, {"peak_tflops": {"bfloat16": -1}}, {"peak_tflops": {}},
)  # fmt: skip


@pytest.mark.parametrize("fields", WRONG)
def test_a_chip_that_cannot_be_is_refused(fields):
    with pytest.raises(NarrowgaugeError):
        dataclasses.replace(CHIPS["L4"], **fields)


def test_memory_is_what_drivers_report():
    """nvidia-smi, MiB, where it is more than 3 % below what is printed."""
    reported = {"B300-SXM": 275_040, "L4": 23_034, "L40": 46_068, "L40S": 46_068, "T4": 15_360}
    assert {
        name: chip.memory_bytes >> 20 for name, chip in CHIPS.items() if chip.reachable_mib
    } == reported


NAMES = {
    "mi300x": "MI300X",
    "L4": "L4",
    "H200": "H200-SXM-141GB",
    "RTX4090": "RTX-4090",
    "h100sxm": "H100-SXM5-80GB",
}


def test_names():
    for name, full in NAMES.items():
        assert get_chip(name) is CHIPS[full]
    assert get_chip("L40").peak_tflops["bfloat16"] == 181
    for name in ("A10", "MI300", "H2", "V10", "GB30", ""):  # other chips, or none: no beginnings
        with refused("a chip", name=name):
            get_chip(name)
