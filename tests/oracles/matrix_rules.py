"""Matrix update rules from their published formulas, in numpy's float64, and one released defect.

Slow and plain on purpose: singular value decompositions instead of eigenvectors of a Gram matrix,
whole weights rebuilt and subtracted instead of changes, nothing shared between rules. Every class
keeps its own states; ``step`` takes the weight and its gradient and returns the new weight.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]


def newton_schulz(x: Matrix, iterations: int = 5) -> Matrix:
    """The quintic of Muon on every singular value, by way of the decomposition itself."""
    u, s, vt = np.linalg.svd(x, full_matrices=False)
    s = s / np.sqrt((s**2).sum())
    for _ in range(iterations):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    return (u * s) @ vt


@dataclass
class Muon:
    """Jordan et al. 2024, with Nesterov's momentum and the scale of Liu et al. 2025 (2502.16982)."""

    lr: float
    weight_decay: float
    momentum: float = 0.95
    m: Matrix = field(default_factory=lambda: np.zeros(()))

    def step(self, w: Matrix, g: Matrix) -> Matrix:
        self.m = self.momentum * self.m + (1 - self.momentum) * g
        u = self.momentum * self.m + (1 - self.momentum) * g
        return w * (1 - self.lr * self.weight_decay) - self.lr * 0.2 * np.sqrt(
            max(w.shape)
        ) * newton_schulz(u)


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
