"""What a step would take on a chip that is not here, from the figures of its row: a roofline, and no more.

A matmul takes as long as its multiply-adds at the chip's rate for the operands' format, or as its bytes at the memory's,
whichever is longer; a cast takes as long as its bytes. Neither reaches the printed peak, so each is multiplied by a share of
it that somebody measured. The rest of the step is counted the same way: attention, what is done element by element, the
loss, the optimizer. Launches of kernels, communication and whatever a chip does at the same time are left out, so of these
figures believe the order, not the digits.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from narrowgauge.errors import ChipError
from narrowgauge.profiling.costs import Round, linears_seconds
from narrowgauge.profiling.layer_plan import Kind, Shape
from narrowgauge.profiling.settings import Setting, base_of, casts_made, rows_of, settings_of, yardstick_of
from narrowgauge.spec.chips import CHIPS, Chip
from narrowgauge.spec.computes import COMPUTES, Cast, Compute, Product
from narrowgauge.spec.formats import get_format
from narrowgauge.spec.models import Model
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.variants import named

BANDWIDTH_SHARE = 0.8
"""Of the printed bandwidth, what a cast reaches: torchao's MXFP8 cast on a B200, 6,462 of 8,000 GB/s."""
ATTENTION_SHARE = 0.5
"""Of the printed rate, what fused attention reaches: the default of llm-analysis."""
_ATTENTION_PASSES = 3.5  # one forward, and the 2.5 of a backward that computes the scores again
_LOGIT_BYTES = 12  # bfloat16 logits written and read, their gradient in float32 and bfloat16
# Formats whose products run at another's rate.
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


def is_native(product: Product, row: Compute, chip: Chip) -> bool:
    """Whether the chip multiplies the operands' own codes, and there is a kernel here that asks it to."""
    formats = [cast.format for cast in (product.left, product.right)]
    has_kernel = product.is_wide or (bool(row.native) and chip.vendor == "NVIDIA")
    return has_kernel and all(_rate_name(format) in chip.peak_tflops for format in formats)


def told(row: Compute, chip: Chip) -> str:
    """``native``, or ``emulated`` and why."""
    emulated = [product for product in row.products.values() if not is_native(product, row, chip)]
    formats = sorted({cast.format for product in emulated for cast in (product.left, product.right)})
    if not emulated:
        return "native"
    missing = [format for format in formats if _rate_name(format) not in chip.peak_tflops]
    if missing:
        return f"emulated: {chip.name} does not multiply {' or '.join(missing)}"
    return f"emulated: no kernel for {row.name} on {chip.name} here"


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
    """The longer of computing and of reading and writing."""
    rate = chip.peak_tflops[_rate_name(format)] * 1e12 * efficiency(format, chip)[0]
    return max(flops / rate, bytes_seconds(num_bytes, chip))


def bytes_seconds(num_bytes: float, chip: Chip) -> float:
    """What reading or writing takes."""
    return num_bytes / (chip.bandwidth_bytes_per_second * BANDWIDTH_SHARE)


def parts_of(shape: Shape, setting: Setting, num_tokens: int, chip: Chip) -> dict[str, float]:
    """Seconds of the parts of a linear layer.

    Args:
        shape: of its weight.
        setting: how it is computed.
        num_tokens: rows of its input.
        chip: where.
    """
    row = named(setting.row)
    sizes = {"input": num_tokens * shape.in_features, "weight": shape.num_weights}
    sizes["gradient"] = num_tokens * shape.out_features
    parts: dict[str, float] = {}
    flops = 2.0 * num_tokens * shape.num_weights
    for place, (left, right, result) in _OPERANDS.items():
        product = row.products[place]
        native = is_native(product, row, chip)
        if not setting.is_plain:
            for side, what in (("left", left), ("right", right)):
                if f"{place}.{side}" in casts_made(row):
                    cast = row.casts[f"{place}.{side}"]
                    width = _bytes_of(setting.weights if what == "weight" else setting.stream)
                    moved = sizes[what] * (width * _passes(cast) + _written_bytes(cast, native))
                    parts[f"{place}.{side}"] = bytes_seconds(moved, chip)
        read = sum(
            sizes[what] * _written_bytes(c, native) for what, c in ((left, product.left), (right, product.right))
        )
        moved = read + sizes[result] * _bytes_of(setting.weights if place == "grad_weight" else setting.stream)
        format = product.left.format if native else setting.stream
        parts[place] = matmul_seconds(flops, moved, format, chip) + bytes_seconds(
            _around_bytes(place, product, native, setting, sizes[left], sizes[right], sizes[result]), chip
        )
    return parts


