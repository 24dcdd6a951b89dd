"""Silent corruption: one flipped bit on one rank is found by all ranks and named, in shards that
have replicas too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

from distributed.models import mesh_of
from narrowgauge.distributed.replica_verification import verify_replicas
from narrowgauge.errors import CorruptionError
from narrowgauge.numerics.dtensor import local_of
from ranks import run_ranks

Damage = dict[int, str]
"""The tensor that is damaged on a rank."""
TEST, TAKE = "Test the memory", "Take the machine of rank {} out"
CASES: dict[int, list[tuple[Damage, Any]]] = {
    2: [({1: "gain"}, ("gain of rank 0 differs from that of rank 1 after step 7.", TEST))],
    3: [
        (
            {2: "gain"},
            ("gain of rank 2 differs from that of rank 0, 1 after step 7.", TAKE.format(2)),
        )
    ],
    4: [
        ({}, None),
        ({3: "weight"}, ("weight of rank 1 differs from that of rank 3 after step 7.", TEST)),
        (
            {3: "gain"},
            ("gain of rank 3 differs from that of rank 0, 1, 2 after step 7.", TAKE.format(3)),
        ),
    ],
}


def compare(rank: int, damages: list[Damage]) -> list[tuple[str, str] | None]:
    """What this rank finds in a vector that all have, and on four ranks in two replicas of two
    shards.
    """
    refusals: list[tuple[str, str] | None] = []
    for damage in damages:
        owners = {"gain": torch.ones(6)}
        if dist.get_world_size() == 4:
            placements = [Replicate(), Shard(0)]
            weight = distribute_tensor(
                torch.arange(8.0), mesh_of("replicas"), placements, src_data_rank=None
            )
            owners = {"weight": weight, **owners}
        if rank in damage:
            local_of(owners[damage[rank]]).view(torch.int32)[1] ^= 1 << 3
        try:
            verify_replicas([(name, local_of(owner), owner) for name, owner in owners.items()], 7)
            refusals.append(None)
        except CorruptionError as error:
            refusals.append(
                (error.message, error.advice.split(" of these")[0].split(" of service")[0])
            )
    return refusals


@pytest.mark.parametrize("size", CASES)
def test_a_flipped_bit_is_found_on_all_ranks(size: int, tmp_path: Path) -> None:
    damages, expected = zip(*CASES[size], strict=True)
    assert run_ranks(compare, size, tmp_path, damages) == [list(expected)] * size
