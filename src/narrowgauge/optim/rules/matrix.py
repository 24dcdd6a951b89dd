"""Matrix rules: update rules that read the whole matrix, as pure functions of float32 tensors.

Every rank gathers the matrix and computes the step (:mod:`narrowgauge.optim.step.step`). A
parameter of three dims is a stack of matrices, such as a mixture's experts. Each is stepped as if
it were a parameter of its own. A parameter of more dims, such as a convolution, is the matrix of
its first dim against all others. A parameter of fewer than two is stepped by AdamW.

| rule | states of a weight of ``rows × cols`` | reads |
|---|---|---|
| ``muon`` | one moment | the whole matrix: every singular value of the step becomes about 1 |
| ``galore`` | ``rank · (shorter + 2 · longer side)`` values | its leading singular vectors |
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.numerics.chunks import row_pieces
from narrowgauge.numerics.float32_matmul import add_product, matmul
from narrowgauge.optim.rules.elementwise import (
    ADAMW,
    TINY,
    Numbers,
    Options,
    Rule,
    Scalars,
    moving_average,
)
from narrowgauge.optim.rules.subspaces import is_tall, refreshed

MatrixStates = Mapping[str, Tensor]
Result = tuple[Tensor, dict[str, Tensor]]
NEGATIVE_DECAY = "negative_decay"


Shapes = dict[str, tuple[int, ...]]
"""Shapes of float32 states that are not shaped as the matrix. Every rank has the whole."""


@dataclass(frozen=True, slots=True)
class MatrixRule:
    """An update rule for whole matrices; all tensors are float32, all states begin as zeros.

    Args:
        states: ``((rows, cols), options) -> shapes of states``; ``None`` if all are packed.
        direction: ``(gradient [rows, cols], states, options, step) -> (step to take, new states)``; steps
            count from 1. The gradient may be overwritten, states may not.
        scalars, prepare: as in :class:`~narrowgauge.optim.rules.elementwise.Rule`, of ``average`` and of the decay.
        decay: as in :class:`~narrowgauge.optim.rules.elementwise.Rule`: ``lr · weight_decay · weight`` is subtracted from
            the step.
        packed_states: states with the weight's shape, packed and sharded with the weight in its code for first
            moments.
        average: ``(gradient, states, scalars) -> (gradient for direction, new states)``: an elementwise part that comes
            before ``direction`` and updates the packed states. Ranks run it on their shards.
    """

    name: str
    states: Callable[[tuple[int, int], Options], Shapes] | None
    direction: Callable[[Tensor, MatrixStates, Options, int], Result]
    scalars: tuple[str, ...]
    prepare: Callable[[Options, int], Numbers]
    decay: str = NEGATIVE_DECAY
    packed_states: tuple[str, ...] = ()
    average: Callable[[Tensor, MatrixStates, Scalars], Result] | None = None

    @property
    def stored_states(self) -> tuple[tuple[str, str], ...]:
        """Return the packed states, each with the code of a storage that it takes."""
        return tuple((name, "exp_avg") for name in self.packed_states)


AnyRule = Rule | MatrixRule


def matrix_shape(shape: Sequence[int]) -> tuple[int, ...]:
    """Return the shape in which a parameter is stepped: ``(number, rows, cols)`` for three dims,
    else ``(rows, cols)``.
    """
    if len(shape) == 3:
        return tuple(shape)
    return shape[0], math.prod(shape[1:])


def extras_of(rule: AnyRule, shape: Sequence[int], options: Options) -> Shapes:
    """Return the shapes of the states of a rule that are separate from the weight, one a matrix."""
    if not isinstance(rule, MatrixRule) or rule.states is None:
        return {}
    *number, rows, cols = matrix_shape(shape)
    return {name: (*number, *x) for name, x in rule.states((rows, cols), options).items()}


def _decay_scalars(options: Options, step: int) -> Numbers:
    return (-float(options["lr"]) * float(options["weight_decay"]),)


# ── Muon ──────────────────────────────────────────────────────────────────────────────────────────

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Coefficients of an odd quintic that lifts small singular values fast. It ends in a band around 1
(0.68 … 1.21), not at 1 itself.
"""


