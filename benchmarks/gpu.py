"""Narrowgauge on a CUDA device: first that every bit is right, then how fast it is, then whether it trains.

Correctness: steps and casts, compiled for the device, against the definition run eagerly on a CPU; no bit may differ. Products
of layers against float64 products of the cast operands' values are within a hundredth. A failed check ends with status 1, and
nothing is timed.

Times: the optimizer's step, with torch's fused float32 AdamW as the baseline and FlashOptim's beside it; a linear layer forward
and backward, compiled, with bfloat16 as the baseline and torchao's float8 layers beside it. Training: the loss of a small Llama
on bytes of the standard library, for torch's float32 AdamW and several recipes.

Run: ``./dev gpu [--sections …] [--quick] [--json FILE]``. Without a CUDA device it ends with status 2; ``--rehearse`` runs each
line on the CPU at small sizes and measures nothing. A peer that is not installed or cannot run says why.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from timing import Contender, Report, Row, measure, nothing, parser
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.compile import compiled_for_pattern
from narrowgauge.edge_values import edge_values
from narrowgauge.numerics.quantization import padded, quantize, random_words
from narrowgauge.spec.computes import COMPUTES, Cast
from narrowgauge.spec.storages import STORAGES

SECTIONS = ("correctness", "times", "training")
OPTIONS: dict[str, Any] = {"lr": 1e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}
TIMED_STORAGES = ("word", "exact", "compact", "states8", "kahan")
TIMED_COMPUTES = ("float8-tensor", "float8-row", "float8-delayed", "mxfp8", "nvfp4", "int8-row")
RECIPES = ("bfloat16/master", "bfloat16/word", "bfloat16/compact", "bfloat16/naive", "float8-row/word", "mxfp8/word")
FUSED, BFLOAT16 = "torch fused AdamW", "bfloat16"


# ── correctness ─────────────────────────────────────────────────────────────────────────────────────────────────────


def differing(one: Tensor, other: Tensor) -> int:
    """Count the elements with other bits; NaNs are equal."""
    one, other = one.cpu(), other.cpu()
    integer = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[one.element_size()]
    differs = one.contiguous().view(integer) != other.contiguous().view(integer)
    if one.is_floating_point():
        differs &= ~(one.float().isnan() & other.float().isnan())
    return int(differs.sum())


def stepped(storage: str, device: torch.device, steps: int) -> dict[str, Tensor]:
    """Train on known gradients, one of which is infinite; return the weights and the state."""
    dtype = getattr(torch, STORAGES[storage].visible)
    shapes = ((1024, 512), (257, 33), (12, 5), (7,))
    generator = torch.Generator().manual_seed(0)
    weights = [nn.Parameter(torch.randn(shape, generator=generator).to(dtype).to(device)) for shape in shapes]
    compile = device.type == "cuda"
    optimizer = ng.AdamW(weights, storage=storage, compile=compile, max_grad_norm=1.0, audit_every=5, **OPTIONS)
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
    return list(dict.fromkeys(cast for row in COMPUTES.values() for cast in row.casts.values() if not cast.is_wide))


def cast_row(cast: Cast, device: torch.device) -> Row:
    """Compare a cast along both dimensions, eager and compiled on the device, with the CPU's."""
    wrong = 0
    for dim in (0, 1):
        ordinary = torch.randn(300, 520, generator=torch.Generator().manual_seed(dim)).bfloat16()
        for x in (ordinary, edge_values(torch.bfloat16, (300, 520), seed=dim, finite=True)):
            x = padded(x, cast, dim)
            words = random_words(*x.shape, torch.tensor(17)) if cast.rounding != "nearest" else ()
            fold = torch.ones(1, 1)

            def function(x: Tensor, fold: Tensor, *words: Tensor, dim: int = dim) -> tuple[Tensor, ...]:
                parts = quantize(x, cast, dim, words=words or None, fold=fold)  # type: ignore[arg-type]
                return tuple(part for part in parts if part is not None)

            expected = function(x, fold, *words)
            there = [argument.to(device) for argument in (x, fold, *words)]
            for actual in (function(*there), compiled_for_pattern(function, *there)):
                wrong += sum(differing(*pair) for pair in zip(expected, actual, strict=True))
    return {"": f"cast {cast}", "wrong": wrong, "passes": "yes" if wrong == 0 else "NO"}


