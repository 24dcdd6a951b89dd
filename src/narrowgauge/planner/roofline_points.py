"""The matmuls of an option as points of a roofline: operations per byte of memory traffic, and the rate they reach."""

from __future__ import annotations

from dataclasses import dataclass

from narrowgauge.planner.architectures import Architecture, Matmul
from narrowgauge.planner.clusters import Cluster
from narrowgauge.planner.options import Option
from narrowgauge.planner.roofline import bytes_of, bytes_seconds, is_native, matmul_seconds
from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import COMPUTES


@dataclass(frozen=True, slots=True)
class Point:
    """A matmul of the forward pass on one rank.

    Args:
        name: of the layer.
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
        chip: its name.
        bytes_per_second: of memory, times its measured share.
        peaks: TFLOP/s by format, times its measured share.
        points: the matmuls of an option.
    """

    chip: str
    bytes_per_second: float
    peaks: dict[str, float]
    points: tuple[Point, ...]


def roof_of(architecture: Architecture, option: Option, cluster: Cluster) -> Roof:
    """The roofline of an option on the slowest chip of its cluster.

    Args:
        architecture: of the model.
        option: whose micro-batch and tensor ranks give the matmuls their sizes.
        cluster: that it runs on.
    """
    chip = min((group.chip for group in cluster.groups), key=lambda each: max(each.peak_tflops.values()))
    compute = option.recipe.compute
    product = compute.products["output"]
    is_narrow = is_native(product, compute, chip)
    wide = COMPUTES[option.recipe.dtype].products["output"].left.format
    narrow = product.left.format if is_narrow else wide
    points = [_point(row, option, narrow if row.part != "head" else wide, chip) for row in architecture.matmuls]
    peaks = {name: 1.0 / (matmul_seconds(1e18, 0.0, name, chip) / 1e6) for name in dict.fromkeys([wide, narrow])}
    return Roof(chip.name, 1.0 / bytes_seconds(1.0, chip), peaks, tuple(points))


def _point(row: Matmul, option: Option, format: str, chip: Chip) -> Point:
    layout = option.layout
    rows = max(1.0, layout.micro_batch * option.sequence_length * row.tokens_share / layout.context)
    inner = row.in_features / (layout.tensor if row.split == "row" else 1)
    columns = row.out_features / (layout.tensor if row.split == "column" else 1)
    moved = (rows * inner + inner * columns) * bytes_of(format) + rows * columns * 2
    flops = 2 * rows * inner * columns
    seconds = matmul_seconds(flops, moved, format, chip)
    return Point(row.name, f"{rows:,.0f} × {inner:,.0f} × {columns:,.0f}", flops / moved, flops / seconds / 1e12)
