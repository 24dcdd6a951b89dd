"""The law of the reproducible reduction: equal bits for any number of ranks, any assignment of micro-batches, any kind of model.

The micro-batches' gradients are given, so that nothing but the sum and the optimizer can differ. Every result is compared with
that of one process; the other reductions differ from it, so the test can fail.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowgauge as ng
from distributed.models import gradients_of
from distributed.test_reduction import found, mesh_of, placed, step, whole
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.checksums import fingerprint_all
from narrowgauge.numerics.exact_sums import ExactSums
from ranks import run_ranks
from tensors import assert_same_bits

LEAVES = 6
Assignment = list[list[int | None]]


def assignments(size: int) -> dict[str, Assignment]:
    """The micro-batches of each rank, by the name of the assignment; ranks with fewer have absent ones at the end."""
    leaves, rounds = list(range(LEAVES)), -(-LEAVES // size)
    first = max(1, LEAVES - size + 1)
    named = {
        "strided": [leaves[place::size] for place in range(size)],
        "contiguous": [leaves[place * rounds : (place + 1) * rounds] for place in range(size)],
        "backwards": [leaves[::-1][place::size] for place in range(size)],
        "uneven": [leaves[:first], *(leaves[place : place + 1] for place in range(first, first + size - 1))],
    }
    return {name: _filled(ranks) for name, ranks in named.items()}


def _filled(ranks: Sequence[Sequence[int]]) -> Assignment:
    rounds = max(map(len, ranks))
    return [[*leaves, *[None] * (rounds - len(leaves))] for leaves in ranks]


def outcome(kind: str, name: str, dtype: torch.dtype, leaves: Sequence[int | None]) -> list[str]:
    """Fingerprints of three steps' gradients, norms and weights."""
    model, called = placed(kind, dtype)
    groups = [
        {"params": [p for p in model.parameters() if p.dtype is dtype], "storage": storage}
        for dtype, storage in ((torch.float32, "float32"), (torch.bfloat16, "word"))
    ]
    groups = [group for group in groups if group["params"]]
    optimizer = ng.AdamW(groups, lr=0.1, max_grad_norm=0.5, compile=False)
    reduction = ng.reduce_gradients_with(called, name, average=False)
    seen = []
    for _ in range(3):
        step(reduction, called, leaves)
        seen.append(fingerprint_all(found(model)))
        optimizer.step()
        seen.append(fingerprint_all({key: whole(p.detach()) for key, p in model.named_parameters()}))
        optimizer.zero_grad()
    return seen


KINDS = {
    1: ("replicated", "sharded"),
    2: ("sharded", "shards of one", "ddp"),
    3: ("sharded", "replicated"),
    4: ("sharded", "replicas", "replicated"),
    8: ("replicas",),
}


def outcomes(rank: int, name: str) -> dict[str, list[str]]:
    """Of every kind, dtype and assignment on the ranks that there are."""
    size = dist.get_world_size()
    results = {}
    for kind in KINDS[size]:
        for dtype in (torch.float32, torch.bfloat16):
            for how, ranks in assignments(size).items():
                if dtype is torch.bfloat16 and how not in ("strided", "uneven"):
                    continue
                results[f"{size} {kind} {dtype} {how}"] = outcome(kind, name, dtype, ranks[rank])
    return results


def all_outcomes(name: str, sizes: Sequence[int], place: Path) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for size in sizes:
        ranks = run_ranks(outcomes, size, place / str(size), name)
        assert all(result == ranks[0] for result in ranks)
        found.update(ranks[0])
    return found


def test_the_same_bits_on_any_ranks_in_any_assignment(tmp_path: Path) -> None:
    results = all_outcomes("reproducible", (1, 2, 3, 4), tmp_path)
    assert len(results) > 30
    for dtype in ("float32", "bfloat16"):
        of_dtype = {case: seen for case, seen in results.items() if dtype in case}
        reference = of_dtype[f"1 replicated torch.{dtype} strided"]
        assert [case for case, seen in of_dtype.items() if seen != reference] == []


def test_other_reductions_give_other_bits(tmp_path: Path) -> None:
    for name in ("native", "float32"):
        results = all_outcomes(name, (1, 2), tmp_path / name)
        assert len({tuple(seen) for case, seen in results.items() if "float32" in case}) > 2


def test_the_same_bits_on_eight_ranks_two_of_which_have_nothing_to_do(tmp_path: Path) -> None:
    results = {**all_outcomes("reproducible", (1,), tmp_path / "one"), **all_outcomes("reproducible", (8,), tmp_path)}
    for dtype in ("float32", "bfloat16"):
        assert len({tuple(seen) for case, seen in results.items() if dtype in case}) == 1


POLICIES: dict[str, dict[str, Any]] = {
    "bfloat16": {"param_dtype": torch.bfloat16},
    "bfloat16, summed in float32": {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32},
    "summed in bfloat16": {"reduce_dtype": torch.bfloat16},
    "float16 that returns float32": {"param_dtype": torch.float16, "output_dtype": torch.float32},
    "inputs as they are": {"param_dtype": torch.bfloat16, "cast_forward_inputs": False},
}


