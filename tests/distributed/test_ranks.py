"""How ranks ask each other: what one learns or fails at, all do."""

from typing import Any

import pytest

from narrowgauge.distributed.ranks import all_ranks
from narrowgauge.errors import RankError, ReportedError
from ranks import run_ranks


def ask(rank: int) -> list[object]:
    """What two ranks ask each other."""
    answers = []
    ranks = all_ranks()
    assert (ranks.rank, ranks.size, ranks.is_first) == (rank, 2, rank == 0)
    answers += [
        ranks.gather({"rank": rank}),
        ranks.of_first(lambda: f"of rank {rank}"),
        ranks.together(lambda: f"of rank {rank}"),
    ]
    return answers


def ask_and_fail(rank: int):
    return ask(rank), fail(rank)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    return run_ranks(ask_and_fail, 2, tmp_path_factory.mktemp("two"))


def test_ranks_learn_the_same(two_ranks):
    for rank, (answers, _) in enumerate(two_ranks):
        shared = [[{"rank": 0}, {"rank": 1}], "of rank 0", f"of rank {rank}"]
        assert answers == shared


def fail(rank: int) -> list[str]:
    """A refusal and a bug of the first rank, then of the second: the errors that each rank raises."""

    def refuse() -> None:
        raise RankError(f"refused on rank {rank}.", "Do not.")

    def err() -> None:
        raise KeyError(f"rank {rank}")

    ranks = all_ranks()
    raised = []
    for function in (refuse, err):
        for ask in (
            ranks.of_first,
            lambda work: ranks.together(work if rank == 1 else lambda: None),
        ):
            with pytest.raises((RankError, KeyError, ReportedError)) as caught:
                ask(function)
            raised.append(f"{caught.type.__name__} {caught.value}")
    return raised


def test_what_fails_on_one_rank_fails_on_all_and_a_bug_is_told_where_it_is(
    two_ranks,
):
    first, second = (raised for _, raised in two_ranks)
    reported = f"ReportedError {ReportedError()}"
    refusals = [f"RankError refused on rank {rank}. Do not." for rank in (0, 1)]
    assert first == [*refusals, "KeyError 'rank 0'", reported]
    assert second == [*refusals, reported, "KeyError 'rank 1'"]


def interrupt(rank: int) -> list[str]:
    """A rank is told to end while the other waits for its answer, or has failed."""

    def stop() -> None:
        raise KeyboardInterrupt

    raised = []
    for works in ((stop, lambda: None), (lambda: 1 // 0, stop)):
        with pytest.raises(BaseException) as caught:
            all_ranks().together(works[rank])
        raised.append(caught.type.__name__)
    return raised


def test_nobody_waits_for_a_rank_that_is_interrupted_and_it_ends_itself(tmp_path):
    ends = run_ranks(interrupt, 2, tmp_path)
    assert ends == [
        ["KeyboardInterrupt", "ZeroDivisionError"],
        ["ReportedError", "KeyboardInterrupt"],
    ]
