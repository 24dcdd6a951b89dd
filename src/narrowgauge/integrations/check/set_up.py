"""A user's set-up as the checks see it: a model, its optimizers, and the storage that each optimizer amounts to.

An optimizer of another library is described by the row of ``STORAGES`` that does the same: ``torch.optim.AdamW`` over bfloat16
weights is ``naive``, with a master copy it is ``master``, with Kahan's compensation ``kahan``. Every check of numbers reads
only that row, so one law judges all optimizers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler
from torch.optim.swa_utils import AveragedModel

from narrowgauge._torch import plain_name
from narrowgauge.errors import RecipeError
from narrowgauge.integrations.check.watch import Seen
from narrowgauge.numerics.devices import require_float64
from narrowgauge.numerics.shards import local_of
from narrowgauge.optim.optimizer import Optimizer
from narrowgauge.recompute.object_states import living
from narrowgauge.spec.storages import STORAGES, WIDE, Storage

NARROW = (torch.bfloat16, torch.float16)
NAIVE = {torch.bfloat16: "naive", torch.float16: "float16/naive", torch.float32: "float32", torch.float64: "float32"}
Values = dict[str, Any]
"""What a check yields: the values that its row's message and advice take, and ``where``."""
SAMPLE = 1 << 14
"""Elements of each parameter that are looked at, evenly spread."""
MASTER = {torch.bfloat16: "master", torch.float16: "float16/master"}

# How optimizers of other libraries say that they keep what a narrow weight rounds off: an option of a group or an attribute
# of the optimizer, the values that mean it, and the storage that it amounts to.
KEEPERS: tuple[tuple[str, tuple[object, ...], str], ...] = (
    ("kahan_sum", (True, None), "kahan"),  # torch-optimi; None is its default, for narrow weights
    ("use_kahan_summation", (True,), "kahan"),  # AnyPrecisionAdamW
    ("bf16_stochastic_round", (True,), "stochastic"),  # torchao
    ("stochastic_rounding", (True,), "stochastic"),
    ("master_weight_bits", (24,), "split8"),  # FlashOptim
    ("master_weight_bits", (32,), "exact"),
)


@dataclass(frozen=True)
class SteppedParameter:
    """A parameter in an optimizer, under its name in the model; ``storage`` says what is kept of it."""

    name: str
    parameter: Tensor
    group: dict[str, Any]
    optimizer: torch.optim.Optimizer
    storage: Storage

    @property
    def rate(self) -> float:
        """The learning rate, or the initial one that a schedule multiplies, whichever is larger."""
        # Some have None: transformers' Adafactor computes its own.
        return max(float(self.group.get(name) or 0.0) for name in ("lr", "initial_lr"))

    @property
    def is_short(self) -> bool:
        """Whether a change below half a spacing of a 16-bit weight is lost."""
        row = self.storage
        return row.visible not in WIDE and not row.beside and row.weight.rounding == "nearest"


@dataclass
class SetUp:
    """What is checked: a model as given, perhaps wrapped, its optimizers without wrappers, and what was watched so far.

    ``scaler`` and ``loss`` are the user's; ``averages`` are modules or tensors that hold an average of the weights.
    """

    model: nn.Module
    optimizers: list[torch.optim.Optimizer]
    scaler: Any = None
    schedules: list[Any] = field(default_factory=list)
    averages: list[Any] = field(default_factory=list)
    loss: Tensor | None = None
    seen: Seen = field(default_factory=Seen)

    @property
    def parameters(self) -> dict[str, Tensor]:
        """The model's parameters by their names without wrappers."""
        return {_inner_name(name): parameter for name, parameter in self.model.named_parameters()}

    @cached_property
    def stepped(self) -> list[SteppedParameter]:
        """Every parameter of every optimizer, as often as a group names it; cached."""
        names = {id(p): name for name, p in self.parameters.items()}
        return [
            SteppedParameter(names.get(id(p), f"param {place}"), p, group, optimizer, storage_of(optimizer, group, p))
            for optimizer in self.optimizers
            for group in optimizer.param_groups
            for place, p in enumerate(group["params"])
        ]

    @property
    def trained(self) -> list[SteppedParameter]:
        """The stepped parameters that have values and are not frozen."""
        return [each for each in self.stepped if each.parameter.requires_grad and not each.parameter.is_meta]

    def scalers(self) -> list[Any]:
        """Every known loss scaler once: given by the user, seen in a step, or in an optimizer."""
        own = [optimizer.loss_scaler for optimizer in self.optimizers if isinstance(optimizer, Optimizer)]
        found = {id(s): s for s in [self.scaler, *self.seen.scalers, *own] if s is not None}
        return [scaler for scaler in found.values() if getattr(scaler, "_enabled", True)]


