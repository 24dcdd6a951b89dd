"""A user's set-up for the checks: a model, its optimizers, and each optimizer's equivalent storage.

An optimizer of another library maps to the row of ``STORAGES`` that does the same. For ``torch.optim.AdamW`` over bfloat16
weights this is ``naive``, with a master copy ``master``, with Kahan compensation ``kahan``. So one rule judges all optimizers.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from narrowgauge.analysis.reading import of_all
from narrowgauge.checks.step_samples import spread
from narrowgauge.errors import RecipeError
from narrowgauge.machine import require_float64
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.optim.rules.matrix import MatrixRule, matrix_shape
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import STORAGES, VISIBLE, Storage
from narrowgauge.torch_names import plain_name

NARROW = (torch.bfloat16, torch.float16)
NAIVE = {torch.bfloat16: "naive", torch.float16: "float16/naive", torch.float32: "float32", torch.float64: "float32"}
MASTER = {torch.bfloat16: "master", torch.float16: "float16/master"}
KNOWN = {
    "torch", "narrowgauge", "torchao", "bitsandbytes", "apex", "transformer_engine", "transformers", "optimi", "heavyball",
    "flashoptim",
}  # fmt: skip
"""Libraries whose optimizers show before their first step which copies and low bits they keep."""

# Options by which optimizers of other libraries keep the bits that a low-precision weight rounds off: the name of the option
# or attribute, its values, and the equivalent storage.
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
        """Return the largest of the learning rate, the initial rate that a schedule multiplies, and a cycle's peak."""
        # Some have None: transformers' Adafactor computes its own.
        return max(float(self.group.get(name) or 0.0) for name in ("lr", "initial_lr", "max_lr"))

    @property
    def state(self) -> dict[str, Any]:
        return dict(self.optimizer.state.get(self.parameter, {}))

    @property
    def unpredicted(self) -> str:
        """Return why its updates are not predicted: an unknown format, or a stored weight unlike the visible one."""
        row, dtype = self.storage, self.parameter.dtype
        if dtype not in NAIVE:
            return dtype_name(dtype)
        if "adafactor" in type(self.optimizer).__name__.lower():
            return "Adafactor's steps, which are relative to the weights"
        is_visible = row.weight.mantissa_bits == 23 - VISIBLE[row.visible][1]
        return "" if row.beside or is_visible else f'storage "{row.name}"'

    @property
    def is_short(self) -> bool:
        """Return whether a change below 0.5 ulp of a 16-bit weight is lost."""
        return self.storage.visible != "float32" and self.keeps_nothing

    @property
    def keeps_nothing(self) -> bool:
        """Return whether the visible weight is all that is kept; float32 is too."""
        row = self.storage
        if type(self.optimizer).__module__.partition(".")[0] not in KNOWN and not self.state:
            return False  # a user's class may make a master copy in its first step
        return not row.beside and row.weight.rounding == "nearest" and self.parameter.dtype is not torch.float64

    @property
    def is_normalized(self) -> bool:
        """Return whether a rule bounds its changes by about the learning rate, independent of the gradient's size."""
        kind = type(self.optimizer).__name__.lower()
        return "sign" in kind or not ("sgd" in kind or "lbfgs" in kind)


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
        return [
            SteppedParameter(
                names.get(id(p), f"group {index}, parameter {place}"), p, group, optimizer, storage_of(optimizer, group, p)
            )
            for optimizer in self.optimizers
            for index, group in enumerate(optimizer.param_groups)
            for place, p in enumerate(group["params"])
        ]  # fmt: skip

    @property
    def trained(self) -> list[SteppedParameter]:
        """Return the stepped parameters that have values of a known format and are not frozen."""
        return [
            p
            for p in self.stepped
            if p.parameter.requires_grad and not p.parameter.is_meta and p.parameter.dtype in NAIVE
        ]

    @property
    def unseen(self) -> dict[str, str]:
        """Return the parameters whose updates are not predicted, and the reasons."""
        names: dict[str, list[str]] = {}
        for p in self.stepped:
            if p.parameter.requires_grad and p.unpredicted:
                names.setdefault(p.unpredicted, []).append(p.name)
        return {f"updates of {of_all(members)}": reason for reason, members in names.items()}


