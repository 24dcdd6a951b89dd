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
from narrowgauge.numerics.metrics import update_metrics, update_sums
from narrowgauge.numerics.rounding import round_to
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import matrix_shape
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.significance import MIN_EDQ
from narrowgauge.spec.tables import Row, Table, number_columns, text_columns

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
ROUNDS_ALONE = ("torch", "optimi")
"""Libraries whose decay multiplies the narrow weight, and whose moments have its format, unless their
kernel is fused.
"""
TYPICAL = 0.23
"""Size of Adam's step over its rate for gradients of random sign: √((1 − β1) / (1 + β1)), β1 = 0.9."""


SEED = 7_919_003
"""Unlike a user's seed: weights drawn with the same numbers would be parallel to the step."""


RULES: dict[str, tuple[float | str | None, bool]] = {
    "adamw": (TYPICAL, True), "adam": (TYPICAL, False), "adan": (TYPICAL, True), "lamb": ("weight", False),
    "lion": (1.0, True), "sign": (1.0, False), "muon": ("matrix", True), "adafactor": ("weight", True),
    "rmsprop": (1.0, False), "sgd": (None, False),
}  # fmt: skip
"""By what the name of a class contains: size of a step over the learning rate, and whether decay
multiplies the weight. A size is a number, that of the weight, that of an orthogonal matrix, or as large
as the gradient (``None``).
"""
NUMBER = 8
"""Rows of the printed table with the least shares; the others follow by count."""
_COLUMNS = (
    *text_columns(trains="trains", dtype="dtype"), *number_columns(lr="lr", decay="decay"),
    *text_columns(optimizer="optimizer", storage="storage"),
    *number_columns(stored_of_step="step", of_decay="of_decay", of_second_moment="second_moment"),
)  # fmt: skip
_FIELDS = (
    "trains", "dtype", "lr", "decay", "optimizer", "storage", "step", "of_decay", "second_moment",
)  # fmt: skip


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
    kind = type(optimizer)
    library = kind.step.__module__.partition(".")[0]
    storage, keeps_step, keeps_decay = _keeper(stepped)
    rule = _rule(stepped)
    rate = _rate(stepped)
    if p.dtype not in NARROW:
        return Prediction(storage, rate)
    change = None
    if rule is not None and not keeps_step:
        change = next_change(stepped, rule[0], rate, gradient)
    reason = ""
    if rule is None:
        reason = f"steps of {kind.__name__}"
    elif group.get("lr", 0.0) is None:
        reason = f"{kind.__name__} computes its own learning rate"
    elif library not in LIBRARIES and not keeps_step:
        reason = f"{kind.__name__} is no library's: it may round by its own code, or keep a copy"
    elif change is None and not keeps_step:
        reason = f"{kind.__name__} steps as far as the gradient; pass batch="
    if reason:
        return Prediction(storage, rate, reason=reason)
    step = 1.0
    if change is not None:
        step = _stored_share(p, change)
    alone: tuple[float | None, float | None] = (None, None)
    if library in ROUNDS_ALONE and not _is_fused(group):
        alone = _rounded_alone(stepped, rule, rate, keeps_decay)
    if isinstance(optimizer, Optimizer):
        row = optimizer.storage_of(p)
        code = row.exp_avg_sq
        if "exp_avg_sq" in dict(row.states) and code.parts == 1 and code.rounding == "nearest":
            alone = None, _second_moment(group, 2.0 ** -(code.mantissa_bits + 1))
    return Prediction(storage, rate, step, *alone)


def _rounded_alone(
    stepped: Stepped, rule: Any, rate: float, keeps_decay: bool
) -> tuple[float | None, float | None]:
    """Return 1 or 0 for the decay and for the second moment, which are rounded to nearest by
    themselves.
    """
    group = stepped.group
    half_gap = torch.finfo(stepped.parameter.dtype).eps / 2
    decay = None
    shrink = rate * float(group.get("weight_decay") or 0.0)
    is_decoupled = group.get("decoupled_weight_decay") or rule[1]
    if shrink and is_decoupled and not (keeps_decay or group.get("decouple_lr")):
        decay = float(shrink >= half_gap / 2)
    return decay, _second_moment(group, half_gap)


def _rate(stepped: Stepped) -> float:
    """Return the learning rate; before the first step, the peak of its schedule."""
    names = ["lr"]
    if not stepped.optimizer.state.get(stepped.parameter):
        names += ["initial_lr", "max_lr"]
    return max(float(stepped.group.get(name) or 0.0) for name in names)


