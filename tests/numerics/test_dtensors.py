"""Placements of tensors over a mesh of two axes: every pair of them, on a group of fake ranks."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from narrowgauge.numerics.dtensor import (
    by_group,
    is_split_over_ranks,
    placed_like,
    sendable,
    split_groups,
)

PLACEMENTS = [Replicate(), Partial(), Shard(0), Shard(1), Shard(2)]


@pytest.fixture
def mesh() -> Iterator[Any]:
    dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=4)
    yield init_device_mesh("cpu", (2, 2))
    dist.destroy_process_group()


def test_the_groups_of_a_tensor_are_those_of_the_axes_that_split_it(mesh: Any) -> None:
    """Or that split its last dimensions, as many as are asked for."""
    for placements in itertools.product(PLACEMENTS, repeat=2):
        tensor = DTensor.from_local(torch.ones(2, 2, 2), mesh, placements, run_check=False)
        for columns in (None, 0, 1, 2, 3):
            first = 0 if columns is None else tensor.ndim - columns
            expected = []
            for axis, placement in enumerate(placements):
                if isinstance(placement, Shard) and placement.dim >= first:
                    expected.append(mesh.get_group(axis))
            assert split_groups(tensor, columns=columns) == expected
        groups = split_groups(tensor)
        assert is_split_over_ranks(tensor) == bool(groups)
        plain = torch.ones(2)
        assert split_groups(plain) == [] and not is_split_over_ranks(plain)
        pairs = [([], [plain]), (groups, [tensor])] if groups else [([], [plain, tensor])]
        assert by_group([plain, tensor]) == pairs


@pytest.mark.parametrize("row_dims", [0, 1])
def test_a_state_lies_as_its_parameter(row_dims: int, mesh: Any) -> None:
    """A value for each row is whole on all ranks that share the row."""
    for placements in itertools.product((Replicate(), Shard(0), Shard(1)), repeat=2):
        owner = DTensor.from_local(torch.ones(4, 6), mesh, placements, run_check=False)
        part = torch.arange(4 if row_dims else 24, dtype=torch.int16).view(4, -1)
        expected = []
        for placement in placements:
            is_shared = row_dims > 0 and placement == Shard(1)
            expected.append(Replicate() if is_shared else placement)
        placed: Any = placed_like(owner, part, row_dims=row_dims)
        assert placed.placements == tuple(expected) and placed.dtype is torch.int16
        assert placed.shape == (owner.shape[0], 1 if row_dims else owner.shape[1])
        assert torch.equal(placed.to_local(), part)
        assert sendable(placed, placed).dtype is torch.int32  # neither gloo nor NCCL sends int16
        assert placed_like(torch.ones(4, 6), part, row_dims=row_dims) is part
