"""What the optimizer refuses: options out of range, parameters and gradients in the wrong format.

The table ``LAWS`` has one row per option of a rule; it is checked when a param group is added, loaded and stepped.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.machine.processor import care_for, is_left_slow
from narrowgauge.optim.rules.elementwise import ADAM, ADAMW, Rule
from narrowgauge.optim.rules.matrix import MatrixRule
from narrowgauge.optim.rules.subspaces import USUAL_PROJECTION
from narrowgauge.spec.storages import STORAGES, Storage, find
from narrowgauge.spec.update_rules import UPDATE_RULES, Laws, Range, refuse_matrix_rule

LAWS: dict[str, Laws] = {row.name: row.laws for row in UPDATE_RULES.values()}
"""What the options of each rule may be; a rule that is not here checks its own."""

_FLAGS = {
    "amsgrad": "No rule here stores the largest second moment; leave it out.",
    "fused": "Every step here is one fused kernel; leave it out.",
    "foreach": "Every step here is one fused kernel; leave it out.",
    "capturable": "A step asks the host for its rates and cannot be captured in a graph; leave it out.",
    "differentiable": "A step here cannot be differentiated; leave it out.",
}
HOW_TORCH_STEPS = ("fused", "foreach", "capturable", "differentiable")
"""Flags of ``torch.optim`` that choose how a step is computed and do not concern the state."""
_OF_THE_OPTIMIZER = ("max_grad_norm", "audit_every", "compile", "loss_scaler")
# torch's name for what makes an Adam an AdamW.
_DECOUPLED = {ADAM.name: False, ADAMW.name: True}


def check_options(options: Mapping[str, Any], rule: Rule | MatrixRule) -> None:
    """Refuse options, of a param group or the defaults of all, that a rule cannot obey.

    Raises:
        RecipeError: one that is out of range, that no rule here has, that belongs to the optimizer and not to a group, or
            another rule than the group may have.
    """
    for name in _OF_THE_OPTIMIZER:
        if name in options:
            raise RecipeError(
                f"a param group sets {name} = {options[name]}.", "Pass it to the optimizer: it applies to all groups."
            )
    check_step(options, rule)
    _check_values(options, LAWS.get(rule.name, {}))


def check_step(options: Mapping[str, Any], rule: Rule | MatrixRule) -> None:
    """:func:`check_options` of what may have been set since; a schedule may make a rate slightly negative."""
    for name, advice in _FLAGS.items():
        if options.get(name):
            raise RecipeError(f"{name} = {options[name]} was requested, which this optimizer does not have.", advice)
    decoupled = options.get("decoupled_weight_decay")
    if decoupled is not None and decoupled is not _DECOUPLED.get(rule.name, decoupled):
        raise RecipeError(
            f"decoupled_weight_decay = {decoupled} was requested, and the rule is '{rule.name}'.",
            f"Take ng.{'AdamW' if decoupled else 'Adam'}.",
        )
    known = [rule.name, *([ADAMW.name] if isinstance(rule, MatrixRule) else [])]
    if options.get("rule", rule.name) not in known:
        raise RecipeError(
            f"rule = {options['rule']!r} was requested in a param group of an optimizer whose rule is '{rule.name}'; it may "
            f"be {' or '.join(map(repr, known))}.",
            suggestion(str(options["rule"]).lower(), known) or "Build another optimizer for these parameters.",
        )
    _check_values(options, {**LAWS.get(rule.name, {}), "lr": Range(-math.inf, above=True)})


def check_one_device(parameters: Iterable[Tensor]) -> torch.device:
    """The device of all parameters of a step.

    Raises:
        RecipeError: they are on several.
    """
    devices = {parameter.device for parameter in parameters}
    if len(devices) > 1:
        raise RecipeError(
            f"one step was requested of parameters on {' and '.join(sorted(map(str, devices)))}.",
            "Make an optimizer for the parameters of each device.",
        )
    return devices.pop()


def refuse_capture(device: torch.device) -> None:
    """Refuse a step that a CUDA graph records.

    Raises:
        RecipeError: a graph is being captured.
    """
    if device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        raise RecipeError(
            "a CUDA graph is being captured, and each replay would repeat this step's learning rate and random bits.",
            "Capture the forward and backward passes alone, and call optimizer.step() after each replay.",
        )


def _check_values(options: Mapping[str, Any], laws: Laws) -> None:
    for name, law in laws.items():
        if name in options:
            law.check(name, options[name])


# ── storages, parameters and gradients ──────────────────────────────────────────────────────────────────────────────


def known_row(storage: object, own: Mapping[str, Storage]) -> Storage:
    """The row that ``storage`` names or is; ``own`` are rows that are not in the table, by name.

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
        names = {**STORAGES, **own}
        belongs = [name for name in names if name.endswith(f"/{storage}")]  # to a compute, which is part of its name
        near = suggestion(belongs[0] if belongs else storage, names) if isinstance(storage, str) else ""
        raise RecipeError(f"no storage is named {storage!r}.", f"{near} (narrowgauge show storages lists all.)".strip())
    return row


