"""Checkpoints of many ranks: every replica once, and after a fault on one rank all go back to the
same one.

That runs go on on other numbers of ranks with the same bits is held by ``equivalence/`` and
``trainer/test_resume_elsewhere.py``.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import narrowgauge as ng
from checkpoints.test_saving import flip_a_bit, names
from checkpoints.test_saving import full as full_disk
from narrowgauge.checkpoints import dcp_files, saving
from narrowgauge.checkpoints.saving import Saver, latest_checkpoint
from narrowgauge.checkpoints.state_tensors import load_states, state_tensors
from narrowgauge.distributed.ranks import Ranks, all_ranks
from narrowgauge.errors import RecordError
from narrowgauge.numerics.dtensor import local_of
from ranks import run_ranks
from tensors import assert_same_bits, tensors_in

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


def meet() -> tuple[Any, Ranks]:
    """The mesh of all ranks, and the ranks with a group of their own."""
    return init_device_mesh("cpu", (dist.get_world_size(),)), all_ranks().apart()


def save_with_a_full_disk(rank: int, folder: Path, full: str) -> tuple[str, int, float]:
    """Save step 1; a disk is full at step 2: the second rank's, or the first's when it writes the
    index.
    """
    mesh, ranks = meet()
    saver = Saver(folder, ranks)
    values = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)], src_data_rank=None)
    saver.save(1, {"w": values, "plain": torch.ones(2)}, {"n": 1}, keep=1)
    saver.wait()

    if rank == ("first", "second").index(full):
        if full == "second":
            dcp_files.HuggingFaceStorageWriter.write_data = full_disk  # type: ignore[method-assign]
        else:
            saving._publish = full_disk
    saver.save(2, {"w": values + 1, "plain": torch.ones(2)}, {"n": 2}, keep=1)
    with pytest.raises(RecordError) as caught:
        saver.wait()
    checkpoint, damaged = latest_checkpoint(folder, ranks)
    assert not damaged
    return caught.value.message, checkpoint.step, float(tensors_in(checkpoint.path)["w"].sum())


def save_without_a_shared_disk(rank: int, folder: Path) -> str:
    mesh, ranks = meet()
    saver = Saver(folder / str(rank), ranks)
    values = distribute_tensor(torch.arange(10.0), mesh, [Shard(0)], src_data_rank=None)
    saver.save(1, {"w": values}, {})
    with pytest.raises(RecordError) as caught:
        saver.wait()
    return caught.value.message


def test_half_a_checkpoint_is_not_called_complete(tmp_path: Path) -> None:
    for message in run_ranks(save_without_a_shared_disk, 2, tmp_path / "ranks", tmp_path):
        assert message.endswith("because the files of rank 1 are not there.")
    assert not names(tmp_path / "0")


def save_replicas(rank: int, folder: Path) -> None:
    """Two replicas of two shards each, and a vector that no mesh knows."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replica", "shard"))
    ranks = all_ranks().apart()
    placed = distribute_tensor(
        torch.arange(14.0).view(7, 2), mesh, [Replicate(), Shard(0)], src_data_rank=None
    )
    saver = Saver(folder, ranks)
    for step in (1, 2):
        saver.save(step, {"w": placed, "plain": torch.ones(2), "number": torch.tensor(3)}, {})
        saver.wait()


def go_on_with_a_whole_state(rank: int, folder: Path) -> list[bool]:
    """GaLore at full rank, whose bases and moments have the shape of the weight and are whole on
    each rank.
    """
    mesh, ranks = meet()

    def make() -> tuple[nn.Parameter, ng.optim.GaLore]:
        weight = nn.Parameter(
            distribute_tensor(torch.ones(4, 4), mesh, [Shard(0)], src_data_rank=None)
        )
        return weight, ng.optim.GaLore(
            [("weight", weight)], rank=4, storage="float32", compile=False
        )

    weight, optimizer = make()
    weight.grad = distribute_tensor(torch.randn(4, 4), mesh, [Shard(0)])
    optimizer.step()
    saver = Saver(folder, ranks)
    path = saver.save(1, state_tensors([("weight", weight)], optimizer), {})
    saver.wait()
    again, restored = make()
    load_states(path, [("weight", again)], restored)
    states = optimizer.state_dict()["state"][0], restored.state_dict()["state"][0]
    is_equal = []
    for name, value in states[0].items():
        if name != "step":
            is_equal.append(torch.equal(local_of(value), local_of(states[1][name])))
    return is_equal


def test_states_that_every_rank_holds_whole_come_back_whole(tmp_path: Path) -> None:
    for same in run_ranks(go_on_with_a_whole_state, 2, tmp_path / "ranks", tmp_path / "run"):
        assert len(same) >= 3 and all(same)


def find_the_newest(rank: int, folder: Path) -> tuple[int, list[str]]:
    """The step of the checkpoint that this rank would load, and what it was told of newer ones."""
    checkpoint, damaged = latest_checkpoint(folder, meet()[1])
    return checkpoint.step, damaged


@pytest.mark.parametrize(("full", "rank"), [("second", r" \(rank 1\)"), ("first", "")])
def test_a_full_disk_on_one_rank_keeps_the_older_checkpoint(
    full: str, rank: str, tmp_path: Path
) -> None:
    results = run_ranks(save_with_a_full_disk, 2, tmp_path / "ranks", tmp_path / "run", full)
    for message, step, total in results:
        assert re.search(
            rf"step-00000002: the disk is full \([\d,]+ bytes free\){rank}\.$", message
        )
        assert (step, total) == (1, 45.0)
    assert names(tmp_path / "run") == ["step-00000001"]


def test_replicas_are_written_once_and_all_ranks_go_back_to_the_same_checkpoint(
    tmp_path: Path,
) -> None:
    run_ranks(save_replicas, 4, tmp_path / "ranks", tmp_path / "run")
    first, second = sorted((tmp_path / "run" / "checkpoints").iterdir())
    expected = {
        "w": torch.arange(14.0).view(7, 2),
        "plain": torch.ones(2),
        "number": torch.tensor(3),
    }
    assert_same_bits(tensors_in(first), expected)
    files = sorted(second.glob("*.safetensors"))
    assert sorted(name for file in files for name in load_file(file)) == [
        "number",
        "plain",
        "w",
        "w",
    ]
    flip_a_bit(files[-1])
    message = f"{second.name} is damaged ({files[-1].name} does not match its checksum)"
    assert (
        run_ranks(find_the_newest, 2, tmp_path / "again", tmp_path / "run") == [(1, [message])] * 2
    )
