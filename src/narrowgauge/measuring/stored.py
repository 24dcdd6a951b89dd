"""Predict, before the run, which fraction of an update the format of a weight stores.

Four numbers of each tensor: of the step, of the weight decay, of the change of Adam's second moment,
and of its epsilon. They have one cure: a storage that keeps low bits, or masters. Each weight moves by
the step of its rule and is rounded as its storage does. The step is drawn with the typical size of the
rule's. The share is the audit's (EDQ), so it compares with the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from narrowgauge.measuring.reading import Readings, of_all
from narrowgauge.measuring.set_up import NARROW, SetUp, Stepped, spread
from narrowgauge.numerics.dtensor import gradient_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import matrix_shape
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.tables import Row, Table

LIBRARIES = (
    "torch", "narrowgauge", "torchao", "bitsandbytes", "apex", "transformer_engine", "transformers", "optimi", "heavyball",
    "flashoptim",
)  # fmt: skip
"""Libraries whose optimizers show before their first step which low bits they keep."""
KEEPERS: tuple[tuple[str, tuple[object, ...], bool], ...] = (
    ("kahan_sum", (True, None), False),  # torch-optimi; None is its default for narrow weights
    ("bf16_stochastic_round", (True,), True),  # torchao
    ("stochastic_rounding", (True,), True),  # HeavyBall
    ("param_ecc", ("bf16+8", "fp16+8", "bf16+16", "fp16+16"), True),  # HeavyBall
    ("master_weight_bits", (24, 32), True),  # FlashOptim
    ("master_weights", (True,), True),  # Apex, TransformerEngine
)
"""Options of other libraries that keep what a narrow weight rounds off: name, values, and whether the
decay is kept too.
"""
SIZES: dict[str, float | str] = {
    "adam": 0.23, "lion": 1.0, "muon": "matrix", "rmsprop": 1.0, "sgd": "gradient",
}  # fmt: skip
"""Size of a step over the learning rate, by what the name of a class contains: a number, that of an
orthogonal matrix, or that of the gradient. Adam's is √((1 − β1) / (1 + β1)) for gradients of random
sign and β1 = 0.9.
"""
DECOUPLED = ("adamw", "lion", "muon")
"""Rules whose decay multiplies the weight."""
SEED = 7_919_003
"""Unlike a user's seed: weights drawn with the same numbers would be parallel to the step."""
SHARES = ("step", "of_decay", "second_moment", "eps")
_SHOWN = {
    "trains": "trains", "dtype": "dtype", "lr": "lr", "decay": "decay", "optimizer": "optimizer", "storage": "storage",
    "stored of step": "step", "of decay": "of_decay", "of second moment": "second_moment", "of eps": "eps",
}  # fmt: skip


def predict(stepped: Stepped, gradient: Tensor | None = None) -> tuple[Row, str]:
    """Predict what is stored of a tensor's next update.

    Args:
        gradient: its size is the step's for SGD.
    Returns:
        The row of the printed table, whose shares are ``None`` where nothing is rounded on its own, and
        the reason why a share is not known; empty if all are.
    """
    _, p, group, optimizer = stepped
    kind = type(optimizer).__name__
    library = type(optimizer).step.__module__.partition(".")[0]
    rates = [group.get("lr")]
    if not optimizer.state.get(p):  # the peak of a schedule
        rates += [group.get("initial_lr"), group.get("max_lr")]
    rate = max(float(rate or 0.0) for rate in rates)
    decay = float(group.get("weight_decay") or 0.0)
    storage, keeps_step, keeps_decay = _keeper(stepped)
    row: Row = {"dtype": dtype_name(p.dtype), "lr": rate, "decay": decay, "optimizer": kind}
    row |= {"storage": storage, **dict.fromkeys(SHARES)}
    is_rounded = p.dtype in NARROW and not (group.get("fused") or group.get("triton"))
    eps = group.get("eps")
    if is_rounded and isinstance(eps, float) and not keeps_step and library != "narrowgauge":
        is_lost = eps and not torch.tensor(eps, dtype=p.dtype, device="cpu").item()
        row["eps"] = 0.0 if is_lost else None
    if library not in LIBRARIES and not keeps_step:
        return row, _of_no_library(stepped)
    if p.dtype not in NARROW:
        return row, ""
    row["step"] = 1.0
    if not keeps_step:
        direction = _direction(stepped, gradient)
        if isinstance(direction, str):
            return row | {"step": None}, direction
        row["step"] = _stored_share(p, -rate * direction)
    if is_rounded and library in ("torch", "optimi"):  # moments and decay have the weight's format
        is_decoupled = group.get("decoupled_weight_decay") or _holds(kind, DECOUPLED)
        if rate * decay and is_decoupled and not keeps_decay:
            row["of_decay"] = float(rate * decay >= torch.finfo(p.dtype).eps / 4)
        row["second_moment"] = _second_moment(group, p.dtype)
    return row, ""


