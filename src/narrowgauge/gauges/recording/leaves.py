"""Tensors that no optimizer steps: names of tensors with a gradient, and copies of a model, such as
an average of its weights.
"""

from __future__ import annotations

import gc
from collections.abc import Iterable

from torch import Tensor, nn

from narrowgauge.torch_support.put_back import objects_of


def names_of(model: nn.Module, tensors: Iterable[Tensor]) -> list[str]:
    """Name tensors by their parameter, or by the attribute that holds them or their module, or by
    their shape.
    """
    names = {id(p): name for name, p in model.named_parameters()}
    for name, value in objects_of(model):
        if isinstance(value, Tensor):
            names.setdefault(id(value), name)
    return [names.get(id(x), f"a tensor {list(x.shape)}") for x in tensors]


def copies_of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return the parameters of each other module of this process that has parameters of the same
    names and shapes.
    """
    tensors = dict(model.named_parameters())
    copies = list[dict[str, Tensor]]()
    for other in gc.get_objects():
        # Code of other libraries is not called.
        if (
            issubclass(type(other), nn.Module)
            and type(other).named_parameters is nn.Module.named_parameters
        ):
            parameters = dict(other.named_parameters()) if "_modules" in vars(other) else {}
            is_alike = parameters.keys() == tensors.keys() and all(
                p.shape == tensors[n].shape for n, p in parameters.items()
            )
            if is_alike and {*parameters.values()}.isdisjoint(tensors.values()):
                copies.append(parameters)
    return copies
