"""Measure how far a pretrained model's SwiGLU outliers may grow until e4m3 activations lose, and
what saves them.

Claim: a scale per tensor (``float8-tensor``) loses first, finer scales (``float8-row``, ``mxfp8``)
later or never, and so do a wide ``down_proj`` and channels that are scaled before the cast. 2409.12517
saw such outliers after 200 billion tokens, where the two input weights of a SwiGLU channel align,
and cured them by a scale for each channel.

Here they grow by construction: in every layer the channel with the largest activation gets a factor
in ``up_proj``, and its column of ``down_proj`` the inverse. SwiGLU is linear in ``up_proj``, so the
function stays, to the last bit in bfloat16 as factors are powers of two. What changes is the
casts alone. The weights do not align further, and nothing is trained.

Model and text: SmolLM2-135M and the standard library's source (``_starts.py``). All
linear layers but the head change.

Baseline: bfloat16 with the same factor. All blocks of 256 tokens are one batch. A difference is the
mean over blocks, paired.
``scale before the growth`` is delayed scaling at its worst: activations of ``down_proj`` saturate
at their largest magnitude before the factor. ``channels scaled`` gives each channel its largest
magnitude over the blocks as a scale, a power of two.

Run: ``./dev bench swiglu_outliers [--quick]``. It takes ten minutes of two cores.
"""

from __future__ import annotations

import copy
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from _starts import held_out_blocks, smollm2
from _timing import Report, Row, exit_by, parser
from int8_outliers import column_magnitudes
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.measuring.intervals import interval

FACTORS = (1, 8, 64, 512, 4096, 32768)
LOST = 0.01
"""Nats more than at the first factor from which a form counts as lost."""
Largest = dict[str, Tensor]
"""The largest magnitude of each input channel of each ``down_proj``, by the name of its MLP."""


def grow(model: nn.Module, largest: Largest, factor: float) -> None:
    """Multiply the largest channel of each SwiGLU by a factor, and keep the function."""
    for name, channels in largest.items():
        mlp: Any = model.get_submodule(name)
        channel = channels.argmax()
        mlp.up_proj.weight.data[channel] *= factor
        mlp.down_proj.weight.data[:, channel] /= factor


def scale_channels(model: nn.Module, largest: Largest, factor: float) -> None:
    """Bring the largest magnitude of each channel near 1, and keep the function."""
    for name, channels in largest.items():
        mlp: Any = model.get_submodule(name)
        grown = channels.clone()
        grown[channels.argmax()] *= factor
        scales = 2 ** torch.log2(grown.clamp(min=2**-20)).ceil()
        mlp.up_proj.weight.data /= scales[:, None].to(mlp.up_proj.weight.dtype)
        mlp.down_proj.weight.data *= scales.to(mlp.down_proj.weight.dtype)
    ng.swap_linears(model, "float8-tensor")


def saturate(model: nn.Module, largest: Largest, factor: float) -> None:
    """Let the activations saturate at the magnitude that they had before the growth."""

    def clamp(limit: float, layer: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor]:
        return (inputs[0].clamp(-limit, limit),)

    for name, channels in largest.items():
        layer = model.get_submodule(f"{name}.down_proj")
        layer.register_forward_pre_hook(partial(clamp, float(channels.max())))
    ng.swap_linears(model, "float8-tensor")


def swap(model: nn.Module, largest: Largest, factor: float, compute: str, wide: str = "") -> None:
    keep = ("lm_head", wide) if wide else None
    ng.swap_linears(model, compute, keep=keep)


Change = Callable[[nn.Module, Largest, float], object]
FORMS: dict[str, Change] = {
    "bfloat16": lambda model, largest, factor: None,
    "float8-tensor, scale before the growth": saturate,
    "float8-tensor": partial(swap, compute="float8-tensor"),
    "float8-row": partial(swap, compute="float8-row"),
    "float8-block": partial(swap, compute="float8-block"),
    "mxfp8": partial(swap, compute="mxfp8"),
    "float8-tensor, down_proj wide": partial(swap, compute="float8-tensor", wide="*down_proj"),
    "float8-tensor, channels scaled": scale_channels,
}


@torch.no_grad()
def losses(model: nn.Module, blocks: Tensor) -> list[float]:
    """Return the loss of each block of one batch, in nats per token."""
    logits = model(input_ids=blocks).logits[:, :-1].float()
    values = nn.functional.cross_entropy(logits.mT, blocks[:, 1:], reduction="none")
    return [float(value) for value in values.mean(1)]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=0)
    flags.add_argument("--blocks", type=int, default=4, help="blocks of 256 tokens")
    flags.add_argument("--factors", type=int, nargs="+", default=FACTORS, help="powers of two")
    flags.add_argument("--forms", nargs="+", choices=FORMS, default=list(FORMS))
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore", EmulationNotice)
    report = Report("swiglu_outliers", options, peers=("transformers",))
    loaded, tokens = smollm2()
    blocks = held_out_blocks(tokens)[: options.blocks]
    factors = options.factors
    if options.quick:
        blocks = blocks[:2, :16]
        factors = FACTORS[:2]
    model = ng.cast_parameters(loaded, torch.bfloat16).eval()
    largest = {
        name.removesuffix(".down_proj"): channels.float()
        for name, channels in column_magnitudes(model, blocks).items()
        if name.endswith("down_proj")
    }
    rows: list[Row] = []
    for name, channels in sorted(largest.items(), key=lambda item: -item[1].max())[:5]:
        top = float(channels.max())
        median = float(channels.median())
        cells = {"largest": f"{top:.0f}", "median channel": f"{median:.2f}"}
        rows.append({"layer": name, **cells, "ratio": f"{top / median:,.0f}"})
    report.add("inputs of down_proj today, the five largest", rows)
    differences: list[Row] = [{"form": form} for form in options.forms]
    first: dict[str, float] = {}
    lost: dict[str, int] = {}
    for factor in factors:
        grown = copy.deepcopy(model)
        grow(grown, largest, factor)
        wide: list[float] = []
        for row, form in zip(differences, options.forms, strict=True):
            changed = copy.deepcopy(grown)
            FORMS[form](changed, largest, factor)
            values = losses(changed, blocks)
            wide = wide or values
            mean, half = interval([a - b for a, b in zip(values, wide, strict=True)])
            row[f"× {factor}"] = f"{mean:+.4f} ± {half:.4f}"
            if form == "bfloat16":
                row[f"× {factor}"] = f"{statistics.fmean(values):.4f}"
            if mean > first.setdefault(form, mean) + LOST:
                lost.setdefault(form, factor)
            print(factor, form, row[f"× {factor}"], flush=True)
    report.add("loss less bfloat16's, by the factor of one channel a layer", differences)
    firsts = [
        {"form": form, f"factor that costs {LOST} nats more": str(lost.get(form, "none"))}
        for form in options.forms
    ]
    report.add("how far", firsts)
    return report.end()


if __name__ == "__main__":
    exit_by(main)
