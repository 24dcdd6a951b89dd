"""Narrowgauge on a CUDA device: first that every bit is right, then how fast it is.

Correctness: steps and casts, compiled for the device, against the definition run eagerly on a CPU;
no bit may differ. Layers against the CPU's, within a hundredth. After a failed check nothing is
timed, and the status is 1.

Times: the optimizer's step, over torch's fused float32 AdamW, with peers beside it; a linear layer
forward and backward, compiled, over bfloat16, with torchao's float8 layers beside it. A peer that
is not installed or cannot run says why. ``./dev bench trainings`` trains on the device.

Run: ``./dev gpu [--quick] [--json FILE]``. With ``--json``, what the file has is not run again.
Without a CUDA device the status is 2. ``--rehearse`` runs each line on the CPU at small sizes and
measures nothing. ``--compile`` compiles the kernels of all steps, for which no GPU is needed.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from _peers import PEERS
from _timing import Contender, Report, Row, measure, nothing, parameters, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.numerics.quantization import padded, quantize, random_words
from narrowgauge.optim import norm, step_triton, table
from narrowgauge.optim.rules import elementwise
from narrowgauge.optim.rules.matrix import MUON
from narrowgauge.spec.computes import COMPUTES, Cast
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.torch_support.compile import compiled
from narrowgauge.torch_support.proof import draw, same_numbers
from narrowgauge.torch_support.triton import LAUNCH

SECTIONS = ("correctness", "steps", "layers")
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TIMED_STORAGES = ("word", "exact", "compact", "states8", "kahan")
TIMED_COMPUTES = ("float8-tensor", "float8-row", "float8-row fast", "mxfp8", "nvfp4", "int8-row")
TIMED_PEERS = (
    "torchao AdamW8bit stochastic", "bitsandbytes AdamW8bit", "optimi AdamW Kahan",
)  # fmt: skip
FUSED = "torch fused AdamW"
BFLOAT16 = "bfloat16"
PROCESSES = 14


# ── correctness ───────────────────────────────────────────────────────────────────────────────────


def stepped(storage: str, device: str, steps: int) -> list[Tensor]:
    """Train on known gradients, one of which is infinite; return the weights and the state."""
    dtype = getattr(torch, STORAGES[storage].visible)
    draws = torch.Generator().manual_seed(0)
    weights = []
    for shape in ((520, 512), (257, 33), (12, 5), (7,)):
        weights.append(nn.Parameter(torch.randn(shape, generator=draws).to(device, dtype)))
    ours: dict[str, Any] = {"max_grad_norm": 1.0, "audit_every": 5, **OPTIONS}
    optimizer = ng.AdamW(weights, storage=storage, compile=device == "cuda", **ours)
    for step in range(steps):
        for weight in weights:
            gradient = torch.randn(weight.shape, generator=draws).bfloat16()
            weight.grad = gradient.to(device, dtype) * (torch.inf if step == 3 else 1.0)
        optimizer.step()
    tensors = [weight.detach() for weight in weights]
    for state in optimizer.state_dict()["state"].values():
        tensors += state.values()
    return tensors


def num_different(expected: Sequence[Tensor], actual: Sequence[Tensor]) -> int:
    """Count the tensors with other bits."""
    pairs = zip(expected, actual, strict=True)
    return sum(not same_numbers(a.contiguous(), b.cpu().contiguous()) for a, b in pairs)


def step_error(storage: str, device: str, steps: int) -> int:
    """Count the tensors that steps on the device leave with other bits than the CPU's."""
    return num_different(stepped(storage, "cpu", steps), stepped(storage, device, steps))


def cast_error(cast: Cast, device: str) -> int:
    """Count the results of a cast, eager and compiled, with other bits than the CPU's."""
    num_wrong = 0
    for dim in (0, 1):

        def codes(x: Tensor, *words: Tensor, dim: int = dim) -> list[Tensor]:
            parts = quantize(x, cast, dim, words=words or None)  # type: ignore[arg-type]
            return [part for part in parts if part is not None]

        for edges in (False, True):
            x = padded(draw(torch.bfloat16, (300, 520), edges=edges, seed=dim), cast, dim)
            words = random_words(*x.shape, torch.tensor(17)) if cast.rounding != "nearest" else ()
            there = [argument.to(device) for argument in (x, *words)]
            for function in (codes, compiled(codes, "gpu")):
                num_wrong += num_different(codes(x, *words), function(*there))
    return num_wrong


