"""State that travels in an optimizer's ``state_dict()`` through frameworks that save it and nothing else of ours.

It is what :mod:`narrowgauge.assembly.resumption` carries for other loops, and the windows of the audit. It stands beside the
param groups, not in one: a framework that saves through
``torch.distributed.checkpoint`` drops it there, and saves it in a file of its own.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from narrowgauge.assembly import resumption
from narrowgauge.integrations.lightning.converted_models import restore_audit, saved_audit
from narrowgauge.matmul.swapping import linears_of
from narrowgauge.optim.optimizer import Optimizer


def carry_state(optimizer: Optimizer, model: nn.Module) -> None:
    """Let an optimizer's ``state_dict()`` hold, and ``load_state_dict`` restore, what a resumed run needs besides.

    Args:
        optimizer: of ours.
        model: the model whose parameters it steps, prepared.

    Example:
        >>> import torch, narrowgauge as ng
        >>> from narrowgauge.assembly.preparation import assemble
        >>> model, optimizer = assemble(torch.nn.Linear(16, 4), ng.parse("int8/word"), lr=1e-3, weight_decay=0.0)
        >>> carry_state(optimizer, model)
        >>> optimizer.state_dict()["narrowgauge"]["matmul_step"]
        0
    """

    def add(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {**state_dict, resumption.KEY: carried(optimizer, model)}

    given: dict[str, Any] = {}

    def take(_: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        found, rest = resumption.separated(state_dict)
        given.clear()
        given.update(found)
        return rest

    def put(_: Any) -> None:
        # Only now: loading states begins an audit of its own.
        restore(optimizer, model, given)

    optimizer.register_state_dict_post_hook(add)
    optimizer.register_load_state_dict_pre_hook(take)
    optimizer.register_load_state_dict_post_hook(put)


def carried(optimizer: Optimizer, model: nn.Module) -> dict[str, Any]:
    """What a resumed run needs besides weights and states, and the windows of its audit.

    The layers' step is there whatever they compute in: a recipe may change it, in a later phase or for an evaluation.
    """
    linears = linears_of(model)
    own = {} if linears is None else linears.state_dict()
    return {**saved_audit(optimizer), **resumption.carried(optimizer, model), **own}


def restore(optimizer: Optimizer, model: nn.Module, state: dict[str, Any]) -> None:
    """Give back what :func:`carried` returned."""
    if "windows" in state:
        restore_audit(optimizer, state)
    resumption.restore(optimizer, model, state)
