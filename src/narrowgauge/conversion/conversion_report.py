"""What a conversion cost, counted value by value: nothing is lost that is not said."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.spec.codes import Code
from narrowgauge.spec.tables import Column, Table


@dataclass(frozen=True)
class Kept:
    """What one kind of value lost.

    Args:
        kind: ``weight``, ``exp_avg`` or ``exp_avg_sq``.
        num_values: how many there are.
        num_exact: those that the target holds bit for bit.
        max_relative_error, rms_relative_error: of finite values other than zero that are not saturated; 1 is all of it.
        num_zeroed: how many became zero.
        num_saturated: how many lie beyond what the target, or the format that the model sees, reaches.
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
        """Share of the values that are exact, 0 to 1."""
        return self.num_exact / self.num_values if self.num_values else 1.0


@dataclass(frozen=True)
class Report:
    """What a conversion did.

    Args:
        source, out: what was read, and the folder that was written.
        origin: the recipe that the source was in, or the library it comes from.
        recipe: the recipe that the result is in.
        step: optimizer steps done.
        kept: what each kind of value lost.
        left_out: what there was in the source beside weights and states, and is not in the result.
    """

    source: str
    out: str
    origin: str
    recipe: str
    step: int
    kept: tuple[Kept, ...]
    left_out: tuple[str, ...] = ()

    def row(self) -> dict[str, Any]:
        """The report as JSON can say it."""
        return {
            **asdict(self),
            "left_out": list(self.left_out),
            "kept": [{**asdict(kept), "exact_share": kept.exact_share} for kept in self.kept],
        }

    def table(self) -> Table:
        """The report as people read it."""
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


def compare(kind: str, pairs: Iterable[Pair]) -> Kept:
    """Count what one kind of value lost.

    Args:
        kind: what to call it.
        pairs: for each tensor the float32 values, those kept, the code that keeps them, and for weights what the model sees.
    Returns:
        The counts over all tensors.
    Example:
        >>> from narrowgauge.spec.codes import BFLOAT16
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
    return Kept(kind, num_values, int(exact), largest, rms, int(num_zeroed), int(num_saturated))


def largest_of(code: Code) -> float:
    """The largest magnitude that a code reaches by itself; one with a scale per row reaches any, and is said to."""
    if code.scaled or not code.is_window:
        return math.inf
    return (2.0 - 2.0**-code.mantissa_bits) * 2.0**code.highest
