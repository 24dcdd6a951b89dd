"""Reading recipes: from a name, ``compute/storage/reduction`` or a short form of it, or from a TOML table.

A table can also name modules that stay wide, other computes or storages for some modules, computes for phases of a run, and a
compute for evaluation.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec import storages, variants
from narrowgauge.spec.aliases import ALIASES, SEE_ALIASES, compute_name, require_one_compute, spelled
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.recipes import Override, Phase, Recipe, own_name
from narrowgauge.spec.reductions import REDUCTIONS
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.spec.toml_text import load_toml

DEFAULT_STORAGE: dict[str, str] = {
    **dict.fromkeys(COMPUTES, "word"),
    **dict.fromkeys(("float32", "tfloat32"), "float32"),
    "float16": "split",
    "float16-throughout": "naive",
    "float8": "collage-plus",
}
"""The default storage of each compute."""


def default_storage(compute: str) -> str:
    """The default storage of a compute or of a variant."""
    return DEFAULT_STORAGE.get(compute.partition("+")[0], "")


def full_names() -> list[str]:
    """All valid ``compute/storage`` names, in the order of the tables."""
    names = []
    for compute in COMPUTES.values():
        for storage in STORAGES:
            try:
                names.append(Recipe(compute, STORAGES[storage]).name)
            except RecipeError:
                continue
    return names


def representative_names() -> list[str]:
    """Names that cover every compute, storage and alias, for tables and tests.

    Returns:
        Each compute with its default storage; each storage with bfloat16, or with the compute that it belongs to; then the
        recipes of aliases, and ``word`` with all computes that support it.
    """
    names = [f"{compute}/{storage}" for compute, storage in DEFAULT_STORAGE.items()]
    names += [name if "/" in name else f"bfloat16/{name}" for name in STORAGES]
    names += [alias.recipe for alias in ALIASES.values() if alias.is_taken and "/" in alias.recipe]
    names += [name for name in full_names() if name.endswith("/word")]
    return list(dict.fromkeys(names))


def known_names() -> list[str]:
    """All names that :func:`parse` accepts, except for other spellings and files."""
    asked = {name for name, alias in ALIASES.items() if not alias.is_taken}
    narrow = [name for name in variants.names() if name not in asked]
    return [*(name for name in ALIASES if name not in asked), *full_names(), *narrow]


def get_compute(compute: str | Compute) -> Compute:
    """A compute by its name, here or in another library, or itself.

    Raises:
        RecipeError: no compute and no variant has that name, or several may be meant by it.
    """
    if isinstance(compute, str):
        require_one_compute(compute)
    found = variants.find(compute_name(compute)) if isinstance(compute, str) else compute
    if found is None:
        advice = f"{suggestion(str(compute), variants.names())} (narrowgauge show recipes lists all.)".strip()
        raise RecipeError(f"no compute is named '{compute}'.", advice)
    return found


def parse(text: str | Path | Recipe) -> Recipe:
    """Read a recipe from its name or from a TOML file.

    Args:
        text: ``"bfloat16/word"``, an alias such as ``"bf16-mixed"`` (``narrowgauge show aliases``), a narrow compute alone
            (its default storage is added), the path of a ``.toml`` file, or a recipe, which is returned unchanged. The name of
            a 16-bit format alone is refused: libraries mean different recipes by it.
    Returns:
        The recipe.
    Raises:
        RecipeError: an unknown part, parts that contradict each other, or a file that cannot be read.

    Example:
        >>> parse("bf16-mixed").name, parse("bf16/word").name, parse("float8-row").name
        ('bfloat16/float32', 'bfloat16/word', 'float8-row/word')
    """
    if isinstance(text, Recipe):
        return text
    if str(text).endswith(".toml"):
        return parse_file(Path(text))
    compute, *rest = str(text).strip().split("/")
    name = "/".join([compute_name(compute), *map(spelled, rest)])
    if (alias := ALIASES.get(name)) is not None:
        if not alias.is_taken:
            raise alias.refusal(str(text))
        name = alias.recipe
    compute, *rest = name.split("/")
    if len(rest) > 2 or (not rest and variants.find(compute) is None):
        # A storage alone is a likely mistake, and not similar to any full name.
        near = f"Did you mean 'bfloat16/{name}'?" if name in STORAGES else suggestion(name, known_names())
        raise RecipeError(f"no recipe is named '{text}'.", f"{near} {_SEE}".strip())
    found = _find_compute(compute)
    storage = _find_storage(rest[0] if rest else default_storage(found.name), found.name)
    return Recipe(found, storage, _entry(REDUCTIONS, rest[1]) if len(rest) == 2 else REDUCTIONS["native"])


def parse_names(names: str) -> list[Recipe]:
    """Read the recipes of a command line: names and ``.toml`` files with commas between them.

    Example:
        >>> [recipe.name for recipe in parse_names("bf16/master, bf16/word")]
        ['bfloat16/master', 'bfloat16/word']
    """
    recipes = []
    for name in filter(None, map(str.strip, names.split(","))):
        try:
            recipes.append(parse(name))
        except RecipeError:
            if Path(name).is_dir():
                raise RecipeError(
                    f"the recipe {name} was requested, and it is a folder.", "Name a .toml file."
                ) from None
            raise
    return recipes


def parse_value(value: Any, where: str = "the record") -> Recipe:
    """Read a recipe from a TOML or JSON value: a name or a table, as :meth:`Recipe.to_value` returns it.

    Args:
        value: a table, as for :func:`parse_table`, or what :func:`parse` takes.
        where: where the value stands, for error messages.
    Returns:
        The recipe.
    Raises:
        RecipeError: a value of another type, or an unknown name.

    Example:
        >>> parse_value("bf16/word") == parse_value({"compute": "bfloat16", "storage": "word"})
        True
    """
    if isinstance(value, Mapping):
        return parse_table(value, f"the recipe of {where}")
    if not isinstance(value, str | Path | Recipe):
        raise RecipeError(f"{where} has recipe = {value!r}.", "A recipe is a name in quotes, or a table.")
    return parse(value)


def parse_file(path: Path) -> Recipe:
    """Read a recipe from a TOML file; see :func:`parse_table` for its keys.

    Args:
        path: a UTF-8 TOML file.
    Returns:
        The recipe, labelled by its ``name``, else by the file's stem.
    Raises:
        RecipeError: the file is missing, is not TOML, or has an unknown name.
    """
    try:
        table = load_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"the recipe file '{path}' does not exist.", _SEE) from None
    except (ValueError, OSError) as error:
        raise RecipeError(f"the recipe file '{path}' cannot be read: {error}.") from None
    recipe = parse_table(table, str(path))
    return recipe if recipe.label else replace(recipe, label=path.stem)


def parse_table(table: Mapping[str, Any], where: str = "the recipe table") -> Recipe:
    """Read a recipe from a TOML table.

    Args:
        table: ``compute``, ``storage`` and ``reduction``, or ``recipe = "bfloat16/word"`` instead; ``name`` (a label);
            ``evaluation`` (a compute), ``keep`` (patterns), ``override`` (a list of tables with ``pattern`` and ``storage``,
            ``compute`` or both) and ``phase`` (a list of tables with ``until`` and ``compute``).
        where: where the table stands, for error messages.
    Returns:
        The recipe.
    Raises:
        RecipeError: an unknown key or name, or a value of the wrong type.

    Example:
        >>> recipe = parse_table({"recipe": "bfloat16/word", "phase": [{"until": 0.9, "compute": "float8-row"}]})
        >>> recipe.compute_at(0.0).name, recipe.compute_at(0.9).name
        ('float8-row', 'bfloat16')
    """
    for key in table:
        if key not in _KEYS:
            raise RecipeError(
                f"{where} has an unknown key '{key}'.", suggestion(key, _KEYS) or f"It takes {', '.join(_KEYS)}."
            )
    parts = {key: _text(table, key, where) for key in ("recipe", "compute", "storage", "reduction") if key in table}
    if "recipe" in parts:
        # A file that names itself would be read endlessly.
        if parts["recipe"].endswith(".toml"):
            raise RecipeError(f"{where} names another recipe file, {parts['recipe']}.", "Write that recipe out here.")
        base = parse(parts["recipe"]).to_dict()
    elif "compute" in parts:
        named = compute_name(parts["compute"])
        if "storage" not in parts:
            require_one_compute(parts["compute"])
        base = {"compute": named, "storage": default_storage(named), "reduction": "native"}
    else:
        raise RecipeError(f"{where} names no compute.", 'Add compute = "bfloat16" or recipe = "bfloat16/word".')
    compute = _find_compute(parts.get("compute", base["compute"]))
    return Recipe(
        compute,
        _find_storage(parts.get("storage", base["storage"]), compute.name),
        _entry(REDUCTIONS, parts.get("reduction", base["reduction"])),
        _patterns(table, where),
        _overrides(table, where, compute.name),
        _phases(table, where),
        _compute(table, "evaluation", where) if "evaluation" in table else None,
        " ".join(_text(table, "name", where).split()) if "name" in table else "",
    )


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(table[key], str):
        raise RecipeError(f"{where} has {key} = {table[key]!r}, which is not text.", "Write a name in quotes.")
    return str(table[key])


def _patterns(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    keep = table.get("keep", [])
    if not isinstance(keep, list) or not all(isinstance(pattern, str) for pattern in keep):
        raise RecipeError(
            f"{where} has keep = {keep!r}, which is not a list of patterns.", 'For instance keep = ["lm_head"].'
        )
    return tuple(keep)


def _overrides(table: Mapping[str, Any], where: str, compute: str) -> tuple[Override, ...]:
    within = f"an [[override]] of {where}"
    overrides = []
    for entry in _entries(
        table, "override", where, "Write [[override]] above each pattern with its storage or compute."
    ):
        if "pattern" not in entry or not {"pattern"} < set(entry) <= {"pattern", "storage", "compute"}:
            raise RecipeError(
                f"{within} has the keys {_listed(entry)}.", "It takes pattern, and storage, compute or both."
            )
        storage = _find_storage(_text(entry, "storage", within), compute) if "storage" in entry else None
        other = _compute(entry, "compute", within) if "compute" in entry else None
        overrides.append(Override(_text(entry, "pattern", within), storage, other))
    return tuple(overrides)


def _phases(table: Mapping[str, Any], where: str) -> tuple[Phase, ...]:
    within = f"a [[phase]] of {where}"
    phases = []
    for entry in _entries(table, "phase", where, "Write [[phase]] above each until and compute."):
        if set(entry) != {"until", "compute"}:
            raise RecipeError(f"{within} has the keys {_listed(entry)}.", "It takes until and compute.")
        until = entry["until"]
        if isinstance(until, bool) or not isinstance(until, (int, float)):
            raise RecipeError(f"{within} has until = {until!r}, which is not a number.", "For instance until = 0.9.")
        phases.append(Phase(float(until), _compute(entry, "compute", within)))
    return tuple(phases)


def _entries(table: Mapping[str, Any], key: str, where: str, advice: str) -> list[dict[str, Any]]:
    """The list of tables under a key; empty without the key."""
    entries = table.get(key, [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RecipeError(f"{where} has {key} = {entries!r}.", advice)
    return entries


def _listed(entry: Mapping[str, Any]) -> str:
    return ", ".join(sorted(entry)) or "none"


def _compute(table: Mapping[str, Any], key: str, where: str) -> Compute:
    return _find_compute(_text(table, key, where))


_KEYS = ("recipe", "name", "compute", "storage", "reduction", "evaluation", "keep", "override", "phase")
_SEE = "(narrowgauge show recipes lists all.)"


def _find_compute(name: str) -> Compute:
    """The compute of that name."""
    full = compute_name(name)
    alias = ALIASES.get(full)
    if (compute := variants.find(full)) is not None:
        return compute
    if alias is not None and not alias.is_taken:
        nearest = alias.recipe.partition("/")[0]
        raise RecipeError(
            f"no recipe part is named '{name}': {alias.differs}", f"Take compute '{nearest}'. {SEE_ALIASES}"
        )
    base, plus, _ = full.partition("+")
    if plus and base in COMPUTES:
        also = [known for known in variants.names() if known.startswith(f"{base}+")]
        advice = f"Take {' or '.join(map(repr, also))}." if also else f"It has no variants; take '{base}'."
        raise RecipeError(f"compute '{base}' has no variant '{full}'.", f"{advice} {_SEE}")
    raise RecipeError(f"no recipe part is named '{full}'.", f"{suggestion(full, variants.names())} {_SEE}".strip())


def _find_storage(name: str, compute: str) -> Storage:
    """The storage of that name: one that belongs to the compute, else one that belongs to none, else a composed one."""
    full = name.strip().lower() if "+" in name else spelled(name)
    storage = storages.find(f"{compute}/{full}") or storages.find(full)
    if storage is None:
        names = [
            own_name(known) for known in STORAGES.values() if known.name.partition("/")[0] in (known.name, compute)
        ]
        raise RecipeError(f"no recipe part is named '{full}'.", f"{suggestion(full, names)} {_SEE}".strip())
    return storage


def _entry(table: Mapping[str, Any], name: str) -> Any:
    """The entry of a table, or an error that suggests the nearest name."""
    if name in table:
        return table[name]
    raise RecipeError(f"no recipe part is named '{name}'.", f"{suggestion(name, table)} {_SEE}".strip())
