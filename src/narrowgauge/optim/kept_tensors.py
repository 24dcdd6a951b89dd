"""The tensors that an optimizer keeps between steps, as they lie in memory, for checks of that memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from torch import Tensor

from narrowgauge.numerics.shards import local_of
from narrowgauge.optim import packing
from narrowgauge.optim.stores import Store

if TYPE_CHECKING:
    from narrowgauge.optim.optimizer import Optimizer


def kept_tensors(optimizer: Optimizer) -> Iterator[tuple[str, Tensor, Tensor]]:
    """Every tensor of the model and of the optimizer's state that must not change between steps.

    Args:
        optimizer: after any number of steps; parameters that have taken none have no state.
    Returns:
        Of each tensor its name, itself and its parameter: planes of states by the fields that they hold (``"exp_avg of
        layer.weight"``), the visible weight under the parameter's name, and its tail. What an update reads comes before what it
        writes, so the first of several damaged ones is the cause. Packed words, and of DTensors this rank's part.

    Example:
        >>> import torch, narrowgauge as ng
        >>> model = torch.nn.Linear(2, 2, bias=False)
        >>> optimizer = ng.AdamW(model.named_parameters(), lr=1e-3, storage="float32")
        >>> model(torch.ones(2)).sum().backward(), optimizer.step()
        (None, None)
        >>> [name for name, _, _ in kept_tensors(optimizer)]
        ['exp_avg of weight', 'exp_avg_sq of weight', 'weight']
    """
    optimizer.settle()
    stores = optimizer._registry.stores
    for parameter, name in optimizer.parameter_names().items():
        store = stores.get(parameter)
        states, tails = ({}, {}) if store is None else _planes(store)
        for what, tensor in (*states.items(), ("", local_of(parameter).detach()), *tails.items()):
            yield f"{what} of {name}" if what else name, tensor, parameter


def _planes(store: Store) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The tensors of a store: those that hold states, and those that belong to the weight alone."""
    kept: tuple[dict[str, Tensor], dict[str, Tensor]] = {}, {}
    for plane in packing.planes(store.storage):
        fields = [field for field, _, _ in plane.fields]
        kept[set(fields) <= set(store.storage.beside)][", ".join(fields)] = store.words[plane.name].view(plane.dtype)
    for name, bound in store.bounds.items():
        kept[name == "weight"][f"{name} bound"] = bound
    kept[0].update(store.extras)
    return kept
