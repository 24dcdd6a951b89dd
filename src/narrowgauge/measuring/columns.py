"""Columns of a run's record as arrays, for the diagnosis, the comparison and the page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrowgauge.errors import RecordError
from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, finite_number

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
        return self.y[~np.isnan(self.y)]


def rows_of(run: Run, table: str) -> list[Row]:
    """Return the rows of a table, such as ``gauges``; none if its file cannot be read."""
    try:
        return getattr(run, table)  # type: ignore[no-any-return]
    except RecordError:
        return []


def column(run: Run, table: str, name: str) -> Series:
    """Return a column of ``steps`` or ``evals`` over the steps.

    Skip rows without the step or the value.

    Example:
        >>> from pathlib import Path
        >>> rows = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": float("inf")}]
        >>> column(Run(Path("a"), {}, rows), "steps", "loss")
        Series(x=array([1., 3.]), y=array([ 2., nan]))
    """
    rows = [row for row in getattr(run, table) if row.get(name) is not None]
    # None becomes NaN.
    steps = np.array([finite_number(row.get("step")) for row in rows], float)
    values = np.array([finite_number(row[name]) for row in rows], float)
    return Series(steps[~np.isnan(steps)], values[~np.isnan(steps)])
