"""Models that the caller has sharded with ``fully_shard``: the bits of ``prepare(mesh=…)`` and of one process, or one clear line.

Rows that no number of ranks divides, several groups, tied, frozen and whole parameters; before and after the first forward pass.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.distributed import sharding
from narrowgauge.errors import RecipeError
from ranks import run_ranks

LEAVES = 6


class Net(nn.Module):
    """Two blocks of odd sizes between a tied embedding and head, with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)) for _ in range(2))
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.frozen(x) * self.gain).float()  # type: ignore[no-any-return]


def tokens_of(leaf: int) -> Tensor:
    return torch.randint(0, 11, (2, 5), generator=torch.Generator().manual_seed(leaf))


def loss_of(model: nn.Module, leaf: int) -> Tensor:
    tokens = tokens_of(leaf)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / LEAVES


def mesh_of(kind: str) -> Any:
    size = dist.get_world_size()
    shape = {"line": (size,), "replicas": (2, size // 2), "shards of one": (size, 1)}[kind]
    return init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])


def sharded(kind: str, how: str = "") -> Net:
    """A model that the caller has sharded, and perhaps used, as ``how`` says."""
    model, mesh = Net(), mesh_of(kind)
    options: dict[str, Any] = {"offload_policy": CPUOffloadPolicy(pin_memory=False)} if how == "offloaded" else {}
    ignored = {model.gain} if how == "whole" else None
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, ignored_params=ignored, **options)
    if how == "evaluated":
        with torch.no_grad():
            model(tokens_of(0))
    elif how == "run":
        model(tokens_of(0))
    elif how == "trained":
        loss_of(model, 0).backward()
        model.zero_grad()
    return model


def prepared(recipe: str, place: str, how: str = "") -> tuple[nn.Module, ng.AdamW]:
    """A model on the ranks there are: ``place`` is ``"one"``, a kind of mesh, or one with ``"mesh "`` before it."""
    options: dict[str, Any] = {"lr": 1e-2, "compile": False, "average": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if place == "one":
            return ng.prepare(Net(), recipe, **options)
        if place.startswith("mesh "):
            return ng.prepare(Net(), recipe, mesh=mesh_of(place.removeprefix("mesh ")), **options)
        return ng.prepare(sharded(place, how), recipe, **options)


def learn(model: nn.Module, optimizer: ng.AdamW) -> list[str]:
    """Norms of three steps of six micro-batches, and the weights in the end."""
    rank, size = dist.get_rank(), dist.get_world_size()
    rounds, seen = -(-LEAVES // size), []
    for step in range(3):
        for turn in range(rounds):
            leaf = turn * size + rank
            absent = leaf >= LEAVES
            reduction = optimizer.reduction
            with reduction.micro_batch(is_last=turn == rounds - 1, is_absent=absent):
                loss_of(model, 100 * step + (0 if absent else leaf)).backward()
        optimizer.step()
        seen.append(float(optimizer.grad_norm).hex())  # type: ignore[arg-type]
        optimizer.zero_grad()
    stored = {name: optimizer.stored(p) for name, p in model.named_parameters() if p.requires_grad}
    frozen = {name: p.detach().float() for name, p in model.named_parameters() if not p.requires_grad}
    return [*seen, sharding.fingerprint_whole({**stored, **frozen})]


PLACES = {1: ("line",), 2: ("line", "shards of one"), 3: ("line",), 4: ("replicas",)}
HOWS = ("", "evaluated", "run", "trained", "whole", "offloaded")


def learned(rank: int, recipe: str) -> dict[str, list[str]]:
    """Of every way in which a caller shards, and of ``prepare(mesh=…)``."""
    torch.set_num_threads(1)
    found = {}
    for place in PLACES[dist.get_world_size()]:
        found |= {f"{place} {how}": learn(*prepared(recipe, place, how)) for how in HOWS}
        found[f"mesh {place}"] = learn(*prepared(recipe, f"mesh {place}"))
    return found


def alone(rank: int, recipe: str) -> list[str]:
    torch.set_num_threads(1)
    return learn(*prepared(recipe, "one"))


@pytest.mark.parametrize("recipe", ["bfloat16/word/reproducible", "float32/float32/reproducible"])
def test_the_caller_s_shards_have_the_bits_of_one_process(recipe: str, tmp_path: Path) -> None:
    expected = run_ranks(alone, 1, tmp_path / "one", recipe)[0]
    for size in PLACES:
        for found in run_ranks(learned, size, tmp_path / str(size), recipe):
            assert [case for case, seen in found.items() if seen != expected] == []


@pytest.mark.parametrize("reduction", ["native", "float32", "compressed8"])
def test_the_caller_s_shards_have_the_bits_of_a_mesh(reduction: str, tmp_path: Path) -> None:
    """Sums of floats depend on what is summed together: here the same groups, but for what stays whole."""
    for size in PLACES:
        for found in run_ranks(learned, size, tmp_path / str(size), f"bfloat16/word/{reduction}"):
            for place in PLACES[size]:
                same = {case: seen for case, seen in found.items() if place in case and "whole" not in case}
                assert [case for case, seen in same.items() if seen != found[f"mesh {place}"]] == []
