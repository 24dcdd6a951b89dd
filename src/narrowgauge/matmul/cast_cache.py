"""Casts that are made once: of weights, while they do not change, and of an input that several layers get.

*Weights.* The micro-batches of a step multiply the same weights; inside :func:`cached_weights` each is cast once for all of
them. A cast is reused only for the same storage, unchanged since (PyTorch counts in-place changes) and before any optimizer's
next step. A compiler's graph sees none of this: a matmul looks here for the cast of its weight when it runs.

*Given casts.* A weight that was gathered from other ranks as codes has no values of its own; :func:`give_casts` says what its
casts are (:mod:`narrowgauge.matmul.narrow_gather`).

*Inputs.* In eager mode, q, k and v get the same input, and so do gate and up. :class:`LastCast` remembers the last cast, by the
storage it was made from and PyTorch's count of that storage's changes, and gives it to *another* layer with the same input. A
layer that calls again has a new input, even at the same address. A compiler merges equal calls itself and may write another
tensor where this one was, so compiled code never comes here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.optim.optimizer import register_optimizer_step_post_hook

from narrowgauge.errors import RecipeError
from narrowgauge.matmul.operand import Operand

Key = tuple[Any, ...]


@dataclass
class _Kept:
    """The casts of one weight, and the version of the weight that they were made from."""

    storage: StorageWeakRef
    version: int
    casts: dict[Key, Operand] = field(default_factory=dict)


class _Cache:
    """The cached casts, by storage; empty outside :func:`cached_weights`."""

    def __init__(self) -> None:
        self.depth = 0
        self.weights: dict[tuple[Any, ...], _Kept] = {}

    def forget_dead(self) -> None:
        """Drop the casts of freed tensors: a layer may compute its weight in each call."""
        for place in [place for place, kept in self.weights.items() if kept.storage.expired()]:
            del self.weights[place]

    def clear(self, *_: Any) -> None:
        """Drop all casts: a step may have changed any weight."""
        self.weights.clear()


_CACHE = _Cache()

after_every_step = cache(register_optimizer_step_post_hook)
"""Have a function called after the steps of every optimizer; once, however often this is asked."""


@contextmanager
def cached_weights() -> Iterator[None]:
    """Within it, each weight is cast once, and the cast is reused until the weight changes: for the micro-batches of a step.

    Invariant: the same bits as without. PyTorch does not count a change through ``parameter.data``: leave the scope
    first, or step with a subclass of ``torch.optim.Optimizer``.

    Returns:
        A context manager.
    Cost: the casts stay in memory: 1 byte per parameter for int8 and native float8, half of one for native four bits, 2 where
    emulated, separately for ``output`` and ``grad_input`` unless they share a cast.
    Example:
        >>> with cached_weights():
        ...     pass  # forward and backward of every micro-batch
    """
    after_every_step(_CACHE.clear)
    _CACHE.depth += 1
    try:
        yield
    finally:
        _CACHE.depth -= 1
        if not _CACHE.depth:
            _CACHE.clear()


def cast_weight(weight: Tensor, key: Key, make: Callable[[], Operand]) -> Operand:
    """A cast of a weight or of a view of it, from the cache if it holds one under ``key``."""
    storage = weight.untyped_storage()
    if (given := _GIVEN.get(storage._cdata)) is not None and not given.storage.expired():
        return given.cast(key)
    if not _CACHE.depth or weight.is_inference():
        return make()
    # A tied weight may also be used as its transpose.
    place = (storage._cdata, weight.storage_offset(), weight.shape, weight.stride(), weight.dtype)
    kept = _CACHE.weights.get(place)
    if kept is None or kept.version != weight._version or kept.storage.expired():
        _CACHE.forget_dead()
        kept = _CACHE.weights[place] = _Kept(StorageWeakRef(storage), weight._version)
    if key not in kept.casts:
        kept.casts[key] = make()
    return kept.casts[key]


@dataclass
class _Given:
    """The casts of a weight without values, and the error message where any other is needed."""

    storage: StorageWeakRef
    casts: dict[Key, Callable[[], Operand]]
    missing: str

    def cast(self, key: Key) -> Operand:
        if key not in self.casts:
            raise RecipeError(
                self.missing, "Shard with reshard_after_forward=True and without activation checkpointing."
            )
        return self.casts[key]()


_GIVEN: dict[int, _Given] = {}


def give_casts(weight: Tensor, casts: dict[Key, Callable[[], Operand]], missing: str) -> None:
    """Set what :func:`cast_weight` returns for a weight that was gathered as codes, until the next call for it.

    Args:
        weight: only its storage's identity counts; when it dies this is forgotten.
        casts: by key.
        missing: the error message where another cast is needed.
    """
    storage = weight.untyped_storage()
    if storage._cdata not in _GIVEN:
        for place in [place for place, given in _GIVEN.items() if given.storage.expired()]:
            del _GIVEN[place]
    _GIVEN[storage._cdata] = _Given(StorageWeakRef(storage), casts, missing)


class LastCast:
    """An operator that casts, and its last result."""

    def __init__(self, operator: Callable[..., tuple[Tensor, ...]]) -> None:
        self.operator = operator
        self.key: tuple[Any, ...] = ()
        self.users: set[int] = set()
        self.storage: StorageWeakRef | None = None
        self.result: tuple[Tensor, ...] | None = None

    def __call__(self, of: Tensor, x: Tensor, *arguments: Any) -> tuple[Tensor, ...]:
        """The cast of ``x``, made or remembered.

        Args:
            of: a tensor of the calling layer, which identifies it.
            x: the input; PyTorch counts no changes of inference tensors, so those are always cast.
            arguments: the operator's other arguments.
        """
        if torch.compiler.is_compiling() or x.is_inference():
            return self.operator(x, *arguments)
        storage = x.untyped_storage()
        key = (storage._cdata, x.storage_offset(), x.shape, x.stride(), x._version, *map(_identity, arguments))
        known = self.result is not None and self.storage is not None and not self.storage.expired()
        if not known or key != self.key or id(of) in self.users:
            self.result = self.operator(x, *arguments)
            self.key, self.storage, self.users = key, StorageWeakRef(storage), set()
        self.users.add(id(of))
        assert self.result is not None
        return self.result


def _identity(argument: Any) -> Any:
    return (id(argument), argument._version) if isinstance(argument, Tensor) else argument
