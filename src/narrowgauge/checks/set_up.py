"""A user's set-up for the checks: a model, its optimizers, and each optimizer's equivalent storage.

An optimizer of another library maps to the row of ``STORAGES`` that does the same. For
``torch.optim.AdamW`` over bfloat16 weights this is ``naive``, with a master copy ``master``, with
Kahan compensation ``kahan``. So one rule judges all optimizers.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.checks.step_samples import spread, stored_by
from narrowgauge.errors import RecipeError
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import matrix_shape
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import STORAGES, VISIBLE, Storage
from narrowgauge.torch_support.machine import require_float64
from narrowgauge.torch_support.torch_names import plain_name

NARROW = (torch.bfloat16, torch.float16)
NAIVE = {
    torch.bfloat16: "naive",
    torch.float16: "float16/naive",
    torch.float32: "float32",
    torch.float64: "float32",
}
MASTER = {torch.bfloat16: "master", torch.float16: "float16/master"}
KNOWN = {
    "torch", "narrowgauge", "torchao", "bitsandbytes", "apex", "transformer_engine", "transformers", "optimi", "heavyball",
    "flashoptim",
}  # fmt: skip
"""Libraries whose optimizers show before their first step which copies and low bits they keep."""

# Options by which optimizers of other libraries keep the bits that a low-precision weight rounds
# off: the name of the option or attribute, its values, and the equivalent storage.
KEEPERS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("kahan_sum", (True, None), "kahan"),  # torch-optimi; None is its default, for narrow weights
    ("use_kahan_summation", (True,), "kahan"),  # AnyPrecisionAdamW
    ("bf16_stochastic_round", (True,), "stochastic"),  # torchao
    ("stochastic_rounding", (True,), "stochastic"),  # HeavyBall
    ("param_ecc", ("bf16+8", "fp16+8"), "word"),  # HeavyBall
    ("param_ecc", ("bf16+16", "fp16+16"), "exact"),
    ("master_weight_bits", (24,), "word"),  # FlashOptim
    ("master_weight_bits", (32,), "exact"),
)


def _orthogonal(p: SteppedParameter) -> float:
    """Return the size of a matrix with singular values of 1, times Muon's factor for the shape."""
    rows, columns = matrix_shape(p.parameter.shape)[-2:]
    if p.group.get("adjust_lr_fn") == "match_rms_adamw":
        return 0.2
    return math.sqrt(max(1.0, rows / columns) / max(rows, columns))


def _relative(p: SteppedParameter) -> float:
    """Return the root mean square of the weights, to which the steps are relative."""
    if not p.group.get("scale_parameter", True):
        return 1.0
    return max(1e-3, float(spread(p.parameter).float().square().mean().sqrt()))


TYPICAL = 0.23
"""RMS of Adam's step over its learning rate, for gradients of random sign: √((1 − β1) / (1 + β1))
at β1 = 0.9.
"""
STEP_RULES: dict[str, tuple[float | Callable[[SteppedParameter], float] | None, bool]] = {
    "adamw": (TYPICAL, True), "adam": (TYPICAL, False), "adan": (TYPICAL, True), "lamb": (_relative, False),
    "lion": (1.0, True), "sign": (1.0, False), "muon": (_orthogonal, True), "adafactor": (_relative, True),
    "rmsprop": (1.0, False), "sgd": (None, False),
}  # fmt: skip
"""By what the name of an optimizer's class contains: root mean square of a step over the learning
rate (``None``: as large as the gradient), and whether decay multiplies the weight. A class that
fits no row, or two unlike ones, is unseen.
"""
ROUNDS_DECAY_ALONE = ("torch", "optimi")
"""Libraries whose decay multiplies the weight in its own format, unless their kernel is fused.

Others compute in float32.
"""