def with_policies(rank: int, replicas: bool) -> dict[str, str]:
    """Weights after three steps of six micro-batches, by FSDP2's mixed precision; with ``replicas`` the shards are whole."""
    size = dist.get_world_size()
    found = {}
    for name, policy in POLICIES.items():
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 5))
        mesh = mesh_of("shards of one" if replicas else "sharded")
        for unit in (model[0], model[2], model):
            fully_shard(unit, mesh=mesh, mp_policy=MixedPrecisionPolicy(**policy))
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
        found[name] = fingerprint_all({key: whole(p.detach()) for key, p in model.named_parameters()})
    return found


def test_mixed_precision_of_fsdp_has_the_same_bits_on_one_rank_as_on_several(tmp_path: Path) -> None:
    (expected,) = run_ranks(with_policies, 1, tmp_path / "one", False)
    assert len(set(expected.values())) == len(POLICIES) - 1  # the last casts its inputs itself
    for size, replicas in ((2, False), (3, False), (2, True)):
        for result in run_ranks(with_policies, size, tmp_path / f"{size} {replicas}", replicas):
            assert result == expected


def rounded_before(rank: int) -> str:
    """A policy by which gradients are rounded before they are summed, on one rank, and after it on several."""
    model = nn.Linear(2, 2, dtype=torch.bfloat16)
    fully_shard(model, mesh=mesh_of("sharded"), mp_policy=MixedPrecisionPolicy(param_dtype=torch.float32))
    with pytest.raises(RecipeError) as caught:
        ng.reduce_gradients_with(model, "reproducible")
    ng.reduce_gradients_with(model, "float32")
    return str(caught.value)


def test_mixed_precision_that_one_rank_rounds_otherwise_is_refused(tmp_path: Path) -> None:
    for size in (1, 2):
        for message in run_ranks(rounded_before, size, tmp_path / str(size)):
            assert "rounds gradients to that before they are summed, on one rank" in message


def served(rank: int, order: list[list[int]]) -> dict[str, Tensor] | None:
    """Rank 0 sums whatever arrives, as it arrives; the others send their micro-batches in the order given."""
    shapes = {name: value.shape for name, value in gradients_of(0).items()}
    numel = sum(shape.numel() for shape in shapes.values())
    if rank > 0:
        for leaf in order[rank - 1]:
            dist.send(torch.cat([value.reshape(-1) for value in gradients_of(leaf).values()]), 0)
        return None
    sums = ExactSums(numel)
    for _ in range(sum(map(len, order))):
        arrived = torch.empty(numel)
        dist.recv(arrived)
        sums.add_(arrived)
    parts = sums.total().split([shape.numel() for shape in shapes.values()])
    return {name: part.view(shape) for (name, shape), part in zip(shapes.items(), parts, strict=True)}


def one_process(rank: int) -> dict[str, Tensor]:
    """The gradients of one step on one process."""
    model, called = placed("replicated")
    step(ng.reduce_gradients_with(called, "reproducible", average=False), called, list(range(LEAVES)))
    return found(model)


def test_a_parameter_server_that_sums_in_the_order_of_arrival_gets_the_same_bits(tmp_path: Path) -> None:
    (expected,) = run_ranks(one_process, 1, tmp_path / "one")
    rng = random.Random(0)
    for attempt in range(2):
        order = rng.sample(range(LEAVES), LEAVES)
        result = run_ranks(served, 4, tmp_path / str(attempt), [order[:1], order[1:3], order[3:]])[0]
        assert_same_bits(result, expected)


def infected(rank: int, bad: float) -> list[list[bool]]:
    """Where the gradient of the head is not finite, if one leaf's is not in one place; of FSDP2 and replicated models."""
    results = []
    for kind in ("sharded", "replicated"):
        model, called = placed(kind)
        reduction = ng.reduce_gradients_with(called, "reproducible", average=False)
        for place in range(2):
            gradients = gradients_of(rank)
            if rank == 1 and place == 0:
                gradients["head"][3, 1] = bad
            with reduction.micro_batch(is_last=place == 1):
                called(gradients).backward()
        results.append(whole(model.head.grad).isnan().flatten().tolist())
        model.zero_grad()
        with reduction.micro_batch():  # the next step is clean
            called(gradients_of(rank)).backward()
        results.append(whole(model.head.grad).isnan().flatten().tolist())
    return results


def test_a_value_that_is_not_finite_makes_its_element_nan_and_no_other(tmp_path: Path) -> None:
    for bad in (float("nan"), float("inf"), 2.0**19):
        for results in run_ranks(infected, 2, tmp_path / str(bad), bad):
            for infected_step, clean in (results[:2], results[2:]):
                assert infected_step == [place == 10 for place in range(21)] and not any(clean)
