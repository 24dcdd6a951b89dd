"""Operations and tensors for tracing: which non-finite values a tensor holds, and what an operator reads and writes.

The schema of a PyTorch operator declares what it writes and which results are views; what a schema does not declare is listed
in three short tables.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from narrowgauge.gauges.nan_origin.bad_value import ALLOCATES, BadValue, Operand, Phase
from narrowgauge.numerics.summation import flat_chunks

Kinds = frozenset[str]

# In-place operators that do not read the previous values.
_OVERWRITES = {
    "copy_", "fill_", "zero_", "normal_", "uniform_", "random_", "bernoulli_", "exponential_", "log_normal_", "cauchy_",
    "geometric_", "set_", "_foreach_copy_", "_foreach_zero_",
}  # fmt: skip
# Operators that write given numbers: an infinity among those is deliberate.
_FILLS = {
    "full", "full_like", "new_full", "scalar_tensor", "fill", "fill_", "masked_fill", "masked_fill_", "where",
    "constant_pad_nd", "index_fill", "index_fill_",
}  # fmt: skip


def nonfinite_kinds(x: Tensor) -> Kinds:
    """Which of ``nan``, ``+inf`` and ``-inf`` a tensor holds; only ``nan`` if it holds a NaN."""
    found: set[str] = set()
    for _, part in parts_of(x):
        low, high = torch.stack(_wide(part).aminmax()).tolist()
        if math.isfinite(low) and math.isfinite(high):
            continue
        found |= {"nan"} if math.isnan(low) else {f"{end:+}" for end in (low, high) if math.isinf(end)}
    return frozenset(found)


def parts_of(x: Tensor) -> Iterator[tuple[str, Tensor]]:
    """The floating-point tensors of a tensor, by attribute: itself, or the inner tensors of a subclass."""
    if hasattr(x, "__tensor_flatten__"):
        for name in x.__tensor_flatten__()[0]:
            # A DTensor names its mesh as well.
            for inner, part in parts_of(value) if isinstance(value := getattr(x, name), Tensor) else ():
                yield f".{name.lstrip('_')}{inner}", part
    elif x.layout is not torch.strided:
        if x.layout is torch.sparse_coo:
            yield from parts_of(x._values())
    elif is_float(x) and x.numel() and x.device.type != "meta" and _holds_values(x):
        yield "", x


def is_float(x: Tensor) -> bool:
    """Whether it may hold a NaN or an infinity."""
    return (x.dtype.is_floating_point or x.dtype.is_complex) and "float4" not in str(x.dtype)


def _holds_values(x: Tensor) -> bool:
    """False for fake tensors of a compiler's trace."""
    return type(x).__torch_dispatch__ is Tensor.__torch_dispatch__


def _wide(x: Tensor) -> Tensor:
    """Cast to a dtype with comparisons."""
    x = x.detach()
    if x.dtype.is_complex:
        return torch.view_as_real(x.resolve_conj())
    return x.float() if x.dtype.itemsize == 1 else x


class Labels:
    """Names of parameters, buffers and arguments, by their memory; keeps the tensors alive."""

    def __init__(self) -> None:
        self._named: dict[int, list[tuple[str, Tensor]]] = {}

    def add(self, name: str, x: Tensor) -> None:
        """Name a tensor; the first name of the same memory wins."""
        for _, part in parts_of(x):
            self._named.setdefault(part.untyped_storage()._cdata, []).append((name, part.detach()))

    def find(self, x: Tensor) -> tuple[str, Tensor] | None:
        """The name of the tensor that ``x`` is or is a view of, and that tensor."""
        for _, part in parts_of(x):
            place = part.storage_offset()
            for name, named in self._named.get(part.untyped_storage()._cdata, ()):
                if named.storage_offset() <= place < named.storage_offset() + named.numel():
                    return name, named
        return None

    def name_of(self, x: Tensor) -> str | None:
        """The name without the tensor."""
        found = self.find(x)
        return None if found is None else found[0]