def orthogonalise(matrix: Tensor, iterations: int) -> Tensor:
    """Return a matrix with the same singular vectors, and all singular values moved towards 1.

    Overwrite the argument.

    A Newton–Schulz iteration ``X ← aX + (bA + cA²)X`` with ``A = XX^T``, begun at unit Frobenius
    norm. The norm is taken before anything is rounded, without the usual 1e-7 added: scaling by a
    power of two changes no bit. Zeros stay zeros. The products' operands are bfloat16, as published:
    off by 1.2 % (rms).

    Example:
        >>> x = orthogonalise(torch.diag(torch.tensor([3.0, -1e-9])), 5)
        >>> [round(value, 1) for value in x.flatten().tolist()]
        [0.7, 0.0, 0.0, -0.0]
    """
    # In float64 squares of float32 values neither overflow nor vanish.
    norms = torch._foreach_norm(list(row_pieces(matrix)), dtype=torch.float64)
    if len(norms) > 1:
        norms = torch._foreach_norm([torch.stack(norms)])
    x = matrix.div_(norms[0].float().clamp(min=TINY)).bfloat16()
    a, b, c = NS_COEFFICIENTS
    tall = x.shape[-2] > x.shape[-1]
    x = x.mT if tall else x
    for _ in range(iterations):
        gram = matmul(x, x.mT)
        gram = add_product(gram, gram, gram, b, c)
        x = add_product(x, gram, x, a)
    return (x.mT if tall else x).float()


def _muon_scalars(options: Options, step: int) -> Numbers:
    momentum = float(options["momentum"])
    others = momentum, 1 - momentum, float(options["nesterov"])
    return _decay_scalars(options, step) + others


def _momentum(g: Tensor, states: MatrixStates, scalars: Scalars) -> Result:
    m = moving_average(states["momentum_buffer"], g, scalars["one_minus_momentum"])
    gradient = torch.where(scalars["nesterov"] != 0, g + (m - g) * scalars["momentum"], m)
    return gradient, {"momentum_buffer": m}


def _muon(g: Tensor, states: MatrixStates, options: Options, step: int) -> Result:
    rows, cols = g.shape
    # Every step of the same spectral norm, wider ones not counted.
    scale = max(1.0, rows / cols) ** 0.5
    if options["adjust_lr_fn"] == "match_rms_adamw":
        # Entries of rms about 0.2, as AdamW's: learning rates and decays tuned for it carry over,
        # and one rate serves both.
        scale = 0.2 * max(rows, cols) ** 0.5
    size = float(options["lr"]) * scale
    return orthogonalise(g, options["ns_steps"]).mul_(-size), {}


# ── Low rank ──────────────────────────────────────────────────────────────────────────────────────


def _galore_states(shape: tuple[int, int], options: Options) -> Shapes:
    rows, cols = shape
    rank = min(options["rank"], rows, cols)
    coordinates = (rows, rank) if is_tall(rows, cols) else (rank, cols)
    return {
        "projector": (min(rows, cols), rank),
        "projected_exp_avg": coordinates,
        "projected_exp_avg_sq": coordinates,
    }


def _galore(g: Tensor, states: MatrixStates, options: Options, step: int) -> Result:
    """Return Adam's step for ``g`` in the subspace, lifted back, and the new states."""
    basis = refreshed(states["projector"], g, step, options["update_proj_gap"])
    values = torch.tensor(ADAMW.prepare(options, step), dtype=torch.float32, device=g.device)
    scalars = dict(zip(ADAMW.scalars, values.unbind(), strict=True))
    moments = states["projected_exp_avg"], states["projected_exp_avg_sq"]
    tall = is_tall(*g.shape)
    coordinates = g @ basis if tall else basis.mT @ g
    # AdamW's step of a weight of zero.
    change, m, v = ADAMW.update(g.new_zeros(()), coordinates, *moments, scalars)
    lifted = change @ basis.mT if tall else basis @ change
    new = {"projector": basis, "projected_exp_avg": m, "projected_exp_avg_sq": v}
    return lifted.mul_(options["scale"]), new


# ── The table ─────────────────────────────────────────────────────────────────────────────────────


# By functions with names, by which rules are pickled.
MUON = MatrixRule(
    name="muon",
    states=None,
    direction=_muon,
    scalars=(NEGATIVE_DECAY, "momentum", "one_minus_momentum", "nesterov"),
    prepare=_muon_scalars,
    packed_states=("momentum_buffer",),
    average=_momentum,
)
GALORE = MatrixRule("galore", _galore_states, _galore, (NEGATIVE_DECAY,), _decay_scalars)
