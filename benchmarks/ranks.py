"""Reductions on several ranks: what reproducible sums cost, and what the usual ones do to a model.

Claim: whole steps with ``reproducible`` take at most 1.05 × the time of PyTorch's and send at
most 1.01 × its bytes, sharded by FSDP2 on 2 ranks (llama-8m) and on 4 (llama-35m); and 10
assignments of 12 micro-batches to 1, 2, 3, 4 and 6 ranks end in one model, where plain DDP and
FSDP2 end in several.

Baseline: FSDP2 with float32 sums, or DDP, in the same run, round by round, on the same weights and tokens; it runs
twice, and the ratio of the two says how quiet the machine was. The ratio of processor time, summed
over the ranks, is measured beside it: others on the machine change it less. A replicated model with
several micro-batches per rank is outside the claim: it sends each micro-batch, where the others
send their sum.

Run: ``./dev bench ranks [--quick]``. Ranks are processes of this machine with one thread each, and
talk over gloo.
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from _forked import group, in_processes
from _timing import Contender, Report, Row, measure, parser
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

import narrowgauge as ng
from narrowgauge.distributed.reduction import GradientReduction
from narrowgauge.distributed.sharding import shard
from narrowgauge.numerics.hashing import fingerprint_all
from narrowgauge.trainer import language_model

BASELINE = "torch"
AGAIN = "torch, again"
LEAVES = 12
STEPS = 3


@dataclass(frozen=True)
class Case:
    """What is timed: a preset, in a format, on ranks.

    Args:
        model: the preset.
        ranks: how many.
        dtype: of the weights, and so of the gradients.
        sharded: by FSDP2; if not, replicated.
        micro_batches: per rank and step.
        tokens: sequences and tokens in each, of a micro-batch.
    """

    model: str
    ranks: int
    dtype: str
    sharded: bool
    micro_batches: int
    tokens: tuple[int, int]

    @property
    def title(self) -> str:
        """The heading of its table."""
        how = "sharded" if self.sharded else "replicated"
        sequences, length = self.tokens
        return (
            f"{self.model} on {self.ranks} ranks, {how}, {self.dtype}, {self.micro_batches} "
            "micro-batches of "
            f"{sequences} × {length} tokens a rank"
        )


def on_ranks(function: Callable[..., Any], num_ranks: int, *arguments: Any) -> Any:
    """What ``function(*arguments)`` returns on the first of so many ranks, forked from this
    process.
    """
    return in_processes(_rank, num_ranks, num_ranks, function, arguments)


def _rank(
    rank: int, folder: Path, num_ranks: int, function: Callable[..., Any], arguments: Sequence[Any]
) -> Any:
    torch.set_num_threads(1)
    with group(rank, folder, num_ranks):
        return function(*arguments)


# ── time and bytes ────────────────────────────────────────────────────────────────────────────────


class Loop:
    """One model with one reduction."""

    def __init__(self, case: Case, reduction: str) -> None:
        self.case = case
        self.model: Any = language_model.build(case.model, seed=0)
        ng.swap_linears(
            self.model, case.dtype
        )  # PyTorch's own bfloat16 matmuls are far slower on many CPUs
        self.model.to(getattr(torch, case.dtype))
        self.called: nn.Module = self.model
        if case.sharded:
            mesh = init_device_mesh("cpu", (case.ranks,))
            shard(self.model, mesh, wire="float32", average=False)
        elif reduction != "reproducible":
            self.called = nn.parallel.DistributedDataParallel(self.model)
        storage = {"float32": "float32", "bfloat16": "word"}[case.dtype]
        self.optimizer = ng.AdamW(
            self.model.parameters(), lr=1e-4, storage=storage, max_grad_norm=1.0
        )
        self.reduction: GradientReduction | None = None
        if reduction == "reproducible":
            self.reduction = ng.reduce_gradients_with(self.model, average=False)
        generator = torch.Generator().manual_seed(dist.get_rank())
        sequences, length = case.tokens
        vocabulary = self.model.config.vocab_size
        self.tokens = torch.randint(
            vocabulary, (case.micro_batches, sequences, length + 1), generator=generator
        )

        self.cpu_seconds: list[float] = []

    def step(self) -> None:
        """One optimizer step, whose processor time over all ranks is noted."""
        began = time.process_time()
        self._step()
        spent = torch.tensor(time.process_time() - began, dtype=torch.float64)
        dist.all_reduce(spent)
        self.cpu_seconds.append(spent.item())

    def _step(self) -> None:
        for place, tokens in enumerate(self.tokens):
            is_last = place == len(self.tokens) - 1
            with self.reduction.micro_batch(is_last=is_last) if self.reduction else nullcontext():
                self.loss_of(tokens).backward()
        self.optimizer.step()
        self.optimizer.zero_grad()

    def loss_of(self, tokens: Tensor) -> Tensor:
        """The loss of a micro-batch, as its share of the step's."""
        share = (
            self.case.ranks * self.case.micro_batches * self.case.tokens[0] * self.case.tokens[1]
        )
        return language_model.loss_sum(self.called, tokens) / share

    def row(self) -> Row:
        """Bytes of this rank's memory."""
        num_local = sum(_local(p).numel() for p in self.model.parameters())
        reduction_bytes = 0.0
        if self.reduction is not None:
            reduction_bytes = self.reduction.bytes_per_param() * num_local
        return {"MB kept": reduction_bytes / 1e6, "B/param kept": reduction_bytes / num_local}


def _local(tensor: Any) -> Tensor:
    part: Tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
    return part