def storage_of(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> Storage:
    """The row of ``STORAGES`` that an optimizer amounts to, for one parameter."""
    if isinstance(optimizer, Optimizer):
        return optimizer._registry.storage_of(group, parameter)
    if parameter.dtype in NARROW:
        if _has_master(optimizer, parameter) or _says_master(optimizer, group, parameter):
            return STORAGES[MASTER[parameter.dtype]]
        for option, values, name in KEEPERS:
            value = group.get(option, getattr(optimizer, option, ...))
            if any(value is wanted or value == wanted for wanted in values):
                return STORAGES[name]
    return STORAGES[NAIVE.get(parameter.dtype, "naive")]


def _has_master(optimizer: torch.optim.Optimizer, parameter: Tensor) -> bool:
    """Whether a state is a master copy: float32, and within one rounding of the narrow weight."""
    weight = sample(parameter.detach()).float()
    for value in dict(optimizer.state.get(parameter, {})).values():
        if isinstance(value, Tensor) and value.dtype is torch.float32 and value.shape == parameter.shape:
            is_near = (sample(value) - weight).abs() <= 2.0**-7 * weight.abs() + 1e-30
            if weight.count_nonzero() and bool(is_near.all()):
                return True
    return False


def _says_master(optimizer: torch.optim.Optimizer, group: dict[str, Any], parameter: Tensor) -> bool:
    """Whether an optimizer says that it steps a master copy: ``FusedAdam`` of TransformerEngine or Apex.

    Apex's makes a copy of each weight, and steps bfloat16 weights without it.

    Source: Apex at 6424da3, ``optimizers/fused_adam.py``, lines 104 to 115, 219 to 223 and 274 to 288.
    """
    is_apex = hasattr(optimizer, "param_groups_master")
    said = group.get("master_weights", getattr(optimizer, "master_weights", None))
    return said is True and not (is_apex and parameter.dtype is torch.bfloat16)


def sample(tensor: Tensor) -> Tensor:
    """Evenly spread elements of this rank's part; the same at every call."""
    flat = local_of(tensor).flatten()
    return flat[:: max(1, flat.numel() // SAMPLE)]


def optimizers_of(given: Any) -> list[torch.optim.Optimizer]:
    """The given optimizers, without the wrappers of Accelerate and Lightning; refuses anything else."""
    found = []
    for each in given if isinstance(given, (list, tuple)) else [given]:
        inner = each
        while isinstance(deeper := getattr(inner, "optimizer", None), torch.optim.Optimizer) and deeper is not inner:
            inner = deeper
        if not isinstance(inner, torch.optim.Optimizer):
            raise RecipeError(
                f"check was given a {type(each).__name__} as an optimizer.",
                "Pass the torch.optim.Optimizer that steps the model, or a list of several.",
            )
        found.append(inner)
    return found


def set_up_of(model: Any, optimizer: Any, scheduler: Any, scaler: Any, average: Any, loss: Tensor | None) -> SetUp:
    """The set-up, with the schedules of these optimizers that are alive in the process; refuses what is no model or optimizer."""
    if not isinstance(model, nn.Module):
        raise RecipeError(f"check was given a {type(model).__name__} as a model.", "Pass the torch.nn.Module.")
    require_float64(model.parameters())
    optimizers = optimizers_of(optimizer)
    alive = [s for s in living(LRScheduler) if any(getattr(s, "optimizer", None) is o for o in optimizers)]
    return SetUp(model, optimizers, scaler, [*_listed(scheduler), *alive], list(_listed(average)), loss)


def updates_of_averages(model: nn.Module) -> dict[AveragedModel, int]:
    """Every ``AveragedModel`` of such a model in the process, with the number of its updates.

    One may be left over from an earlier run of this process: only one whose number grows belongs to this loop.
    """
    shapes = _shapes(model)
    alive = [each for each in living(AveragedModel) if each is not model and _shapes(each.module) == shapes]
    return {each: int(each.n_averaged) for each in alive}


def tensors_of(average: Any) -> list[Tensor]:
    """The weights of an average: of a module, a mapping (or ``state_dict``) or a list of tensors."""
    if isinstance(average, nn.Module):
        return list(average.parameters())
    values = average.values() if hasattr(average, "values") else average
    return [value for value in values if isinstance(value, Tensor)]


def _shapes(model: nn.Module) -> dict[str, torch.Size]:
    return {_inner_name(name): parameter.shape for name, parameter in model.named_parameters()}


def _listed(given: Any) -> Sequence[Any]:
    if given is None:
        return ()
    is_many = isinstance(given, (list, tuple)) and not all(isinstance(each, Tensor) for each in given)
    return list(given) if is_many else [given]


def _inner_name(name: str) -> str:
    """A name without the prefixes of compilers, activation checkpointing and DistributedDataParallel."""
    return plain_name(name).removeprefix("module.")
