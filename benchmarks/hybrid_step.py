"""Measure a step of 2 × 2 ranks by parts, FSDP2 over two and tensor parallel over two, beside its
plan.

Claim: the measured step is nearer to the plan of its own layout than to the plans of the same model
and tokens under FSDP2 over four ranks and under tensor parallelism over four. These are the control.
The distance is the sum over parts of |planned − measured| seconds, over those of the measured step.

A rank is a process of this machine with one thread. Ranks talk over gloo, whose reduce-scatter is
an all-reduce. ``torch.profiler`` measures a step, and the names of operations divide it. An exchange
counts as long as on the rank that came last; the rest of the other ranks' time in it is waiting.
Figures are medians over rounds of the means over ranks.

Baseline: the plan for a chip whose rates were measured in the same rounds, while all ranks multiply,
add, or gather at once. The plan takes them whole: published efficiencies and overlaps are of GPUs.

Run: ``./dev bench hybrid_step [--rounds N] [--quick]``; five minutes of two cores. Unless quick, it
writes ``benchmarks/hybrid_step.jsonl``: planned over measured time by parts, which
``docs/evidence.py`` cites.
"""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

import torch
import torch.distributed as dist
from _timing import Row, begin, parser, show
from torch.distributed import tensor as placements
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import parallel
from torch.nn.functional import cross_entropy
from torch.profiler import profile

import narrowgauge as ng
from narrowgauge.distributed.sharding import shard
from narrowgauge.planner.ask import Shares
from narrowgauge.planner.estimate import Estimate
from narrowgauge.planner.layouts import Layout
from narrowgauge.planner.machine import cluster_of
from narrowgauge.planner.model import read_model
from narrowgauge.planner.program import read_program
from narrowgauge.planner.step_time import (
    TENSOR_SHOWN,
    exchanges_of_batch,
    exchanges_of_state,
)
from narrowgauge.spec.chips import get_chip
from narrowgauge.spec.notation import parse
from narrowgauge.trainer import language_model
from ranks import on_ranks

FILE = Path(__file__).with_suffix(".jsonl")
CITED = ("matmuls", "FSDP2", "tensor parallel", "attention")
LAYOUTS = {"shard 2 × tensor 2": (2, 2), "shard 4": (4, 1), "tensor 4": (1, 4)}
"""Ranks of FSDP2, and tensor-parallel ranks."""
MODEL = read_model("llama-35m")
WHOLE = placements.Replicate()
COLUMN = parallel.ColwiseParallel()
ROW = parallel.RowwiseParallel()
TENSOR_PARALLEL = {
    "model.embed_tokens": parallel.RowwiseParallel(input_layouts=WHOLE),
    "lm_head": parallel.ColwiseParallel(
        output_layouts=placements.Shard(-1), use_local_output=False
    ),
    "model.layers.*.self_attn": parallel.PrepareModuleInput(
        input_kwarg_layouts={"hidden_states": WHOLE},
        desired_input_kwarg_layouts={"hidden_states": WHOLE},
    ),
    "model.layers.*.self_attn.[qkv]_proj": COLUMN,
    "model.layers.*.self_attn.o_proj": ROW,
    "model.layers.*.mlp": parallel.PrepareModuleInput(
        input_layouts=WHOLE, desired_input_layouts=WHOLE
    ),
    "model.layers.*.mlp.gate_proj": COLUMN,
    "model.layers.*.mlp.up_proj": COLUMN,
    "model.layers.*.mlp.down_proj": ROW,
}
COMPUTING = {
    "optimizer": r"^optimizer\.(step|zero_grad)",
    "waiting": r"^(c10d|nccl|gloo|_c10d_functional|fsdp)\b|record_param_comms",
    "loss": "log_?softmax|cross_?entropy|nll_?loss",
    "attention": "attention|attn",
    "matmuls": "^aten::(addmm|mm|bmm|matmul|linear)$",
    "elementwise": "^aten::",
}
"""The first name that matches an operation, or one that calls it, says its part."""
EXCHANGES = {
    "FSDP2": ("FSDP::",),
    "tensor parallel": ("_c10d_functional::all_reduce", "_c10d_functional::wait_tensor"),
}
"""Names of the spans in a trace."""
Parts = dict[str, float]
"""Seconds of a step."""


def mean_of_ranks(values: Parts) -> Parts:
    """Return the means over ranks, of which one may get more of the cores than another."""
    total = torch.tensor([*values.values()])
    dist.all_reduce(total)
    means = total / dist.get_world_size()
    return dict(zip(values, means.tolist(), strict=True))


def step_of(mesh: Any, num_sequences: int, length: int) -> Callable[[], None]:
    """Return a training step of this rank."""
    model: Any = language_model.build(MODEL.name, seed=0)
    parallel.parallelize_module(model, mesh["tensor"], TENSOR_PARALLEL)
    shard(model, mesh["shard"])
    optimizer = ng.AdamW(model.parameters(), lr=1e-4, storage="float32")
    torch.manual_seed(mesh.get_local_rank("shard"))
    batch = torch.randint(MODEL.vocab_size, (num_sequences, length + 1))

    def step() -> None:
        logits = model(input_ids=batch[:, :-1], use_cache=False).logits
        with parallel.loss_parallel():
            cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def part_of(event: Any) -> str:
    """Return the part of an operation; the outermost caller with a name of its own decides."""
    caller = part_of(event.cpu_parent) if event.cpu_parent else ""
    if caller not in ("", "matmuls", "elementwise"):
        return caller
    for part, pattern in COMPUTING.items():
        if re.search(pattern, event.name, re.IGNORECASE):
            return part
    return caller


