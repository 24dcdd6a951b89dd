"""Checkpoints of many ranks: the same bits on two ranks, three and one, from and to the files of a single process."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import narrowgauge as ng
from narrowgauge.checkpoints.ranks import Ranks
from narrowgauge.checkpoints.reading import saved_tensors
from narrowgauge.spec.storages import STORAGES
from narrowgauge.trainer.checkpoint import latest_checkpoint
from narrowgauge.trainer.saving import Saver
from narrowgauge.trainer.state_tensors import give_back, load_tensors, state_tensors
from ranks import run_ranks
from tensors import assert_same_bits

# Rows over two ranks and over three: even, uneven, and fewer rows than ranks.
SHAPES = {"even": (12, 6), "uneven": (7, 6), "lone": (1, 8), "gain": (10,), "deep": (3, 4, 2)}
# One word; scales by row; an expansion; 16-bit tails; a rule whose momentum needs the whole matrix, one with a subspace.
CASES = ("AdamW word", "AdamW compact", "AdamW collage-plus", "AdamW exact", "Muon word", "GaLore exact")
FIRST, SECOND, LAST = range(3), range(3, 5), range(5, 7)


def start(case: str, mesh: Any = None) -> tuple[nn.Module, ng.Optimizer]:
    """A fresh model and its optimizer; its rows shared out where there is a mesh."""
    rule, storage = case.split()
    model, generator = nn.Module(), torch.Generator().manual_seed(0)
    dtype = getattr(torch, STORAGES[storage].visible)
    for name, shape in SHAPES.items():
        model.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"lr": 0.05, "max_grad_norm": 3.0, "compile": False}
    if rule == "GaLore":
        options |= {"rank": 2, "update_proj_gap": 2}
    return model, getattr(ng, rule)(model.named_parameters(), storage=storage, **options)


def take_steps(model: nn.Module, optimizer: ng.Optimizer, steps: range) -> None:
    """Steps with known gradients."""
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for _, p in model.named_parameters():
            gradient = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
            if isinstance(p, DTensor):
                gradient = distribute_tensor(gradient, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = gradient
        optimizer.step()


def restored(case: str, folder: Path, mesh: Any = None, ranks: Ranks = Ranks()) -> tuple[nn.Module, ng.Optimizer]:  # noqa: B008
    """A fresh model with the newest checkpoint of a folder."""
    model, optimizer = start(case, mesh)
    checkpoint = latest_checkpoint(folder, must_not_be_called, ranks)
    assert checkpoint is not None
    tensors = load_tensors(checkpoint.path, saved_tensors(checkpoint.path), model.named_parameters(), optimizer)
    give_back(tensors, model.named_parameters(), optimizer)
    return model, optimizer


def must_not_be_called(path: Path, why: str) -> None:
    raise AssertionError(f"{path}: {why}")


def everything(model: nn.Module, optimizer: ng.Optimizer) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds; on ranks, 16-bit integers are 32-bit ones there."""
    tensors = {name: value.detach() for name, value in state_tensors(model.named_parameters(), optimizer).items()}
    return {name: value.int() if value.dtype is torch.int16 else value for name, value in tensors.items()}


# ── what ranks do ───────────────────────────────────────────────────────────────────────────────────────────────────


def go_on(rank: int, source: Path, out: Path, first: range, steps: range) -> None:
    """Load every case from ``source`` where there is one, take steps, and save under ``out`` while more steps are taken."""
    size = dist.get_world_size()
    mesh, ranks = init_device_mesh("cpu", (size,)), Ranks(rank, size, dist.new_group(backend="gloo"))
    for case in CASES:
        model, optimizer = restored(case, source / case, mesh, ranks) if source != out else start(case, mesh)
        take_steps(model, optimizer, steps)
        saver = Saver(out / case, ranks)
        saver.save(steps.stop, state_tensors(model.named_parameters(), optimizer), {"step": steps.stop})
        # Beside the writing: what is saved has the bits of its step.
        take_steps(model, optimizer, range(90, 92))
        saver.wait()


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks take the first steps, three go on from them, and in the end one process is ahead of both."""
    place = tmp_path_factory.mktemp("sharded")
    run_ranks(go_on, 2, place / "two", place / "2", place / "2", FIRST, FIRST)
    run_ranks(go_on, 3, place / "three", place / "2", place / "3", FIRST, SECOND)
    return place


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_then_three_then_one_have_the_bits_of_one(case: str, place: Path) -> None:
    expected = start(case)
    for folder, steps in (("2", FIRST), ("3", SECOND)):
        take_steps(*expected, steps)
        assert_same_bits(everything(*restored(case, place / folder / case)), everything(*expected))
    model, optimizer = restored(case, place / "3" / case)
    take_steps(model, optimizer, LAST)
    take_steps(*expected, LAST)
    assert_same_bits(everything(model, optimizer), everything(*expected))
