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

import gc
import importlib.util
import os
import random
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from _conditions import keep
from _peers import bytes_held
from _rows import PEERS_BY_NAME
from _timing import Contender, Row, begin, exit_by, measure, parser, show
from speed import FUSED, OPTIONS, STEPS, Shapes, contenders_of, fresh, resident
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.torch_support.machine import installed_version

FILE = Path(__file__).with_name("offload.jsonl")
ELEMENTS = 2**25
CASES: dict[str, tuple[Shapes, float | None]] = {
    "one matrix": ([(8192, 4096)], None),
    "32 matrices, clipped": ([(1024, 1024)] * 32, 1.0),
    "one vector, clipped": ([(ELEMENTS,)], 1.0),
}
Make = Callable[..., Any]


def prime_rl(params: list[nn.Parameter]) -> Any:
    """Return prime-rl's kernel as an optimizer of bfloat16 weights, which keeps float32 ones."""
    folder = Path(os.environ["PRIME_RL"]) / "src/prime_rl/trainer/optim/cpu_adam"
    spec: Any = importlib.util.spec_from_file_location("cpu_adam", folder / "__init__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    weights = [p.detach().float() for p in params]
    first = [torch.zeros_like(weight) for weight in weights]
    second = [torch.zeros_like(weight) for weight in weights]
    narrow = [p.detach() for p in params]
    steps = [torch.tensor(0.0) for _ in params]
    options: dict[str, Any] = {**OPTIONS}
    options["beta1"], options["beta2"] = options.pop("betas")

    def step() -> None:
        grads = [p.grad for p in params]
        scale = 1.0
        if optimizer.max_grad_norm:
            scale = min(1.0, optimizer.max_grad_norm / float(nn.utils.get_total_norm(grads)))
        states = (weights, grads, first, second, steps, narrow)
        module.adamw_step(*states, gradient_scale=scale, **options)

    state = {}
    for p, *kept in zip(params, weights, first, second, strict=True):
        state[p] = dict(enumerate(kept))
    groups = [{"params": params}]
    optimizer = SimpleNamespace(step=step, max_grad_norm=None, state=state, param_groups=groups)
    return optimizer


ours = partial(ng.AdamW, compile=True, **OPTIONS)
fused = partial(torch.optim.AdamW, fused=True, **OPTIONS)
deepspeed = partial(PEERS_BY_NAME["DeepSpeedCPUAdam"].make, **OPTIONS)
narrow_deepspeed = partial(PEERS_BY_NAME["DeepSpeedCPUAdam 16-bit states"].make, **OPTIONS)
WAYS: dict[str, tuple[torch.dtype, Make]] = {
    FUSED: (torch.float32, fused),
    "DeepSpeedCPUAdam": (torch.float32, deepspeed),
    "DeepSpeedCPUAdam 16-bit states": (torch.bfloat16, narrow_deepspeed),
    "prime-rl": (torch.bfloat16, prime_rl),
    "float32-states8": (torch.float32, partial(ours, storage="float32-states8")),
}
for _storage in ("word", "exact", "compact", "states8"):
    WAYS[_storage] = (torch.bfloat16, partial(ours, storage=_storage))


def bare_steps(
    name: str, grads: list[Tensor], norm: float | None, facts: dict[str, Row]
) -> Callable[[], None]:
    """Return ten steps of a way; note the bytes of a parameter that it holds with a gradient, that
    are resident, and that a step moves.
    """
    dtype, make = WAYS[name]
    is_wide = dtype is torch.float32
    leaving = [torch.zeros_like(g) for g in grads] if is_wide else []
    gc.collect()
    before = resident("VmRSS")
    params = [nn.Parameter(torch.ones(g.shape, dtype=dtype)) for g in grads]
    for p, g in zip(params, grads, strict=True):
        p.grad = g.to(dtype, copy=True)
    optimizer = make(params)
    clips = hasattr(optimizer, "max_grad_norm")
    if clips:
        optimizer.max_grad_norm = norm

    def step() -> None:
        if is_wide:
            torch._foreach_copy_([p.grad for p in params], grads)
        if norm and not clips:
            nn.utils.clip_grad_norm_(params, norm)
        optimizer.step()
        if is_wide:
            torch._foreach_copy_(leaving, [p.detach() for p in params])

    step()
    size = dtype.itemsize
    states = bytes_held(optimizer) - 4
    facts[name] = {"held": 2 * size + states, "resident": (resident("VmRSS") - before) / ELEMENTS}
    moved = 3 * size + 2 * states
    if is_wide:
        moved += 12  # 2 and 4 of a gradient, 4 and 2 of a weight
    if norm:
        moved += size if clips else 3 * size
    facts[name]["moved"] = moved
    return partial(repeated, step)


def repeated(step: Callable[[], object]) -> None:
    for _ in range(STEPS):
        step()


def bare(seed: int) -> Iterator[Row]:
    """Yield the rows of one repeat of bare steps."""
    source, target = torch.zeros(2, ELEMENTS)
    copy = partial(target.copy_, source)
    for tensors, (shapes, norm) in CASES.items():
        grads = [torch.randn(shape).mul_(1e-3).bfloat16() for shape in shapes]
        facts: dict[str, Row] = {"a copy": {"moved": 8.0}}
        makers: dict[str, Any] = {}
        for name in drawn(WAYS, seed):
            makers[name] = partial(bare_steps, name, grads, norm, facts)
        makers["a copy"] = partial(partial, repeated, copy)
        contenders = contenders_of(makers, per_call=STEPS)
        for row in rows_of(contenders, tensors, rounds=2, warmup=1):
            row |= facts[row["row"]]
            yield row | {"GB/s": row["moved"] * ELEMENTS * 1e-6 / row["median ms"]}


def drawn(names: Iterable[str], seed: int) -> list[str]:
    """Return names in an order of the seed, behind the first, which is the baseline."""
    first, *others = names
    random.Random(seed).shuffle(others)
    return [first, *others]


def rows_of(
    contenders: list[Contender], tensors: str, *, rounds: int, warmup: int
) -> Iterator[Row]:
    """Yield a row for each contender that runs here, and number of threads."""
    for threads in (1, 2):
        torch.set_num_threads(threads)
        times = measure(contenders, rounds=rounds, warmup=warmup, clock=time.perf_counter)
        for row in times:
            shared = {"row": row.pop(""), "tensors": tensors, "threads": threads}
            yield shared | {"over float32": row["ratio"], "median ms": row["median ms"]}


# ── engines ───────────────────────────────────────────────────────────────────────────────────────


def zero(make: Make, model: nn.Module) -> tuple[nn.Module, Make, Callable[[], object]]:
    """Return a model in DeepSpeed's engine, its backward pass of a loss, and its step."""
    from deepspeed import initialize

    config = {
        "train_micro_batch_size_per_gpu": 4,
        "bf16": {"enabled": True},
        "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
    }
    options = {"model_parameters": model.parameters(), "optimizer": make(model.parameters())}
    engine = initialize(model=model, config=config, **options)[0]
    return engine, engine.backward, engine.step


def fsdp(make: Make, model: Any) -> tuple[nn.Module, Make, Callable[[], object]]:
    """Return a model that FSDP2 shards over one rank, the backward pass of a loss, and a step."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard

    policies = {
        "mesh": init_device_mesh("cpu", (1,)),
        "offload_policy": CPUOffloadPolicy(pin_memory=False),
        "mp_policy": MixedPrecisionPolicy(torch.bfloat16, reduce_dtype=model[0].weight.dtype),
    }
    for layer in (*model, model):
        fully_shard(layer, **policies)
    optimizer = make(model.parameters())

    def step() -> None:
        if not isinstance(optimizer, ng.Optimizer):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

    return model, Tensor.backward, step


ENGINES: dict[str, tuple[Make, torch.dtype, Make]] = {
    "FSDP2, torch fused": (fsdp, torch.float32, fused),
    "FSDP2, word": (fsdp, torch.bfloat16, partial(ours, storage="word", max_grad_norm=1.0)),
    "ZeRO 2, DeepSpeedCPUAdam": (zero, torch.float32, deepspeed),
    "ZeRO 2, float32-states8": (zero, *WAYS["float32-states8"]),
}


def engine_of(name: str) -> Contender:
    """Return an engine's step, which follows a backward pass."""
    engine, dtype, make = ENGINES[name]
    layers = [nn.Linear(1024, 1024, bias=False, dtype=dtype) for _ in range(32)]
    for layer in layers:  # variances stay: a gradient that is nearly zero is slow everywhere
        nn.init.normal_(layer.weight, std=1 / 32)
    model, backward_of, step = engine(make, nn.Sequential(*layers))
    x = torch.ones(4, 1024, dtype=torch.bfloat16)
    return Contender(name, step, lambda: backward_of(model(x).float().square().mean()))


def engines(seed: int) -> Iterator[Row]:
    """Yield the rows of one repeat of whole steps."""
    torch.distributed.init_process_group("gloo")
    contenders = [engine_of(name) for name in drawn(ENGINES, seed)]
    yield from rows_of(contenders, "32 layers, clipped", rounds=STEPS, warmup=3)
    torch.distributed.destroy_process_group()


# ── the command ───────────────────────────────────────────────────────────────────────────────────

PARTS = {"bare": bare, "engines": engines}


def repeat(part: str, seed: int) -> list[Row]:
    warnings.simplefilter("ignore")
    return list(PARTS[part](seed))


def main() -> int:
    """Measure and keep repeats, and print each."""
    flags = parser(__doc__, rounds=9)
    flags.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    options = flags.parse_args()
    begin("offload", options, peers=("deepspeed",))
    os.environ |= {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "DS_ACCELERATOR": "cpu"}
    # Freed memory goes back to the system, so that the next contender's is counted.
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "1000000"
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "DEEPSPEED_LOG_LEVEL": "error"}
    for number in range(options.rounds):
        for part in options.only:
            rows = fresh(partial(repeat, part), number)
            show(part, rows)
            if not options.quick:
                keep(FILE, rows, repeat=number, deepspeed=installed_version("deepspeed"))
    return 0


if __name__ == "__main__":
    exit_by(main)
