"""Narrowgauge on a CUDA device: first that every bit is right, then how fast it is.

Correctness: steps and casts, compiled for the device, against the definition run eagerly on a CPU;
no bit may differ. Layers against the CPU's, within a hundredth. A failed check ends with status 1,
and nothing is timed. Checks run in several processes, since compiling takes most of their time.

Times: the optimizer's step, with torch's fused float32 AdamW as the baseline and peers beside it; a
linear layer forward and backward, compiled, with bfloat16 as the baseline and torchao's float8
layers beside it. ``./dev bench trainings`` trains on the device.

Run: ``./dev gpu [--sections …] [--quick] [--json FILE]``. With ``--json``, sections that the file
has are not run again. Without a CUDA device it ends with status 2. ``--rehearse`` runs each line on
the CPU at small sizes and measures nothing. ``--compile`` compiles the kernels of all steps, for
which no GPU is needed. A peer that is not installed or cannot run says why.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from typing import Any

import torch
from _peers import PEERS
from _timing import Contender, Report, Row, measure, nothing, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.quantization import padded, quantize, random_words
from narrowgauge.optim import norm, step_triton, table
from narrowgauge.optim.rules import elementwise
from narrowgauge.optim.rules.matrix import MUON
from narrowgauge.spec.computes import COMPUTES, Cast
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.torch_support.compile import compiled
from narrowgauge.torch_support.proof import draw
from narrowgauge.torch_support.triton import LAUNCH

SECTIONS = ("correctness", "steps", "layers")
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TIMED_STORAGES = ("word", "exact", "compact", "states8", "kahan")
TIMED_COMPUTES = ("float8-tensor", "float8-row", "float8-row fast", "mxfp8", "nvfp4", "int8-row")
STOCHASTIC = "torchao AdamW8bit stochastic"
TIMED_PEERS = (STOCHASTIC, "bitsandbytes AdamW8bit", "optimi AdamW Kahan")
FUSED = "torch fused AdamW"
BFLOAT16 = "bfloat16"
PROCESSES = 14


# ── correctness ───────────────────────────────────────────────────────────────────────────────────


def differing(first: Tensor, second: Tensor) -> int:
    """Count the elements with other bits; NaNs are equal."""
    first = first.cpu()
    second = second.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[first.element_size()]
    differs = first.contiguous().view(integer) != second.contiguous().view(integer)
    if first.is_floating_point():
        differs &= ~(first.float().isnan() & second.float().isnan())
    return int(differs.sum())


def stepped(storage: str, device: torch.device, steps: int) -> dict[str, Tensor]:
    """Train on known gradients, one of which is infinite; return the weights and the state."""
    dtype = getattr(torch, STORAGES[storage].visible)
    shapes = ((520, 512), (257, 33), (12, 5), (7,))
    generator = torch.Generator().manual_seed(0)
    weights = []
    for shape in shapes:
        weights.append(nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)))
    compile = device.type == "cuda"
    optimizer = ng.AdamW(
        weights, storage=storage, compile=compile, max_grad_norm=1.0, audit_every=5, **OPTIONS
    )
    for step in range(steps):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=generator).bfloat16().to(dtype)
            weight.grad = (gradient * (torch.inf if step == 3 else 1.0)).to(device)
        optimizer.step()
    state = optimizer.state_dict()["state"]
    return {
        **{f"{k} weight": weight.detach() for k, weight in enumerate(weights)},
        **{f"{k} {name}": value for k, entry in state.items() for name, value in entry.items()},
    }


def step_row(storage: str, device: torch.device, steps: int) -> Row:
    """Compare the steps of a storage with the CPU's."""
    expected, actual = (stepped(storage, place, steps) for place in (torch.device("cpu"), device))
    wrong = sum(differing(value, actual[name]) for name, value in expected.items())
    return {"": f"step {storage}", "wrong": wrong, "passes": "yes" if wrong == 0 else "NO"}


