"""Low-rank subspaces of a matrix: orthonormal bases of its leading directions, and coordinates in them.

A gradient of ``rows × cols`` often has most of its length in a few directions. With orthonormal bases of ``rank`` such
directions, ``P`` on its shorter side and ``Q`` on its longer one, it has coordinates:

| projection | bases | coordinates where ``rows < cols`` | where ``rows ≥ cols`` |
|---|---|---|---|
| ``std`` | ``P`` | ``P^T G``  [rank, cols] | ``G P``  [rows, rank] |
| ``full`` | ``P`` and ``Q`` | ``P^T G Q``  [rank, rank] | ``Q^T G P``  [rank, rank] |

The names are those of GaLore's released code (``proj_type``). Moments kept of coordinates cost ``2 · rank · longer side`` or
``2 · rank²`` values instead of ``2 · rows · cols``. What is found in the coordinates is *lifted* back by the same bases, which
are recomputed every so many steps, since gradients turn.

A basis is that of a singular value decomposition, taken as the eigenvectors of the small Gram matrix in float64. On
one CPU thread that is one to three times as fast as ``torch.linalg.svd`` in float32, and its subspace is right to
1e-13 instead of 5e-5. Each vector's sign, which the decomposition leaves open, is fixed: moments outlive a basis, and
would push backwards along a vector that came out reversed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

# Columns of the longer side that are widened to float64 at a time.
_WIDENED_COLUMNS = 4096
Bases = Mapping[str, Tensor]


def is_tall(rows: int, cols: int) -> bool:
    """Whether the columns' side is the shorter one: there are no more columns than rows."""
    return rows >= cols


@dataclass(frozen=True, slots=True)
class Projection:
    """How a matrix is reduced to coordinates.

    Args:
        bases: from ``(rows, cols, rank)`` to the shapes of the bases, by name.
        coordinates: likewise to the shape of the coordinates.
        find: ``(matrix, rank)`` to the leading bases of a finite float32 matrix.
        project: ``(bases, matrix)`` to the coordinates of the matrix.
        lift: ``(bases, coordinates, tall)`` to the matrix of the subspace that has these coordinates.
    """

    bases: Callable[[int, int, int], dict[str, tuple[int, int]]]
    coordinates: Callable[[int, int, int], tuple[int, int]]
    find: Callable[[Tensor, int], dict[str, Tensor]]
    project: Callable[[Bases, Tensor], Tensor]
    lift: Callable[[Bases, Tensor, bool], Tensor]

    def refreshed(self, bases: Bases, gradient: Tensor, step: int, gap: int) -> Bases:
        """The bases for this step: recomputed at steps 1, gap + 1, 2 gap + 1 …, and while there are none.

        Invariant: a gradient of zeros has no directions and leaves the bases as they are, the same tensors where none are
        due. Before the first other gradient they are zero, and so are all steps: an expert that no token has reached yet,
        or a layer behind a zero-initialised head, is not tied to a meaningless subspace for a whole gap. Infinities and
        NaN in a gradient are read as zeros, since no basis could be found.
        """
        if (step - 1) % gap != 0 and bool(bases["projector"].any()):
            return bases
        finite = gradient.nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        found, is_some = self.find(finite, bases["projector"].shape[1]), finite.any()
        return {name: torch.where(is_some, found[name], old) for name, old in bases.items()}


