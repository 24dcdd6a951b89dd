"""The operation that first made a value which is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from torch import Tensor, nn

from narrowgauge.measuring.beside import (
    ALLOCATES,
    ByStorage,
    Operation,
    floats_in,
    is_finite,
    storage_key,
    tensors_in,
)
from narrowgauge.spec.formats import dtype_name
from narrowgauge.torch_support.torch_names import plain_name


class Cause(NamedTuple):
    """What made a value that is not finite, by its place in the step."""

    order: int
    words: str
    is_deliberate: bool = False


class Finite:
    """Follow values that are not finite to the operation that made them.

    Infinities that the code asks for, as in a mask, are no cause until they reach a gradient.

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
        known = self._known(tensors)
        if not known:
            return ""
        return min(known, key=lambda cause: (cause.is_deliberate, cause.order)).words

    def _known(self, tensors: Iterable[Tensor]) -> list[Cause]:
        causes = []
        for x in tensors:
            cause = self._causes.get(x)
            if cause is not None:
                causes.append(cause)
        return causes

    def before(self, op: Operation) -> None:
        bad = [x for x in floats_in(op.read) if not is_finite(x)]
        op.notes[self] = bad, any(map(_has_nan, bad)), self._known(bad)

    def after(self, op: Operation) -> None:
        self._count += 1
        bad, had_nan, causes = op.notes[self]
        if op.name in ALLOCATES or op.is_view:
            return
        for x in floats_in(op.written or tensors_in(op.result)):
            if is_finite(x):
                self._causes.drop(x)
                continue
            made_nan = _has_nan(x)
            first = min(causes, key=lambda cause: (cause.is_deliberate, cause.order), default=None)
            is_inherited = bool(bad) and (had_nan or not made_nan)
            if first is None and is_inherited:
                first = self._given(op, bad[0])
            elif first is None or (first.is_deliberate and not is_inherited):
                first = self._made(op, x, made_nan)
            self._causes.set(x, first)

    def _given(self, op: Operation, x: Tensor) -> Cause:
        name = self._names.get(storage_key(x), "a tensor that the step was given")
        return Cause(self._count, f"{name} is not finite before any operation; {op} reads it")

    def _made(self, op: Operation, x: Tensor, is_nan: bool) -> Cause:
        values = x.abs() if x.is_complex() else x.float()
        bad = values.isnan() if is_nan else values.isinf()
        kind = "NaN" if is_nan else "infinity"
        number = int(bad.sum())
        words = f"{op} made {kind} in {number} of {x.numel()} values ({dtype_name(x.dtype)})"
        operands = []
        for y in floats_in(op.operands)[:3]:
            operands.append(f"{dtype_name(y.dtype)} {list(y.shape)}")
        if operands:
            words += f" from {', '.join(operands)}"
        asks = any(isinstance(a, float) and math.isinf(a) for a in op.leaves)
        return Cause(self._count, words, asks and not is_nan)


def _has_nan(x: Tensor) -> bool:
    values = x.abs() if x.is_complex() else x.float()
    return bool(values.isnan().any())