def set_up_of(model: Any, optimizer: Any) -> SetUp:
    """Return the set-up. Refuse anything but a model and optimizers."""
    if not isinstance(model, nn.Module):
        raise RecipeError(f"Cannot check {type(model).__name__} as a model.", "Pass the torch.nn.Module.")
    require_float64(model.parameters())
    optimizers = []
    for outer in optimizer if isinstance(optimizer, (list, tuple)) else [optimizer]:
        inner = outer
        while isinstance(deeper := getattr(inner, "optimizer", None), torch.optim.Optimizer) and deeper is not inner:
            inner = deeper  # of Accelerate and Lightning
        if not isinstance(inner, torch.optim.Optimizer):
            raise RecipeError(
                f"Cannot check {type(outer).__name__} as an optimizer.",
                "Pass the torch.optim.Optimizer that steps the model, or a list of several.",
            )
        optimizers.append(inner)
    return SetUp(model, optimizers)


def described(set_up: SetUp) -> list[str]:
    """Return a line with the formats of weights, gradients, states and buffers, and the stacks that matrix rules step."""
    by_kind: dict[str, dict[str, None]] = {"weights": {}, "gradients": {}, "states": {}}
    stacks: dict[str, list[str]] = {}
    for p in set_up.stepped:
        states = [s for s in p.state.values() if isinstance(s, Tensor) and s.ndim and s.is_floating_point()]
        if not states and type(p.optimizer).__module__.startswith("torch.optim"):
            states = [p.parameter]
        gradient = p.parameter if p.parameter.grad is None else p.parameter.grad
        is_ours = isinstance(p.optimizer, Optimizer)
        by_kind["weights"][dtype_name(p.parameter.dtype)] = None
        by_kind["gradients"][dtype_name(gradient.dtype)] = None
        by_kind["states"] |= {p.storage.name: None} if is_ours else {dtype_name(s.dtype): None for s in states}
        rule = p.optimizer.rule_in(p.group, p.parameter) if isinstance(p.optimizer, Optimizer) else None
        if isinstance(rule, MatrixRule) and len(matrix_shape(p.parameter.shape)) == 3:
            stacks.setdefault(rule.name, []).append(p.name)
    if buffers := {dtype_name(b.dtype): None for b in set_up.model.buffers() if b.is_floating_point()}:
        by_kind["buffers"] = buffers
    formats = "; ".join(f"{kind} {', '.join(names) or 'unknown'}" for kind, names in by_kind.items())
    lines = [f"{rule} steps each matrix of {of_all(names)} alone (3 dims)" for rule, names in stacks.items()]
    weights = {f"{name}.weight" for name, module in set_up.model.named_modules() if isinstance(module, nn.Conv1d)}
    if convolutions := [name for names in stacks.values() for name in names if name in weights]:
        lines.append(f'{of_all(convolutions)} belongs to a convolution: put it into a param group with "rule": "adamw"')
    return [formats, *lines]


def storage_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Storage:
    """Return the row of ``STORAGES`` that an optimizer amounts to, for one parameter."""
    if isinstance(optimizer, Optimizer):
        return optimizer.storage_of(parameter)
    if parameter.dtype in NARROW:
        if _has_master(optimizer, parameter) or _says_master(optimizer, group, parameter):
            return STORAGES[MASTER[parameter.dtype]]
        for option, values, name in KEEPERS:
            value = group.get(option, getattr(optimizer, option, ...))
            if any(value is keeper or value == keeper for keeper in values):
                return STORAGES[name]
    return STORAGES[NAIVE.get(parameter.dtype, "naive")]


def _has_master(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Return whether a state is a master copy: float32, and within one rounding of the 16-bit weight."""
    for value in dict(optimizer.state.get(parameter, {})).values():
        if isinstance(value, Tensor) and value.dtype is torch.float32 and value.shape == parameter.shape:
            weight = spread(parameter).float()
            is_near = (spread(value) - weight).abs() <= 2.0**-7 * weight.abs() + 1e-30
            if weight.count_nonzero() and bool(is_near.all()):
                return True
    return False


def _says_master(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
    """Return whether the settings name a master copy, as in ``FusedAdam`` of TransformerEngine or Apex."""
    # Apex copies each weight, but steps bfloat16 weights without the copy (fused_adam.py at 6424da3, lines 274 to 288).
    is_apex = hasattr(optimizer, "param_groups_master")
    has_masters = group.get("master_weights", getattr(optimizer, "master_weights", None))
    return has_masters is True and not (is_apex and parameter.dtype is torch.bfloat16)


def inner_name(name: str) -> str:
    """Return a name without the prefixes of compilers, activation checkpointing and DistributedDataParallel."""
    return plain_name(name).removeprefix("module.")
