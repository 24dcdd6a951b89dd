"""The one reader of TOML: of recipes, settings, clusters and run folders."""

from __future__ import annotations

import sys
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_toml(text: str) -> dict[str, Any]:
    """Parse TOML text with the standard library, or with ``tomli`` before Python 3.11.

    Raises:
        ValueError: it is not TOML, or nested deeper than Python's recursion limit.
    Example:
        >>> load_toml("chips = 8")
        {'chips': 8}
    """
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return table
