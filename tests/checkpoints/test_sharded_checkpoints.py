"""Checkpoints of many ranks: the same bits on two ranks, three and one, from and to the files of a single process."""

from __future__ import annotations

import errno
import os
import re
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.checkpoints import dcp_files, saving
from narrowgauge.checkpoints.saving import Checkpoint, Saver, latest_checkpoint
from narrowgauge.checkpoints.state_tensors import load_tensors, restore_tensors, state_tensors
from narrowgauge.distributed.ranks import ALONE, Ranks, all_ranks
from narrowgauge.errors import RecordError
from narrowgauge.optim import optimizers
from narrowgauge.spec.storages import STORAGES
from ranks import run_ranks
from tensors import assert_same_bits

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")

# Rows over two ranks and over three: even, uneven, and fewer rows than ranks.
SHAPES = {"even": (12, 6), "uneven": (7, 6), "lone": (1, 8), "gain": (10,), "deep": (3, 4, 2)}
# Scales by row; a rule whose momentum needs the whole matrix.
CASES = ("AdamW compact", "Muon word")
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
    return model, getattr(optimizers, rule)(model.named_parameters(), storage=storage, **options)


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


def restored(case: str, folder: Path, mesh: Any = None, ranks: Ranks = ALONE) -> tuple[nn.Module, ng.Optimizer]:
    """A fresh model with the newest checkpoint of a folder."""
    model, optimizer = start(case, mesh)
    checkpoint = latest_checkpoint(folder, must_not_be_called, ranks)
    assert checkpoint is not None
    tensors = load_tensors(checkpoint.path, model.named_parameters(), optimizer)
    restore_tensors(tensors, model.named_parameters(), optimizer)
    return model, optimizer


def must_not_be_called(path: Path, why: str) -> None:
    raise AssertionError(f"{path}: {why}")


def everything(model: nn.Module, optimizer: ng.Optimizer) -> dict[str, torch.Tensor]:
    """All that a checkpoint holds; on ranks, 16-bit integers are 32-bit ones there."""
    tensors = {name: value.detach() for name, value in state_tensors(model.named_parameters(), optimizer).items()}
    return {name: value.int() if value.dtype is torch.int16 else value for name, value in tensors.items()}


# ── what ranks do ───────────────────────────────────────────────────────────────────────────────────────────────────


def meet() -> tuple[Any, Ranks]:
    """The mesh of all ranks, and the ranks with a group of their own."""
    return init_device_mesh("cpu", (dist.get_world_size(),)), all_ranks().apart()


def go_on(rank: int, source: Path, out: Path, steps: range) -> None:
    """Load every case from ``source`` unless the steps are the first, take them, and save under ``out``.

    More steps are taken before a byte is written: what is saved has the bits of its step.
    """
    mesh, ranks = meet()
    may_write, write = threading.Event(), dcp_files.write

    def write_later(*arguments: Any) -> Any:
        assert may_write.wait(60)
        return write(*arguments)

    dcp_files.write = write_later
    for case in CASES:
        model, optimizer = start(case, mesh) if steps == FIRST else restored(case, source / case, mesh, ranks)
        take_steps(model, optimizer, steps)
        saver = Saver(out / case, ranks)
        may_write.clear()
        saver.save(steps.stop, state_tensors(model.named_parameters(), optimizer), {"step": steps.stop})
        take_steps(model, optimizer, range(90, 92))
        may_write.set()
        saver.wait()


