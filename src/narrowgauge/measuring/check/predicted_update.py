"""Predict, before the run, which fraction of an update the format of a weight stores.

Three numbers of each tensor: of the step, of the change of Adam's second moment, and of its epsilon.
They have one cure: a storage that keeps low bits, or masters. A copy of the optimizer steps some
elements (:mod:`narrowgauge.measuring.optimizer_copy`), so no class is known by its name but Muon, whose step
reads a whole matrix. The share is the audit's (EDQ), so it compares with the run.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from narrowgauge.measuring.check.dispatch import is_finite
from narrowgauge.measuring.check.training_setup import (
    NARROW_WEIGHTS,
    TRAINED,
    OptimizedParameter,
    TrainingSetup,
)
from narrowgauge.measuring.optimizer_copy import OptimizerCopy, low_bits_kept, no_trace, wide_of
from narrowgauge.measuring.reading import Readings, of_all, words_of
from narrowgauge.measuring.samples import SIZE, take
from narrowgauge.numerics.dtensor import gradient_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import matrix_shape
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.tables import Row, table_of

WARM = 64
"""Steps of random gradients after which the size of a step is a run's."""
READ = 16
"""Last steps whose sizes are read."""
SAMPLED = READ * SIZE
"""Weights of a tensor that take one typical step each."""
LARGE = 1 << 12
"""Elements from which on torchao and bitsandbytes hold the states of a tensor as codes."""
SEED = 7_919_003
"""Unlike a user's seed: weights drawn with the same numbers would be parallel to the step."""
SHARES = {
    "stored_of_step": "stored-share",
    "of_second_moment": "stored-moment",
    "of_eps": "stored-eps",
}
"""The kind of the reading of each share that is lost, by its column."""


@dataclass
class Copy:
    """What copies of an optimizer show of the tensors of one group in one format.

    Attributes:
        shares: of the second moment and of eps, where they are known.
        keeps_step: whether what rounding cuts of a step adds up.
        sizes: typical steps of random elements, ``SAMPLED`` of them.
        over_gradient: their size over the gradient's; 0 if the gradient does not decide it.
        error: why there is no copy.
    """

    shares: Row = field(default_factory=dict)
    keeps_step: bool = False
    sizes: Any = None
    over_gradient: float = 0.0
    error: str = ""


Copies = dict[tuple[Any, ...], Copy]
"""By group, format, whether a tensor is large, and whether a matrix steps as a whole."""


def predict(stepped: OptimizedParameter, gradient: Any, copies: Copies) -> tuple[Row, str]:
    """Predict what is stored of a tensor's next update.

    Args:
        gradient: its size is the step's for SGD; or ``None``.
        copies: of groups that were seen before.
    Returns:
        The row of the printed table, whose shares are ``None`` where nothing is rounded on its own, and
        the reason why a share is not known; empty if all are.
    """
    _, p, group, optimizer = stepped
    rate = _rate(stepped)
    matrix = _size_of_matrix(stepped)
    key = id(group), p.dtype, p.numel() >= LARGE, bool(matrix)
    if key not in copies:
        copies[key] = _copy(stepped, rate, bool(matrix))
    seen = copies[key]
    row = {
        "dtype": dtype_name(p.dtype), "lr": rate, "decay": float(group.get("weight_decay") or 0.0),
        "optimizer": type(optimizer).__name__, "storage": "", **dict.fromkeys(SHARES), **seen.shares,
    }  # fmt: skip
    if isinstance(optimizer, Optimizer):
        row["storage"] = optimizer.storage_of(p).name
    reason = ""
    if p.dtype in NARROW_WEIGHTS:
        reason = seen.error
        if seen.keeps_step:
            row["stored_of_step"] = 1.0
        elif seen.over_gradient and gradient is None:
            reason = "its steps are as long as the gradient; pass batch="
        elif not reason:
            weights = take(p, SAMPLED).cpu()
            change = seen.sizes[: len(weights)] * (matrix or 1.0)
            if seen.over_gradient:
                change = -seen.over_gradient * take(gradient, SAMPLED).cpu().float()
            row["stored_of_step"] = _stored_share(weights, change.double())
    return row, reason


def _stored_share(weights: Tensor, change: Tensor) -> float:
    """Return the audit's fraction of a change of weights that their format stores."""
    stored = (weights.double() + change).to(weights.dtype).double() - weights.double()
    square = float(change @ change)
    return round(float(change @ stored) / square, 2) if square else 1.0


def _rate(stepped: OptimizedParameter) -> float:
    """Return the learning rate: before the first step, the peak of its schedule."""
    rates = [stepped.group.get("lr")]
    if not stepped.optimizer.state.get(stepped.parameter):
        rates += [stepped.group.get("initial_lr"), stepped.group.get("max_lr")]
    return max(float(rate or 0.0) for rate in rates)


