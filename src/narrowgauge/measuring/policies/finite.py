"""The operation that first made a value which is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable

from torch import Tensor, nn

from narrowgauge.measuring.beside import (
    ALLOCATES,
    ByStorage,
    Operation,
    floats_in,
    is_finite,
    is_float,
)
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_names import plain_name


class Finite:
    """Follow values that are not finite to the operation that made them.

    A cause is whether the code asks for infinity, as in a mask; the operation's number; and words.
    What is asked for is no cause until it reaches a gradient.

    Args:
        model: gives the names of the weights and buffers that hold such values.
    """

    def __init__(self, model: nn.Module) -> None:
        self._causes = ByStorage()
        self._count = 0
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            if is_float(x) and not is_finite(x):
                words = f"{plain_name(name)} is not finite before any operation"
                self._causes.set(x, (False, 0, words))

    def first(self, tensors: Iterable[Tensor]) -> str:
        """Return the earliest cause that reached one of some tensors; empty if none is known."""
        causes = filter(None, map(self._causes.get, tensors))
        return str(min(causes, default=("", "", ""))[2])

    def before(self, op: Operation) -> None:
        bad = [x for x in floats_in(op.read) if not is_finite(x)]
        first = min(filter(None, map(self._causes.get, bad)), default=None)
        op.notes[self] = bad, any(map(_has_nan, bad)), first

    def after(self, op: Operation) -> None:
        self._count += 1
        bad, had_nan, first = op.notes[self]
        if op.name in ALLOCATES or op.is_view:
            return
        for x in floats_in(op.written or op.result):
            if is_finite(x):
                self._causes.drop(x)
                continue
            cause = first
            is_new = not bad or (_has_nan(x) and not had_nan)
            if first is None or (is_new and first[0]):
                cause = self._made(op, x, is_new)
            self._causes.set(x, cause)

    def _made(self, op: Operation, x: Tensor, is_new: bool) -> tuple[bool, int, str]:
        if not is_new:
            return False, self._count, f"{op} reads a value that no operation made"
        is_nan = _has_nan(x)
        number = int(_wide(x).isnan().sum() if is_nan else _wide(x).isinf().sum())
        kind = "NaN" if is_nan else "infinity"
        words = f"{op} made {kind} in {number} of {x.numel()} values ({dtype_name(x.dtype)})"
        numbers = (*op.args, *op.kwargs.values())
        asks = any(isinstance(a, float) and math.isinf(a) for a in numbers)
        return asks and not is_nan, self._count, words


def _has_nan(x: Tensor) -> bool:
    return bool(_wide(x).isnan().any())


def _wide(x: Tensor) -> Tensor:
    """Return a tensor that can be asked for infinity."""
    return x if x.is_complex() else x.float()
