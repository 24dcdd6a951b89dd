"""Reductions on several ranks: what reproducible sums cost, and what the usual ones do to a model.

Claim: whole steps with ``reproducible`` take at most 1.05 × the time of PyTorch's own sums, on 2 ranks
with llama-8m, sharded and replicated; and 10 assignments of 12 micro-batches to 1, 2, 3, 4 and 6
ranks end in one model, where plain DDP and FSDP2 end in several.

Baseline: FSDP2 with float32 sums, or DDP, in the same run, round by round, on the same weights and
tokens; it runs twice, and the ratio of the two says how quiet the machine was.

Run: ``./dev bench ranks [--only models|time] [--quick]``. Ranks are processes of this machine with one
thread each, and talk over gloo. The numbers of models are written into ``benchmarks/ranks.jsonl``.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from contextlib import nullcontext
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from _conditions import keep_newest
from _timing import Contender, begin, measure, parser, show
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh

import narrowgauge as ng
from narrowgauge.distributed.sharding import shard
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.trainer import language_model

FILE = Path(__file__).with_suffix(".jsonl")
LEAVES = 12
STEPS = 3


def on_ranks(function, num_ranks: int, *arguments):
    """Return what a function returns on the first of so many ranks, forked from this process."""
    results = multiprocessing.get_context("fork").SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        told = (num_ranks, folder, results, function, arguments)
        multiprocessing.start_processes(_rank, told, num_ranks, start_method="fork")
        return results.get()


def _rank(rank: int, num_ranks: int, folder: str, results, function, arguments) -> None:
    """Call a function in a group of gloo, over the loopback interface."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    result = function(*arguments)
    if rank == 0:
        results.put(result)
    dist.barrier()
    dist.destroy_process_group()


# ── a step ────────────────────────────────────────────────────────────────────────────────────────


class Loop:
    """A training loop of one rank.

    Args:
        kind: ``DDP``, ``FSDP2`` with float32 sums, or sums of ours over a replicated or a sharded
            model: ``reproducible`` or ``reproducible FSDP2``.
        micro_batches: of a step, on all ranks.
    """

    def __init__(self, model, kind: str, micro_batches: int, lr: float) -> None:
        self.called = model
        self.sums = None
        self.micro_batches = micro_batches
        if "FSDP2" in kind:
            mesh = init_device_mesh("cpu", (dist.get_world_size(),))
            shard(model, mesh, wire="float32", average=False)
        if kind == "DDP":
            self.called = nn.parallel.DistributedDataParallel(model)
            self.micro_batches /= dist.get_world_size()  # it divides by the number of ranks
        if "reproducible" in kind:
            self.sums = ng.reduce_gradients_with(model, average=False)
        settings = {"storage": "float32", "max_grad_norm": 1.0}
        self.optimizer = ng.AdamW(model.parameters(), lr=lr, **settings)

    def step(self, batches) -> None:
        """Take a step on the micro-batches of this rank, ``[sequences, length + 1]`` each."""
        share = self.micro_batches * batches[0][:, 1:].numel()
        for place, tokens in enumerate(batches):
            is_last = place == len(batches) - 1
            with self.sums.micro_batch(is_last=is_last) if self.sums else nullcontext():
                (language_model.loss_sum(self.called, tokens) / share).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()


# ── time ──────────────────────────────────────────────────────────────────────────────────────────


def timed(kinds, rounds: int):
    """Return a table: whole steps of llama-8m of each kind in turn, all ranks in step."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    contenders = []
    for kind in kinds:
        model = language_model.build("llama-8m", seed=0)
        loop = Loop(model, kind.removesuffix(", again"), 2 * dist.get_world_size(), 1e-4)
        batches = torch.randint(model.config.vocab_size, (2, 4, 257), generator=draw)
        contenders.append(Contender(kind, partial(loop.step, batches), before=dist.barrier))
    settings = {"warmup": 1, "wait": dist.barrier, "clock": time.perf_counter}
    return measure(contenders, rounds=rounds, **settings)


# ── how many models ───────────────────────────────────────────────────────────────────────────────


def final_model(kind: str, contiguous: bool) -> str:
    """Return the fingerprint of a small model after three steps of twelve micro-batches."""
    model = language_model.build("llama-1m", vocab_size=256, seed=0)
    loop = Loop(model, kind, LEAVES, 1e-3)
    draw = torch.Generator().manual_seed(1)
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(STEPS):
        tokens = torch.randint(256, (LEAVES, 1, 33), generator=draw)
        loop.step(tokens.chunk(size)[rank] if contiguous else tokens[rank::size])
    weights = {}
    for name, p in model.named_parameters():
        weights[name] = (p.full_tensor() if kind == "FSDP2" else p).detach()
    return fingerprint_all(weights)


def final_models(kind: str):
    """Return the fingerprints of a kind, in both assignments."""
    return [final_model(kind, contiguous) for contiguous in (False, True)]


def main(arguments) -> int:
    """Print the tables."""
    flags = parser(__doc__, rounds=4)
    flags.add_argument("--only", choices=("models", "time"), help="one table")
    options = flags.parse_args(arguments)
    begin("ranks", options)
    if options.only in (None, "models"):
        rows = []
        for kind in ("DDP", "FSDP2", "reproducible"):
            models = []
            for size in (1, 2) if options.quick else (1, 2, 3, 4, 6):
                models += on_ranks(final_models, size, kind)
            rows.append({"row": kind, "runs": len(models), "different models": len(set(models))})
        show(f"final models of {LEAVES} micro-batches on ranks", rows)
        if not options.quick:
            keep_newest(FILE, rows)
    if options.only in (None, "time") and not options.quick:
        for ours, theirs in (("reproducible FSDP2", "FSDP2"), ("reproducible", "DDP")):
            kinds = (theirs, f"{theirs}, again", ours)
            show("a step of llama-8m on two ranks", on_ranks(timed, 2, kinds, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