def distinct_casts() -> list[Cast]:
    """Return the casts of the table of computes that have codes."""
    return list(
        dict.fromkeys(
            cast for row in COMPUTES.values() for cast in row.casts.values() if not cast.is_wide
        )
    )


def cast_row(cast: Cast, device: torch.device) -> Row:
    """Compare a cast along both dimensions, eager and compiled on the device, with the CPU's."""
    wrong = 0
    for dim in (0, 1):
        ordinary = torch.randn(300, 520, generator=torch.Generator().manual_seed(dim)).bfloat16()
        for x in (ordinary, draw(torch.bfloat16, (300, 520), edges=True, seed=dim)):
            x = padded(x, cast, dim)
            if cast.rounding != "nearest":
                words = random_words(*x.shape, torch.tensor(17))
            else:
                words = ()

            def function(x: Tensor, *words: Tensor, dim: int = dim) -> tuple[Tensor, ...]:
                parts = quantize(x, cast, dim, words=words or None)  # type: ignore[arg-type]
                return tuple(part for part in parts if part is not None)

            expected = function(x, *words)
            there = [argument.to(device) for argument in (x, *words)]
            for actual in (function(*there), compiled(function, "gpu")(*there)):
                wrong += sum(differing(*pair) for pair in zip(expected, actual, strict=True))
    return {"": f"cast {cast}", "wrong": wrong, "passes": "yes" if wrong == 0 else "NO"}


def layer_row(compute: str, device: torch.device) -> Row:
    """Compare output and gradients of a narrow layer on the device with the CPU's."""

    def results(place: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512, bias=False)).to(place, torch.bfloat16)
        with torch.no_grad():
            model[0].weight.copy_(
                torch.randn(512, 256, generator=torch.Generator().manual_seed(1)) / 16
            )
        ng.swap_linears(model, lambda name: compute, keep=())
        x = (
            torch.randn(128, 256, generator=torch.Generator().manual_seed(2))
            .to(place, torch.bfloat16)
            .requires_grad_()
        )
        y = model(x)
        y.backward(
            torch.randn(128, 512, generator=torch.Generator().manual_seed(3)).to(
                place, torch.bfloat16
            )
        )
        return [y.detach(), x.grad, model[0].weight.grad]

    pairs = zip(results(torch.device("cpu")), results(device), strict=True)
    error = max(float((a.float() - b.cpu().float()).norm() / a.float().norm()) for a, b in pairs)
    return {"": f"layer {compute}", "wrong": error, "passes": "yes" if error < 0.01 else "NO"}


def check(row_of: Callable[..., Row], name: Any, device: torch.device, *options: int) -> Row:
    """Make one check and print its row at once. An error is a failed check."""
    torch.set_num_threads(1)
    try:
        row = row_of(name, device, *options)
    except Exception as error:  # the other checks are still made
        row = {"": str(name), "wrong": math.inf, "passes": f"NO: {reason(error)}"}
    print(row, file=sys.stderr, flush=True)
    return row


def reason(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:70]}"


def correctness(report: Report, device: torch.device, quick: bool) -> bool:
    """Check steps, casts and layers; return whether all pass."""
    if quick:
        storages = ("word", "compact")
    else:
        storages = tuple(STORAGES)
    casts = distinct_casts()[: 2 if quick else None]
    if quick:
        computes = ("int8-row",)
    else:
        computes = tuple(name for name, row in COMPUTES.items() if not row.owns_storages)
    steps = 5 if quick else 12
    jobs: list[tuple[Any, ...]] = [(step_row, name, device, steps) for name in storages]
    jobs += [(cast_row, cast, device) for cast in casts] + [
        (layer_row, name, device) for name in computes
    ]
    if device.type == "cuda":
        rows = in_processes(check, jobs)
    else:
        rows = [check(*job) for job in jobs]
    report.add(
        "correctness: elements with other bits than the CPU's; of layers the relative error", rows
    )
    return all(row["passes"] == "yes" for row in rows)


