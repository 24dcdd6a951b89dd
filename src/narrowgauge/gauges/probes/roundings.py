"""Probe where a machine rounds: subnormals, multiply-adds, operands and sums of matmuls, last bits of functions.

All probes take the same numbers on every machine, made from integers alone. They return short texts or hashes of bits.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

_PRIME = 2**31 - 1


def fractions(number: int) -> Tensor:
    """Return float64 fractions in [0, 1), multiples of 2^-20, in an order without a pattern; on the CPU.

    Example:
        >>> bool((fractions(5) * 2**20 % 1 == 0).all())
        True
    """
    state = torch.arange(1, number + 1, dtype=torch.int64, device="cpu") * 48271 + 69621
    for _ in range(3):
        state = state % _PRIME * 48271 % _PRIME
    return (state % 2**20).double() / 2**20


def between(low: float, high: float, number: int) -> Tensor:
    """float32 values spread over an interval."""
    return (low + (high - low) * fractions(number)).float()


def across_exponents(low: float, high: float, number: int) -> Tensor:
    """Return positive float32 values of every binary exponent from ``low`` to below ``high``, equally often."""
    exponents = int(low) + torch.arange(number, dtype=torch.int64, device="cpu") % int(high - low)
    return torch.ldexp(1 + fractions(number), exponents).float()


def bits_of(values: Tensor) -> str:
    """Eight hexadecimal digits of a hash of a tensor's bytes."""
    raw = values.detach().contiguous().cpu().flatten().view(torch.uint8)
    return hashlib.sha256(bytes(raw.tolist())).hexdigest()[:8]


# ── roundings ──────────────────────────────────────────────────────────────────────────────────────────────────────────


# (1 + 2^-12)² = 1 + 2^-11 + 2^-24 is a tie. Rounded to float32 it loses its last term, fused it does not.
_FACTOR = 1 + 2.0**-12
_ROUNDED_PRODUCT = 1 + 2.0**-11
_ONES = 4096


def measure_subnormals(device: torch.device) -> str:
    """Return whether elementwise products keep subnormals. Use enough elements for all threads: the mode is per thread."""
    return _subnormals(lambda x, y: torch.full((1 << 17,), x, dtype=torch.float32, device=device) * y)


def measure_subnormals_in_matmuls(device: torch.device) -> str:
    """Return whether float32 matmuls keep subnormal results and operands."""

    def full(value: float) -> Tensor:
        return torch.full((64, 64), value, dtype=torch.float32, device=device)

    return _subnormals(lambda x, y: full(x) @ full(y))


def _subnormals(multiply: Callable[[float, float], Tensor]) -> str:
    def word(products: Tensor) -> str:
        share = float((products != 0).double().mean())
        return "kept" if share == 1 else "flushed" if share == 0 else "flushed by some threads"

    return f"results {word(multiply(2.0**-100, 2.0**-40))}, operands {word(multiply(2.0**-140, 2.0**100))}"


def measure_matmul_inputs(device: torch.device) -> str:
    """Return the surviving significant bits of float32 operands: 24, 11 for TF32, 8 for bfloat16."""
    widths = range(1, 25)
    values = torch.tensor([1 + 2.0 ** (1 - bits) for bits in widths], dtype=torch.float32, device=device)
    operands = torch.zeros(256, 256, dtype=torch.float32, device=device)
    operands[: len(widths), 0] = values
    product = operands @ torch.ones(256, 256, dtype=torch.float32, device=device)
    survived = (product[: len(widths)] == values[:, None]).all(1).tolist()
    bits = max((bits for bits, is_kept in zip(widths, survived, strict=True) if is_kept), default=0)
    names = {24: "float32", 16: "two bfloat16", 11: "TF32", 8: "bfloat16"}
    return f"{bits} bits" + (f" ({names[bits]})" if bits in names else "")


def measure_accumulators(device: torch.device) -> str:
    """Return how far sums of ones count. A bfloat16 accumulator stops at 256, a float16 one at 2,048."""

    def matmul(dtype: torch.dtype) -> float:
        operand = torch.ones(32, _ONES, dtype=dtype, device=device)
        return float(F.linear(operand, operand)[0, 0])

    total = float(torch.ones(_ONES, dtype=torch.bfloat16, device=device).sum())
    counted = {
        "bfloat16 matmul": matmul(torch.bfloat16),
        "float32 matmul": matmul(torch.float32),
        "bfloat16 sum": total,
    }
    return ", ".join(f"{name} {number:.0f}" for name, number in counted.items())


def measure_fused_multiply_add(device: torch.device) -> str:
    """Return the operations that keep the exact product until the addition."""

    def full(value: float) -> Tensor:
        return torch.full((67,), value, dtype=torch.float32, device=device)

    factor, rounded = full(_FACTOR), full(-_ROUNDED_PRODUCT)
    # For addcdiv the quotient 1 / 3 is inexact; for lerp, weight * (end - start).
    third = torch.reciprocal(full(3.0))
    quotient = torch.addcdiv(-third, full(1.0), full(3.0))
    rows = torch.zeros(16, 64, dtype=torch.float32, device=device)
    columns = torch.zeros(64, 16, dtype=torch.float32, device=device)
    rows[:, 0], columns[0] = -_ROUNDED_PRODUCT, 1.0
    rows[:, 1], columns[1] = _FACTOR, _FACTOR
    product, swapped = rows @ columns, rows.flip(1) @ columns.flip(0)
    results = {
        "matmul": torch.where(product != 0, product, swapped),
        "addcmul": torch.addcmul(rounded, factor, factor),
        "addcdiv": quotient,
        "lerp": torch.lerp(rounded, rounded + factor, factor),
        "x * y + z": factor * factor + rounded,
    }
    # The low half of a product survives in all elements, in none, or only inside vectors.
    shares = {name: float((result != 0).double().mean()) for name, result in results.items()}
    words = {1.0: "fused", 0.0: "rounded"}
    return ", ".join(f"{name} {words.get(share, 'fused in part')}" for name, share in shares.items())


