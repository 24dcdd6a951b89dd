"""A model split over ranks has the bits of one process: every kind of storage and every rule, saved
and loaded on the way.

Gradients are known and shared out: the products of two ranks add up in another order than those of
one. Under sequence parallelism each rank has a part of the gradient of a weight that all ranks
have: here that of every second element. Four ranks split ten rows unevenly, and six so that the
last rank has none.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import narrowgauge as ng
from equivalence.ways import HALF, STEPS, Training, digest, fingerprint, load_dcp, save_dcp
from narrowgauge.spec.storages import STATE_NAMES, STORAGES
from optim.scenarios import OPTIMIZERS, REPRESENTATIVES
from ranks import run_ranks
from text.refusals import refused

NUM_RANKS = 4
SOME = ("word", "kahan")
ALIKE = ("naive", "float16/naive", "float16/master")
"""Storages with the planes of another one."""
RULES = (
    "lion states8",
    "adamw compact",
    "muon word",
    "galore stochastic",
    "galore states8",
    "galore exact",
)
"""Other rules and odd storages, with stacks of matrices."""
WAYS = {
    "two tensor ranks": tuple(
        s for s in REPRESENTATIVES if not STORAGES[s].scaled and s not in ALIKE
    ),
    "four tensor ranks": (*SOME, "muon word"),
    "fsdp2": (*SOME, *RULES),
    "fsdp2 and tensor": SOME,
    "zero-1": SOME,
    "columns": ("compact", "float16/stochastic"),
    "start": ("word", "exact", "compact", "kahan", "collage-plus", "float16/split"),
}
"""The storages that are tried in each way to split a model, with the rule if it is not AdamW; to
split columns; and to begin.
"""
STACKS = {"lone": (1, 8), "deep": (3, 4, 2), "one": (1, 3, 5), "kernel": (3, 2, 2, 2)}
OPTIONS = {"lr": 1e-2, "compile": False, "audit_every": 2}
LOW_RANK = {"rank": 2, "update_proj_gap": 2}


def mlp(case: str, seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    visible = getattr(torch, STORAGES[case.split()[-1]].visible)
    model = nn.Sequential(nn.Linear(6, 10), nn.ReLU(), nn.Linear(10, 6), nn.LayerNorm(6))
    for name, shape in STACKS.items() if " " in case else ():
        model.register_parameter(name, nn.Parameter(torch.randn(shape)))
    return model.to(visible)


def start(case: str, mesh: Any = None, seed: int = 0, **options: Any) -> Training:
    """Return an MLP, split along the dimensions of a mesh, and its optimizer."""
    rule, storage = case.split() if " " in case else ("adamw", case)
    model = mlp(case, seed)
    names = () if mesh is None else mesh.mesh_dim_names
    if "tensor" in names:
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel(), "3": SequenceParallel()}
        parallelize_module(model, mesh["tensor"], plan)
    if "fsdp2" in names:
        fully_shard(model, mesh=mesh["fsdp2"])
    options = {"max_grad_norm": 3.0, **OPTIONS, **options}
    if rule == "galore":
        options |= LOW_RANK
    if rule == "muon":
        options["adjust_lr_fn"] = "match_rms_adamw"
    return Training(model, OPTIMIZERS[rule](model.named_parameters(), storage=storage, **options))


def shared_out(gradient: Tensor, p: DTensor) -> DTensor:
    """Return a rank's part of a gradient.

    Along a dimension of the mesh that repeats a weight it is a part of the sum.
    """
    mesh = p.device_mesh
    placements = list(p.placements)
    for dim, placement in enumerate(p.placements):
        if placement.is_replicate():
            is_here = torch.arange(gradient.numel()).view(
                gradient.shape
            ) % 2 == mesh.get_local_rank(dim)
            gradient = torch.where(is_here, gradient, 0)
            placements[dim] = Partial()
    reduced = []
    for placement in placements:
        reduced.append(Partial() if placement.is_partial() else Replicate())
    return DTensor.from_local(gradient, mesh, reduced, run_check=False).redistribute(
        mesh, placements
    )


def set_gradients(model: nn.Module, step: int) -> None:
    """Draw gradients that are a thousand times larger in the last columns, which the last rank has."""
    generator = torch.Generator().manual_seed(step)
    for p in model.parameters():
        gradient = torch.randn(p.shape, generator=generator) * torch.logspace(-2, 1, p.shape[-1])
        p.grad = gradient.to(p.dtype)
        if isinstance(p, DTensor):
            p.grad = shared_out(p.grad, p)


def digests(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Hash whole tensors by name."""
    return {name: digest(tensor) for name, tensor in tensors.items()}


