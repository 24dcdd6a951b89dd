"""The roofline: how long linear layers and streams of bytes take on a chip, from its data sheet and measured shares.

A matmul takes its multiply-adds at the chip's rate for the operands' format, or its bytes at the memory's bandwidth,
whichever is longer; a cast takes its bytes. Neither reaches the printed peak, so each is multiplied by a measured share of it
(:mod:`narrowgauge.planner.inputs.efficiency`), and each kernel takes a few microseconds to start and to end. The planner and
``narrowgauge plan layers`` read the same roofline.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from narrowgauge.machine.processor import multiplies
from narrowgauge.planner.inputs.architectures import Matmul
from narrowgauge.planner.inputs.efficiency import Shares, rate_name, shares_of
from narrowgauge.planner.inputs.jobs import Job
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES, SLOTS, TENSORS, Cast, Compute, Product, casts_made, named, weight_slots
from narrowgauge.spec.formats import get_format
from narrowgauge.spec.kernels import kernel_for, needs_kernel
from narrowgauge.spec.recipes import Recipe


@dataclass(frozen=True, slots=True)
class Shape:
    """The shape of a linear layer's weight ``[out, in]``; transposed is stored as ``[in, out]`` (transformers' ``Conv1D``)."""

    out_features: int
    in_features: int
    is_transposed: bool = False

    @property
    def num_weights(self) -> int:
        return self.out_features * self.in_features

    def __str__(self) -> str:
        return f"{self.out_features} × {self.in_features}"


class Setting(NamedTuple):
    """How a linear layer is computed: the compute's name, the dtype of its input and output, and that of its weight."""

    compute: str
    stream: str = "bfloat16"
    weights: str = "bfloat16"

    @property
    def is_plain(self) -> bool:
        """Whether PyTorch's own linear function computes it."""
        return self.compute == self.stream

    @property
    def plain(self) -> Setting:
        """The same layer by PyTorch's own linear function."""
        return self._replace(compute=self.stream)


def setting_of(layer: str, recipe: Recipe) -> Setting:
    """How a recipe computes the layer with that name."""
    weights, compute = recipe.storage_of(f"{layer}.weight", 2).visible, recipe.compute_of(layer).name
    # Layers that a recipe keeps are computed in float32, like their weights.
    stream = "float32" if recipe.keeps(layer) else recipe.dtype
    # These computes differ from the plain one of their dtype only by their storage.
    return Setting(stream if compute in ("float8", "float16-throughout") else compute, stream, weights)


def is_native(product: Product, chip: Chip) -> bool:
    """Whether the chip multiplies the operands' own codes, and a kernel of this version uses that."""
    formats = [cast.format for cast in (product.left, product.right)]
    if needs_kernel(product):
        has_kernel = kernel_for(product, chip.target) is not None
    else:
        has_kernel = product.is_wide or chip.vendor == "NVIDIA"
    return has_kernel and all(rate_name(format) in chip.peak_tflops for format in formats)


def is_widened(format: str, chip: Chip) -> bool:
    """Whether a processor multiplies a 16-bit format as float32, for which both operands and the result are converted."""
    return chip.vendor == "CPU" and bytes_per_number(format) < 4 and not multiplies(format)


_WIDENED_BYTES = 6  # of an operand: read in 16 bits and written in 32; of the result the other way


def describe_support(compute: Compute, chip: Chip) -> str:
    """``native``, or ``emulated`` and why."""
    emulated = [product for product in compute.products.values() if not is_native(product, chip)]
    formats = sorted({cast.format for product in emulated for cast in (product.left, product.right)})
    if not emulated:
        return "native"
    missing = [format for format in formats if rate_name(format) not in chip.peak_tflops]
    if missing:
        return f"emulated: {chip.name} does not multiply {' or '.join(missing)}"
    return f"emulated: no kernel for {compute.name} on {chip.name} here"


def matmul_seconds(flops: float, num_bytes: float, format: str, chip: Chip, shares: Shares | None = None) -> float:
    """The longer of computing, and reading and writing; and the start and end of a kernel."""
    found = shares or shares_of(chip)
    rate = chip.peak_tflops[rate_name(format)] * 1e12 * found.matmul(format).value
    return max(flops / rate, bytes_seconds(num_bytes, chip, found)) + found["kernel_seconds"].value


def bytes_seconds(num_bytes: float, chip: Chip, shares: Shares | None = None) -> float:
    """Seconds of reading or writing, without the start of a kernel."""
    return num_bytes / (chip.bandwidth_bytes_per_second * (shares or shares_of(chip))["bandwidth"].value)


@lru_cache(maxsize=4096)
def operation_seconds(
    shape: Shape, setting: Setting, num_tokens: float, chip: Chip, shares: Shares | None = None
) -> dict[str, float]:
    """Seconds of the operations of a linear layer on ``num_tokens`` rows: its casts by slot, its matmuls by name.

    All callers share the result, so nobody may change it.
    """
    compute = named(setting.compute)
    sizes = {"input": num_tokens * shape.in_features, "weight": float(shape.num_weights)}
    sizes["gradient"] = num_tokens * shape.out_features
    flops = 2.0 * num_tokens * shape.num_weights
    seconds: dict[str, float] = {}
    casts, made = compute.casts, () if setting.is_plain else casts_made(compute)
    for matmul, product in compute.products.items():
        native = is_native(product, chip)
        for name in made:
            if SLOTS[name].matmul == matmul:
                seconds[name] = _cast_seconds(name, casts[name], sizes, setting, native, chip, shares)
        moved, extra = _moved_bytes(matmul, product, sizes, setting, native)
        format = product.left.format if native else setting.stream
        if is_widened(format, chip):
            format, extra = "float32", extra + _WIDENED_BYTES * sum(sizes.values())
        seconds[matmul] = matmul_seconds(flops, moved, format, chip, shares) + bytes_seconds(extra, chip, shares)
    return seconds


