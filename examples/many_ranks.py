"""Many ranks in a training loop of your own: the same bits on any number of ranks, up to that of the
micro-batches.

Run with: python examples/many_ranks.py, then torchrun --nproc-per-node 2 examples/many_ranks.py
"""

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import narrowgauge as ng
from narrowgauge.measuring.watch.fingerprints import fingerprints_whole
from narrowgauge.numerics.hashing import fingerprint_all

MICRO_BATCHES = 6  # of a step: the same ones on any number of ranks
torch.set_num_threads(1)  # a matmul of two threads adds up in another order than that of one
rank = 0
ranks = 1
mesh = None
if "RANK" in os.environ:
    dist.init_process_group("gloo")
    rank = dist.get_rank()
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,))

torch.manual_seed(0)
inputs = torch.randn(10, MICRO_BATCHES, 16, 32)
targets = torch.sin(inputs @ torch.randn(32, 8))
model = torch.nn.Sequential(torch.nn.Linear(32, 128), torch.nn.GELU(), torch.nn.Linear(128, 8))
# Gradients are added up and not averaged: a loss is its share of the step's on any number of ranks.
options = {"lr": 3e-3, "max_grad_norm": 1.0, "mesh": mesh, "average": False}
model, optimizer = ng.prepare(model, "bfloat16/word/reproducible", **options)
rounds = -(-MICRO_BATCHES // ranks)
for x, y in zip(inputs, targets, strict=True):
    for k in range(rounds):
        mine = rank + k * ranks
        is_absent = mine >= MICRO_BATCHES  # no micro-batch left: repeat one, contribute nothing
        mine = min(mine, MICRO_BATCHES - 1)
        with optimizer.reduction.micro_batch(is_last=k == rounds - 1, is_absent=is_absent):
            loss = torch.nn.functional.mse_loss(model(x[mine].bfloat16()).float(), y[mine])
            (loss / MICRO_BATCHES).backward()
    optimizer.step()
    optimizer.zero_grad()
stored = {name: optimizer.stored(weight) for name, weight in model.named_parameters()}
fingerprint = fingerprint_all(fingerprints_whole(stored))
if rank == 0:
    norm = optimizer.grad_norm.item()
    print(f"{ranks} ranks  gradient norm {norm:.9f}  weights {fingerprint}", flush=True)
if mesh is not None:
    dist.barrier()  # no rank takes the group down while another still sends
    dist.destroy_process_group()
