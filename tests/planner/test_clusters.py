"""Clusters: rates per chip, files, and what contradicts itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from narrowgauge.errors import ChipError
from narrowgauge.planner.clusters import cluster_of, read_cluster
from narrowgauge.spec.chips import get_chip

FILE = """
chip = "V100"
chips = 16
chips_per_node = 4
interconnect_gbit_per_second = 1600
"""


def test_a_file_describes_a_cluster(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(FILE)
    cluster = read_cluster(path)
    assert (cluster.name, cluster.chips, cluster.chips_per_node) == ("mine", 16, 4)
    assert cluster.network_bytes_per_second == 50e9
    assert cluster.chip.memory_bytes == 32 * 2**30


def test_chips_fill_whole_nodes() -> None:
    assert cluster_of("H100-SXM", 4).chips_per_node == 4
    assert cluster_of("GB200", 144).chips_per_node == 72
    with pytest.raises(ChipError, match=r"12 chips .* 1.50 nodes. Use 8 or 16"):
        cluster_of("H100-SXM", 12)
    with pytest.raises(ChipError, match="chips = 0"):
        cluster_of("H100-SXM", 0)


def test_what_is_not_given_is_the_chips_or_assumed() -> None:
    h100, card = cluster_of("H100-SXM", 8), cluster_of("L40S", 8)
    assert (h100.link_bytes_per_second(8), h100.network_bytes_per_second) == (450e9, 50e9)
    # Without a link of their own, chips send through the host, and share one port of the network.
    assert (card.link_bytes_per_second(8), card.network_bytes_per_second) == (31.5e9, 25e9 / 8)


def test_partitions_of_a_rack_are_filled_alike() -> None:
    """128 and 256 GB200s run in published steps (benchmarks/published_runs_later.toml), in racks of 72."""
    for chips in (128, 256):
        assert cluster_of("GB200", chips).chips_per_node == 64


def test_memory_is_what_drivers_report() -> None:
    """nvidia-smi lists 275,040 MiB on a B300 sold as 288 GB, and 183,359 on a B200 of 180."""
    assert get_chip("B300").memory_bytes == 275_040 << 20
    assert get_chip("B200").memory_bytes == pytest.approx(183_359 << 20, rel=0.01)