# By model and name: PyTorch does not move a DTensor that has a weak reference.
EXPECTED: WeakKeyDictionary[nn.Module, dict[str, Storage]] = WeakKeyDictionary()
"""How a framework's recipe stores the parameters of a model that it has converted and whose optimizer its user makes."""
USUAL_STORAGE = "word"
"""The storage of parameters for which neither the optimizer's user nor a recipe names one."""


def expected_row(parameters: Iterable[Tensor], named: str | Storage | None, rows: Mapping[str, Storage]) -> Storage:
    """The storage of a param group: as its maker ``named`` it, else as a recipe has converted its parameters for, else the usual.

    Raises:
        RecipeError: the recipe stores them otherwise, or in more than one storage.
    """
    members = set(parameters)
    models = [(rows, model.named_parameters()) for model, rows in EXPECTED.items() if rows]
    wanted = {rows[n].name: rows[n] for rows, named in models for n, p in named if p in members and n in rows}
    row = None if named is None else known_row(named, rows)
    if len(wanted) > 1:
        raise RecipeError(f"a param group holds parameters that their recipe stores as {_listed(wanted)}.", OF_RECIPE)
    if row is not None and wanted and row.name not in wanted:
        raise RecipeError(
            f"the optimizer was built with storage '{row.name}', and the recipe of its parameters stores {_listed(wanted)}.",
            "Leave storage out of the optimizer, or name the same one in the recipe.",
        )
    return row or next(iter(wanted.values()), None) or STORAGES[USUAL_STORAGE]


OF_RECIPE = "Take the groups of the recipe: return None from configure_optimizers, or the plugin's optimizer(module)."


def _listed(rows: Iterable[str]) -> str:
    return " and ".join(f"'{name}'" for name in sorted(rows))


def check_visible(parameter: Tensor, storage: Storage) -> None:
    """Refuse a parameter in another format than the storage's visible one."""
    if parameter.dtype is not getattr(torch, storage.visible):
        raise RecipeError(
            f"storage '{storage.name}' holds {storage.visible} weights, and a parameter of shape "
            f"{tuple(parameter.shape)} is {str(parameter.dtype).removeprefix('torch.')}.",
            "storage='float64/float64' takes it as it is, and so does narrowgauge.prepare with that recipe."
            if parameter.dtype is torch.float64
            else "narrowgauge.prepare converts a float32 model without losing the bits that are cut; "
            "storage='float32' takes it as it is.",
        )


def check_real(parameter: Tensor) -> None:
    """Refuse a parameter that has no values."""
    if parameter.is_meta:
        raise RecipeError(
            f"a parameter of shape {tuple(parameter.shape)} is on the meta device, where it has no values to store.",
            "Give the model its memory (to_empty) and values first, and build the optimizer after.",
        )


def check_rule(rule: object, storage: Storage) -> None:
    """Refuse a rule that cannot be computed in the storage's arithmetic."""
    if isinstance(rule, MatrixRule):
        refuse_matrix_rule(rule.name, storage)


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
    if gradient.numel() != parameter.numel():  # autograd keeps both equal until .data is another tensor
        raise RecipeError(
            f"a gradient has the shape {tuple(gradient.shape)}, and its parameter {tuple(parameter.shape)}.",
            "Drop the gradients (zero_grad) when a parameter is resized.",
        )
    return gradient


class SlowMatmulNotice(UserWarning):
    """Warns once that a training step's time goes into matmuls that this processor has no instructions for."""


def warn_of_slow_matmuls(groups: Sequence[dict[str, Any]]) -> None:
    """Warn once of bfloat16 matrices on a CPU that does not multiply bfloat16, where no model was prepared for it."""
    if not is_left_slow("bfloat16"):
        return
    if any(p.dtype is torch.bfloat16 and p.ndim > 1 and p.device.type == "cpu" for g in groups for p in g["params"]):
        care_for("bfloat16")  # warned of now
        warnings.warn(
            "this CPU does not multiply bfloat16, and PyTorch's own bfloat16 matmuls are 8 to 180 times slower here than "
            "float32's. narrowgauge.prepare(model, …) or narrowgauge.swap_linears(model, 'bfloat16') replaces them by "
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
        if "storage" in theirs and "proj_type" in mine:
            theirs.setdefault("proj_type", USUAL_PROJECTION)  # a group of ours leaves it out
        if theirs.setdefault("storage", mine["storage"]) != mine["storage"]:
            raise RecipeError(
                f"a state of storage '{theirs['storage']}' was given to an optimizer of storage '{mine['storage']}'.",
                "Build the optimizer with the storage the state was saved from, or take it over with ng.convert.",
            )
        for flag in HOW_TORCH_STEPS:
            theirs.pop(flag, None)  # does not concern the state
        check_options(theirs, rule)
        for name, value in mine.items():
            if name != "params":
                theirs.setdefault(name, value)
