"""Tuples, lists and dicts of tensors, such as what modules take and return."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor


def map_tensors(function: Callable[[Tensor], Tensor], value: Any) -> Any:
    """The same structure, named tuples and the outputs of transformers' models included, with every tensor replaced."""
    if isinstance(value, Tensor):
        return function(value)
    if isinstance(value, (list, tuple)):
        items = [map_tensors(function, item) for item in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    if isinstance(value, dict):
        changed = {key: map_tensors(function, item) for key, item in value.items()}
        return changed if type(value) is dict else type(value)(**changed)
    return value
