"""Matrix rules: what step an optimizer wants to take, where it depends on the whole matrix.

An elementwise rule may cut a weight anywhere. The rules here look at the whole matrix, its singular vectors or the
lengths of its rows and columns, so they need it gathered, and bits that do not depend on where it was cut are not
promised. They are pure functions of float32 tensors all the same, and know nothing of formats: a storage keeps the weight and the
matrices among their states in its own codes. A parameter of more than two dims is the matrix of its
first dim against all others; one of fewer is none, and is stepped by AdamW.

| rule | states of a weight of ``rows × cols`` | reads |
|---|---|---|
| ``muon`` | one moment | the whole matrix: every singular value of the step becomes about 1 |
| ``adafactor`` | ``rows + cols`` values; a moment if requested | means of squares along rows and columns |
| ``galore`` | ``rank · (shorter + 2 · longer side)`` values | its leading singular vectors |
| ``gradnorm_lorp`` | the same and ``2 · cols`` values | the same, and the lengths of its columns |

The last two step in a low-rank subspace (:mod:`narrowgauge.optim.rules.subspaces`); their states are counted here for a
basis on the shorter side alone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from narrowgauge.numerics.rounding import sqrt
from narrowgauge.numerics.widening import add_product, matmul
from narrowgauge.optim.rules.elementwise import ADAMW, TINY, Rule
from narrowgauge.optim.rules.subspaces import is_tall, projection_of
from narrowgauge.spec.rows import loads_older
from narrowgauge.spec.storages import FLOAT32, Storage, bytes_alone

Options = Mapping[str, Any]
States = Mapping[str, Tensor]
Update = Callable[[Tensor, Tensor, States, Options, int], tuple[Tensor, dict[str, Tensor]]]


@dataclass(frozen=True, slots=True)
class MatrixState:
    """One state tensor of a matrix rule.

    Args:
        role: ``"exp_avg"`` (for values of either sign) or ``"exp_avg_sq"`` (for values that are never negative): kept in the
            storage's code for that moment. ``None``: kept as the float32 it is.
        beside: whether each value belongs to the weight of the same place, whose shape the state has: packed and sharded
            with it. Any other state is a tensor of its own, which every rank has whole.
    """

    shape: tuple[int, ...]
    role: str | None = None
    beside: bool = False


@loads_older(lambda: MATRIX_RULES)
@dataclass(frozen=True, slots=True)
class MatrixRule:
    """An update rule for whole matrices.

    Args:
        states: from the parameter's shape and its group's options to the states it keeps, by name; all begin as zeros.
        update: ``(weight, gradient, states, options, step) -> (change, new states)``: float32 tensors of the parameter's
            shape (two dims or more), the number of the step from 1, and the change to add to the weight. Nothing given is
            written to; a state that did not change may come back as the same tensor.
        defaults: the group's options. ``betas`` and ``eps`` are also AdamW's, for parameters that are no matrices.
        decays: whether the change ends in ``- lr · weight_decay · weight``: decoupled weight decay, which the audit tells apart.
    """

    name: str
    states: Callable[[tuple[int, ...], Options], dict[str, MatrixState]]
    update: Update
    defaults: Options
    decays: bool = False


def matrix_shape(shape: tuple[int, ...]) -> tuple[int, int]:
    """Rows and columns of a parameter: its first dim, and all others together."""
    return shape[0], math.prod(shape[1:])


def shapes_of_states(rule: Rule | MatrixRule, shape: Sequence[int], options: Options) -> dict[str, tuple[int, ...]]:
    """The shapes of a rule's states for a parameter of ``shape`` under some options, by name."""
    if isinstance(rule, MatrixRule):
        return {name: kept.shape for name, kept in rule.states(tuple(shape), options).items()}
    return dict.fromkeys(rule.states, tuple(shape))