@dataclass(frozen=True)
class SteppedParameter:
    """A parameter in an optimizer, under its name in the model, with its equivalent storage."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    optimizer: torch.optim.Optimizer
    storage: Storage

    @property
    def rate(self) -> float:
        """Return the learning rate of now.

        Before the first step, return the peak of its schedule.
        """
        # Some have None: transformers' Adafactor computes its own.
        names = ("lr",) if self.state else ("lr", "initial_lr", "max_lr")
        return max(float(self.group.get(name) or 0.0) for name in names)

    @property
    def state(self) -> dict[str, Any]:
        if isinstance(self.optimizer, Optimizer):
            number = self.optimizer.num_steps(self.parameter)
            if number:
                return {"step": number}
            return {}
        return stored_by(self.optimizer, self.parameter)

    @property
    def library(self) -> str:
        """Return the library whose step it is, a parent's if the class has none of its own."""
        return type(self.optimizer).step.__module__.partition(".")[0]

    @property
    def step_rule(self) -> tuple[Any, bool] | None:
        """Return the row of ``STEP_RULES`` that fits; ``None`` for an unknown rule."""
        name = type(self.optimizer).__name__.lower()
        if isinstance(self.optimizer, Optimizer):
            name = self.optimizer.rule_in(self.group, self.parameter).name
        rows = [row for row in STEP_RULES if row in name]
        longest = max(rows, key=len, default="")
        for row in rows:
            if row not in longest:
                return None
        return STEP_RULES.get(longest)

    @property
    def decays_alone(self) -> bool:
        """Return whether the decay is rounded on its own, before the step is added."""
        group = self.group
        if isinstance(self.optimizer, Optimizer) or group.get("fused") or group.get("triton"):
            return False
        is_decoupled = self.step_rule is not None and self.step_rule[1]
        if not is_decoupled and not group.get("decoupled_weight_decay"):
            return False
        is_alone = self.is_short and self.library in ROUNDS_DECAY_ALONE
        return is_alone or self.storage is STORAGES["kahan"]

    @property
    def size(self) -> float | None:
        """Return the root mean square of a step over the learning rate; ``None`` if it is as large
        as the gradient.
        """
        size = self.step_rule[0] if self.step_rule else None
        if callable(size):
            return float(size(self))
        return size

    @property
    def unpredicted(self) -> str:
        """Return why its updates are not predicted: an unknown rule or format, or a stored weight
        unlike the visible one.
        """
        row = self.storage
        dtype = self.parameter.dtype
        kind = type(self.optimizer).__name__
        if dtype not in NAIVE:
            return dtype_name(dtype)
        if self.step_rule is None:
            return f"steps of {kind}"
        if self.group.get("lr", 0.0) is None:
            return f"{kind} computes its own learning rate"
        if dtype in NARROW and self.library not in KNOWN and not row.beside:
            return f"{kind} is no library's: it may round by its own code, or keep a copy"
        is_visible = row.weight.mantissa_bits == 23 - VISIBLE[row.visible][1]
        if row.beside or is_visible:
            return ""
        return f'storage "{row.name}"'

    @property
    def is_short(self) -> bool:
        """Return whether a change below 0.5 ulp of a 16-bit weight is lost."""
        return self.storage.visible != "float32" and self.keeps_nothing

    @property
    def keeps_nothing(self) -> bool:
        """Return whether the visible weight is all that is kept; float32 is too."""
        row = self.storage
        return (
            not row.beside
            and row.weight.rounding == "nearest"
            and self.parameter.dtype is not torch.float64
        )


