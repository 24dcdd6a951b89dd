"""Measure what the arithmetic costs in time and memory, each row beside a named baseline.

Claim: a step in 6 to 14 bytes a parameter takes no longer than torch's fused float32 AdamW, and the
host keeps up with it. All is run as the pages recommend: gradients are clipped to a norm of 1, one
of ten steps is audited, kernels are compiled.

- ``steps``: over ``torch.optim.AdamW(fused=True)`` and ``clip_grad_norm_`` on float32 weights. A
  round is ten steps. Peers that are not installed are left out with a line.
- ``layers``: forward and backward of a small layer, over ``nn.Linear`` in bfloat16.
- ``host``: the host's time of a step on a GPU, of tensors of one element: launches are left out.
- ``first``: the first step of a process, from an empty and from a warm cache, without the import.
- ``watch``: steps of a loop under ``ng.watch``, over the same steps unwatched.
- ``training``: our trainer, over a plain float32 loop, and over compiled autocast with the fused AdamW.
- ``memory``: the highest memory of a step, beside the plan of the same model and batch. The model
  has the shape of Collage's (2405.03637) at an eighth of its width; on Linux, with transformers.

Run: ``./dev bench speed [--only NAME ...] [--quick]``; ``ATEN_CPU_CAPABILITY=avx2`` measures code
for AVX2.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import tempfile
import time
import timeit
import warnings
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _peers import PACKAGES, PEERS, reason
from _timing import Contender, Report, Row, exit_by, measure, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.optim import proof, table
from narrowgauge.torch_support import triton
from narrowgauge.trainer import language_model

STORAGES = ("word", "exact", "compact", "states8", "kahan")
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 10
"""Steps of a round: by default one of ten is audited."""
FUSED = "torch fused"
LINEAR = "nn.Linear"
VOCABULARY = 4096

Shapes = Sequence[tuple[int, ...]]


def parameters(shapes: Shapes, dtype: torch.dtype) -> list[nn.Parameter]:
    """Return parameters with gradients."""
    params = [nn.Parameter(torch.randn(shape).to(dtype)) for shape in shapes]
    for p in params:
        p.grad = torch.randn(p.shape).to(dtype)
    return params


# ── steps, layers, the host ───────────────────────────────────────────────────────────────────────


def clipped_steps(name: str, optimizer: torch.optim.Optimizer, **few: int) -> Contender:
    """Return the steps of a round: clipped by torch, unless by the optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def run() -> None:
        for _ in range(STEPS):
            if not isinstance(optimizer, ng.AdamW):
                nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

    return Contender(name, run, per_call=STEPS, **few)


def steps(shapes: Shapes, report: Report) -> list[Contender]:
    """Return the step of each storage, and of each peer that works here."""
    fused = torch.optim.AdamW(parameters(shapes, torch.float32), fused=True, **OPTIONS)
    contenders = [clipped_steps(FUSED, fused)]
    ours: dict[str, Any] = {"compile": True, "max_grad_norm": 1.0, **OPTIONS}
    for storage in STORAGES:
        params = parameters(shapes, torch.bfloat16)
        contenders.append(clipped_steps(storage, ng.AdamW(params, storage=storage, **ours)))
    unaudited = ng.AdamW(parameters(shapes, torch.bfloat16), audit_every=0, **ours)
    contenders.append(clipped_steps("word, no audit", unaudited))
    for peer in PEERS:
        try:
            optimizer = peer.make(parameters(shapes, torch.bfloat16), **OPTIONS)
            optimizer.step()
        except Exception as error:  # not installed, or not for this device
            report.note(f"{peer.name}: {reason(error)}")
        else:
            if not peer.spoils_gradients:
                contenders.append(clipped_steps(peer.name, optimizer, rounds=2))
    return contenders


