"""Hooks on modules and optimizers of other people, which copy and pickle what they hang on."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class OwnHook:
    """A hook that a copy or a pickle does not have: an average of the weights is not what is trained.

    Example:
        >>> import copy
        >>> OwnHook(lambda module: "seen")(None), copy.deepcopy(OwnHook(lambda module: "seen"))(None)
        ('seen', None)
    """

    def __init__(self, call: Callable[..., Any]) -> None:
        self._call = call

    def __call__(self, *args: Any) -> Any:
        return self._call(*args)

    def __deepcopy__(self, _: Any) -> OwnHook:
        return OwnHook(_nothing)

    def __reduce__(self) -> tuple[type[OwnHook], tuple[Any]]:
        return OwnHook, (_nothing,)


def _nothing(*_: Any) -> None:
    pass
