"""Weights that were modified outside the optimizer: adopted where the value changed, refused where the tensor did.

A user may load a checkpoint, apply a mask or swap in an average at any time. What is stored with the weight then belongs to
a value that is gone. A float32 master is compared with the visible weight in every step, in the kernel, and is replaced
element by element. A tail does not say which weight it belongs to, so a :class:`~narrowgauge.optim.stores.Snapshot` of the
parameter is taken after each step: its address and its version counter (``_version``), which every write but one through
``.data`` raises, and for audited steps a checksum. If these are unchanged, so is the weight. If not, and a copy of the
visible weight is at hand, elements with unchanged bits keep their tails: a bucket has such a copy, and a parameter that is
modified repeatedly gets one. Without a copy all tails of the parameter are discarded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.shards import local_of
from narrowgauge.numerics.summation import fingerprint
from narrowgauge.optim import packing
from narrowgauge.optim.audit import audited_parts
from narrowgauge.optim.stores import Snapshot, Store

OFTEN = 2
"""Modifications after which a copy of the visible weight is stored, so that the next one is adopted element by element."""


def snapshot_of(store: Store, *, bound: bool = True) -> Snapshot:
    """A snapshot of a parameter now; with ``bound=False`` the value that it has at its next step belongs to its states."""
    weight = store.parameter
    version = _version(store) if bound else None
    return Snapshot(weight.detach(), weight.data_ptr(), weight.shape, weight.stride(), weight.dtype, version)


def _version(store: Store) -> int:
    version: int = store.owner._version
    return version if store.parameter is store.owner else version + store.parameter._version


def has_tail(store: Store) -> bool:
    """Whether the stored weight has a part that does not say which visible weight it belongs to."""
    return bool(store.storage.beside) and not store.storage.master


def is_unmodified(store: Store) -> bool:
    """Whether a parameter was neither moved, replaced nor (but through ``.data``) written to since its last step."""
    weight, snapshot, owner = store.parameter, store.snapshot, store.owner
    if weight is owner:
        version: int = owner._version
    else:
        weight = store.parameter = local_of(owner)  # the local tensor of a DTensor may have been replaced
        version = _version(store)
    return (
        snapshot is not None
        and version == snapshot.version
        and weight.data_ptr() == snapshot.address
        and weight.shape == snapshot.shape
        and weight.stride() == snapshot.stride
        and weight.dtype is snapshot.dtype
    )


def check_matches_states(store: Store, name: str) -> None:
    """Refuse a parameter that its states do not fit any more.

    Raises:
        RecipeError: its shape, dtype or device is not what it was.
    """
    snapshot, weight = store.snapshot, store.parameter
    device = next((kept.device for kept in store.tensors()), weight.device)
    if snapshot is None or (weight.shape, weight.dtype, weight.device) == (snapshot.shape, snapshot.dtype, device):
        return
    now, then = (_described(*kind) for kind in ((weight.dtype, weight.shape), (snapshot.dtype, snapshot.shape)))
    raise RecipeError(
        f"parameter '{name}' is {now} on {weight.device} now, and its states were made for {then} on {device}.",
        "Change a model before its optimizer is built: build a new one for it as it is, and load or ng.convert what was "
        "saved from before.",
    )


def _described(dtype: torch.dtype, shape: torch.Size) -> str:
    return f"{str(dtype).removeprefix('torch.')} of shape {tuple(shape)}"


def snapshot_after_step(stores: Sequence[Store], audit_every: int) -> None:
    """Take snapshots of parameters after a step."""
    for store in stores:
        snapshot = store.snapshot
        assert snapshot is not None
        weight = store.parameter
        snapshot.version = weight._version if weight is store.owner else _version(store)
        snapshot.fingerprint = None
        if store.owns_copy:
            assert store.last_visible is not None
            store.last_visible.copy_(store.parameter.detach())
        if audit_every and (snapshot.checksum is not None or (store.step + 1) % audit_every == 0):
            audited = (store.step + 1) % audit_every == 0 and store.last_visible is None and has_tail(store)
            snapshot.checksum = checksum(store, (store.step + 1) // audit_every) if audited else None


def modified_silently(stores: Sequence[Store], audit_every: int) -> list[Store]:
    """Those whose next step is audited and whose bits have changed although their version counters have not."""
    found = []
    for store in stores:
        if (store.step + 1) % audit_every == 0 and has_tail(store) and store.snapshot is not None:
            if store.last_visible is not None:
                found.append((store, (_bits(store.last_visible) != _bits(store.parameter.detach())).any()))
            elif (spot := store.snapshot.checksum) is not None:
                now = checksum(store, (store.step + 1) // audit_every)
                found.append((store, spot != (spot + 1 if now is None else now)))
    flags = torch.stack([flag for _, flag in found]).tolist() if found else []  # one wait for a device, not many
    return [store for (store, _), flag in zip(found, flags, strict=True) if flag]


def snapshot_adopted(store: Store) -> None:
    """Take a snapshot of a parameter whose value was just stored; a fingerprint finds any write before the first step."""
    store.snapshot = snapshot_of(store)
    store.snapshot.fingerprint = fingerprint(store.parameter) if has_tail(store) else None


def checksum(store: Store, turn: int) -> Tensor | None:
    """Checksum of the words that audit number ``turn`` covers, int64 0-d; ``None`` where they cannot be read as words."""
    words = store.weight_words()
    if words is None or not words[0].numel():
        return None
    row = words[0][0].numel()
    ((part, _),) = [p for p in audited_parts(words[0].shape[0], turn, row) if p[1]]
    return torch.stack([half[part].sum(dtype=torch.int64) for half in words]).sum()


def adopt_modified(store: Store) -> int:
    """Adopt the value of a parameter that was modified.

    Returns:
        How many elements were adopted: those that changed, or all where that is unknown.
    """
    weight = store.parameter.detach()
    before, store.snapshot = store.snapshot, snapshot_of(store)
    if before is None or before.version is None or not store.storage.beside:
        return 0
    store.snapshot.num_writes = before.num_writes
    if store.storage.master:
        return int(store.outdated().sum())  # the next step adopts them
    if before.fingerprint is not None and before.fingerprint == fingerprint(weight):
        store.snapshot.fingerprint = before.fingerprint
        return 0
    changed = torch.ones_like(weight, dtype=torch.bool)
    if store.last_visible is not None:
        changed = (_bits(store.last_visible) != _bits(weight)).view(weight.shape)
    count = int(changed.sum())
    if count:
        store.discard_tails(changed)
        store.snapshot.num_writes += 1
    if store.snapshot.num_writes >= OFTEN and store.last_visible is None:
        store.last_visible, store.owns_copy = weight.clone(memory_format=torch.contiguous_format), True
    return count


def _bits(values: Tensor) -> Tensor:
    return values.contiguous().view(packing.INTEGER[8 * values.element_size()])