def layers(compiled: bool) -> list[Contender]:
    """Return passes of linear layers, so small that the host is what takes time."""
    contenders = []
    for name in (LINEAR, "float8-row", "int8-row", "mxfp8"):
        layer: nn.Module = nn.Sequential(nn.Linear(64, 64, bias=False).bfloat16())
        if name != LINEAR:
            ng.swap_linears(layer, name)
        called: Callable[[Tensor], Tensor] = torch.compile(layer) if compiled else layer
        x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)

        def run(called: Callable[[Tensor], Tensor] = called, x: Tensor = x) -> None:
            called(x).sum().backward()

        contenders.append(Contender(name, run))
    return contenders


def host_times(count: int) -> list[Row]:
    """Return the microseconds that a host takes for a tensor in a step on a GPU."""
    makers: dict[str, Callable[[], torch.optim.Optimizer]] = {}
    for way in ("foreach", "fused"):
        makers[f"torch {way}"] = lambda way=way: torch.optim.AdamW(
            parameters([(1, 1)] * count, torch.float32), **{way: True}, **OPTIONS
        )
    for storage in ("word", "compact"):
        makers[storage] = lambda storage=storage: ng.AdamW(
            parameters([(1, 1)] * count, torch.bfloat16), storage=storage, compile=True, **OPTIONS
        )
    rows = []
    with (
        mock.patch.object(triton, "INTERPRET", True),
        mock.patch.object(proof, "why_not", lambda *args: ""),
        mock.patch.object(table.Table, "launch", lambda *args, **options: None),
    ):
        for name, make in makers.items():
            optimizer = make()
            optimizer.step()
            seconds = [timeit.timeit(optimizer.step, number=1) for _ in range(20)]
            rows.append({"": name, "µs a tensor": 1e6 * statistics.median(seconds) / count})
    return rows


# ── in a process of their own ─────────────────────────────────────────────────────────────────────


def fresh(function: Callable[[str], float], storage: str, **environment: str) -> float:
    """Return what a function returns in a new process."""
    spawn = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(function, storage).result()


def first_step(storage: str) -> float:
    """Return the seconds of a first step of a million parameters."""
    params = parameters([(1024, 1024)], torch.bfloat16)
    optimizer = ng.AdamW(params, storage=storage, compile=True, max_grad_norm=1.0)
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began


