"""Collectives: by hand, against measured tables, and laws."""

from __future__ import annotations

import math
from functools import partial

import pytest

from narrowgauge.planner.efficiency import efficiency_of
from narrowgauge.planner.estimate import Estimate as Job
from narrowgauge.planner.exchanges import (
    Path,
    _path,
    all_to_all_seconds,
    gather_seconds,
    path_of,
    send_seconds,
)
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import cluster_of
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import DEFAULT
from narrowgauge.spec.notation import parse

near = partial(pytest.approx, rel=2e-3)  # latencies
NODE = Path(8, 1, 100e9, math.inf)
FOUR = Path(32, 4, 100e9, 10e9)


def test_rings_by_hand() -> None:
    assert gather_seconds(8e9, NODE) == near(7 * 1e9 / 100e9)
    assert 2 * gather_seconds(8e9, NODE) == near(14 * 1e9 / 100e9)
    # Eight cards of a node bring in three quarters of the tensor.
    assert gather_seconds(32e9, FOUR) == near(max(24e9 / (8 * 10e9), 31e9 / 100e9))
    assert send_seconds(1e9, FOUR) == near(1e9 / 100e9)
    lonely = Path(4, 4, math.inf, 10e9)
    assert send_seconds(1e9, lonely) == near(1e9 / 10e9)
    assert gather_seconds(4e9, lonely) == near(3e9 / 10e9)


def test_all_to_all_leaves_the_node_with_what_others_need() -> None:
    assert all_to_all_seconds(32e9, FOUR) == near(24e9 / 10e9)
    assert all_to_all_seconds(8e9, NODE) == near(7e9 / 100e9)
    assert all_to_all_seconds(32e9, FOUR, between=0.5) == near(12e9 / 10e9)


@pytest.mark.parametrize(
    ("ranks", "stride", "nodes", "per_node"),
    [(8, 1, 1, 8), (4, 2, 1, 4), (8, 8, 8, 1), (16, 2, 4, 4), (3, 3, 2, 1.5), (64, 1, 8, 8)],
)
def test_where_ranks_lie(ranks: int, stride: int, nodes: int, per_node: float) -> None:
    cluster = cluster_of("H100-SXM", 64)
    path = path_of(ranks, stride, cluster)
    assert (path.nodes, path.ranks_per_node) == (nodes, per_node)


MEASURED_H200 = {16: 125.65, 64: 198.01, 256: 249.23}  # MiB: algorithm bandwidth in GB/s
"""ml-engineering, network/benchmarks/results/all-reduce-8xH200.md; NCCL sums in the switch there,
which rings cannot.
"""
MEASURED_B200 = {64: 102.07, 256: 146.18, 4096: 193.37}
"""Same, network/benchmarks/README.md: four nodes of eight B200 with 400 Gbit/s each. Below 64 MiB
it takes up to 2.6 times as long as predicted."""


@pytest.mark.parametrize(
    ("chip", "ranks", "table"), [("H200", 8, MEASURED_H200), ("B200", 32, MEASURED_B200)]
)
def test_measured_all_reduces_are_met_within_a_third(
    chip: str, ranks: int, table: dict[int, float]
) -> None:
    cluster = cluster_of(chip, ranks)
    shares = efficiency_of(cluster.chip, DEFAULT)
    path = path_of(ranks, 1, cluster, link=shares["link"], network=shares["network"])
    for mib, rate in table.items():
        measured = mib * 2**20 / (rate * 1e9)
        assert 2 * gather_seconds(mib * 2**20, path) == pytest.approx(measured, rel=1 / 3), mib


@pytest.mark.parametrize(
    ("chip", "ranks", "stride", "rate"),
    # One link of 64 GB/s to each peer (ml-engineering, network/README.md); bridges of 300 GB/s join
    # pairs, and PCIe5 x16 has 63 (NVIDIA's H100 PCIe product brief); an NVSwitch gives one peer the
    # whole rate.
    [
        *(("MI300X", ranks, 1, rate) for ranks, rate in ((2, 64), (4, 192), (8, 448))),
        *(
            ("H100-PCIe", ranks, stride, rate)
            for ranks, stride, rate in ((2, 1, 300), (2, 2, 63), (8, 1, 63))
        ),
        ("H100-SXM", 2, 1, 450),
    ],
)
def test_few_or_unbridged_peers_have_slower_links(
    chip: str, ranks: int, stride: int, rate: float
) -> None:
    path = path_of(ranks, stride, cluster_of(chip, 8))
    assert path.link_bytes_per_second == pytest.approx(rate * 1e9)
    # A gigabyte summed over two MI300X takes 16 ms: 2 × 1/2 × 1e9 / 64e9.
    if (chip, ranks) == ("MI300X", 2):
        assert 2 * gather_seconds(1e9, path) == pytest.approx(15.6e-3, rel=0.01)


def test_a_path_through_the_host_has_one_share_on_all_chips() -> None:
    """Pairs of an H100-PCIe have a bridge.

    Beyond a pair they share the host's lanes, as cards without links do.
    """

    def rate(chip: str, ranks: int) -> float:
        layout = Layout(shard=8 // ranks, tensor=ranks)
        job = Job(read_model("llama-8b"), parse("bfloat16/word"), layout, cluster_of(chip, 8), 4096)
        return _path(job, ranks, 1).link_bytes_per_second / job.chip.host_gb_per_second / 1e9

    assert rate("H100-PCIe", 8) == rate("H100-PCIe", 4) == rate("L40S", 8) == 0.5
    assert rate("H100-PCIe", 2) == pytest.approx(0.8 * 300 / 63)
