"""Predict the shares of an update that the format of a weight stores, before the run.

Three numbers of each tensor: of the step, of the weight decay, and of the change of Adam's second
moment. They have one cure: a storage that keeps low bits, or masters. Each weight moves by the step of
its rule and is rounded as its storage does. The step is drawn with the typical size of the rule's. The
share is the audit's (EDQ), so it compares with the run.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.measuring.reading import Reading, measured, of_all
from narrowgauge.measuring.set_up import NARROW, SetUp, Stepped, spread
from narrowgauge.numerics.dtensor import gradient_of
from narrowgauge.numerics.rounding import round_to
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
    ("use_kahan_summation", (True,), False),  # AnyPrecisionAdamW
    ("bf16_stochastic_round", (True,), True),  # torchao
    ("stochastic_rounding", (True,), True),  # HeavyBall
    ("param_ecc", ("bf16+8", "fp16+8", "bf16+16", "fp16+16"), True),  # HeavyBall
    ("master_weight_bits", (24, 32), True),  # FlashOptim
    ("master_weights", (True,), True),  # Apex, TransformerEngine
)
"""Options of other libraries that keep what a narrow weight rounds off: name, values, and whether the
decay is kept too.
"""
TYPICAL = 0.23
"""Size of Adam's step over its rate for gradients of random sign: √((1 − β1) / (1 + β1)), β1 = 0.9."""
SEED = 7_919_003
"""Unlike a user's seed: weights drawn with the same numbers would be parallel to the step."""
RULES: dict[str, tuple[float | str | None, bool]] = {
    "adamw": (TYPICAL, True), "adam": (TYPICAL, False), "lion": (1.0, True), "muon": ("matrix", True),
    "adafactor": ("weight", True), "rmsprop": (1.0, False), "sgd": (None, False),
}  # fmt: skip
"""By what the name of a class contains: size of a step over the learning rate, and whether decay
multiplies the weight. A size is a number, that of the weight, that of an orthogonal matrix, or as large
as the gradient (``None``).
"""
NUMBER = 8
"""Rows of the printed table with the least shares; the others follow by count."""
_SHOWN = {
    "trains": "trains", "dtype": "dtype", "lr": "lr", "decay": "decay", "optimizer": "optimizer", "storage": "storage",
    "stored of step": "step", "of decay": "of_decay", "of second moment": "second_moment",
}  # fmt: skip


class Prediction(NamedTuple):
    """What an optimizer's storage keeps of the next update of a tensor.

    Args:
        storage: the row of our storages, or the option that keeps low bits; empty for neither.
        rate: the learning rate; before the first step, the peak of its schedule.
        step, decay, second_moment: stored shares; ``None`` if it is not rounded on its own.
        reason: why nothing is predicted; empty if it is.
    """

    storage: str
    rate: float
    step: float | None = None
    decay: float | None = None
    second_moment: float | None = None
    reason: str = ""


def predict(stepped: Stepped, gradient: Tensor | None = None) -> Prediction:
    """Predict what is stored of a tensor's next update.

    Args:
        gradient: its size is the step's for a rule such as SGD's.
    """
    _, p, group, optimizer = stepped
    kind = type(optimizer).__name__
    library = type(optimizer).step.__module__.partition(".")[0]
    storage, keeps_step, keeps_decay = _keeper(stepped)
    rates = [group.get("lr")]
    if not optimizer.state.get(p):
        rates += [group.get("initial_lr"), group.get("max_lr")]
    rate = max(float(rate or 0.0) for rate in rates)
    if p.dtype not in NARROW:
        return Prediction(storage, rate)
    size, is_decoupled = _rule(stepped)
    reason = ""
    if size == "unknown" or group.get("lr", 0.0) is None:
        reason = f"the steps of {kind} have an unknown size"
    elif library not in LIBRARIES and not keeps_step:
        reason = f"{kind} is no library's: it may round by its own code, or keep a copy"
    elif size is None and gradient is None and not keeps_step:
        reason = f"{kind} steps as far as the gradient; pass batch="
    if reason:
        return Prediction(storage, rate, reason=reason)
    step = 1.0
    if not keeps_step:
        step = _stored_share(p, -rate * _direction(stepped, size, gradient))
    decay = None
    shrink = rate * float(group.get("weight_decay") or 0.0)
    is_decoupled = group.get("decoupled_weight_decay") or is_decoupled
    if shrink and is_decoupled and _rounds_alone(stepped) and not keeps_decay:
        decay = float(shrink >= torch.finfo(p.dtype).eps / 4)
    return Prediction(storage, rate, step, decay, _second_moment(stepped))


def _rounds_alone(stepped: Stepped) -> bool:
    """Return whether decay multiplies the narrow weight, and moments have its format."""
    library = type(stepped.optimizer).step.__module__.partition(".")[0]
    return library in ("torch", "optimi") and not _is_fused(stepped.group)


