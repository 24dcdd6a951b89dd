"""Gauges on several ranks: every rank has rows, and reads a cast of its shard as one process does.

One start of two ranks serves all tests of the module.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import narrowgauge as ng
from narrowgauge.measuring.casts import Gauges
from narrowgauge.measuring.hooks import Hub
from narrowgauge.runs.schema import Row
from ranks import run_ranks
from tensors import metric_of

STEPS = 4
EVERY = 2
pytestmark = pytest.mark.filterwarnings("ignore:float8")


class Net(nn.Module):
    """Over two ranks: 32 and 32 rows, 4 and 3, 1 and none."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.uneven, self.lone = nn.Linear(16, 64), nn.Linear(64, 7), nn.Linear(7, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.lone(F.gelu(self.uneven(F.gelu(self.even(x)))))


def train(compute: str, way: str) -> list[Row]:
    """Return the rows of a training, of one process or under FSDP2."""
    torch.manual_seed(0)
    model: Any = Net().bfloat16()
    ng.swap_linears(model, compute)
    if way == "fsdp":
        mesh = init_device_mesh("cpu", (2,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in (model.even, model.uneven, model):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    optimizer = ng.AdamW(
        model.named_parameters(), lr=1e-2, storage="word", audit_every=1, compile=False
    )
    rows: list[Row] = []
    Gauges(Hub(model, [optimizer]), optimizer, EVERY, rows.append)
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        model(torch.randn(8, 16, generator=generator).bfloat16()).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return rows


def look(rank: int) -> dict[str, list[Row]]:
    """Return the rows of every case, of one rank."""
    return {compute: train(compute, "fsdp") for compute in ("float8-row", "float8-tensor")}


@pytest.fixture(scope="module")
def rows_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, list[Row]]]:
    """Return the rows of each of two ranks."""
    return run_ranks(look, 2, tmp_path_factory.mktemp("gauges_sharded"))


@pytest.mark.parametrize("compute", ["float8-row", "float8-tensor"])
def test_operands_of_equal_batches_lose_what_they_lose_in_one_process(
    compute: str, rows_of_ranks: list[Any]
) -> None:
    alone = train(compute, "one process")
    for result in rows_of_ranks:
        for row, expected in zip(result[compute], alone, strict=True):
            assert row["step"] == expected["step"]
            assert row["tensors"].keys() == expected["tensors"].keys()
            for name in expected["tensors"]:
                numbers = [metric_of(x, "tensors", name, "sqnr_db") or 0.0 for x in (row, expected)]
                assert numbers[0] == pytest.approx(numbers[1], rel=1e-3), name
