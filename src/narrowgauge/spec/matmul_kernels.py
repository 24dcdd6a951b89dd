"""Kernels: which GPUs multiply which casts' own codes.

PyTorch's matmul of float8 has scales of rows or tensors. A matmul of other casts is emulated with the
same values: blocks have no kernel here, and AMD's chips have none, since nobody has timed this project
there. The matmuls, the planner and the documentation ask the same functions.
:mod:`narrowgauge.matmul.native` calls the kernel. Every GPU multiplies int8 and the 16- and 32-bit
formats, so these need none.

Source: ``aten/src/ATen/native/cuda/ScaledBlas.cpp`` and ``ScaledBlasUtils.cpp`` of PyTorch, which
refuse all other operands; cuBLAS, "Narrow Precision Data Types Usage".
"""

from narrowgauge.spec.chips import Chip
from narrowgauge.spec.computes import Compute, Product

_TARGETS = ("sm89", "sm90", "sm100", "sm103", "sm110", "sm120", "sm121")
"""Chips with the kernel, as compilers call them."""
_FORMATS = (
    ("float8_e4m3fn", "float8_e4m3fn"), ("float8_e5m2", "float8_e4m3fn"), ("float8_e4m3fn", "float8_e5m2"),
)  # fmt: skip
"""Of the left and the right operand. cuBLAS cannot multiply two e5m2 matrices."""
_GRANULARITIES = {"none", "tensor", "row", "column"}


def has_kernel(product: Product, architecture: str) -> bool:
    """Return whether a chip has a kernel for the operands of a product."""
    lhs, rhs = product.left, product.right
    has_groups = {lhs.granularity, rhs.granularity} <= _GRANULARITIES
    return architecture in _TARGETS and has_groups and (lhs.format, rhs.format) in _FORMATS


def needs_kernel(product: Product) -> bool:
    """Return whether only the kernel multiplies these formats, and not every GPU."""
    is_whole_int8 = {product.left.format, product.right.format} == {"int8"}
    if is_whole_int8:
        return product.left.block is not None or product.right.block is not None
    return not product.is_wide


def multiplies(compute: Compute, chip: Chip) -> bool:
    """Return whether a chip multiplies all operands' codes, with a kernel of this version."""
    for product in compute.products.values():
        is_multiplied = product.is_wide or chip.vendor == "NVIDIA"
        if needs_kernel(product):
            is_multiplied = has_kernel(product, chip.target)
        formats = {chip.rate_format(cast.format) for cast in (product.left, product.right)}
        if not is_multiplied or not formats <= chip.peak_tflops.keys():
            return False
    return True
