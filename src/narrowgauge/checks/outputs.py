"""Record what the modules of a forward pass take and give, and find where two passes differ by more
than rounding explains.

How much rounding explains is measured: the pass runs again with every result off at random, by a
rounding of float32 and by one of its own format: sums have another order, and roundings other places.
"""

from __future__ import annotations

import math
import re
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_unflatten

from narrowgauge.checks.adapters import name_without_adapters
from narrowgauge.checks.float32_copy import cast
from narrowgauge.checks.sites import floats_of, is_float
from narrowgauge.checks.units import FINEST, unit_of

MARGIN = 4.0
"""Bounds over what random rounding gives."""
_SUMS = re.compile("mm|mv|dot|conv|attention|linear")
"""Parts of names of operations whose terms may cancel: their error is a part of a row's size."""
_POWERS = (2.0, 4.0)
"""Means over rows.

The second sees one wrong row of a thousand, the first small differences of all.
"""
_ADAPTERS = re.compile(r"\.base_layer|\.lora_")
"""Parts of names of modules within an adapted layer: a merged layer is like it only as a whole."""
Outputs = dict[str, list[list[Tensor]]]
"""The float tensors of each call at each place, in the order of the first calls."""
Pairs = list[tuple[Tensor, Tensor]]


def names_of(model: nn.Module) -> dict[nn.Module, str]:
    """Return the names of a model's modules, without wrappers' prefixes."""
    return {module: name_without_adapters(name) for name, module in model.named_modules()}


@contextmanager
def recorded(names: dict[nn.Module, str], forced: Outputs | None = None) -> Iterator[Outputs]:
    """Record the inputs and outputs of all modules that are called. Modules without a name get one.

    An input that no module returned belongs to the code of the parent, before the call.

    Args:
        names: of known modules.
        forced: of an earlier pass with the same calls. Each module takes and returns its tensors,
            after the pass's own were recorded. So a place shows what it does itself.
    """
    outputs = Outputs()
    stack = list[str]()
    returned = {}

    def keep(place: str, values: Any) -> Any:
        leaves, spec = tree_flatten(values)
        floats = {k: x for k, x in enumerate(leaves) if is_float(x)}
        if not floats or _ADAPTERS.search(place):
            return values
        calls = outputs.setdefault(place, [])
        calls.append([x.detach().clone() for x in floats.values()])
        if forced:
            for k, exact in zip(floats, forced[place][len(calls) - 1], strict=False):
                leaves[k] = exact.to(leaves[k].dtype, copy=True)
            values = tree_unflatten(leaves, spec)
        for k in floats:
            returned[id(leaves[k])] = weakref.ref(leaves[k])
        return values

    def was_returned(x: Tensor) -> bool:
        reference = returned.get(id(x))
        return reference is not None and reference() is x

    def before(module: nn.Module, args: Any) -> Any:
        if module not in names:
            names.update(names_of(module))
        name = names[module]
        is_made_here = not all(was_returned(x) for x in args if is_float(x))
        if stack and is_made_here:
            parent = stack[-1]
            child = name.removeprefix(f"{parent}.")
            args = keep(f"{parent or 'the model'}, before {child}", args)
        stack.append(name)
        return args

    def after(module: nn.Module, args: Any, result: Any) -> Any:
        return keep(stack.pop() or "the model", result)

    handles = [
        global_hooks.register_module_forward_pre_hook(before),
        global_hooks.register_module_forward_hook(after),
    ]
    try:
        yield outputs
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
        wide_args, wide_kwargs = cast((args, kwargs or {}), torch.float64)
        result = func(*args, **(kwargs or {}))
        floats = floats_of(result)
        if not floats:
            return result
        try:
            wide = floats_of(func(*wide_args, **wide_kwargs))
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


def _random(like: Tensor) -> Tensor:
    """Return random numbers from -1 to 1."""
    return 2 * torch.rand_like(like) - 1


def distance(pairs: Pairs) -> Tensor:
    """Return the largest distances of pairs of tensors, relative to their size: two means over
    rows, by :data:`_POWERS`.
    """
    largest = torch.zeros(len(_POWERS))
    for x, y in pairs:
        off, size = row_sizes(x, y)
        largest = largest.maximum(_means((off / size).cpu()))
    return largest


def _means(values: Tensor) -> Tensor:
    return torch.stack([values.pow(p).mean().pow(1 / p) for p in _POWERS]).float()


