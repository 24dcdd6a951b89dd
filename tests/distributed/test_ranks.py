"""How ranks ask each other: what one learns or fails at, all do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from narrowgauge.distributed.ranks import ALONE, Ranks, all_ranks
from narrowgauge.errors import RankError, ReportedError
from ranks import run_ranks


def test_a_process_on_its_own_needs_no_group() -> None:
    assert all_ranks() == ALONE == ALONE.apart() == Ranks(0, 1)
    assert ALONE.is_first
    assert ALONE.device == torch.device("cpu")
    assert (ALONE.gather("a"), ALONE.largest(15), ALONE.of_first(lambda: 7), ALONE.together(lambda: 7)) == (
        ["a"], 15, 7, 7,
    )  # fmt: skip
    for ask in (ALONE.of_first, ALONE.together):
        with pytest.raises(ZeroDivisionError):
            ask(lambda: 1 // 0)


def ask(rank: int) -> list[object]:
    """What two ranks ask each other, in the default group and in one of their own."""
    found: list[object] = []
    for ranks in (all_ranks(), all_ranks().apart()):
        assert (ranks.rank, ranks.size, ranks.is_first) == (rank, 2, rank == 0)
        found += [
            ranks.gather({"rank": rank}),
            ranks.largest(15 if rank else 0),
            ranks.largest(-rank),
            ranks.of_first(lambda: f"of rank {rank}"),
            ranks.together(lambda: f"of rank {rank}"),
        ]
    return found


def test_ranks_learn_the_same(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(ask, 2, tmp_path)):
        shared = [[{"rank": 0}, {"rank": 1}], 15, 0, "of rank 0", f"of rank {rank}"]
        assert found == shared * 2


def fail(rank: int) -> list[str]:
    """A refusal and a bug of the first rank, then of the second: the errors that each rank raises."""

    def refuse() -> None:
        raise RankError(f"refused on rank {rank}.", "Do not.")

    def err() -> None:
        raise KeyError(f"rank {rank}")

    ranks, raised = all_ranks(), []
    for function in (refuse, err):
        for ask in (ranks.of_first, lambda work: ranks.together(work if rank == 1 else lambda: None)):
            with pytest.raises((RankError, KeyError, ReportedError)) as caught:
                ask(function)
            raised.append(f"{caught.type.__name__} {caught.value}")
    return raised


def test_what_fails_on_one_rank_fails_on_all_and_a_bug_is_told_where_it_is(tmp_path: Path) -> None:
    first, second = run_ranks(fail, 2, tmp_path)
    reported = f"ReportedError {ReportedError()}"
    refusals = [f"RankError refused on rank {rank}. Do not." for rank in (0, 1)]
    assert first == [*refusals, "KeyError 'rank 0'", reported]
    assert second == [*refusals, reported, "KeyError 'rank 1'"]


def interrupt(rank: int) -> str:
    """The first rank is told to end while the second waits for its answer."""

    def stop() -> None:
        raise KeyboardInterrupt

    try:
        all_ranks().of_first(stop)
    except BaseException as error:
        return type(error).__name__
    return "nothing"


def test_nobody_waits_for_a_rank_that_is_interrupted(tmp_path: Path) -> None:
    assert run_ranks(interrupt, 2, tmp_path) == ["KeyboardInterrupt", "ReportedError"]
