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
    storage_key,
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
        self._names: dict[int, str] = {}
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            self._names[storage_key(x)] = plain_name(name)
        self._causes = ByStorage()
        self._count = 0

    def first(self, tensors: Iterable[Tensor]) -> str:
        """Return the earliest cause that reached one of some tensors; empty if none is known."""
        causes = filter(None, map(self._causes.get, tensors))
        return str(min(causes, default=("", "", ""))[2])

    def before(self, op: Operation) -> None:
        bad = [x for x in floats_in(op.read) if not is_finite(x)]
        causes = filter(None, map(self._causes.get, bad))
        op.notes[self] = bad, any(map(_has_nan, bad)), min(causes, default=None)

    def after(self, op: Operation) -> None:
        self._count += 1
        bad, had_nan, first = op.notes[self]
        if op.name in ALLOCATES or op.is_view:
            return
        for x in floats_in(op.written or op.result):
            if is_finite(x):
                self._causes.drop(x)
                continue
            is_new = not bad or (_has_nan(x) and not had_nan)
            cause = first
            if is_new and (first is None or first[0]):
                cause = self._made(op, x)
            elif first is None:
                name = self._names.get(storage_key(bad[0]), "a tensor that the step was given")
                words = f"{name} is not finite before any operation; {op} reads it"
                cause = (False, self._count, words)
            self._causes.set(x, cause)

    def _made(self, op: Operation, x: Tensor) -> tuple[bool, int, str]:
        is_nan = _has_nan(x)
        number = int(_real(x).isinf().sum())
        kind = "infinity"
        if is_nan:
            number = int(_real(x).isnan().sum())
            kind = "NaN"
        words = f"{op} made {kind} in {number} of {x.numel()} values ({dtype_name(x.dtype)})"
        operands = [f"{dtype_name(y.dtype)} {list(y.shape)}" for y in floats_in(op.operands)[:3]]
        if operands:
            words += f" from {', '.join(operands)}"
        numbers = (*op.args, *op.kwargs.values())
        asks = any(isinstance(a, float) and math.isinf(a) for a in numbers)
        return asks and not is_nan, self._count, words


def _has_nan(x: Tensor) -> bool:
    return bool(_real(x).isnan().any())


def _real(x: Tensor) -> Tensor:
    """Return real numbers that are as finite."""
    return x.abs() if x.is_complex() else x.float()
