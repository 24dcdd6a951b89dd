"""The same bits on one process and two: every rank steps the rows it holds.

Gradients are known and shared out, so that nothing but the optimizer can differ. All storages go
through one process group, since starting ranks is what costs.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import narrowgauge as ng
from narrowgauge.spec.storages import STORAGES
from optim.scenarios import OPTIMIZERS
from ranks import run_ranks
from tensors import assert_same_bits

# Over two ranks: 5 and 5 rows, 4 and 3, 1 and none; vectors, and the matrices of stacks, likewise.
SHAPES = {
    "even": (10, 6), "uneven": (7, 6), "lone": (1, 8), "gain": (10,), "bias": (5,), "deep": (3, 4, 2), "one": (1, 3, 5),
    "kernel": (3, 2, 2, 2),
}  # fmt: skip
# Other rules than AdamW, odd storages, and ranks without a row; the rest is in equivalence/.
CASES = [
    "lion states8", "adamw float16/collage-plus", "muon word", "galore stochastic", "galore states8", "gradnorm_lorp exact",
]  # fmt: skip
STEPS = range(3)


class Weights(nn.Module):
    """Parameters of ``SHAPES``, and nothing to compute."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(
                name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype))
            )


def start(case: str, mesh: Any = None) -> tuple[nn.Module, ng.Optimizer]:
    """A fresh model and its optimizer; its rows shared out where there is a mesh."""
    rule, storage = case.split()
    model: nn.Module = Weights(getattr(torch, STORAGES[storage].visible))
    if mesh is not None:
        fully_shard(model, mesh=mesh)
    options: dict[str, Any] = {"lr": 0.05, "max_grad_norm": 3.0, "audit_every": 2, "compile": False}
    if rule in ("galore", "gradnorm_lorp"):
        options |= {"rank": 2, "update_proj_gap": 2}
    return model, OPTIMIZERS[rule](model.named_parameters(), storage=storage, **options)


def take_steps(
    model: nn.Module, optimizer: ng.Optimizer, steps: range, bad: tuple[str, int] | None = None
) -> None:
    """Steps with known gradients; ``bad`` says in which row of which parameter one value is
    infinite.
    """
    for step in steps:
        generator = torch.Generator().manual_seed(100 + step)
        for name, p in model.named_parameters():
            gradient = torch.randn(p.shape, generator=generator).bfloat16().to(p.dtype)
            if bad is not None and name == bad[0]:
                gradient[bad[1], -1] = math.inf
            if isinstance(p, DTensor):
                gradient = distribute_tensor(
                    gradient, p.device_mesh, p.placements, src_data_rank=None
                )
            p.grad = gradient
        optimizer.step()


def gathered(value: Tensor) -> Tensor:
    value = value.detach().full_tensor() if isinstance(value, DTensor) else value.detach().clone()
    # Shards hand out 16-bit integers as int32: neither gloo nor NCCL sends them as they are.
    return value.int() if value.dtype is torch.int16 else value


def everything(model: nn.Module, optimizer: ng.Optimizer) -> dict[str, Tensor]:
    """Visible weights and all that is kept, gathered; only float tensors of 2 and 4 bytes are
    compared by their bits.
    """
    result = {}
    for name, p in model.named_parameters():
        result[f"{name} visible"] = gathered(p)
    state = optimizer.state_dict()["state"]
    for k, (name, p) in enumerate(model.named_parameters()):
        result[f"{name} weight"] = gathered(optimizer.stored(p))
        result |= {
            f"{name} {state_name}": gathered(value) for state_name, value in state[k].items()
        }
    return {
        name: value.float() if value.element_size() == 1 else value
        for name, value in result.items()
    }


def steps_on_a_rank(rank: int) -> dict[str, Any]:
    """Take the steps of every case, then what only some of them show."""
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    results: dict[str, Any] = {}
    for case in CASES:
        model, optimizer = start(case, mesh)
        take_steps(model, optimizer, STEPS)
        results[case] = everything(model, optimizer)
        if case == CASES[0]:
            take_steps(model, optimizer, range(9, 10), bad=("even", 9))
            results["overflow"] = (
                everything(model, optimizer),
                optimizer.num_skipped,
                optimizer.last_overflow,
            )
    results["computed"] = directions_here(mesh)
    ranks = mesh.size()
    for layout, grid, placements in (
        ("replicated", (ranks,), [Replicate()]),
        ("replicas of shards", (ranks, 1), [Replicate(), Shard(0)]),
        ("columns", (ranks,), [Shard(1)]),
    ):
        results[layout] = muon_in_float32(init_device_mesh("cpu", grid), placements)
    results["seeds"] = other_seeds(rank, mesh)
    return results


