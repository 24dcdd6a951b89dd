"""The losses of a conversion, counted value by value."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.spec.storages import Code
from narrowgauge.spec.tables import Column, Table


@dataclass(frozen=True)
class ValueLoss:
    """The losses of one kind of value.

    Args:
        kind: ``weight``, ``exp_avg`` or ``exp_avg_sq``.
        num_exact: values that the target stores bit for bit.
        max_relative_error, rms_relative_error: over finite, nonzero values that are not saturated; 1 means all of
            the value is lost.
        num_zeroed: values that became zero.
        num_saturated: values out of range of the target code, or of the format that the model computes with.
    """

    kind: str
    num_values: int
    num_exact: int
    max_relative_error: float
    rms_relative_error: float
    num_zeroed: int
    num_saturated: int

    @property
    def exact_share(self) -> float:
        """Fraction of exact values, 0 to 1."""
        return self.num_exact / self.num_values if self.num_values else 1.0


@dataclass(frozen=True)
class Report:
    """The result of a conversion.

    Args:
        source, out: path that was read, folder that was written.
        origin: recipe of the source, or the library that wrote it.
        recipe: recipe of the result.
        step: optimizer steps taken.
        kept: losses of each kind of value.
        left_out: content of the source that is not in the result.
    """

    source: str
    out: str
    origin: str
    recipe: str
    step: int
    kept: tuple[ValueLoss, ...]
    left_out: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "left_out": list(self.left_out),
            "kept": [{**asdict(kept), "exact_share": kept.exact_share} for kept in self.kept],
        }

    def table(self) -> Table:
        columns = (
            Column("kind", "kind", code=True),
            Column("values", "num_values", right=True),
            # Rounded down: 100 % means all of them.
            Column("exact", lambda row: f"{math.floor(row['exact_share'] * 1e4) / 100:.2f} %", right=True),
            Column("largest relative error", lambda row: f"{row['max_relative_error']:.3g}", right=True),
            Column("rms", lambda row: f"{row['rms_relative_error']:.3g}", right=True),
            Column("became zero", "num_zeroed", right=True),
            Column("saturated", "num_saturated", right=True),
        )
        title = f"{self.out}: {self.origin} → {self.recipe}, step {self.step}"
        others = f"\nleft out: {'; '.join(self.left_out)}" if self.left_out else ""
        return Table(columns, self.row()["kept"], title + others)


Pair = tuple[Tensor, Tensor, Code, "Tensor | None"]


def compare(kind: str, pairs: Iterable[Pair]) -> ValueLoss:
    """Count the losses of one kind of value.

    Args:
        pairs: for each tensor its float32 values, the stored values, their code, and for weights the visible values.
    Example:
        >>> from narrowgauge.spec.storages import BFLOAT16
        >>> compare("weight", [(torch.tensor([1.0, 1.5, 3e-3]), torch.tensor([1.0, 1.0, 0.0]), BFLOAT16, None)]).num_exact
        1
    """
    total = torch.zeros(5, dtype=torch.float64)
    largest, num_values = 0.0, 0
    for values, kept, code, seen in pairs:
        same = (values.view(torch.int32) == kept.view(torch.int32)) | (values.isnan() & kept.isnan())
        beyond = (values.abs() > largest_of(code)) | kept.isinf()
        saturated = values.isfinite() & (beyond if seen is None else beyond | seen.isinf())
        measured = values.isfinite() & (values != 0) & ~(saturated & ~same)
        errors = ((kept.double() - values.double()) / values.double()).abs()[measured]
        zeroed = (values != 0) & (kept == 0)
        parts = (same.sum(), errors.square().sum(), measured.sum(), zeroed.sum(), saturated.sum())
        total += torch.stack([part.double() for part in parts])
        largest = max(largest, float(errors.max()) if errors.numel() else 0.0)
        num_values += values.numel()
    exact, squares, num_measured, num_zeroed, num_saturated = total.tolist()
    rms = math.sqrt(squares / num_measured) if num_measured else 0.0
    return ValueLoss(kind, num_values, int(exact), largest, rms, int(num_zeroed), int(num_saturated))


def largest_of(code: Code) -> float:
    """The largest magnitude that a code represents; infinite where it has a scale per row."""
    if code.scaled or not code.is_window:
        return math.inf
    return (2.0 - 2.0**-code.mantissa_bits) * 2.0**code.highest
