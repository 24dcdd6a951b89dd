"""Columns of a run's record as arrays: read once, then shared by the diagnosis, the comparison and the page."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from narrowgauge.runs.record import Run
from narrowgauge.runs.schema import Row, finite_number

Array = npt.NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Series:
    """Store the points of one line, in the order of the record. NaN in ``y`` marks a non-finite value."""

    x: Array
    y: Array

    def __len__(self) -> int:
        return len(self.x)

    @property
    def gaps(self) -> list[float]:
        """Return the ``x`` of all non-finite values."""
        return self.x[np.isnan(self.y)].tolist()  # type: ignore[no-any-return]

    @property
    def finite(self) -> Array:
        """Return the finite values."""
        return self.y[~np.isnan(self.y)]


def column(run: Run, table: str, name: str) -> Series:
    """Return a column of ``steps`` or ``evals`` over the steps. Skip rows without the step or the value.

    Example:
        >>> from pathlib import Path
        >>> rows = [{"step": 1, "loss": 2.0}, {"step": 2}, {"step": 3, "loss": float("inf")}]
        >>> column(Run(Path("a"), {}, rows), "steps", "loss")
        Series(x=array([1., 3.]), y=array([ 2., nan]))
    """
    steps, _ = _read(run, table, "step")
    numbers, is_known = _read(run, table, name)
    is_known = is_known & ~np.isnan(steps)
    return Series(steps, numbers) if is_known.all() else Series(steps[is_known], numbers[is_known])


def _read(run: Run, table: str, name: str) -> tuple[Array, npt.NDArray[np.bool_]]:
    """Return a column, and a mask of the rows with an entry. Cache both on the run: many readers use them."""
    cache = vars(run).setdefault("columns", {})
    if (table, name) not in cache:
        rows: list[Row] = getattr(run, table)
        places = [place for place, row in enumerate(rows) if row.get(name) is not None]
        numbers, is_known = np.full(len(rows), np.nan), np.zeros(len(rows), bool)
        is_known[places] = True
        numbers[places] = np.array([finite_number(rows[place][name]) for place in places], float)
        cache[table, name] = numbers, is_known
    return cache[table, name]  # type: ignore[no-any-return]
