"""Read recipes from a name (``compute/storage/reduction``), or from another library's name.

Short spellings of formats (``bf16``) are expanded, ignoring case. Another library's name is
accepted if it means exactly one recipe. Ambiguous names are refused, with the nearest recipes: also
a 16-bit format alone, by which libraries mean different weights and moments. Within a recipe
(``bf16/word``) it is the compute.
"""

from typing import Any

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.recipes import Recipe
from narrowgauge.spec.reductions import REDUCTIONS
from narrowgauge.spec.require import unknown
from narrowgauge.spec.storages import STORAGES
from narrowgauge.spec.toml import load_data

_NAMES = load_data("aliases")
SPELLINGS = _NAMES["spellings"]
"""Short spellings of formats at the beginning of a name, up to a dash."""
ALIASES = _NAMES["aliases"]
"""Names of other libraries, in lower case with formats in full spelling.

``recipe`` is the full name of a recipe, or a compute that any storage may follow; ``source`` the
libraries that use the name.
"""
REFUSED = _NAMES["refused"]
"""Names of other libraries that say too little of a recipe, and published methods that are none.

``nearest`` is what comes nearest, ``why`` what they keep that it does not.
"""
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
    for name in (part.strip().lower(), spelled(part)):
        recipe = ALIASES.get(name, {}).get("recipe", "/")
        if "/" not in recipe:
            return recipe
    return spelled(part)


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
    if name in COMPUTES:
        return COMPUTES[name]
    _refuse(compute, name)
    raise unknown("compute", name, COMPUTES)


def parse(value: Any) -> Recipe:
    """Read a recipe from its name.

    Args:
        value: ``"bfloat16/word"``, an alias such as ``"bf16-mixed"`` (``narrowgauge show
            aliases``), a narrow compute alone (its default storage is added), or a recipe, which is
            returned unchanged.
    Returns:
        The recipe.
    Raises:
        RecipeError: an unknown part, or parts that contradict each other.
    Example:
        >>> parse("bf16-mixed").name, parse("bf16/word").name, parse("float8-row").name
        ('bfloat16/float32', 'bfloat16/word', 'float8-row/word')
    """
    if isinstance(value, Recipe):
        return value
    if not isinstance(value, str):
        raise RecipeError(f"Cannot take recipe = {value!r}.", "A recipe is a name in quotes.")
    parts = value.strip().split("/")
    name = "/".join([compute_name(parts[0]), *map(spelled, parts[1:])])
    _refuse(value, name)
    name = ALIASES.get(name, {}).get("recipe", name)
    parts = name.split("/")
    if len(parts) > 3 or (len(parts) == 1 and name not in COMPUTES):
        # A storage alone is a likely mistake, and not similar to any full name.
        near = f"Did you mean 'bfloat16/{name}'?"
        if name not in STORAGES:
            near = suggestion(name, [*ALIASES, *representative_names(), *COMPUTES])
        raise RecipeError(f"no recipe is named '{value}'.", f"{near} {_SEE}".strip())
    compute = get_compute(parts[0])
    name = parts[1] if len(parts) > 1 else compute.default_storage
    reduction = parts[2] if len(parts) > 2 else "native"
    storage = STORAGES.get(f"{compute.name}/{name}") or STORAGES.get(name)
    if storage is None:
        raise unknown("storage", name, [stored.short_name for stored in STORAGES.values()])
    if reduction not in REDUCTIONS:
        raise unknown("reduction", reduction, REDUCTIONS)
    return Recipe(compute, storage, REDUCTIONS[reduction])


def parse_names(names: str) -> list[Recipe]:
    """Read the recipes of a command line: names, separated by commas."""
    parts = list(filter(None, map(str.strip, names.split(","))))
    if not parts:
        raise RecipeError("no recipe was named.", "For instance bfloat16/master,bfloat16/word.")
    return list(map(parse, parts))


def _refuse(text: str, name: str) -> None:
    """Raise for a name that says too little, or does not name a recipe."""
    if name in REFUSED:
        row = REFUSED[name]
        nearest = ", ".join(map(repr, row["nearest"]))
        why = row.get("why", "it says too little")
        raise RecipeError(
            f"Cannot take '{text}' as a recipe: {why}.",
            f"Take {nearest}. (narrowgauge show aliases)",
        )
