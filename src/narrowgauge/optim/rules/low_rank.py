"""Low-rank subspaces of a matrix, and Adam's steps in them.

A gradient of ``rows × cols`` often has most of its length in a few directions of its shorter side. With an orthonormal basis
``P`` of ``rank`` such directions (shape ``[shorter side, rank]``) it has the coordinates

    ``P^T G``  [rank, cols]   where rows < cols,        ``G P``  [rows, rank]   where rows ≥ cols,

and moments kept of these cost ``2 · rank · longer side`` values instead of ``2 · rows · cols``. What is found in the
coordinates is *lifted* back by the same basis. The basis is recomputed every so many steps, since gradients turn.

The basis is that of a singular value decomposition, taken as the eigenvectors of the small Gram matrix in float64. On
one CPU thread that is one to three times as fast as ``torch.linalg.svd`` in float32, and its subspace is right to
1e-13 instead of 5e-5. Each vector's sign, which the decomposition leaves open, is fixed: moments outlive a basis, and
would push backwards along a vector that came out turned round.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.optim.rules.elementwise import ADAMW

# Columns of the longer side that are widened to float64 at a time.
_PIECE = 4096


def is_tall(rows: int, cols: int) -> bool:
    """Whether the basis spans directions of the columns' side: there are no more columns than rows."""
    return rows >= cols


def coordinate_shape(rows: int, cols: int, rank: int) -> tuple[int, int]:
    """The shape of a matrix's coordinates in its subspace."""
    return (rows, rank) if is_tall(rows, cols) else (rank, cols)


def project(basis: Tensor, matrix: Tensor) -> Tensor:
    """The coordinates of a matrix in the subspace."""
    return matrix @ basis if is_tall(*matrix.shape) else basis.mT @ matrix


def lift(basis: Tensor, coordinates: Tensor, *, tall: bool) -> Tensor:
    """The matrix of the subspace that has these coordinates."""
    return coordinates @ basis.mT if tall else basis @ coordinates


def leading_basis(matrix: Tensor, rank: int) -> Tensor:
    """The ``rank`` leading singular vectors of a matrix on its shorter side.

    Invariant: orthonormal columns, the largest singular value first; in each the entry of the largest magnitude is positive,
    so a matrix and its negative have the same basis. Depends on directions only: powers of two change no bit.

    Args:
        matrix: float32 ``[rows, cols]``, finite, not empty.
        rank: at most the shorter side.
    Returns:
        float32 ``[min(rows, cols), rank]``.

    Cost: ``rows · cols · min(rows, cols)`` multiply-adds in float64 and the eigenvectors of a square matrix of the
        shorter side, which is also the transient memory, in float64, two or three times over; waits for the device.

    Example:
        >>> leading_basis(torch.tensor([[0.0, 0.0, 0.0], [-3.0, 0.0, -4.0]]), rank=1).tolist()
        [[0.0], [1.0]]
    """
    wide = matrix.mT if is_tall(*matrix.shape) else matrix
    # Squares of small gradients leave float32's range, never float64's.
    gram = torch.zeros(len(wide), len(wide), dtype=torch.float64, device=wide.device)
    for piece in wide.split(_PIECE, dim=1):
        gram += piece.double() @ piece.double().mT
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    basis: Tensor = (vectors * largest.sign()).float()
    return basis


def refreshed(basis: Tensor, gradient: Tensor, step: int, gap: int) -> Tensor:
    """The basis for this step: recomputed at steps 1, gap + 1, 2 gap + 1 …, and while there is none.

    Invariant: a gradient of zeros has no directions and leaves the basis as it is. Before the first other gradient the basis is
    zero, and so are all steps: an expert that no token has reached yet, or a layer behind a zero-initialised head, is not
    tied to a meaningless subspace for a whole gap.

    Args:
        basis: float32 ``[shorter side, rank]``, zeros where there is none yet.
        gradient: float32 ``[rows, cols]``; infinities and NaN are read as zeros, since no basis could be found.
        step: number of the step, from 1.
        gap: steps between two bases.
    """
    if (step - 1) % gap != 0 and bool(basis.any()):
        return basis
    finite = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return torch.where(finite.any(), leading_basis(finite, basis.shape[1]), basis)


def adam_step(
    gradient: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, options: Mapping[str, Any], step: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Adam on coordinates: the step to take, and the new moments.

    Invariant: the arithmetic of ``ADAMW`` on a weight of zero, which has nothing to decay: decay belongs to the matrix.
    """
    values = torch.tensor(ADAMW.prepare(options, step), dtype=torch.float32, device=gradient.device)
    scalars = dict(zip(ADAMW.scalars, values.unbind(), strict=True))
    change, exp_avg, exp_avg_sq = ADAMW.update(gradient.new_zeros(()), gradient, exp_avg, exp_avg_sq, scalars)
    return change, exp_avg, exp_avg_sq
