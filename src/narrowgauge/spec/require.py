"""Checks of single values: numbers within bounds, and one of some names."""

import contextlib
import math
import operator
from collections.abc import Iterable
from typing import Any

from narrowgauge.errors import NarrowgaugeError, RecipeError, suggestion


def require_number(
    name: str,
    value: Any,
    least: float = 0.0,
    below: float = math.inf,
    *,
    is_whole: bool = False,
    is_open: bool = False,
) -> None:
    """Refuse a value that is not a number in ``[least, below)``, or in ``(least, below)`` if it
    ``is_open``. NaN is never inside.
    """
    bounds = []
    if least > -math.inf:
        bounds.append(f"above {least:g}" if is_open else f"at least {least:g}")
    if below < math.inf:
        bounds.append(f"below {below:g}")
    words = " and ".join(["one integer" if is_whole else "one finite number", *bounds])
    is_inside = False
    with contextlib.suppress(TypeError, ValueError, RuntimeError):
        if not isinstance(value, (bool, str)):
            number = operator.index(value) if is_whole else float(value)
            is_inside = number < below and (least < number if is_open else least <= number)
    if not is_inside:
        raise RecipeError(f"Cannot use {name} = {value!r}: it must be {words}.")


def require_choice(name: str, value: Any, choices: Iterable[Any]) -> None:
    """Refuse a value that is none of the choices."""
    allowed = list(choices)
    if value not in allowed:
        near = ""
        if isinstance(value, str):
            near = suggestion(value, list(map(str, allowed)))
        words = ", ".join(map(str, allowed)).lower()
        raise RecipeError(f"Cannot use {name} = {value!r}: it must be one of {words}.", near)


def unknown(
    what: str, name: str, names: Iterable[str], kind: type[NarrowgaugeError] = RecipeError
) -> NarrowgaugeError:
    """Return the error of a name that no row of ``narrowgauge show`` has."""
    advice = f"{suggestion(name, names)} (narrowgauge show {what}s lists all.)"
    return kind(f"no {what} is named {name!r}.", advice.strip())