def _second_moment(stepped: Stepped) -> float | None:
    """Return 0 for a second moment whose decay is less than half the gap between two values."""
    betas: Any = stepped.group.get("betas") or ()
    if len(betas) < 2 or not _rounds_alone(stepped):
        return None
    return float(not 0 < 1 - float(betas[1]) < torch.finfo(stepped.parameter.dtype).eps / 2)


def _is_fused(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("triton"))


def _is_eps_zero(stepped: Stepped) -> bool:
    """Return whether the epsilon of a denominator is 0 in the weight's format."""
    _, p, group, optimizer = stepped
    eps = group.get("eps")
    is_wide = p.dtype not in NARROW or _is_fused(group) or _keeper(stepped)[1]
    if is_wide or isinstance(optimizer, Optimizer) or not isinstance(eps, float):
        return False
    return eps > 0 and not torch.tensor(eps, dtype=p.dtype, device="cpu").item()


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


def _rule(stepped: Stepped) -> tuple[Any, bool]:
    """Return the row of :data:`RULES`; an unknown size without one, or with two."""
    optimizer = stepped.optimizer
    name = type(optimizer).__name__.lower()
    if isinstance(optimizer, Optimizer):
        name = optimizer.kernels.rule_in(stepped.group, stepped.parameter).name
    rows = [row for row in RULES if row in name]
    longest = max(rows, key=len, default="")
    if rows and all(row in longest for row in rows):
        return RULES[longest]
    return "unknown", False


def _direction(stepped: Stepped, size: Any, gradient: Any) -> Tensor:
    """Return the next step of sampled weights over the learning rate."""
    _, p, group, _ = stepped
    weight = spread(p).float()
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(SEED))
    if size is None:
        return spread(gradient).float()
    if size == 1:
        return noise.sign()
    if size == "weight":
        size = 1.0
        if group.get("scale_parameter", True):
            size = max(1e-3, float(weight.square().mean().sqrt()))
    if size == "matrix":
        rows, columns = matrix_shape(p.shape)[-2:]
        size = math.sqrt(max(1.0, rows / columns) / max(rows, columns))
        if group.get("adjust_lr_fn") == "match_rms_adamw":
            size = 0.2
    return float(size) * noise


def _stored_share(p: Tensor, change: Tensor) -> float:
    """Return the audit's share of a change of sampled weights that their format stores."""
    weight = spread(p).float()
    stored = round_to(weight + change, dtype_name(p.dtype)).float() - weight
    intended = change.double()
    square = float(intended @ intended)
    return round(float(intended @ stored.double()) / square, 2) if square else 1.0


def stored_readings(
    set_up: SetUp, gradients: Mapping[str, Tensor], lines: list[str], unseen: dict[str, str]
) -> list[Reading]:
    """Return one reading of all tensors whose storage loses a part of their update, and print the
    table of what trains.
    """
    groups: dict[tuple[Any, ...], list[str]] = {}
    lost: dict[str, float] = {}
    zero_eps = []
    for stepped in set_up.trained:
        name, p, group, optimizer = stepped
        kind = type(optimizer).__name__
        prediction = predict(stepped, gradients.get(name, gradient_of(p)))
        storage, rate, *shares, reason = prediction
        if reason:
            unseen[f"updates by {kind}"] = reason
        known = [share for share in shares if share is not None and share < MIN_EDQ]
        if known:
            lost[name] = min(known)
            if prediction.step in known:
                lost[name] = prediction.step
        if _is_eps_zero(stepped):
            zero_eps.append(name)
        decay = float(group.get("weight_decay") or 0.0)
        key = (dtype_name(p.dtype), rate, decay, kind, storage, *shares)
        groups.setdefault(key, []).append(name)
    lines += _table(groups)
    readings = []
    if lost:
        ordered = sorted(lost, key=lost.__getitem__)
        readings.append(measured("stored-share", ordered, lost[ordered[0]], 1.0))
    if zero_eps:
        readings.append(measured("truncated-setting", zero_eps, 0.0, None))
    return readings


def _table(groups: Mapping[tuple[Any, ...], list[str]]) -> list[str]:
    """Return the lines of what trains, the least shares first."""
    rows: list[Row] = []
    for values, names in groups.items():
        fields = (of_all(names), *values)
        rows.append(dict(zip(_SHOWN.values(), fields, strict=True)))
    rows.sort(key=lambda row: (row["step"] is None, row["step"]))
    lines = Table(rows[:NUMBER], _SHOWN).plain().splitlines()
    if len(rows) > NUMBER:
        lines.append(f"and {len(rows) - NUMBER} more groups of tensors")
    return lines
