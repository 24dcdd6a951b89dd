"""Reductions on several ranks: what reproducible sums cost, and what the usual ones do to a model.

Claim: whole steps with ``reproducible`` take at most 1.05 × the time of PyTorch's own sums, sharded
by FSDP2 on 2 ranks (llama-8m) and on 4 (llama-35m); and 10 assignments of 12 micro-batches to 1, 2,
3, 4 and 6 ranks end in one model, where plain DDP and FSDP2 end in several.

Baseline: FSDP2 with float32 sums, or DDP, in the same run, round by round, on the same weights and
tokens; it runs twice, and the ratio of the two says how quiet the machine was.

Run: ``./dev bench ranks [--only models|time] [--quick]``. Ranks are processes of this machine with one
thread each, and talk over gloo.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _timing import Contender, Row, begin, measure, parser, show
from torch import multiprocessing, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import narrowgauge as ng
from narrowgauge.distributed.sharding import shard
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.trainer import language_model

LEAVES = 12
STEPS = 3


@dataclass(frozen=True)
class Case:
    """What is timed: a preset with float32 weights, on ranks.

    Args:
        sharded: by FSDP2; if not, replicated.
        micro_batches: of a rank in a step, each of ``tokens``: sequences, and their length.
    """

    model: str
    ranks: int
    sharded: bool
    micro_batches: int
    tokens: tuple[int, int]


CASES = (
    Case("llama-8m", 2, True, 2, (4, 256)),
    Case("llama-8m", 2, False, 2, (4, 256)),
    Case("llama-35m", 4, True, 1, (2, 256)),
)


def on_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """Return what a function returns on the first of so many ranks, forked from this process."""
    with tempfile.TemporaryDirectory() as folder:
        told = (num_ranks, Path(folder), function, arguments)
        multiprocessing.start_processes(_rank, told, num_ranks, start_method="fork")
        return pickle.loads(Path(folder, "result").read_bytes())


def _rank(
    rank: int, num_ranks: int, folder: Path, function: Callable[..., Any], arguments: Sequence[Any]
) -> None:
    """Call a function in a group of gloo, over the loopback interface."""
    torch.set_num_threads(1)
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    meeting = f"file://{folder / 'meeting'}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=num_ranks)
    result = function(*arguments)
    if rank == 0:
        (folder / "result").write_bytes(pickle.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


# ── time ──────────────────────────────────────────────────────────────────────────────────────────


def stepper(case: Case, reduction: str) -> Callable[[], None]:
    """Return a training step of one model with one reduction."""
    model: Any = language_model.build(case.model, seed=0)
    called = model
    if case.sharded:
        shard(model, init_device_mesh("cpu", (case.ranks,)), wire="float32", average=False)
    elif reduction != "reproducible":
        called = nn.parallel.DistributedDataParallel(model)
    optimizer = ng.AdamW(model.parameters(), lr=1e-4, storage="float32", max_grad_norm=1.0)
    sums = None
    if reduction == "reproducible":
        sums = ng.reduce_gradients_with(model, average=False)
    sequences, length = case.tokens
    draw = torch.Generator().manual_seed(dist.get_rank())
    shape = (case.micro_batches, sequences, length + 1)
    batches = torch.randint(model.config.vocab_size, shape, generator=draw)
    share = case.ranks * case.micro_batches * sequences * length

    def step() -> None:
        for place, tokens in enumerate(batches):
            is_last = place == len(batches) - 1
            with sums.micro_batch(is_last=is_last) if sums else nullcontext():
                (language_model.loss_sum(called, tokens) / share).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def timed(kinds: dict[str, tuple[Case, str]], rounds: int) -> list[Row]:
    """Return a table: whole steps of each case and reduction in turn, all ranks in step."""
    contenders = []
    for name, kind in kinds.items():
        contenders.append(Contender(name, stepper(*kind), before=dist.barrier))
    settings: dict[str, Any] = {"warmup": 1, "wait": dist.barrier, "clock": time.perf_counter}
    return measure(contenders, rounds=rounds, **settings)


# ── how many models ───────────────────────────────────────────────────────────────────────────────


def final_model(kind: str, contiguous: bool) -> str:
    """Return the fingerprint of a small model after three steps of twelve micro-batches."""
    size = dist.get_world_size()
    called: Any = language_model.build("llama-1m", vocab_size=256, seed=0)
    model = called
    if kind == "DDP":
        called = nn.parallel.DistributedDataParallel(model)
    else:
        for part in (*model.model.layers, model):
            fully_shard(part, mesh=init_device_mesh("cpu", (size,)))
    sums = None
    share = LEAVES * 32
    if kind == "reproducible":
        sums = ng.reduce_gradients_with(called, average=False)
    else:
        share /= size  # theirs divide by the number of ranks
    settings: dict[str, Any] = {"storage": "float32", "max_grad_norm": 1.0, "compile": False}
    optimizer = ng.AdamW(model.parameters(), lr=1e-3, **settings)
    draw = torch.Generator().manual_seed(1)
    if contiguous:
        leaves = torch.arange(LEAVES).chunk(size)[dist.get_rank()].tolist()
    else:
        leaves = torch.arange(LEAVES)[dist.get_rank() :: size].tolist()
    for _ in range(STEPS):
        tokens = torch.randint(256, (LEAVES, 1, 33), generator=draw)
        for leaf in leaves:
            is_last = leaf == leaves[-1]
            if kind == "FSDP2":
                model.set_requires_gradient_sync(is_last)
            if kind == "DDP":
                called.require_backward_grad_sync = is_last
            with sums.micro_batch(is_last=is_last) if sums else nullcontext():
                (language_model.loss_sum(called, tokens[leaf]) / share).backward()
        optimizer.step()
        optimizer.zero_grad()
    weights = {}
    for name, p in model.named_parameters():
        weights[name] = (p.full_tensor() if kind != "DDP" else p).detach()
    return fingerprint_all(weights)


def final_models(kind: str) -> list[str]:
    """Return the fingerprints of a kind, in both assignments."""
    return [final_model(kind, contiguous) for contiguous in (False, True)]


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    flags = parser(__doc__, rounds=4)
    flags.add_argument("--only", choices=("models", "time"), help="one table")
    options = flags.parse_args(arguments)
    begin("ranks", options)
    if options.only in (None, "models"):
        rows: list[Row] = []
        for kind in ("DDP", "FSDP2", "reproducible"):
            models: list[str] = []
            for size in (1, 2) if options.quick else (1, 2, 3, 4, 6):
                models += on_ranks(final_models, size, kind)
            rows.append({"": kind, "runs": len(models), "different models": len(set(models))})
        show(f"final models of {LEAVES} micro-batches on ranks", rows)
    if options.only in (None, "time") and not options.quick:
        for case in CASES:
            kinds = {"torch": (case, "torch"), "torch, again": (case, "torch")}
            kinds["reproducible"] = (case, "reproducible")
            show(str(case), on_ranks(timed, case.ranks, kinds, options.rounds))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
