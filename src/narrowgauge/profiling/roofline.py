"""Predictions for a chip from the figures of its data sheet: a roofline model.

A matmul takes its multiply-adds at the chip's rate for the operands' format, or its bytes at the memory's bandwidth,
whichever is longer; a cast takes its bytes. Neither reaches the printed peak, so each is multiplied by a published measured
share of it. The rest of the step is counted in the same way: attention, element-wise operations, the loss, the
optimizer. Kernel launches, communication and overlap are left out, so trust the order of these figures, not their digits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowgauge.errors import ChipError
from narrowgauge.profiling.costs import Round, linears_seconds
from narrowgauge.profiling.layer_plan import (
    Kind,
    Setting,
    Shape,
    baseline_of,
    compared_steps,
    settings_of,
    timed_settings,
)
from narrowgauge.spec.chips import CHIPS, Chip
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product
from narrowgauge.spec.formats import get_format
from narrowgauge.spec.models import Model
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.slots import SLOTS, TENSORS, casts_made, weight_slots
from narrowgauge.spec.variants import named

BANDWIDTH_SHARE = 0.8
"""Share of the printed bandwidth that a cast reaches: torchao's MXFP8 cast on a B200, 6,462 of 8,000 GB/s."""
ATTENTION_SHARE = 0.5
"""Share of the printed rate that fused attention reaches: the default of llm-analysis."""
_ATTENTION_PASSES = 3.5  # forward 1, backward 2.5: it recomputes the scores
_LOGIT_BYTES = 12  # bfloat16 logits are written and read, their gradient is in float32 and bfloat16
# Formats that are multiplied at another format's rate.
_SAME_RATE = {"float8_e5m2": "float8_e4m3fn"}


@dataclass(frozen=True)
class Step:
    """The size of a step.

    Args:
        model: the shape of the decoder.
        num_sequences, sequence_length: of a batch.
    """

    model: Model
    num_sequences: int
    sequence_length: int

    @property
    def num_tokens(self) -> int:
        """Of a batch."""
        return self.num_sequences * self.sequence_length


def is_native(product: Product, compute: Compute, chip: Chip) -> bool:
    """Whether the chip multiplies the operands' own codes, and a kernel of this version uses that."""
    formats = [cast.format for cast in (product.left, product.right)]
    has_kernel = product.is_wide or (bool(compute.native) and chip.vendor == "NVIDIA")
    return has_kernel and all(_rate_name(format) in chip.peak_tflops for format in formats)


def describe_support(compute: Compute, chip: Chip) -> str:
    """``native``, or ``emulated`` and why."""
    emulated = [product for product in compute.products.values() if not is_native(product, compute, chip)]
    formats = sorted({cast.format for product in emulated for cast in (product.left, product.right)})
    if not emulated:
        return "native"
    missing = [format for format in formats if _rate_name(format) not in chip.peak_tflops]
    if missing:
        return f"emulated: {chip.name} does not multiply {' or '.join(missing)}"
    return f"emulated: no kernel for {compute.name} on {chip.name} here"


def efficiency(format: str, chip: Chip) -> tuple[float, str]:
    """The share of the printed rate that a large matmul reaches, and where the figure is from.

    Example:
        >>> from narrowgauge.spec.chips import get_chip
        >>> efficiency("bfloat16", get_chip("H100-SXM"))
        (0.803..., 'its own best published matmul')
    """
    name = _rate_name(format)
    if name in chip.measured_tflops:
        return chip.measured_tflops[name] / chip.peak_tflops[name], "its own best published matmul"
    for known in (name, "bfloat16"):
        shares = [c.measured_tflops[known] / c.peak_tflops[known] for c in CHIPS.values() if known in c.measured_tflops]
        if shares:
            return statistics.median(shares), f"the median of {len(shares)} chips' best published {known} matmuls"
    raise AssertionError("some chip's bfloat16 rate is measured")


