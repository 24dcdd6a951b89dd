"""State of a run besides weights and moments, carried in the optimizer's ``state_dict()``.

For the same bits, a resumed run needs the step that stochastic casts are keyed by, the amax histories of delayed scales, the step
of a reduction that rounds stochastically, and the loss scale. The trainer saves them in its checkpoints. In any other loop they
travel with ``optimizer.state_dict()``.

:func:`carry_state` puts them into the first param group, where ``torch.distributed.checkpoint`` keeps them: of an optimizer's
state it saves only what belongs to parameters and groups. The model's ``state_dict()`` is no place for them, since others load it
with ``strict=True``. Recipes that need none of this add nothing, so that their older checkpoints still match.

:func:`carry_state_and_audit` is for frameworks. It adds the windows of the audit, and puts everything beside the param groups.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from narrowgauge.matmul.swapping import NarrowLayers, linears_of
from narrowgauge.optim.optimizer import Optimizer

KEY = "narrowgauge"

_hooks: weakref.WeakKeyDictionary[Optimizer, list[RemovableHandle]] = weakref.WeakKeyDictionary()


def carry_state(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer's ``state_dict()`` hold, and ``load_state_dict`` restore, this state.

    A ``state_dict`` without it, from an earlier version or edited, loads with a warning.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "int8/word")
        >>> optimizer.state_dict()["param_groups"][0]["narrowgauge"]["matmul_step"]
        0
    """

    def add(state_dict: dict[str, Any]) -> dict[str, Any]:
        groups, state = state_dict["param_groups"], carried(optimizer, model)
        return {**state_dict, "param_groups": [{**groups[0], KEY: state}, *groups[1:]]} if state else state_dict

    def put(given: dict[str, Any], is_ours: bool) -> None:
        restore(optimizer, model, given)
        if is_ours and (lacks := sorted(carried(optimizer, model).keys() - given.keys())):
            warnings.warn(
                f"the optimizer state that was loaded lacks {', '.join(lacks)} of this recipe, without which training does not "
                "go on with the same bits: an earlier version saved it, or it was edited. Load ng.matmul.linears_of(model)'s and "
                "optimizer.loss_scaler's own state after it, if you saved them.",
                stacklevel=5,
            )

    _install(optimizer, add, put)


def carry_state_and_audit(optimizer: Optimizer, model: nn.Module) -> None:
    """Replace :func:`carry_state` for a framework that saves the optimizer's state and nothing else of Narrowgauge's.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model, optimizer = ng.prepare(torch.nn.Linear(16, 4), "int8/word")
        >>> carry_state_and_audit(optimizer, model)
        >>> optimizer.state_dict()["narrowgauge"]["matmul_step"]
        0
    """

    def add(state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, KEY: carried_with_audit(optimizer, model)}

    _install(optimizer, add, lambda given, _: restore_with_audit(optimizer, model, given))


def carry_nothing(optimizer: Optimizer) -> None:
    """Undo :func:`carry_state`, for a framework that saves this state itself."""
    for hook in _hooks.pop(optimizer, ()):
        hook.remove()


def _install(
    optimizer: Optimizer,
    add: Callable[[dict[str, Any]], dict[str, Any]],
    put: Callable[[dict[str, Any], bool], None],
) -> None:
    """Hook ``state_dict`` and ``load_state_dict`` of an optimizer, in place of earlier hooks.

    ``put`` restores what a loaded state held; its second argument is whether an optimizer of Narrowgauge's saved it.
    """
    given: dict[str, Any] = {}
    is_ours: list[bool] = []

    def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        found, rest = separated(state_dict)
        given.clear()
        given.update(found)
        is_ours[:] = [any("storage" in group for group in rest["param_groups"])]
        return rest

    carry_nothing(optimizer)
    _hooks[optimizer] = [
        optimizer.register_state_dict_post_hook(lambda _, state_dict: add(state_dict)),
        optimizer.register_load_state_dict_pre_hook(take),
        # Not before: loading states begins an audit of its own.
        optimizer.register_load_state_dict_post_hook(lambda _: put(given, is_ours[0])),
    ]


def carried(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """This state as numbers and tensors; empty for a recipe that needs none."""
    state: dict[str, Any] = {}
    if optimizer.loss_scaler is not None:
        state["loss_scaler"] = optimizer.loss_scaler.state_dict()
    if optimizer.reduction is not None and optimizer.reduction.row.is_stochastic:
        state["reduction_step"] = optimizer.reduction.step
    linears = linears_of(model)
    return state if linears is None or not _remembers(linears) else {**state, **linears.state_dict()}


def restore(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what :func:`carried` returned."""
    if optimizer.loss_scaler is not None and "loss_scaler" in state:
        optimizer.loss_scaler.load_state_dict(state["loss_scaler"])
    if optimizer.reduction is not None and "reduction_step" in state:
        optimizer.reduction.set_step(state["reduction_step"])
    linears = linears_of(model)
    if linears is not None and "matmul_step" in state:
        linears.load_state_dict(state)


def carried_with_audit(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """:func:`carried`, the windows of the audit, and the layers' step in any compute: a later phase may need it."""
    linears = linears_of(model)
    own = {} if linears is None else linears.state_dict()
    return {**saved_audit(optimizer), **carried(optimizer, model), **own}


def restore_with_audit(optimizer: Optimizer, model: nn.Module, state: Mapping[str, Any]) -> None:
    """Restore what :func:`carried_with_audit` returned."""
    if "windows" in state:
        restore_audit(optimizer, state)
    restore(optimizer, model, state)


def saved_audit(optimizer: Optimizer) -> dict[str, Any]:
    """The windows of an optimizer's audit and its count of skipped steps, which its own state does not hold."""
    optimizer.settle()
    names = optimizer.parameter_names()
    windows = {names[p]: torch.stack(list(rows)) for p, rows in optimizer.auditor.windows.items() if p in names}
    return {"num_skipped": optimizer.num_skipped, "windows": windows}


def restore_audit(optimizer: Optimizer, saved: Mapping[str, Any]) -> None:
    """Restore what :func:`saved_audit` returned."""
    optimizer.num_skipped = int(saved["num_skipped"])
    for parameter, name in optimizer.parameter_names().items():
        if name in saved["windows"]:
            optimizer.auditor.restore(parameter, saved["windows"][name])


def separated(state_dict: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split a loaded state into what was carried, beside the param groups or in one of them, and the rest."""
    found: dict[str, Any] = {}

    def without(place: dict[str, Any]) -> dict[str, Any]:
        found.update(place.get(KEY, {}))
        return {name: value for name, value in place.items() if name != KEY}

    rest = without(state_dict)
    return found, {**rest, "param_groups": [without(group) for group in rest["param_groups"]]}


def _remembers(linears: NarrowLayers) -> bool:
    """Whether a step of these layers depends on earlier steps or their number, in any compute that they had."""
    return bool(linears.histories()) or any(layer.is_keyed for layer in linears.layers.values())
