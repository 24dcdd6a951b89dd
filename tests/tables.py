"""A table as a loop inside one test, where each row is fast."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

SHOWN = 10


def text_of(value: Any) -> str:
    """What a value is called in the id of a test: its name, where it has one."""
    return str(value if isinstance(value, str) else getattr(value, "name", value))


def exhaustive(
    names: str | Sequence[str], rows: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with every row of a table, and fail once, with the first ten rows that fail and
    the reason of each.

    Rows share the fixtures of the test, so this suits tests that leave nothing behind.
    """
    names = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
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
                shown = "".join(
                    f"\n[{name}] {type(error).__name__}: {error}"
                    for name, error in failures[:SHOWN]
                )
                raise AssertionError(
                    f"{len(failures)} of {len(table)} rows fail:{shown}"
                ) from failures[0][1]
            if len(skipped) == len(table):
                raise skipped[0]

        signature = inspect.signature(test)
        parameters = []
        for name, value in signature.parameters.items():
            if name not in names:
                parameters.append(value)
        every_row.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
        del every_row.__wrapped__  # or pytest would ask for the fixtures of the row
        return every_row

    return looped
