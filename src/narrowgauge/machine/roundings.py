"""Where a machine rounds, and what it drops: subnormals, fused multiply-adds, the operands and accumulators of matmuls."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

# A product of 1 + 2^-12 with itself is 1 + 2^-11 + 2^-24, a tie: rounded to float32 it loses its last term, fused it does not.
_FACTOR = 1 + 2.0**-12
_ROUNDED_PRODUCT = 1 + 2.0**-11
_ONES = 4096


def measure_subnormals(device: torch.device) -> str:
    """Of one product, and of as many as all threads share: the mode belongs to a thread."""
    one = float(torch.full((1,), 2.0**-100, dtype=torch.float32, device=device) * 2.0**-40) != 0
    number = 1 << 17
    kept = int(torch.count_nonzero(torch.full((number,), 2.0**-100, dtype=torch.float32, device=device) * 2.0**-40))
    taken = int(torch.count_nonzero(torch.full((number,), 2.0**-140, dtype=torch.float32, device=device) * 2.0**100))
    texts = {number: "kept", 0: "flushed"}
    return (
        f"results {texts.get(kept, 'flushed by some threads')}, operands {texts.get(taken, 'flushed by some threads')}"
        + ("" if one == (kept == number) else ", a single one " + ("kept" if one else "flushed"))
    )


def measure_subnormals_in_matmuls(device: torch.device) -> str:
    """Of float32 matmuls, on both sides."""

    def full(value: float) -> Tensor:
        return torch.full((64, 64), value, dtype=torch.float32, device=device)

    def nonzero(left: float, right: float) -> str:
        product = full(left) @ full(right)
        return "kept" if bool((product != 0).all()) else "flushed"

    return f"results {nonzero(2.0**-100, 2.0**-40)}, operands {nonzero(2.0**-140, 2.0**100)}"


def measure_matmul_inputs(device: torch.device) -> str:
    """The significant bits that survive of float32 operands: 24, 11 for TF32, 8 for bfloat16."""
    widths = range(1, 25)
    values = torch.tensor([1 + 2.0 ** (1 - bits) for bits in widths], dtype=torch.float32, device=device)
    left = torch.zeros(256, 256, dtype=torch.float32, device=device)
    left[: len(widths), 0] = values
    product = left @ torch.ones(256, 256, dtype=torch.float32, device=device)
    survived = (product[: len(widths)] == values[:, None]).all(1).tolist()
    bits = max((bits for bits, is_kept in zip(widths, survived, strict=True) if is_kept), default=0)
    names = {24: "float32", 16: "two bfloat16", 11: "TF32", 8: "bfloat16"}
    return f"{bits} bits" + (f" ({names[bits]})" if bits in names else "")


def measure_accumulators(device: torch.device) -> str:
    """How far sums of ones count: a bfloat16 accumulator stops at 256, a float16 one at 2,048."""

    def matmul(dtype: torch.dtype) -> float:
        ones = torch.ones(32, _ONES, dtype=dtype, device=device)
        return float(F.linear(ones, ones)[0, 0])

    total = float(torch.ones(_ONES, dtype=torch.bfloat16, device=device).sum())
    counted = {
        "bfloat16 matmul": matmul(torch.bfloat16),
        "float32 matmul": matmul(torch.float32),
        "bfloat16 sum": total,
    }
    return ", ".join(f"{name} {number:.0f}" for name, number in counted.items())


def measure_fused_multiply_add(device: torch.device) -> str:
    """Which operations keep the exact product until it is added."""

    def full(value: float) -> Tensor:
        return torch.full((67,), value, dtype=torch.float32, device=device)

    factor, rounded = full(_FACTOR), full(-_ROUNDED_PRODUCT)
    # For addcdiv the quotient 1 / 3 is inexact; for lerp, weight * (end - start).
    third = torch.reciprocal(full(3.0))
    quotient = torch.addcdiv(-third, full(1.0), full(3.0))
    results = {
        "matmul": _product_sum(device),
        "addcmul": torch.addcmul(rounded, factor, factor),
        "addcdiv": quotient,
        "lerp": torch.lerp(rounded, rounded + factor, factor),
        "x * y + z": factor * factor + rounded,
    }
    return ", ".join(f"{name} {_fused_word(result)}" for name, result in results.items())


def _fused_word(result: Tensor) -> str:
    """Whether the low half of a product survived: in all elements, in none, or in those of a vector alone."""
    share = float((result != 0).double().mean())
    return "fused" if share == 1 else "rounded" if share == 0 else "fused in part"


def _product_sum(device: torch.device) -> Tensor:
    """The square of the factor minus its rounded value, in either order of the two terms."""
    left = torch.zeros(16, 64, dtype=torch.float32, device=device)
    right = torch.zeros(64, 16, dtype=torch.float32, device=device)
    left[:, 0], right[0] = -_ROUNDED_PRODUCT, 1.0
    left[:, 1], right[1] = _FACTOR, _FACTOR
    swapped = left.flip(1) @ right.flip(0)
    product = left @ right
    return torch.where(product != 0, product, swapped)


def measure_rounding_to_16_bits(device: torch.device) -> str:
    """Of ties between two neighbours above 1, of a tail element and of subnormals."""
    texts = []
    for name, dtype, bits, tiny in (
        ("bfloat16", torch.bfloat16, 8, 2.0**-130),
        ("float16", torch.float16, 11, 2.0**-20),
    ):
        spacing = 2.0 ** (1 - bits)
        ties = torch.tensor([1 + share * spacing for share in (0.5, 1.5, 0.75)], dtype=torch.float32, device=device)
        down, up, above = ties.repeat(23).to(dtype).float().cpu().view(23, 3).unbind(1)
        word = _tie_word(down, up, above, spacing)
        small = torch.full((67,), tiny, dtype=torch.float32, device=device).to(dtype)
        texts.append(f"{name} {word}, subnormals {'kept' if bool((small != 0).all()) else 'flushed'}")
    return "; ".join(texts)


def _tie_word(down: Tensor, up: Tensor, above: Tensor, spacing: float) -> str:
    """How ties were rounded: to even neighbours, away from zero, towards zero, or otherwise."""

    def all_equal(values: Tensor, steps: int) -> bool:
        return bool((values == 1 + steps * spacing).all())

    rules = {"ties to even": (0, 2, 1), "ties away": (1, 2, 1), "truncated": (0, 1, 0)}
    found = [word for word, steps in rules.items() if all(map(all_equal, (down, up, above), steps))]
    return found[0] if found else "rounded otherwise"


ROUNDINGS: dict[str, Callable[[torch.device], str]] = {
    "subnormals": measure_subnormals,
    "subnormals in matmuls": measure_subnormals_in_matmuls,
    "matmul inputs": measure_matmul_inputs,
    "matmul accumulator": measure_accumulators,
    "fused multiply-add": measure_fused_multiply_add,
    "rounding to 16 bits": measure_rounding_to_16_bits,
}
"""By name: what measures it on a device."""