@dataclass
class SetUp:
    """A model, possibly wrapped, and its optimizers without wrappers."""

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]

    @property
    def parameters(self) -> dict[str, Tensor]:
        """Return the model's parameters by their names without wrappers."""
        return {inner_name(name): parameter for name, parameter in self.model.named_parameters()}

    @cached_property
    def stepped(self) -> list[SteppedParameter]:
        """Return every parameter of every optimizer, as often as a group names it."""
        names = {id(p): name for name, p in self.parameters.items()}
        stepped = []
        for optimizer in self.optimizers:
            for index, group in enumerate(optimizer.param_groups):
                for place, p in enumerate(group["params"]):
                    name = names.get(id(p), f"group {index}, parameter {place}")
                    row = storage_of(optimizer, group, p)
                    stepped.append(SteppedParameter(name, p, group, optimizer, row))
        return stepped

    @property
    def trained(self) -> list[SteppedParameter]:
        """Return the stepped parameters that have values of a known format and are not frozen."""
        trained = []
        for stepped in self.stepped:
            p = stepped.parameter
            if p.requires_grad and not p.is_meta and p.dtype in NAIVE:
                trained.append(stepped)
        return trained

    @property
    def outside(self) -> dict[str, Any]:
        """Return the trained parameters that are none of the model's, by name."""
        inside = set(map(id, self.model.parameters()))
        return {p.name: p.parameter for p in self.trained if id(p.parameter) not in inside}


def set_up_of(model: Any, optimizer: Any) -> SetUp:
    """Return the set-up. Refuse anything but a model and optimizers."""
    if not isinstance(model, nn.Module):
        raise RecipeError(
            f"Cannot check {type(model).__name__} as a model.", "Pass the torch.nn.Module."
        )
    require_float64(model.parameters())
    optimizers = []
    outer_ones = optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]
    for outer in outer_ones:
        inner = outer
        deeper = getattr(outer, "optimizer", None)
        while isinstance(deeper, torch.optim.Optimizer) and deeper is not inner:
            inner = deeper  # of Accelerate and Lightning
            deeper = getattr(inner, "optimizer", None)
        if not isinstance(inner, torch.optim.Optimizer):
            raise RecipeError(
                f"Cannot check {type(outer).__name__} as an optimizer.",
                "Pass the torch.optim.Optimizer that steps the model, or a list of several.",
            )
        optimizers += _members(inner)
    return SetUp(model, optimizers)


def _members(optimizer: torch.optim.Optimizer) -> list[torch.optim.Optimizer]:
    """Return the optimizers in a container such as torchtitan's, whose own groups have no rate."""
    members: Any = getattr(optimizer, "optimizers", None)
    if not isinstance(members, (list, tuple)) or not members:
        return [optimizer]
    if not all(isinstance(member, torch.optim.Optimizer) for member in members):
        return [optimizer]
    return [*members]


def storage_of(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor
) -> Storage:
    """Return the row of ``STORAGES`` that an optimizer amounts to, for one parameter."""
    if isinstance(optimizer, Optimizer):
        return optimizer.storage_of(parameter)
    if parameter.dtype in NARROW:
        # Apex copies each weight, but steps bfloat16 weights without the copy (fused_adam.py at
        # 6424da3, lines 274 to 288).
        is_unused = hasattr(optimizer, "param_groups_master") and parameter.dtype is torch.bfloat16
        says_master = group.get("master_weights", getattr(optimizer, "master_weights", None))
        if (says_master is True and not is_unused) or _has_master(optimizer, parameter):
            return STORAGES[MASTER[parameter.dtype]]
        for option, values, name in KEEPERS:
            value = group.get(option, getattr(optimizer, option, ...))
            if any(value is keeper or value == keeper for keeper in values):
                return STORAGES[name]
    return STORAGES[NAIVE.get(parameter.dtype, "naive")]


def _has_master(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Return whether a state is a master copy: float32, and within one rounding of the 16-bit
    weight.
    """
    for x in stored_by(optimizer, parameter).values():
        if isinstance(x, Tensor) and x.dtype is torch.float32 and x.shape == parameter.shape:
            weight = spread(parameter).float()
            is_near = (spread(x) - weight).abs() <= 2.0**-7 * weight.abs() + 1e-30
            if weight.any() and bool(is_near.all()):
                return True
    return False


def inner_name(name: str) -> str:
    """Return a name without the prefixes of compilers, activation checkpointing and
    DistributedDataParallel.
    """
    return plain_name(name).removeprefix("module.")
