"""Loading rows of tables that an earlier version pickled inside models and optimizers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import MISSING, fields
from typing import Any, TypeVar

_Row = TypeVar("_Row")


def loads_older(table: Callable[[], Mapping[str, object]]) -> Callable[[type[_Row]], type[_Row]]:
    """A decorator of a frozen dataclass with slots: a pickled row without the newest fields gets them as it is loaded.

    Such a row is pickled as the list of its values, so new fields come last. A missing field is that of the row of the same name
    in ``table``; without one, the field's default.
    """

    def decorate(kind: type[_Row]) -> type[_Row]:
        def set_state(row: Any, state: Sequence[Any]) -> None:
            columns = fields(kind)  # type: ignore[arg-type]
            for column, value in zip(columns, state, strict=False):
                object.__setattr__(row, column.name, value)
            known = table().get(getattr(row, "name", ""))
            for column in columns[len(state) :]:
                made = column.default if column.default_factory is MISSING else column.default_factory()
                object.__setattr__(row, column.name, getattr(known, column.name, made))

        kind.__setstate__ = set_state  # type: ignore[attr-defined]
        return kind

    return decorate