def _cast_seconds(
    slot: str, cast: Cast, sizes: dict[str, float], setting: Setting, native: bool, chip: Chip, shares: Shares | None
) -> float:
    what = SLOTS[slot].tensor
    width = bytes_per_number(setting.weights if what == "weight" else setting.stream)
    moved = sizes[what] * (width * _passes(cast) + _written_bytes(cast, native))
    found = shares or shares_of(chip)
    return bytes_seconds(moved / found["casts"].value, chip, found) + found["kernel_seconds"].value


def _moved_bytes(
    matmul: str, product: Product, sizes: dict[str, float], setting: Setting, native: bool
) -> tuple[float, float]:
    """Bytes that a matmul reads and writes, and those in addition to it."""
    left, right = (SLOTS[f"{matmul}.{side}"].tensor for side in ("left", "right"))
    [result] = set(TENSORS) - {left, right}  # as large as the one that does not enter
    read = sum(sizes[what] * _written_bytes(c, native) for what, c in ((left, product.left), (right, product.right)))
    moved = read + sizes[result] * bytes_per_number(setting.weights if result == "weight" else setting.stream)
    return moved, _extra_bytes(matmul, product, native, setting, sizes[left], sizes[right], sizes[result])


def _passes(cast: Cast) -> int:
    """How often a cast reads its operand: once where each row or block has a scale, else once more for the scale."""
    if cast.scaling == "static":
        return 1
    return 2 if cast.granularity in ("tensor", "column") or cast.scale == "float8_e4m3fn" else 1


def _written_bytes(cast: Cast, native: bool) -> float:
    """Bytes per element of an operand: its codes, or the 16-bit values that are multiplied instead."""
    if native and cast.block is not None:
        return cast.bits / 8  # with the scales of its blocks
    return bytes_per_number(cast.format) if cast.is_wide or native else 2.0


def _extra_bytes(
    matmul: str, product: Product, native: bool, setting: Setting, left: float, right: float, result: float
) -> float:
    """Bytes read and written in addition to a matmul's: to transpose narrow floats, whose kernels take rows only; to scale."""
    if setting.is_plain:
        return 0.0
    total = 0.0
    width = _written_bytes(product.left, native)
    if native and not product.is_wide and matmul == "grad_weight":
        total += 2 * left * width
    if native and product.left.format.startswith(("float8", "float4")) and matmul != "output":
        total += 2 * right * width
    scaled_inside = native and product.left.format.startswith("float8")
    if product.left.block is None and not product.is_wide and not scaled_inside and product.left.scaling != "static":
        total += result * ((4 if native else 2) + 2 + (2 if native else 0))
    return total


@lru_cache(maxsize=64)
def bytes_per_number(format: str) -> float:
    return get_format(format).storage_bits / 8


def weight_bytes(setting: Setting, chip: Chip) -> float:
    """Bytes of all casts of a weight, per element."""
    compute = named(setting.compute)
    if setting.is_plain:
        return 0.0
    products = [compute.products[SLOTS[name].matmul] for name in weight_slots(compute)]
    return sum(_written_bytes(product.right, is_native(product, chip)) for product in products)


# ── the matmuls of a job as points of the roofline ────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class RooflinePoint:
    """A matmul of the forward pass on one rank.

    Args:
        shape: rows × inner size × columns.
        intensity: operations per byte read and written.
        tflops: the rate that it reaches.
    """

    name: str
    shape: str
    intensity: float
    tflops: float


@dataclass(frozen=True, slots=True)
class Roof:
    """What a chip reaches.

    Args:
        bytes_per_second: of memory, times its measured share.
        peaks: TFLOP/s by format, times its measured share.
        points: the matmuls of a job.
    """

    chip: str
    bytes_per_second: float
    peaks: dict[str, float]
    points: tuple[RooflinePoint, ...]


def roof_of(job: Job) -> Roof:
    """The roofline of a job's micro-batch on the slowest chip of its cluster."""
    chip = min((group.chip for group in job.cluster.groups), key=lambda each: max(each.peak_tflops.values()))
    shares = job.shares or shares_of(chip)
    compute = job.recipe.compute
    product = compute.products["output"]
    is_narrow = is_native(product, chip)
    wide = COMPUTES[job.recipe.dtype].products["output"].left.format
    narrow = product.left.format if is_narrow else wide
    wide, narrow = ("float32" if is_widened(format, chip) else format for format in (wide, narrow))
    rows = job.architecture.matmuls
    points = [_point(row, job, narrow if row.part != "head" else wide, chip, shares) for row in rows]
    formats = dict.fromkeys([wide, narrow])
    peaks = {name: 1.0 / (matmul_seconds(1e18, 0.0, name, chip, shares) / 1e6) for name in formats}
    return Roof(chip.name, 1.0 / bytes_seconds(1.0, chip, shares), peaks, tuple(points))


def _point(row: Matmul, job: Job, format: str, chip: Chip, shares: Shares) -> RooflinePoint:
    layout = job.layout
    rows = max(1.0, layout.micro_batch * job.sequence_length * row.tokens_share / layout.context)
    inner = row.in_features / (layout.tensor if row.split == "row" else 1)
    columns = row.out_features / (layout.tensor if row.split == "column" else 1)
    moved = (rows * inner + inner * columns) * bytes_per_number(format) + rows * columns * 2
    flops = 2 * rows * inner * columns
    seconds = matmul_seconds(flops, moved, format, chip, shares)
    return RooflinePoint(
        row.name, f"{rows:,.0f} × {inner:,.0f} × {columns:,.0f}", flops / moved, flops / seconds / 1e12
    )
