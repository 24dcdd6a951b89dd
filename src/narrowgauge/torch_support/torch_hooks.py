"""Hooks on modules and optimizers of other libraries, which copy and pickle their hooks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch


def members_of(*optimizers: torch.optim.Optimizer) -> list[Any]:
    """Return the parameters of optimizers, as often as a group lists them."""
    members = list[Any]()
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            members += group["params"]
    return members


class OwnHook:
    """Hook a module or optimizer without entering its copies and pickles.

    Example:
        >>> import copy
        >>> OwnHook(lambda module: "seen")(None), copy.deepcopy(OwnHook(lambda module: "seen"))(None)
        ('seen', None)
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __reduce__(self) -> tuple[type[OwnHook], tuple[Any]]:
        return OwnHook, (_ignore,)


def _ignore(*_: Any) -> None:
    pass
