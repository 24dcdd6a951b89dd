"""What others do to a parameter between two steps: adopted where it is another value, refused where it is another tensor.

A weight is the user's to set: a checkpoint is loaded, a mask applied, an average swapped in. The words beside it then belong
to a value that is gone. A float32 master is compared with the visible weight in every step, in the kernel, and gives way
element by element. A tail cannot say which weight it belongs to, so a :class:`Trace` remembers what the parameter was when
the last step let go of it: where its memory and its counter of writes (``_version``), which torch raises whatever writes to
a tensor but for ``.data``, and in an audited step a checksum, are as they were, nobody has written. Where somebody has,
elements whose bits are still those that were left keep their tails, if a copy of these is at hand: a bucket has one, and a
parameter that is written to again and again gets one. Without a copy all its tails are dropped.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.summation import fingerprint
from narrowgauge.optim import packing
from narrowgauge.optim.auditing import audited_parts
from narrowgauge.optim.shards import local_of
from narrowgauge.optim.stores import Store

OFTEN = 2
"""Writes from outside after which a copy of the visible weight is kept, so that the next one is adopted by the element."""


@dataclass(slots=True)
class Trace:
    """What a parameter was when the last step let go of it.

    Args:
        view: it, detached: the same memory and counter of writes.
        place: its address.
        shape, stride, dtype: its own.
        version: its counter of writes; ``None`` where it belongs to whoever sets it next, since states were just loaded.
        mark: of all its bits, before the first step.
        spot: checksum of what the next step audits, 0-d.
        writes: how often others wrote to it.
    """

    view: Tensor
    place: int
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    version: int | None
    mark: int | None = None
    spot: Tensor | None = None
    writes: int = 0


def trace_of(store: Store, *, bound: bool = True) -> Trace:
    """The trace of a parameter as it is now; with ``bound=False`` its next value belongs to its states too."""
    weight = store.parameter
    version = _version(store) if bound else None
    return Trace(weight.detach(), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, version)


def _version(store: Store) -> int:
    version: int = store.owner._version
    return version if store.parameter is store.owner else version + store.parameter._version


def has_tail(store: Store) -> bool:
    """Whether something is kept beside the weight that does not say which weight it belongs to."""
    return bool(store.storage.beside) and not store.storage.master


def is_as_left(store: Store) -> bool:
    """Whether nobody has moved, changed or (but through ``.data``) written to a parameter since its last step."""
    weight, trace, owner = store.parameter, store.trace, store.owner
    if weight is owner:
        version: int = owner._version
    else:
        weight = store.parameter = local_of(owner)  # of a DTensor others may have put another in its place
        version = _version(store)
    return (
        trace is not None
        and version == trace.version
        and weight.data_ptr() == trace.place
        and weight.shape == trace.shape
        and weight.stride() == trace.stride
        and weight.dtype is trace.dtype
    )


def check_kept(store: Store, name: str) -> None:
    """Refuse a parameter that its states no longer fit.

    Raises:
        RecipeError: its shape, dtype or device is not what it was.
    """
    trace, weight = store.trace, store.parameter
    device = next((kept.device for kept in store.tensors()), weight.device)
    if trace is None or (weight.shape, weight.dtype, weight.device) == (trace.shape, trace.dtype, device):
        return
    now, then = (_told(*kind) for kind in ((weight.dtype, weight.shape), (trace.dtype, trace.shape)))
    raise RecipeError(
        f"parameter '{name}' is {now} on {weight.device} now, and its states were made for {then} on {device}.",
        "Change a model before its optimizer is built: build a new one for it as it is, and load or ng.convert what was "
        "saved from before.",
    )


def _told(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def let_go(stores: Sequence[Store], audit_every: int) -> None:
    """Take note of parameters as a step leaves them."""
    for store in stores:
        trace = store.trace
        assert trace is not None
        weight = store.parameter
        trace.version = weight._version if weight is store.owner else _version(store)
        trace.mark = None
        if store.copied:
            assert store.left is not None
            store.left.copy_(store.parameter.detach())
        if audit_every and (trace.spot is not None or (store.step + 1) % audit_every == 0):
            audited = (store.step + 1) % audit_every == 0 and store.left is None and has_tail(store)
            trace.spot = checksum(store, (store.step + 1) // audit_every) if audited else None


def written_unseen(stores: Sequence[Store], audit_every: int) -> list[Store]:
    """Those that are audited next, and whose bits are not what they were left as, though no write was counted."""
    found = []
    for store in stores:
        if (store.step + 1) % audit_every == 0 and has_tail(store) and store.trace is not None:
            if store.left is not None:
                found.append((store, (_bits(store.left) != _bits(store.parameter.detach())).any()))
            elif (spot := store.trace.spot) is not None:
                now = checksum(store, (store.step + 1) // audit_every)
                found.append((store, spot != (spot + 1 if now is None else now)))
    flags = torch.stack([flag for _, flag in found]).tolist() if found else []  # one wait for a device, not many
    return [store for (store, _), flag in zip(found, flags, strict=True) if flag]


def mark(store: Store) -> None:
    """Take note of a parameter whose value was just adopted; what is written before the first step can be told exactly."""
    store.trace = trace_of(store)
    store.trace.mark = fingerprint(store.parameter) if has_tail(store) else None


def checksum(store: Store, turn: int) -> Tensor | None:
    """Of the words that the audit number ``turn`` looks at, int64 0-d; ``None`` where it cannot be read as words."""
    words = store.weight_words()
    if words is None or not words[0].numel():
        return None
    row = words[0][0].numel()
    ((part, _),) = [p for p in audited_parts(words[0].shape[0], turn, row) if p[1]]
    return torch.stack([half[part].sum(dtype=torch.int64) for half in words]).sum()


def adopt_written(store: Store) -> int:
    """Adopt what others have written to a parameter.

    Returns:
        How many elements had another value, or had tails and nothing to tell by.
    """
    weight = store.parameter.detach()
    before, store.trace = store.trace, trace_of(store)
    if before is None or before.version is None or not store.storage.beside:
        return 0
    store.trace.writes = before.writes
    if store.storage.master:
        return int(store.outdated().sum())  # the next step adopts them
    if before.mark is not None and before.mark == fingerprint(weight):
        store.trace.mark = before.mark
        return 0
    changed = torch.ones_like(weight, dtype=torch.bool)
    if store.left is not None:
        changed = (_bits(store.left) != _bits(weight)).view(weight.shape)
    count = int(changed.sum())
    if count:
        store.drop_tails(changed)
        store.trace.writes += 1
    if store.trace.writes >= OFTEN and store.left is None:
        store.left, store.copied = weight.clone(memory_format=torch.contiguous_format), True
    return count


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(packing.INTEGER[8 * values.element_size()])
