"""The operations that first made infinity and NaN, and what operations read."""

import math

import torch

from narrowgauge.measuring.check.dispatch import (
    ALLOCATES,
    Operation,
    at_least_16_bits,
    floats_in,
    is_finite,
    storage_key,
)
from narrowgauge.spec.formats import dtype_name


class FirstNonfinite:
    """Name the first operation that made infinity of finite numbers, and the first that made NaN.

    Attributes:
        made: words about each, in their order. What code asks for, as in a mask, is not made.
        read: the memory that operations read.
    """

    def __init__(self) -> None:
        self.made: dict[str, str] = {}
        self.read: set[int] = set()

    def before(self, op: Operation) -> set[str]:
        """Return which of both the operands explain. NaN makes infinity, as in a clamp."""
        self.read.update(map(storage_key, op.read))
        kinds: set[str] = set()
        for x in floats_in(op.read):
            kinds |= _counts(x).keys()
        if kinds:
            kinds.add("infinity")
        return kinds

    def after(self, op: Operation, before: set[str]) -> None:
        is_meant = any(isinstance(x, float) and math.isinf(x) for x in op.arguments.values())
        if op.name in ALLOCATES or op.is_view or is_meant:
            return
        for x in floats_in(op.written or op.result):
            for kind, count in _counts(x).items():
                if kind not in before:
                    where = f"{count} of {x.numel()} values ({dtype_name(x.dtype)})"
                    self.made.setdefault(kind, f"{op.name} in {op.site} made {kind} in {where}")


def _counts(x: torch.Tensor) -> dict[str, int]:
    """Return how many values are NaN and how many infinite, if any."""
    if is_finite(x):
        return {}
    values = at_least_16_bits(x)
    counts = {"NaN": int(values.isnan().sum()), "infinity": int(values.isinf().sum())}
    return {kind: count for kind, count in counts.items() if count}
