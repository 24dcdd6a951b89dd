"""Read recipes from a name (``compute/storage/reduction``), from another library's name, or from a
TOML table.

Short spellings of formats (``bf16``) are expanded, ignoring case. Another library's name is
accepted if it means exactly one recipe. Ambiguous names are refused, with the nearest recipes: also
a 16-bit format alone, by which libraries mean different weights and moments. Within a recipe
(``bf16/word``) it is the compute.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, NoReturn

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.recipes import Override, Recipe, is_pair
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.spec.sums import REDUCTIONS
from narrowgauge.spec.toml import load_data, read_file, refuse_unknown

_NAMES = load_data("aliases")
SPELLINGS: dict[str, str] = _NAMES["spellings"]
"""Short spellings of formats at the beginning of a name, up to a dash."""
ALIASES: dict[str, dict[str, str]] = _NAMES["aliases"]
"""Names of other libraries, in lower case with formats in full spelling.

``recipe`` is the full name of a recipe, or a compute that any storage may follow; ``source`` the
libraries that use the name.
"""
REFUSED: dict[str, dict[str, Any]] = _NAMES["refused"]
"""Names of other libraries that say too little of a recipe, and published methods that are none.

``nearest`` is what comes nearest, ``why`` what they keep that it does not.
"""
_COMPUTES = {name: row["recipe"] for name, row in ALIASES.items() if "/" not in row["recipe"]}
_KEYS = ("recipe", "name", "override")
_SEE = "(narrowgauge show recipes lists all.)"


def spelled(part: str) -> str:
    """Return the full spelling of a part of a name.

    Example:
        >>> spelled("BF16-mixed")
        'bfloat16-mixed'
    """
    head, dash, rest = part.strip().lower().partition("-")
    return SPELLINGS.get(head, head) + dash + rest


def compute_name(part: str) -> str:
    """Return the full name of a compute, or of a recipe where a compute is allowed.

    Example:
        >>> compute_name("fp8"), compute_name("FP8-tensor")
        ('float8-row', 'float8-tensor')
    """
    full = spelled(part)
    return _COMPUTES.get(part.strip().lower()) or _COMPUTES.get(full, full)


def _refuse(text: str, name: str) -> NoReturn:
    row = REFUSED[name]
    nearest = ", ".join(map(repr, row["nearest"]))
    why = row.get("why", "it says too little")
    raise RecipeError(
        f"Cannot take '{text}' as a recipe: {why}.", f"Take {nearest}. (narrowgauge show aliases)"
    )


def full_names() -> list[str]:
    """List all valid ``compute/storage`` names, in the order of the tables."""
    names = []
    for compute, storage in product(COMPUTES.values(), STORAGES.values()):
        name = f"{compute.name}/{storage.short_name}"
        if is_pair(compute, storage) and name not in REFUSED:
            names.append(name)
    return names


def representative_names() -> list[str]:
    """List each compute with its default storage, and each storage with its own compute or
    bfloat16.
    """
    names = []
    for compute in COMPUTES.values():
        names.append(f"{compute.name}/{compute.default_storage}")
    for storage in STORAGES.values():
        names.append(f"{storage.owner or 'bfloat16'}/{storage.short_name}")
    return list(dict.fromkeys(names))


def get_compute(compute: str | Compute) -> Compute:
    """Return a compute by its name, here or in another library, or itself.

    Raises:
        RecipeError: an unknown name, or one that could be several computes.
    """
    if isinstance(compute, Compute):
        return compute
    name = compute_name(compute)
    row = COMPUTES.get(name)
    if name in REFUSED and not (row and "/" in REFUSED[name]["nearest"][0]):
        _refuse(compute, name)
    if row is not None:
        return row
    raise _no_part("compute", name, COMPUTES)


def parse(value: Any, where: str = "") -> Recipe:
    """Read a recipe from its name, a table or a TOML file.

    Args:
        value: ``"bfloat16/word"``, an alias such as ``"bf16-mixed"`` (``narrowgauge show
            aliases``), a narrow compute alone (its default storage is added), the path of a
            ``.toml`` file, a table, or a recipe, which is returned unchanged. A table has ``recipe
            = "bfloat16/word"``. It may have ``name`` (a label) and ``override`` (tables with
            ``pattern`` and ``compute``).
        where: names the place of a value in error messages.
    Returns:
        The recipe.
    Raises:
        RecipeError: an unknown part, parts that contradict each other, or a file that cannot be
            read.
    Example:
        >>> parse("bf16-mixed").name, parse("bf16/word").name, parse("float8-row").name
        ('bfloat16/float32', 'bfloat16/word', 'float8-row/word')
    """
    if isinstance(value, Recipe):
        return value
    if isinstance(value, Mapping):
        return _from_table(value, f"the recipe of {where}" if where else "the recipe table")
    if not isinstance(value, str | Path):
        raise RecipeError(
            f"{where or 'a call'} has recipe = {value!r}.",
            "A recipe is a name in quotes, or a table.",
        )
    return _from_file(Path(value)) if str(value).endswith(".toml") else _from_name(str(value))


def parse_names(names: str) -> list[Recipe]:
    """Read the recipes of a command line: names and ``.toml`` files, separated by commas."""
    parts = list(filter(None, map(str.strip, names.split(","))))
    if not parts:
        raise RecipeError("no recipe was named.", "For instance bfloat16/master,bfloat16/word.")
    return list(map(parse, parts))


def _from_name(text: str) -> Recipe:
    compute, *rest = text.strip().split("/")
    name = "/".join([compute_name(compute), *map(spelled, rest)])
    if name in REFUSED:
        _refuse(text, name)
    name = ALIASES.get(name, {}).get("recipe", name)
    compute, *rest = name.split("/")
    if len(rest) > 2 or (not rest and compute not in COMPUTES):
        # A storage alone is a likely mistake, and not similar to any full name.
        near = f"Did you mean 'bfloat16/{name}'?"
        if name not in STORAGES:
            near = suggestion(name, [*ALIASES, *full_names(), *COMPUTES])
        raise RecipeError(f"no recipe is named '{text}'.", f"{near} {_SEE}".strip())
    if compute in REFUSED and compute not in COMPUTES:
        _refuse(text, compute)
    row = get_compute(compute)
    storage = _find_storage(rest[0] if rest else row.default_storage, row.name)
    reduction = rest[1] if len(rest) == 2 else "native"
    if reduction not in REDUCTIONS:
        raise _no_part("reduction", reduction, REDUCTIONS)
    return Recipe(row, storage, REDUCTIONS[reduction])


def _from_file(path: Path) -> Recipe:
    """Read a file, labelled by its ``name``, else by the file's stem."""
    table = read_file(path, "recipe file", _SEE)
    recipe = _from_table(table, str(path))
    return recipe if recipe.label else replace(recipe, label=path.stem)