def timed(case: Case, rounds: int) -> list[Row]:
    """The table of one case: whole steps of each reduction in turn, all ranks in step."""
    loops = {BASELINE: "torch", AGAIN: "torch", "reproducible": "reproducible"}
    loop_of = {name: Loop(case, reduction) for name, reduction in loops.items()}
    contenders = []
    for name, loop in loop_of.items():
        contenders.append(Contender(name, loop.step, before=dist.barrier))
    timed_rows = measure(
        contenders,
        baseline=BASELINE,
        rounds=rounds,
        warmup=1,
        wait=dist.barrier,
        clock=time.perf_counter,
    )
    rows = []
    for row, loop in zip(timed_rows, loop_of.values(), strict=True):
        rows.append({**row, **loop.row()})
    baseline = loop_of[BASELINE].cpu_seconds[1:]  # the first was the warm-up
    for row, loop in zip(rows, loop_of.values(), strict=True):
        ratios = []
        for our_seconds, theirs in zip(loop.cpu_seconds[1:], baseline, strict=False):
            ratios.append(our_seconds / theirs)
        row["CPU ratio"] = statistics.median(ratios)
    return rows


# ── how many models ───────────────────────────────────────────────────────────────────────────────


def leaves_of(rank: int, size: int, contiguous: bool) -> list[int]:
    """The micro-batches of a rank."""
    count = LEAVES // size
    if contiguous:
        return list(range(rank * count, (rank + 1) * count))
    return list(range(rank, LEAVES, size))


def tiny() -> LlamaForCausalLM:
    """A model of 150,000 parameters."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=2, max_position_embeddings=64, attn_implementation="sdpa",
    )  # fmt: skip
    return LlamaForCausalLM(config)


def final_model(kind: str, contiguous: bool) -> str:
    """The fingerprint of a small model after three steps of twelve micro-batches."""
    rank = dist.get_rank()
    size = dist.get_world_size()
    model: Any = tiny()
    mesh = init_device_mesh("cpu", (size,))
    if "FSDP2" in kind:
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    if "DDP" in kind:
        called = nn.parallel.DistributedDataParallel(model)
    else:
        called = model
    ours = None
    if "ours" in kind:
        ours = ng.reduce_gradients_with(called, "reproducible", average=False)
    optimizer = ng.AdamW(
        model.parameters(), lr=1e-3, storage="float32", max_grad_norm=1.0, compile=False
    )
    generator = torch.Generator().manual_seed(1)
    for _ in range(STEPS):
        tokens = torch.randint(256, (LEAVES, 1, 33), generator=generator)
        leaves = leaves_of(rank, size, contiguous)
        for place, leaf in enumerate(leaves):
            is_last = place == len(leaves) - 1
            share = LEAVES * 32 / (1 if ours else size)  # theirs divide by the number of ranks
            if ours is None and "FSDP2" in kind:
                model.set_requires_gradient_sync(is_last)
            if ours is None and "DDP" in kind:
                called.require_backward_grad_sync = is_last
            with ours.micro_batch(is_last=is_last) if ours else nullcontext():
                loss = nn.functional.cross_entropy(
                    called(input_ids=tokens[leaf, :, :-1]).logits.flatten(0, 1),
                    tokens[leaf, :, 1:].flatten(),
                    reduction="sum",
                )
                (loss / share).backward()
        optimizer.step()
        optimizer.zero_grad()
    full_tensors = {}
    for n, p in model.named_parameters():
        full_tensors[n] = p.full_tensor() if hasattr(p, "full_tensor") else p
    return fingerprint_all({n: p.detach() for n, p in full_tensors.items()})


KINDS = ("plain DDP", "plain FSDP2", "ours, DDP", "ours, FSDP2", "ours, replicated")


def final_models() -> dict[str, list[str]]:
    """The fingerprints of each kind, in both assignments."""
    prints = {}
    for kind in KINDS:
        prints[kind] = [final_model(kind, contiguous) for contiguous in (False, True)]
    return prints


def count_models(sizes: Sequence[int]) -> list[Row]:
    """The table of final models over all numbers of ranks and assignments."""
    prints_of: dict[str, list[str]] = {kind: [] for kind in KINDS}
    for size in sizes:
        for kind, prints in on_ranks(final_models, size).items():
            prints_of[kind] += prints
    rows = []
    for kind, prints in prints_of.items():
        rows.append({"": kind, "runs": len(prints), "different models": len(set(prints))})
    ours = []
    for kind, prints in prints_of.items():
        if "ours" in kind:
            ours.extend(prints)
    return [*rows, {"": "ours, all of them", "runs": len(ours), "different models": len(set(ours))}]


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    flags = parser(__doc__, rounds=4)
    flags.add_argument("--only", choices=("models", "time"), help="one of the two tables")
    flags.add_argument("--case", type=int, help="the number of the only case to time, from 0")
    options = flags.parse_args(arguments)
    report = Report("ranks", options)
    quick = options.quick
    if options.only != "time":
        report.add(
            f"Final models of {LEAVES} micro-batches on ranks",
            count_models((1, 2) if quick else (1, 2, 3, 4, 6)),
        )
    cases = (
        Case("llama-8m", 2, "float32", True, 2, (1, 32) if quick else (4, 256)),
        Case("llama-8m", 2, "bfloat16", True, 2, (1, 32) if quick else (4, 256)),
        Case("llama-8m", 2, "float32", False, 2, (1, 32) if quick else (4, 256)),
        Case("llama-35m", 4, "float32", True, 1, (1, 32) if quick else (2, 256)),
    )
    if options.only != "models":
        for case in cases if options.case is None else cases[options.case : options.case + 1]:
            report.add(
                case.title, on_ranks(timed, case.ranks, case, 1 if quick else options.rounds)
            )
    return report.end()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
