"""The one reader of TOML: recipes, settings, clusters, run folders, and the package's own tables."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


def load_toml(text: str) -> dict[str, Any]:
    """Parse TOML text.

    Raises:
        ValueError: it is not TOML, or nested deeper than Python's recursion limit.
    """
    try:
        table: dict[str, Any] = tomllib.loads(text)
    except RecursionError as error:
        raise ValueError(str(error)) from error
    return table


def load_data(name: str, package: str = "spec") -> dict[str, Any]:
    """Load a table of ``narrowgauge/PACKAGE/data``."""
    return load_toml(
        (Path(__file__).parents[1] / package / "data" / f"{name}.toml").read_text(encoding="utf-8")
    )
