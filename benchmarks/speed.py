"""Measure what the arithmetic costs in time and memory, each row beside a named baseline.

Claim: a step in 6 to 14 bytes a parameter takes no longer than torch's fused float32 AdamW. All is
run as the pages recommend: gradients are clipped to a norm of 1, one of ten steps is audited,
kernels are compiled.

- ``steps``: over ``torch.optim.AdamW(fused=True)`` and ``clip_grad_norm_`` on float32 weights, and
  over the same on bfloat16 weights. A round is ten steps. The ratio depends on the memory: its
  speed is that of the fused step. Peers that are not installed are left out with a line.
- ``layers``: forward and backward of a small layer, and of a large one, over ``nn.Linear`` in
  bfloat16.
- ``first``: the first step of a process, from an empty and from a warm cache, without the import.
- ``watch``: steps of a loop under ``ng.watch``, over the same steps unwatched.
- ``memory``: the highest memory of a step, beside the plan of the same model and batch. The model
  has the shape of Collage's (2405.03637) at an eighth of its width; on Linux, with transformers.

Run: ``./dev bench speed [--only NAME ...] [--quick]``; ``ATEN_CPU_CAPABILITY=avx2`` measures code
for AVX2.
"""

from __future__ import annotations

import argparse
import math
import multiprocessing
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _peers import PACKAGES, PEERS, reason
from _timing import Contender, Row, begin, exit_by, measure, parameters, parser, show
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.trainer import language_model

STORAGES = ("word", "exact", "compact", "states8", "kahan")
OPTIONS: dict[str, Any] = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 10
"""Steps of a round: by default one of ten is audited."""
FUSED = "torch fused"
FUSED_BFLOAT16 = "torch fused bfloat16"
FUSED_BYTES = 40
"""Bytes of a parameter that the clipped fused step moves: 12 of the clipping."""
LINEAR = "nn.Linear"
VOCABULARY = 4096
SIZES = {
    "33.5 M parameters": [(8192, 4096)],
    "64 tensors of 1,048,576": [(1024, 1024)] * 64,
    "one tensor of 8,388,608": [(4096, 2048)],
    "300 tensors of 8,192": [(128, 64)] * 300,
    "300 tensors of 64": [(8, 8)] * 300,
    "6 tensors of 64": [(8, 8)] * 6,
}


# ── steps and layers ──────────────────────────────────────────────────────────────────────────────


def clipped_steps(name: str, optimizer: torch.optim.Optimizer) -> Contender:
    """Return the steps of a round: clipped by torch, unless by the optimizer."""
    params = [p for group in optimizer.param_groups for p in group["params"]]

    def run() -> None:
        for _ in range(STEPS):
            if not isinstance(optimizer, ng.AdamW):
                nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()

    return Contender(name, run, per_call=STEPS)


def steps(shapes: Sequence[tuple[int, ...]]) -> list[Contender]:
    """Return the step of each storage, and of each peer that works here."""
    fused = torch.optim.AdamW(parameters(shapes, torch.float32), fused=True, **OPTIONS)
    narrow = torch.optim.AdamW(parameters(shapes, torch.bfloat16), fused=True, **OPTIONS)
    contenders = [clipped_steps(FUSED, fused), clipped_steps(FUSED_BFLOAT16, narrow)]
    kinds: dict[str, dict[str, Any]] = {name: {"storage": name} for name in STORAGES}
    kinds["word, no audit"] = {"audit_every": 0}
    for name, kind in kinds.items():
        kind |= {"compile": True, "max_grad_norm": 1.0, **OPTIONS}
        contenders.append(clipped_steps(name, ng.AdamW(parameters(shapes, torch.bfloat16), **kind)))
    for peer in PEERS:
        if peer.spoils_gradients:
            continue
        try:
            optimizer = peer.make(parameters(shapes, torch.bfloat16), **OPTIONS)
            optimizer.step()
        except Exception as error:  # not installed, or not for this device
            print(f"{peer.name}: {reason(error)}")
        else:
            contenders.append(clipped_steps(peer.name, optimizer))
    return contenders


def show_steps(title: str, shapes: Sequence[tuple[int, ...]], rounds: int) -> None:
    """Measure and print the step of tensors of shapes."""
    rows = measure(steps(shapes), rounds=rounds)
    fused, narrow, *_ = rows
    for row in rows:
        row["over bfloat16"] = row["median ms"] / narrow["median ms"]
        row["µs a tensor"] = 1e3 * row["median ms"] / len(shapes)
    num_bytes = FUSED_BYTES * sum(math.prod(shape) for shape in shapes)
    speed = num_bytes * torch.get_num_threads() / (1e6 * fused["median ms"])
    show(f"one step of {title}; the fused step moves {speed:.3g} GB/s", rows)


