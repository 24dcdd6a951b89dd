"""Measure what the outlier features of a pretrained model cost in narrow matmuls, and what they
cost as those of a SwiGLU grow.

Claim: with outlier columns in 16 bits (``int8-outlier-codes``, as LLM.int8() multiplies) the
perplexity stays at bfloat16's, and ``int8-row`` is above it. As SwiGLU's outliers grow, a scale per
tensor (``float8-tensor``) loses first, and a scale per row or per channel never.

2409.12517 saw such outliers after 200 billion tokens, and cured them by a scale for each channel.
Here they grow by construction: in every layer the channel with the largest activation gets a factor
in ``up_proj``, and its column of ``down_proj`` the inverse. SwiGLU is linear in ``up_proj``, so the
function stays; what changes is the casts alone.

Model and text: SmolLM2-135M and SymPy's source (``_starts.py``). All linear layers
but the head change. Baseline: bfloat16 with the same factor. A difference is the mean over blocks
of 256 tokens, paired, with half its 95 % interval: one of this model's loss on this text.

Run: ``./dev bench outliers [--rows NAME …] [--factors 1 64] [--quick]``; a row of a factor takes a
minute of a core. It writes ``benchmarks/outliers.jsonl``, over the rows of these names. What
multiplies only in a server has the factor 1 alone.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from functools import partial
from pathlib import Path

import torch
from _conditions import digest, keep_newest
from _starts import smollm2
from _timing import begin, exit_by, parser, show
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.measuring.diagnose.comparison import interval
from narrowgauge.spec.computes import COMPUTES

FILE = Path(__file__).with_suffix(".jsonl")
FACTORS = (1, 8, 64, 4096)


@torch.no_grad()
def peaks_of(model: nn.Module, blocks: Tensor):
    """Return the largest magnitude of each channel that enters a ``down_proj``, by the name of its
    MLP.
    """
    peaks = {}

    def record(name: str, layer: nn.Module, inputs) -> None:
        peaks[name] = inputs[0].float().abs().flatten(0, -2).amax(0)

    hooks = []
    for name, module in model.named_modules():
        if name.endswith("mlp"):
            hooks.append(module.down_proj.register_forward_pre_hook(partial(record, name)))
    model(input_ids=blocks)
    for hook in hooks:
        hook.remove()
    return peaks


def grow(model: nn.Module, peaks, factor: float) -> None:
    """Multiply the largest channel of each SwiGLU by a factor, and keep the function."""
    for name, channels in peaks.items():
        mlp = model.get_submodule(name)
        channel = channels.argmax()
        mlp.up_proj.weight.data[channel] *= factor
        mlp.down_proj.weight.data[:, channel] /= factor


def bitsandbytes_layers(model: nn.Module) -> None:
    from bitsandbytes.nn import Linear8bitLt

    for name, layer in list(model.named_modules()):
        if isinstance(layer, nn.Linear) and name != "lm_head":
            sizes = layer.in_features, layer.out_features, layer.bias is not None
            narrow = Linear8bitLt(*sizes, has_fp16_weights=False, threshold=6.0)
            narrow.load_state_dict(layer.state_dict())
            model.set_submodule(name, narrow)
    # Its own move to a device quantizes; a CPU's tensors are there already.
    model.to("cpu")


def serve(compute: str):
    return lambda model: ng.quantize_for_inference(model, compute)


def swap(compute: str):
    return lambda model: ng.swap_linears(model, compute)


SERVED = {
    "bfloat16": swap("bfloat16"),
    "int8-row": serve("int8-row"),
    "int8-outlier-codes": serve("int8-outlier-codes"),
    "bitsandbytes Linear8bitLt": bitsandbytes_layers,
}
TRAINED = {name: swap(name) for name in ("float8-row", "float8-tensor", "mxfp8")}
ROWS = SERVED | TRAINED


@torch.no_grad()
def losses(model: nn.Module, blocks: Tensor):
    """Return the loss of each block, in nats per token."""
    model.eval()
    return [model(input_ids=block[None], labels=block[None]).loss.item() for block in blocks]


def main(arguments=None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=0)
    flags.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    words = "to measure; the new record of a row has these alone"
    flags.add_argument("--factors", nargs="+", type=int, default=FACTORS, help=words)
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore", EmulationNotice)
    begin("outliers", options, peers=("transformers", "bitsandbytes"))
    loaded, tokens = smollm2()
    number = 2 if options.quick else 32
    blocks = tokens[-256 * number :].view(number, 256)
    model = ng.cast_parameters(loaded, torch.bfloat16).eval()
    peaks = peaks_of(model, blocks[:8])
    rows = {name: {"row": name} for name in options.rows}
    for factor in options.factors:
        grown = copy.deepcopy(model)
        grow(grown, peaks, factor)
        wide = losses(grown, blocks)
        for name, row in rows.items():
            if factor > 1 and name in SERVED:
                continue
            changed = copy.deepcopy(grown)
            ROWS[name](changed)
            narrow = losses(changed, blocks)
            mean, half = interval([a - b for a, b in zip(narrow, wide, strict=True)])
            row[str(factor)] = f"{mean:+.3f} ± {half:.3f}"
            if factor == 1:
                row["perplexity"] = f"{math.exp(statistics.fmean(narrow)):.2f}"
            print(row, flush=True)
    show("loss less bfloat16's, by the factor of one channel a layer", [*rows.values()])
    if not options.quick:
        for name, row in rows.items():
            part = f"linear layers: {name}" if name in COMPUTES else "package: bitsandbytes"
            row["digests"] = {name: {part: digest(part)}}
        keep_newest(FILE, [*rows.values()])
    return 0


if __name__ == "__main__":
    exit_by(main)
