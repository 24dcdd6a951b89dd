"""One linear layer in every row of computes: its casts, its matmuls, and the whole of it forward and backward.

Claim: on Hopper, over the linear layers of a Transformer of 5 billion parameters, casts and matmuls of ``float8-tensor``
take at most 1/1.6, of ``float8-row`` 1/1.45 and of ``float8-block`` 1/1.4 of what bfloat16 takes. On a CPU only
``int8-row`` can gain: every other row is emulated there, with the values that a chip would give.

Baseline: ``nn.Linear`` of the same shape in bfloat16, compiled, forward and backward, in the same rounds as each row.
*Layer* is the row's own layer, compiled, the same way; *casts* and *matmuls* are the functions that it runs, each on
operands made before, so what a layer takes beyond both is autograd, memory and the calls. A layer here casts its input
for itself; in a model q, k and v share one cast, and so do gate and up. *The set* adds the layers of one block up, round by
round. *Errors*, of the output and of the weight's gradient, are root mean squares against float32, as shares: they show
that a layer does the arithmetic that it is timed for. Beside ours the linears of torchao: float8 natively on CUDA, by its
own emulation elsewhere; what else differs is in their notes.

Run: ``./dev bench narrow_linear [--sets …] [--rows …] [--quick]``; on CUDA it is a part of ``./dev gpu``.
"""

from __future__ import annotations

import dataclasses
import logging
import statistics
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from peers import reason
from timing import NOT_INSTALLED, Contender, Report, Row, measure, nothing, parser, peer_version
from torch import Tensor, nn

from narrowgauge.matmul.gemm import EmulationNotice, describe_matmuls
from narrowgauge.matmul.swapping import swap_linears
from narrowgauge.planner.roofline import Setting, Shape
from narrowgauge.profiling.measurement import operands, operations_of
from narrowgauge.spec.computes import COMPUTES

BASELINE = "bfloat16, compiled"
ROWS = tuple(row.name for row in COMPUTES.values() if not row.is_wide and not row.transform)
MATMULS = ("output", "grad_input", "grad_weight")


@dataclass(frozen=True)
class LayerSet:
    """The linear layers of one block, and how many of each.

    Args:
        name: what tables call it.
        num_tokens: rows of every input.
        layers: shapes ``[out, in]`` with their numbers.
        asked: times as fast as bfloat16 on Hopper, by row.
    """

    name: str
    num_tokens: int
    layers: tuple[tuple[Shape, int], ...]
    asked: tuple[tuple[str, float], ...] = ()


SETS = {
    made.name: made
    for made in (
        LayerSet("llama-125m", 2048, ((Shape(768, 768), 4), (Shape(2048, 768), 2), (Shape(768, 2048), 1))),
        # Width 4,096, MLP 16,384, 24 blocks, 31 sequences of 512 tokens: the example that TransformerEngine publishes
        # figures for ("GEMM Speedups Across Precisions", its documentation of 2026).
        LayerSet(
            "5b", 31 * 512,
            ((Shape(12_288, 4096), 1), (Shape(4096, 4096), 1), (Shape(16_384, 4096), 1), (Shape(4096, 16_384), 1)),
            (("float8-tensor", 1.6), ("float8-row", 1.45), ("float8-block", 1.4)),
        ),
        LayerSet("quick", 64, ((Shape(64, 96), 2), (Shape(96, 64), 1))),
    )
}  # fmt: skip


@dataclass(frozen=True)
class Peer:
    """Linear layers of torchao's.

    Args:
        name: what tables call them.
        swap: changes the linear layers of a model, but for ``lm_head``, in place; its parameters stay.
        differs: what they do that no row of ours does.
    """

    name: str
    swap: Callable[[nn.Module], None]
    differs: str


def multiplies_float8() -> bool:
    """Whether a GPU is here that multiplies float8."""
    return torch.cuda.is_available() and torch.cuda.get_device_capability() >= (8, 9)


def _is_inner(module: nn.Module, name: str) -> bool:
    return type(module) is nn.Linear and not name.endswith("lm_head")


def _swap_float8(recipe: str, model: nn.Module) -> None:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    config = Float8LinearConfig.from_recipe_name(recipe)
    emulated = dataclasses.replace(config, emulate=not multiplies_float8())
    convert_to_float8_training(model, config=emulated, module_filter_fn=_is_inner)


