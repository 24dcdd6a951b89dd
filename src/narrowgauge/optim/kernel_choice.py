"""Which rule and storage a parameter has under its group's options, and its states under both."""

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError, warn_caller
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.optim.rules.elementwise import ADAMW, PLAIN_SGD, SGD
from narrowgauge.optim.rules.matrix import MUON, AnyRule, MatrixRule, extras_of
from narrowgauge.optim.step.parameter_formats import LONGEST_VECTOR, is_vector
from narrowgauge.optim.step.state import LocalState, new_state
from narrowgauge.optim.step.step_definition import StepDefinition, kernel_of
from narrowgauge.spec.formats import dtype_name
from narrowgauge.spec.storages import Storage, for_format, get_storage
from narrowgauge.spec.update_rules import refuse_pair

Group = dict[str, Any]


class KernelChoice:
    """Choose the rule and the storage of each parameter of an optimizer.

    Attributes:
        rule: the optimizer's.
    """

    def __init__(self, rule: AnyRule) -> None:
        self.rule = rule
        self._by_options: dict[Any, StepDefinition] = {}

    def kernel_of(self, group: Group, parameter: Tensor) -> StepDefinition:
        """Return the kernel that steps a parameter under a group's options."""
        options = group["storage"], group.get("rule"), bool(group.get("momentum"))
        shape = is_vector(parameter), parameter.ndim < 2
        key = *options, group.get("adjust_lr_fn"), *shape, parameter.dtype
        if key not in self._by_options:
            self._by_options[key] = kernel_of(*self.pair_of(group, parameter))
        return self._by_options[key]

    def row_of(self, group: Group, parameter: Tensor) -> Storage:
        """Return the storage that a group asks for."""
        row = get_storage(group["storage"])
        if is_vector(parameter) and row.vectors:
            row = get_storage(row.vectors)
        return row

    def storage_in(self, group: Group, parameter: Tensor, visible: str | None = None) -> Storage:
        """Return the storage of a parameter, or of one in another format."""
        return for_format(self.row_of(group, parameter), visible or dtype_name(parameter.dtype))

    def rule_in(self, group: Group, parameter: Tensor) -> AnyRule:
        """Return the rule that steps a parameter under a group's options."""
        if self.rule == PLAIN_SGD and group.get("momentum"):
            return SGD  # a schedule may ask for momentum before the first step
        if not isinstance(self.rule, MatrixRule):
            return self.rule
        if group.get("rule") == ADAMW.name:
            return ADAMW
        if is_vector(parameter):
            if self.rule == MUON and group.get("adjust_lr_fn") != "match_rms_adamw":
                raise RecipeError(
                    f"Cannot step a parameter of shape {tuple(parameter.shape)} by Muon because it "
                    "is no matrix.",
                    "Give vectors a group of their own: {'params': vectors, 'rule': 'adamw', 'lr': "
                    "3e-4}. Or set adjust_lr_fn='match_rms_adamw': one rate of AdamW serves both.",
                )
            return ADAMW
        if parameter.ndim < 2:
            raise RecipeError(
                f"Cannot step a parameter of shape {tuple(parameter.shape)} by '{self.rule.name}' "
                "because a flat part of a model has no matrices.",
                "Shard by FSDP2 (fully_shard), which keeps them.",
            )
        return self.rule

    def pair_of(
        self, group: Group, parameter: Tensor, visible: str | None = None
    ) -> tuple[AnyRule, Storage]:
        """Return the rule of a parameter, or of one in another format, and the storage with its
        states. Refuse odd pairs.
        """
        rule = self.rule_in(group, parameter)
        storage = self.storage_in(group, parameter, visible)
        if visible is None and parameter.dtype is not getattr(torch, storage.visible):
            raise RecipeError(
                f"storage '{group['storage']}' holds {storage.visible} weights, and a parameter of "
                f"shape {tuple(parameter.shape)} is {dtype_name(parameter.dtype)}.",
                "'word', 'exact' and others take bfloat16 and float16, in a param group of its own "
                "if other weights differ. For float64 call model.float(): storage 'float64' keeps "
                "masters and moments in it.",
            )
        storage = storage.with_states(rule.stored_states)
        refuse_pair(
            rule.name, storage, is_matrix=isinstance(rule, MatrixRule), is_adamw=rule == ADAMW
        )
        if storage.scaled and not getattr(rule, "monotone", True):
            raise RecipeError(
                f"Cannot step rule '{rule.name}' in storage '{storage.name}' because its states have "
                "scales by block, and the rule does not say that it is monotone.",
                "Take a storage such as 'word', or Rule(…, monotone=True) if larger gradients and "
                "states always give larger new states.",
            )
        return rule, storage

    def warn_of_others(self, groups: Sequence[Group]) -> None:
        """Warn where most elements have another storage than the one that their group asks for."""
        numbers: Counter[tuple[str, str]] = Counter()
        for group in groups:
            for parameter in group["params"]:
                if parameter.requires_grad:
                    storage = self.kernel_of(group, parameter).storage
                    numbers[group["storage"], storage.name] += parameter.numel()
        for (asked, name), number in numbers.items():
            is_other = asked.rpartition("/")[2] != name.rpartition("/")[2]
            if is_other and 2 * number > numbers.total() > LONGEST_VECTOR // 16:
                warn_caller(
                    f"{number:,} of {numbers.total():,} elements are in storage '{name}', not "
                    f"'{asked}', because of their format or shape. narrowgauge show storages has the "
                    "bytes of each; flat float32 parts of a model can have 'float32-states8'.",
                )

    def local_state(self, group: Group, parameter: Tensor, entry: Any = None) -> LocalState:
        """Return the local tensors of a state under a group's options, or of a new one without an
        ``entry``. Refuse one that does not fit.
        """
        kernel = self.kernel_of(group, parameter)
        extras = extras_of(kernel.rule, parameter.shape, group)
        if entry is None:
            entry = new_state(parameter, kernel, extras)
        return LocalState(parameter, entry, kernel, extras)

    def check_values(self, group: Group, parameter: Tensor, values: Mapping[str, Any]) -> None:
        """Refuse states of unknown names, and values of another shape than the parameter."""
        rule = self.rule_in(group, parameter)
        names = ["weight", *dict(rule.stored_states)]
        for name, value in values.items():
            is_state = name in names and local_of(value).shape == local_of(parameter).shape
            if name != "step" and not is_state:
                raise RecipeError(
                    f"Cannot adopt a '{name}' of shape {tuple(value.shape)} for a parameter of shape "
                    f"{tuple(parameter.shape)}: rule '{rule.name}' has {', '.join(names)}."
                )
