"""The operations that first made infinity and NaN."""

from __future__ import annotations

import math

from torch import Tensor

from narrowgauge.measuring.beside import ALLOCATES, Operation, floats_in, is_finite
from narrowgauge.spec.formats import dtype_name


class Finite:
    """Name the first operation that made infinity of finite numbers, and the first that made NaN.

    Attributes:
        made: words about each, in their order. What code asks for, as in a mask, is not made.
    """

    def __init__(self) -> None:
        self.made: dict[str, str] = {}

    def before(self, op: Operation) -> None:
        bad = [x for x in floats_in(op.read) if not is_finite(x)]
        op.notes[self] = bool(bad), any(map(_has_nan, bad))

    def after(self, op: Operation) -> None:
        had_infinity, had_nan = op.notes[self]
        numbers = [x for x in (*op.args, *op.kwargs.values()) if isinstance(x, float)]
        if op.name in ALLOCATES or op.is_view or any(map(math.isinf, numbers)):
            return
        for x in floats_in(op.written or op.result):
            if _has_nan(x) and not had_nan:
                self._note("NaN", op, x, _wide(x).isnan())
            elif not had_infinity and not is_finite(x):
                self._note("infinity", op, x, _wide(x).isinf())

    def _note(self, kind: str, op: Operation, x: Tensor, are_bad: Tensor) -> None:
        where = f"{int(are_bad.sum())} of {x.numel()} values ({dtype_name(x.dtype)})"
        self.made.setdefault(kind, f"{op} made {kind} in {where}")


def _has_nan(x: Tensor) -> bool:
    return bool(_wide(x).isnan().any())


def _wide(x: Tensor) -> Tensor:
    """Return values that can be asked whether they are finite."""
    if x.is_complex():
        return x
    return x.float()