def compiled_row(rule: Any, storage: Storage, architecture: int) -> Row:
    """Compile the kernel of a step for a GPU, which need not be here."""
    types = {
        "table": "*i64",
        "tiles": "*i32",
        "numbers": "*fp32",
        "control": "*fp32",
        "joined": "*fp32",
        "row": "constexpr",
        "BLOCK": "constexpr",
    }
    constants = {"row": table.row_of(rule, storage), "BLOCK": step_triton.BLOCK}
    name = f"{rule.name}/{storage.name}"
    row, _ = assembled(name, step_triton.step, types, architecture, constants)
    # What is not aligned is read in single elements.
    if not row["128-bit"]:
        row["passes"] = "NO: narrow accesses"
    return row


def assembled(
    name: str,
    function: Any,
    types: dict[str, str],
    architecture: int,
    values: dict[str, Any] | None = None,
) -> tuple[Row, int]:
    """Compile a Triton function and look for what would change bits or take time.

    Return also how many accesses are narrow.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    aligned = {}
    for k, kind in enumerate(types.values()):
        if kind[0] == "*":
            aligned[(k,)] = [["tt.divisibility", 16]]
    constants = {name: None for name, kind in types.items() if kind == "constexpr"}
    constants |= values or {}
    text = triton.compiler.ASTSource(function, types, constants, aligned)
    began = time.perf_counter()
    kernel = triton.compile(text, target=GPUTarget("cuda", architecture, 32), options=dict(LAUNCH))
    seconds = time.perf_counter() - began
    ptx = kernel.asm["ptx"]
    target = f"sm_{architecture}{'a' if architecture >= 90 else ''}"
    tools = triton.knobs.nvidia
    tool = tools.ptxas_blackwell if architecture >= 100 else tools.ptxas
    command = [tool.path, "-v", f"--gpu-name={target}", "-o", os.devnull, "/dev/stdin"]
    report = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", report)))
    rounding = sorted(set(re.findall(r"\bfma\S*|\S+\.approx\S*|\S+\.ftz\S*", ptx)))
    wide, narrow = (
        len(re.findall(rf"(?:ld|st)\.global\.{width}\b", ptx))
        for width in ("v4.b32", "(?:v2.b32|b16)")
    )
    row = {
        "": f"{name}, {target}",
        "registers": int(re.findall(r"Used (\d+) registers", report)[0]),
        "spilled": spilled,
        "128-bit": wide,
        "seconds": seconds,
        "passes": f"NO: {' '.join(rounding)}" if rounding or spilled else "yes",
    }
    return row, narrow


def compile_kernels(report: Report, quick: bool) -> bool:
    """Compile the steps of elementwise rules and Muon in all storages, and the norm.

    Return whether all pass.
    """
    if quick:
        architectures = (90,)
    else:
        architectures = (80, 90, 100)
    rules = [
        *(rule for rule in vars(elementwise).values() if isinstance(rule, elementwise.Rule)),
        MUON,
    ]
    rows: list[Row] = []
    for storage in ("word",) if quick else STORAGES:
        for rule in rules[:1] if quick else rules:
            row = STORAGES[storage].keeping(rule.stored_states)
            if rule is MUON and row.scaled:
                continue  # refused
            if row.arithmetic == "float32":
                rows += [compiled_row(rule, row, sm) for sm in architectures]
                print(rows[-1], file=sys.stderr, flush=True)
    sizes = {"BLOCK": step_triton.BLOCK}
    slots = {**sizes, "SLOTS": norm.SLOTS}
    for name, types, constants in (
        ("largest", {"peaks": "*i32"}, sizes),
        ("squares", {"scales": "*fp64", "sums": "*i64"}, slots),
    ):
        types = {"table": "*i64", "tiles": "*i32", **types, **dict.fromkeys(constants, "constexpr")}
        function = getattr(step_triton, name)
        for sm in architectures:
            rows.append(assembled(f"the norm, {name}", function, types, sm, constants)[0])
    report.add("kernels, compiled for a GPU", rows)
    return all(row["passes"] == "yes" for row in rows)


def in_processes(function: Callable[..., Any], jobs: Sequence[tuple[Any, ...]]) -> list[Any]:
    """Call a function for each tuple of arguments, in several processes, and return the results in
    order.
    """
    with ProcessPoolExecutor(PROCESSES, multiprocessing.get_context("spawn")) as pool:
        return [future.result() for future in [pool.submit(function, *job) for job in jobs]]


# ── times ─────────────────────────────────────────────────────────────────────────────────────────


def parameters(
    shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device
) -> list[nn.Parameter]:
    """Return parameters that have gradients."""
    weights = []
    for shape in shapes:
        weights.append(nn.Parameter(torch.randn(shape, device=device).to(dtype)))
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def flashoptim(weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    from flashoptim import FlashAdamW

    optimizer: torch.optim.Optimizer = FlashAdamW(weights, **OPTIONS)
    return optimizer


def step_contenders(
    shapes: Sequence[tuple[int, ...]], device: torch.device
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each optimizer by name with a function that makes its step."""

    def ours(storage: str, audit_every: int = 0) -> Callable[[], Any]:
        options = {
            "storage": storage,
            "compile": device.type == "cuda",
            "audit_every": audit_every,
            **OPTIONS,
        }
        return lambda: ng.AdamW(parameters(shapes, torch.bfloat16, device), **options).step

    yield from ((storage, ours(storage)) for storage in TIMED_STORAGES)
    yield "word, always audited", ours("word", 1)  # the default audits every tenth step
    yield "FlashOptim AdamW", lambda: flashoptim(parameters(shapes, torch.bfloat16, device)).step
    for peer in (peer for peer in PEERS if peer.name in TIMED_PEERS):
        yield (
            peer.name,
            lambda peer=peer: peer.make(parameters(shapes, torch.bfloat16, device), **OPTIONS).step,
        )


