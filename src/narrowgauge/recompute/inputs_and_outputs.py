"""The tensors in a model's nested inputs and outputs, and copies of inputs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for each in value.values():
            yield from tensors_in(each)
    elif isinstance(value, (tuple, list)):
        for each in value:
            yield from tensors_in(each)


def copied(value: Any) -> Any:
    """Nested inputs with every tensor copied, so that a loader may use its buffers again."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if type(value) is dict:
        return {name: copied(each) for name, each in value.items()}
    if type(value) in (tuple, list):
        return type(value)(copied(each) for each in value)
    return value


def not_copied(value: Any) -> Iterator[Any]:
    """The objects in nested inputs that :func:`copied` hands on as they are."""
    if type(value) is dict:
        for each in value.values():
            yield from not_copied(each)
    elif type(value) in (tuple, list):
        for each in value:
            yield from not_copied(each)
    elif not isinstance(value, Tensor):
        yield value


def float_outputs(output: Any) -> dict[str, Tensor]:
    """The floating-point tensors of a model's output by their place: of a tensor, a tuple, or a mapping (``ModelOutput``)."""
    if isinstance(output, Tensor):
        named: dict[str, Any] = {"": output}
    elif isinstance(output, Mapping):
        named = dict(output)
    elif isinstance(output, (tuple, list)):
        named = {str(place): each for place, each in enumerate(output)}
    else:
        named = {}
    return {place: t for place, t in named.items() if isinstance(t, Tensor) and t.is_floating_point()}
