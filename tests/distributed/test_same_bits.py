"""The law of the reproducible reduction: equal bits for any number of ranks, any assignment of
micro-batches, any kind of model.

The micro-batches' gradients are given, so that nothing but the sum and the optimizer can differ.
Every result is compared with that of one process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowgauge as ng
from distributed.models import full_tensor_of, mesh_of
from distributed.test_reduction import all_gradients, placed, step
from narrowgauge.numerics.hashing import fingerprint_all
from ranks import run_ranks

LEAVES = 6
Assignment = list[list[int | None]]


def assignments(size: int) -> dict[str, Assignment]:
    """The micro-batches of each rank, by the name of the assignment; ranks with fewer have absent
    ones at the end.
    """
    leaves = list(range(LEAVES))
    first = LEAVES - size + 1
    named = {
        "strided": [leaves[place::size] for place in range(size)],
        "backwards": [leaves[::-1][place::size] for place in range(size)],
        "uneven": [leaves[:first], *([leaf] for leaf in leaves[first:])],
    }
    rounds = {name: max(map(len, ranks)) for name, ranks in named.items()}
    assigned = {}
    for name, ranks in named.items():
        assigned[name] = [[*of, *[None] * (rounds[name] - len(of))] for of in ranks]
    return assigned


def outcome(kind: str, dtype: torch.dtype, leaves: Sequence[int | None]) -> list[str]:
    """Fingerprints of three steps' gradients, norms and weights."""
    model, called = placed(kind, dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.dtype is dtype], "storage": storage}
        for dtype, storage in ((torch.float32, "float32"), (torch.bfloat16, "word"))
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = ng.AdamW(groups, lr=0.1, max_grad_norm=0.5, compile=False)
    reduction = ng.reduce_gradients_with(called, "reproducible", average=False)
    seen = []
    for _ in range(3):
        step(reduction, called, leaves)
        seen.append(fingerprint_all(all_gradients(model)))
        optimizer.step()
        seen.append(
            fingerprint_all(
                {key: full_tensor_of(p.detach()) for key, p in model.named_parameters()}
            )
        )
        optimizer.zero_grad()
    return seen


KINDS = {
    1: ("replicated", "sharded"),
    2: ("sharded", "shards of one", "ddp"),
    3: ("sharded", "replicated"),
    4: ("sharded", "replicas", "replicated"),
}


def outcomes(rank: int) -> dict[str, list[str]]:
    """Of every kind, dtype and assignment on the ranks that there are."""
    size = dist.get_world_size()
    results = {}
    for kind in KINDS[size]:
        for dtype in (torch.float32, torch.bfloat16):
            for how, ranks in assignments(size).items():
                if dtype is torch.bfloat16 and how == "backwards":
                    continue
                results[f"{size} {kind} {dtype} {how}"] = outcome(kind, dtype, ranks[rank])
    return results


def test_the_same_bits_on_any_ranks_in_any_assignment(tmp_path: Path) -> None:
    results: dict[str, list[str]] = {}
    for size in KINDS:
        first, *later_ranks = run_ranks(outcomes, size, tmp_path / str(size))
        assert all(outcome == first for outcome in later_ranks)
        results |= first
    assert len(results) == 5 * 10
    for dtype in ("float32", "bfloat16"):
        of_dtype = {case: seen for case, seen in results.items() if dtype in case}
        reference = of_dtype[f"1 replicated torch.{dtype} strided"]
        assert [case for case, seen in of_dtype.items() if seen != reference] == []


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