def matmul_seconds(flops: float, num_bytes: float, format: str, chip: Chip) -> float:
    """The longer of computing, and reading and writing."""
    rate = chip.peak_tflops[_rate_name(format)] * 1e12 * efficiency(format, chip)[0]
    return max(flops / rate, bytes_seconds(num_bytes, chip))


def bytes_seconds(num_bytes: float, chip: Chip) -> float:
    """Seconds of reading or writing."""
    return num_bytes / (chip.bandwidth_bytes_per_second * BANDWIDTH_SHARE)


def operation_seconds(shape: Shape, setting: Setting, num_tokens: int, chip: Chip) -> dict[str, float]:
    """Seconds of the operations of a linear layer: its casts by slot, its matmuls by name.

    Args:
        shape: of its weight.
        setting: how it is computed.
        num_tokens: rows of its input.
        chip: where.
    """
    compute = named(setting.compute)
    sizes = {"input": num_tokens * shape.in_features, "weight": shape.num_weights}
    sizes["gradient"] = num_tokens * shape.out_features
    seconds: dict[str, float] = {}
    for matmul, product in compute.products.items():
        left, right = (SLOTS[f"{matmul}.{side}"].tensor for side in ("left", "right"))
        [result] = set(TENSORS) - {left, right}  # as large as the one that does not enter
        native = is_native(product, compute, chip)
        for name in () if setting.is_plain else casts_made(compute):
            if SLOTS[name].matmul == matmul:
                cast, what = compute.casts[name], SLOTS[name].tensor
                width = _bytes_of(setting.weights if what == "weight" else setting.stream)
                moved = sizes[what] * (width * _passes(cast) + _written_bytes(cast, native))
                seconds[name] = bytes_seconds(moved, chip)
        read = sum(
            sizes[what] * _written_bytes(c, native) for what, c in ((left, product.left), (right, product.right))
        )
        moved = read + sizes[result] * _bytes_of(setting.weights if result == "weight" else setting.stream)
        format = product.left.format if native else setting.stream
        extra = _extra_bytes(matmul, product, native, setting, sizes[left], sizes[right], sizes[result])
        flops = 2.0 * num_tokens * shape.num_weights
        seconds[matmul] = matmul_seconds(flops, moved, format, chip) + bytes_seconds(extra, chip)
    return seconds


def _passes(cast: Cast) -> int:
    """How often a cast reads its operand: once where each row or block has a scale, else once more for the scale."""
    if cast.scaling == "static":
        return 1
    return 2 if cast.granularity in ("tensor", "column") or cast.scale == "float8_e4m3fn" else 1


def _written_bytes(cast: Cast, native: bool) -> float:
    """Bytes per element of an operand: its codes, or the 16-bit values that are multiplied instead."""
    if cast.is_wide or native:
        return _bytes_of(cast.format)
    return 2.0


def _extra_bytes(
    matmul: str, product: Product, native: bool, setting: Setting, left: int, right: int, result: int
) -> float:
    """Bytes read and written in addition to a matmul's: to transpose codes, since float8 kernels take rows only; to scale."""
    if setting.is_plain:
        return 0.0
    total = 0.0
    width = _written_bytes(product.left, native)
    if native and not product.is_wide and matmul == "grad_weight":
        total += 2 * left * width
    if native and product.left.format.startswith("float8") and matmul != "output":
        total += 2 * right * width
    scaled_inside = native and product.left.format.startswith("float8")
    if product.left.block is None and not product.is_wide and not scaled_inside and product.left.scaling != "static":
        total += result * ((4 if native else 2) + 2 + (2 if native else 0))
    return total


def _bytes_of(format: str) -> float:
    return get_format(format).storage_bits / 8


def _rate_name(format: str) -> str:
    return _SAME_RATE.get(format, format)