ROUNDINGS: dict[str, Callable[[torch.device], str]] = {
    "subnormals": measure_subnormals,
    "subnormals in matmuls": measure_subnormals_in_matmuls,
    "matmul inputs": measure_matmul_inputs,
    "matmul accumulator": measure_accumulators,
    "fused multiply-add": measure_fused_multiply_add,
}
"""For each name, the function that measures it on a device."""


# ── functions ──────────────────────────────────────────────────────────────────────────────────────────────────────────
#
# No standard defines the rounding of exp or tanh, so libraries differ. Kernels of one library differ too: vector lanes use
# another polynomial than the loop over the remaining elements. Every processor rounds division and square root
# correctly, but not every kernel does. The reference is the float64 function on the CPU. Its error is 2^-29 of the measured
# error.


_NUM_VALUES = 4099  # not a multiple of a vector's width, to measure the remaining elements too
_NUM_ALONE = 256


def _divide(values: Tensor) -> Tensor:
    """Divide by an exact number between 3/4 and 5/4. The values are multiples of 2^-19."""
    return values / values.abs().mul(0.5).add(0.75)


Function = Callable[[Tensor], Tensor]
FUNCTIONS: dict[str, tuple[Function, Callable[[float, float, int], Tensor], float, float]] = {
    "division": (_divide, between, -1, 1),
    "sqrt": (torch.sqrt, across_exponents, -40, 40),
    "rsqrt": (torch.rsqrt, across_exponents, -40, 40),
    "exp": (torch.exp, between, -80, 80),
    "log": (torch.log, across_exponents, -60, 60),
    "tanh": (torch.tanh, between, -6, 6),
    "sigmoid": (torch.sigmoid, between, -20, 20),
    "silu": (F.silu, between, -20, 20),
    "erf": (torch.erf, between, -4, 4),
    "gelu": (F.gelu, between, -2, 8),
    "sin": (torch.sin, between, -2048, 2048),
    "cos": (torch.cos, between, -2048, 2048),
}
"""For each name: the function, the spacing of its float32 test values, and their interval."""


def measure_function(name: str, device: torch.device) -> str:
    """Return a function's largest error, its number of differing results outside vectors, and the hash of its bits.

    Example:
        >>> measure_function("division", torch.device("cpu"))
        'correctly rounded #57bf11a4'
    """
    function, spread, low, high = FUNCTIONS[name]
    values = spread(low, high, _NUM_VALUES)
    here = values.to(device)
    results = function(here)
    exact = function(values.double())
    is_correct = bool((results.cpu() == exact.float()).all())
    error = "correctly rounded" if is_correct else f"{max_error(results.cpu(), exact):.2f} ulp"
    alone = torch.stack([function(value) for value in here[:_NUM_ALONE, None].unbind()])[:, 0]
    num_different = int((alone != results[:_NUM_ALONE]).sum())
    return (
        error + (f", {num_different} of {_NUM_ALONE} differ alone" if num_different else "") + f" #{bits_of(results)}"
    )


def max_error(results: Tensor, exact: Tensor) -> float:
    """Return the largest distance of float32 results from the exact float64 results, in float32 ulps.

    Example:
        >>> max_error(torch.tensor([1.0]), torch.tensor([1 + 2.0**-24], dtype=torch.float64))
        0.5
    """
    _, exponents = torch.frexp(exact)
    spacing = torch.ldexp(torch.ones_like(exact), exponents.clamp(min=-125) - 24)
    return float(((results.double() - exact).abs() / spacing).max())


# ── sums ───────────────────────────────────────────────────────────────────────────────────────────────────────────────


def _attention(rows: Tensor) -> Tensor:
    heads = rows.view(1, 8, 1024, 64)
    return F.scaled_dot_product_attention(heads[:, :, :16], heads, heads.flip(2))


SUMS: dict[str, tuple[Function, int, int]] = {
    "sum of rows": (lambda rows: rows.sum(-1), 128, 128),
    "sum of columns": (lambda rows: rows.sum(0), 64, 128),
    "mean of rows": (lambda rows: rows.mean(-1), 16, 1024),
    "layer norm": (lambda rows: F.layer_norm(rows, [1024]), 16, 1024),
    "softmax": (lambda rows: rows.softmax(-1), 64, 512),
    "log softmax": (lambda rows: rows.log_softmax(-1), 16, 4096),
    "linear float32": (lambda rows: F.linear(rows, rows), 256, 1024),
    "small linear float32": (lambda rows: F.linear(rows, rows), 16, 64),
    "weight gradient float32": (lambda rows: rows.t() @ rows, 1024, 64),
    "batched matmul float32": (lambda rows: torch.bmm(rows.view(8, 32, 64), rows.view(8, 64, 32)), 256, 64),
    "linear bfloat16": (lambda rows: F.linear(rows.bfloat16(), rows.bfloat16()), 64, 1024),
    "attention": (_attention, 512, 1024),
    "sum of a tensor": (lambda rows: rows.sum(), 4, 65536),
}
"""Operations that add many terms, with the rows and the length of their operands."""


def measure_sum(name: str, device: torch.device) -> str:
    """Hash the bits of an operation of :data:`SUMS`. Another order of additions or another rounding gives other bits.

    Cost: some milliseconds on a CPU.
    """
    add, number, length = SUMS[name]
    values = between(-1.0, 1.0, number * length).view(number, length)
    rows = values * values * values  # too many bits for exact sums in any order
    return f"bits #{bits_of(add(rows.to(device)).flatten()[:4096])}"
