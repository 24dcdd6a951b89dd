"""Kernels: which GPUs multiply which casts' own codes.

A row is one of PyTorch's matmul kernels: the formats and groups of its two operands, and the chips
that run it. A matmul whose casts fit no row of its chip is emulated with the same values.
Blocks have no row, and AMD's chips have none: nobody has timed this project there.
The matmuls, the planner and the documentation read the same table. :mod:`narrowgauge.matmul.native`
has the function that calls each kernel. Every GPU multiplies int8 and the 16- and 32-bit formats,
so these need no row.

Source: ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` and ``ScaledBlasUtils.cpp`` of PyTorch, which
refuse all other operands; cuBLAS, "Narrow Precision Data Types Usage".
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import Compute, Product

Pairs = tuple[tuple[str, str], ...]


@dataclass(frozen=True, slots=True)
class Kernel:
    """One matmul kernel, and what it takes.

    Args:
        formats: of the left and the right operand.
        granularities: of the left and the right operand.
        targets: chips that run it, as compilers call them: ``sm90``.
    """

    formats: Pairs
    granularities: Pairs
    targets: tuple[str, ...]

    def takes(self, product: Product) -> bool:
        """Return whether the casts of a product match the kernel's operands."""
        lhs = product.left
        rhs = product.right
        return (lhs.format, rhs.format) in self.formats and (
            (lhs.granularity, rhs.granularity) in self.granularities
        )


_E4M3: Pairs = (("float8_e4m3fn", "float8_e4m3fn"),)
_GROUPS = ("tensor", "row", "column")
# cuBLAS cannot multiply two e5m2 matrices.
_FLOAT8 = (*_E4M3, ("float8_e5m2", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"))
_WHOLE: Pairs = tuple(itertools.product(_GROUPS, _GROUPS))
_BLACKWELL = ("sm100", "sm103", "sm110", "sm120", "sm121")

KERNELS = (Kernel(_FLOAT8, _WHOLE, ("sm89", "sm90", *_BLACKWELL)),)


def kernel_for(product: Product, architecture: str) -> Kernel | None:
    """Return the kernel that multiplies a product's operands on a chip; ``None`` if they are
    emulated or need no row.
    """
    for kernel in KERNELS:
        if kernel.takes(product) and architecture in kernel.targets:
            return kernel
    return None


def needs_kernel(product: Product) -> bool:
    """Return whether only a row of the table multiplies these formats, and not every GPU."""
    is_whole_int8 = {product.left.format, product.right.format} == {"int8"}
    if is_whole_int8:
        return product.left.block is not None or product.right.block is not None
    return not product.is_wide


def multiplies(compute: Compute, chip: Chip) -> bool:
    """Return whether a chip multiplies all operands' codes, with a kernel of this version."""
    for product in compute.products.values():
        has_kernel = product.is_wide or chip.vendor == "NVIDIA"
        if needs_kernel(product):
            has_kernel = kernel_for(product, chip.target) is not None
        formats = {chip.rate_format(cast.format) for cast in (product.left, product.right)}
        if not has_kernel or not formats <= chip.peak_tflops.keys():
            return False
    return True