def layer_row(compute: str, device: torch.device) -> Row:
    """Compare output and gradients of a narrow layer on the device with the CPU's."""

    def results(place: torch.device) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(256, 512, bias=False)).to(place, torch.bfloat16)
        with torch.no_grad():
            model[0].weight.copy_(torch.randn(512, 256, generator=torch.Generator().manual_seed(1)) / 16)
        ng.swap_linears(model, compute, keep=())
        x = torch.randn(128, 256, generator=torch.Generator().manual_seed(2)).to(place, torch.bfloat16).requires_grad_()
        y = model(x)
        y.backward(torch.randn(128, 512, generator=torch.Generator().manual_seed(3)).to(place, torch.bfloat16))
        return [y, x.grad, model[0].weight.grad]

    pairs = zip(results(torch.device("cpu")), results(device), strict=True)
    error = max(float((a.float() - b.cpu().float()).norm() / a.float().norm()) for a, b in pairs)
    return {"": f"layer {compute}", "wrong": error, "passes": "yes" if error < 0.01 else "NO"}


def correctness(report: Report, device: torch.device, quick: bool) -> bool:
    """Check steps, casts and layers; return whether all pass."""
    storages = ("word", "compact") if quick else tuple(STORAGES)
    casts = distinct_casts()[: 2 if quick else None]
    computes = ("int8-row",) if quick else tuple(COMPUTES)
    rows = [step_row(storage, device, 5 if quick else 25) for storage in storages]
    rows += [cast_row(cast, device) for cast in casts]
    rows += [layer_row(compute, device) for compute in computes]
    report.add("correctness: elements with other bits than the CPU's; of layers the relative error", rows)
    return all(row["passes"] == "yes" for row in rows)


# ── times ───────────────────────────────────────────────────────────────────────────────────────────────────────────


