"""GaLore from its published formulas, in numpy's float64.

Slow and plain on purpose: singular value decompositions instead of eigenvectors of a Gram matrix.
Every class keeps its own states; ``step`` takes the weight and its gradient and returns the new
weight.
"""

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


@dataclass
class Adam:
    """Kingma & Ba 2015: the step only."""

    lr: float
    betas: tuple[float, float]
    eps: float
    t: int = 0
    m: Matrix = field(default_factory=lambda: np.zeros(()))
    v: Matrix = field(default_factory=lambda: np.zeros(()))

    def step(self, g: Matrix) -> Matrix:
        self.t += 1
        (b1, b2) = self.betas
        self.m = b1 * self.m + (1 - b1) * g
        self.v = b2 * self.v + (1 - b2) * g**2
        return (
            -self.lr * (self.m / (1 - b1**self.t)) / (np.sqrt(self.v / (1 - b2**self.t)) + self.eps)
        )


@dataclass
class Subspace:
    """Zhao et al. 2024 (2403.03507): Adam on the leading singular vectors of the shorter side,
    found again every ``gap`` steps.
    """

    adam: Adam
    rank: int
    gap: int
    scale: float
    left: Matrix | None = None
    right: Matrix | None = None

    def step(self, g: Matrix) -> Matrix:
        if self.adam.t % self.gap == 0:
            u, _, vt = np.linalg.svd(g, full_matrices=False)
            columns_are_shorter = g.shape[0] >= g.shape[1]
            self.left = np.eye(g.shape[0]) if columns_are_shorter else _fixed(u[:, : self.rank])
            self.right = _fixed(vt[: self.rank].T) if columns_are_shorter else np.eye(g.shape[1])
        return self.scale * self.left @ self.adam.step(self.left.T @ g @ self.right) @ self.right.T


def _fixed(vectors: Matrix) -> Matrix:
    return vectors * np.sign(vectors[np.abs(vectors).argmax(0), np.arange(vectors.shape[1])])


@dataclass
class GaLore:
    """The subspace's step with decoupled decay."""

    subspace: Subspace
    weight_decay: float

    def step(self, w: Matrix, g: Matrix) -> Matrix:
        decay = self.subspace.adam.lr * self.weight_decay
        return w + self.subspace.step(g) - decay * w
