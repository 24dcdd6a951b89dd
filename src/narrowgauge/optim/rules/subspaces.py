"""Low-rank subspaces of a matrix: an orthonormal basis of its leading directions, and coordinates
in it.

The basis ``P`` has ``rank`` directions of the shorter side. A gradient ``G`` has the coordinates
``P^T G`` ``[rank, cols]`` where ``rows < cols``, else ``G P`` ``[rows, rank]``. The basis consists
of singular vectors, computed as the eigenvectors of the Gram matrix in float64. The sign of each
vector is fixed: moments outlive a basis, and would push backwards along a vector whose sign
changed.
"""

import torch
from torch import Tensor

# Columns of the longer side that are widened to float64 at a time.
_WIDENED_COLUMNS = 4096


def is_tall(rows: int, cols: int) -> bool:
    """Return whether the columns' side is the shorter one."""
    return rows >= cols


def refreshed(basis: Tensor, gradient: Tensor, step: int, gap: int) -> Tensor:
    """Return the basis for this step: recomputed at steps 1, gap + 1, 2 gap + 1 …, and while it is
    zero.

    A gradient of zeros leaves the basis unchanged. Infinities and NaN count as zeros.
    """
    if (step - 1) % gap != 0 and bool(basis.any()):
        return basis
    finite = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    return torch.where(finite.any(), leading_basis(finite, basis.shape[1]), basis)


def leading_basis(matrix: Tensor, rank: int) -> Tensor:
    """Return the ``rank`` leading singular vectors of a finite matrix on its shorter side, float32
    ``[min(rows, cols), rank]``.

    Columns are orthonormal, the largest singular value first. The entry of largest magnitude in
    each is positive. Scaling the matrix by a power of two changes no bit. The eigenvectors take
    four float64 squares of the shorter side.
    """
    wide = matrix.mT if is_tall(*matrix.shape) else matrix
    # Squares of small gradients leave float32's range, never float64's.
    gram = torch.zeros(len(wide), len(wide), dtype=torch.float64, device=wide.device)
    for columns in wide.split(_WIDENED_COLUMNS, dim=1):
        columns = columns.double()
        gram += columns @ columns.mT
        del columns
    vectors = torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1)
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    return (vectors * largest.sign()).float()
