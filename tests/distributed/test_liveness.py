"""Who reports an error, and which ranks are missing: on a store in this process."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist

from narrowgauge.distributed.launch import liveness
from narrowgauge.distributed.launch.liveness import Liveness, late_ranks, read_beat
from narrowgauge.distributed.launch.placement import Placement


@pytest.fixture
def ranks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """Make the signs of life of some ranks, all in this process."""
    monkeypatch.setattr(liveness, "ANSWER_SECONDS", 0.01)
    monkeypatch.setattr(liveness, "GRACE_SECONDS", 0.2)
    store, made = dist.HashStore(), []

    def make(rank: int, size: int, limit_seconds: float = 60.0, expire: Any = None) -> Liveness:
        made.append(Liveness(Placement(rank, size), store, None, limit_seconds, expire or (lambda missing: None)))
        return made[-1]

    yield make
    for each in made:
        each.close()


def test_one_rank_claims_the_report(ranks: Any) -> None:
    both = [ranks(rank, 2) for rank in (0, 1)]
    assert both[0].claimed(0.0) is None
    assert both[1].claim(2)
    assert not both[0].claim(1)
    assert both[0].claimed(0.0) == 2


def test_a_rank_that_is_gone_is_missing(ranks: Any) -> None:
    first, _ = ranks(0, 3), ranks(1, 3)
    assert first.missing() == {2: ""}


def test_a_rank_that_is_behind_holds_up_the_others(ranks: Any) -> None:
    both = [ranks(rank, 2) for rank in (0, 1)]
    both[0].beat(5)
    both[1].beat(4)
    assert list(both[0].missing()) == [1]


def test_late_ranks() -> None:
    assert late_ranks([(5, True, "a"), (5, True, "b")]) == {}
    assert late_ranks([(5, True, "a"), (5, False, "b")]) == {1: "b"}
    assert late_ranks([(5, True, "a"), (4, True, "b")]) == {1: "b"}


def test_without_progress_the_thread_ends_the_process_and_names_its_own_line(ranks: Any) -> None:
    expired = threading.Event()
    said: list[dict[int, str]] = []

    def expire(missing: dict[int, str]) -> None:
        said.append(missing)
        expired.set()

    ranks(0, 1, 0.0, expire)
    assert expired.wait(30)
    assert list(said[0]) == [0]
    assert ".py:" in said[0][0], "where the main thread is"


def test_a_beat_is_read_from_the_file(tmp_path: Path) -> None:
    alive = Liveness(Placement(3, 4), None, tmp_path, 60.0, lambda missing: None)
    assert read_beat(tmp_path, 3) == (0, os.getpid())
    alive.beat(123_456)
    assert read_beat(tmp_path, 3) == (123_456, os.getpid())
    alive.close()
    alive.close()
    assert read_beat(tmp_path, 9) == (0, None)


def test_a_thread_inside_torch_distributed_waits_and_any_other_works() -> None:
    asked, answered = threading.Event(), threading.Event()
    inside = {"__name__": "torch.distributed.distributed_c10d", "asked": asked, "answered": answered}
    exec("def all_reduce():\n    asked.set()\n    answered.wait(30)", inside)
    thread = threading.Thread(target=inside["all_reduce"])
    thread.start()
    assert asked.wait(30)
    assert thread.ident is not None
    assert liveness._position(thread.ident)[0]
    answered.set()
    thread.join()
    assert not liveness._position(threading.get_ident())[0]
