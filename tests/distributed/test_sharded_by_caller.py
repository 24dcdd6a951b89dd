"""Models that the caller has sharded with ``fully_shard``: parameters that are replaced later are
summed too, and others refused in one clear line. tests/equivalence has the bits.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

import narrowgauge as ng
from distributed.models import full_tensor_of, mesh_of
from narrowgauge.errors import RecipeError
from ranks import run_ranks
from tensors import random_tokens

LEAVES = 5


class Net(nn.Module):
    """Two blocks of odd sizes between a tied embedding and head, with a frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(11, 6)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 6)) for _ in range(2)
        )
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.gain = nn.Parameter(torch.linspace(0.5, 1.5, 6))
        self.head = nn.Linear(6, 11, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + block(x)
        x = x.to(self.frozen.weight.dtype)
        return self.head(self.frozen(x) * self.gain).float()  # type: ignore[no-any-return]


def loss_of(model: nn.Module, leaf: int) -> Tensor:
    tokens = random_tokens(2, 5, 11, seed=leaf)
    return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()) / LEAVES


def sharded(is_trained: bool = False) -> Net:
    """Return a model that the caller has sharded, and perhaps used."""
    model = Net()
    mesh = mesh_of("sharded")
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    if is_trained:
        loss_of(model, 0).backward()
        model.zero_grad()
    return model


def refusal_of(attempt: Callable[[], object]) -> str:
    with pytest.raises(RecipeError) as error:
        attempt()
    return str(error.value)


def summed(model: Net) -> dict[str, Tensor]:
    """Gradients of one micro-batch a rank, added up over the ranks, of what is trained."""
    with ng.reduce_gradients_with(model, "reproducible", average=False).micro_batch():
        loss_of(model, dist.get_rank()).backward()
    gradients: dict[str, Any] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            gradients[name] = p.grad
    return {name: full_tensor_of(gradient) for name, gradient in gradients.items()}


def sums_and_refusals(rank: int) -> tuple[list[dict[str, Tensor]], dict[str, str]]:
    sums = []
    lines = {}
    for is_trained in (False, True):
        for replaced in (False, True):
            model = sharded(is_trained)
            if replaced:  # as load_state_dict(assign=True) does
                value = Net().embedding.weight.detach()
                model.embedding.weight = nn.Parameter(
                    distribute_tensor(value, mesh_of("sharded"), [Shard(0)])
                )  # type: ignore[assignment]
                model.head.weight = model.embedding.weight
            sums.append(summed(model))
    model = Net()
    reduction = ng.reduce_gradients_with(model)
    fully_shard(model, mesh=mesh_of("sharded"))
    lines["sharded later"] = refusal_of(lambda: reduction.micro_batch().__enter__())
    model = sharded()
    model.extra = nn.Parameter(distribute_tensor(torch.ones(4), mesh_of("sharded"), [Shard(0)]))
    lines["not FSDP2's"] = refusal_of(lambda: ng.reduce_gradients_with(model))
    return sums, lines


def test_what_fsdp_gathers_is_summed_and_stepped_or_refused(tmp_path: Path) -> None:
    """Once parameters that FSDP2 did not know yet were taken for whole ones, shards of different
    elements were added up.
    """
    model = Net()
    for leaf in range(2):
        loss_of(model, leaf).backward()
    expected = {}
    for name, p in model.named_parameters():
        if p.grad is not None:
            expected[name] = p.grad
    for sums, lines in run_ranks(sums_and_refusals, 2, tmp_path):
        for gradients in sums:
            torch.testing.assert_close(gradients, expected)
        assert "because the model was sharded" in lines["sharded later"]
        assert "'extra' is a DTensor" in lines["not FSDP2's"]