def rest_seconds(recipe: Recipe, step: Step, chip: Chip) -> float:
    """A step without its linear layers."""
    model, tokens = step.model, step.num_tokens
    width = _bytes_of(recipe.dtype)
    scores = (
        2.0 * tokens * step.sequence_length * model.num_heads * model.head_dim
    )  # two matmuls, the lower half of each
    rate = chip.peak_tflops[recipe.dtype] * 1e12 * ATTENTION_SHARE
    attention = model.num_layers * _ATTENTION_PASSES * scores / rate
    # Norms (5 of the stream's tensors each), residuals (4), rotary (8 of q and k); the gate 8 of the MLP's, GELU 5.
    inner, gates = (model.intermediate_size, 8 if model.family == "llama" else 5)
    streams = 22 if model.family == "llama" else 14
    elementwise = model.num_layers * tokens * (streams * model.hidden_size + gates * inner) * width
    logits = tokens * model.vocab_size * _LOGIT_BYTES
    # Everything stored is read and written once, the gradient (counted in it) only read.
    optimizer = model.num_parameters * (2 * recipe.bytes_per_param - width)
    return attention + bytes_seconds(elementwise + logits + optimizer, chip)


def predict(kinds: Sequence[Kind], recipes: Iterable[Recipe], step: Step, chip: Chip) -> Round:
    """What :func:`narrowgauge.profiling.measurement.measure` would time on the chip.

    Args:
        kinds: the model's linear layers.
        recipes: whose costs are predicted.
        step: its size.
        chip: where.
    Raises:
        ChipError: the chip does not multiply a dtype that a model is stored in, or its memory is too small.
    """
    recipes = list(recipes)
    for recipe in recipes:
        _check(recipe, step, chip)
    table = {
        (shape, setting): operation_seconds(shape, setting, step.num_tokens, chip)
        for shape, setting in timed_settings(kinds, recipes)
    }
    steps = {
        each: rest_seconds(each, step, chip) + linears_seconds(settings_of(kinds, each), table)
        for each in compared_steps(recipes)
    }
    return Round(steps, table)


def weight_bytes(setting: Setting, chip: Chip) -> float:
    """Bytes of all casts of a weight, per element."""
    compute = named(setting.compute)
    if setting.is_plain:
        return 0.0
    products = [compute.products[SLOTS[name].matmul] for name in weight_slots(compute)]
    return sum(_written_bytes(product.right, is_native(product, compute, chip)) for product in products)


NOT_RUN = "no kernel of this version has run on a GPU: these figures come from the chip's data sheet and were not checked there."


def assumptions(recipes: Iterable[Recipe], chip: Chip) -> list[str]:
    """The assumptions of a prediction, one sentence each."""
    formats = dict.fromkeys(
        c.format
        for recipe in recipes
        for compute in (recipe.compute, COMPUTES[recipe.dtype])
        for c in compute.casts.values()
    )
    rates = dict.fromkeys(_rate_name(format) for format in formats if _rate_name(format) in chip.peak_tflops)
    lines = [
        f"{name} matmuls: {efficiency(name, chip)[0]:.0%} of {chip.peak_tflops[name]:g} TFLOP/s ({efficiency(name, chip)[1]})"
        for name in rates
    ]
    memory = f"memory: {BANDWIDTH_SHARE:.0%} of {chip.bandwidth_gb_per_second:g} GB/s (a published cast on a B200)"
    dtypes = "/".join(sorted({recipe.dtype for recipe in recipes}))
    rest = f"attention: {ATTENTION_SHARE:.0%} of the {dtypes} rate; no kernel launches, no waiting"
    return [*lines, memory, rest]


def _check(recipe: Recipe, step: Step, chip: Chip) -> None:
    for dtype in (recipe.dtype, baseline_of(recipe).dtype):
        if _rate_name(dtype) not in chip.peak_tflops:
            raise ChipError(
                f"{recipe.name} was requested on {chip.name}, which does not multiply {dtype}.",
                f"It multiplies {', '.join(chip.peak_tflops)}.",
            )
    needed = step.model.num_parameters * recipe.bytes_per_param
    if needed > chip.memory_bytes:
        raise ChipError(
            f"{step.model.name} in {recipe.name} takes {needed / 2**30:,.0f} GiB before activations, and {chip.name} has "
            f"{chip.memory_bytes / 2**30:,.0f}.",
            "Choose a larger chip, or a smaller model of the same width.",
        )