def layer_contenders(
    side: int, tokens: int, device: torch.device
) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield compiled layers by name, each with a function that makes its forward and backward pass."""

    def passes(change: Callable[[nn.Module], Any]) -> Callable[[], Any]:
        model: nn.Module = nn.Sequential(
            nn.Linear(side, 4 * side, bias=False, device=device, dtype=torch.bfloat16)
        )
        change(model)
        x = torch.randn(tokens, side, device=device, dtype=torch.bfloat16, requires_grad=True)
        compiled = torch.compile(model)
        slope = torch.randn(tokens, 4 * side, device=device, dtype=torch.bfloat16)
        return lambda: compiled(x).backward(slope)

    def torchao(recipe: str) -> Callable[[nn.Module], Any]:
        def change(model: nn.Module) -> None:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))

        return change

    yield BFLOAT16, lambda: passes(nothing_to)
    for name in TIMED_COMPUTES[: None if device.type == "cuda" else 2]:
        compute = COMPUTES[name.removesuffix(" fast")]
        compute = (
            compute.accumulating("fast") if name.endswith(" fast") else compute
        )  # as torchao's rowwise
        yield (
            name,
            lambda compute=compute: passes(
                lambda model: ng.swap_linears(model, compute, keep_roles=False)
            ),
        )
    for recipe in ("tensorwise", "rowwise"):
        yield f"torchao float8 {recipe}", lambda recipe=recipe: passes(torchao(recipe))


def nothing_to(model: nn.Module) -> None:
    """Leave a model as it is."""


def compile_layer(number: int, side: int, tokens: int, device: torch.device) -> None:
    """Run a layer once, so that its compiled code is in the cache.

    Its errors come again when it is timed.
    """
    name, make = list(layer_contenders(side, tokens, device))[number]
    try:
        make()()
    except Exception as error:
        print(f"cannot compile {name}: {type(error).__name__}", file=sys.stderr)


def time_table(
    report: Report,
    title: str,
    baseline: tuple[str, Callable[[], Any]],
    contenders: Iterator[tuple[str, Callable[[], Any]]],
    device: torch.device,
    rounds: int,
) -> None:
    """Time each contender beside the baseline, one at a time, since a device may hold no more."""
    wait = torch.cuda.synchronize if device.type == "cuda" else nothing
    rows: list[Row] = []
    for name, make in contenders:
        try:
            pair = [Contender(baseline[0], baseline[1]()), Contender(name, make())]
            settings: dict[str, Any] = {"rounds": rounds, "warmup": 3, "wait": wait}
            timed = measure(pair, baseline=baseline[0], clock=time.perf_counter, **settings)
            rows.append(timed[1])
        except (
            Exception
        ) as error:  # a peer that is not installed, or a kernel that is not for this device
            rows.append({"": name, "why not": reason(error)})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report.add(f"{title}; ratio to {baseline[0]}", rows)


def steps(report: Report, device: torch.device, quick: bool, rounds: int) -> None:
    """Time steps."""
    if device.type == "cuda":
        large = [(2048, 8192)] * (2 if quick else 64)
    else:
        large = [(256, 64)] * 2
    middle = [(1024, 1024)] * (2 if quick else 32)
    small = [(128, 64)] * (20 if quick else 300)
    for title, shapes in (
        ("large tensors", large),
        ("of a million", middle),
        ("300 tensors of 8,192", small),
    ):

        def fused(shapes: Sequence[tuple[int, ...]] = shapes) -> Any:
            return torch.optim.AdamW(
                parameters(shapes, torch.float32, device), fused=True, **OPTIONS
            ).step

        time_table(
            report,
            f"step, {title}",
            (FUSED, fused),
            step_contenders(shapes, device),
            device,
            rounds,
        )


def layers(report: Report, device: torch.device, rounds: int) -> None:
    """Time layers."""
    side, tokens = (64, 32) if device.type == "cpu" else (4096, 8192)
    (name, make), *contenders = layer_contenders(side, tokens, device)
    if device.type == "cuda":
        in_processes(
            compile_layer, [(number, side, tokens, device) for number in range(1 + len(contenders))]
        )
    title = f"linear layer {side} × {4 * side}, {tokens} tokens, forward and backward, compiled"
    time_table(report, title, (name, make), iter(contenders), device, rounds)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then measure."""
    flags = parser(__doc__, rounds=25)
    flags.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME")
    flags.add_argument(
        "--rehearse", action="store_true", help="run on the CPU, with the sizes of --quick"
    )
    flags.add_argument(
        "--compile", action="store_true", help="compile the kernels of steps, which needs no GPU"
    )
    options = flags.parse_args(arguments)
    if options.compile:
        report = Report("gpu", options, ("triton",))
        if compile_kernels(report, options.quick):
            return report.end()
        return 1
    options.quick |= options.rehearse
    if not options.rehearse and not torch.cuda.is_available():
        print(
            "./dev gpu needs a CUDA device, and PyTorch finds none. Try ./dev gpu --rehearse.",
            file=sys.stderr,
        )
        return 2
    device = torch.device("cpu" if options.rehearse else "cuda")
    report = Report("gpu", options, ("triton", "torchao", "flashoptim"))
    rounds = 2 if options.quick else options.rounds
    quick = options.quick
    sections: dict[str, Callable[[], bool | None]] = {
        "correctness": lambda: correctness(report, device, quick),
        "steps": lambda: steps(report, device, quick, rounds),
        "layers": lambda: layers(report, device, rounds),
    }
    if options.json is not None and options.json.exists():  # a file of an earlier call is continued
        before = json.loads(options.json.read_text())
        report.tables = before["tables"]
        report.notes = before["notes"]
    for name in options.sections:
        if f"done: {name}" in report.notes:
            continue
        if sections[name]() is False:
            report.note("a check failed, so nothing was timed")
            report.end()
            return 1
        report.note(f"done: {name}")
        report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
