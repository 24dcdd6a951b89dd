"""Parameters that were moved or replaced after their optimizer was built: their states follow them.

A framework may place a model on a device later (``model.to`` gives each parameter other memory), or shard it later: Accelerate's
FSDP2 puts the shard of each parameter at its place in the param groups. Torch's optimizers have no states by then. Ours
has the bits of the weights that the visible ones cut, since :func:`narrowgauge.prepare`.

Invariant: a parameter that follows has the bits that it had. A state passes to another parameter only at the same place of the
groups, with the same shape, and where every visible bit that this rank holds is the same; else the new one starts afresh.

Source: Accelerate 1.15, ``fsdp2_switch_optimizer_parameters`` and ``AcceleratedOptimizer._switch_parameters``.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from narrowgauge.errors import RecipeError
from narrowgauge.numerics.shards import is_sharded, own_part
from narrowgauge.optim.external_writes import snapshot_adopted, snapshot_of
from narrowgauge.optim.stores import Store

Place = tuple[int, int]
"""The number of a group and of a parameter in it."""


def places_of(groups: Sequence[dict[str, Any]]) -> dict[Tensor, Place]:
    """The place of each parameter."""
    return {p: (number, index) for number, group in enumerate(groups) for index, p in enumerate(group["params"])}


def heir_of(store: Store, place: Place | None, groups: Sequence[dict[str, Any]]) -> Tensor | None:
    """The parameter that has taken the place of another of its shape; ``None`` where there is none."""
    if place is None or is_sharded(store.owner) or place[0] >= len(groups):
        return None
    members = groups[place[0]]["params"]
    heir = members[place[1]] if place[1] < len(members) else None
    return heir if heir is not None and heir is not store.owner and heir.shape == store.owner.shape else None


def check_heir(store: Store, heir: Tensor, name: str) -> None:
    """Refuse a parameter in another format than the one whose place it took.

    Raises:
        RecipeError: it is.
    """
    wanted = getattr(torch, store.storage.visible)
    if heir.dtype is not wanted:
        kind, given = (str(dtype).removeprefix("torch.") for dtype in (wanted, heir.dtype))
        raise RecipeError(
            f"parameter '{name}' was replaced by a {given} one, and its storage '{store.storage.name}' holds {kind} weights.",
            "Accelerate's FSDP2 does so unless mixed_precision='no': leave it so, since the recipe says what to compute in.",
        )


def pass_on(old: Store, new: Store) -> bool:
    """Pass a state to the store of the parameter that took its place, where that has the same visible bits.

    Args:
        old: of a whole parameter.
        new: of the same parameter in other memory, or of this rank's shard of it; all zero.
    Returns:
        Whether it did.
    """
    device = new.parameter.device
    shown = own_part(new.owner, old.owner.detach().to(device))
    if shown.dtype is not new.parameter.dtype or not torch.equal(shown, new.parameter.detach()):
        return False
    values = old.in_parameter_order()
    new.take({n: v.to(device) if n in old.extras else own_part(new.owner, v.to(device)) for n, v in values.items()})
    new.step, new.begun, new.notes = old.step, old.begun, old.notes
    snapshot_adopted(new)
    return True


def is_elsewhere(store: Store) -> bool:
    """Whether the states of a parameter are on another device than it is."""
    kept = next(iter(store.tensors()), None)
    return kept is not None and kept.device != store.parameter.device


def bring(stores: Iterable[Store]) -> None:
    """Move states, but for those in buckets, to the devices of their parameters.

    A write but one through ``.data`` shows in the version counter, so bits whose counter stands have only been moved.
    """
    for store in stores:
        device = store.parameter.device
        for kept in (store.words, store.bounds, store.extras):
            kept.update({name: tensor.to(device) for name, tensor in kept.items()})
        settle(store)


def settle(store: Store) -> None:
    """Forget what a store knows of the memory that it has left."""
    store.__dict__.pop("plane_words", None)
    if store.last_visible is not None:
        store.last_visible = store.last_visible.to(store.parameter.device)
    before, now = store.snapshot, snapshot_of(store)
    if before is not None and before.version == now.version:
        now.fingerprint, now.num_writes = before.fingerprint, before.num_writes
        store.snapshot = now
