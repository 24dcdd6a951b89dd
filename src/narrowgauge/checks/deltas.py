"""What a step changed of the weights that a server sees: places and new values, bit for bit.

At a low rate a step changes about one in a hundred visible 16-bit weights. To send those alone is
lossless, since the bits are compared and not the values. Places travel as distances to the one
before, in 16 bits where they fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from narrowgauge.checks.set_up import inner_name
from narrowgauge.errors import DataError
from narrowgauge.numerics.dtensor import local_of
from narrowgauge.torch_support.edge_values import INTEGERS

_LAST: WeakKeyDictionary[nn.Module, dict[str, Tensor]] = WeakKeyDictionary()
"""The bits of the last call, by name."""
Change = tuple[Tensor, Tensor, tuple[int, ...]]
"""Distances between places, the new values, and the shape of this rank's part."""
Delta = dict[str, Change]


def delta(model: nn.Module) -> Delta:
    """Return what changed in a model's parameters since the last call: distances between places,
    new values, shapes, by name.

    The first call returns every value. Parameters without a change are left out. Tied ones are
    there under each name. Sharded parameters give the changes of this rank's part.

    Args:
        model: after a step. A copy of its parameters is kept until it goes.
    Returns:
        Tensors by name, for :func:`apply_delta` to a model with the same names and shapes.
            ``torch.save`` takes them.
    Example:
        >>> import torch, narrowgauge as ng
        >>> trained, served = torch.nn.Linear(4, 4).bfloat16(), torch.nn.Linear(4, 4).bfloat16()
        >>> ng.apply_delta(served, ng.delta(trained))
        >>> trained.weight.data[2, 1] = 3.0
        >>> changes = ng.delta(trained)
        >>> {name: values.tolist() for name, (gaps, values, shape) in changes.items()}
        {'weight': [3.0]}
        >>> ng.apply_delta(served, changes)
        >>> torch.equal(served.weight, trained.weight)
        True
    """
    last = _LAST.setdefault(model, {})
    changes = Delta()
    first_names = dict[int, str]()
    for name, values, shape in _parameters(model):
        first = first_names.setdefault(values.data_ptr(), name) if values.numel() else name
        if first != name:  # tied
            if first in changes:
                changes[name] = changes[first]
            continue
        bits = values.view(INTEGERS[values.element_size()])
        before = last.get(name)
        if before is None or before.shape != bits.shape or before.dtype != bits.dtype:
            places = torch.arange(bits.numel(), device=bits.device)
            last[name] = bits.clone()
        else:
            places = (bits != before).nonzero()[:, 0]
            before[places] = bits[places]
        if len(places):
            changes[name] = (_gaps(places), values[places], shape)
    return changes


@torch.no_grad()
def apply_delta(model: nn.Module, changes: Mapping[str, Change]) -> None:
    """Put the changes of :func:`delta` into a model with the same parameters.

    Args:
        model: whose parameters have the values of the last call, or any for the first one.
        changes: result of :func:`delta`.
    Raises:
        DataError: ``model`` lacks a parameter, or it has another dtype or shape. Nothing was
            written then.
    Example:
        >>> import torch, narrowgauge as ng
        >>> trained, served = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
        >>> ng.apply_delta(served, ng.delta(trained))
        >>> torch.equal(served.weight, trained.weight)
        True
    """
    parameters = {name: (values, shape) for name, values, shape in _parameters(model)}
    writes = []
    for name, (gaps, new, shape) in changes.items():
        places = gaps.to(torch.int64).cumsum(0)
        values, own_shape = parameters.get(name, (None, None))
        if values is None or values.dtype != new.dtype or own_shape != tuple(shape):
            raise DataError(
                f"Cannot apply a delta because the model has no {name} of this dtype and shape.",
                "Apply it to a model with the trained model's parameters.",
            )
        writes.append((values, places.to(values.device), new.to(values.device)))
    for values, places, new in writes:
        values[places] = new


def _parameters(model: nn.Module) -> Iterator[tuple[str, Any, tuple[int, ...]]]:
    """Yield each parameter's name, its flat values on this rank, a view of it, and their shape.

    Complex ones are pairs.
    """
    for name, parameter in model.named_parameters(remove_duplicate=False):
        values = local_of(parameter.detach())
        if values.is_complex():
            values = torch.view_as_real(values)
        if not values.is_contiguous():
            raise DataError(
                f"Cannot read the delta of {name} because it is not contiguous.",
                "Make its data contiguous.",
            )
        yield inner_name(name), values.view(-1), tuple(values.shape)


def _gaps(places: Tensor) -> Tensor:
    gaps = places.diff(prepend=places.new_zeros(1))
    if int(gaps.max()) < 2**15:
        return gaps.to(torch.int16)
    return gaps.to(torch.int32)
