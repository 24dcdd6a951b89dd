"""Many ranks in a training loop of your own: the same bits on one process, on two, and on as many
as there are micro-batches.

Run with: python examples/many_ranks.py          (starts itself on one process and on two)
      or: torchrun --nproc-per-node 3 examples/many_ranks.py
"""

import hashlib
import os
import subprocess
import sys

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import narrowgauge as ng

MICRO_BATCHES = 6  # of a step: the same ones on any number of ranks


class Block(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = torch.nn.Linear(32, 128), torch.nn.Linear(128, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.nn.functional.gelu(self.up(x)))


class Net(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList(
            Block() for _ in range(2)
        )  # FSDP2 gathers the weights of one at a time
        self.head = torch.nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).float()


def train(rank: int, ranks: int) -> None:
    torch.manual_seed(0)
    inputs = torch.randn(10, MICRO_BATCHES, 16, 32)
    targets = torch.sin(inputs @ torch.randn(32, 8))
    mesh = init_device_mesh("cpu", (ranks,)) if ranks > 1 else None
    options = {"lr": 3e-3, "max_grad_norm": 1.0, "mesh": mesh, "average": False}
    model, optimizer = ng.prepare(Net(), "bfloat16/word/reproducible", **options)
    for x, y in zip(inputs, targets, strict=True):
        rounds = -(-MICRO_BATCHES // ranks)
        for k in range(rounds):
            mine = rank + k * ranks
            is_absent = mine >= MICRO_BATCHES  # no micro-batch left: repeat one, contribute nothing
            mine = rank if is_absent else mine
            with optimizer.reduction.micro_batch(is_last=k == rounds - 1, is_absent=is_absent):
                loss = torch.nn.functional.mse_loss(model(x[mine].bfloat16()), y[mine])
                # Gradients are added up and not averaged: a loss is its share of the step's,
                # whatever the number of ranks.
                (loss / MICRO_BATCHES).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = [optimizer.stored(parameter) for parameter in model.parameters()]
    full_tensors = [w.full_tensor() if hasattr(w, "full_tensor") else w for w in weights]
    digest = hashlib.sha256(b"".join(w.numpy().tobytes() for w in full_tensors)).hexdigest()[:16]
    if rank == 0:
        norm = optimizer.grad_norm.item()
        print(
            f"{ranks} rank{'s'[: ranks - 1]}  gradient norm {norm:.9f}  weights {digest}",
            flush=True,
        )


def main() -> None:
    torch.set_num_threads(1)  # a matmul of two threads adds up in another order than that of one
    if "RANK" not in os.environ:
        train(0, 1)
        words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", __file__]
        sys.exit(
            subprocess.run(
                [sys.executable, *words], env={**os.environ, "OMP_NUM_THREADS": "1"}
            ).returncode
        )
    dist.init_process_group("gloo")
    train(dist.get_rank(), dist.get_world_size())
    dist.barrier()  # no rank takes the group down while another still sends
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
