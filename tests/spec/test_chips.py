"""The chip table: whole, plausible, sourced; names found or suggested."""

from __future__ import annotations

import dataclasses
import json

import pytest

import expectations
from narrowgauge.errors import ChipError
from narrowgauge.spec.chips import CHIPS, get_chip
from narrowgauge.spec.formats import FORMATS


def test_every_chip_has_its_figures() -> None:
    found = {}
    for name, chip in CHIPS.items():
        wide = chip.peak_tflops.get("bfloat16", chip.peak_tflops.get("float16"))
        rates = chip.bandwidth_gb_per_second, wide, chip.network_gbit_per_second
        found[name] = (chip.memory_gb, *rates, chip.chips_per_node)
    assert found == expectations.CHIPS, "tests/expectations.py states each chip a second time"


def test_the_table_is_whole() -> None:
    assert len(CHIPS) >= 17
    for name, chip in CHIPS.items():
        assert chip.name == name and chip.source and chip.evidence in "AB"
        assert chip.peak_tflops and chip.peak_tflops.keys() <= FORMATS.keys()
        assert 8 <= chip.memory_gb <= 512 and 100 <= chip.bandwidth_gb_per_second <= 20_000
        json.dumps(dataclasses.asdict(chip))


def test_narrower_formats_are_not_slower() -> None:
    order = ["float32", "tfloat32", "bfloat16", "float8_e4m3fn", "float4_e2m1fn"]
    for chip in CHIPS.values():
        peaks = [chip.peak_tflops[name] for name in order if name in chip.peak_tflops]
        assert peaks == sorted(peaks)


def test_what_was_measured_is_below_the_peak() -> None:
    measured = [(chip, name) for chip in CHIPS.values() for name in chip.measured_tflops]
    assert len(measured) >= 8
    for chip, name in measured:
        assert 0.4 < chip.measured_tflops[name] / chip.peak_tflops[name] < 1


def test_published_figures() -> None:
    h100 = CHIPS["H100-SXM5-80GB"]
    assert (h100.peak_tflops["bfloat16"], h100.bandwidth_gb_per_second, h100.link_gb_per_second) == (989, 3350, 450)
    assert h100.memory_bytes == 80 * 2**30 and h100.bandwidth_bytes_per_second == 3.35e12
    assert h100.mxfp8_tflops is None and CHIPS["B200-SXM-180GB"].mxfp8_tflops == 4500
    assert "bfloat16" not in CHIPS["V100-SXM2-32GB"].peak_tflops
    assert CHIPS["MI300X"].peak_tflops["float8_e4m3fnuz"] == 2610
    assert CHIPS["L4"].link_gb_per_second == 0


def test_a_chip_is_a_value() -> None:
    chip = CHIPS["L4"]
    assert dataclasses.replace(chip) == chip and hash(dataclasses.replace(chip)) == hash(chip)
    with pytest.raises(dataclasses.FrozenInstanceError):
        chip.__setattr__("memory_gb", 48)


def test_names() -> None:
    assert get_chip("mi300x") is CHIPS["MI300X"]
    assert get_chip("L4") is CHIPS["L4"]
    assert get_chip("H200") is CHIPS["H200-SXM-141GB"]
    with pytest.raises(ChipError, match="2 names begin with it: H100-SXM5-80GB, H100-PCIe-80GB"):
        get_chip("h100")
    assert get_chip("RTX4090") is CHIPS["RTX-4090"] and get_chip("h100sxm") is CHIPS["H100-SXM5-80GB"]
    with pytest.raises(ChipError, match="Did you mean 'A100-SXM4-40GB'"):
        get_chip("A100-40GB")
    with pytest.raises(ChipError, match="Did you mean 'RTX-4090'"):
        get_chip("rtx-4080")
    with pytest.raises(ChipError, match=r"no chip is named 'gaudi3'\. \(narrowgauge show chips"):
        get_chip("gaudi3")
    with pytest.raises(ChipError, match="no chip is named ''"):
        get_chip("")


def test_a_name_is_not_a_prefix_of_another_number() -> None:
    assert get_chip("H20").name == "H20-SXM5-96GB" and get_chip("H200").name == "H200-SXM-141GB"


@pytest.mark.parametrize(("name", "like", "link"), [("A800", "A100-SXM4-80GB", 200), ("H800", "H100-SXM", 200)])
def test_chips_with_slower_links_compute_as_those_they_are_made_of(name: str, like: str, link: float) -> None:
    chip, original = get_chip(name), get_chip(like)
    assert chip.peak_tflops == original.peak_tflops and chip.memory_bytes == original.memory_bytes
    assert chip.link_gb_per_second == link < (original.link_gb_per_second or 0)
