"""FSDP2's mixed precision under the reproducible reduction: the bits of one rank on several.

That every kind of model has them, ``test_reduction`` (every magnitude on one to four ranks, against
an oracle) and ``tests/equivalence`` prove.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowgauge as ng
from distributed.models import full_tensor_of, mesh_of
from narrowgauge.numerics.hashing import fingerprint_all
from ranks import run_ranks

LEAVES = 6
POLICIES: dict[str, dict[str, Any]] = {
    "bfloat16": {"param_dtype": torch.bfloat16},
    "float16 that returns float32": {"param_dtype": torch.float16, "output_dtype": torch.float32},
    "inputs as they are": {"param_dtype": torch.bfloat16, "cast_forward_inputs": False},
}


def with_policies(rank: int, replicas: bool) -> dict[str, str]:
    """Weights after three steps of six micro-batches, by FSDP2's mixed precision; with ``replicas``
    the shards are whole.
    """
    size = dist.get_world_size()
    fingerprints = {}
    for name, policy in POLICIES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
        mesh = mesh_of("shards of one" if replicas else "sharded")
        for unit in (model[0], model[2], model):
            fully_shard(
                unit,
                mesh=mesh,
                mp_policy=MixedPrecisionPolicy(**policy, reduce_dtype=torch.float32),
            )
        reduction = ng.reduce_gradients_with(model, "reproducible", average=False)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for k in range(3):
            for leaf in range(rank, LEAVES, size):
                x = torch.randn(3, 8, generator=torch.Generator().manual_seed(10 * k + leaf))
                x = x if policy.get("cast_forward_inputs", True) else x.bfloat16()
                with reduction.micro_batch(is_last=leaf + size >= LEAVES):
                    model(x).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        fingerprints[name] = fingerprint_all(
            {key: full_tensor_of(p.detach()) for key, p in model.named_parameters()}
        )
    return fingerprints


def test_mixed_precision_of_fsdp_has_the_same_bits_on_one_rank_as_on_several(
    tmp_path: Path,
) -> None:
    (expected,) = run_ranks(with_policies, 1, tmp_path / "one", False)
    assert len(set(expected.values())) == len(POLICIES) - 1  # the last casts its inputs itself
    for size, replicas in ((2, False), (3, False), (2, True)):
        for result in run_ranks(with_policies, size, tmp_path / f"{size} {replicas}", replicas):
            assert result == expected
