"""Least squares: the errors of measured times, and a few linear equations, solved without numpy.

Loading numpy takes as long as answering the question.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

NOISE = 0.02
"""Relative error of a measured time, where the times themselves do not show a larger one."""
SIGMAS = 1.2816
"""Standard deviations from the middle of an 80 % interval to its ends."""
_SINGULAR = 1e-12


def solve(matrix: Sequence[Sequence[float]], sides: Sequence[Sequence[float]]) -> list[list[float]] | None:
    """Solve symmetric positive equations by Gauss–Jordan elimination with row pivots; None where the matrix is singular.

    Unknowns may differ by orders of magnitude, so rows and columns are first scaled to a diagonal of ones. The matrix is
    ``[n][n]``; ``sides`` and the unknowns are ``[n][m]``, a column per right-hand side.

    Example:
        >>> solve([[2.0, 0.0], [0.0, 4.0]], [[2.0], [2.0]])
        [[1.0], [0.5]]
    """
    if min((matrix[k][k] for k in range(len(matrix))), default=0.0) <= 0:
        return None
    scale = [math.sqrt(matrix[k][k]) for k in range(len(matrix))]
    rows = [
        [x / (scale[i] * scale[j]) for j, x in enumerate(row)] + [s / scale[i] for s in side]
        for i, (row, side) in enumerate(zip(matrix, sides, strict=True))
    ]
    for k in range(len(rows)):
        best = max(range(k, len(rows)), key=lambda i: abs(rows[i][k]))
        if abs(rows[best][k]) < _SINGULAR:
            return None
        rows[k], rows[best] = rows[best], rows[k]
        rows[k] = [x / rows[k][k] for x in rows[k]]
        for i, row in enumerate(rows):
            if i != k and row[k]:
                rows[i] = [x - row[k] * y for x, y in zip(row, rows[k], strict=True)]
    return [[x / scale[i] for x in row[len(rows) :]] for i, row in enumerate(rows)]
