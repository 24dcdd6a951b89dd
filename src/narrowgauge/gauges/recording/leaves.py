"""Tensors that no optimizer steps: names of tensors with a gradient, and copies of a model, such as
an average of its weights.
"""

from __future__ import annotations

import gc
import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Set

import torch
from torch import Tensor, nn

from narrowgauge.analysis.kinds import KINDS
from narrowgauge.analysis.reading import Reading, of_all
from narrowgauge.analysis.thresholds import SETTLED
from narrowgauge.checks.step_samples import evenly_spread
from narrowgauge.gauges.recording.twin import on_host
from narrowgauge.spec.formats import dtype_name
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
    names and shapes as the model or a part of it, by their names in the model.
    """
    tensors = {*model.parameters()}
    parts = dict[Signature, str]()
    for prefix, module in model.named_modules():
        signature = _signature(dict(module.named_parameters()))
        if len(signature) > 1 or not prefix:
            parts.setdefault(signature, prefix)
    copies = list[dict[str, Tensor]]()
    for parameters in _others(tensors):
        prefix = parts.get(_signature(parameters))
        if prefix is None:
            continue
        start = f"{prefix}." if prefix else ""
        copies.append({f"{start}{name}": p for name, p in parameters.items()})
    copies.sort(key=len, reverse=True)
    outermost = []
    taken = set[Tensor]()
    for copied in copies:
        if taken.isdisjoint(copied.values()):
            outermost.append(copied)
            taken.update(copied.values())
    return outermost


Signature = tuple[tuple[str, torch.Size], ...]


def _signature(parameters: Mapping[str, Tensor]) -> Signature:
    return tuple((name, p.shape) for name, p in parameters.items())


def _others(tensors: Set[Tensor]) -> Iterator[dict[str, Tensor]]:
    """Yield the parameters of each module of this process that has none of some tensors."""
    for candidate in gc.get_objects():
        kind = type(candidate)
        # Code of other libraries is not called.
        if not issubclass(kind, nn.Module) or "_modules" not in vars(candidate):
            continue
        if kind.named_parameters is not nn.Module.named_parameters:
            continue
        parameters = dict(candidate.named_parameters())
        if parameters and tensors.isdisjoint(parameters.values()):
            yield parameters


class Averages:
    """Copies of the model's weights that the loop writes in every step, as an average of them.

    A copy of the best weights is not written in every step, and another model has an optimizer.

    Args:
        copies: the parameters of other models of the same shapes.
        trained: the watched weights.
        step: the present one.
    """

    def __init__(
        self, copies: Iterable[Mapping[str, Tensor]], trained: Mapping[str, Tensor], step: int
    ) -> None:
        self._step = step
        self._copies: list[tuple[str, weakref.ref[Tensor], int, Tensor]] = []
        for copy in copies:
            for name, p in copy.items():
                if name in trained and not p.is_meta:
                    start = evenly_spread(p).clone()
                    self._copies.append((name, weakref.ref(p), p._version, start))

    def readings(
        self,
        step: int,
        start: Mapping[str, Tensor],
        elements: Callable[[str], Tensor],
        stepped: Iterable[Tensor],
    ) -> Iterator[Reading]:
        """Yield an average that ran away, and the averages that do not move.

        Args:
            start: elements of the weights that moved, when the watch began.
            elements: reads the present ones.
            stepped: parameters with an optimizer.
        """
        stepped_params = {*stepped}
        written = []
        norms = []
        for name, reference, version, first in self._copies:
            p = reference()
            if (
                p is None
                or p in stepped_params
                or p._version - version < SETTLED
                or name not in start
            ):
                continue
            values = evenly_spread(p)
            written.append((name, dtype_name(p.dtype)))
            # An average may be on the CPU.
            tensors = (values - first, values, start[name], elements(name))
            norms.append(torch.stack([x.double().norm().to(values.device) for x in tensors]))
        kind = KINDS["average-apart"]
        still = {}
        runaways = []
        for (name, format), (change, size, *sizes) in zip(written, on_host(norms), strict=True):
            largest = max(sizes)
            if largest < math.inf and not size <= kind.bound * largest:
                runaways.append((name, size, largest))
            if change == 0 and step >= self._step + SETTLED:
                still[name] = format
        for name, size, largest in runaways[:1]:
            yield kind.reading(name, size / largest, step=step, size=size, largest=largest)
        formats = of_all(dict.fromkeys(still.values()))
        yield from KINDS["average-unmoved"].of(still, step, formats=formats)
