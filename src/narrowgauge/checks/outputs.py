"""Record what the modules of a forward pass take and give, and find where two passes differ by more
than rounding explains.

How much rounding explains is measured: the pass runs again with every result off at random. A
*fine* pass is off by a rounding of float32 before each result is rounded as before: the sums have
another order, and the roundings the same places. A *coarse* pass is off by a rounding of each
result's own format: the roundings have other places too.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as global_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_leaves, tree_map, tree_unflatten

from narrowgauge.checks.adapters import name_without_adapters
from narrowgauge.checks.shadow import NARROW, is_float

FINEST = 2.0**-24
MARGIN = 4.0
"""Bounds over what random rounding gives."""
_SUMS = ("mm", "mv", "dot", "conv", "attention", "linear")
"""Parts of names of operations whose terms may cancel: their error is a part of a row's size."""
_POWERS = (2.0, 4.0)
"""Means over rows.

The second sees one wrong row of a thousand, the first small differences of all.
"""
_ADAPTERS = (".base_layer", ".lora_")
"""Parts of names of modules within an adapted layer: a merged layer is like it only as a whole."""
Outputs = dict[str, list[list[Tensor]]]
"""The float tensors of each call at each place, in the order of the first calls."""


def unit_of(dtype: torch.dtype) -> float:
    """Return the unit roundoff of a format; of wide ones, float32's."""
    return NARROW.get(dtype, FINEST)


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
    returned = dict[int, weakref.ref[Tensor]]()

    def keep(place: str, values: Any) -> Any:
        leaves, spec = tree_flatten(values)
        tensors = [x.detach().clone() for x in leaves if is_float(x)]
        if not tensors or any(part in place for part in _ADAPTERS):
            return values
        outputs.setdefault(place, []).append(tensors)
        if forced:
            exact = iter(forced[place][len(outputs[place]) - 1])
            floats = [next(exact, x).to(x.dtype, copy=True) for x in leaves if is_float(x)]
            leaves = [floats.pop(0) if is_float(x) else x for x in leaves]
            values = tree_unflatten(leaves, spec)
        returned.update({id(x): weakref.ref(x) for x in leaves if is_float(x)})
        return values

    def before(module: nn.Module, args: Any) -> Any:
        if module not in names:
            names.update(names_of(module))
        parent = stack[-1] if stack else None
        stack.append(names[module])
        tensors = [x for x in args if is_float(x)]
        is_made_here = any(returned.get(id(x), lambda: None)() is not x for x in tensors)
        if parent is None or not is_made_here:
            return args
        child = names[module].removeprefix(f"{parent}.")
        return keep(f"{parent or 'the model'}, before {child}", args)

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
        is_coarse: off by a rounding of the result's format, not only by one of float32.
        least: least unit roundoff: the coarser format of two passes.
    """

    def __init__(self, seed: int, is_coarse: bool, least: float) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._seed = seed
        self._is_coarse = is_coarse
        self._least = least

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        returns = func._schema.returns
        name = func._schema.name.split("::")[1]
        is_view = bool(returns) and all(
            r.alias_info is not None and not r.alias_info.is_write for r in returns
        )
        is_random = torch.Tag.nondeterministic_seeded in func.tags
        if is_view or is_random or "empty" in name:
            return func(*args, **kwargs)
        wide_args, wide_kwargs = tree_map(_widened, (args, kwargs))
        result = func(*args, **kwargs)
        floats = [x for x in tree_leaves(result) if is_float(x)]
        if not floats:
            return result
        try:
            wide = [x for x in tree_leaves(func(*wide_args, **wide_kwargs)) if is_float(x)]
        except (RuntimeError, NotImplementedError):
            wide = [x.double() for x in floats]
        has_sums = any(word in name for word in _SUMS)
        for x, value in zip(floats, wide, strict=False):
            if x.shape == value.shape and not torch.equal(x.double(), value):
                # The kernel's own error stays: only what the random numbers change is added.
                x += self._changed(value, x.dtype, has_sums).to(x.dtype) - value.to(x.dtype)
        return result

    def _changed(self, value: Tensor, dtype: torch.dtype, has_sums: bool) -> Tensor:
        size = value.abs()
        if has_sums and value.ndim:
            size = size + value.square().mean(-1, keepdim=True).sqrt()
        changed = value + max(FINEST, self._least) * size * _random(value)
        if self._is_coarse:
            changed = changed * (1 + unit_of(dtype) * _random(value))
        return torch.where(value.isfinite(), changed, value)

    def __enter__(self) -> RandomRounding:
        torch.manual_seed(self._seed)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self


def _random(like: Tensor) -> Tensor:
    """Return random numbers from -1 to 1."""
    return 2 * torch.rand_like(like) - 1


def _widened(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().double() if is_float(value) else value
    is_dtype = isinstance(value, torch.dtype) and value.is_floating_point
    return torch.float64 if is_dtype else value


def distance(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    """Return the largest distances of pairs of tensors, relative to their size: two means over
    rows, by :data:`_POWERS`.
    """
    distances = [torch.zeros(len(_POWERS))]
    for x, y in pairs:
        off, size = row_sizes(x, y)
        distances.append(_means((off / size).cpu()))
    return torch.stack(distances).amax(0)


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


def paired(first: Outputs, second: Outputs, place: str) -> list[tuple[Tensor, Tensor]]:
    """Return the tensors of a place in both passes, in equal shapes; none if they cannot be
    compared.

    The second pass may take a batch in several calls, along one dimension, or hold more positions
    (padding).
    """
    calls = first[place]
    others = second.get(place, [])
    if len(calls) == 1 and len(others) > 1 and all(len(o) == len(calls[0]) for o in others):
        joined = zip(calls[0], zip(*others, strict=True), strict=True)
        others = [[_joined(x, list(pieces)) for x, pieces in joined]]
    pairs = list[tuple[Tensor, Tensor]]()
    for tensors, theirs in zip(calls, others, strict=False):
        pairs += [(x, _cropped(x, y)) for x, y in zip(tensors, theirs, strict=False) if x.numel()]
    if len(calls) != len(others):
        return []
    return pairs if all(x.shape == y.shape for x, y in pairs) else []


def _joined(like: Tensor, pieces: list[Tensor]) -> Tensor:
    for dim in range(like.ndim):
        sizes = [x.shape[dim] for x in pieces if x.ndim == like.ndim]
        if len(sizes) == len(pieces) and sum(sizes) == like.shape[dim]:
            return torch.cat(pieces, dim)
    return pieces[0]


def _cropped(x: Tensor, y: Tensor) -> Tensor:
    """Return the first or last positions of ``y``, whichever are nearer to ``x``."""
    if x.ndim < 3 or x.ndim != y.ndim or y.shape[1] <= x.shape[1]:
        return y
    ends = [y[:, : x.shape[1]], y[:, -x.shape[1] :]]
    if ends[0].shape != x.shape:
        return y
    return min(ends, key=lambda end: float((end.double() - x.double()).abs().sum()))


class Place(NamedTuple):
    """A place where two passes differ.

    Args:
        value: relative distance.
        fine, coarse: its bounds.
        words: which positions, sequences and values differ.
    """

    name: str
    value: float
    fine: float
    coarse: float
    words: str


def places(
    first: Outputs,
    second: Outputs,
    fine: list[Outputs],
    coarse: list[Outputs],
    least: float,
    num_heads: int,
) -> Iterator[Place]:
    """Yield the places where two passes differ, in the order of the first one.

    Args:
        fine, coarse: the first pass again, with random roundings.
        least: distance of two formats, 0 if both passes have the same.
        num_heads: of attention, 0 if unknown.
    """
    for name in first:
        pairs = paired(first, second, name)
        value = distance(pairs)
        if not value.any():
            continue
        flip = torch.stack([_flip(x) for x, _ in pairs]).amax(0) + least
        bounds = []
        for passes in (fine, coarse):
            noise = [distance(paired(first, other, name)) for other in passes]
            bounds.append(MARGIN * torch.stack(noise).amax(0) + flip)
        is_wrong = bool((value > bounds[1]).any())
        which = int((value / bounds[is_wrong]).argmax())
        farthest = max(pairs, key=lambda pair: float(distance([pair])[1]))
        words = pattern(*farthest, float(bounds[is_wrong][1]), num_heads)
        limits = [float(bound[which]) for bound in bounds]
        yield Place(name, float(value[which]), limits[0], limits[1], words)


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
    where = run_of(differs.any(0), "position")
    rows = differs.any(1)
    words = [where]
    if not rows.all():
        words.append(run_of(rows, "sequence"))
    width = x.shape[2]
    least = bound * size / math.sqrt(width)
    columns = ((y.double() - x.double()).abs() > least[..., None]).flatten(0, 1).any(0).nonzero()
    if len(columns):
        start = int(columns[0])
        end = int(columns[-1])
        head = width // num_heads if num_heads and width % num_heads == 0 else 0
        if head and start // head == end // head and head < width:
            words.append(f"in head {start // head} of {num_heads}")
    return ", ".join(words)


def run_of(differs: Tensor, noun: str) -> str:
    """Say which of a row of places differ."""
    places = differs.nonzero()[:, 0].tolist()
    if len(places) == len(differs):
        return f"at all {noun}s"
    if len(places) == 1:
        return f"at {noun} {places[0]} alone"
    if places and places[-1] - places[0] == len(places) - 1:
        if places[-1] == len(differs) - 1:
            return f"from {noun} {places[0]} on"
        if places[0] == 0:
            return f"up to {noun} {places[-1]}"
    return f"at {len(places)} of {len(differs)} {noun}s"


def shapes(outputs: Outputs) -> dict[str, list[torch.Size]]:
    """Return the shapes of the first results of all calls.

    Passes with equal ones can be compared call by call.
    """
    return {place: [call[0].shape for call in calls] for place, calls in outputs.items()}
