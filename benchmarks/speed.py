"""Measure what the arithmetic costs in time and memory, each row beside a named baseline.

Claim: a step in 6 to 14 bytes a parameter takes no longer than torch's fused float32 AdamW. All is
run as the pages recommend: gradients are clipped to a norm of 1, one of ten steps is audited,
kernels are compiled.

- ``steps``: over ``torch.optim.AdamW(fused=True)`` and ``clip_grad_norm_`` on float32 weights, and
  over the same on bfloat16 weights. A round is ten steps. Each run appends its rows to
  ``benchmarks/steps.jsonl``.
- ``layers``: forward and backward of a small layer, and of a large one, over ``nn.Linear`` in
  bfloat16.
- ``first``: the first step of a process, from an empty and from a warm cache, without the import.
- ``watch``: steps of a loop under ``ng.watch``, over the same steps unwatched.
- ``memory``: the highest memory of a step. The model has the shape of Collage's (2405.03637) at an
  eighth of its width; on Linux, with transformers.

Steps and layers are those of the CUDA device where there is one. What is not installed or cannot
run is left out with a line that says why.

Run: ``./dev bench speed [--only NAME ...] [--quick]``; ``ATEN_CPU_CAPABILITY=avx2`` measures code
for AVX2.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
import warnings
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from _conditions import keep
from _peers import PACKAGES, PEERS, reason
from _timing import Contender, begin, exit_by, measure, parameters, parser, show
from torch import nn

import narrowgauge as ng
from narrowgauge.spec.computes import COMPUTES
from narrowgauge.trainer import language_model

FILE = Path(__file__).with_name("steps.jsonl")
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STORAGES = ("word", "exact", "compact", "states8", "kahan")
OPTIONS = {"lr": 1e-4, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
STEPS = 10
"""Steps of a round: by default one of ten is audited."""
FUSED = "torch fused"
FUSED_BFLOAT16 = "torch AdamW bfloat16"
LINEAR = "nn.Linear"
LAYERS = {
    "cpu": ("float8-row", "int8-row", "mxfp8"),
    "cuda": ("float8-tensor", "float8-row", "float8-row fast", "mxfp8", "nvfp4", "int8-row"),
}
TORCHAO = "torchao float8 "
VOCABULARY = 4096
SIZES = {
    "cpu": {
        "33.5 M": [(8192, 4096)],
        "64 of 1,048,576": [(1024, 1024)] * 64,
        "8.4 M": [(4096, 2048)],
        "300 of 8,192": [(128, 64)] * 300,
        "300 of 64": [(8, 8)] * 300,
        "6 of 64": [(8, 8)] * 6,
    },
    "cuda": {
        "268 M": [(2048, 8192)] * 16,
        "32 of 1,048,576": [(1024, 1024)] * 32,
        "300 of 8,192": [(128, 64)] * 300,
    },
}
QUICK = {"20 of 8,192": [(128, 64)] * 20}


def contenders_of(makers, **kind):
    """Return a contender for each function that runs here; ``kind`` says how it counts a call."""
    contenders = []
    for name, make in makers.items():
        try:
            run = make()
            run()
        except Exception as error:  # a peer is not installed, or not for this device
            print(f"{name}: {reason(error)}")
        else:
            contenders.append(Contender(name, run, **kind))
    return contenders


def timed(makers, rounds: int, **kind):
    """Return a row for each function that runs here, over so many rounds."""
    contenders = contenders_of(makers, **kind)
    if DEVICE == "cpu":
        return measure(contenders, rounds=rounds)
    wait = torch.cuda.synchronize
    return measure(contenders, rounds=rounds, warmup=3, wait=wait, clock=time.perf_counter)


# ── steps ─────────────────────────────────────────────────────────────────────────────────────────


def clipped_step(optimizer, params, norm: float | None = 1.0) -> None:
    """Step, clipped by torch unless by the optimizer."""
    if norm and not hasattr(optimizer, "max_grad_norm"):
        nn.utils.clip_grad_norm_(params, norm)
    optimizer.step()


def repeated(step) -> None:
    """Take the steps of a round."""
    for _ in range(STEPS):
        step()


def clipped_steps(kind, dtype: torch.dtype, shapes):
    """Return the steps of a round."""
    params = parameters(shapes, dtype, DEVICE)
    return partial(repeated, partial(clipped_step, kind(params, **OPTIONS), params))


def steps(shapes, rounds: int, peers):
    """Return a row for the step of each storage, and of each peer that works here."""
    fused = partial(torch.optim.AdamW, fused=True)
    makers = {FUSED: partial(clipped_steps, fused, torch.float32, shapes)}
    ours = partial(ng.AdamW, compile=True, max_grad_norm=1.0)
    kinds = {FUSED_BFLOAT16: fused}
    for storage in STORAGES:
        kinds[storage] = partial(ours, storage=storage)
    kinds["word, no audit"] = partial(ours, storage="word", audit_every=0)
    kinds["word, always audited"] = partial(ours, storage="word", audit_every=1)
    for peer in peers:
        if not peer.spoils_gradients:
            kinds[peer.name] = peer.make
    for name, kind in kinds.items():
        makers[name] = partial(clipped_steps, kind, torch.bfloat16, shapes)
    rows = timed(makers, rounds, per_call=STEPS)
    for row in rows:
        row["over bfloat16"] = row["median ms"] / rows[1]["median ms"]
    return rows


def report_steps(rounds: int, is_quick: bool) -> None:
    """Measure, print and keep the steps of all sizes."""
    for tensors, shapes in (QUICK if is_quick else SIZES[DEVICE]).items():
        rows = steps(shapes, rounds, () if is_quick else PEERS)
        show(f"one step of {tensors} parameters", rows)
        if is_quick:
            continue
        records = []
        for row in rows:
            over = {"over float32": row["ratio"], "over bfloat16": row["over bfloat16"]}
            records.append({"row": row[""], "tensors": tensors, **over})
        keep(FILE, records)


# ── layers ────────────────────────────────────────────────────────────────────────────────────────


def narrowed(layer: nn.Module, name: str) -> None:
    """Give a model of one layer the products of a row."""
    if name.startswith(TORCHAO):
        from torchao.float8 import Float8LinearConfig, convert_to_float8_training

        recipe = Float8LinearConfig.from_recipe_name(name.removeprefix(TORCHAO))
        convert_to_float8_training(layer, config=recipe)
    elif name != LINEAR:
        compute = COMPUTES[name.removesuffix(" fast")]
        if name.endswith(" fast"):  # as torchao's rowwise
            products = {}
            for place, product in compute.products.items():
                products[place] = replace(product, accumulation="fast")
            compute = replace(compute, **products)
        ng.swap_linears(layer, lambda _: compute)


def passes(name: str, compiled: bool, tokens: int, sides):
    """Return forward and backward of a linear layer."""
    wide = nn.Linear(*sides, bias=False, device=DEVICE, dtype=torch.bfloat16)
    layer = nn.Sequential(wide)
    narrowed(layer, name)
    called = torch.compile(layer) if compiled else layer
    x = torch.randn(tokens, sides[0], dtype=torch.bfloat16, device=DEVICE, requires_grad=True)
    slope = torch.randn(tokens, sides[1], dtype=torch.bfloat16, device=DEVICE)

    def run() -> None:
        called(x).backward(slope)

    return run


def report_layers(rounds: int, is_quick: bool) -> None:
    """Measure and print linear layers; in the small one the host is what takes time."""
    names = [LINEAR, *LAYERS[DEVICE]]
    cases = [("eager", 32, (64, 64), 20 * rounds)]
    if not is_quick:
        cases.append(("compiled", 32, (64, 64), 20 * rounds))
        cases.append(("eager", 4096, (2048, 2048), 3))
    if DEVICE == "cuda":
        names += [f"{TORCHAO}tensorwise", f"{TORCHAO}rowwise"]
        cases.append(("compiled", 8192, (4096, 16384), rounds))
    for how, tokens, sides, number in cases:
        makers = {}
        for name in names:
            makers[name] = partial(passes, name, how == "compiled", tokens, sides)
        rows = timed(makers, number)
        show(f"linear layer {sides[0]} × {sides[1]}, {tokens} tokens, both ways, {how}", rows)


# ── in a process of their own ─────────────────────────────────────────────────────────────────────


def fresh(function, argument, **environment: str):
    """Return what a function returns in a new process."""
    spawn = multiprocessing.get_context("spawn")
    with mock.patch.dict(os.environ, environment), ProcessPoolExecutor(1, spawn) as pool:
        return pool.submit(function, argument).result()


def first_step(storage: str) -> float:
    """Return the seconds of a first step of a million parameters."""
    params = parameters([(1024, 1024)], torch.bfloat16)
    optimizer = ng.AdamW(params, storage=storage, compile=True, max_grad_norm=1.0)
    began = time.perf_counter()
    optimizer.step()
    return time.perf_counter() - began


def report_first(rounds: int, is_quick: bool) -> None:
    """Measure and print the seconds of first steps."""
    rows = []
    for storage in STORAGES[:1] if is_quick else STORAGES:
        row = {"": storage}
        with tempfile.TemporaryDirectory() as folder:
            # Clipping compiles the norm with Inductor, which has a cache of its own.
            caches = {"NARROWGAUGE_CACHE": folder, "TORCHINDUCTOR_CACHE_DIR": folder}
            for cache in ("empty", "warm"):
                row[f"{cache} cache s"] = fresh(first_step, storage, **caches)
        rows.append(row)
    show("first step", rows)


def resident(key: str) -> int:
    """Return a field of this process's memory in bytes."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key):
            return int(line.split()[1]) * 1024
    raise OSError(f"/proc/self/status has no {key}")


