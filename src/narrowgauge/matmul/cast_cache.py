"""Cache casts of weights while the weights do not change.

The micro-batches of a step multiply the same weights. Inside :func:`cached_weights` each weight is
cast once for all of them. A cast is reused only for the same, unchanged storage (PyTorch counts
in-place changes) and until any optimizer steps.

A weight that was gathered from other ranks as codes has no values. :func:`give_cast` sets its cast
(:mod:`narrowgauge.matmul.fsdp_gather`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.operand import Operand
from narrowgauge.torch_support.torch_hooks import after_every_step
from narrowgauge.torch_support.torch_names import is_traced

Key = tuple[Any, ...]


class _Casts(NamedTuple):
    storage: StorageWeakRef
    version: int
    casts: dict[Key, Operand]


class _Gathered(NamedTuple):
    storage: StorageWeakRef
    key: Key
    make: Callable[[], Operand]


_depth = 0
_cached: dict[Key, _Casts] = {}
_gathered: dict[int, _Gathered] = {}


def _clear(*_: Any) -> None:
    _cached.clear()


@contextmanager
def cached_weights() -> Iterator[None]:
    """Cast each weight once inside this context and reuse the cast until the weight changes, for
    the micro-batches of a step.

    Invariant: the same bits as without it. PyTorch does not count a change through
    ``parameter.data``: leave the context first, or step with a subclass of
    ``torch.optim.Optimizer``.

    Returns:
        A context manager.
    Cost: the casts stay in memory, one or two a weight: 1 byte a parameter for 8 bits, 0.5 for four
    native bits, 2 if emulated.
    Example:
        >>> with cached_weights():
        ...     pass  # forward and backward of every micro-batch
    """
    global _depth
    after_every_step(_clear)
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if not _depth:
            _clear()


def cast_weight(weight: Tensor, key: Key, make: Callable[[], Operand]) -> Operand:
    """Return a cast of a weight or of a view of it, from the cache if it has one under ``key``."""
    if is_traced() and _gathered:
        raise RecipeError(
            "Cannot compile a layer whose weight was gathered as codes because a graph cannot look "
            "them up.",
            "Leave out narrow_gather, or do not compile.",
        )
    if is_traced() or not (_depth or _gathered):
        return make()
    storage = weight.untyped_storage()
    if (gathered := _gathered.get(storage._cdata)) is not None and not gathered.storage.expired():
        if key != gathered.key:
            raise RecipeError(
                "Cannot cast a weight because only the codes of another cast were gathered.",
                "Leave out narrow_gather, or do not call linears.set_compute.",
            )
        return gathered.make()
    if not _depth or weight.is_inference():
        return make()
    # A tied weight may also be used transposed.
    place = (storage._cdata, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
    entry = _cached.get(place)
    if entry is None or entry.version != weight._version or entry.storage.expired():
        _drop_dead(_cached)  # a layer may compute its weight in each call
        entry = _cached[place] = _Casts(StorageWeakRef(storage), weight._version, {})
    if key not in entry.casts:
        entry.casts[key] = make()
    return entry.casts[key]


def give_cast(weight: Tensor, key: Key, make: Callable[[], Operand]) -> None:
    """Set the cast that :func:`cast_weight` returns for a gathered weight, until the next call for
    it or its storage is freed.
    """
    storage = weight.untyped_storage()
    if storage._cdata not in _gathered:
        _drop_dead(_gathered)
    _gathered[storage._cdata] = _Gathered(StorageWeakRef(storage), key, make)


def _drop_dead(weights: dict[Any, Any]) -> None:
    for place in [place for place, entry in weights.items() if entry.storage.expired()]:
        del weights[place]
