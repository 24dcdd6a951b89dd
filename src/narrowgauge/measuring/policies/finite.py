"""The operation that first made a value which is not finite."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any, NamedTuple

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
        causes = [self._causes.get(x) for x in tensors]
        known = [cause for cause in causes if cause is not None]
        for is_deliberate in (False, True):
            chosen = [cause for cause in known if cause.is_deliberate is is_deliberate]
            if chosen:
                words: str = min(chosen).words
                return words
        return ""

    def before(self, op: Operation) -> None:
        bad = [x for x in floats_in(op.read) if not is_finite(x)]
        has_nan = any(bool(x.isnan().any()) for x in bad if x.element_size() > 1)
        op.notes[self] = bad, has_nan, [self._causes.get(x) for x in bad]

    def after(self, op: Operation) -> None:
        self._count += 1
        bad, had_nan, causes = op.notes[self]
        if op.name in ALLOCATES or op.is_view:
            return
        for x in floats_in(op.written or tensors_in(op.result)):
            if is_finite(x):
                self._causes.drop(x)
                continue
            made_nan = bool(x.float().isnan().any()) if x.element_size() > 1 else True
            known = [cause for cause in causes if cause is not None and not cause.is_deliberate]
            if known:
                self._causes.set(x, min(known))
            elif bad and (had_nan or not made_nan):
                self._causes.set(x, self._inherited(op, bad, causes))
            else:
                self._causes.set(x, self._made(op, x, made_nan))

    def _inherited(self, op: Operation, bad: list[Tensor], causes: list[Any]) -> Cause:
        known: list[Cause] = [cause for cause in causes if cause is not None]
        if known:
            return min(known)
        name = self._names.get(storage_key(bad[0]), "a tensor that the step was given")
        words = f"{name} is not finite before any operation; {op} reads it"
        return Cause(self._count, words)

    def _made(self, op: Operation, x: Tensor, is_nan: bool) -> Cause:
        values = x.float() if not x.is_complex() else x.abs()
        number = int((values.isnan() if is_nan else values.isinf()).sum())
        kind = "NaN" if is_nan else "infinity"
        words = f"{op} made {kind} in {number} of {x.numel()} values ({dtype_name(x.dtype)})"
        operands = []
        for y in floats_in(op.operands)[:3]:
            operands.append(f"{dtype_name(y.dtype)} {list(y.shape)}")
        if operands:
            words += f" from {', '.join(operands)}"
        asks = any(isinstance(a, float) and math.isinf(a) for a in op.leaves)
        return Cause(self._count, words, asks and not is_nan)
