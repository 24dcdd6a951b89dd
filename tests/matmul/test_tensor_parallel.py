"""Narrow layers under tensor parallelism have the values of one process, but for the order of sums;
or they are refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import narrowgauge as ng
from narrowgauge.errors import RecipeError
from narrowgauge.matmul.tensor_parallel import require_local_scales
from narrowgauge.spec.computes import COMPUTES
from ranks import run_ranks

BOUNDS = {
    "bfloat16": 2**-7, "float8-block": 2**-7, "mxfp8": 2**-7, "float8-row": 0.06, "float8-tensor": 0.06,
    "int8-row": 0.06, "nvfp4": 0.4,
}  # fmt: skip
"""Two roundings to bfloat16, of sums in another order; or casts with each rank's own scales."""
PLAN = {"up": ColwiseParallel(), "down": RowwiseParallel()}


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(128, 512), nn.Linear(512, 128)

    def forward(self, x: Tensor) -> Any:
        return self.down(nn.functional.silu(self.up(x)))


def results(compute: str, order: str = "", mesh: Any = None) -> list[Tensor]:
    """Return the output and the gradients of a small model, whole."""
    torch.manual_seed(0)
    model = Two().bfloat16()
    x = torch.randn(2, 64, 128).bfloat16()
    for word in order.split(",") if order else ("swap",):
        if word == "swap":
            ng.swap_linears(model, compute, keep=())
        else:
            parallelize_module(model, mesh, PLAN)
    y = model(x)
    # A gradient that does not depend on y, whose roundings would move the codes of casts.
    y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y.dtype))
    gradients = [p.grad for p in model.parameters()]
    return [t.full_tensor() if hasattr(t, "full_tensor") else t for t in (y, *gradients)]  # type: ignore[union-attr]


def on_a_rank(rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2,))
    model = fully_shard(Two().bfloat16(), mesh=mesh)
    ng.swap_linears(model, "mxfp8", keep=())
    with pytest.raises(RecipeError, match=r"layer 'up': its weight is distributed.*is a Tensor"):
        model.up(torch.randn(2, 64, 128).bfloat16())  # not through the model that was sharded
    tensors_of: dict[str, Any] = {}
    for order in ("swap,split", "split,swap"):
        for compute in BOUNDS:
            tensors_of[f"{compute} {order}"] = [t.float() for t in results(compute, order, mesh)]
    return tensors_of


def test_two_ranks_have_the_values_of_one_process(tmp_path: Path) -> None:
    first, second = run_ranks(on_a_rank, 2, tmp_path)
    for name, tensors in first.items():
        single_process = results(name.split()[0])
        for first_value, second_value, reference in zip(
            tensors, second[name], single_process, strict=True
        ):
            assert torch.equal(first_value, second_value)
            error = (first_value - reference.float()).norm()
            assert error <= BOUNDS[name.split()[0]] * reference.float().norm()


def test_every_compute_is_split_where_blocks_divide_the_parts() -> None:
    for row in COMPUTES.values():
        require_local_scales(row, "fc", 256)
    with pytest.raises(RecipeError, match="blocks of 128 do not divide its part of 64"):
        require_local_scales(COMPUTES["float8-block"], "fc", 64)
