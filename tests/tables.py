"""A table as a loop inside one test, where each row is fast."""

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest


def exhaustive(names: str | Sequence[str], rows: Iterable[Any]):
    """Call a test with every row of a table, and fail once, with the rows that fail and the reason
    of each.

    Rows share the fixtures of the test, so this suits tests that leave nothing behind.
    """
    is_alone = isinstance(names, str)
    names = [names] if is_alone else names
    table = [(row,) if is_alone else row for row in rows]

    def looped(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def every_row(**fixtures: Any) -> None:
            assert table, "the table is empty"
            failures = []
            for row in table:
                try:
                    test(**fixtures, **dict(zip(names, row, strict=True)))
                except (Exception, pytest.fail.Exception) as error:
                    failures.append(f"\n{row}: {error!r:.1000}")
            assert not failures, "".join(failures[:10])

        signature = inspect.signature(test)
        parameters = [value for name, value in signature.parameters.items() if name not in names]
        every_row.__signature__ = signature.replace(parameters=parameters)
        del every_row.__wrapped__  # or pytest would ask for the fixtures of the row
        return every_row

    return looped
