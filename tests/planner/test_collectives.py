"""Collectives: by hand, and against measured tables."""

from __future__ import annotations

import math
from functools import partial

import pytest

from narrowgauge.planner.efficiency import efficiency_of
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
from narrowgauge.planner.program import DEFAULT
from planner.jobs import estimate

near = partial(pytest.approx, rel=2e-3)  # latencies
NODE = Path(8, 1, 100e9, math.inf)
FOUR = Path(32, 4, 100e9, 10e9)
LONELY = Path(4, 4, math.inf, 10e9)


def test_collectives_by_hand() -> None:
    assert gather_seconds(8e9, NODE) == near(7 * 1e9 / 100e9)
    # Eight cards of a node bring in three quarters of the tensor.
    assert gather_seconds(32e9, FOUR) == near(max(24e9 / (8 * 10e9), 31e9 / 100e9))
    assert gather_seconds(4e9, LONELY) == near(3e9 / 10e9)
    assert send_seconds(1e9, FOUR) == near(1e9 / 100e9)
    assert send_seconds(1e9, LONELY) == near(1e9 / 10e9)
    # An all-to-all leaves the node with what others need.
    assert all_to_all_seconds(32e9, FOUR) == near(24e9 / 10e9)
    assert all_to_all_seconds(8e9, NODE) == near(7e9 / 100e9)
    assert all_to_all_seconds(32e9, FOUR, between=0.5) == near(12e9 / 10e9)


@pytest.mark.parametrize(
    ("ranks", "stride", "nodes", "per_node"),
    [(8, 1, 1, 8), (4, 2, 1, 4), (8, 8, 8, 1), (16, 2, 4, 4), (3, 3, 2, 1.5), (64, 1, 8, 8)],
)
def test_where_ranks_lie(ranks: int, stride: int, nodes: int, per_node: float) -> None:
    path = path_of(ranks, stride, cluster_of("H100-SXM", 64))
    assert (path.nodes, path.ranks_per_node) == (nodes, per_node)


MEASURED = {"H200": {16: 125.65, 64: 198.01, 256: 249.23}, "B200": {64: 102.07, 256: 146.18, 4096: 193.37}}  # fmt: skip
"""Algorithm bandwidth in GB/s by MiB: ml-engineering, network/benchmarks/results/all-reduce-8xH200.md
(NCCL sums in the switch there, which rings cannot) and README.md, four nodes of eight B200 with 400
Gbit/s each. Below 64 MiB it takes up to 2.6 times as long as predicted."""


@pytest.mark.parametrize(("chip", "ranks"), [("H200", 8), ("B200", 32)])
def test_measured_all_reduces_are_met_within_a_third(chip: str, ranks: int) -> None:
    cluster = cluster_of(chip, ranks)
    shares = efficiency_of(cluster.chip, DEFAULT)
    path = path_of(ranks, 1, cluster, link=shares["link"], network=shares["network"])
    for mib, rate in MEASURED[chip].items():
        measured = mib * 2**20 / (rate * 1e9)
        assert 2 * gather_seconds(mib * 2**20, path) == pytest.approx(measured, rel=1 / 3), mib


@pytest.mark.parametrize(
    ("chip", "ranks", "stride", "rate"),
    # One link of 64 GB/s to each peer (ml-engineering, network/README.md); bridges of 300 GB/s join
    # pairs, and PCIe5 x16 has 63 (NVIDIA's H100 PCIe product brief); an NVSwitch gives one peer the
    # whole rate.
    [
        ("MI300X", 2, 1, 64), ("MI300X", 4, 1, 192), ("MI300X", 8, 1, 448), ("H100-PCIe", 2, 1, 300),
        ("H100-PCIe", 2, 2, 63), ("H100-PCIe", 8, 1, 63), ("H100-SXM", 2, 1, 450),
    ],
)  # fmt: skip
def test_few_or_unbridged_peers_have_slower_links(
    chip: str, ranks: int, stride: int, rate: float
) -> None:
    path = path_of(ranks, stride, cluster_of(chip, 8))
    assert path.link_bytes_per_second == pytest.approx(rate * 1e9)


@pytest.mark.parametrize(
    ("chip", "ranks", "share"),
    [("H100-PCIe", 8, 0.5), ("H100-PCIe", 4, 0.5), ("L40S", 8, 0.5), ("H100-PCIe", 2, 0.8 * 300 / 63)],
)  # fmt: skip
def test_a_path_through_the_host_has_one_share_on_all_chips(
    chip: str, ranks: int, share: float
) -> None:
    """Pairs of an H100-PCIe have a bridge. Beyond a pair they share the host's lanes, as cards
    without links do.
    """
    job = estimate(layout=Layout(shard=8 // ranks, tensor=ranks), chip=chip)
    rate = _path(job, ranks, 1).link_bytes_per_second
    assert rate / job.chip.host_gb_per_second / 1e9 == pytest.approx(share)