def parameters(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> list[nn.Parameter]:
    """Return parameters that have gradients."""
    weights = [nn.Parameter(torch.randn(shape, device=device).to(dtype)) for shape in shapes]
    for weight in weights:
        weight.grad = torch.randn_like(weight)
    return weights


def flashoptim(weights: Sequence[Tensor]) -> torch.optim.Optimizer:
    from flashoptim import FlashAdamW

    optimizer: torch.optim.Optimizer = FlashAdamW(weights, **OPTIONS)
    return optimizer


def step_contenders(shapes: Sequence[tuple[int, ...]], device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield each optimizer by name with a function that makes its step."""

    def ours(storage: str) -> Callable[[], Any]:
        compile = device.type == "cuda"
        return lambda: ng.AdamW(
            parameters(shapes, torch.bfloat16, device), storage=storage, compile=compile, audit_every=0, **OPTIONS
        ).step

    yield from ((storage, ours(storage)) for storage in TIMED_STORAGES)
    yield "FlashOptim AdamW", lambda: flashoptim(parameters(shapes, torch.bfloat16, device)).step


def layer_contenders(side: int, tokens: int, device: torch.device) -> Iterator[tuple[str, Callable[[], Any]]]:
    """Yield compiled layers by name, each with a function that makes its forward and backward pass."""

    def passes(change: Callable[[nn.Module], Any]) -> Callable[[], Any]:
        model: nn.Module = nn.Sequential(nn.Linear(side, 4 * side, bias=False, device=device, dtype=torch.bfloat16))
        change(model)
        x = torch.randn(tokens, side, device=device, dtype=torch.bfloat16, requires_grad=True)
        compiled, slope = torch.compile(model), torch.randn(tokens, 4 * side, device=device, dtype=torch.bfloat16)
        return lambda: compiled(x).backward(slope)

    def torchao(recipe: str) -> Callable[[nn.Module], Any]:
        def change(model: nn.Module) -> None:
            from torchao.float8 import Float8LinearConfig, convert_to_float8_training

            convert_to_float8_training(model, config=Float8LinearConfig.from_recipe_name(recipe))

        return change

    yield BFLOAT16, lambda: passes(nothing_to)
    for compute in TIMED_COMPUTES:
        yield compute, lambda compute=compute: passes(lambda model: ng.swap_linears(model, compute, keep=()))
    for recipe in ("tensorwise", "rowwise"):
        yield f"torchao float8 {recipe}", lambda recipe=recipe: passes(torchao(recipe))


def nothing_to(model: nn.Module) -> None:
    """Leave a model as it is."""


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
            rows.append(measure(pair, baseline=baseline[0], rounds=rounds, warmup=3, wait=wait)[1].row())
        except Exception as error:  # a peer that is not installed, or a kernel that is not for this device
            rows.append({"": name, "why not": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0][:70]}"})
        if device.type == "cuda":
            torch.cuda.empty_cache()
    report.add(f"{title}; ratio to {baseline[0]}", rows)


def times(report: Report, device: torch.device, quick: bool, rounds: int) -> None:
    """Time steps and layers."""
    large = [(2048, 8192)] * (2 if quick else 64) if device.type == "cuda" else [(256, 64)] * 2
    for title, shapes in (("large tensors", large), ("300 tensors of 8,192", [(128, 64)] * (20 if quick else 300))):

        def fused(shapes: Sequence[tuple[int, ...]] = shapes) -> Any:
            return torch.optim.AdamW(parameters(shapes, torch.float32, device), fused=True, **OPTIONS).step

        time_table(report, f"step, {title}", (FUSED, fused), step_contenders(shapes, device), device, rounds)
    side, tokens = (64, 32) if device.type == "cpu" else (4096, 8192)
    (name, make), *others = layer_contenders(side, tokens, device)
    title = f"linear layer {side} × {4 * side}, {tokens} tokens, forward and backward, compiled"
    time_table(report, title, (name, make), iter(others), device, rounds)


# ── training ────────────────────────────────────────────────────────────────────────────────────────────────────────


def training_row(recipe: str | None, device: torch.device, steps: int, text: Tensor) -> Row:
    """Train a Llama of a million weights; ``None`` is torch's float32 AdamW."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model: Any = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=256,
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            max_position_embeddings=256,
            tie_word_embeddings=True,
        )
    ).to(device)
    if recipe is None:
        optimizer: Any = torch.optim.AdamW(model.parameters(), **OPTIONS)
    else:
        model, optimizer = ng.prepare(model, recipe, **OPTIONS)
    generator, losses = torch.Generator().manual_seed(1), []
    for _ in range(steps):
        starts = torch.randint(0, len(text) - 257, (16,), generator=generator)
        inputs = torch.stack([text[start : start + 256] for start in starts.tolist()]).to(device)
        loss = model(input_ids=inputs, labels=inputs).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    last = torch.stack(losses[-max(1, steps // 10) :]).mean()
    return {"": recipe or "torch float32 AdamW", "first loss": float(losses[0]), "last loss": float(last)}


def training(report: Report, device: torch.device, quick: bool) -> None:
    """Compare the losses of recipes on the same batches."""
    files = sorted(Path(torch.__file__).parents[0].glob("nn/modules/*.py"))
    text = torch.tensor(list(b"".join(file.read_bytes() for file in files)), dtype=torch.int64)
    steps = 2 if quick else 500
    rows = [training_row(recipe, device, steps, text) for recipe in (None, *RECIPES[: 1 if quick else None])]
    report.add(f"loss after {steps} steps, mean of the last tenth", rows)


def main(arguments: Sequence[str] | None = None) -> int:
    """Check, then measure."""
    flags = parser(__doc__, rounds=25)
    flags.add_argument("--sections", nargs="+", choices=SECTIONS, default=SECTIONS, metavar="NAME")
    flags.add_argument("--rehearse", action="store_true", help="run on the CPU, with the sizes of --quick")
    options = flags.parse_args(arguments)
    options.quick |= options.rehearse
    if not options.rehearse and not torch.cuda.is_available():
        print("./dev gpu needs a CUDA device, and PyTorch finds none. Try ./dev gpu --rehearse.", file=sys.stderr)
        return 2
    device = torch.device("cpu" if options.rehearse else "cuda")
    report = Report("gpu", options, ("triton", "torchao", "flashoptim"))
    if "correctness" in options.sections and not correctness(report, device, options.quick):
        report.note("a check failed, so nothing was timed")
        report.end()
        return 1
    if "times" in options.sections:
        times(report, device, options.quick, 2 if options.quick else options.rounds)
    if "training" in options.sections:
        training(report, device, options.quick)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
