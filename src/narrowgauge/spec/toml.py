"""The one reader of TOML: recipes, settings, clusters, run folders, and the package's own tables."""

import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, TypeVar

from narrowgauge.errors import DataError, NarrowgaugeError, suggestion_or_all

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib


T = TypeVar("T")


def load_toml(text: str) -> dict[str, Any]:
    """Parse TOML text. Other text is a ``ValueError``."""
    return tomllib.loads(text)


def read_file(path: str | Path, noun: str, advice: str) -> dict[str, Any]:
    """Read a user's TOML file; ``noun`` is what it describes.

    Raises:
        DataError: it cannot be read.
    """
    try:
        return load_toml(Path(path).expanduser().read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or str(error).splitlines()[0].rstrip(".")
        raise DataError(f"Cannot read the {noun} {path}: {reason}.", advice) from None


def refuse_unknown(
    table: Mapping[str, Any],
    allowed: Iterable[str],
    where: str,
    kind: type[NarrowgaugeError] = DataError,
) -> None:
    """Raise for a key of a table that is not one of ``allowed``."""
    names = list(allowed)
    for key in table:
        if key not in names:
            raise kind(f"{where} has an unknown key '{key}'.", suggestion_or_all(key, names))


def load_rows(kind: Callable[..., T], name: str, package: str = "spec") -> dict[str, T]:
    """Load a table whose rows are the fields of a class; a row's key is its name."""
    rows = {}
    for key, fields in load_data(name, package).items():
        rows[key] = kind(name=key, **fields)
    return rows


def load_data(name: str, package: str = "spec") -> dict[str, Any]:
    """Load a table of ``narrowgauge/PACKAGE/data``."""
    return load_toml(
        (Path(__file__).parents[1] / package / "data" / f"{name}.toml").read_text(encoding="utf-8")
    )