def layer_results(compute: str, device: str) -> list[Tensor]:
    """Return the output and the gradients of a layer."""
    draws = torch.Generator().manual_seed(0)
    w, x, slope = (
        torch.randn(shape, generator=draws).to(device, torch.bfloat16)
        for shape in ((512, 256), (128, 256), (128, 512))
    )
    model = nn.Sequential(nn.Linear(256, 512, bias=False)).to(device, torch.bfloat16)
    model[0].weight.data.copy_(w / 16)
    ng.swap_linears(model, lambda name: compute, keep=())
    y = model(x.requires_grad_())
    y.backward(slope)
    return [tensor.detach().cpu().float() for tensor in (y, x.grad, model[0].weight.grad)]


def layer_error(compute: str, device: str) -> float:
    """Return the largest relative error of a layer's results; up to a hundredth counts as none."""
    pairs = zip(layer_results(compute, "cpu"), layer_results(compute, device), strict=True)
    return max(float((a - b).norm() / a.norm()) for a, b in pairs)


def check(error_of: Callable[..., float], name: Any, *arguments: Any) -> Row:
    """Make a check and print its row at once. An exception is a failed check."""
    torch.set_num_threads(1)
    limit = 0.01 if error_of is layer_error else 0
    row: Row = {"": f"{error_of.__name__} {name}"}
    try:
        row["error"] = error_of(name, *arguments)
        row["passes"] = "yes" if row["error"] <= limit else "NO"
    except Exception as error:  # the other checks are still made
        row["passes"] = f"NO: {reason(error)}"
    print(row, file=sys.stderr, flush=True)
    return row


def reason(error: Exception) -> str:
    """Return the first line of an error."""
    return f"{type(error).__name__}: {str(error).partition(chr(10))[0][:70]}"


