"""A setting: a field of a dataclass with one line of help and a constraint, which flags, TOML keys and checks are made from."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from narrowgauge.errors import NarrowgaugeError
from narrowgauge.spec.recipes import Recipe

_KINDS: dict[str, type] = {"str": str, "int": int, "float": float, "bool": bool, "Recipe": Recipe}
_KIND_NAMES: dict[type, str] = {
    str: "text", int: "an integer", float: "a number", bool: "true or false", Recipe: "a recipe",
}  # fmt: skip


def about(help: str, constraint: str = "", holds: Callable[[Any], bool] = lambda _: True) -> dict[str, Any]:
    """Metadata of a setting: its help, and its constraint as text and as a predicate."""
    return {"help": help, "constraint": constraint, "holds": holds}


def setting(default: Any, *described: Any) -> Any:
    """A field with a default and what :func:`about` takes."""
    return dataclasses.field(default=default, metadata=about(*described))


def count(default: int | None, help: str, least: int = 1) -> Any:
    """A field that holds a number from ``least`` on."""
    return setting(default, help, f"at least {least}", lambda value: least <= value < 2**63)


def kind_of(field: dataclasses.Field[Any]) -> type:
    """The type of a setting that is not None: ``str``, ``int``, ``float``, ``bool`` or ``Recipe``."""
    # Annotations of settings are strings that name the plain type first.
    return _KINDS[str(field.type).split(" ")[0]]


def require(field: dataclasses.Field[Any], value: Any, where: str = "") -> None:
    """Check the type and constraint of one setting.

    Args:
        field: the setting.
        value: of it.
        where: says where it was found, for the message.
    Raises:
        NarrowgaugeError: it has another type, or is out of range.
    """
    if value is None and field.default is None:
        return
    kind = kind_of(field)
    flag = f"--{field.name.replace('_', '-')}"
    # Exact types: True is an int in Python. An int may stand for a float.
    if type(value) is not kind and not (kind is float and type(value) is int):
        raise NarrowgaugeError(
            f"{field.name} = {value!r} was requested{where}; it must be {_KIND_NAMES[kind]}.",
            f"For example {field.name} = {field.default!r}." if field.default is not None else "",
        )
    if not field.metadata["holds"](value):
        raise NarrowgaugeError(
            f"{field.name} = {value!r} was requested{where}; it must be {field.metadata['constraint']}.",
            f"Change {flag}, or omit it.",
        )