def _keeper(stepped: Stepped) -> tuple[str, bool, bool]:
    """Return what stores a narrow weight, and whether it keeps the low bits of its step and decay."""
    optimizer = stepped.optimizer
    if isinstance(optimizer, Optimizer):
        row = optimizer.storage_of(stepped.parameter)
        is_kept = bool(row.beside) or row.weight.rounding != "nearest"
        return row.name, is_kept, True
    for option, values, keeps_decay in KEEPERS:
        if stepped.group.get(option, getattr(optimizer, option, ...)) in values:
            return option, True, keeps_decay
    return "", False, False


def _of_no_library(stepped: Stepped) -> str:
    """Return what is not known of a class of the user's own; empty if its states show all."""
    _, p, group, optimizer = stepped
    kind = type(optimizer).__name__
    state = optimizer.state.get(p) or {}
    moment = state.get("exp_avg_sq")
    if isinstance(moment, Tensor) and _second_moment(group, moment.dtype) == 0:
        name = dtype_name(moment.dtype)
        return f"the second moment of {kind} is {name}: rounded to nearest, its decay is lost"
    if p.dtype in NARROW:
        return f"{kind} is not of a known library: it may round by its own code, or keep a copy"
    return "" if state else f"{kind} makes its states in its first step"


def _second_moment(group: Mapping[str, Any], dtype: torch.dtype) -> float | None:
    """Return 0 for a second moment whose decay is less than half the gap between two values."""
    betas: Any = group.get("betas") or ()
    if len(betas) < 2:
        return None
    return float(not 0 < 1 - float(betas[1]) < torch.finfo(dtype).eps / 2)


def _holds(name: str, words: tuple[str, ...]) -> list[str]:
    return [word for word in words if word in name.lower()]


def _direction(stepped: Stepped, gradient: Tensor | None) -> Tensor | str:
    """Return the next step of sampled weights over the learning rate, or why it is not known."""
    _, p, group, optimizer = stepped
    kind = name = type(optimizer).__name__
    if isinstance(optimizer, Optimizer):
        name = optimizer.kernels.rule_in(group, p).name
    rules = _holds(name, (*SIZES,))
    if len(rules) != 1:
        return f"the steps of {kind} have an unknown size"
    size = SIZES[rules[0]]
    if size == "gradient":
        if gradient is None:
            return f"{kind} steps as far as the gradient; pass batch="
        return spread(gradient).float()
    noise = torch.randn(spread(p).shape, generator=torch.Generator().manual_seed(SEED))
    if size == 1:
        return noise.sign()
    if size == "matrix":
        rows, columns = matrix_shape(p.shape)[-2:]
        size = math.sqrt(max(1.0, rows / columns) / max(rows, columns))
        if group.get("adjust_lr_fn") == "match_rms_adamw":
            size = 0.2
    return float(size) * noise


def _stored_share(p: Tensor, change: Tensor) -> float:
    """Return the audit's fraction of a change of sampled weights that their format stores."""
    weight = spread(p).float()
    stored = (weight + change).to(p.dtype).float() - weight
    intended = change.double()
    square = float(intended @ intended)
    return round(float(intended @ stored.double()) / square, 2) if square else 1.0


def add_stored(set_up: SetUp, gradients: Mapping[str, Tensor], result: Readings) -> None:
    """Add one reading of all tensors whose storage loses a part of their update, and the table of what
    trains, the least shares first.
    """
    groups: dict[tuple[Any, ...], tuple[Row, list[str]]] = {}
    lost: dict[str, float] = {}
    for stepped in set_up.trained:
        name = stepped.name
        gradient = gradients.get(name, gradient_of(stepped.parameter))
        row, reason = predict(stepped, gradient)
        groups.setdefault((*row.values(),), (row, []))[1].append(name)
        if reason:
            result.unseen[f"updates by {row['optimizer']}"] = reason
        for what in SHARES:
            if row[what] is not None and row[what] < MIN_EDQ:
                lost.setdefault(name, row[what])  # of the step, if that is lost
    rows = [{"trains": of_all(names), **row} for row, names in groups.values()]
    rows.sort(key=lambda row: (row["step"] is None, row["step"]))
    result.lines = [*Table(rows, _SHOWN).plain().splitlines(), *result.lines]
    if lost:
        ordered = sorted(lost, key=lost.__getitem__)
        result.add("stored-share", ordered, lost[ordered[0]], 1.0)
