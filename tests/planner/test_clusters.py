"""Clusters and layouts as they are asked for: rates per chip, files, and what contradicts itself."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.planner.machine import cluster_of, read_cluster
from narrowgauge.planner.plan import plan
from narrowgauge.spec.chips import get_chip


def test_a_file_describes_a_cluster(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    text = 'chip = "V100"\nchips = 16\nchips_per_node = 4\ninterconnect_gbit_per_second = 1600\n'
    file.write_text(text)
    cluster = read_cluster(file)
    assert (cluster.name, cluster.chips, cluster.chips_per_node) == ("mine", 16, 4)
    assert (cluster.network_bytes_per_second, cluster.chip.memory_bytes) == (50e9, 32 * 2**30)


def test_chips_fill_whole_nodes() -> None:
    assert cluster_of("H100-SXM", 4).chips_per_node == 4
    # 128 and 256 GB200s run in published steps, in racks of
    # 72. Otherwise nodes fill evenly; the last one may lack chips.
    for chip, sizes in (
        ("GB200", {128: 64, 144: 72, 256: 64, 73: 37, 127: 64, 146: 49}),
        ("H100-SXM", {12: 6, 16: 8, 24: 8, 20: 7}),
    ):
        assert {chips: cluster_of(chip, chips).chips_per_node for chips in sizes} == sizes
    mine = replace(get_chip("H100-SXM"), name="mine", memory_gb=94.5)
    assert plan("llama-8b", chip=mine, chips=8, recipes="bfloat16/word").best.fits
    for field in ({"memory_gb": "94"}, {"peak_tflops": {}}):
        with pytest.raises(NarrowgaugeError):
            replace(mine, **field)
