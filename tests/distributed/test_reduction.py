"""Gradients summed across ranks: FSDP2 with replicas and without, DDP, replicated, one process; each in every row."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from distributed.models import Leaf, gradients_of
from narrowgauge.distributed.reduction import GradientReduction
from ranks import run_ranks

KINDS = ("sharded", "replicas", "replicated", "ddp")


def placed(kind: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, nn.Module]:
    """The model of tests and what is called in its place, on the ranks of the default process group."""
    model = Leaf(dtype)
    if kind == "ddp":
        return model, nn.parallel.DistributedDataParallel(model, find_unused_parameters=True)
    if kind in ("sharded", "replicas", "shards of one"):
        size = dist.get_world_size()
        shape = {"sharded": (size,), "replicas": (2, size // 2), "shards of one": (size, 1)}[kind]
        mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicas", "shards")[-len(shape) :])
        vectors = {model.gain, model.unused}
        for layer in model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=vectors)
    return model, model


def whole(tensor: Any) -> Tensor:
    """All of a tensor that may be sharded."""
    return (tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor).clone()


def found(model: nn.Module) -> dict[str, Tensor]:
    """All gradients."""
    return {name: whole(p.grad) for name, p in model.named_parameters() if p.grad is not None}


def step(reduction: GradientReduction, model: nn.Module, leaves: list[int | None]) -> None:
    """One step of these micro-batches; ``None``: an absent one."""
    for place, leaf in enumerate(leaves):
        with reduction.micro_batch(is_last=place == len(leaves) - 1, is_absent=leaf is None):
            model(gradients_of(leaf or 0)).backward()


def expected(leaves: range) -> dict[str, Tensor]:
    return {name: sum(gradients_of(leaf)[name].double() for leaf in leaves) for name in gradients_of(0)}


def close(ours: dict[str, Tensor], theirs: dict[str, Tensor], tolerance: float) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in ours.items():
        torch.testing.assert_close(value.double(), theirs[name].double(), rtol=tolerance, atol=tolerance)


def every_kind(rank: int) -> list[dict[str, Tensor]]:
    """Five leaves on four ranks, two rounds: of each row and kind, two steps' gradients, and those without micro_batch."""
    results = []
    for name in ("native", "float32"):
        for kind in KINDS:
            model, called = placed(kind)
            reduction = ng.reduce_gradients_with(called, name, average=False)
            for _ in range(2):
                step(reduction, called, [rank, 4 if rank == 0 else None])
                results.append(found(model))
                model.zero_grad()
            called(gradients_of(rank)).backward()
            results.append(found(model))
    return results


def test_every_kind_of_model_gets_the_sum(tmp_path: Path) -> None:
    for results in run_ranks(every_kind, 4, tmp_path):
        for place, result in enumerate(results):
            close(result, expected(range(4 if place % 3 == 2 else 5)), 1e-4)


def half_precision(rank: int) -> list[list[float]]:
    """Eight gradients of 3,000 on each of four ranks, in float16: the sum of 32, in every kind and row; and their average."""
    results = []
    for kind in ("sharded", "replicas", "replicated"):
        for average in (False, True):
            for name in ("native", "float32"):
                model, called = placed(kind, torch.float16)
                reduction = ng.reduce_gradients_with(called, name, average=average)
                ones = {key: torch.full_like(value, 3000.0) for key, value in gradients_of(0).items()}
                with reduction.micro_batch():
                    called({key: 8 * value for key, value in ones.items()} if average else ones).backward()
                results.append([whole(model.head.grad)[0, 0].item(), whole(model.gain.grad)[0].item()])
    return results


def test_an_average_of_float16_gradients_that_overflow_in_sum_is_exact(tmp_path: Path) -> None:
    """Four of 24,000 are 96,000, beyond float16's 65,504; in float32 their average is 24,000 again."""
    for results in run_ranks(half_precision, 4, tmp_path):
        for native_sum, wide_sum, native, wide in zip(*[iter(results)] * 4, strict=True):
            assert native_sum == wide_sum == [12000.0, 12000.0]
            assert native == [float("inf"), 24000.0] and wide == [24000.0, 24000.0]