def _replace(model: nn.Module, product: Callable[[Tensor, Tensor], Tensor]) -> None:
    """Let linear layers compute ``product(x, weight)``, which the compiler takes as it is and looks into later."""
    traced = torch.compiler.allow_in_graph(product)

    class Traced(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return traced(x, self.weight)  # type: ignore[no-any-return]

    for name, module in model.named_modules():
        if _is_inner(module, name):
            module.__class__ = Traced


def _swap_int8(model: nn.Module) -> None:
    from torchao.prototype.quantized_training import int8_mixed_precision as int8

    # Its own layer hands its settings to the function as an argument, which a compiler refuses; its tensor subclass is
    # traced, and multiplies in bfloat16 (torchao 0.18 with PyTorch 2.13: the same bits as without it).
    config = int8.Int8MixedPrecisionTrainingConfig(module_swap=True)
    function = int8._Int8MixedPrecisionTrainingLinearFunction
    _replace(model, lambda x, weight: function.apply(x, weight, None, config))


def _swap_mxfp8(model: nn.Module) -> None:
    from torchao.prototype.moe_training.mxfp8_linear import mx_mm
    from torchao.prototype.mx_formats import config as mx
    from torchao.quantization.quantize_.common.kernel_preference import KernelPreference

    # Its own layer asks for CUDA kernels in the backward pass even where it emulates; the function takes others.
    e4m3, first, second = torch.float8_e4m3fn, mx.MXFP8Dim0CastKernelChoice, mx.MXFP8Dim1CastKernelChoice
    how = (KernelPreference.EMULATED, first.TORCH, second.TORCH, mx.ScaleCalculationMode.FLOOR, False)
    _replace(model, lambda x, weight: mx_mm.apply(x, weight, e4m3, e4m3, e4m3, 32, *how))


_KEPT = "the input is kept in 16 bits"
_FLOAT8 = f"where it is emulated, casts are in the compiler's hands and float32 is multiplied; {_KEPT}"
PEERS = {
    peer.name: peer
    for peer in (
        Peer(
            "torchao float8 tensorwise", partial(_swap_float8, "tensorwise"),
            f"gradients in e5m2, as in float8-tensor-e5m2; {_FLOAT8}",
        ),
        Peer("torchao float8 rowwise", partial(_swap_float8, "rowwise"), f"scales are powers of two; {_FLOAT8}"),
        Peer(
            "torchao int8 mixed precision", _swap_int8,
            f"operands are cast anew for each matmul, gradients to the nearest, scales in bfloat16; {_KEPT}; its function "
            "is called from a layer of ours, since its own cannot be compiled as one graph",
        ),
        Peer(
            "torchao mxfp8 emulated", _swap_mxfp8,
            f"{_KEPT}; its function is called from a layer of ours, since its own needs CUDA",
        ),
    )
}  # fmt: skip


def step_of(layer: nn.Module, x: Tensor, grad: Tensor) -> Callable[[], tuple[Tensor, Tensor]]:
    """Forward and backward of a layer, compiled for this shape: the output, and the gradient of the weight."""
    compiled, x = torch.compile(layer, dynamic=False, fullgraph=True), x.detach().requires_grad_()
    (weight,) = layer.parameters()

    def step() -> tuple[Tensor, Tensor]:
        x.grad = weight.grad = None
        y = compiled(x)
        y.backward(grad)
        assert weight.grad is not None
        return y, weight.grad

    return step


def errors(step: Callable[[], tuple[Tensor, Tensor]], x: Tensor, weight: Tensor, grad: Tensor) -> str:
    """Root mean square errors of the output and of the weight's gradient, as shares of their own."""
    exact = (x.float() @ weight.float().t(), grad.float().t() @ x.float())
    shares = [float((found.detach().float() - e).norm() / e.norm()) for found, e in zip(step(), exact, strict=True)]
    return ", ".join(f"{share:.4f}" for share in shares)


def layer_of(weight: Tensor, swap: Callable[[nn.Module], object] = nothing) -> nn.Module:
    """A linear layer with this weight; ``swap`` changes how it is computed."""
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(weight.detach().clone())
    model = nn.Sequential(linear)
    if swap is not nothing:
        swap(model)
    return model


def contenders(name: str, shape: Shape, num_tokens: int, device: torch.device) -> tuple[list[Contender], str]:
    """The baseline, the layer of a row or a peer, and of a row its casts and its matmuls; the layer's errors."""
    x, weight, grad = operands(shape, Setting(name if name in COMPUTES else "bfloat16"), num_tokens, device)
    repeats = 10 if device.type == "cuda" else 1

    def contender(title: str, *works: Callable[[], object]) -> Contender:
        def run() -> None:
            for _ in range(repeats):
                for work in works:
                    work()

        return Contender(title, run, per_call=repeats)

    swap = PEERS[name].swap if name in PEERS else partial(swap_linears, compute=name)
    step = step_of(layer_of(weight, swap), x, grad)
    made = [contender(BASELINE, step_of(layer_of(weight), x, grad)), contender("layer", step)]
    if name in COMPUTES:
        parts = operations_of(shape, Setting(name), num_tokens, device)
        made.append(contender("casts", *(work for part, work in parts.items() if part not in MATMULS)))
        made.append(contender("matmuls", *(parts[part] for part in MATMULS)))
    return made, errors(step, x, weight, grad)


Seconds = dict[str, list[float]]


def times(name: str, layers: LayerSet, rounds: int, device: torch.device) -> dict[str, tuple[Seconds, str]]:
    """Seconds of each round by contender, and the layer's errors: of each shape, and (added up) of the set."""
    wait = torch.cuda.synchronize if device.type == "cuda" else nothing
    found: dict[str, tuple[Seconds, str]] = {}
    total: Seconds = {}
    for shape, count in layers.layers:
        made, off = contenders(name, shape, layers.num_tokens, device)
        timings = measure(made, baseline=BASELINE, rounds=rounds, wait=wait)
        found[f"{count} of {shape}"] = {timing.name: list(timing.seconds) for timing in timings}, off
        for timing in timings:
            before = total.get(timing.name, [0.0] * rounds)
            total[timing.name] = [a + count * b for a, b in zip(before, timing.seconds, strict=True)]
    # A compiler that has seen one layer many times over refuses the next.
    torch._dynamo.reset()
    return {**found, "the set": (total, "")}


def row_of(name: str, seconds: Seconds, off: str, asked: float | None) -> Row:
    """A line of a table: milliseconds, and how many times faster than the baseline in the same rounds."""

    def gain(part: str) -> list[float]:
        return [base / own for base, own in zip(seconds[BASELINE], seconds[part], strict=True)]

    def median(part: str) -> object:
        return 1e3 * statistics.median(seconds[part]) if part in seconds else ""

    gains = sorted(gain("layer"))
    low, _, high = statistics.quantiles(gains, n=4, method="inclusive") if len(gains) > 1 else gains * 3
    return {
        "": name,
        "bfloat16 ms": median(BASELINE),
        "layer ms": median("layer"),
        "times as fast": statistics.median(gains),
        "quartiles": f"{low:.3f}–{high:.3f}",
        **({} if asked is None else {"asked": f"≥ {asked:g}"}),
        "casts ms": median("casts"),
        "matmuls ms": median("matmuls"),
        "matmuls alone": statistics.median(gain("matmuls")) if "matmuls" in seconds else "",
        **({"errors": off} if off else {}),
    }


def emit(report: Report, layers: LayerSet, names: Iterable[str], rounds: int, device: torch.device) -> None:
    """Tables of one set: each shape, and all of them together."""
    tables: dict[str, list[Row]] = {}
    asked = dict(layers.asked) if multiplies_float8() else {}
    for name in names:
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", EmulationNotice)
                found = times(name, layers, rounds, device)
        except Exception as error:  # one that fails must not keep the others from being measured
            report.note(f"{name} {reason(error)}")
            continue
        for title, (seconds, off) in found.items():
            row = row_of(name, seconds, off, asked.get(name) if title == "the set" else None)
            tables.setdefault(title, []).append(row)
    for title, rows in tables.items():
        report.add(f"{layers.name}, {title}, {layers.num_tokens:,} tokens, forward and backward", rows)


def notes(names: Sequence[str], device: torch.device) -> list[str]:
    """How each row is multiplied here, and in what each peer differs."""
    own = [describe_matmuls(COMPUTES[name], device) for name in names if name in COMPUTES]
    return own + [f"{name}: {PEERS[name].differs}." for name in names if name in PEERS]


def peer_names(report: Report) -> list[str]:
    """The peers that are installed."""
    if peer_version("torchao") == NOT_INSTALLED:
        report.note("torchao is not installed.")
        return []
    return list(PEERS)


def flags() -> Any:
    """All flags."""
    made = parser(__doc__, rounds=15)
    usual = ["5b"] if torch.cuda.is_available() else ["llama-125m"]
    made.add_argument("--sets", nargs="+", choices=list(SETS), default=usual, metavar="SET", help=", ".join(SETS))
    made.add_argument("--rows", nargs="+", choices=[*ROWS, *PEERS], metavar="ROW", help="default: all, torchao beside")
    return made


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    options = flags().parse_args(arguments)
    logging.disable(logging.CRITICAL)  # a compiler that fails prints all that it was given
    report = Report("narrow linear", options, ("torchao",))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    names = options.rows or [*ROWS, *peer_names(report)]
    if options.quick:
        options.sets, names = ["quick"], options.rows or ["int8-row", "mxfp8", *list(PEERS)[:1]]
    for name in options.sets:
        emit(report, SETS[name], names, 2 if options.quick else options.rounds, device)
    for line in notes(names, device):
        report.note(line)
    return report.end()


if __name__ == "__main__":
    sys.exit(main())
