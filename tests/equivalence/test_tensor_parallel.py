"""Tensor parallelism gives the bits of one process: every storage, by rows and by columns, saved and loaded half way.

Gradients are known and shared out: the products of two ranks add up in another order than those of one. Under sequence
parallelism each rank has a part of the gradient of a weight that all ranks have: here that of every second element.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import narrowgauge as ng
from equivalence.ways import HALF, STEPS, Training, fingerprint, load_dcp, save_dcp
from narrowgauge.spec.storages import STORAGES
from ranks import run_ranks


def start(storage: str, mesh: Any = None, seed: int = 0) -> Training:
    """Return an MLP whose first weight is split by rows and the second by columns, and its optimizer."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6)).to(
        getattr(torch, STORAGES[storage].visible)
    )
    if mesh is not None:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": SequenceParallel()}
        parallelize_module(model, mesh, plan)
    options: dict[str, Any] = {
        "max_grad_norm": 3.0,
        "audit_every": 2,
        "compile": False,
        "low_bits": "random",
    }
    return Training(model, ng.AdamW(model.named_parameters(), lr=1e-2, storage=storage, **options))


def shared_out(gradient: Tensor, p: DTensor) -> DTensor:
    """Return a rank's part of a gradient: of a weight that all ranks have, a part of the sum."""
    if not p.placements[0].is_replicate():
        return distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
    is_here = torch.arange(gradient.numel()).view(gradient.shape) % 2 == dist.get_rank()
    return DTensor.from_local(torch.where(is_here, gradient, 0), p.device_mesh, [Partial()])


def train(training: Training, steps: Iterable[int], *, accumulates: bool = False) -> Training:
    """Take steps whose gradients are a thousand times larger in the last columns, which the last rank has."""
    accumulator = ng.GradientAccumulator(training.model.parameters())
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for p in training.model.parameters():
            gradient = torch.randn(p.shape, generator=generator) * torch.logspace(
                -2, 1, p.shape[-1]
            )
            p.grad = gradient.to(p.dtype)
            if isinstance(p, DTensor):
                p.grad = shared_out(p.grad, p)
        if accumulates:
            accumulator.finish()
        training.optimizer.step()
    return training


def on_a_rank(rank: int, folder: Path) -> dict[str, dict[str, str]]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fingerprints = {}
    for storage in STORAGES:
        training = train(start(storage, mesh), range(HALF))
        save_dcp(training, folder / storage)
        resumed = load_dcp(train(start(storage, mesh, seed=1), range(50, 51)), folder / storage)
        fingerprints[storage] = fingerprint(train(resumed, range(HALF, STEPS), accumulates=True))
    return fingerprints


def test_two_tensor_parallel_ranks(tmp_path: Path) -> None:
    whole = {storage: fingerprint(train(start(storage), range(STEPS))) for storage in STORAGES}
    for result in run_ranks(on_a_rank, 2, tmp_path, tmp_path):
        assert [storage for storage in STORAGES if result[storage] != whole[storage]] == []
