"""Measure a step whose states are on the host, which is waited for with CPU offload.

Claim: AdamW in 8 bytes a parameter on the host takes no longer than peers take in 8 to 16, and keeps
each update. A step begins with gradients in bfloat16 and ends with new weights in bfloat16, so that
float32 weights need two copies more. Transfers are not timed: they are the same for all.

- ``bare``: 33.5 M parameters, with one thread and with two. A copy of 134 MB, which moves 8 bytes a
  parameter, says what the memory gives. A step moves each byte of weight and states twice, and
  reads gradients; clipping reads them once more, and torch's also scales them.
- ``engines``: 32 linear layers, clipped: the whole step of DeepSpeed's ZeRO 2, and that of FSDP2.

Each repeat is a new process, which draws the order of its contenders; its rows are appended to
``benchmarks/offload.jsonl``. Baseline: torch's fused AdamW on float32 weights, with its copies.
``PRIME_RL`` names a checkout of prime-rl (commit 559b44772), whose kernel reads gradients and writes
weights in bfloat16 itself. What is not installed is left out with a line that says why. SuperOffload
and ZenFlow are not run.

Run: ``./dev bench offload [--only bare engines] [--rounds 9]``
"""

from __future__ import annotations

import importlib
import itertools
import os
import random
import sys
import time
import warnings
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch
from _conditions import keep
from _peers import bytes_held
from _rows import PEERS_BY_NAME
from _timing import Contender, begin, exit_by, measure, parser, show
from speed import FUSED, OPTIONS, STEPS, clipped_step, contenders_of, fresh, repeated
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import narrowgauge as ng
from narrowgauge.distributed.sharding import shard
from narrowgauge.torch_support.machine import installed_version

FILE = Path(__file__).with_name("offload.jsonl")
ELEMENTS = 2**25
CASES = {
    "one matrix": ([(8192, 4096)], None),
    "32 matrices, clipped": ([(1024, 1024)] * 32, 1.0),
    "one vector, clipped": ([(ELEMENTS,)], 1.0),
}


def prime_rl(params):
    """Return prime-rl's kernel as an optimizer of bfloat16 weights, which keeps float32 ones."""
    sys.path.append(os.environ["PRIME_RL"] + "/src/prime_rl/trainer/optim")
    kernel = importlib.import_module("cpu_adam").adamw_step
    weights = [p.detach().float() for p in params]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    steps = [torch.tensor(0.0) for _ in params]
    options = {name: value for name, value in OPTIONS.items() if name != "betas"}
    options["beta1"], options["beta2"] = OPTIONS["betas"]

    def step() -> None:
        grads = [p.grad for p in params]
        scale = 1.0
        if optimizer.max_grad_norm:
            scale = min(1.0, optimizer.max_grad_norm / float(nn.utils.get_total_norm(grads)))
        states = (weights, grads, first, second, steps, [p.detach() for p in params])
        kernel(*states, gradient_scale=scale, **options)

    optimizer = SimpleNamespace(step=step, max_grad_norm=None, param_groups=[{"params": params}])
    kept = zip(weights, first, second, strict=True)
    optimizer.state = {p: dict(enumerate(parts)) for p, parts in zip(params, kept, strict=True)}
    return optimizer


ours = partial(ng.AdamW, compile=True, **OPTIONS)
fused = partial(torch.optim.AdamW, fused=True, **OPTIONS)
deepspeed = partial(PEERS_BY_NAME["DeepSpeedCPUAdam"].make, **OPTIONS)
narrow_deepspeed = partial(PEERS_BY_NAME["DeepSpeedCPUAdam 16-bit states"].make, **OPTIONS)
WIDE = {
    FUSED: fused,
    "DeepSpeedCPUAdam": deepspeed,
    "float32-states8": partial(ours, storage="float32-states8"),
}
"""Ways over float32 weights, of which the first is the baseline."""
WAYS = WIDE | {"DeepSpeedCPUAdam 16-bit states": narrow_deepspeed, "prime-rl": prime_rl}
for _storage in ("word", "exact", "compact", "states8"):
    WAYS[_storage] = partial(ours, storage=_storage)