def traced(step: Callable[[], None]) -> Parts:
    """Return the seconds of a step by part."""
    dist.barrier()
    with profile() as profiler:
        step()
    parts = dict.fromkeys(COMPUTING, 0.0)
    events = sorted(profiler.events(), key=lambda event: event.time_range.start)
    for event in events:
        part = part_of(event)
        if part and event.thread == events[0].thread:
            parts[part] += 1e-6 * event.self_cpu_time_total
    for exchange, names in EXCHANGES.items():
        spans = []
        for event in events:
            is_nested = event.cpu_parent and event.cpu_parent.name.startswith(names)
            if event.name.startswith(names) and not is_nested:
                spans.append(event.cpu_time_total)
        least = torch.tensor(spans)
        dist.all_reduce(least, dist.ReduceOp.MIN)
        parts[exchange] = 1e-6 * float(least.sum())
        parts["waiting"] -= parts[exchange]
    return mean_of_ranks(parts)


def seconds_of(work: Callable[..., object], *operands: Any) -> float:
    """Return the seconds of one of 20 calls: so many that all ranks share the cores meanwhile."""
    began = time.perf_counter()
    for _ in range(20):
        work(*operands)
    return (time.perf_counter() - began) / 20


def unit_seconds(num_tokens: int, pair: Any) -> Parts:
    """Return the seconds of an operation of a matmul, of a byte of an addition, and of a byte of a
    gather of 8 MiB between two ranks.
    """
    x = torch.ones(num_tokens, 4 * MODEL.hidden_size)
    large = torch.ones(2**23)
    part = torch.ones(2**20)
    whole = torch.empty(2 * part.numel())
    return mean_of_ranks(
        {
            "matmuls": seconds_of(torch.mm, x, x.t()) / (2 * num_tokens * x.numel()),
            "memory": seconds_of(large.add_, large) / (8 * large.numel()),
            "link": seconds_of(dist.all_gather_into_tensor, whole, part, pair) / (4 * part.numel()),
        }
    )


def on_a_rank(length: int, rounds: int) -> list[Parts]:
    """Return the median seconds of a unit of work, and of a step by part."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("shard", "tensor"))
    step = step_of(mesh, 2, length)
    step()  # compiles
    units = []
    steps = []
    for _ in range(rounds):
        units.append(unit_seconds(2 * length, mesh.get_group("tensor")))
        steps.append(traced(step))
    medians = []
    for rows in (units, steps):
        medians.append({name: median(row[name] for row in rows) for name in rows[0]})
    return medians


def planned(sharding: int, tensor: int, length: int, units: Parts) -> Parts:
    """Return the seconds of a step by part, of a chip with these rates."""
    chip = replace(
        get_chip("V100-SXM2-32GB"),
        peak_tflops={"float32": 1e-12 / units["matmuls"]},
        bandwidth_gb_per_second=1e-9 / units["memory"],
        link_gb_per_second=1e-9 / units["link"],
    )
    program = read_program("narrowgauge")
    shares = {"hidden": 0.0, "float8": 1.0, "experts": 0.0}
    for name in ("linear", "attention", "bandwidth", "link", "network"):
        shares[name] = 1.0
    layout = Layout(shard=sharding, tensor=tensor, micro_batch=4 // sharding)
    ask = MODEL, parse("float32/float32"), layout, cluster_of(chip, 4), length, program
    rates = Shares(**shares)
    job = Estimate(*ask, shares=rates)
    parts = {part: job.step.get(part, 0.0) for part in COMPUTING}  # the plan has no waiting
    parts["FSDP2"] = exchanges_of_state(job, rates, 0.0).get("shard", 0.0)
    sent = exchanges_of_batch(job, rates, 0.0).get("tensor", 0.0)
    parts["tensor parallel"] = sent / TENSOR_SHOWN
    return parts


def main(arguments: Sequence[str]) -> int:
    """Print the tables."""
    options = parser(__doc__, rounds=9).parse_args(arguments)
    begin("hybrid_step", options)
    length = 32 if options.quick else 256
    units, measured = on_ranks(on_a_rank, 4, length, options.rounds)
    rates = {name: 1e-9 / seconds for name, seconds in units.items()}
    show("what a rank reaches, 10⁹ a second", [rates])
    rows: list[Row] = [{"seconds": "measured"} | measured]
    total = sum(measured.values())
    for name, ranks in LAYOUTS.items():
        plan = planned(*ranks, length, units)
        apart = sum(abs(plan[part] - measured[part]) for part in plan)
        share = sum(plan.values()) / total
        rows.append({"seconds": name} | plan | {"share": share, "distance": apart / total})
    show("a step measured, and three plans", rows)
    if not options.quick:
        own = rows[1]
        ratios = [f"{part} {own[part] / measured[part]:.2f}" for part in CITED]
        record = {
            "row": own["seconds"], "figure": ", ".join(ratios), "distances": [row["distance"] for row in rows[1:]],
            "ranks": 4, "vectors": torch.backends.cpu.get_cpu_capability(), "date": date.today().isoformat(),
        }  # fmt: skip
        FILE.write_text(json.dumps(record, ensure_ascii=False) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