def _from_table(table: Mapping[str, Any], where: str) -> Recipe:
    refuse_unknown(table, _KEYS, where, RecipeError)
    if "recipe" not in table:
        raise RecipeError(f"{where} names no recipe.", 'Add recipe = "bfloat16/word".')
    recipe = _from_name(_text(table, "recipe", where))
    label = ""
    if "name" in table:
        label = " ".join(_text(table, "name", where).split())
    return replace(recipe, overrides=tuple(_overrides(table, where)), label=label)


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(table[key], str):
        raise RecipeError(
            f"{where} has {key} = {table[key]!r}, which is not text.", "Write a name in quotes."
        )
    return str(table[key])


def _overrides(table: Mapping[str, Any], where: str) -> Iterator[Override]:
    entries = table.get("override", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RecipeError(
            f"{where} has override = {entries!r}.", "Write [[override]] above each entry."
        )
    within = f"an [[override]] of {where}"
    for entry in entries:
        if set(entry) != {"pattern", "compute"}:
            keys = ", ".join(sorted(entry)) or "none"
            raise RecipeError(f"{within} has the keys {keys}.", "It takes pattern and compute.")
        yield Override(
            _text(entry, "pattern", within), get_compute(_text(entry, "compute", within))
        )


def _find_storage(name: str, compute: str) -> Storage:
    """Return the storage of that name: first the compute's, then a general one."""
    full = spelled(name)
    storage = STORAGES.get(f"{compute}/{full}") or STORAGES.get(full)
    if storage is not None:
        return storage
    owned = []
    names = []
    for row in STORAGES.values():
        if row.owner == full:
            owned.append(repr(row.name))
        if row.owner in ("", compute):
            names.append(row.short_name)
    if owned:
        raise RecipeError(
            f"no storage is named '{full}'.",
            f"Storages of {full} are recipes: {', '.join(owned)}.",
        )
    raise _no_part("storage", full, names)


def _no_part(part: str, name: str, names: Iterable[str]) -> RecipeError:
    return RecipeError(f"no {part} is named '{name}'.", f"{suggestion(name, names)} {_SEE}".strip())