def bare_steps(name: str, grads, norm: float | None, facts):
    """Return ten steps of a way; note the bytes of a parameter that it holds with a gradient, and
    that a step moves.
    """
    is_wide = name in WIDE
    dtype = torch.float32 if is_wide else torch.bfloat16
    leaving = [torch.zeros_like(g) for g in grads]
    params = [nn.Parameter(torch.ones(g.shape, dtype=dtype)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.to(dtype, copy=True)
    optimizer = WAYS[name](params)
    clips = hasattr(optimizer, "max_grad_norm")
    if clips:
        optimizer.max_grad_norm = norm

    def step() -> None:
        if is_wide:
            torch._foreach_copy_([p.grad for p in params], grads)
        clipped_step(optimizer, params, norm)
        if is_wide:
            torch._foreach_copy_(leaving, [p.detach() for p in params])

    step()
    size = dtype.itemsize
    states = bytes_held(optimizer) - 4
    moved = 3 * size + 2 * states
    if is_wide:
        moved += 12  # 2 and 4 of a gradient, 4 and 2 of a weight
    if norm:
        moved += size if clips else 3 * size
    facts[name] = {"held": 2 * size + states, "moved": moved}
    return partial(repeated, step)


def drawn(names, seed: int):
    """Return names in an order of the seed, behind the first, which is the baseline."""
    first, *others = names
    return [first, *random.Random(seed).sample(others, len(others))]


def rows_of(contenders, tensors: str, rounds: int):
    """Yield a row for each contender that runs here, and number of threads."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        for row in measure(contenders, rounds=rounds, clock=time.perf_counter):
            shared = {"row": row[""], "tensors": tensors, "threads": threads}
            yield shared | {"over float32": row["ratio"], "median ms": row["median ms"]}


def bare(seed: int):
    """Yield the rows of one repeat of bare steps."""
    source, target = torch.zeros(2, ELEMENTS)
    copy = partial(target.copy_, source)
    for tensors, (shapes, norm) in CASES.items():
        grads = [torch.randn(shape).mul_(1e-3).bfloat16() for shape in shapes]
        facts = {"a copy": {"moved": 8.0}}
        makers = {}
        for name in drawn(WAYS, seed):
            makers[name] = partial(bare_steps, name, grads, norm, facts)
        makers["a copy"] = lambda: partial(repeated, copy)
        for row in rows_of(contenders_of(makers, per_call=STEPS), tensors, 2):
            row |= facts[row["row"]]
            yield row | {"GB/s": row["moved"] * ELEMENTS * 1e-6 / row["median ms"]}


# ── engines ───────────────────────────────────────────────────────────────────────────────────────

ZERO = {
    "train_micro_batch_size_per_gpu": 4,
    "bf16": {"enabled": True},
    "gradient_clipping": 1.0,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "zero_force_ds_cpu_optimizer": False,
    "zero_allow_untested_optimizer": True,
}
ENGINES = {
    "FSDP2, torch fused": (torch.float32, fused),
    "FSDP2, word": (torch.bfloat16, partial(ours, storage="word", max_grad_norm=1.0)),
    "ZeRO 2, DeepSpeedCPUAdam": (torch.float32, deepspeed),
    "ZeRO 2, float32-states8": (torch.float32, WAYS["float32-states8"]),
}


def engine_of(name: str) -> Contender:
    """Return the whole step of an engine, which follows a backward pass."""
    dtype, make = ENGINES[name]
    model = nn.Sequential(*(nn.Linear(1024, 1024, False, "cpu", dtype) for _ in range(32)))
    for layer in model:  # variances stay: a gradient that is nearly zero is slow everywhere
        nn.init.normal_(layer.weight, std=1 / 32)
    if name.startswith("ZeRO"):
        from deepspeed import initialize

        params = list(model.parameters())
        optimizer = make(params)
        engine = initialize(None, model, optimizer, params, config=ZERO)[0]
        x = torch.ones(4, 1024, dtype=torch.bfloat16)
        return Contender(
            name, engine.step, lambda: engine.backward(engine(x).float().square().mean())
        )
    shard(model, init_device_mesh("cpu", (1,)), offload=True)
    optimizer = make(model.parameters())
    x = torch.ones(4, 1024, dtype=dtype)

    def step() -> None:
        clipped_step(optimizer, model.parameters())
        optimizer.zero_grad()

    return Contender(name, step, lambda: model(x).float().square().mean().backward())


def engines(seed: int):
    """Yield the rows of one repeat of whole steps."""
    torch.distributed.init_process_group("gloo")
    contenders = [engine_of(name) for name in drawn(ENGINES, seed)]
    yield from rows_of(contenders, "32 layers, clipped", STEPS)
    torch.distributed.destroy_process_group()


# ── the command ───────────────────────────────────────────────────────────────────────────────────

PARTS = {"bare": bare, "engines": engines}
ENVIRONMENT = {
    "RANK": "0",
    "LOCAL_RANK": "0",
    "WORLD_SIZE": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "0",
    "DS_ACCELERATOR": "cpu",
    "DEEPSPEED_LOG_LEVEL": "error",
    # Freed memory goes back to the system, so that no contender finds another's pages.
    "MALLOC_MMAP_THRESHOLD_": "1000000",
}


def repeat(part: str, seed: int):
    warnings.simplefilter("ignore")
    return list(PARTS[part](seed))


def main() -> int:
    """Measure and keep repeats, and print each."""
    flags = parser(__doc__, rounds=9)
    flags.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    options = flags.parse_args()
    begin("offload", options, peers=("deepspeed",))
    rounds = 1 if options.quick else options.rounds
    for number, part in itertools.product(range(rounds), options.only):
        rows = fresh(partial(repeat, part), number, **ENVIRONMENT)
        show(part, rows)
        if not options.quick:
            keep(FILE, rows, repeat=number, deepspeed=installed_version("deepspeed"))
    return 0


if __name__ == "__main__":
    exit_by(main)
