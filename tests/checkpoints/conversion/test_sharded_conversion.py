"""A converted state in a sharded model: every rank its part of what one process or many wrote."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import narrowgauge as ng
from ranks import run_ranks
from tensors import assert_same_bits


def model_of(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 7), nn.GELU(), nn.Linear(7, 5, bias=False))


def values(model: nn.Module, optimizer: ng.Optimizer) -> dict[str, torch.Tensor]:
    """Stored weights and moments, whole."""
    names = optimizer.parameter_names()
    found = {
        f"{name} {kind}": optimizer.stored(p, kind)
        for p, name in names.items()
        for kind in ("weight", "exp_avg", "exp_avg_sq")
    }
    return {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in found.items()}


def restore_shards(rank: int, folder: Path, recipe: str) -> dict[str, torch.Tensor]:
    """Restore into a model that is sharded over all ranks."""
    model, mesh = model_of(1), init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    prepared, optimizer = ng.prepare(model, recipe, mesh=mesh, compile=False)
    assert ng.restore(folder, prepared, optimizer) == 3
    return values(prepared, optimizer)


@pytest.mark.parametrize("recipe", ["bfloat16/word", "bfloat16/compact"])
def test_every_rank_takes_its_part(recipe: str, tmp_path: Path) -> None:
    model, optimizer = ng.prepare(model_of(0), "bfloat16/exact", compile=False)
    for step in range(3):
        model(
            torch.randn(4, 6, generator=torch.Generator().manual_seed(step)).bfloat16()
        ).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "mine.pt")
    ng.convert(tmp_path / "mine.pt", recipe, tmp_path / "converted")
    again, single = ng.prepare(model_of(1), recipe, compile=False)
    assert ng.restore(tmp_path / "converted", again, single) == 3
    for found in run_ranks(restore_shards, 2, tmp_path / "ranks", tmp_path / "converted", recipe):
        assert_same_bits(found, values(again, single))