def memory_of_a_step(storage: str) -> float:
    """Return the bytes of a parameter that the second step takes at its highest."""
    from transformers import OPTConfig, OPTForCausalLM

    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = OPTConfig(
        hidden_size=512, word_embed_proj_dim=512, num_attention_heads=4, num_hidden_layers=16, ffn_dim=2048,
        max_position_embeddings=256, vocab_size=6284, dropout=0.0, attn_implementation="sdpa",
    )  # fmt: skip
    tokens = torch.randint(config.vocab_size, (4, 256))
    before = resident("VmRSS")
    model, optimizer = ng.prepare(OPTForCausalLM(config), f"bfloat16/{storage}", lr=1e-3)
    for _ in range(2):
        Path("/proc/self/clear_refs").write_text("5")  # the highest value begins anew
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return (resident("VmHWM") - before) / sum(p.numel() for p in model.parameters())


def report_memory(rounds: int, is_quick: bool) -> None:
    """Measure and print the memory of a step in each storage."""
    rows = []
    for storage in ("master",) if is_quick else ("master", "collage-plus", "collage-light", "word"):
        # Free memory goes back to the system at once.
        settings = {"MALLOC_TRIM_THRESHOLD_": "0", "MALLOC_MMAP_THRESHOLD_": "65536"}
        rows.append({"": storage, "measured": fresh(memory_of_a_step, storage, **settings)})
        rows[-1]["less master's"] = f"{rows[-1]['measured'] / rows[0]['measured'] - 1:+.1%}"
    show("memory of a step, bytes a parameter", rows)