def bad_value(phase: Phase, module: str, operation: str, x: Tensor, operands: list[tuple[str, Tensor]]) -> BadValue:
    """Describe a non-finite tensor and the operands it was made from."""
    part = next(part for _, part in parts_of(x) if nonfinite_kinds(part))
    num_bad, first, has_nan = 0, None, False
    for chunk, start in _chunks(part):
        places = (~chunk.isfinite()).nonzero()
        if first is None and len(places):
            first = start + int(places[0])
        num_bad, has_nan = num_bad + len(places), has_nan or bool(chunk.isnan().any())
    described = [(name + inner, p) for name, whole in operands for inner, p in parts_of(whole)]
    return BadValue(
        phase=phase,
        module=module,
        operation=operation,
        what="nan" if has_nan else "inf",
        shape=tuple(x.shape),
        dtype=_dtype_name(x),
        num_bad=num_bad,
        num_values=part.numel(),
        place=_unraveled(first or 0, part.shape),
        operands=tuple(_operand(place, name, p) for place, (name, p) in enumerate(described)),
    )


def _operand(position: int, name: str, x: Tensor) -> Operand:
    lows, highs, num_finite = [], [], 0
    for chunk, _ in _chunks(x):
        finite = chunk[chunk.isfinite()].abs()
        positive = finite[finite > 0]
        num_finite += len(finite)
        lows += [positive.min().item()] if len(positive) else []
        highs += [finite.max().item()] if len(finite) else []
    low, high = min(lows, default=None), max(highs, default=None)
    return Operand(position, name, tuple(x.shape), _dtype_name(x), low, high, x.numel() - num_finite)


def _chunks(x: Tensor) -> Iterator[tuple[Tensor, int]]:
    """Chunks of a tensor with their offsets: a full GPU has no room for copies of the whole."""
    start = 0
    for (chunk,) in flat_chunks(x.detach()):
        yield (chunk.abs() if chunk.dtype.is_complex else _wide(chunk)), start
        start += len(chunk)


def _unraveled(place: int, shape: torch.Size) -> tuple[int, ...]:
    index = []
    for size in reversed(shape):
        index.append(place % size)
        place //= size
    return tuple(reversed(index))


def nonfinite_numbers(position: int, args: Any, kwargs: Any) -> tuple[Operand, ...]:
    """Non-finite Python numbers among an operation's arguments, as operands numbered from ``position``."""
    found = [v for v in tree_leaves((args, kwargs)) if isinstance(v, float) and not math.isfinite(v)]
    return tuple(Operand(position + k, f"the number {v}", (), "float", None, None, 1) for k, v in enumerate(found))


def _dtype_name(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def operator_name(func: Any) -> str:
    """The name with its namespace: ``aten.mm``, ``narrowgauge::cast_input``."""
    space = getattr(func, "namespace", "")
    return f"{space}::{packet_name(func)}" if space == "narrowgauge" else str(getattr(func, "overloadpacket", func))


def packet_name(func: Any) -> str:
    """The name without namespace and overload."""
    return str(getattr(func, "overloadpacket", func)).rpartition(".")[2]


@lru_cache(None)
def is_view(func: Any) -> bool:
    """Whether its result is a view of a tensor that was already checked."""
    return bool(getattr(func, "is_view", False))


@lru_cache(None)
def writes(func: Any) -> tuple[frozenset[str], frozenset[str]]:
    """The arguments that it writes to, and those of them whose previous values it does not read."""
    schema = getattr(func, "_schema", None)
    found = [a for a in (schema.arguments if schema else ()) if a.alias_info is not None and a.alias_info.is_write]
    ignored = [a.name for a in found if a.is_out or packet_name(func) in _OVERWRITES]
    return frozenset(a.name for a in found), frozenset(ignored)


def is_deliberate(func: Any, arguments: Any) -> bool:
    """Whether a non-finite result is intended: it was given an infinity to write, or returns uninitialized memory."""
    given = any(isinstance(value, float) and math.isinf(value) for value in tree_leaves(arguments))
    return packet_name(func) in ALLOCATES or (packet_name(func) in _FILLS and given)


def named_tensors(func: Any, args: Any, kwargs: Any, but: Any) -> list[tuple[str, Tensor]]:
    """Its operands by the names in its schema, with an index for lists."""
    schema = getattr(func, "_schema", None)
    names = [a.name for a in schema.arguments] if schema else []
    names += [str(place) for place in range(len(names), len(args))]
    found = []
    for name, value in [*zip(names, args, strict=False), *kwargs.items()]:
        if name not in but:
            leaves = [x for x in tree_leaves(value) if isinstance(x, Tensor) and is_float(x)]
            found += [(f"{name}[{k}]" if isinstance(value, (list, tuple)) else name, x) for k, x in enumerate(leaves)]
    return found
