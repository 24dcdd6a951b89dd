"""Cache casts of weights while the weights do not change.

The micro-batches of a step multiply the same weights. Inside :func:`cached_weights` each weight is
cast once for all of them. A cast is reused only for the same, unchanged storage (PyTorch counts
in-place changes) and until any optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from narrowgauge.matmul.operand import Operand
from narrowgauge.torch_support.torch_hooks import after_every_step
from narrowgauge.torch_support.torch_names import is_traced

_caches: list[dict[tuple[Any, ...], tuple[StorageWeakRef, Operand]]] = []
"""The cache of the contexts that are open: one, or none."""


def _clear(*_: Any) -> None:
    for cache in _caches:
        cache.clear()


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
    after_every_step(_clear)
    _caches.append(_caches[0] if _caches else {})
    try:
        yield
    finally:
        _caches.pop()


def cast_weight(weight: Tensor, key: tuple[Any, ...], make: Callable[[], Operand]) -> Operand:
    """Return a cast of a weight or of a view of it, from the cache if it has one under ``key``."""
    if not _caches or is_traced() or weight.is_inference():
        return make()
    cache = _caches[0]
    storage = weight.untyped_storage()
    # A tied weight may also be used transposed.
    layout = (weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
    place = (storage._cdata, weight._version, *layout, key)
    if place not in cache or cache[place][0].expired():
        for dead in [place for place, (owner, _) in cache.items() if owner.expired()]:
            del cache[dead]  # a layer may compute its weight in each call
        cache[place] = StorageWeakRef(storage), make()
    return cache[place][1]
