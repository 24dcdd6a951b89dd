"""The first values of many weights and states, read without decoding the others: what gauges look at.

Decoding costs the same for one value as for a thousand. So the leading words of all stores of one storage are joined and
decoded at once; only storages that lie in rows, whose scales differ, are decoded one by one.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from narrowgauge.optim import packing
from narrowgauge.optim.stores import Store
from narrowgauge.spec.storages import Storage


def read_leading(stores: Sequence[Store], count: int, name: str) -> list[Tensor]:
    """The first values of each store's weight or state.

    Law: they are those of ``store.stored(name)``, bit for bit.

    Args:
        stores: each keeps something under that name.
        count: how many values of each.
        name: ``weight`` or a state.
    Returns:
        float32 ``[count]`` for each, fewer where there are fewer.
    """
    first = [leading(store, count) for store in stores]
    found: dict[int, Tensor] = {}
    alike: dict[Storage, list[int]] = {}
    for place, store in enumerate(first):
        if store is stores[place] or packing.by_rows(store.storage):
            found[place] = store.stored(name)
        else:
            alike.setdefault(store.storage, []).append(place)
    for storage, places in alike.items():
        members = [first[place] for place in places]
        words = {key: torch.cat([store.words[key] for store in members], 1) for key in members[0].words}
        joined = torch.cat([store.parameter for store in members])
        values = Store(joined, joined, storage, members[0].kernel, words).stored(name)
        found.update(zip(places, values.split([len(store.parameter) for store in members]), strict=True))
    return [found[place].reshape(-1)[:count] for place in range(len(stores))]


def leading(store: Store, count: int) -> Store:
    """A store of the first elements alone, at least ``count`` or all: whole words, and whole rows where it has rows.

    It is for reading: its words are copies or views.
    """
    matrix = packing.matrix_of(store.storage, store.parameter.shape)
    lanes = packing.num_lanes(store.storage)
    wanted = -(-count // matrix[1]) if len(matrix) == 2 else -(-count // lanes) * lanes
    if wanted >= matrix[0]:
        return store
    groups = wanted if len(matrix) == 2 else wanted // lanes
    return Store(
        store.owner,
        store.parameter.detach().reshape(matrix)[:wanted],
        store.storage,
        store.kernel,
        {name: words[:, :groups] for name, words in store.words.items()},
        {name: bound[:wanted] for name, bound in store.bounds.items()},
    )