def row_sizes(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the length of the difference in each row, and the row's length, of small rows a
    thousandth of the mean.
    """
    wide = torch.atleast_1d(x.double())
    off = torch.where(x == y, 0.0, y.double() - wide)
    size = wide.nan_to_num(posinf=0.0, neginf=0.0).norm(dim=-1)
    floor = 1e-3 * size.square().mean().sqrt() + 1e-300
    return off.nan_to_num(nan=math.inf).norm(dim=-1), size.clamp(min=float(floor))


def paired(first: Outputs, second: Outputs, place: str) -> Pairs:
    """Return the tensors of a place in both passes, in equal shapes; none if they cannot be
    compared.

    The second pass may take a batch in several calls, along one dimension, or hold more positions
    (padding).
    """
    calls = first[place]
    second_calls = second.get(place, [])
    if len(calls) == 1 < len(second_calls):
        second_calls = [
            [_joined(x, pieces) for x, *pieces in zip(calls[0], *second_calls, strict=False)]
        ]
    if len(calls) != len(second_calls):
        return []
    pairs = Pairs()
    for tensors, theirs in zip(calls, second_calls, strict=True):
        for x, y in zip(tensors, theirs, strict=False):
            y = _cropped(x, y)
            if x.shape != y.shape:
                return []
            if x.numel():
                pairs.append((x, y))
    return pairs


def _joined(like: Tensor, pieces: list[Tensor]) -> Tensor:
    """Join pieces along the dimension in which they make up a tensor."""
    for dim in range(like.ndim):
        if sum(x.shape[dim] for x in pieces if x.ndim == like.ndim) == like.shape[dim]:
            return torch.cat(pieces, dim)
    return pieces[0]


def _cropped(x: Tensor, y: Tensor) -> Tensor:
    """Return the first or last positions of ``y``, whichever are nearer to ``x``."""
    if x.ndim < 3 or x.ndim != y.ndim or y.shape[1] <= x.shape[1]:
        return y
    start = y[:, : x.shape[1]]
    end = y[:, -x.shape[1] :]
    if start.shape != x.shape:
        return y
    return min(start, end, key=lambda part: float((part.double() - x.double()).abs().sum()))


class Place(NamedTuple):
    """A place where two passes differ.

    Args:
        is_beyond: by more than random roundings explain.
        value: relative distance.
        words: which positions, sequences and values differ.
    """

    name: str
    is_beyond: bool
    value: float
    bound: float
    words: str


def places(
    first: Outputs,
    second: Outputs,
    passes: list[Outputs],
    least: float,
    num_heads: int,
) -> Iterator[Place]:
    """Yield the places where two passes differ, in the order of the first one.

    Args:
        passes: the first pass again, with random roundings.
        least: distance of two formats, 0 if both passes have the same.
        num_heads: of attention, 0 if unknown.
    """
    for name in first:
        pairs = paired(first, second, name)
        value = distance(pairs)
        if not value.any():
            continue
        flip = torch.stack([_flip(x) for x, _ in pairs]).amax(0) + least
        bound = _noise(first, passes, name) + flip
        worst = int((value / bound).argmax())
        farthest = max(pairs, key=lambda pair: float(distance([pair])[1]))
        words = pattern(*farthest, float(bound[1]), num_heads)
        is_beyond = bool((value > bound).any())
        yield Place(name, is_beyond, float(value[worst]), float(bound[worst]), words)


def _noise(first: Outputs, passes: list[Outputs], name: str) -> Tensor:
    distances = [distance(paired(first, repeated, name)) for repeated in passes]
    return MARGIN * torch.stack(distances).amax(0)


def _flip(x: Tensor) -> Tensor:
    """Return the distance that the last bit of one large value makes."""
    size = row_sizes(x, x)[1]
    largest = float(x.double().nan_to_num(posinf=0.0, neginf=0.0).abs().max())
    one_row = torch.zeros(size.numel())
    one_row[0] = 2 * unit_of(x.dtype) * largest / float(size.median())
    return _means(one_row)


def pattern(x: Tensor, y: Tensor, bound: float, num_heads: int) -> str:
    """Say where two tensors ``[sequences, positions, values]`` are farther apart than a bound."""
    if x.ndim != 3:
        return ""
    off, size = row_sizes(x, y)
    differs = off > min(bound, float((off / size).max()) / 2) * size
    words = [run_of(differs.any(0), "position")]
    rows = differs.any(1)
    if not rows.all():
        words.append(run_of(rows, "sequence"))
    width = x.shape[2]
    least = bound * size / math.sqrt(width)
    is_far = (y.double() - x.double()).abs() > least[..., None]
    columns = is_far.flatten(0, 1).any(0).nonzero()
    if len(columns) and num_heads > 1 and width % num_heads == 0:
        head = int(columns[0]) * num_heads // width
        if head == int(columns[-1]) * num_heads // width:
            words.append(f"in head {head} of {num_heads}")
    return ", ".join(words)


def run_of(differs: Tensor, noun: str) -> str:
    """Say which of a row of places differ."""
    places = differs.nonzero()[:, 0].tolist()
    if len(places) == len(differs):
        return f"at all {noun}s"
    if len(places) == 1:
        return f"at {noun} {places[0]} alone"
    is_run = bool(places) and places[-1] - places[0] == len(places) - 1
    if is_run and places[-1] == len(differs) - 1:
        return f"from {noun} {places[0]} on"
    if is_run and places[0] == 0:
        return f"up to {noun} {places[-1]}"
    return f"at {len(places)} of {len(differs)} {noun}s"


def shapes_of(outputs: Outputs) -> dict[str, list[torch.Size]]:
    """Return the shape of the first tensor of each call at each place."""
    shapes = {}
    for place, calls in outputs.items():
        shapes[place] = [call[0].shape for call in calls]
    return shapes