def layers(compiled: bool, tokens: int = 32, width: int = 64) -> list[Contender]:
    """Return passes of linear layers; by default so small that the host is what takes time."""
    contenders = []
    for name in (LINEAR, "float8-row", "int8-row", "mxfp8"):
        layer: Any = nn.Sequential(nn.Linear(width, width, bias=False).bfloat16())
        if name != LINEAR:
            ng.swap_linears(layer, name)
        called = torch.compile(layer) if compiled else layer
        x = torch.randn(tokens, width, dtype=torch.bfloat16, requires_grad=True)

        def run(called: Any = called, x: Tensor = x) -> None:
            called(x).sum().backward()

        contenders.append(Contender(name, run))
    return contenders


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


def first_steps(storages: Sequence[str]) -> list[Row]:
    """Return the seconds of first steps."""
    rows = []
    for storage in storages:
        row: Row = {"": storage}
        with tempfile.TemporaryDirectory() as folder:
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
        row: Row = {"": storage, "measured": fresh(memory_of_a_step, storage, **settings)}
        model, batch = model_and_batch()
        plan = ng.plan(model.bfloat16(), batch=batch, storage=storage, chip="A100-SXM4-80GB")
        num_params = sum(p.numel() for p in model.parameters())
        row["planned"] = (plan.state_bytes + plan.step_bytes) / num_params
        rows.append(row)
    for row in rows:
        for name in ("measured", "planned"):
            row[f"{name} less master's"] = f"{row[name] / rows[0][name] - 1:+.1%}"
    return rows


# ── a watched loop ────────────────────────────────────────────────────────────────────────────────


class Loop:
    """A loop that people write, over random tokens."""

    def __init__(self, name: str, shape: tuple[int, int]) -> None:
        self.model = language_model.build(name, vocab_size=VOCABULARY, seed=0)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))

    def step(self) -> None:
        loss = self.model(input_ids=self.tokens, labels=self.tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss.item()


def watched(name: str, shape: tuple[int, int], rounds: int) -> None:
    """Report what a watch costs, and whether it changes a weight."""
    plain, loop = Loop(name, shape), Loop(name, shape)
    ng.watch(loop.model, loop.optimizer)
    contenders = [Contender("unwatched", plain.step), Contender("watched", loop.step)]
    rows = measure(contenders, rounds=rounds)
    show(f"a watch of {name}, {shape[0]} × {shape[1]} tokens", rows)
    pairs = zip(plain.model.parameters(), loop.model.parameters(), strict=True)
    is_same = all(torch.equal(p, q) for p, q in pairs)
    print(f"weights with and without the watch: {'the same bits' if is_same else 'DIFFER'}")


# ── the command ───────────────────────────────────────────────────────────────────────────────────

PARTS = ("steps", "layers", "first", "watch", "memory")


def report_part(part: str, options: argparse.Namespace) -> None:
    """Measure and print one part."""
    quick = options.quick
    rounds = 2 if quick else options.rounds
    if part == "steps":
        for title, shapes in (
            {"20 tensors of 8,192": [(128, 64)] * 20} if quick else SIZES
        ).items():
            show_steps(title, shapes, rounds)
    elif part == "layers":
        for how in ("eager", "compiled"):
            rows = measure(layers(how == "compiled"), rounds=20 * rounds)
            show(f"forward and backward of a 64 × 64 layer, {how}", rows)
        if not quick:
            rows = measure(layers(False, 4096, 2048), rounds=3)
            show("forward and backward of 4,096 tokens in a 2,048 × 2,048 layer", rows)
    elif part == "first":
        show("first step", first_steps(STORAGES[:1] if quick else STORAGES))
    elif part == "watch":
        name, shapes = ("llama-1m", [(2, 64)]) if quick else ("llama-8m", [(8, 64), (8, 256)])
        for shape in shapes:
            watched(name, shape, rounds)
    elif not quick:
        show("memory of a step, bytes a parameter", memory())


def main() -> int:
    """Measure and print."""
    flags = parser(__doc__, rounds=9)
    flags.add_argument("--only", nargs="+", choices=PARTS, default=PARTS, help="default: all")
    options = flags.parse_args()
    warnings.simplefilter("ignore")
    begin("speed", options, peers=PACKAGES)
    for part in options.only:
        report_part(part, options)
    return 0


if __name__ == "__main__":
    exit_by(main)