_OPERANDS = {
    "output": ("input", "weight", "gradient"),
    "grad_input": ("gradient", "weight", "input"),
    "grad_weight": ("gradient", "input", "weight"),
}


def _passes(cast: Cast) -> int:
    """How often a cast reads its operand: once where a scale belongs to a row or block, else once more for the scale."""
    if cast.scaling == "static":
        return 1
    return 2 if cast.granularity in ("tensor", "column") or cast.scale == "float8_e4m3fn" else 1


def _written_bytes(cast: Cast, native: bool) -> float:
    """Bytes of each element of an operand: its codes, or 16-bit values where these are multiplied."""
    if cast.is_wide or native:
        return _bytes_of(cast.format)
    return 2.0


def _around_bytes(
    place: str, product: Product, native: bool, setting: Setting, left: int, right: int, result: int
) -> float:
    """What is read and written beside a matmul: codes turned, since float8 kernels take rows only; results scaled."""
    if setting.is_plain:
        return 0.0
    total = 0.0
    width = _written_bytes(product.left, native)
    if native and not product.is_wide and place == "grad_weight":
        total += 2 * left * width
    if native and product.left.format.startswith("float8") and place != "output":
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
        recipes: whose costs are asked.
        step: its size.
        chip: where.
    Raises:
        ChipError: the chip does not multiply a dtype that a model is kept in, or its memory is too small.
    """
    recipes = list(recipes)
    for recipe in recipes:
        _check(recipe, step, chip)
    table = {
        (shape, setting): parts_of(shape, setting, step.num_tokens, chip)
        for shape, setting in settings_of(kinds, recipes)
    }
    bases = dict.fromkeys(other for recipe in recipes for other in (base_of(recipe), yardstick_of(recipe)))
    steps = {base: rest_seconds(base, step, chip) + linears_seconds(rows_of(kinds, base), table) for base in bases}
    return Round(steps, table)


def weight_bytes(setting: Setting, chip: Chip) -> float:
    """Bytes of all casts of a weight, for each of its elements."""
    row = named(setting.row)
    if setting.is_plain:
        return 0.0
    places = ("output",) if row.reuses_weight else ("output", "grad_input")
    return sum(_written_bytes(p.right, is_native(p, row, chip)) for p in map(row.products.__getitem__, places))


NOT_RUN = (
    "no kernel of this version has run on a GPU: these are figures of the chip, and nobody has checked them there."
)


def assumptions(recipes: Iterable[Recipe], chip: Chip) -> list[str]:
    """What the prediction rests on, a sentence each."""
    formats = dict.fromkeys(
        c.format for recipe in recipes for row in (recipe.compute, COMPUTES[recipe.dtype]) for c in row.casts.values()
    )
    rates = dict.fromkeys(_rate_name(format) for format in formats if _rate_name(format) in chip.peak_tflops)
    lines = [
        f"{name} matmuls: {efficiency(name, chip)[0]:.0%} of {chip.peak_tflops[name]:g} TFLOP/s ({efficiency(name, chip)[1]})"
        for name in rates
    ]
    memory = f"memory: {BANDWIDTH_SHARE:.0%} of {chip.bandwidth_gb_per_second:g} GB/s (a published cast on a B200)"
    rest = f"attention: {ATTENTION_SHARE:.0%} of the {'/'.join(sorted({r.dtype for r in recipes}))} rate; no launches, no waiting"
    return [*lines, memory, rest]


def _check(recipe: Recipe, step: Step, chip: Chip) -> None:
    for dtype in (recipe.dtype, yardstick_of(recipe).dtype):
        if _rate_name(dtype) not in chip.peak_tflops:
            raise ChipError(
                f"{recipe.name} was asked for on {chip.name}, which does not multiply {dtype}.",
                f"It multiplies {', '.join(chip.peak_tflops)}.",
            )
    needed = step.model.num_parameters * recipe.bytes_per_param
    if needed > chip.memory_bytes:
        raise ChipError(
            f"{step.model.name} in {recipe.name} takes {needed / 2**30:,.0f} GiB before activations, and {chip.name} has "
            f"{chip.memory_bytes / 2**30:,.0f}.",
            "Take a larger chip, or a smaller model of the same width.",
        )