def _copy(stepped: OptimizedParameter, rate: float, is_matrix: bool) -> Copy:
    """Step copies of elements of a tensor, unless a step reads a whole matrix."""
    _, p, group, optimizer = stepped
    seen = Copy()
    try:
        with no_trace():
            if isinstance(optimizer, Optimizer):
                storage = optimizer.storage_of(p)
                seen.keeps_step = bool(storage.extra_fields) or storage.weight.rounding != "nearest"
            elif not is_matrix:
                seen.shares = _of_states(optimizer, group, p)
                if p.dtype in NARROW_WEIGHTS:
                    seen.keeps_step = low_bits_kept(optimizer, group, p)
            if is_matrix:
                generator = torch.Generator().manual_seed(SEED)
                seen.sizes = rate * torch.randn(SAMPLED, generator=generator)
            elif p.dtype in NARROW_WEIGHTS and not seen.keeps_step:
                _add_sizes(seen, stepped, rate)
    except ArithmeticError as error:
        seen.error = words_of(error)
    return seen


def _of_states(optimizer: Any, group: Row, p: Tensor) -> Row:
    """Return 0 for a second moment that stays without a gradient, and for an eps that does not keep a
    step from dividing zero by zero.
    """
    row = {}
    start = torch.full((min(p.numel(), LARGE),), 0.5, dtype=p.dtype, device=p.device)
    zeros = torch.zeros_like(start)
    copied = OptimizerCopy(optimizer, group, start)
    if not is_finite(copied.step(zeros)) and group.get("eps"):
        row["of_eps"] = 0.0
    copied.step(torch.ones_like(start))
    state = copied.optimizer.state[copied.weights]
    moment = state.get("exp_avg_sq")
    if type(moment) is Tensor and moment.dtype in TRAINED:
        before = moment.clone()
        for _ in range(READ):
            copied.step(zeros)
        is_stored = not torch.equal(before, state["exp_avg_sq"])
        if moment.dtype in NARROW_WEIGHTS or not is_stored:
            row["of_second_moment"] = float(is_stored)
    return row


def _add_sizes(seen: Copy, stepped: OptimizedParameter, rate: float, part: float = 1.0) -> None:
    """Step elements of a tensor by gradients of random sign, and once more by small ones.

    Args:
        part: of the elements; 0 where they lose the step in float32 too.
    """
    _, p, group, optimizer = stepped
    start = take(p)
    norms = []
    for scale in (2.0**-6, 1.0):
        generator = torch.Generator().manual_seed(SEED)
        copied = OptimizerCopy(optimizer, group, part * wide_of(start), options={"lr": rate})
        changes = []
        for _ in range(WARM):
            noise = scale * torch.randn(len(start), generator=generator)
            changes.append(copied.step(noise.to(p.device)))
        seen.sizes = torch.cat(changes[-READ:]).cpu().float()
        norms.append(float(seen.sizes.norm()))
        if norms[-1]:
            copied.require_wide(p.dtype)
    if not norms[1] and (rate or "lr" not in group):
        if part:
            return _add_sizes(seen, stepped, rate, 0.0)
        raise ArithmeticError(f"a copy of {type(optimizer).__name__} does not step")
    if norms[0] < norms[1] / 8:
        seen.over_gradient = norms[1] / math.sqrt(READ * len(start))


def _size_of_matrix(stepped: OptimizedParameter) -> float:
    """Return the size of an orthogonal matrix, which Muon steps by over the rate; 0 for other rules."""
    _, p, group, optimizer = stepped
    name = type(optimizer).__name__
    if isinstance(optimizer, Optimizer):
        name = optimizer.kernels.rule_in(group, p).name
    if "muon" not in name.lower() or p.ndim < 2:
        return 0.0
    if group.get("adjust_lr_fn") == "match_rms_adamw":
        return 0.2
    rows, columns = matrix_shape(p.shape)[-2:]
    return math.sqrt(max(1.0, rows / columns) / max(rows, columns))


def add_stored(setup: TrainingSetup, gradients: Mapping[str, Tensor], result: Readings) -> None:
    """Add a reading of each share that storage loses, and the table of what trains, the least shares
    first. A tensor whose step is lost is named once: its shares have one cure.
    """
    rows: dict[Any, Row] = {}
    copies: Copies = {}
    lost: dict[str, dict[str, float]] = {}
    for stepped in setup.trained:
        name = stepped.name
        gradient = gradients.get(name, gradient_of(stepped.parameter))
        row, reason = predict(stepped, gradient, copies)
        rows.setdefault((*row.values(),), {"trains": [], **row})["trains"].append(name)
        if reason:
            result.unseen[f"updates by {row['optimizer']}"] = reason
        for share, kind in SHARES.items():
            if row[share] is not None and row[share] < MIN_EDQ:
                lost.setdefault(kind, {})[name] = row[share]
                break
    for row in rows.values():
        row["trains"] = of_all(row["trains"])
    if rows:
        by_share = sorted(
            rows.values(), key=lambda row: (row["stored_of_step"] is None, row["stored_of_step"])
        )
        result.lines = [*table_of(by_share).plain().splitlines(), *result.lines]
    for kind, values in lost.items():
        names = sorted(values, key=values.__getitem__)
        result.add(kind, names, values[names[0]], 1.0)