def train(training: Training, steps: Iterable[int]) -> Training:
    for step in steps:
        set_gradients(training.model, step)
        training.optimizer.step()
    return training


def split(case: str, mesh: Any, folder: Path) -> dict[str, str]:
    """Train by kernels, and go on from a checkpoint in another model."""
    group = mesh.get_group() if mesh.ndim == 1 else None
    training = train(start(case, mesh, compile=None), range(HALF))
    save_dcp(training, folder, process_group=group)
    resumed = train(start(case, mesh, seed=1, compile=None), range(50, 51))
    load_dcp(resumed, folder, process_group=group)
    return fingerprint(train(resumed, range(HALF, STEPS)))


def zero(storage: str) -> dict[str, str]:
    """Train with an optimizer on each rank for some parameters, and go on from its state."""

    def new(model: nn.Module) -> Any:
        options = {"lr": OPTIONS["lr"], "storage": storage, "low_bits": "zero"}
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=ng.AdamW, **options)

    model = mlp(storage)
    before = train(Training(model, new(model)), range(HALF)).optimizer
    states = [None]
    before.consolidate_state_dict(to=0)
    if dist.get_rank() == 0:
        states = [before.state_dict()]
    dist.broadcast_object_list(states, 0)
    resumed = mlp(storage, seed=1)
    resumed.load_state_dict(model.state_dict())
    optimizer = new(resumed)
    optimizer.load_state_dict(states[0])
    train(Training(resumed, optimizer), range(HALF, STEPS))
    return digests(resumed.state_dict())


def after_an_overflow(mesh: Any):
    """Step once more with an infinity in the last row, which the last rank has."""
    training = train(start("word", mesh), range(STEPS))
    set_gradients(training.model, 9)
    gradient = training.model[0].weight.grad
    if mesh.get_rank() == NUM_RANKS - 1:
        gradient.to_local()[-1, -1] = math.inf
    training.optimizer.step()
    return fingerprint(training), training.optimizer.num_skipped


def other_seeds(rank: int, mesh: Any) -> dict[str, str]:
    """Return what a first step says where each rank has a seed of its own, by how ranks share the
    weight.
    """
    weight = torch.ones(4, 4).bfloat16()
    wrapped = nn.parallel.DistributedDataParallel(nn.Linear(4, 4, bias=False).bfloat16())
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


def stored_by_columns(storage: str, mesh: Any = None, columns: int = 1022) -> dict[str, str]:
    """Step a matrix and a vector, whose columns ranks share, and return what is stored.

    By default four ranks have 256, 256, 256 and 254 columns: whole blocks.
    """
    visible = getattr(torch, STORAGES[storage].visible)
    torch.manual_seed(0)
    params = []
    for shape in ((3, columns), (columns,)):
        weight = torch.randn(shape).to(visible)
        if mesh is not None:
            weight = distribute_tensor(weight, mesh, [Shard(weight.ndim - 1)])
        params.append(nn.Parameter(weight))
    optimizer = ng.AdamW(params, storage=storage, low_bits="zero", **OPTIONS)
    for _ in range(STEPS):
        for p in params:
            gradient = (torch.randn(p.shape) * torch.logspace(-3, 1, columns)).to(visible)
            p.grad = gradient if mesh is None else shared_out(gradient, p)
        optimizer.step()
    stored = {}
    for p in params:
        for name in ("weight", *STATE_NAMES):
            stored[f"{name} of {p.ndim} dimensions"] = optimizer.stored(p, name)
    return digests(stored)


def values_at_the_start() -> dict[str, Tensor]:
    """Return weights whose parts on four ranks look unlike the whole."""
    generator = torch.Generator().manual_seed(0)
    ramp = torch.linspace(0.5, 0.9, 10)
    return {
        "one value": torch.full((10,), 0.1),
        "LayerScale": torch.full((10,), 1e-4),
        "gains": torch.ones(10),
        "zeros": torch.zeros(10),
        "signs": torch.tensor([1.0, -1.0, 0.0, 1.0, 1.0, -1.0, 0.0, 0.0, 1.0, 1.0]),
        "gains, then others": torch.cat([torch.ones(6), ramp[:4]]),
        "on the grid, then off it": torch.cat([torch.full((6,), 0.75), ramp[:4]]),
        "scalar": torch.full((1,), 0.3),
        "matrix": torch.randn(10, 3, generator=generator),
        "matrix of ones": torch.ones(10, 3),
    }


