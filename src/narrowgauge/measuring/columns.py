"""Columns of a run's record as arrays, for the page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import number

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Series:
    """Store the points of one line, in the order of the record.

    NaN in ``y`` marks a non-finite value.
    """

    x: Array
    y: Array

    def __len__(self) -> int:
        return len(self.x)

    @property
    def finite(self) -> Array:
        """Return the finite values."""
        return self.y[np.isfinite(self.y)]


def column(run: Run, table: str, name: str) -> Series:
    """Return a column of ``steps`` or ``evals`` over the steps.

    Skip rows without the value.

    Example:
        >>> from pathlib import Path
        >>> rows = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": float("inf")}]
        >>> column(Run(Path("a"), {}, rows), "steps", "loss")
        Series(x=array([1., 3.]), y=array([ 2., nan]))
    """
    rows = [row for row in getattr(run, table) if row.get(name) is not None]
    steps = np.array([row["step"] for row in rows], float)
    values = np.array([number(row[name]) for row in rows], float)  # None becomes NaN
    return Series(steps, np.where(np.isfinite(values), values, np.nan))
