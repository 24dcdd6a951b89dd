"""Rendezvous: a store that all ranks reach, and the certainty that those that answer belong to this attempt.

The store may be older than the ranks: an elastic agent keeps it over restarts, and numbers restarts differently on each host. So
each rank greets with a new, unique name, and rank 0 answers every such name with the prefix of this attempt's keys. The ranks
have met when all of them have confirmed it.
"""

from __future__ import annotations

import socket
import time
import uuid
from collections.abc import Collection
from dataclasses import replace
from datetime import timedelta

import torch.distributed as dist
from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]  # public
from torch.distributed.rendezvous import rendezvous

from narrowgauge.distributed.launch.placement import Placement
from narrowgauge.errors import RankError

_LOOK_SECONDS = 0.05


def meet(here: Placement, join_seconds: float) -> tuple[Store, str]:
    """Wait until all ranks have come, at most ``join_seconds``; refuse a port in use, and a rank that did not come.

    Returns:
        A store that all ranks of this attempt share, and no others; and the prefix of its keys.
    """
    assert here.address is not None
    address = f"[{here.address}]" if ":" in here.address else here.address
    try:
        url, patience = f"tcp://{address}:{here.port}", timedelta(seconds=join_seconds)
        store, _, _ = next(rendezvous(url, here.rank, here.size, timeout=patience))
        if here.is_first:
            prefix, missing = welcome(store, here.size, join_seconds)
            if missing:
                raise _not_come(here, missing, join_seconds)
        else:
            prefix = greet(store, here.rank, patience)
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        raise _refusal(str(error), here, join_seconds) from error
    shared = PrefixStore(prefix, store)
    shared.set(f"host/{here.rank}", socket.gethostname())
    return shared, prefix


def greet(store: Store, rank: int, patience: timedelta) -> str:
    """Greet rank 0 until it answers with the prefix of this attempt's keys; ``store`` may hold those of earlier attempts."""
    name = uuid.uuid4().hex
    store.set(f"narrowgauge/hello/{rank}", name)
    answer = f"narrowgauge/welcome/{name}"
    store.wait([answer], patience)
    prefix: str = store.get(answer).decode()
    store.set(f"{prefix}/came/{rank}", "")
    return prefix


def welcome(store: Store, size: int, seconds: float) -> tuple[str, list[int]]:
    """Answer every greeting until all ranks have confirmed; a greeting of an earlier attempt is ignored.

    Returns:
        The prefix of this attempt's keys, and the ranks that did not come.
    """
    prefix, answered = f"narrowgauge/{uuid.uuid4().hex}", set[str]()
    missing, until = list(range(1, size)), time.monotonic() + seconds
    while missing:
        for rank in missing:
            if store.check([f"narrowgauge/hello/{rank}"]):
                name = store.get(f"narrowgauge/hello/{rank}").decode()
                if name not in answered:
                    store.set(f"narrowgauge/welcome/{name}", prefix)
                    answered.add(name)
        missing = [rank for rank in missing if not store.check([f"{prefix}/came/{rank}"])]
        if missing and time.monotonic() > until:
            break
        if missing:
            time.sleep(_LOOK_SECONDS)
    return prefix, missing


def _not_come(here: Placement, missing: Collection[int], seconds: float) -> RankError:
    some = ", ".join(map(str, list(missing)[:8])) + (", …" if len(missing) > 8 else "")
    return RankError(
        f"Rank{'s' if len(missing) > 1 else ''} {some} of {here.size} did not come to {here.address}:{here.port} within "
        f"{seconds:g} s.",
        "Start every rank, with the same MASTER_ADDR and MASTER_PORT.",
    )


def _refusal(reason: str, here: Placement, seconds: float) -> RankError:
    place = f"{here.address}:{here.port}"
    if "EADDRINUSE" in reason or "address already in use" in reason.lower():
        return RankError(
            f"Port {here.port} of {here.address} is in use, and {here.size} ranks are to meet there.",
            "Set MASTER_PORT (torchrun: --master-port or --rdzv-endpoint) to a free port.",
        )
    if here.is_first:
        return _not_come(here, range(1, here.size), seconds)
    return RankError(
        f"Rank {here.rank} cannot reach rank 0 at {place} ({_first_line(reason)}).",
        "Check MASTER_ADDR and MASTER_PORT, and that rank 0 was started.",
    )


def _first_line(text: str) -> str:
    return next((line.strip() for line in text.splitlines() if line.strip()), "no reason given")[:160]


def second_connection(here: Placement, prefix: str, timeout_seconds: float) -> Store:
    """Another connection to the same store, for another thread: a connection serves one caller at a time."""
    assert here.address is not None and here.port is not None
    patience = timedelta(seconds=min(timeout_seconds, 60.0))
    other = TCPStore(here.address, here.port, is_master=False, wait_for_workers=False, timeout=patience)
    return PrefixStore(prefix, other)


def with_local_rank(here: Placement, store: Store) -> Placement:
    """The placement; a local rank that the environment does not state is the rank among those of the same host."""
    hosts = [store.get(f"host/{rank}").decode() for rank in range(here.size)]
    mine = [rank for rank in range(here.size) if hosts[rank] == hosts[here.rank]]
    local = mine.index(here.rank) if here.local_rank is None else here.local_rank
    return replace(here, local_rank=local, local_size=here.local_size or len(mine))
