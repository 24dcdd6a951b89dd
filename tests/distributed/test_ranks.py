"""How ranks ask each other: what one learns or fails at, all do."""

from __future__ import annotations

import errno
from collections.abc import Callable
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
    """Errors of the first rank, of the second, and of both: what each rank raises."""

    def raised(function: Callable[[], object], call: Callable[[Callable[[], object]], object]) -> str:
        try:
            call(function)
        except Exception as error:
            status = error.status if isinstance(error, ReportedError) else ""
            has_place = "there" if error.__traceback__ is not None and _passes(error, function) else "elsewhere"
            return f"{type(error).__name__} {status} {error} {has_place}"
        return "nothing"

    def refuse() -> None:
        raise RankError(f"refused on rank {rank}.", "Do not.")

    def deny() -> None:
        raise PermissionError(errno.EACCES, f"denied on rank {rank}")

    def err() -> None:
        raise KeyError(f"rank {rank}")

    ranks = all_ranks()
    return [
        *(raised(function, ranks.of_first) for function in (refuse, deny, err)),
        *(raised(function if rank == 1 else lambda: None, ranks.together) for function in (refuse, deny, err)),
        raised(err, ranks.together),
    ]


def _passes(error: BaseException, function: Callable[[], object]) -> bool:
    """Whether an error was raised in a function of this process."""
    step = error.__traceback__
    while step is not None:
        if step.tb_frame.f_code is function.__code__:
            return True
        step = step.tb_next
    return False


def test_what_fails_on_one_rank_fails_on_all_and_a_bug_is_told_where_it_is(tmp_path: Path) -> None:
    first, second = run_ranks(fail, 2, tmp_path)
    reported = f"ReportedError 1 {ReportedError()} elsewhere"
    own = [
        "RankError  refused on rank {}. Do not.", "PermissionError  [Errno 13] denied on rank {}", "KeyError  'rank {}'",
    ]  # fmt: skip
    of_first, of_second = ([line.format(rank) for line in own] for rank in (0, 1))
    assert first == [
        *(f"{line} there" for line in of_first),
        *(f"{line} elsewhere" for line in of_second[:2]), reported,
        f"{of_first[2]} there",
    ]  # fmt: skip
    assert second == [
        *(f"{line} elsewhere" for line in of_first[:2]), reported,
        *(f"{line} there" for line in of_second),
        reported,
    ]  # fmt: skip


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
