"""Checks of single values: numbers within bounds, and one of some names."""

from __future__ import annotations

import math
import operator
from collections.abc import Iterable
from typing import Any

from narrowgauge.errors import RecipeError, suggestion


def require_number(
    name: str,
    value: Any,
    least: float = 0.0,
    below: float = math.inf,
    *,
    is_whole: bool = False,
    is_open: bool = False,
) -> None:
    """Refuse a value that is no number in ``[least, below)``, or in ``(least, below)`` if it
    ``is_open``. NaN is never inside.
    """
    words = "one integer" if is_whole else "one finite number"
    bounds = []
    if least > -math.inf:
        bounds.append(f"above {least:g}" if is_open else f"at least {least:g}")
    if below < math.inf:
        bounds.append(f"below {below:g}")
    if bounds:
        words += f", {' and '.join(bounds)}"
    number = math.nan
    if not isinstance(value, (bool, str)):
        try:
            number = operator.index(value) if is_whole else float(value)
        except (TypeError, ValueError, RuntimeError):
            number = math.nan
    is_inside = least < number < below if is_open else least <= number < below
    if not is_inside:
        raise RecipeError(f"Cannot use {name} = {value!r}: it must be {words}.")


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Refuse a value that is none of the choices."""
    allowed = list(choices)
    if value not in allowed:
        near = ""
        if isinstance(value, str):
            near = suggestion(value, list(map(str, allowed)))
        words = ", ".join(map(option_text, allowed))
        raise RecipeError(f"Cannot use {name} = {value!r}: it must be one of {words}.", near)


def option_text(value: Any) -> str:
    """Write an option's value as a table shows it.

    Example:
        >>> [option_text(value) for value in (True, None, 0.9, (1e-30, 1e-3))]
        ['true', 'none', '0.9', '1e-30/0.001']
    """
    if isinstance(value, tuple):
        return "/".join(map(option_text, value))
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return str(value) or "empty"