def _is_fused(group: Mapping[str, Any]) -> bool:
    return bool(group.get("fused") or group.get("triton"))


def _is_eps_zero(stepped: Stepped) -> bool:
    """Return whether the epsilon of a denominator is 0 in the weight's format."""
    _, p, group, optimizer = stepped
    eps = group.get("eps")
    is_wide = p.dtype not in NARROW or _is_fused(group) or _keeper(stepped)[1]
    if is_wide or isinstance(optimizer, Optimizer) or not isinstance(eps, float) or eps <= 0:
        return False
    return not bool(torch.tensor(eps, dtype=p.dtype, device="cpu"))


def _second_moment(group: Mapping[str, Any], half_gap: float) -> float | None:
    """Return 0 for a second moment whose decay is less than half the gap between two values."""
    betas: Any = group.get("betas") or ()
    if len(betas) < 2:
        return None
    return float(not 0 < 1 - float(betas[1]) < half_gap)


def _keeper(stepped: Stepped) -> tuple[str, bool, bool]:
    """Return what stores a narrow weight, and whether it keeps the low bits of its step and decay."""
    optimizer = stepped.optimizer
    if isinstance(optimizer, Optimizer):
        row = optimizer.storage_of(stepped.parameter)
        is_kept = bool(row.beside) or row.weight.rounding != "nearest"
        return row.name, is_kept, True
    for option, values, keeps_decay in KEEPERS:
        value = stepped.group.get(option, getattr(optimizer, option, ...))
        if any(value is x or value == x for x in values):
            return option, True, keeps_decay
    return "", False, False


def _rule(stepped: Stepped) -> tuple[Any, bool] | None:
    """Return the row of :data:`RULES`; ``None`` without one, or with two."""
    optimizer = stepped.optimizer
    name = type(optimizer).__name__.lower()
    if isinstance(optimizer, Optimizer):
        name = optimizer.kernels.rule_in(stepped.group, stepped.parameter).name
    rows = [row for row in RULES if row in name]
    longest = max(rows, key=len, default="")
    if all(row in longest for row in rows):
        return RULES.get(longest)
    return None


def next_change(stepped: Stepped, size: Any, rate: float, gradient: Any) -> Tensor | None:
    """Return the next step's change of sampled weights; ``None`` if its size is unknown."""
    _, p, group, _ = stepped
    weight = spread(p).float()
    if size == "weight":
        size = 1.0
        if group.get("scale_parameter", True):
            size = max(1e-3, float(weight.square().mean().sqrt()))
    if size == "matrix":
        rows, columns = matrix_shape(p.shape)[-2:]
        size = math.sqrt(max(1.0, rows / columns) / max(rows, columns))
        if group.get("adjust_lr_fn") == "match_rms_adamw":
            size = 0.2
    if size is None and gradient is None:
        return None
    noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(SEED))
    step = (size or 1.0) * noise
    if size is None:
        step = spread(gradient).float()
    if size == 1:
        step = noise.sign()
    return -rate * step


def _stored_share(p: Tensor, change: Tensor) -> float:
    """Return the audit's share of a change of sampled weights that their format stores."""
    if not change.any():
        return 1.0
    weight = spread(p).float()
    stored = round_to(weight + change, dtype_name(p.dtype)).float() - weight
    return round(float(update_metrics(update_sums(change, stored, stored))["edq"]), 2)


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
        if prediction.reason:
            unseen[f"updates by {kind}"] = prediction.reason
        shares = [share for share in prediction[2:5] if share is not None]
        if shares and min(shares) < MIN_EDQ:
            lost[name] = shares[0]
            if shares[0] >= MIN_EDQ:
                lost[name] = min(shares)
        if _is_eps_zero(stepped):
            zero_eps.append(name)
        decay = float(group.get("weight_decay") or 0.0)
        key = (dtype_name(p.dtype), prediction.rate, decay, kind, *prediction[:1], *prediction[2:5])
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
        rows.append(dict(zip(_FIELDS, (of_all(names), *values), strict=True)))
    rows.sort(key=lambda row: (row["step"] is None, row["step"]))
    lines = Table(_COLUMNS, rows[:NUMBER]).plain().splitlines()
    if len(rows) > NUMBER:
        lines.append(f"and {len(rows) - NUMBER} more groups of tensors")
    return lines