def leading_basis(matrix: Tensor, rank: int) -> Tensor:
    """The ``rank`` leading singular vectors of a finite matrix on its shorter side, float32 ``[min(rows, cols), rank]``.

    Invariant: orthonormal columns, the largest singular value first; in each the entry of the largest magnitude is positive,
    so a matrix and its negative have the same basis. Depends on directions only: powers of two change no bit.

    Cost: ``rows · cols · min(rows, cols)`` multiply-adds in float64 and the eigenvectors of a square matrix of the
        shorter side, which is also the transient memory, in float64, two or three times over; waits for the device.

    Example:
        >>> leading_basis(torch.tensor([[0.0, 0.0, 0.0], [-3.0, 0.0, -4.0]]), rank=1).tolist()
        [[0.0], [1.0]]
    """
    wide = matrix.mT if is_tall(*matrix.shape) else matrix
    # Squares of small gradients leave float32's range, never float64's.
    gram = torch.zeros(len(wide), len(wide), dtype=torch.float64, device=wide.device)
    for piece in wide.split(_WIDENED_COLUMNS, dim=1):
        gram += piece.double() @ piece.double().mT
    return _with_fixed_signs(torch.linalg.eigh(gram).eigenvectors[:, -rank:].flip(1))


def longer_basis(matrix: Tensor, shorter: Tensor) -> Tensor:
    """The singular vectors on the longer side of a finite matrix that belong to those on its shorter one.

    Invariant: as for :func:`leading_basis`, float32 ``[max(rows, cols), rank]``; where the matrix has fewer directions than
    ``rank``, any others at right angles to these.

    Cost: ``rows · cols · rank`` multiply-adds and a QR decomposition of ``[longer side, rank]``, in float64.
    """
    tall = matrix if is_tall(*matrix.shape) else matrix.mT
    return _with_fixed_signs(torch.linalg.qr(tall.double() @ shorter.double()).Q)


def _with_fixed_signs(vectors: Tensor) -> Tensor:
    largest = vectors.gather(0, vectors.abs().argmax(0, keepdim=True))
    basis: Tensor = (vectors * largest.sign()).float()
    return basis


def _shorter_shape(rows: int, cols: int, rank: int) -> dict[str, tuple[int, int]]:
    return {"projector": (min(rows, cols), rank)}


def _find_shorter(matrix: Tensor, rank: int) -> dict[str, Tensor]:
    return {"projector": leading_basis(matrix, rank)}


def _project_shorter(bases: Bases, matrix: Tensor) -> Tensor:
    basis = bases["projector"]
    return matrix @ basis if is_tall(*matrix.shape) else basis.mT @ matrix


def _lift_shorter(bases: Bases, coordinates: Tensor, tall: bool) -> Tensor:
    basis = bases["projector"]
    return coordinates @ basis.mT if tall else basis @ coordinates


def _both_shapes(rows: int, cols: int, rank: int) -> dict[str, tuple[int, int]]:
    return {**_shorter_shape(rows, cols, rank), "projector_longer": (max(rows, cols), rank)}


def _find_both(matrix: Tensor, rank: int) -> dict[str, Tensor]:
    shorter = leading_basis(matrix, rank)
    return {"projector": shorter, "projector_longer": longer_basis(matrix, shorter)}


def _project_both(bases: Bases, matrix: Tensor) -> Tensor:
    coordinates, longer = _project_shorter(bases, matrix), bases["projector_longer"]
    return longer.mT @ coordinates if is_tall(*matrix.shape) else coordinates @ longer


def _lift_both(bases: Bases, coordinates: Tensor, tall: bool) -> Tensor:
    longer = bases["projector_longer"]
    return _lift_shorter(bases, longer @ coordinates if tall else coordinates @ longer.mT, tall)


PROJECTIONS: dict[str, Projection] = {
    "std": Projection(
        _shorter_shape,
        lambda rows, cols, rank: (rows, rank) if is_tall(rows, cols) else (rank, cols),
        _find_shorter,
        _project_shorter,
        _lift_shorter,
    ),
    "full": Projection(_both_shapes, lambda rows, cols, rank: (rank, rank), _find_both, _project_both, _lift_both),
}
"""Projections by their names in GaLore's released code, ``proj_type``."""
USUAL_PROJECTION = "std"
"""The one of a group that names none. Groups leave it out, so that states saved before there was another have the same names."""


def projection_of(options: Mapping[str, Any]) -> Projection:
    """The projection that a group's options name."""
    return PROJECTIONS[options.get("proj_type", USUAL_PROJECTION)]
