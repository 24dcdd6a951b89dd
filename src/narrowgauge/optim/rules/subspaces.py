"""Low-rank subspaces of a matrix: orthonormal bases of its leading directions, and coordinates in them.

With bases of ``rank`` directions, ``P`` on the shorter side and ``Q`` on the longer one, a gradient ``G`` has coordinates:

| ``proj_type`` | bases | coordinates where ``rows < cols`` | where ``rows ≥ cols`` |
|---|---|---|---|
| ``std`` | ``P`` | ``P^T G``  [rank, cols] | ``G P``  [rows, rank] |
| ``full`` | ``P`` and ``Q`` | ``P^T G Q``  [rank, rank] | ``Q^T G P``  [rank, rank] |

The names are those of GaLore's released code. A basis consists of singular vectors, computed as the eigenvectors of the
Gram matrix in float64. The sign of each vector is fixed: moments outlive a basis, and would push backwards along a vector
whose sign changed.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

# Columns of the longer side that are widened to float64 at a time.
_WIDENED_COLUMNS = 4096
Bases = Mapping[str, Tensor]
"""``projector`` on the shorter side, and with ``proj_type="full"`` also ``projector_longer``."""
PROJECTIONS = ("std", "full")
USUAL_PROJECTION = "std"
"""The projection of a group that names none. Groups leave it out, as states saved before there was a choice do."""


def is_tall(rows: int, cols: int) -> bool:
    """Return whether the columns' side is the shorter one."""
    return rows >= cols


def shapes_in_subspace(
    rows: int, cols: int, rank: int, proj_type: str
) -> tuple[dict[str, tuple[int, int]], tuple[int, int]]:
    """Return the shapes of the bases by name, and the shape of the coordinates."""
    shorter = {"projector": (min(rows, cols), rank)}
    if proj_type == "full":
        return {**shorter, "projector_longer": (max(rows, cols), rank)}, (rank, rank)
    return shorter, (rows, rank) if is_tall(rows, cols) else (rank, cols)


def refreshed(bases: Bases, gradient: Tensor, step: int, gap: int) -> Bases:
    """Return the bases for this step: recomputed at steps 1, gap + 1, 2 gap + 1 …, and while they are zero.

    A gradient of zeros leaves the bases unchanged, so a layer without gradients gets no arbitrary subspace. Infinities
    and NaN count as zeros.
    """
    if (step - 1) % gap != 0 and bool(bases["projector"].any()):
        return bases
    finite = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
    new, is_nonzero = leading_bases(finite, bases), finite.any()
    return {name: torch.where(is_nonzero, new[name], old) for name, old in bases.items()}


def leading_bases(matrix: Tensor, like: Bases) -> dict[str, Tensor]:
    """Compute the leading bases of a finite float32 matrix, of the names and rank of ``like``."""
    shorter = leading_basis(matrix, like["projector"].shape[1])
    if "projector_longer" not in like:
        return {"projector": shorter}
    return {"projector": shorter, "projector_longer": longer_basis(matrix, shorter)}


def leading_basis(matrix: Tensor, rank: int) -> Tensor:
    """Return the ``rank`` leading singular vectors of a finite matrix on its shorter side, float32 ``[min(rows, cols), rank]``.

    Columns are orthonormal, the largest singular value first. The entry of largest magnitude in each is positive.
    Scaling the matrix by a power of two changes no bit.

    Cost: ``rows · cols · min(rows, cols)`` multiply-adds in float64, and the eigenvectors of a square float64 matrix of
        the shorter side, which with LAPACK's buffers takes four such matrices; waits for the device.

    Example:
        >>> leading_basis(torch.tensor([[0.0, 0.0, 0.0], [-3.0, 0.0, -4.0]]), rank=1).tolist()
        [[0.0], [1.0]]
    """
    wide = matrix.mT if is_tall(*matrix.shape) else matrix
    # Squares of small gradients leave float32's range, never float64's.
    gram = torch.zeros(len(wide), len(wide), dtype=torch.float64, device=wide.device)
    for columns in wide.split(_WIDENED_COLUMNS, dim=1):
        columns = columns.double()
        gram += columns @ columns.mT
        del columns
    return _with_fixed_signs(torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1))


def longer_basis(matrix: Tensor, shorter: Tensor) -> Tensor:
    """Return the singular vectors on the longer side that belong to those on the ``shorter`` one.

    As :func:`leading_basis`, float32 ``[max(rows, cols), rank]``. Where the matrix has fewer than ``rank`` directions,
    the rest are any orthogonal ones.

    Cost: ``rows · cols · rank`` multiply-adds and a QR decomposition of ``[longer side, rank]``, in float64.
    """
    tall = matrix if is_tall(*matrix.shape) else matrix.mT
    return _with_fixed_signs(torch.linalg.qr(tall.double() @ shorter.double()).Q)


def _with_fixed_signs(vectors: Tensor) -> Tensor:
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    basis: Tensor = (vectors * largest.sign()).float()
    return basis


def project(bases: Bases, matrix: Tensor) -> Tensor:
    """Return the coordinates of a matrix."""
    basis, longer, tall = bases["projector"], bases.get("projector_longer"), is_tall(*matrix.shape)
    coordinates = matrix @ basis if tall else basis.mT @ matrix
    if longer is None:
        return coordinates
    return longer.mT @ coordinates if tall else coordinates @ longer


def lift(bases: Bases, coordinates: Tensor, tall: bool) -> Tensor:
    """Return the matrix, ``tall`` or not, that has these coordinates."""
    basis, longer = bases["projector"], bases.get("projector_longer")
    if longer is not None:
        coordinates = longer @ coordinates if tall else coordinates @ longer.mT
    return coordinates @ basis.mT if tall else basis @ coordinates
