"""Tensors that no optimizer steps: leaves of an autograd graph, and copies of a model, such as an average of its weights."""

from __future__ import annotations

import gc
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from narrowgauge.put_back import objects_of
from narrowgauge.torch_names import map_tensors


def graph_leaves(output: Any) -> list[Tensor]:
    """Return the tensors to whose gradients a backward pass from these outputs adds.

    Example:
        >>> import torch
        >>> weight, data = torch.ones(2, requires_grad=True), torch.ones(2)
        >>> [leaf is weight for leaf in graph_leaves({"loss": (weight * data).sum()})]
        [True]
    """
    nodes, visited, leaves = list[Any](), set[Any](), list[Tensor]()

    def begin(x: Tensor) -> Tensor:
        nodes.append(x.grad_fn)
        return x

    map_tensors(begin, output)
    while nodes:
        if (node := nodes.pop()) is None or node in visited:
            continue
        visited.add(node)
        nodes += [parent for parent, _ in node.next_functions]
        if hasattr(node, "variable"):
            leaves.append(node.variable)
    return leaves


def names_of(model: nn.Module, tensors: Iterable[Tensor]) -> list[str]:
    """Name tensors by their parameter, or by the attribute that holds them or their module, or by their shape."""
    names = {id(p): name for name, p in model.named_parameters()}
    for name, value in objects_of(model):
        if isinstance(value, Tensor):
            names.setdefault(id(value), name)
    return [names.get(id(x), f"a tensor {list(x.shape)}") for x in tensors]


def copies_of(model: nn.Module) -> list[dict[str, Tensor]]:
    """Return the parameters of each other module of this process that has parameters of the same names and shapes.

    Example:
        >>> import copy
        >>> model = nn.Linear(2, 1)
        >>> average = copy.deepcopy(model)
        >>> [parameters["weight"] is average.weight for parameters in copies_of(model)]
        [True]
    """
    tensors, copies = dict(model.named_parameters()), list[dict[str, Tensor]]()
    for other in gc.get_objects():
        # Code of other libraries is not called.
        if issubclass(type(other), nn.Module) and type(other).named_parameters is nn.Module.named_parameters:
            parameters = dict(other.named_parameters()) if "_modules" in vars(other) else {}
            is_alike = parameters.keys() == tensors.keys() and all(
                p.shape == tensors[n].shape for n, p in parameters.items()
            )
            if is_alike and {*parameters.values()}.isdisjoint(tensors.values()):
                copies.append(parameters)
    return copies
