"""What the optimizer refuses, in one line each: options out of range, parameters and gradients in the wrong format."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.optim.options import HOW_TORCH_STEPS, check_options
from narrowgauge.optim.rules.elementwise import Rule
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.spec.processor import care_for, is_left_slow
from narrowgauge.spec.storages import STORAGES, Storage, find


def known_row(storage: object, own: Mapping[str, Storage]) -> Storage:
    """The row that ``storage`` names or is.

    Args:
        storage: a name or a row.
        own: rows that are not in the table, by name.
    Returns:
        The row.
    Raises:
        RecipeError: no such name, or a row that has the name of another.
    """
    if isinstance(storage, Storage):
        if STORAGES.get(storage.name, storage) != storage:
            raise RecipeError(
                f"a storage of other codes was given under the name '{storage.name}' of the table's own row.",
                "Give it a name of its own: dataclasses.replace(row, name=…).",
            )
        return storage
    row = (own.get(storage) or find(storage)) if isinstance(storage, str) else None
    if row is None:
        near = suggestion(storage, {**STORAGES, **own}) if isinstance(storage, str) else ""
        raise RecipeError(f"no storage is named {storage!r}.", f"{near} (narrowgauge show storages lists all.)".strip())
    return row


def check_visible(parameter: Tensor, storage: Storage) -> None:
    """Refuse a parameter in another format than the storage's visible one."""
    if parameter.dtype is not getattr(torch, storage.visible):
        raise RecipeError(
            f"storage '{storage.name}' holds {storage.visible} weights, and a parameter of shape "
            f"{tuple(parameter.shape)} is {str(parameter.dtype).removeprefix('torch.')}.",
            "narrowgauge.prepare converts a float32 model without losing the bits that are cut; "
            "storage='float32' takes it as it is.",
        )


def check_real(parameter: Tensor) -> None:
    """Refuse a parameter that has no values."""
    if parameter.is_meta:
        raise RecipeError(
            f"a parameter of shape {tuple(parameter.shape)} is on the meta device, where nothing can be kept of it.",
            "Give the model its memory (to_empty) and values first, and build the optimizer after.",
        )


def check_storage(asked: str, made: str) -> None:
    """Refuse another storage of a group than its states were made in."""
    if asked != made:
        raise RecipeError(
            f"a group's storage was changed to '{asked}', and its states are kept in '{made}'.",
            "Build a new optimizer with that storage, and take the state over with ng.convert, or clear optimizer.state.",
        )


def check_rule(rule: object, storage: Storage) -> None:
    """Refuse a rule whose arithmetic the storage's own cannot be."""
    if isinstance(rule, MatrixRule) and storage.arithmetic != "float32":
        raise RecipeError(
            f"rule '{rule.name}' was asked for with storage '{storage.name}', in whose arithmetic of expansions a matrix "
            "product is not defined.",
            f"Take '{storage.cure}', or an elementwise rule.",
        )


def check_unchanged(rule: str, shapes: Mapping[str, Any], new_rule: str, wanted: Mapping[str, Any]) -> None:
    """Refuse options that a parameter's states were not made for: another rule, or states of other shapes.

    Args:
        rule, shapes: what steps the parameter, and its states' shapes by name.
        new_rule, wanted: the same, as the options now ask for.
    """
    advice = "Set it before the first step, or build a new optimizer."
    if new_rule != rule:
        raise RecipeError(f"rule '{new_rule}' was set for a parameter whose states are those of '{rule}'.", advice)
    for name in wanted.keys() & shapes.keys():
        if tuple(wanted[name]) != tuple(shapes[name]):
            raise RecipeError(
                f"an option was set under which '{name}' of rule '{rule}' has the shape {tuple(wanted[name])}, and it was "
                f"made with {tuple(shapes[name])}.",
                advice,
            )


def check_range(name: str, value: float, low: float, high: float = math.inf, *, above: bool = False) -> None:
    """Refuse an option outside ``[low, high)``, or outside ``(low, high)`` where ``above``; NaN is outside of all."""
    if not (low < value if above else low <= value) or not value < high:
        law = f"{'above' if above else 'at least'} {low:g}{'' if high == math.inf else f' and below {high:g}'}"
        raise RecipeError(f"{name} = {value} was asked for; it must be {law} and finite.")


def gradient_of(parameter: Tensor) -> Tensor:
    """A parameter's gradient, refused where the kernels could not take it."""
    gradient = parameter.grad
    assert gradient is not None
    if gradient.is_sparse:
        raise RecipeError(
            "a gradient is sparse, and the update rules take dense ones.", "Build the embedding with sparse=False."
        )
    if gradient.dtype is not parameter.dtype:
        raise RecipeError(
            f"a gradient is {gradient.dtype} and its parameter of shape {tuple(parameter.shape)} is {parameter.dtype}.",
            "Leave gradients in their parameter's format.",
        )
    if gradient.numel() != parameter.numel():  # autograd holds them alike until .data is another tensor
        raise RecipeError(
            f"a gradient has the shape {tuple(gradient.shape)}, and its parameter {tuple(parameter.shape)}.",
            "Drop the gradients (zero_grad) when a parameter is resized.",
        )
    return gradient


class SlowMatmulNotice(UserWarning):
    """Told once: the time of a training step goes into matmuls that this processor has no instructions for."""


def tell_slow_matmuls(groups: Sequence[dict[str, Any]]) -> None:
    """Warn once of bfloat16 matrices on a CPU that does not multiply bfloat16, where no model was prepared for it."""
    if not is_left_slow("bfloat16"):
        return
    if any(p.dtype is torch.bfloat16 and p.ndim > 1 and p.device.type == "cpu" for g in groups for p in g["params"]):
        care_for("bfloat16")  # told
        warnings.warn(
            "this CPU does not multiply bfloat16, and PyTorch's own bfloat16 matmuls are 8 to 180 times slower here than "
            "float32's. narrowgauge.prepare(model, …) or narrowgauge.swap_linears(model, 'bfloat16') lets them go by "
            "float32 products with the same values.",
            SlowMatmulNotice,
            stacklevel=6,
        )


def agree(groups: Sequence[dict[str, Any]], saved: Sequence[dict[str, Any]], rule: Rule | MatrixRule) -> None:
    """Refuse saved param groups of other sizes, storages or rules, and fill in what those of plain ``torch.optim`` lack.

    Raises:
        ValueError: the sizes differ, as in ``torch.optim``.
        RecipeError: a storage differs, or an option that the rule cannot obey.
    """
    if [len(g["params"]) for g in saved] != [len(g["params"]) for g in groups]:
        raise ValueError("loaded state dict has parameter groups of other sizes than the optimizer's")
    for mine, theirs in zip(groups, saved, strict=True):
        if theirs.setdefault("storage", mine["storage"]) != mine["storage"]:
            raise RecipeError(
                f"a state of storage '{theirs['storage']}' was given to an optimizer of storage '{mine['storage']}'.",
                "Build the optimizer with the storage the state was saved from, or take it over with ng.convert.",
            )
        for flag in HOW_TORCH_STEPS:
            theirs.pop(flag, None)  # says nothing about a state
        check_options(theirs, rule)
        for name, value in mine.items():
            if name != "params":
                theirs.setdefault(name, value)
