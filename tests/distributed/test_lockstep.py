"""Micro-batches that use different layers, which FSDP2 shards one by one: refused on all ranks at once, or summed exactly."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.numerics.checksums import fingerprint_all
from ranks import run_ranks

LEAVES, LAYERS = 6, 4
HAS_ZEROS = hasattr(FSDPModule, "set_reduce_scatter_unused_params")


class Chosen(nn.Module):
    """Residual layers of which a micro-batch uses some: left out, times 0, or whole on every rank.

    Args:
        how: ``"left out"``, ``"times 0"`` or ``"whole"``.
        equal: whether all layers have the same size.
    """

    def __init__(self, how: str = "left out", equal: bool = True) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.how = how
        self.first = nn.Linear(8, 8)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(8, wide), nn.Tanh(), nn.Linear(wide, 8))
            for wide in (8 if equal else 8 + 4 * k for k in range(LAYERS))
        )
        self.head = nn.Linear(8, 2)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        kept = set(self.layers.parameters()) if how == "whole" else set()
        for layer in self.layers if how != "whole" else ():
            fully_shard(layer, mesh=mesh)
        fully_shard(self, mesh=mesh, ignored_params=kept)

    def forward(self, x: Tensor, used: set[int]) -> Tensor:
        x = self.first(x)
        for k, layer in enumerate(self.layers):
            if k in used:
                x = x + layer(x)
            elif self.how == "times 0":
                x = x + 0.0 * layer(x)
        return self.head(x)


def used_by(number: int) -> set[int]:
    """One layer, or two."""
    return {number % LAYERS, (number + number % 2) % LAYERS}


def trained(model: Chosen, by_rank: bool) -> str:
    """Two steps of the leaves, shared out over the ranks; each uses layers by its own number, or by its turn."""
    rank, size = dist.get_rank(), dist.get_world_size()
    reduction = ng.reduce_gradients_with(model, "reproducible", average=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    rounds = -(-LEAVES // size)
    for _ in range(2):
        for turn in range(rounds):
            leaf = rank + turn * size
            is_absent = leaf >= LEAVES
            leaf = rank if is_absent else leaf
            with reduction.micro_batch(is_last=turn == rounds - 1, is_absent=is_absent):
                model(torch.full((1, 8), leaf + 1.0), used_by(leaf if by_rank else turn)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole = {n: p.full_tensor() if hasattr(p, "full_tensor") else p for n, p in model.named_parameters()}
    return fingerprint_all({name: value.detach() for name, value in whole.items()})


def choose(rank: int) -> tuple[list[str], list[str]]:
    """What is refused of layers that are left out; and the weights where the advice was followed, in both ways."""
    refused = []
    for equal in (True, False):
        model = Chosen(equal=equal)
        if equal and HAS_ZEROS:
            model.set_reduce_scatter_unused_params(True)
        try:
            trained(model, by_rank=True)
        except RecipeError as error:
            refused.append(str(error))
    return refused, [trained(Chosen(how), by_rank=True) for how in ("times 0", "whole")]


def test_ranks_that_use_other_layers_are_refused_at_once_and_the_advice_is_right(tmp_path: Path) -> None:
    (_, expected), *_ = run_ranks(choose, 1, tmp_path / "1", timeout_seconds=60)
    for size in (2, 3, 5):
        for refused, weights in run_ranks(choose, size, tmp_path / str(size), timeout_seconds=60):
            assert len(refused) == 2
            for message in refused:
                assert message.startswith(
                    "rank 1 was about to gather 'layers.1' while rank 0 was about to gather 'layers.0'"
                )
                assert "times 0 where one leaves them out" in message and "ignored_params=" in message
            assert weights == expected


def take_turns(rank: int) -> tuple[list[str], list[str]]:
    """All ranks use the same layers, other ones in each turn: what is refused, and the weights with zeros sent and whole."""
    refused = []
    try:
        trained(Chosen(), by_rank=False)
    except RecipeError as error:
        refused.append(str(error))
    weights = []
    for how in ("left out", "whole"):
        model = Chosen(how)
        model.set_reduce_scatter_unused_params(True)
        weights.append(trained(model, by_rank=False))
    return refused, weights


@pytest.mark.skipif(not HAS_ZEROS, reason="this PyTorch cannot send zeros for unused parameters")
def test_layers_that_take_turns_on_all_ranks_are_refused_or_send_zeros(tmp_path: Path) -> None:
    for size in (2, 3):
        for refused, (zeros, whole) in run_ranks(take_turns, size, tmp_path / str(size), timeout_seconds=60):
            assert (
                len(refused) == 1 and "had gradients in one micro-batch of this step and not in another" in refused[0]
            )
            assert zeros == whole


def drop(rank: int, first: int) -> str:
    """All ranks use all layers, but for one rank in its micro-batch ``first``; where that is the last, without micro_batch."""
    model = Chosen()
    everything = set(range(LAYERS))
    reduction = ng.reduce_gradients_with(model, "reproducible", average=False)
    with pytest.raises(RecipeError) as caught:
        for turn in range(3):
            used = everything - ({LAYERS - 1} if (rank, turn) == (1, first) else set())
            if first == 1:
                with reduction.micro_batch(is_last=turn == 2):
                    model(torch.ones(1, 8), used).sum().backward()
            else:
                model(torch.ones(1, 8), used).sum().backward()
                model.zero_grad()
    return str(caught.value)


def test_a_layer_that_one_rank_drops_later_on_is_refused_on_all(tmp_path: Path) -> None:
    for first in (1, 2):
        for message in run_ranks(drop, 2, tmp_path / str(first), first, timeout_seconds=60):
            assert "gather 'layers.3'" in message and "while rank 0" in message


def unequal(rank: int) -> str:
    """One rank has a micro-batch more in its step."""
    model = Chosen("times 0")
    reduction = ng.reduce_gradients_with(model, "reproducible", average=False)
    with pytest.raises(RecipeError) as caught:
        for turn in range(2 + rank):
            with reduction.micro_batch(is_last=turn == 1 + rank):
                model(torch.ones(1, 8), {0}).sum().backward()
    return str(caught.value)


def test_ranks_with_unequally_many_micro_batches_are_refused(tmp_path: Path) -> None:
    for message in run_ranks(unequal, 2, tmp_path, timeout_seconds=60):
        assert message.startswith("rank 1 was about to end a micro-batch while rank 0 was about to end a step")


def evaluate_alone(rank: int) -> float:
    """Replicas of a sharded model evaluate as many batches as they have, between steps."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 2))
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    reduction = ng.reduce_gradients_with(model, "reproducible", average=False)
    for _ in range(2):
        with reduction.micro_batch():
            model(torch.ones(1, 8)).sum().backward()
        model.zero_grad()
        with torch.no_grad():
            for _ in range(rank // 2):
                model(torch.ones(1, 8))
    return float(model(torch.ones(1, 8)).sum())


def test_evaluating_is_nobody_elses_business(tmp_path: Path) -> None:
    assert len(set(run_ranks(evaluate_alone, 4, tmp_path, timeout_seconds=60))) == 1
