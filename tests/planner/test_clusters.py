"""Machines as they are asked for: nodes of chips, chips of one's own, and what contradicts itself."""

from dataclasses import replace

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.cluster import Cluster, chip_of
from narrowgauge.planner.plan import plan
from narrowgauge.spec.chips import get_chip


def test_a_file_describes_a_chip_and_its_node(tmp_path):
    file = tmp_path / "mine.toml"
    text = 'like = "V100"\nnetwork_gbit_per_second = 400\nchips_per_node = 4\nhost_memory_gb = 64\n'
    file.write_text(text)
    machine = Cluster(chip_of(file), 16)
    assert (machine.name, machine.chips_per_node) == ("16 × mine", 4)
    assert (machine.network_bytes_per_second, machine.chip.memory_bytes) == (50e9, 32 * 2**30)
    assert machine.host_memory_bytes == 256 * 2**30


def test_a_host_of_a_tenth_of_the_rate_updates_ten_times_as_long():
    seconds = []
    for rate in (4e9, 4e8):
        chip = replace(get_chip("H100-SXM"), host_updates_per_second=rate)
        best = plan(
            "llama-8b", chip=chip, program="compiled,offload=true", recipes="bfloat16/word"
        ).best
        seconds.append(best.step_seconds)
    num_parameters = 8.03e9
    assert seconds[1] - seconds[0] == pytest.approx(num_parameters * (1 / 4e8 - 1 / 4e9), rel=0.02)


def test_chips_fill_whole_nodes():
    # 128 and 256 GB200s run in published steps, in racks of 72. Otherwise nodes fill evenly; the last
    # one may lack chips.
    for chip, sizes in (
        ("GB200", {128: 64, 144: 72, 256: 64, 73: 37, 127: 64, 146: 49}),
        ("H100-SXM", {4: 4, 12: 6, 16: 8, 24: 8, 20: 7}),
    ):
        kind = get_chip(chip)
        assert {chips: Cluster(kind, chips).chips_per_node for chips in sizes} == sizes
    mine = replace(get_chip("H100-SXM"), name="mine", memory_gb=94.5)
    assert plan("llama-8b", chip=mine, chips=8, recipes="bfloat16/word").best.fits
    for field in ({"memory_gb": "94"}, {"peak_tflops": {}}):
        with pytest.raises(NarrowgaugeError):
            replace(mine, **field)