def other_seeds(rank: int, mesh: Any) -> dict[str, str]:
    """Return what a first step says where each rank has a seed of its own, by how ranks share the
    weight.
    """
    weight = torch.ones(4, 4).bfloat16()
    module = nn.Linear(4, 4, bias=False).bfloat16()
    wrapped = nn.parallel.DistributedDataParallel(module)
    says = {}
    for way, parameter in {
        "replicated": nn.Parameter(distribute_tensor(weight, mesh, [Replicate()])),
        "sharded": nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)])),
        "DDP": wrapped.module.weight,
        "alone": nn.Parameter(weight.clone()),
    }.items():
        optimizer = ng.AdamW([parameter], seed=rank, compile=False)
        parameter.grad = torch.ones_like(parameter)
        says[way] = ""
        try:
            optimizer.step()
        except ng.errors.RecipeError as error:
            says[way] = str(error)
    return says


def directions_here(mesh: Any) -> list[tuple[int, ...]]:
    """Return the shapes of the matrices whose step this rank computes."""
    model, optimizer = start("galore word", mesh)
    shapes = []
    rule = optimizer.rule

    def direction(gradient: Tensor, *rest: Any) -> Any:
        shapes.append(tuple(gradient.shape))
        return rule.direction(gradient, *rest)

    optimizer.rule = dataclasses.replace(rule, direction=direction)
    take_steps(model, optimizer, range(1))
    return shapes


def muon_in_float32(mesh: Any, placements: Any = None) -> dict[str, Tensor]:
    """Train matrices with Muon, whose products are float32, laid out in some way; whole without a
    mesh.
    """
    torch.manual_seed(0)
    weights = []
    for shape in ((8, 6), (6, 8), (4, 2, 6)):
        weights.append(torch.randn(shape).bfloat16())
    laid_out = []
    for w in weights:
        laid_out.append(
            w if mesh is None else distribute_tensor(w, mesh, placements, src_data_rank=None)
        )
    model = nn.ParameterList([nn.Parameter(w) for w in laid_out])
    optimizer = ng.Muon(
        list(model), lr=0.05, ns_dtype="float32", storage="word", audit_every=2, compile=False
    )
    take_steps(model, optimizer, STEPS)
    return everything(model, optimizer)


Results = list[dict[str, Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    """Return what each of two ranks computed."""
    return run_ranks(steps_on_a_rank, 2, tmp_path_factory.mktemp("sharded"))


@functools.lru_cache
def expected(case: str) -> dict[str, Tensor]:
    """What one process has after the steps."""
    model, optimizer = start(case)
    take_steps(model, optimizer, STEPS)
    return everything(model, optimizer)


EVERY = pytest.mark.parametrize("case", CASES)
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@EVERY
def test_ranks_have_the_bits_of_one_process(case: str, results: Results) -> None:
    for result in results:
        assert_same_bits(expected(case), result[case])


def test_one_rank_computes_the_step_of_a_matrix(results: Results) -> None:
    """Each matrix is decomposed on one rank, the largest ones on different ranks, and those of a
    stack where they are.
    """
    first, second = (result["computed"] for result in results)
    assert sorted(first + second) == sorted(
        [(10, 6), (7, 6), (1, 8), (3, 8), *[(4, 2)] * 3, (3, 5)]
    )
    assert (10, 6) in first and (7, 6) in second
    assert first.count((4, 2)) == 2 and second.count((4, 2)) == 1


@pytest.mark.parametrize("layout", ["replicated", "replicas of shards", "columns"])
def test_matrices_laid_out_in_other_ways_have_the_bits_of_one_process(
    layout: str, results: Results
) -> None:
    for result in results:
        assert_same_bits(muon_in_float32(None), result[layout])


def test_an_overflow_on_one_rank_skips_the_step_on_all(results: Results) -> None:
    for rank, result in enumerate(results):
        state, num_skipped, named = result["overflow"]
        assert num_skipped == 1
        assert_same_bits(expected(CASES[0]), state)
        assert named == (["even"] if rank == 1 else [])  # the rows of the last one are not here


def test_replicas_of_other_seeds_are_refused_at_the_first_step(
    results: list[dict[str, Any]],
) -> None:
    """Ranks that share nothing, or step different rows, may have seeds of their own."""
    for rank in results:
        for way, says in rank["seeds"].items():
            assert ("Pass the same seed=" in says) == (way in ("replicated", "DDP")), way
