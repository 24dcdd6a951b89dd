"""Record what the modules of a forward pass take and return, and compare two passes place by place.

How much rounding explains is measured: the pass runs again with every result off at random, by a
rounding of float32 and by one of its own format.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from narrowgauge.measuring.adapters import name_without_adapters
from narrowgauge.measuring.beside import floats_in, is_float
from narrowgauge.measuring.units import FINEST, unit_of

_SUMS = re.compile("mm|mv|dot|conv|attention|linear")
"""Parts of names of operations whose terms may cancel: their error is a part of a row's size."""
Outputs = dict[str, list[list[Tensor]]]
"""The float tensors of each call at each place, in the order of the first calls."""


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the names of a model's modules, without wrappers' prefixes."""
    return {module: name_without_adapters(name) for name, module in model.named_modules()}


class _Recording:
    """Record the inputs and outputs of all modules that are called.

    An input that no module returned belongs to the code of the parent, before the call.

    Args:
        names: of known modules; modules without a name get one.
        forced: of an earlier pass, by place. A module there takes and returns these tensors, after
            the pass's own were recorded. So each place shows what it does itself.
    """

    def __init__(self, names: dict[nn.Module, str], forced: Outputs) -> None:
        self.names = names
        self.forced = forced
        self.outputs = Outputs()
        self._stack = list[str]()
        self._returned = dict[int, Any]()

    def before(self, module: nn.Module, args: Any) -> Any:
        if module not in self.names:
            self.names.update(names_of(module))
        name = self.names[module]
        if self._stack and not all(map(self._was_returned, floats_in(args))):
            parent = self._stack[-1]
            child = name.removeprefix(f"{parent}.")
            args = self._keep(f"{parent or 'the model'}, before {child}", args)
        self._stack.append(name)
        return args

    def after(self, module: nn.Module, args: Any, result: Any) -> Any:
        return self._keep(self._stack.pop() or "the model", result)

    def _keep(self, place: str, values: Any) -> Any:
        leaves, spec = tree_flatten(values)
        places = []
        for k, x in enumerate(leaves):
            if is_float(x):
                places.append(k)
        # A merged layer is like an adapted one only as a whole.
        if not places or ".base_layer" in place or ".lora_" in place:
            return values
        calls = self.outputs.setdefault(place, [])
        calls.append([leaves[k].detach().clone() for k in places])
        if place in self.forced:
            exact = self.forced[place][len(calls) - 1]
            for k, x in zip(places, exact, strict=True):
                leaves[k] = x.to(leaves[k].dtype, copy=True)
            values = tree_unflatten(leaves, spec)
        for k in places:
            self._returned[id(leaves[k])] = weakref.ref(leaves[k])
        return values

    def _was_returned(self, x: Tensor) -> bool:
        reference = self._returned.get(id(x))
        return reference is not None and reference() is x


@contextmanager
def recorded(names: dict[nn.Module, str], forced: Outputs) -> Iterator[Outputs]:
    """Record what modules take and return, by place."""
    recording = _Recording(names, forced)
    handles = [
        global_hooks.register_module_forward_pre_hook(recording.before),
        global_hooks.register_module_forward_hook(recording.after),
    ]
    try:
        yield recording.outputs
    finally:
        for handle in handles:
            handle.remove()


class RandomRounding(TorchDispatchMode):
    """Run each operation in float64, and change its result by what random numbers change there.

    Args:
        seed: of the random numbers.
        least: least unit roundoff: the coarser format of two passes.
    """

    def __init__(self, seed: int, least: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._unit = max(FINEST, least)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if func.is_view or "empty" in name:
            return func(*args, **(kwargs or {}))
        wide_args, wide_kwargs = tree_map(_wide, (args, kwargs or {}))
        result = func(*args, **(kwargs or {}))
        floats = floats_in(result)
        if not floats:
            return result
        try:
            wide = floats_in(func(*wide_args, **wide_kwargs))
        except (RuntimeError, NotImplementedError):
            wide = list(map(Tensor.double, floats))
        has_sums = _SUMS.search(name) is not None
        for x, value in zip(floats, wide, strict=False):
            if x.shape == value.shape and not torch.equal(x.double(), value):
                x += self._change(value, x.dtype, has_sums)
        return result

    def _change(self, value: Tensor, dtype: torch.dtype, has_sums: bool) -> Tensor:
        """Return what random numbers change; the kernel's own error stays."""
        size = value.abs()
        if has_sums and value.ndim:
            size = size + value.square().mean(-1, keepdim=True).sqrt()
        changed = value + self._unit * size * _random(value)
        changed = changed * (1 + unit_of(dtype) * _random(value))
        return (changed.to(dtype) - value.to(dtype)).where(value.isfinite(), 0)

    def __enter__(self) -> RandomRounding:
        torch.manual_seed(self._seed)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self


def _wide(x: Any) -> Any:
    """Return a tensor of floats, or the name of a format of floats, as float64."""
    if is_float(x):
        return x.double()
    if isinstance(x, torch.dtype) and x.is_floating_point:
        return torch.float64
    return x


def _random(like: Tensor) -> Tensor:
    """Return random numbers from -1 to 1."""
    return 2 * torch.rand_like(like) - 1


def distance(first: Outputs, second: Outputs, place: str) -> float:
    """Return the largest distance of a row at a place of two passes, relative to its length."""
    largest = 0.0
    for x, y in _pairs(first, second, place):
        off = torch.where(x == y, 0.0, y.double() - x.double())
        lengths = torch.atleast_1d(off).nan_to_num(nan=math.inf).norm(dim=-1)
        largest = max(largest, float((lengths / _row_lengths(x)).max()))
    return largest


def _pairs(first: Outputs, second: Outputs, place: str) -> Iterator[tuple[Tensor, Tensor]]:
    for call, other_call in zip(first[place], second[place], strict=True):
        for x, y in zip(call, other_call, strict=True):
            if x.numel():
                yield x, y


def _row_lengths(x: Tensor) -> Tensor:
    """Return the length of each row; of small rows a thousandth of the mean."""
    lengths: Tensor = torch.atleast_1d(x.double()).nan_to_num(posinf=0.0, neginf=0.0).norm(dim=-1)
    floor = 1e-3 * float(lengths.square().mean().sqrt()) + 1e-300
    return lengths.clamp(min=floor)


def last_bit(outputs: Outputs, place: str) -> float:
    """Return the distance that the last bit of one large value makes."""
    largest = 0.0
    for x, _ in _pairs(outputs, outputs, place):
        size = x.double().nan_to_num(posinf=0.0, neginf=0.0).abs().max()
        ulp = 2 * unit_of(x.dtype) * float(size)
        largest = max(largest, ulp / float(_row_lengths(x).median()))
    return largest


def shapes_of(outputs: Outputs) -> dict[str, list[list[torch.Size]]]:
    """Return the shapes of the tensors of each call at each place."""
    shapes = dict[str, list[list[torch.Size]]]()
    for place, calls in outputs.items():
        shapes[place] = []
        for call in calls:
            shapes[place].append([x.shape for x in call])
    return shapes