# ── a watched loop ────────────────────────────────────────────────────────────────────────────────


def loop(name: str, shape, is_watched: bool):
    """Return the step of a loop that people write, over random tokens."""
    model = language_model.build(name, vocab_size=VOCABULARY, seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    tokens = torch.randint(VOCABULARY, shape, generator=torch.Generator().manual_seed(0))
    if is_watched:
        ng.watch(model, optimizer)

    def step() -> None:
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        loss.item()

    return step


def report_watch(rounds: int, is_quick: bool) -> None:
    """Measure and print what a watch costs."""
    name, shapes = ("llama-1m", [(2, 64)]) if is_quick else ("llama-8m", [(8, 64), (8, 256)])
    for shape in shapes:
        contenders = []
        for title, is_watched in (("unwatched", False), ("watched", True)):
            contenders.append(Contender(title, loop(name, shape, is_watched)))
        rows = measure(contenders, rounds=rounds)
        show(f"a watch of {name}, {shape[0]} × {shape[1]} tokens", rows)


# ── the command ───────────────────────────────────────────────────────────────────────────────────

PARTS = {
    "steps": report_steps,
    "layers": report_layers,
    "first": report_first,
    "watch": report_watch,
    "memory": report_memory,
}


def main() -> int:
    """Measure and print."""
    flags = parser(__doc__, rounds=9)
    flags.add_argument("--only", nargs="+", choices=PARTS, default=[*PARTS], help="default: all")
    options = flags.parse_args()
    warnings.simplefilter("ignore")
    begin("speed", options, peers=PACKAGES)
    rounds = 2 if options.quick else options.rounds
    for part in options.only:
        PARTS[part](rounds, options.quick)
    return 0


if __name__ == "__main__":
    exit_by(main)