def stored_at_the_start(storage: str, mesh: Any = None) -> dict[str, str]:
    """Return the stored weights of new optimizers: of narrow parameters, and of adopted float32."""
    visible = getattr(torch, STORAGES[storage].visible)
    results = {}
    for name, values in values_at_the_start().items():
        wide = values
        if mesh is not None:
            wide = distribute_tensor(values, mesh, [Shard(0)])
        weight = nn.Parameter(wide.to(visible))
        optimizer = ng.AdamW([(name, weight)], storage=storage, **OPTIONS)
        optimizer.make_missing(optimizer.param_groups[0], [weight])
        results[name] = optimizer.stored(weight)
        optimizer = ng.AdamW([(name, weight)], storage=storage, **OPTIONS)
        optimizer.adopt({weight: wide})
        results[f"{name}, adopted"] = optimizer.stored(weight)
    return digests(results)


STORED = {
    "columns": stored_by_columns,
    "start": stored_at_the_start,
}


def on_a_rank(rank: int, folder: Path):
    meshes = {
        "two tensor ranks": DeviceMesh("cpu", [0, 1], mesh_dim_names=("tensor",)),
        "four tensor ranks": init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("tensor",)),
        "fsdp2": init_device_mesh("cpu", (NUM_RANKS,), mesh_dim_names=("fsdp2",)),
        "fsdp2 and tensor": init_device_mesh("cpu", (2, 2), mesh_dim_names=("fsdp2", "tensor")),
    }
    results = {}
    for way, mesh in meshes.items():
        for storage in WAYS[way] if rank in mesh.mesh else ():
            results[way, storage] = split(storage, mesh, folder / way / storage)
    for storage in WAYS["zero-1"]:
        results["zero-1", storage] = zero(storage)
    results["fsdp2", "overflow"] = after_an_overflow(meshes["fsdp2"])
    results["fsdp2", "seeds"] = other_seeds(rank, meshes["fsdp2"])
    for way, stored in STORED.items():
        for storage in WAYS[way]:
            results[way, storage] = stored(storage, meshes["fsdp2"])
    with refused("a shard of parts of blocks"):
        stored_by_columns("compact", meshes["fsdp2"], columns=1000)
    return results


Results = list[dict[tuple[str, str], Any]]


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    folder = tmp_path_factory.mktemp("ranks")
    return run_ranks(on_a_rank, NUM_RANKS, folder, folder)


@functools.cache
def of_one_process(way: str, case: str) -> dict[str, str]:
    if way in STORED:
        return STORED[way](case)
    if way == "zero-1":
        alone = start(case, low_bits="zero", max_grad_norm=None)
        return digests(train(alone, range(STEPS)).model.state_dict())
    return fingerprint(train(start(case), range(STEPS)))


@pytest.mark.parametrize("way", WAYS)
def test_split_over_ranks(way, results):
    members = [result for result in results if (way, WAYS[way][0]) in result]
    assert len(members) == (2 if way.startswith("two") else NUM_RANKS)
    for result in members:
        assert [s for s in WAYS[way] if result[way, s] != of_one_process(way, s)] == []


@pytest.mark.parametrize("storage", WAYS["start"])
def test_a_vector_of_one_value_gets_low_bits_and_one_of_signs_none(storage):
    stored = of_one_process("start", storage)
    assert stored["signs"] == digest(values_at_the_start()["signs"])
    assert stored["one value"] != digest(torch.full((10,), 0.1).bfloat16().float())


def test_an_overflow_on_one_rank_skips_the_step_on_all(
    results,
):
    for result in results:
        state, num_skipped = result["fsdp2", "overflow"]
        assert num_skipped == 1 and state == of_one_process("fsdp2", "word")


def test_other_seeds_on_other_ranks_are_refused_at_the_first_step(
    results,
):
    """The first rank to step goes on. Whoever has another seed does not."""
    refusals = [result["fsdp2", "seeds"] for result in results]
    for way in refusals[0]:
        assert sum("Pass the same seed=" in says[way] for says in refusals) == NUM_RANKS - 1, way
