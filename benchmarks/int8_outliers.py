"""Measure what the outlier features of a pretrained model cost in int8 and in LLM.int8().

Claim: with outlier columns in 16 bits (``int8-outlier-codes``, as bitsandbytes multiplies) the
perplexity stays at bfloat16's, and ``int8-row`` is above it. Asked: what the other narrow computes
and weights alone in ``nvfp4`` give.

Model and text: SmolLM2-135M and the standard library's source (``_starts.py``). All
linear layers but the head change. ``Linear8bitLt`` is bitsandbytes' own layer, with a threshold of
6.

Baseline: the model in bfloat16. A difference is the mean over blocks of 256 tokens, paired, with
half its 95 % interval by Student's t: what is drawn are blocks, so the interval is one of this
model's loss on this text. The second table says by layer how many columns of inputs reach 6, the
threshold of the paper.

Run: ``./dev bench int8_outliers [--form NAME …] [--quick]``. It
takes some minutes of a core.
"""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from _starts import held_out_blocks, smollm2
from _timing import Report, Row, exit_by, parser, peer_version
from torch import Tensor, nn

import narrowgauge as ng
from narrowgauge.matmul.gemm import EmulationNotice
from narrowgauge.measuring.intervals import interval
from narrowgauge.numerics.quantization import quantize
from narrowgauge.spec.notation import get_compute

THRESHOLD = 6.0
SWAPPED = (
    "float8-tensor",
    "float8-block",
    "mxfp8",
    "nvfp4",
    "mxfp4",
)
"""Computes whose layers are those of training."""


def linear_layers(model: nn.Module) -> dict[str, nn.Linear]:
    """Return the linear layers of a causal model by name, without its head."""
    named = {name: layer for name, layer in model.named_modules() if isinstance(layer, nn.Linear)}
    return {name: layer for name, layer in named.items() if name != "lm_head"}


def column_magnitudes(model: nn.Module, tokens: Tensor) -> dict[str, Tensor]:
    """Return the largest magnitude of each input column by linear layer, 1-d."""
    largest: dict[str, Tensor] = {}

    def record(name: str, layer: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        largest[name] = inputs[0].abs().flatten(0, -2).amax(0)

    hooks = [
        layer.register_forward_pre_hook(partial(record, name))
        for name, layer in linear_layers(model).items()
    ]
    with torch.no_grad():
        model(input_ids=tokens)
    for hook in hooks:
        hook.remove()
    return largest


def swapped(model: nn.Module, compute: str) -> None:
    """Multiply by a compute as in training."""
    ng.swap_linears(model, compute)


def weights_in_nvfp4(model: nn.Module) -> None:
    cast = get_compute("nvfp4").output.right
    for layer in linear_layers(model).values():
        layer.weight.data.copy_(quantize(layer.weight.detach().float(), cast).values())


def bitsandbytes_layers(model: nn.Module) -> None:
    from bitsandbytes.nn import Linear8bitLt

    for name, layer in linear_layers(model).items():
        narrow = Linear8bitLt(
            layer.in_features, layer.out_features, layer.bias is not None, False, THRESHOLD
        )
        narrow.load_state_dict(layer.state_dict())
        model.set_submodule(name, narrow.to(layer.weight.device))
    if (
        not torch.cuda.is_available()
    ):  # its own move to a device quantizes; a CPU's tensors are there already
        model.to("cpu")


FORMS: dict[str, Callable[[nn.Module], object]] = {
    "bfloat16": lambda model: None,
    "int8-row": lambda model: ng.quantize_for_inference(model, "int8-row"),
    "int8-outlier-codes": lambda model: ng.quantize_for_inference(model, "int8-outlier-codes"),
    "float8-row": lambda model: ng.quantize_for_inference(model, "float8-row"),
    **{name: partial(swapped, compute=name) for name in SWAPPED},
    "weights in nvfp4": weights_in_nvfp4,
    "bitsandbytes Linear8bitLt": bitsandbytes_layers,
}


@torch.no_grad()
def losses(model: nn.Module, blocks: Tensor) -> list[float]:
    """Return the loss of each block, in nats per token."""
    return [model(input_ids=block[None], labels=block[None]).loss.item() for block in blocks]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the benchmark."""
    flags = parser(__doc__, rounds=0)
    flags.add_argument("--form", nargs="+", choices=FORMS, default=list(FORMS))
    options = flags.parse_args(arguments)
    warnings.simplefilter("ignore", EmulationNotice)
    report = Report("int8_outliers", options, peers=("transformers", "bitsandbytes"))
    loaded, tokens = smollm2()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    blocks = held_out_blocks(tokens).to(device)
    if options.quick:
        blocks = blocks[:2]
    rows: list[Row] = []
    wide: list[float] = []
    for form, change in FORMS.items():
        if form not in ("bfloat16", *options.form):
            continue
        if form.startswith("bitsandbytes") and peer_version("bitsandbytes") == "not installed":
            continue
        model = ng.cast_parameters(copy.deepcopy(loaded), torch.bfloat16).to(device).eval()
        if form == "bfloat16":
            largest = column_magnitudes(model, blocks[:8])
        change(model)
        model.eval()  # bitsandbytes multiplies wide in training mode
        values = losses(model, blocks)
        wide = wide or values
        mean, half = interval([a - b for a, b in zip(values, wide, strict=True)])
        loss = statistics.fmean(values)
        cells = {
            "loss": f"{loss:.4f}",
            "difference": f"{mean:+.4f} ± {half:.4f}",
            "perplexity": f"{math.exp(loss):.2f}",
        }
        rows.append({"form": form, **cells})
        print(rows[-1], flush=True)
    report.add("loss on held-out text", rows)
    kinds = sorted({name.rpartition(".")[2] for name in largest})
    depth = [
        {"layers": kind, "columns that reach 6": f"{share:.1%}", "largest": f"{top:.0f}"}
        for kind in kinds
        for part in [torch.cat([value for name, value in largest.items() if name.endswith(kind)])]
        for share, top in [(float((part >= THRESHOLD).double().mean()), float(part.max()))]
    ]
    report.add("input columns by layer", depth)
    return report.end()


if __name__ == "__main__":
    exit_by(main)
