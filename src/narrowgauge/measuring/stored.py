"""Predict the shares of an update that the format of a weight stores, before the run.

Three numbers of each tensor: of the step, of the weight decay, and of the change of Adam's second
moment. They have one cure: a storage that keeps low bits, or masters. Each weight moves by the step of
its rule and is rounded as its storage does. Moments in the state give that step; otherwise it is drawn
with the typical size of the rule's steps. The share is the audit's (EDQ), so it compares with the run.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from narrowgauge.measuring.reading import Reading, measured, of_all
from narrowgauge.measuring.set_up import NARROW, SetUp, Stepped, spread
from narrowgauge.measuring.states import stored_by
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
ROUNDS_DECAY_ALONE = ("torch", "optimi")
"""Libraries whose decay multiplies the narrow weight, unless their kernel is fused."""
TYPICAL = 0.23
"""Size of Adam's step over its rate for gradients of random sign: √((1 − β1) / (1 + β1)), β1 = 0.9."""


def _orthogonal(p: Stepped) -> float:
    """Return the size of a matrix with singular values of 1, times Muon's factor for the shape."""
    rows, columns = matrix_shape(p.parameter.shape)[-2:]
    if p.group.get("adjust_lr_fn") == "match_rms_adamw":
        return 0.2
    return math.sqrt(max(1.0, rows / columns) / max(rows, columns))


def _relative(p: Stepped) -> float:
    """Return the root mean square of the weights, to which the steps are relative."""
    if not p.group.get("scale_parameter", True):
        return 1.0
    return max(1e-3, float(spread(p.parameter).float().square().mean().sqrt()))


RULES: dict[str, tuple[float | Callable[[Stepped], float] | None, bool]] = {
    "adamw": (TYPICAL, True), "adam": (TYPICAL, False), "adan": (TYPICAL, True), "lamb": (_relative, False),
    "lion": (1.0, True), "sign": (1.0, False), "muon": (_orthogonal, True), "adafactor": (_relative, True),
    "rmsprop": (1.0, False), "sgd": (None, False),
}  # fmt: skip
"""By what the name of a class contains: size of a step over the learning rate (``None``: as large as
the gradient), and whether decay multiplies the weight.
"""
NUMBER = 4
"""Groups of tensors in the printed table with the least shares; the others follow by count."""


class Shares(NamedTuple):
    """Stored shares of a tensor's step, of its decay and of its second moment's change.

    ``None``: it is not rounded on its own.
    """

    step: float
    decay: float | None = None
    second_moment: float | None = None

    @property
    def least(self) -> float:
        return min(share for share in self if share is not None)