def first_steps(storages: Iterable[str]) -> list[Row]:
    rows = []
    for storage in storages:
        with tempfile.TemporaryDirectory() as folder:
            row: Row = {"": storage}
            # Clipping compiles the norm with Inductor, which has a cache of its own.
            caches = {"NARROWGAUGE_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
            for cache in ("empty", "warm"):
                row[f"{cache} cache s"] = fresh(first_step, storage, **caches)
        rows.append(row)
    return rows


def model_and_batch() -> tuple[nn.Module, dict[str, Tensor]]:
    from transformers import OPTConfig, OPTForCausalLM

    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=512, word_embed_proj_dim=512, num_attention_heads=4, num_hidden_layers=16, ffn_dim=2048,
        max_position_embeddings=256, vocab_size=6284, dropout=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    tokens = torch.randint(config.vocab_size, (4, 256))
    return OPTForCausalLM(config), {"input_ids": tokens, "labels": tokens}


def resident(key: str) -> int:
    """Return a field of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def memory_of_a_step(storage: str) -> float:
    """Return the bytes of a parameter that the second step takes at its highest."""
    torch.set_num_threads(1)
    before = resident("VmRSS")
    model, batch = model_and_batch()
    model, optimizer = ng.prepare(model, f"bfloat16/{storage}", lr=1e-3)
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the highest value begins anew
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (resident("VmHWM") - before) / sum(p.numel() for p in model.parameters())


def memory() -> list[Row]:
    """Return the memory of a step in each storage, and the plan's without what a GPU adds."""
    rows: list[Row] = []
    for storage in ("master", "collage-plus", "collage-light", "word"):
        # Free memory goes back to the system at once.
        settings = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
        measured = fresh(memory_of_a_step, storage, **settings)
        model, batch = model_and_batch()
        plan = ng.plan(model.bfloat16(), batch=batch, storage=storage, chip="A100-SXM4-80GB")
        planned = plan.state_bytes + plan.step_bytes
        planned /= sum(p.numel() for p in model.parameters())
        row = {"": storage, "measured B/param": measured, "planned B/param": planned}
        for name in ("measured", "planned"):
            first = (rows or [row])[0][f"{name} B/param"]
            row[f"{name} less"] = f"{row[f'{name} B/param'] / first - 1:+.1%}"
        rows.append(row)
    return rows


# ── whole loops ───────────────────────────────────────────────────────────────────────────────────


class Loop:
    """A loop that people write, over random tokens."""

    def __init__(self, name: str, shape: tuple[int, int], compiled: bool) -> None:
        self.model = language_model.build(name, vocab_size=VOCABULARY, seed=0)
        # Who writes a plain loop takes the default; who compiles also asks for the fused step.
        fused = {"fused": True} if compiled else {}
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4, **fused)
        self.called = torch.compile(self.model) if compiled else self.model
        self.autocast = compiled
        self.tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.autocast):
            loss = self.called(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def watched(name: str, shape: tuple[int, int], rounds: int, report: Report) -> None:
    """Report what a watch costs, and whether it changes a weight."""
    loop = Loop(name, shape, compiled=False)
    plain = Loop(name, shape, compiled=False)
    ng.watch(loop.model, loop.optimizer)
    contenders = [Contender("unwatched", plain.step), Contender("watched", loop.step)]
    rows = measure(contenders, baseline="unwatched", rounds=rounds)
    report.add(f"a watch of {name}, {shape[0]} × {shape[1]} tokens", rows)
    report.note(f"with its defaults a watch costs {rows[1]['ratio'] - 1:.2%} of a step")
    pairs = zip(plain.model.parameters(), loop.model.parameters(), strict=True)
    same = all(torch.equal(p, q) for p, q in pairs)
    report.note(f"weights with and without the watch: {'the same bits' if same else 'DIFFER'}")


PARTS = ("steps", "layers", "host", "first", "watch", "memory")


def report_part(part: str, options: argparse.Namespace, report: Report) -> None:
    """Measure and print one part."""
    quick = options.quick
    rounds = 2 if quick else options.rounds
    name, shape = ("llama-1m", (2, 64)) if quick else ("llama-8m", (8, 256))
    if part == "steps":
        sizes: dict[str, Shapes] = {"20 tensors of 8,192": [(128, 64)] * 20}
        if not quick:
            sizes = {
                "33.5 M parameters": [(8192, 4096)],
                "64 tensors of 1,048,576": [(1024, 1024)] * 64,
                "one tensor of 8,388,608": [(4096, 2048)],
                "300 tensors of 8,192": [(128, 64)] * 300,
            }
        for title, shapes in sizes.items():
            rows = measure(steps(shapes, report), baseline=FUSED, rounds=rounds)
            report.add(f"one step of {title}", rows)
    elif part == "layers":
        for compiled in (False, True):
            rows = measure(layers(compiled), baseline=LINEAR, rounds=20 * rounds)
            how = "compiled" if compiled else "eager"
            report.add(f"forward and backward of a 64 × 64 layer, {how}", rows)
    elif part == "host":
        report.add("the host in a step of 300 tensors on a GPU", host_times(300))
    elif part == "first":
        report.add("first step", first_steps(("word",) if quick else (*STORAGES, "collage-light")))
    elif part == "watch":
        watched(name, shape, rounds, report)
    elif not quick:
        report.add("memory of a step", memory())


def main() -> int:
    """Measure and print."""
    flags = parser(__doc__, rounds=9)
    flags.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    options = flags.parse_args()
    warnings.simplefilter("ignore")
    report = Report("speed", options, peers=PACKAGES)
    for part in options.only:
        report_part(part, options, report)
    return report.end()


if __name__ == "__main__":
    exit_by(main)
