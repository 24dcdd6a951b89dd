"""The roofline: the time of linear layers and byte streams on a chip, from its data sheet and
measured efficiencies.

A matmul takes the longer of two times: its multiply-adds at the chip's rate for the operands'
format, or its bytes at the memory bandwidth. A cast takes its bytes. Neither reaches the printed
peak, so a measured efficiency multiplies each rate (:mod:`narrowgauge.planner.efficiency`). Each
kernel takes a few microseconds to start and to end.
"""

from __future__ import annotations

from narrowgauge.planner.efficiency import Efficiency
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import SLOTS, TENSORS, Cast, Compute, Product, casts_made
from narrowgauge.spec.formats import bytes_per_number
from narrowgauge.spec.kernels import kernel_for, needs_kernel
from narrowgauge.spec.recipes import Recipe


def is_native(product: Product, chip: Chip) -> bool:
    """Tell whether the chip multiplies the operands' codes directly, with a kernel of this version."""
    if needs_kernel(product):
        has_kernel = kernel_for(product, chip.target) is not None
    else:
        has_kernel = product.is_wide or chip.vendor == "NVIDIA"
    formats = {chip.rate_format(cast.format) for cast in (product.left, product.right)}
    return has_kernel and formats <= chip.peak_tflops.keys()


def multiplies(compute: Compute, chip: Chip) -> bool:
    """Tell whether the chip computes every product natively, without emulation."""
    return all(is_native(product, chip) for product in compute.products.values())


def bytes_seconds(num_bytes: float, chip: Chip, shares: Efficiency) -> float:
    """Return the seconds to read or write bytes, without the start of a kernel."""
    return num_bytes / (chip.bandwidth_gb_per_second * 1e9 * shares["bandwidth"])


def operation_seconds(
    out_features: int,
    in_features: int,
    compute: Compute,
    recipe: Recipe,
    num_tokens: float,
    chip: Chip,
    shares: Efficiency,
) -> dict[str, float]:
    """Return the seconds of a linear layer's operations on ``num_tokens`` rows: casts by slot,
    matmuls by name.

    The recipe sets the dtypes of input, output and weight.
    """
    num_weights = out_features * in_features
    stream = recipe.dtype
    weights = recipe.storage.visible
    sizes = {
        "input": num_tokens * in_features,
        "weight": float(num_weights),
        "gradient": num_tokens * out_features,
    }
    flops = 2.0 * num_tokens * num_weights
    seconds: dict[str, float] = {}
    widths = dict.fromkeys(TENSORS, bytes_per_number(stream))
    widths["weight"] = bytes_per_number(weights)
    for matmul, product in compute.products.items():
        native = is_native(product, chip)
        for name in casts_made(compute):
            if SLOTS[name].matmul == matmul:
                cast = compute.casts[name]
                tensor = SLOTS[name].tensor
                width = widths[tensor] * _passes(cast) + _written_bytes(cast, native)
                moved = bytes_seconds(sizes[tensor] * width, chip, shares)
                seconds[name] = moved + shares["kernel_seconds"]
        lhs = SLOTS[f"{matmul}.left"].tensor
        rhs = SLOTS[f"{matmul}.right"].tensor
        [result] = set(TENSORS) - {lhs, rhs}
        moved = sizes[lhs] * _written_bytes(product.left, native)
        moved += sizes[rhs] * _written_bytes(product.right, native)
        moved += sizes[result] * widths[result]
        extra = _extra_bytes(matmul, product, native, sizes[lhs], sizes[rhs], sizes[result])
        rate_format = chip.rate_format(product.left.format if native else stream)
        rate = chip.peak_tflops[rate_format] * 1e12 * shares[f"matmul.{rate_format}"]
        longer = max(flops / rate, bytes_seconds(moved, chip, shares))
        seconds[matmul] = longer + shares["kernel_seconds"] + bytes_seconds(extra, chip, shares)
    return seconds


def _passes(cast: Cast) -> int:
    """Count how often a cast reads its operand: once with scales per row or block, else once more
    for the scale.
    """
    is_of_whole = cast.granularity in ("tensor", "column") or cast.scale == "float8_e4m3fn"
    if is_of_whole and cast.scaling != "static":
        return 2
    return 1


def _written_bytes(cast: Cast, native: bool) -> float:
    """Return the bytes per operand element: its codes, or the 16-bit values that replace them."""
    if native and cast.block is not None:
        return cast.bits / 8  # with the scales of its blocks
    if native or cast.is_wide:
        return bytes_per_number(cast.format)
    return 2.0


def _extra_bytes(
    matmul: str, product: Product, native: bool, first: float, second: float, result: float
) -> float:
    """Return the extra bytes of a matmul: to transpose low-precision floats (their kernels take
    only rows), and to scale.

    ``first``, ``second`` and ``result`` are the numbers of elements of its operands and its result.
    """
    total = 0.0
    width = _written_bytes(product.left, native)
    if native and not product.is_wide and matmul == "grad_weight":
        total += 2 * first * width
    if native and product.left.format.startswith(("float8", "float4")) and matmul != "output":
        total += 2 * second * width
    scaled_inside = native and product.left.format.startswith("float8")
    if (
        product.left.block is None
        and not product.is_wide
        and not scaled_inside
        and product.left.scaling != "static"
    ):
        total += result * (8 if native else 4)
    return total
