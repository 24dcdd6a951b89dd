"""Tables in tests: as a loop inside one test where a row is fast, as a covering array where it is not.

``exhaustive`` runs every row of a table inside one test, and fails with the first ten rows that do.

``covering`` parametrizes a test over a product of tables. On each push its covering part runs: every row of each table at
least once, and every pair of kinds of two tables at least once. The rest carries the mark ``whole`` and is left out, unless
``--all`` or ``--whole ROOM`` asks for it (``conftest.py``). Which rows are chosen depends on the tables alone.
"""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any

import pytest

Kind = Callable[[Any], Hashable]
whole = pytest.mark.whole
"""The mark of a long test that a shorter one of its kind stands for on each push."""
SHOWN = 10


def names_of(names: str | Sequence[str]) -> list[str]:
    return [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)


def identity(value: Any) -> Hashable:
    return value if isinstance(value, Hashable) else repr(value)


def text_of(value: Any) -> str:
    """What a value is called in the id of a test: its name, where it has one."""
    return str(value if isinstance(value, str) else getattr(value, "name", value))


def chosen(rows: Sequence[tuple[Any, ...]], kinds: Sequence[Kind | None]) -> set[int]:
    """The places of a few rows that hold every value, and every pair of kinds that two columns of the table have.

    Greedy: the next row is the one that adds most; of those that add the same, the one whose values were chosen least.
    A column without kinds takes each value for a kind of its own.

    >>> rules, storages = ("adamw", "sgd"), ("float32", "master", "word", "compact")
    >>> pairs = list(itertools.product(rules, storages))
    >>> sorted(chosen(pairs, (None, {"float32": 0, "master": 0, "word": 1, "compact": 1}.get)))
    [0, 2, 5, 7]
    """
    wanted: dict[Hashable, int] = {}
    needs, values = [], []
    for row in rows:
        own = [(k, identity(value)) for k, value in enumerate(row)]
        of_kind = [
            (k, identity(value) if kind is None else kind(value))
            for k, (value, kind) in enumerate(zip(row, kinds, strict=True))
        ]
        met = [("value", *each) for each in own] + [("pair", *pair) for pair in itertools.combinations(of_kind, 2)]
        needs.append(sum(1 << wanted.setdefault(each, len(wanted)) for each in met))
        values.append(own)
    missing, found, used = (1 << len(wanted)) - 1, set(), dict.fromkeys(itertools.chain(*values), 0)
    left = list(range(len(rows)))
    while missing:
        gains = {place: bin(needs[place] & missing).count("1") for place in left}
        left = [place for place in left if gains[place]]
        best = max(left, key=lambda place: (gains[place], -sum(used[value] for value in values[place]), -place))
        found.add(best)
        missing &= ~needs[best]
        for value in values[best]:
            used[value] += 1
    return found


def covering(
    names: str | Sequence[str],
    rows: Iterable[Any],
    *,
    kinds: Sequence[Kind | None] | None = None,
    ids: Callable[[Any], str] = text_of,
) -> pytest.MarkDecorator:
    """Parametrize over the rows of a product; ``kinds`` says for each name what makes two of its values alike."""
    names = names_of(names)
    table = [tuple(row) if len(names) > 1 else (row,) for row in rows]
    few = chosen(table, kinds or [None] * len(names))
    return pytest.mark.parametrize(
        names,
        [
            pytest.param(*row, id="-".join(map(ids, row)), marks=() if place in few else pytest.mark.whole)
            for place, row in enumerate(table)
        ],
    )


def exhaustive(names: str | Sequence[str], rows: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with every row of a table, and fail once, with the first ten rows that fail and the reason of each.

    Rows share the fixtures of the test, so this suits tests that leave nothing behind.
    """
    names = names_of(names)
    table = [tuple(row) if len(names) > 1 else (row,) for row in rows]

    def looped(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every_row(**fixtures: Any) -> None:
            assert table, "the table is empty"
            failures: list[tuple[str, BaseException]] = []
            skipped: list[BaseException] = []
            for row in table:
                try:
                    test(**fixtures, **dict(zip(names, row, strict=True)))
                except pytest.skip.Exception as reason:
                    skipped.append(reason)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(("-".join(map(text_of, row)), error))
            if failures:
                shown = "".join(f"\n[{name}] {type(error).__name__}: {error}" for name, error in failures[:SHOWN])
                raise AssertionError(f"{len(failures)} of {len(table)} rows fail:{shown}") from failures[0][1]
            if len(skipped) == len(table):
                raise skipped[0]

        signature = inspect.signature(test)
        left = [value for name, value in signature.parameters.items() if name not in names]
        every_row.__signature__ = signature.replace(parameters=left)  # type: ignore[attr-defined]
        del every_row.__wrapped__  # or pytest would ask for the fixtures of the row
        return every_row

    return looped