def save_with_a_full_disk(rank: int, folder: Path, full: str) -> tuple[str, int, float]:
    """Save step 1; a disk is full at step 2: the second rank's, or the first's when it writes the index."""
    mesh, ranks = meet()
    saver = Saver(folder, ranks)
    values = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)], src_data_rank=None)
    saver.save(1, {"w": values, "plain": torch.ones(2)}, {"n": 1}, keep=1)
    saver.wait()

    def refuse(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if rank == ("first", "second").index(full):
        if full == "second":
            dcp_files._Writer.write_data = refuse  # type: ignore[method-assign]
        else:
            saving._publish = refuse
    saver.save(2, {"w": values + 1, "plain": torch.ones(2)}, {"n": 2}, keep=1)
    with pytest.raises(RecordError) as caught:
        saver.wait()
    checkpoint = latest_checkpoint(folder, must_not_be_called, ranks)
    assert checkpoint is not None
    return caught.value.message, checkpoint.step, float(checkpoint.tensors()["w"].sum())


def save_replicas(rank: int, folder: Path) -> None:
    """Two replicas of two shards each, and a vector that no mesh knows."""
    mesh, ranks = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard")), all_ranks().apart()
    placed = distribute_tensor(torch.arange(14.0).view(7, 2), mesh, [Replicate(), Shard(0)], src_data_rank=None)
    saver = Saver(folder, ranks)
    saver.save(1, {"w": placed, "plain": torch.ones(2), "number": torch.tensor(3)}, {})
    saver.wait()


def find_the_newest(rank: int, folder: Path) -> tuple[int, list[str]]:
    """The step of the checkpoint that this rank would load, and what it was told of newer ones."""
    told: list[str] = []
    checkpoint = latest_checkpoint(folder, lambda path, why: told.append(f"{path.name}: {why}"), meet()[1])
    assert checkpoint is not None
    return checkpoint.step, told


# ── what is found ───────────────────────────────────────────────────────────────────────────────────────────────────


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two ranks take the first steps, three go on from them; and two go on from what one process saved."""
    place = tmp_path_factory.mktemp("sharded")
    run_ranks(go_on, 2, place / "two", place, place / "2", FIRST)
    run_ranks(go_on, 3, place / "three", place / "2", place / "3", SECOND)
    for case in CASES:
        model, optimizer = start(case)
        take_steps(model, optimizer, FIRST)
        saver = Saver(place / "1" / case)
        saver.save(FIRST.stop, state_tensors(model.named_parameters(), optimizer), {})
        saver.close()
    run_ranks(go_on, 2, place / "again", place / "1", place / "1 to 2", SECOND)
    return place


@pytest.mark.parametrize("case", CASES)
def test_two_ranks_then_three_then_one_have_the_bits_of_one(case: str, place: Path) -> None:
    expected = start(case)
    for folder, steps in (("2", FIRST), ("3", SECOND), ("1 to 2", range(0))):
        take_steps(*expected, steps)
        assert_same_bits(everything(*restored(case, place / folder / case)), everything(*expected))
    model, optimizer = restored(case, place / "3" / case)
    take_steps(model, optimizer, LAST)
    take_steps(*expected, LAST)
    assert_same_bits(everything(model, optimizer), everything(*expected))


@pytest.mark.parametrize(("full", "rank"), [("second", 1), ("first", 0)])
def test_a_full_disk_on_one_rank_is_told_on_all_and_keeps_the_older_checkpoint(
    full: str, rank: int, tmp_path: Path
) -> None:
    results = run_ranks(save_with_a_full_disk, 2, tmp_path / "ranks", tmp_path / "run", full)
    for message, step, total in results:
        assert re.search(rf"step-00000002: the disk is full \([\d,]+ bytes free\) \(rank {rank}\)\.$", message)
        assert (step, total) == (1, 45.0)
    assert sorted(os.listdir(tmp_path / "run" / "checkpoints")) == ["step-00000001"]


def test_replicas_are_written_once(tmp_path: Path) -> None:
    run_ranks(save_replicas, 4, tmp_path / "ranks", tmp_path / "run")
    folder = tmp_path / "run" / "checkpoints" / "step-00000001"
    expected = {"w": torch.arange(14.0).view(7, 2), "plain": torch.ones(2), "number": torch.tensor(3)}
    assert_same_bits(Checkpoint(folder, 1).tensors(), expected)
    held = [name for file in folder.glob("*.safetensors") for name in load_file(file)]
    assert sorted(held) == ["number", "plain", "w", "w"]


def test_all_ranks_go_back_to_the_same_checkpoint(place: Path, tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    shutil.copytree(place / "2" / CASES[0] / "checkpoints", checkpoints)
    shutil.copytree(place / "3" / CASES[0] / "checkpoints" / "step-00000005", checkpoints / "step-00000005")
    file = checkpoints / "step-00000005" / "shard-00002-model-00001-of-00001.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    told = f"step-00000005: {file.name} does not match its checksum"
    assert run_ranks(find_the_newest, 2, tmp_path / "ranks", tmp_path / "run") == [(3, [told])] * 2
