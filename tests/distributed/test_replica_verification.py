"""Silent corruption: one flipped bit on one rank, in a weight or a moment, is found within k steps and named."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from narrowgauge.distributed.reduction import reduce_gradients_with
from narrowgauge.distributed.replica_verification import verify_replicas
from narrowgauge.errors import CorruptionError
from narrowgauge.optim.loading import kept_tensors
from ranks import run_ranks

EVERY, STEPS = 4, 13
Found = tuple[int, str, int | None, str | None] | None
"""The step in which it was found, the message, the rank and the tensor; ``None`` where nothing was."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)
        self.gain = nn.Parameter(torch.ones(16))

    def forward(self, x: Tensor) -> Tensor:
        return self.third(self.second(self.first(x).tanh() * self.gain).tanh())


def build(sharding: str, size: int) -> tuple[Net, ng.Optimizer, Any]:
    torch.manual_seed(0)
    model = Net()
    if sharding != "replicated":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("replicate", "shard"))
        for layer in (model.first, model.second):
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.gain})
    reduction = reduce_gradients_with(model, "float32")
    optimizer = ng.AdamW(model.named_parameters(), lr=1e-2, storage="float32", audit_every=0, compile=False)
    return model, optimizer, reduction


def flip(optimizer: ng.Optimizer, name: str, bit: int) -> None:
    """Flip a bit as a fault does: no version counter sees it."""
    tensor = next(tensor for known, tensor, _ in kept_tensors(optimizer) if known == name)
    tensor.data.view(-1).view(torch.int32)[2] ^= 1 << bit


def train(rank: int, sharding: str, size: int, bad: int, what: str, at: int, bit: int) -> Found:
    """Train, and flip a bit of a tensor on rank ``bad`` after step ``at``."""
    model, optimizer, reduction = build(sharding, size)
    for step in range(1, STEPS + 1):
        try:
            if step % EVERY == 0:
                verify_replicas(kept_tensors(optimizer), step - 1)
        except CorruptionError as error:
            return step, error.message, error.rank, error.tensor
        with reduction.micro_batch(is_last=True):
            inputs = torch.randn(4, 8, generator=torch.Generator().manual_seed(100 * step + rank))
            model(inputs).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == bad and step == at:
            flip(optimizer, what, bit)
    return None


def found_by_all(place: Path, sharding: str, size: int, *fault: Any) -> Any:
    results = run_ranks(train, size, place, sharding, size, *fault)
    assert all(result == results[0] for result in results)
    return results[0]


def test_of_two_replicas_that_differ_neither_is_accused(tmp_path: Path) -> None:
    step, message, rank, tensor = found_by_all(tmp_path, "replicated", 2, 1, "second.weight", 2, 3)
    assert (step, rank, tensor) == (EVERY, None, "second.weight") and "between rank 0 and rank 1" in message


def test_replicas_of_a_shard_are_compared(tmp_path: Path) -> None:
    step, message, rank, tensor = found_by_all(tmp_path, "hybrid", 4, 3, "second.weight", 2, 30)
    assert (step, rank, tensor) == (EVERY, None, "second.weight")
    assert "between rank 1 and rank 3" in message


def test_of_three_ranks_the_one_that_differs_is_named(tmp_path: Path) -> None:
    step, message, rank, tensor = found_by_all(tmp_path, "replicated", 3, 2, "second.weight", 2, 3)
    assert (step, rank, tensor) == (EVERY, 2, "second.weight") and "2 other ranks" in message