def state_bytes(rule: MatrixRule, shape: tuple[int, ...], options: Options, storage: Storage) -> int:
    """Bytes of a rule's states for one parameter in a storage; ``options`` need only hold what differs from the rule's defaults.

    Example:
        >>> from narrowgauge.spec.storages import STORAGES
        >>> for name in ("float32", "states8"):
        ...     [round(state_bytes(rule, (4096, 4096), {}, STORAGES[name]) / 4096**2, 3) for rule in MATRIX_RULES.values()]
        [4.0, 0.002, 0.375, 0.377]
        [1.0, 0.002, 0.097, 0.099]
    """
    total = 0
    for kept in rule.states(shape, {**rule.defaults, **options}).values():
        code = FLOAT32 if kept.role is None else storage.code(kept.role)
        total += -(-math.prod(kept.shape) * code.bits // 8) if kept.beside else bytes_alone(code, kept.shape)
    return total


def states_beside(states: Mapping[str, MatrixState]) -> tuple[tuple[str, str], ...]:
    """Those that lie beside the weight, each with the code of a storage that it takes."""
    return tuple((name, kept.role or "exp_avg") for name, kept in states.items() if kept.beside)


def _on_matrix(update: Update) -> Update:
    """``update`` for parameters of more dims, by way of their matrix; an empty one has no step.

    Strides are removed here: a sum runs along memory, and the same gradient transposed in memory must give the same bits.
    """

    @functools.wraps(update)  # by its own name, a rule can be pickled
    def on_any(
        weight: Tensor, gradient: Tensor, states: States, options: Options, step: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        if weight.numel() == 0:
            return torch.zeros_like(weight), dict(states)
        shape = matrix_shape(weight.shape)
        flat = {name: s.reshape(shape).contiguous() if s.shape == weight.shape else s for name, s in states.items()}
        w, g = (x.reshape(shape).contiguous() for x in (weight, gradient))
        change, new = update(w, g, flat, options, step)
        return change.reshape(weight.shape), {name: s.reshape(states[name].shape) for name, s in new.items()}

    return on_any


def _length(x: Tensor, dim: int | None = None) -> Tensor:
    """The L2 norm, float64: squares of float32 values neither overflow nor vanish there."""
    norm: Tensor = torch.linalg.vector_norm(x, dim=dim, dtype=torch.float64)
    return norm


def _root_mean_square(x: Tensor) -> Tensor:
    return _length(x) / math.sqrt(x.numel())


def _decay(options: Options) -> float:
    return float(options["lr"]) * float(options["weight_decay"])


# ── Muon ────────────────────────────────────────────────────────────────────────────────────────────────────────────

NS_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of an odd quintic that lifts small singular values fast; it ends in a band around 1 (0.68 … 1.21), not at 1 itself."""

LR_SCALES: dict[str, Callable[[int, int], float]] = {
    # Every step of the same spectral norm, wider ones not counted.
    "original": lambda rows, cols: max(1.0, rows / cols) ** 0.5,
    # Entries of rms about 0.2, as AdamW's: learning rates and decays tuned for it carry over, and one rate serves both.
    "match_rms_adamw": lambda rows, cols: 0.2 * max(rows, cols) ** 0.5,
}
"""What the learning rate of a matrix of ``(rows, cols)`` is multiplied by; names as in ``torch.optim.Muon``."""


def orthogonalise(matrix: Tensor, iterations: int = 5, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """A matrix with the same singular vectors, and all singular values moved towards 1.

    Invariant: a Newton–Schulz iteration ``X ← aX + (bA + cA²)X`` with ``A = XX^T``, begun at unit Frobenius norm. The norm is
    taken before anything is rounded, without the usual 1e-7 added: gradients times a power of two give the
    same bits, however small. Zeros stay zeros.

    Args:
        iterations: how often; after 5, singular values above 1/600 of the Frobenius norm have come to 0.68 … 1.21.
        dtype: of the products' operands; bfloat16 is as published, off by 1.2 % (rms), and 3 to 4 times as fast even on
            a CPU.

    Cost: with ``s`` the shorter side, ``iterations · (2 s · rows · cols + s³)`` multiply-adds.

    Example:
        >>> x = orthogonalise(torch.diag(torch.tensor([3.0, -1e-9])), dtype=torch.float32)
        >>> [round(value, 1) for value in x.flatten().tolist()]
        [0.7, 0.0, 0.0, -0.0]

    Source:
        Jordan et al. 2024, "Muon: an optimizer for hidden layers in neural networks".
    """
    x = (matrix / _length(matrix).float().clamp(min=TINY)).to(dtype)
    return newton_schulz(x, iterations).float()


def newton_schulz(x: Tensor, iterations: int, coefficients: tuple[float, float, float] = NS_COEFFICIENTS) -> Tensor:
    """The iteration of :func:`orthogonalise`, in the matrix's own format.

    Args:
        x: ``[rows, cols]``, of Frobenius norm 1 at most.
        iterations: how often.
        coefficients: of ``X``, ``AX`` and ``A²X``.
    """
    a, b, c = coefficients
    tall = x.shape[0] > x.shape[1]
    x = x.mT if tall else x
    for _ in range(iterations):
        gram = matmul(x, x.mT)
        x = add_product(x, add_product(gram, gram, gram, b, c), x, a, 1.0)
    return x.mT if tall else x


def _muon_states(shape: tuple[int, ...], options: Options) -> dict[str, MatrixState]:
    return {"momentum_buffer": MatrixState(shape, "exp_avg", beside=True)}


@_on_matrix
def _muon(w: Tensor, g: Tensor, states: States, options: Options, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    momentum = options["momentum"]
    m = states["momentum_buffer"]
    m = m + (g - m) * (1 - momentum)
    ahead = g + (m - g) * momentum if options["nesterov"] else m
    size = float(options["lr"]) * LR_SCALES[options["adjust_lr_fn"] or "original"](*w.shape)
    o = orthogonalise(ahead, options["ns_steps"], getattr(torch, options["ns_dtype"]))
    return o * -size - w * _decay(options), {"momentum_buffer": m}


# ── Adafactor ───────────────────────────────────────────────────────────────────────────────────────────────────────


_EPS_SQUARE = 1e-30


def _adafactor_states(shape: tuple[int, ...], options: Options) -> dict[str, MatrixState]:
    rows, cols = matrix_shape(shape)
    factors = {"exp_avg_sq_row": MatrixState((rows,)), "exp_avg_sq_col": MatrixState((cols,))}
    return factors if options["beta1"] is None else {"exp_avg": MatrixState(shape, "exp_avg", beside=True), **factors}


@_on_matrix
def _adafactor(w: Tensor, g: Tensor, states: States, options: Options, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    # The second moment is taken as an outer product: that of row means and column means over the mean of all.
    eps_square, eps_scale = options["eps"]
    squares = g * g + (_EPS_SQUARE if eps_square is None else eps_square)
    one_minus_beta2 = step ** options["beta2_decay"]
    row, col = states["exp_avg_sq_row"], states["exp_avg_sq_col"]
    row = row + (squares.mean(1) - row) * one_minus_beta2
    col = col + (squares.mean(0) - col) * one_minus_beta2
    # Divided before they are multiplied: the product of two mean squares may lie below float32.
    roots = sqrt(row / row.mean().clamp(min=TINY))[:, None] * sqrt(col)
    u = g / roots.clamp(min=TINY)
    u = u / (_root_mean_square(u) / options["clip_threshold"]).clamp(min=1.0).float()
    new = {"exp_avg_sq_row": row, "exp_avg_sq_col": col}
    if options["beta1"] is not None:
        m = states["exp_avg"]
        u = new["exp_avg"] = m + (u - m) * (1 - options["beta1"])
    size = min(float(options["lr"]), step**-0.5) if options["relative_step"] else float(options["lr"])
    u = u * -size
    if options["scale_parameter"]:
        u = u * _root_mean_square(w).clamp(min=eps_scale).float()
    return u - w * _decay(options), new


# ── Low rank ──────────────────────────────────────────────────────────────────────────────────────────────────────────────


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


def _galore_states(shape: tuple[int, ...], options: Options) -> dict[str, MatrixState]:
    rows, cols = matrix_shape(shape)
    rank, projection = min(options["rank"], rows, cols), projection_of(options)
    coordinates = projection.coordinates(rows, cols, rank)
    return {
        **{name: MatrixState(basis, "exp_avg") for name, basis in projection.bases(rows, cols, rank).items()},
        "projected_exp_avg": MatrixState(coordinates, "exp_avg"),
        "projected_exp_avg_sq": MatrixState(coordinates, "exp_avg_sq"),
    }


def _step_in_subspace(g: Tensor, states: States, options: Options, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Adam's step for ``g`` in the subspace, lifted back, and the new states."""
    projection = projection_of(options)
    names = projection.bases(g.shape[0], g.shape[1], options["rank"])
    bases = projection.refreshed({name: states[name] for name in names}, g, step, options["update_proj_gap"])
    m, v = states["projected_exp_avg"], states["projected_exp_avg_sq"]
    change, m, v = adam_step(projection.project(bases, g), m, v, options, step)
    lifted = projection.lift(bases, change, is_tall(*g.shape)) * options["scale"]
    return lifted, {**bases, "projected_exp_avg": m, "projected_exp_avg_sq": v}


@_on_matrix
def _galore(w: Tensor, g: Tensor, states: States, options: Options, step: int) -> tuple[Tensor, dict[str, Tensor]]:
    change, new = _step_in_subspace(g, states, options, step)
    return change - w * _decay(options), new


def _gradnorm_lorp_states(shape: tuple[int, ...], options: Options) -> dict[str, MatrixState]:
    magnitudes = MatrixState((matrix_shape(shape)[1],))
    return {
        **_galore_states(shape, options),
        "magnitude_exp_avg": magnitudes,
        "magnitude_exp_avg_sq": magnitudes,
    }


@_on_matrix
def _gradnorm_lorp(
    w: Tensor, g: Tensor, states: States, options: Options, step: int
) -> tuple[Tensor, dict[str, Tensor]]:
    """A step on the lengths of a weight's columns and, within a subspace, on their directions.

    Beside what :class:`narrowgauge.optim.GradNormLoRP` says of the paper: beginning every step with ``V = W`` keeps a
    direction's rate at ``lr / M``; with a ``V`` of its own it falls as ``V`` grows, and grow it must, since its gradient is at
    right angles to it. The subspace is on the shorter side by default, as in GaLore and in the released code; the paper's
    formula has a basis on both (``proj_type="full"``).

    The gradients of lengths and directions are ``dM_j = ⟨G_j, V_j⟩ / ‖V_j‖`` and ``dV = (M / ‖V‖) (G - V dM / ‖V‖)``. Decay
    can only act on lengths, and does.
    """
    norms = _length(w, dim=0)
    unit = w / norms.float().clamp(min=TINY)
    along = (g * unit).sum(0)
    turn, new = _step_in_subspace(g - unit * along, states, options, step)
    stretch, m, v = adam_step(along, states["magnitude_exp_avg"], states["magnitude_exp_avg_sq"], options, step)
    longer = stretch.double() - norms * _decay(options)
    # A length that passes through zero comes out on the other side as a turned direction, whose slope has the other sign.
    m = torch.where(norms + longer < 0, -m, m)
    scale = _scale_minus_one(w, turn, norms, longer).float()
    change = w * scale + turn * (scale + 1)
    return change, {**new, "magnitude_exp_avg": m, "magnitude_exp_avg_sq": v}


def _scale_minus_one(w: Tensor, turn: Tensor, norms: Tensor, longer: Tensor) -> Tensor:
    """What each column of ``w + turn`` must be multiplied by to have the length ``norms + longer``, less 1; float64.

    The change is a small difference of large lengths. Written so, with only differences added, it keeps float32's relative
    precision where subtracting the old weight from the new one would leave two digits.
    """
    grown = ((2 * w + turn) * turn).sum(0, dtype=torch.float64)  # ‖w + turn‖² - ‖w‖²
    turned = _length(w + turn, dim=0)
    scale = (longer - grown / (turned + norms)) / turned
    # A column of zeros has no direction: it takes the step unchanged.
    return torch.where(norms == 0, 0.0, torch.where(turned == 0, -1.0, scale))


# ── The table ───────────────────────────────────────────────────────────────────────────────────────────────────────

_ADAM: Options = {"lr": 1e-3, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
_SUBSPACE: Options = {**_ADAM, "rank": 128, "update_proj_gap": 200, "proj_type": "std"}

MUON = MatrixRule(
    "muon",
    _muon_states,
    _muon,
    {
        **_ADAM,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_steps": 5,
        "ns_dtype": "bfloat16",
        "adjust_lr_fn": None,
    },
    decays=True,
)
ADAFACTOR = MatrixRule(
    "adafactor",
    _adafactor_states,
    _adafactor,
    {
        **_ADAM,
        "lr": 1e-2,
        "weight_decay": 0.0,
        "eps": (_EPS_SQUARE, 1e-3),
        "adam_eps": 1e-8,
        "beta1": None,
        "beta2_decay": -0.8,
        "clip_threshold": 1.0,
        "scale_parameter": True,
        "relative_step": True,
    },
    decays=True,
)
GALORE = MatrixRule("galore", _galore_states, _galore, {**_SUBSPACE, "scale": 0.25}, decays=True)
GRADNORM_LORP = MatrixRule("gradnorm_lorp", _gradnorm_lorp_states, _gradnorm_lorp, {**_SUBSPACE, "scale": 1.0})

MATRIX_RULES: dict[str, MatrixRule] = {rule.name: rule for rule in (MUON, ADAFACTOR, GALORE, GRADNORM_LORP)}