class Update:
    """How an optimizer updates one of its parameters, and what it keeps of that."""

    def __init__(self, stepped: Stepped, gradient: Tensor | None) -> None:
        self.stepped = stepped
        self.parameter = stepped.parameter
        self.group = stepped.group
        self.optimizer = stepped.optimizer
        self.gradient = gradient
        self.is_ours = isinstance(self.optimizer, Optimizer)
        self.state = self._state()
        self.rule = self._rule()
        self.is_fused = bool(self.group.get("fused") or self.group.get("triton"))

    @property
    def rate(self) -> float:
        """Return the learning rate; before the first step, the peak of its schedule."""
        names = ("lr",) if self.state else ("lr", "initial_lr", "max_lr")
        return max(float(self.group.get(name) or 0.0) for name in names)

    @property
    def library(self) -> str:
        """Return the library whose step it is, a parent's if the class has none of its own."""
        return type(self.optimizer).step.__module__.partition(".")[0]

    @property
    def storage(self) -> Any:
        """Return the row of our storages; ``None`` of another library."""
        if isinstance(self.optimizer, Optimizer):
            return self.optimizer.storage_of(self.parameter)
        return None

    def _state(self) -> dict[str, Any]:
        if not isinstance(self.optimizer, Optimizer):
            return stored_by(self.optimizer, self.parameter)
        steps = self.optimizer.num_steps(self.parameter)
        if steps:
            return {"step": steps}
        return {}

    def _rule(self) -> tuple[Any, bool] | None:
        name = type(self.optimizer).__name__.lower()
        if isinstance(self.optimizer, Optimizer):
            name = self.optimizer.rule_in(self.group, self.parameter).name
        rows = [row for row in RULES if row in name]
        longest = max(rows, key=len, default="")
        if any(row not in longest for row in rows):
            return None
        return RULES.get(longest)

    @property
    def keeper(self) -> tuple[str, bool] | None:
        """Return what keeps the low bits of a narrow weight, and whether it keeps the decay's."""
        row = self.storage
        if row is not None:
            if row.beside or row.weight.rounding != "nearest":
                return row.name, True
            return None
        # Apex steps bfloat16 weights without the copies that it makes (fused_adam.py at 6424da3).
        is_unused = hasattr(self.optimizer, "param_groups_master")
        is_unused = is_unused and self.parameter.dtype is torch.bfloat16
        for option, values, keeps_decay in KEEPERS:
            value = self.group.get(option, getattr(self.optimizer, option, ...))
            if any(value is x or value == x for x in values) and not is_unused:
                return option, keeps_decay
        if self._has_master():
            return "a master", True
        return None

    def _has_master(self) -> bool:
        """Return whether a state is float32, and within a rounding of the 16-bit weight."""
        weight = spread(self.parameter).float()
        for x in self.state.values():
            is_wide = isinstance(x, Tensor) and x.dtype is torch.float32
            if is_wide and x.shape == self.parameter.shape and weight.any():
                near = (spread(x) - weight).abs() <= 2.0**-7 * weight.abs() + 1e-30
                if bool(near.all()):
                    return True
        return False

    @property
    def unpredicted(self) -> str:
        """Return why the shares are not predicted; empty if they are."""
        kind = type(self.optimizer).__name__
        if self.rule is None:
            return f"steps of {kind}"
        if self.group.get("lr", 0.0) is None:
            return f"{kind} computes its own learning rate"
        if self.library not in LIBRARIES and self.keeper is None:
            return f"{kind} is no library's: it may round by its own code, or keep a copy"
        if self.keeper is None and self.change() is None:
            return f"{kind} steps as far as the gradient; pass batch="
        return ""

    def change(self) -> Tensor | None:
        """Return the next step's change of sampled weights; ``None`` if its size is unknown."""
        weight = spread(self.parameter)
        mean: Any = self.state.get("exp_avg")
        square: Any = self.state.get("exp_avg_sq")
        are_moments = isinstance(mean, Tensor) and isinstance(square, Tensor)
        if are_moments and mean.shape == square.shape == self.parameter.shape and square.any():
            beta1, beta2 = self.group.get("betas", (0.9, 0.999))
            count = max(1.0, float(self.state.get("step", 1)))
            first = spread(mean).float() / (1 - beta1**count)
            second = spread(square).float() / (1 - beta2**count)
            step: Tensor = first / (second.sqrt() + float(self.group.get("eps", 1e-8)))
            return -self.rate * step
        size = self.rule[0] if self.rule else None
        if callable(size):
            size = float(size(self.stepped))
        if size is None:
            direction = self.state.get("momentum_buffer")
            if direction is None:
                direction = self.gradient
            return None if direction is None else -self.rate * spread(direction).float()
        return (-self.rate * (size * _draws(weight, size)).clamp(-1, 1)).float()

    def shares(self) -> Shares:
        """Return the stored shares of the tensor's update."""
        keeper = self.keeper
        step = 1.0
        weight = spread(self.parameter)
        change = self.change() if keeper is None else None
        if change is not None and change.any() and weight.numel():
            moved = weight.float() + change
            stored = round_to(moved, dtype_name(self.parameter.dtype)).float() - weight.float()
            step = float(update_metrics(update_sums(change, stored, stored))["edq"])
        return Shares(step, self._decay(keeper), self._second_moment())

    def _decay(self, keeper: tuple[str, bool] | None) -> float | None:
        """Return 1 or 0 for a decay that is rounded on its own before the step is added."""
        decoupled = self.group.get("decoupled_weight_decay") or (self.rule and self.rule[1])
        if self.is_ours or self.is_fused or not decoupled or self.group.get("decouple_lr"):
            return None
        if self.library not in ROUNDS_DECAY_ALONE or (keeper is not None and keeper[1]):
            return None
        decay = self.rate * float(self.group.get("weight_decay") or 0.0)
        if not decay:
            return None
        return float(decay >= torch.finfo(self.parameter.dtype).eps / 4)

    def _second_moment(self) -> float | None:
        """Return 1 or 0 for a second moment that is rounded to nearest: 0 if its decay is less than
        half the gap between two values.
        """
        betas = self.group.get("betas")
        bits = self._second_moment_bits()
        if bits is None or not isinstance(betas, (tuple, list)) or len(betas) < 2:
            return None
        decay = 1 - float(betas[1])
        return float(not 0 < decay < 2.0 ** -(bits + 1))

    def _second_moment_bits(self) -> int | None:
        row = self.storage
        if row is not None:
            code = row.exp_avg_sq
            has_state = "exp_avg_sq" in dict(row.states)
            if has_state and code.parts == 1 and code.rounding == "nearest":
                return int(code.mantissa_bits)
            return None
        if self.library not in LIBRARIES:
            return None  # its own code may round at random
        state = self.state.get("exp_avg_sq")
        dtype = torch.float32
        if isinstance(state, Tensor):
            dtype = state.dtype
        elif type(self.optimizer).__module__.startswith("torch.optim"):
            dtype = self.parameter.dtype
        return {torch.bfloat16: 7, torch.float16: 10}.get(dtype)

    @property
    def zero_eps(self) -> bool:
        """Return whether the epsilon of a denominator is 0 in the weight's format."""
        eps = self.group.get("eps")
        if self.is_fused or self.is_ours or self.parameter.dtype not in NARROW:
            return False
        if not isinstance(eps, float) or eps <= 0 or self.keeper is not None:
            return False
        return not bool(torch.tensor(eps, dtype=self.parameter.dtype, device="cpu"))

    def row(self, shares: Shares | None) -> Row:
        """Return the row of the printed table, without names and counts."""
        p = self.parameter
        row: Row = {"dtype": dtype_name(p.dtype), "lr": self.rate}
        row["decay"] = float(self.group.get("weight_decay") or 0.0)
        row["optimizer"] = type(self.optimizer).__name__
        row["storage"] = ""
        if self.is_ours:
            row["storage"] = self.storage.name
        elif self.keeper is not None:
            row["storage"] = self.keeper[0]
        row |= {"step": None, "of_decay": None, "second_moment": None}
        if shares is not None and p.dtype in NARROW:
            row["step"] = round(shares.step, 2)
            row["of_decay"] = shares.decay
            row["second_moment"] = shares.second_moment
        return row


