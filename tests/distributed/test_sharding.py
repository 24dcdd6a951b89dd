"""A model shared out over ranks is the model of one process: its weights, its groups, and what is
refused.

Every rank has the same data, so that an average over ranks is exact.
"""

import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import narrowgauge as ng
from equivalence.ways import llama
from narrowgauge.distributed import sharding
from narrowgauge.errors import RecipeError
from narrowgauge.measuring.watch.fingerprints import fingerprints_whole
from narrowgauge.numerics.hashing import fingerprint_all
from ranks import run_ranks
from tensors import random_tokens

RECIPES = {"word": "bfloat16/word", "autocast": "bfloat16/float32"}


def prepared(case: str, factor: float = 1.0, **options: Any):
    model = llama()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(factor)
    options |= {"lr": 1e-2, "max_grad_norm": 1.0, "compile": False}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return ng.prepare(model, RECIPES[case], **options)


def learn(model: nn.Module, optimizer: ng.AdamW) -> list[Any]:
    """Return the weights' fingerprint before, and after each step its loss, norm and the weights'
    fingerprint.
    """
    seen = [print_of(model, optimizer)]
    for step in range(2):
        inputs = random_tokens(2, 8, seed=10 * step)
        is_wide = next(model.parameters()).dtype is torch.float32
        with torch.autocast("cpu", torch.bfloat16, enabled=is_wide):
            loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        seen.append((float(loss.detach()), float(optimizer.grad_norm), print_of(model, optimizer)))
    return seen


def print_of(model: nn.Module, optimizer: ng.AdamW) -> str:
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    return fingerprint_all(fingerprints_whole({n: optimizer.stored(p) for n, p in trained.items()}))


def shard_and_learn(rank: int) -> dict[str, Any]:
    size = dist.get_world_size()
    line = init_device_mesh("cpu", (size,))
    outcomes = {}
    for case in RECIPES:
        outcomes[case] = learn(*prepared(case, mesh=line))
    outcomes["offload"] = learn(*prepared("word", mesh=line, offload=True))
    outcomes["groups"] = {case: shapes(prepared(case, mesh=line)[0]) for case in RECIPES}
    tied = nn.Sequential()
    tied.blocks = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    tied.blocks[1].weight = tied.blocks[0].weight
    outcomes["groups"]["tied blocks"] = shapes(sharding.shard(tied, line))
    outcomes["unequal"] = learn(*prepared("word", factor=1 + rank, mesh=line))
    outcomes["refusals"] = refusals(line)
    return outcomes


def shapes(model: nn.Module):
    """The names of modules with a group of their own, and of parameters that are whole."""
    units = sharding.fsdp_modules(model)
    unsharded = [name for name, p in model.named_parameters() if not isinstance(p, DTensor)]
    return [name for name, module in model.named_modules() if module in units], unsharded


def refusals(mesh: Any) -> dict[str, str]:
    sharded = llama()
    unnamed = init_device_mesh("cpu", (1, dist.get_world_size()))
    fully_shard(sharded, mesh=mesh)
    parallel = DistributedDataParallel(llama())
    tries = {
        "sharded": lambda: ng.prepare(sharded, "float32/float32"),
        "unnamed": lambda: ng.prepare(llama(), "float32/float32", mesh=unnamed),
        "wrapped": lambda: ng.prepare(parallel, "bfloat16/word"),
    }
    messages = {}
    for name, attempt in tries.items():
        with pytest.raises(RecipeError) as error:
            attempt()
        messages[name] = str(error.value)
    return messages


def test_a_sharded_model_is_the_model_of_one_process(tmp_path, one_thread):
    expected = {case: learn(*prepared(case)) for case in RECIPES}
    expected |= dict.fromkeys(
        ("offload", "unequal"), expected["word"]
    )  # ranks begin with the weights of rank 0
    first, second = run_ranks(shard_and_learn, 2, tmp_path)
    for result in (first, second):
        assert [case for case, run in expected.items() if result[case] != run] == []
    groups = first["groups"]
    layers = ["model.layers.0", "model.layers.1"]
    assert groups["word"] == groups["autocast"] == (["", *layers], [])
    assert groups["tied blocks"] == (
        [""],
        [],
    )
    messages = {
        "sharded": "parallelize_module",
        "wrapped": "swap_linears",
        "unnamed": "mesh_dim_names",
    }
    assert all(part in first["refusals"][case] for case, part in messages.items())


def on_a_part(rank: int) -> str:
    """Train on ranks 0 and 1 of three, each with data of its own."""
    mesh = DeviceMesh("cpu", [0, 1])
    try:
        model, optimizer = ng.prepare(
            nn.Linear(32, 32),
            "float8-tensor/word/reproducible",
            mesh=mesh,
            max_grad_norm=1.0,
            compile=False,
        )
    except RecipeError as error:
        return str(error)
    for _ in range(2):
        with optimizer.reduction.micro_batch():
            model(
                torch.full((2, 32), 1.0 + rank, dtype=torch.bfloat16)
            ).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return print_of(model, optimizer)


def test_a_part_of_the_ranks_trains_and_the_others_are_refused(tmp_path):
    first, second, outside = run_ranks(on_a_part, 3, tmp_path)
    assert first == second
    assert "on this rank because the mesh has only ranks [0, 1]" in outside
