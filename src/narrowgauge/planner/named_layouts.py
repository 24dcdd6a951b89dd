"""Layouts as they are asked for: names, and fields with values."""

from __future__ import annotations

import dataclasses
from typing import Any

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.planner.layouts import RECOMPUTES, Layout
from narrowgauge.spec.accumulations import ACCUMULATIONS

NAMED_LAYOUTS: dict[str, dict[str, Any]] = {
    "fsdp2": {"tensor": 1, "pipeline": 1, "context": 1, "expert": 1, "zero": 3},
    "ddp": {"shard": 1, "tensor": 1, "pipeline": 1, "context": 1, "expert": 1},
}
"""What ``narrowgauge train`` runs, and pure data parallelism."""
_TEXTS = {"recompute": RECOMPUTES, "offload": ("none", "optimizer", "all"), "accumulation_dtype": tuple(ACCUMULATIONS)}
_SWITCHES = {"true": True, "on": True, "1": True, "false": False, "off": False, "0": False}
_FIELDS = tuple(field.name for field in dataclasses.fields(Layout))
_ZERO = 3
_ADVICE = "For instance tensor=2,pipeline=4,zero=1,recompute=full, or fsdp2."


def read_layout(text: str) -> dict[str, Any]:
    """The fields of a layout that a text asks for.

    Args:
        text: ``FIELD=VALUE`` and names of layouts, separated by commas; fields after a name change what it says.
    Returns:
        Values by field of :class:`~narrowgauge.planner.layouts.Layout`.
    Raises:
        RecipeError: an unknown field or name, a value that it cannot have, or two values of one field.

    Example:
        >>> read_layout("tensor=2, recompute=full")
        {'tensor': 2, 'recompute': 'full'}
        >>> read_layout("fsdp2,shard=8")["shard"]
        8
    """
    fields: dict[str, Any] = {}
    own: dict[str, Any] = {}
    for part in filter(None, map(str.strip, text.split(","))):
        name, equals, value = (side.strip() for side in part.partition("="))
        if not equals:
            fields |= _named(name)
        elif name not in _FIELDS:
            raise RecipeError(f"a layout has no field '{name}'.", suggestion(name, _FIELDS) or _ADVICE)
        else:
            found = _value(name, value)
            if own.setdefault(name, found) != found:
                raise RecipeError(
                    f"{name} = {own[name]} and {name} = {found} were requested of a layout.", "Name it once."
                )
            fields[name] = found
    Layout(**{name: value for name, value in fields.items() if name != "interleave"})
    return fields


def _named(name: str) -> dict[str, Any]:
    if name.lower() not in NAMED_LAYOUTS:
        raise RecipeError(f"no layout is named '{name}'.", suggestion(name.lower(), NAMED_LAYOUTS) or _ADVICE)
    return NAMED_LAYOUTS[name.lower()]


def _value(name: str, text: str) -> Any:
    if name in _TEXTS:
        if text not in _TEXTS[name]:
            raise RecipeError(
                f"{name} = '{text}' was requested of a layout.", f"It is one of {', '.join(_TEXTS[name])}."
            )
        return text
    if name in ("sequence_parallel", "keeps_gradients"):
        if text.lower() not in _SWITCHES:
            raise RecipeError(f"{name} = '{text}' was requested of a layout.", "Use true or false.")
        return _SWITCHES[text.lower()]
    if not text.isdecimal() or (name == "zero" and int(text) > _ZERO):
        raise RecipeError(
            f"{name} = '{text}' was requested of a layout.",
            "Use 0 to 3." if name == "zero" else "Use a number from 1 on.",
        )
    return int(text)