def _draws(like: Tensor, size: float) -> Tensor:
    """Return a fixed normal distribution; signs alone for steps as large as the learning rate."""
    places = torch.arange(len(like), dtype=torch.float64, device=like.device)
    share = (places * 0.6180339887498949 + 0.5) % 1.0
    if size < 1:
        return math.sqrt(2.0) * torch.erfinv(2 * share.clamp(1e-6, 1 - 1e-6) - 1)
    return (share - 0.5).sign()


def stored_readings(
    set_up: SetUp,
    gradients: Mapping[str, Tensor],
    lines: list[str],
    unseen: dict[str, str],
) -> list[Reading]:
    """Return one reading of all tensors whose storage loses a part of their update, and print the
    table of what trains.
    """
    rows: dict[tuple[Any, ...], Row] = {}
    names: dict[tuple[Any, ...], list[str]] = {}
    lost: dict[str, float] = {}
    zero_eps = []
    reasons: dict[str, list[str]] = {}
    for stepped in set_up.trained:
        gradient = gradients.get(stepped.name)
        if gradient is None:
            gradient = gradient_of(stepped.parameter)
        update = Update(stepped, gradient)
        shares = None
        is_narrow = stepped.parameter.dtype in NARROW
        if is_narrow and update.unpredicted:
            reasons.setdefault(update.unpredicted, []).append(stepped.name)
        else:
            shares = update.shares()
            if shares.least < MIN_EDQ:
                is_step = shares.step < MIN_EDQ
                lost[stepped.name] = shares.step if is_step else shares.least
        if update.zero_eps:
            zero_eps.append(stepped.name)
        row = update.row(shares)
        key = tuple(row.values())
        rows.setdefault(key, row)
        names.setdefault(key, []).append(stepped.name)
    lines += _table(rows, names)
    for reason, members in reasons.items():
        unseen[f"updates of {of_all(members)}"] = reason
    readings = []
    if lost:
        ordered = sorted(lost, key=lost.__getitem__)
        readings.append(measured("stored-share", ordered, lost[ordered[0]], 1.0))
    if zero_eps:
        readings.append(measured("truncated-setting", zero_eps, 0.0, None))
    return readings


def _table(
    rows: Mapping[tuple[Any, ...], Row], names: Mapping[tuple[Any, ...], list[str]]
) -> list[str]:
    """Return the lines of what trains, tensors that are alike in one row, the least shares first."""
    if not rows:
        return []
    for key, row in rows.items():
        row["trains"] = of_all(names[key])
    columns = (
        *text_columns(trains="trains", dtype="dtype"), *number_columns(lr="lr", decay="decay"),
        *text_columns(optimizer="optimizer", storage="storage"),
        *number_columns(stored_of_step="step", of_decay="of_decay", of_second_moment="second_moment"),
    )  # fmt: skip
    ordered = sorted(rows.values(), key=lambda row: 1.0 if row["step"] is None else row["step"])
    lines = Table(columns, ordered[: 2 * NUMBER]).plain().splitlines()
    if len(ordered) > 2 * NUMBER:
        lines.append(f"and {len(ordered) - 2 * NUMBER} more groups of tensors")
    return lines