def correctness(report: Report, device: str, options: Any) -> bool:
    """Check steps, casts and layers, in processes, since compiling takes most of their time."""
    casts: dict[Cast, None] = {}
    for compute in COMPUTES.values():
        casts |= {cast: None for cast in compute.casts.values() if not cast.is_wide}
    jobs: list[tuple[Any, ...]] = [(step_error, name, device, 12) for name in STORAGES]
    jobs += [(cast_error, cast, device) for cast in casts]
    jobs += [(layer_error, name, device) for name in COMPUTES]
    if options.quick:
        jobs = [(step_error, "word", device, 5), *jobs[1 :: len(jobs) // 5]]
    if device == "cpu":
        rows = [check(*job) for job in jobs]
    else:
        with multiprocessing.get_context("spawn").Pool(PROCESSES) as pool:
            rows = pool.starmap(check, jobs)
    report.add("tensors with other bits than the CPU's; of layers the relative error", rows)
    return all(row["passes"] == "yes" for row in rows)


# ── kernels, compiled without a GPU ───────────────────────────────────────────────────────────────


def assembled(name: str, function: Any, types: dict[str, str], values: Row, sm: int) -> Row:
    """Compile a Triton function and look for what would change bits or take time.

    Args:
        types: of its arguments that are not constant.
        values: of the constant ones.
        sm: the GPU's architecture.
    """
    import triton
    from triton.backends.compiler import GPUTarget

    aligned = {}
    for place, kind in enumerate(types.values()):
        if kind[0] == "*":
            aligned[(place,)] = [["tt.divisibility", 16]]
    signature = types | dict.fromkeys(values, "constexpr")
    source = triton.compiler.ASTSource(function, signature, values, aligned)
    kernel = triton.compile(source, target=GPUTarget("cuda", sm, 32), options=dict(LAUNCH))
    ptx = kernel.asm["ptx"]
    target = f"sm_{sm}{'a' if sm >= 90 else ''}"
    tools = triton.knobs.nvidia
    tool = tools.ptxas_blackwell if sm >= 100 else tools.ptxas
    command = [tool.path, "-v", f"--gpu-name={target}", "-o", os.devnull, "/dev/stdin"]
    printed = subprocess.run(command, input=ptx, capture_output=True, text=True, check=True).stderr
    spilled = sum(map(int, re.findall(r"(\d+) bytes spill", printed)))
    inexact = sorted(set(re.findall(r"\bfma\S*|\S+\.approx\S*|\S+\.ftz\S*", ptx)))
    return {
        "": f"{name}, {target}",
        "registers": int(re.findall(r"Used (\d+) registers", printed)[0]),
        "spilled": spilled,
        "128-bit": len(re.findall(r"(?:ld|st)\.global\.v4\.b32\b", ptx)),
        "passes": f"NO: {' '.join(inexact)}" if inexact or spilled else "yes",
    }


def compiled_row(rule: Any, storage: Storage, sm: int) -> Row:
    """Compile the kernel of a step for a GPU, which need not be here."""
    types = {"table": "*i64", "tiles": "*i32"}
    types |= dict.fromkeys(("numbers", "control", "joined"), "*fp32")
    values = {"row": table.row_of(rule, storage), "BLOCK": step_triton.BLOCK}
    row = assembled(f"{rule.name}/{storage.name}", step_triton.step, types, values, sm)
    # What is not aligned is read in single elements.
    if not row["128-bit"]:
        row["passes"] = "NO: narrow accesses"
    return row


def compile_kernels(report: Report, quick: bool) -> bool:
    """Compile the steps of elementwise rules and Muon in all storages, and the norm."""
    rules = [rule for rule in vars(elementwise).values() if isinstance(rule, elementwise.Rule)]
    block = {"BLOCK": step_triton.BLOCK}
    head = {"table": "*i64", "tiles": "*i32"}
    sums = head | {"scales": "*fp64", "sums": "*i64"}
    rows: list[Row] = []
    for sm in (90,) if quick else (80, 90, 100):
        for name in ("word",) if quick else STORAGES:
            for rule in rules[:1] if quick else [*rules, MUON]:
                storage = STORAGES[name].keeping(rule.stored_states)
                is_refused = rule is MUON and storage.scaled
                if storage.arithmetic == "float32" and not is_refused:
                    rows.append(compiled_row(rule, storage, sm))
                    print(rows[-1], file=sys.stderr, flush=True)
        largest = head | {"peaks": "*i32"}
        slots = block | {"SLOTS": norm.SLOTS}
        rows.append(assembled("the norm, largest", step_triton.largest, largest, block, sm))
        rows.append(assembled("the norm, squares", step_triton.squares, sums, slots, sm))
    report.add("kernels, compiled for a GPU", rows)
    return all(row["passes"] == "yes" for row in rows)


# ── times ─────────────────────────────────────────────────────────────────────────────────────────

Makers = dict[str, Callable[[], Any]]
"""What makes the function that is timed, by the name of the row."""


def time_table(report: Report, title: str, makers: Makers, device: str, options: Any) -> None:
    """Time each contender beside the first, one at a time, since a device may hold no more."""
    (baseline, make_baseline), *others = makers.items()
    wait = torch.cuda.synchronize if device == "cuda" else nothing
    settings: dict[str, Any] = {"warmup": 3, "wait": wait, "clock": time.perf_counter}
    rows: list[Row] = []
    for name, make in others:
        try:
            pair = [Contender(baseline, make_baseline()), Contender(name, make())]
            rounds = 2 if options.quick else options.rounds
            rows.append(measure(pair, baseline=baseline, rounds=rounds, **settings)[1])
        except Exception as error:  # a peer is not installed, or a kernel is not for this device
            rows.append({"": name, "why not": reason(error)})
        torch.cuda.empty_cache()
    report.add(f"{title}; ratio to {baseline}", rows)


def flashoptim(weights: Sequence[Tensor], **options: Any) -> torch.optim.Optimizer:
    from flashoptim import FlashAdamW

    optimizer: torch.optim.Optimizer = FlashAdamW(weights, **options)
    return optimizer


def steps(report: Report, device: str, options: Any) -> None:
    """Time steps."""
    count = 64 if device == "cuda" and not options.quick else 2
    large = (2048, 8192) if device == "cuda" else (256, 64)
    kinds: dict[str, Callable[..., Any]] = {}
    for storage in TIMED_STORAGES:
        ours = {"storage": storage, "compile": device == "cuda"}
        kinds[storage] = partial(ng.AdamW, audit_every=0, **ours)
    # The default audits every tenth step.
    kinds["word, always audited"] = partial(kinds["word"], audit_every=1)
    kinds["FlashOptim AdamW"] = flashoptim
    kinds |= {peer.name: peer.make for peer in PEERS if peer.name in TIMED_PEERS}
    for title, shapes in (
        ("large tensors", [large] * count),
        ("of a million", [(1024, 1024)] * (count // 2)),
        ("tensors of 8,192", [(128, 64)] * (20 if options.quick else 300)),
    ):

        def step_of(kind: Any, dtype: torch.dtype = torch.bfloat16, shapes: Any = shapes) -> Any:
            return kind(parameters(shapes, dtype, device), **OPTIONS).step

        fused = partial(torch.optim.AdamW, fused=True)
        makers: Makers = {FUSED: partial(step_of, fused, torch.float32)}
        makers |= {name: partial(step_of, kind) for name, kind in kinds.items()}
        time_table(report, f"step, {len(shapes)} {title}", makers, device, options)


def torchao_layers(recipe: str, model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))


def our_layers(name: str, model: nn.Module) -> None:
    compute = COMPUTES[name.removesuffix(" fast")]
    if name.endswith(" fast"):
        products = {}
        for place, product in compute.products.items():
            products[place] = replace(product, accumulation="fast")
        compute = replace(compute, **products)  # as torchao's rowwise
    ng.swap_linears(model, compute, keep_roles=False)


def layers(report: Report, device: str, options: Any) -> None:
    """Time layers."""
    side, tokens = (4096, 8192) if device == "cuda" else (64, 32)

    def passes(change: Callable[[nn.Module], Any]) -> Callable[[], Any]:
        wide = nn.Linear(side, 4 * side, bias=False, device=device, dtype=torch.bfloat16)
        model = nn.Sequential(wide)
        change(model)
        x = torch.randn(tokens, side, device=device, dtype=torch.bfloat16, requires_grad=True)
        called = torch.compile(model)
        slope = torch.randn(tokens, 4 * side, device=device, dtype=torch.bfloat16)
        return lambda: called(x).backward(slope)

    makers: Makers = {BFLOAT16: partial(passes, lambda model: None)}
    for name in TIMED_COMPUTES[: None if device == "cuda" else 2]:
        makers[name] = partial(passes, partial(our_layers, name))
    for recipe in ("tensorwise", "rowwise"):
        makers[f"torchao float8 {recipe}"] = partial(passes, partial(torchao_layers, recipe))
    title = f"linear layer {side} × {4 * side}, {tokens} tokens, forward and backward, compiled"
    time_table(report, title, makers, device, options)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then measure."""
    flags = parser(__doc__, rounds=25)
    flags.add_argument("--rehearse", action="store_true", help="run on the CPU, at small sizes")
    flags.add_argument("--compile", action="store_true", help="compile kernels, without a GPU")
    options = flags.parse_args(arguments)
    options.quick |= options.rehearse
    if not (options.compile or options.rehearse or torch.cuda.is_available()):
        what = "./dev gpu needs a CUDA device, and PyTorch finds none. Try ./dev gpu --rehearse."
        print(what, file=sys.stderr)
        return 2
    report = Report("gpu", options, ("triton", "torchao", "flashoptim"))
    if options.compile:
        all_pass = compile_kernels(report, options.quick)
        report.end()
        return int(not all_pass)
    if options.json is not None and options.json.exists():
        before = json.loads(options.json.read_text())
        report.tables = before["tables"]
        report.notes = before["notes"]
    device = "cpu" if options.rehearse else "cuda"
    sections: Any = {"correctness": correctness, "steps": steps, "layers": layers}
    for name, section in sections.items():
        if f"done: {name}" in report.notes:
            continue
        if section(report, device, options) is False:
            report.note("a check failed, so nothing was timed")
            report.end()
            return 1
        report.note(f"done: {name}")
        report.end()
    return 0


if __name__ == "__main__":
    sys.exit(main())
