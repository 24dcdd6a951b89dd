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
            if is_finite(x):
                continue
            values = x if x.is_complex() else x.float()
            kind = ""
            if _has_nan(x) and not had_nan:
                kind, number = "NaN", values.isnan().sum()
            elif not had_infinity:
                kind, number = "infinity", values.isinf().sum()
            if kind:
                where = f"{int(number)} of {x.numel()} values ({dtype_name(x.dtype)})"
                self.made.setdefault(kind, f"{op} made {kind} in {where}")


def _has_nan(x: Tensor) -> bool:
    return bool((x if x.is_complex() else x.float()).isnan().any())
