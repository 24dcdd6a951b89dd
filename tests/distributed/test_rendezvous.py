"""Ranks meet on a store that holds what an earlier attempt left."""

from __future__ import annotations

import threading
from datetime import timedelta

import torch.distributed as dist

from narrowgauge.distributed.launch.rendezvous import greet, welcome

PATIENCE = timedelta(seconds=30)


def met(store: dist.Store, size: int) -> set[str]:
    """The prefixes that the ranks of one attempt agree on."""
    found: list[str] = []
    others = [threading.Thread(target=lambda k=k: found.append(greet(store, k, PATIENCE))) for k in range(1, size)]
    for other in others:
        other.start()
    prefix, missing = welcome(store, size, 30.0)
    for other in others:
        other.join()
    assert missing == []
    return {prefix, *found}


def test_each_attempt_agrees_on_a_prefix_of_its_own() -> None:
    store = dist.HashStore()
    attempts = [met(store, size) for size in (4, 3, 3)]
    assert [len(prefixes) for prefixes in attempts] == [1, 1, 1]
    assert len(set.union(*attempts)) == 3


def test_a_greeting_of_an_earlier_attempt_is_no_rank() -> None:
    store = dist.HashStore()
    store.set("narrowgauge/hello/1", "a rank that was lost before it was answered")
    store.set("narrowgauge/hello/2", "another one")
    late = threading.Thread(target=greet, args=(store, 2, PATIENCE))
    late.start()
    while store.get("narrowgauge/hello/2") == b"another one":
        late.join(0.01)
    assert welcome(store, 3, 0.5)[1] == [1]
    late.join()
