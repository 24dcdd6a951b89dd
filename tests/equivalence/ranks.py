"""The ways on several ranks: four processes, started once, train every recipe in every layout.

Two of them shard the model with FSDP2 while the other two replicate it with DDP, then shard it with
all states on the host; then all four shard and replicate it (HSDP), and three of them go on from what
the first two had saved.
"""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from equivalence.ways import (
    HALF,
    MICRO_BATCHES,
    MORE,
    RECIPES,
    STEPS,
    Training,
    differentiate,
    fingerprint,
    llama,
    load_dcp,
    save_dcp,
    start,
    tokens,
    update,
)
from narrowgauge.spec.parse import parse

NUM_RANKS = 4
WAYS = {"fsdp2": 2, "replicated": 2, "offloaded": 2, "hsdp": 4, "resumed_on_three": 3}
"""On how many ranks each way trains."""
SAVED = [recipe for recipe in RECIPES if recipe.startswith(("bfloat16", "float16"))]
RECIPES_OF = {
    "fsdp2": RECIPES,
    "replicated": ("bfloat16/word", "float8-row/word", "int8-row/states8", "float16/split"),
    "offloaded": RECIPES[::2],
    # Vectors of the last of MORE have a scale, which no ranks share.
    "hsdp": ("bfloat16/exact", "bfloat16/collage-plus", *MORE[:-1]),
    "resumed_on_three": SAVED,
}
"""The recipes of each way: all, or those whose sums, states on the host, scales or saved states are
unlike. A checkpoint has nothing of a compute.
"""
Fingerprints = dict[tuple[str, str], dict[str, str]]
"""Of a rank, by way and recipe."""
BY_CALLER = ("bfloat16/word", "float8-row/word")


def reproducible(recipe: str, mesh: Any = None, **options: Any) -> Training:
    """Start a training whose gradients are summed exactly; the loss of a micro-batch is its share
    of the step's.
    """
    return start(f"{recipe}/reproducible", mesh=mesh, average=False, **options)


def train_in_micro_batches(
    training: Training, steps: Iterable[int] = range(STEPS), mesh: Any = None, reduction: Any = None
) -> Training:
    """Take optimizer steps of four micro-batches, which the ranks of the mesh take in turn."""
    reduction = reduction or training.optimizer.reduction
    rank, size = (
        (0, 1)
        if mesh is None
        else (mesh.mesh.flatten().tolist().index(dist.get_rank()), mesh.size())
    )
    for step in steps:
        for first in range(0, MICRO_BATCHES, size):
            is_absent = first + rank >= MICRO_BATCHES
            with reduction.micro_batch(is_last=first + size >= MICRO_BATCHES, is_absent=is_absent):
                differentiate(
                    training, tokens(step, 0 if is_absent else first + rank), 1 / MICRO_BATCHES
                )
        update(training)
    return training


def on_one_rank(recipe: str) -> dict[str, str]:
    """Train on one rank; the ways on several are compared with this one."""
    return fingerprint(train_in_micro_batches(reproducible(recipe)))


def resumed_on_one(recipe: str, folder: Path) -> dict[str, str]:
    """Go on alone from what two ranks saved."""
    training = load_dcp(reproducible(recipe, model=llama(seed=1)), folder / recipe, no_dist=True)
    return fingerprint(train_in_micro_batches(training, range(HALF, STEPS)))


def fsdp2(recipe: str, mesh: Any, folder: Path) -> dict[str, str]:
    """Shard the model, and save half of the way."""
    training = train_in_micro_batches(reproducible(recipe, mesh), range(HALF), mesh)
    save_dcp(training, folder / recipe, process_group=mesh.get_group())
    return fingerprint(train_in_micro_batches(training, range(HALF, STEPS), mesh))


def replicated(recipe: str, mesh: Any) -> dict[str, str]:
    """Keep the whole model on each rank."""
    training = start(recipe)
    reduction = ng.reduce_gradients_with(training.model, average=False, mesh=mesh)
    return fingerprint(train_in_micro_batches(training, mesh=mesh, reduction=reduction))


def offloaded(recipe: str, mesh: Any, folder: Path) -> dict[str, str]:
    """Shard the model with all states on the host, and go on from a checkpoint."""
    group = {"process_group": mesh.get_group()}
    training = reproducible(recipe, mesh, offload=True)
    save_dcp(train_in_micro_batches(training, range(HALF), mesh), folder / recipe, **group)
    resumed = reproducible(recipe, mesh, offload=True, model=llama(seed=1))
    load_dcp(resumed, folder / recipe, **group)
    return fingerprint(train_in_micro_batches(resumed, range(HALF, STEPS), mesh))


def by_caller(recipe: str, mesh: Any = None) -> dict[str, str]:
    """Swap, shard and sum in a loop of the caller's own, with one parameter whole."""
    row = parse(recipe)
    model = ng.cast_parameters(llama(), torch.bfloat16)
    ng.swap_linears(model, row.compute)
    if mesh is not None:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params={model.model.norm.weight})
    reduction = ng.reduce_gradients_with(model, average=False)
    options = {"storage": row.storage.name, "lr": 1e-2, "max_grad_norm": 1.0, "seed": 7}
    training = Training(model, ng.AdamW(model.named_parameters(), **options))
    return fingerprint(train_in_micro_batches(training, mesh=mesh, reduction=reduction))


def hsdp(recipe: str, mesh: Any) -> dict[str, str]:
    """Shard the model over two ranks, and replicate the shards."""
    return fingerprint(train_in_micro_batches(reproducible(recipe, mesh), mesh=mesh))


def resumed_on_three(recipe: str, mesh: Any, folder: Path) -> dict[str, str]:
    """Go on with three ranks from what two saved; two of them have no second micro-batch."""
    training = reproducible(recipe, mesh, model=llama(seed=1))
    load_dcp(training, folder / recipe, process_group=mesh.get_group())
    return fingerprint(train_in_micro_batches(training, range(HALF, STEPS), mesh))


def on_a_rank(rank: int, folder: Path) -> Fingerprints:
    """Train on one of the ranks; return the fingerprints of each way and recipe that it took part
    in.
    """
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    half = grid["shards"]
    fingerprints = {}
    for recipe in RECIPES:
        if rank < 2:
            fingerprints["fsdp2", recipe] = fsdp2(recipe, half, folder)
            if recipe in BY_CALLER:
                fingerprints["by_caller", recipe] = by_caller(recipe, half)
        else:
            if recipe in RECIPES_OF["replicated"]:
                fingerprints["replicated", recipe] = replicated(recipe, half)
            if recipe in RECIPES_OF["offloaded"]:
                fingerprints["offloaded", recipe] = offloaded(recipe, half, folder / "offloaded")
    dist.barrier()
    three = DeviceMesh("cpu", list(range(3)))
    for recipe in RECIPES_OF["hsdp"]:
        fingerprints["hsdp", recipe] = hsdp(recipe, grid)
    for recipe in SAVED if rank < 3 else ():
        fingerprints["resumed_on_three", recipe] = resumed_on_three(recipe, three, folder)
    return fingerprints
