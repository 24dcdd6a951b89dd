"""Gauges on several ranks: rows come from all of them, and say of shared parameters what one
process would.

Where every rank has the same batch a sharded run has the bits of one process, so that its rows can
be held against those. One start of two ranks serves all tests of the module.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from narrowgauge.gauges.attach import attach_gauges
from narrowgauge.runs.schema import Row
from ranks import run_ranks
from tensors import metric_of

CASES = ["ours", "naive", "torch", "float8-tensor"]
WHOLE = ("weight", "grad")
EXACT = ("amax", "rms", "nonfinite")
AUDITED = ("edq", "noise", "lost_fraction", "unseen_fraction")
STEPS = 4
EVERY = 2
pytestmark = pytest.mark.filterwarnings("ignore:float8")


class Net(nn.Module):
    """Over two ranks: 32 and 32 rows, 4 and 3, 1 and none."""

    def __init__(self) -> None:
        super().__init__()
        self.even, self.uneven, self.lone = nn.Linear(16, 64), nn.Linear(64, 7), nn.Linear(7, 1)
        self.gain = nn.Parameter(torch.ones(7))

    def forward(self, x: Tensor) -> Tensor:
        return self.lone(self.gain * F.gelu(self.uneven(F.gelu(self.even(x)))))


def start(case: str, mesh: Any = None) -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model: nn.Module = Net().bfloat16()
    if "-" in case:
        ng.swap_linears(model, case)
    if mesh is not None:
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        for layer in (model.even, model.uneven):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    if case == "torch":
        return model, torch.optim.AdamW(model.parameters(), lr=1e-2)
    lr, storage = (1e-3, "naive") if case == "naive" else (1e-2, "word")
    return model, ng.AdamW(
        model.named_parameters(), lr=lr, storage=storage, audit_every=1, compile=False
    )


def train(
    model: nn.Module, optimizer: Any, batch: int = 1, spoil: int | None = None
) -> tuple[list[Row], dict[str, Tensor]]:
    """Rows and weights after some steps; ``spoil`` is the row of the first layer that gets a NaN
    gradient at the last.
    """
    rows: list[Row] = []
    attach_gauges(getattr(model, "module", model), optimizer, every=EVERY, on_row=rows.append)
    generator = torch.Generator().manual_seed(batch)
    for step in range(STEPS):
        model(torch.randn(8, 16, generator=generator).bfloat16()).float().square().mean().backward()
        if spoil is not None and step == STEPS - 1:
            model.even.weight.grad.to_local()[spoil, 0] = math.nan
        optimizer.step()
        optimizer.zero_grad()
    full_tensors = {
        n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()
    }
    return rows, {name: value.detach().clone() for name, value in full_tensors.items()}


def look(rank: int) -> dict[str, Any]:
    """Every case with gauges."""
    ranks = init_device_mesh("cpu", (2,))
    copies = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "shards"))
    results: dict[str, Any] = {case: train(*start(case, ranks)) for case in CASES}
    results["copies"] = train(*start("ours", copies))
    results["spoiled"] = train(*start("torch", ranks), spoil=8 if rank else None)
    results["fsdp"] = train(*start("ours", ranks), batch=rank)
    model, optimizer = start("ours")
    results["ddp"] = train(DistributedDataParallel(model), optimizer, batch=rank)
    return results


@pytest.fixture(scope="module")
def gauges_of_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    return run_ranks(look, 2, tmp_path_factory.mktemp("gauges_sharded"))


def shared(row: Row) -> Row:
    """What a row says of whole weights, gradients and updates, and not of operands and samples."""
    names = [name for name in row["tensors"] if name.partition(":")[0] in WHOLE]
    return {
        "tensors": {
            name: [metric_of(row, "tensors", name, field) for field in EXACT] for name in names
        },
        "updates": row.get("updates", {}),
    }


def column(row: Row, field: str) -> dict[str, float]:
    """A column of the tables of tensors or updates; -1 for null."""
    table = "updates" if field in AUDITED else "tensors"
    values = {name: metric_of(row, table, name, field) for name in shared(row)[table]}
    return {name: -1.0 if value is None else value for name, value in values.items()}


@pytest.mark.parametrize("case", [*CASES, "copies", "spoiled", "fsdp", "ddp"])
def test_every_rank_writes_every_row_and_all_say_the_same_of_parameters(
    case: str, gauges_of_ranks: list[Any]
) -> None:
    first, second = (result[case][0] for result in gauges_of_ranks)
    assert [row["step"] for row in first] == [row["step"] for row in second] == [2, 4]
    # As text: NaN is not equal to itself.
    assert [str(shared(row)) for row in first] == [str(shared(row)) for row in second]
    assert first[0]["tensors"].keys() == second[0]["tensors"].keys()


@pytest.mark.parametrize("case", [*CASES, "copies"])
def test_what_is_split_over_ranks_is_read_whole(case: str, gauges_of_ranks: list[Any]) -> None:
    rows, weights = train(*start("ours" if case == "copies" else case))
    for result in gauges_of_ranks:
        assert all(torch.equal(value, result[case][1][name]) for name, value in weights.items())
        for row, alone in zip(result[case][0], rows, strict=True):
            assert row["tensors"].keys() == alone["tensors"].keys()
            for field in (*EXACT, *AUDITED):
                # In bfloat16 the rms of one tensor has three digits; noise is what is left of sums
                # in float32. An audit reads some rows, of a shard others than of the whole.
                sampled = {name: {"abs": 0.01} for name in ("lost_fraction", "unseen_fraction")}
                near = {"rms": {"rel": 2**-7}, "noise": {"abs": 5e-3}, **sampled}.get(
                    field, {"rel": 1e-3}
                )
                assert column(row, field) == pytest.approx(column(alone, field), **near), field


def test_a_bad_value_on_one_rank_is_seen_on_all(gauges_of_ranks: list[Any]) -> None:
    for result in gauges_of_ranks:
        before, row = result["spoiled"][0]
        assert metric_of(before, "tensors", "grad:even.weight", "nonfinite") == 0
        assert metric_of(row, "tensors", "grad:even.weight", "nonfinite") == 1
        assert metric_of(row, "tensors", "grad:even.weight", "amax") is None  # as on one process
        assert metric_of(row, "tensors", "grad:uneven.weight", "nonfinite") == 0
