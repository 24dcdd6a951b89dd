"""Ranks on CUDA: training on one rank and on two gives the same bits through NCCL.

Claim: with the reduction ``reproducible``, six leaves a step, the weights after a few steps are equal on one rank and on two,
sharded and replicated; with ``float32`` they need not be, and the table says whether they are.

Baseline: one rank. Two ranks share a machine's only GPU where NCCL allows that (2.30 or later, with
``NCCL_MULTI_RANK_GPU_ENABLE=1``, which is set here); an older one is given a single rank, and the table says so.

Run: ``./dev gpu --sections ranks``; on CPUs, through gloo: ``./dev bench gpu_ranks``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import warnings
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from _gpu_setting import Setting, Tables
from timing import Report, Row, parser
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import narrowgauge as ng
from narrowgauge.distributed.sharding import fingerprint_whole

LEAVES, STEPS, WIDTH = 6, 3, 256
REDUCTIONS = ("reproducible", "float32")
SHARDINGS = ("full", "none")
TWO_RANKS_ON_ONE_GPU = (2, 30)
"""The first NCCL that lets two ranks share a GPU."""


def trained(sharding: str, reduction: str, device: torch.device) -> str:
    """The fingerprint of the weights after :data:`STEPS` steps of :data:`LEAVES` leaves each, on all ranks together."""
    rank, size = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2))
    model = nn.Sequential(*layers).to(device)
    mesh = init_device_mesh(device.type, (size,))
    # Added up: averages are over as many ranks as there are.
    model, optimizer = ng.prepare(model, f"bfloat16/word/{reduction}", mesh=mesh, shard=sharding, average=False)
    for step in range(STEPS):
        for first in range(0, LEAVES, size):
            leaf = min(first + rank, LEAVES - 1)
            inputs = torch.randn(64, WIDTH, generator=torch.Generator().manual_seed(1000 * step + leaf))
            with optimizer.reduction.micro_batch(is_last=first + size >= LEAVES, is_absent=first + rank >= LEAVES):
                model(inputs.to(device, torch.bfloat16)).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return fingerprint_whole({name: optimizer.stored(p) for name, p in model.named_parameters()})


def work(rank: int, size: int, place: str, device_type: str) -> None:
    """One rank: every case, whose fingerprints the first rank leaves in a file."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")  # every rank would print them
    device = (
        torch.device(device_type, rank % torch.cuda.device_count()) if device_type == "cuda" else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    dist.init_process_group(backend, init_method=f"file://{place}/meeting{size}", rank=rank, world_size=size)
    for sharding in SHARDINGS:
        for reduction in REDUCTIONS:
            found = trained(sharding, reduction, device)
            if rank == 0:
                Path(place, f"{size}-{sharding}-{reduction}").write_text(found)
    dist.destroy_process_group()


def can_share(device_type: str) -> bool:
    """Whether two ranks can be had: two GPUs, or an NCCL that lets them share one."""
    if device_type == "cpu" or torch.cuda.device_count() > 1:
        return True
    return tuple(torch.cuda.nccl.version())[:2] >= TWO_RANKS_ON_ONE_GPU


def ranks_rows(device_type: str) -> list[Row]:
    """A row for each sharding and reduction: whether two ranks give the bits of one."""
    os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    sizes = (1, 2) if can_share(device_type) else (1,)
    with tempfile.TemporaryDirectory() as place:
        for size in sizes:
            torch.multiprocessing.spawn(work, (size, place, device_type), nprocs=size)
        found = {path.name: path.read_text() for path in Path(place).iterdir() if "-" in path.name}
    rows: list[Row] = []
    for sharding in SHARDINGS:
        for reduction in REDUCTIONS:
            names = [f"{size}-{sharding}-{reduction}" for size in sizes]
            row: Row = {
                "shard": sharding,
                "reduction": reduction,
                "device": device_type,
                "fingerprint": found[names[0]],
            }
            if len(names) == 1:
                row |= {"two ranks": "this NCCL allows one rank on a GPU", "passes": "not run"}
            else:
                same = found[names[0]] == found[names[1]]
                row |= {"two ranks": "same bits" if same else found[names[1]]}
                row |= {"passes": "yes" if same or reduction != "reproducible" else "NO"}
            rows.append(row)
    together = {found[f"1-{sharding}-reproducible"] for sharding in SHARDINGS}
    rows.append({"shard": "all of them", "reduction": "reproducible", "passes": "yes" if len(together) == 1 else "NO"})
    return rows


def check_ranks(setting: Setting) -> Tables:
    """The section of ``gpu.py``."""
    yield f"{STEPS} steps of {LEAVES} leaves on one rank and on two", ranks_rows(setting.device.type)


def main(arguments: Sequence[str] | None = None) -> int:
    """Compare one rank with two on CPUs."""
    options = parser(__doc__, rounds=1).parse_args(arguments)
    warnings.simplefilter("ignore")
    report = Report("gpu_ranks", options)
    rows = ranks_rows("cpu")
    report.add(f"{STEPS} steps of {LEAVES} leaves on one rank and on two", rows)
    return report.end() if all(row["passes"] != "NO" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
