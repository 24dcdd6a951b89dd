"""Reading recipes: from a name (``compute/storage/reduction``), from another library's name, or from a TOML table.

Short spellings of formats (``bf16``) are expanded, ignoring case, before a name is looked up. A name of another library that
means exactly one recipe is accepted. A name that is ambiguous, or has no equivalent here, is refused with the reason and the
nearest recipes. The name of a 16-bit format alone is refused as a recipe, since libraries mean different weights and moments by
it; as a part of one (``bf16/word``, ``compute = "bf16"``) it is the compute.

A table can also name modules that stay wide, other computes or storages for some modules, computes for phases of a run, and a
compute for evaluation.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.spec import computes, storages
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.recipe_sets import RECIPE_SETS
from narrowgauge.spec.recipes import Override, Phase, Recipe, own_name
from narrowgauge.spec.storages import STORAGES, Storage
from narrowgauge.spec.sums import REDUCTIONS
from narrowgauge.spec.toml import load_toml


@dataclass(frozen=True, slots=True)
class Alias:
    """A name of another library.

    Args:
        name: as it is looked up: in lower case, with formats in full spelling.
        recipe: the full name of its recipe, or of the nearest one; or a compute, which any storage may follow.
        source: the libraries that use it, and their spelling.
        differs: why the name is refused; empty if it is accepted.
        others: of a refused name, further recipes that may have been meant, each with what it is.
    """

    name: str
    recipe: str
    source: str
    differs: str = ""
    others: tuple[tuple[str, str], ...] = ()

    @property
    def is_taken(self) -> bool:
        return not self.differs

    @property
    def is_compute(self) -> bool:
        """Whether it is, or could be, a compute, which any storage may follow."""
        return "/" not in self.recipe

    def refusal(self, said: str) -> RecipeError:
        """The error for a name, in its user's spelling, that is not accepted."""
        nearest = f"'{self.recipe}'" + (f" ({self.source})" if self.others else "")
        choices = [nearest, *(f"'{recipe}' ({what})" for recipe, what in self.others)]
        listed = " or ".join(filter(None, [", ".join(choices[:-1]), choices[-1]]))
        return RecipeError(f"no recipe is named '{said}': {self.differs}", f"Take {listed}. {SEE_ALIASES}")


SEE_ALIASES = "(narrowgauge show aliases lists the names of other libraries.)"

SPELLINGS: dict[str, str] = {
    "bf16": "bfloat16",
    **dict.fromkeys(("fp16", "f16", "16", "half"), "float16"),
    **dict.fromkeys(("fp32", "f32", "32", "single"), "float32"),
    **dict.fromkeys(("fp64", "f64", "64", "double"), "float64"),
    "tf32": "tfloat32",
    "fp8": "float8",
    "fp4": "float4",
}
"""Short spellings of formats at the beginning of a name, up to a dash."""

_TE = "it is float8 with delayed scales and does not specify a storage"
_TE_LIGHTNING = f"{_TE} (there, weights in 16 bits, which lose updates)."
_TE_BY_CHIP = "it names a library, whose default scales depend on the chip, and does not specify a storage."
_TE_BLACKWELL = (("mxfp8/word", "on Blackwell"),)
_TE_ALONE = "it is float8 with delayed scales in TransformerEngine's own layers, and what is around them is not cast."
_INT8_TRAINED = "it is a matmul over float16 weights that are trained without a master, and does not specify a storage."
_FROZEN = "it is a format of frozen weights, and here all weights are trained."
_STATES = "it is a format of optimizer states and does not specify a compute."
_SIXTEEN_BITS = "it names a format, and libraries store weights and moments in different ways by that name."
_SCALED8 = "it does not specify how float8 is scaled."
_MIXED8 = (
    ("float8-tensor/float32", "a scale per tensor"),
    ("float8-delayed-e5m2/float32", "TransformerEngine's default before Blackwell"),
)
_HOW_MIXED = "it does not say which format is mixed with float32."
_TWO_FLOAT8 = "float8 matmuls and weights that are stored in float8 both go by that name."
_BY_FLOAT16 = (
    ("float16/master", "DeepSpeed, Megatron: fp16"),
    ("float16/naive", "model.half()"),
    ("float16/split", "12 bytes per parameter, no update lost"),
)
_BY_BFLOAT16 = (
    ("bfloat16/master", "DeepSpeed, Megatron: bf16"),
    ("bfloat16/naive", "model.bfloat16(), which loses updates"),
    ("bfloat16/word", "8 bytes per parameter, no update lost"),
)
_MATMULS8 = (
    ("float8-tensor-e5m2", "a scale per tensor; torchao: tensorwise, Accelerate: fp8"),
    ("float8-delayed-e5m2", "TransformerEngine's default before Blackwell"),
    ("float8/collage-plus", "bfloat16 matmuls of weights stored in float8"),
)
_E4M3_ALONE = (("float8-row", "a scale per row"), ("float8-tensor", "a scale per tensor"))

_TORCHAO, _ENGINE = "torchao, torchtitan", "TransformerEngine"

_ALIASES = (
    Alias("fp8", "float8-row", "here alone; Accelerate's fp8 is float8-tensor-e5m2 or float8-delayed-e5m2"),
    Alias("int8", "int8-row", "torchao: int8_mixed_precision_training"),
    Alias("rowwise", "float8-row", f"{_TORCHAO}: rowwise"),
    Alias("tensorwise", "float8-tensor-e5m2", "torchao: tensorwise"),
    Alias("float8-rowwise", "float8-row", f"{_TORCHAO}: rowwise"),
    Alias("float8-tensorwise", "float8-tensor-e5m2", "torchao: tensorwise"),
    Alias("blockwise", "float8-block", "Megatron: --fp8-format e4m3 --fp8-recipe blockwise"),
    Alias("delayedscaling", "float8-delayed-e5m2", f"{_ENGINE}: DelayedScaling"),
    Alias("float8currentscaling", "float8-tensor-e5m2", f"{_ENGINE}: Float8CurrentScaling"),
    Alias("float8blockscaling", "float8-block", f"{_ENGINE}: Float8BlockScaling"),
    Alias("mxfp8blockscaling", "mxfp8", f"{_ENGINE}: MXFP8BlockScaling"),
    Alias("nvfp4blockscaling", "nvfp4", f"{_ENGINE}: NVFP4BlockScaling"),
    Alias("bfloat16-mixed", "bfloat16/float32", "Lightning: bf16-mixed"),
    Alias("bfloat16-true", "bfloat16/naive", "Lightning: bf16-true"),
    Alias("float16-mixed", "float16/float32", "Lightning: 16-mixed"),
    Alias("float16-true", "float16/naive", "Lightning: 16-true"),
    Alias("float64-true", "float64/float64", "Lightning: 64-true"),
    Alias("float32-true", "float32/float32", "Lightning: 32-true"),
    Alias("collage-light", "bfloat16/collage-light", "Collage"),
    Alias("collage-plus", "bfloat16/collage-plus", "Collage"),
    Alias("o0", "float32/float32", "apex until May 2025: O0"),
    Alias("o1", "float16/float32", "apex until May 2025: O1"),
    Alias("o2", "float16/master", "apex until May 2025: O2"),
    Alias("o3", "float16/naive", "apex until May 2025: O3"),
    Alias("amp", "float16/float32", "OpenCLIP: amp"),
    Alias("amp_fp16", "float16/float32", "Composer: amp_fp16"),
    Alias("amp_bf16", "bfloat16/float32", "Composer, OpenCLIP: amp_bf16"),
    Alias("amp_bfloat16", "bfloat16/float32", "OpenCLIP: amp_bfloat16"),
    Alias("pure_fp16", "float16/naive", "OpenCLIP: pure_fp16"),
    Alias("pure_bf16", "bfloat16/naive", "OpenCLIP: pure_bf16"),
    Alias("mixed_float16", "float16/float32", "Keras: mixed_float16"),
    Alias("mixed_bfloat16", "bfloat16/float32", "Keras: mixed_bfloat16"),
    Alias("bfloat16", "bfloat16/float32", "Transformers, Accelerate, Lightning: bf16", _SIXTEEN_BITS, _BY_BFLOAT16),
    Alias("float16", "float16/float32", "Transformers, Accelerate: fp16, Lightning: 16", _SIXTEEN_BITS, _BY_FLOAT16),
    Alias("float8", "float8-row", "float8 matmuls, a scale per row", _TWO_FLOAT8, _MATMULS8),
    Alias("mixed", "bfloat16/float32", "bf16-mixed", _HOW_MIXED, (("float16/float32", "fp16-mixed"),)),
    Alias("autocast", "bfloat16/float32", "bf16-mixed", _HOW_MIXED, (("float16/float32", "fp16-mixed"),)),
    Alias("mixed-precision", "bfloat16/float32", "bf16-mixed", _HOW_MIXED, (("float16/float32", "fp16-mixed"),)),
    Alias("float8-mixed", "float8-row/float32", "float8 matmuls, float32 weights", _SCALED8, _MIXED8),
    Alias("float8-hybrid", "float8-tensor-e5m2/word", "TransformerEngine: HYBRID", _SCALED8),
    Alias("e4m3", "float8-delayed", "Megatron: --fp8-format e4m3, delayed by default", _SCALED8, _E4M3_ALONE),
    Alias("float8_e4m3fn", "float8-row", "PyTorch: the format", _SCALED8, _E4M3_ALONE[1:]),
    Alias("int4", "mxfp4/word", "torchao: int4", "there is no compute of int4.", (("nvfp4/word", "four bits too"),)),
    Alias("no", "float32/float32", "Accelerate: no", "it does not specify a recipe."),
    Alias("none", "float32/float32", "Accelerate: no", "it does not specify a recipe."),
    Alias("transformer-engine", "float8-delayed-e5m2/word", "Lightning: transformer-engine", _TE_LIGHTNING),
    Alias("transformer-engine-float16", "float8-delayed-e5m2/word", "Lightning: transformer-engine-float16", _TE_LIGHTNING),
    Alias("transformerengine", "float8-delayed-e5m2/word", f"{_ENGINE} before Blackwell", _TE_BY_CHIP, _TE_BLACKWELL),
    Alias("te", "float8-delayed-e5m2/word", "Accelerate: fp8_backend te", f"{_TE}."),
    Alias("amp_fp8", "float8-delayed-e5m2/float32", "Composer: amp_fp8", _TE_ALONE),
    Alias("hybrid", "float8-delayed-e5m2/word", "Megatron: --fp8-format hybrid, delayed by default", _SCALED8),
    Alias("adamw_8bit", "bfloat16/compact", "Transformers: adamw_8bit", _STATES),
    Alias("adamw_bnb_8bit", "bfloat16/compact", "Transformers: adamw_bnb_8bit", _STATES),
    Alias("8bit", "int8-outlier/word", "Transformers: load_in_8bit", _FROZEN),
    Alias("4bit", "nvfp4/word", "Transformers: load_in_4bit", _FROZEN),
    Alias("nf4", "nvfp4/word", "bitsandbytes: nf4", _FROZEN),
    Alias("nf4-dq", "nvfp4/word", "Lightning: nf4-dq", _FROZEN),
    Alias("float4", "nvfp4/word", "bitsandbytes: fp4", "there are two float4 computes here, nvfp4 and mxfp4."),
    Alias("float4-dq", "nvfp4/word", "Lightning: fp4-dq", _FROZEN),
    Alias("int8-training", "int8-outlier/word", "Lightning: int8-training", _INT8_TRAINED),
)  # fmt: skip

ALIASES: dict[str, Alias] = {alias.name: alias for alias in _ALIASES}
FOREIGN_COMPUTES: dict[str, str] = {
    alias.name: alias.recipe for alias in _ALIASES if alias.is_taken and alias.is_compute
}
"""The names of computes in other libraries, and the compute that each means."""


def spelled(part: str) -> str:
    """The full spelling of a part of a name.

    Example:
        >>> spelled("BF16-mixed")
        'bfloat16-mixed'
    """
    head, dash, rest = part.strip().lower().partition("-")
    return SPELLINGS.get(head, head) + dash + rest


def compute_name(part: str) -> str:
    """The full name of a compute, or of a recipe where a compute is allowed.

    Example:
        >>> compute_name("fp8"), compute_name("FP8-tensor")
        ('float8-row', 'float8-tensor')
    """
    full = spelled(part)
    return FOREIGN_COMPUTES.get(part.strip().lower()) or FOREIGN_COMPUTES.get(full, full)


def require_one_compute(said: str) -> None:
    """Refuse a name that could be several computes, where no storage beside it says which."""
    alias = ALIASES.get(compute_name(said))
    if alias is not None and not alias.is_taken and alias.is_compute:
        raise alias.refusal(said)


# ── names and tables ───────────────────────────────────────────────────────────────────────────────────────────────────


def default_storage(compute: str) -> str:
    """The default storage of a compute or of a variant; empty for an unknown name."""
    row = COMPUTES.get(compute.partition("+")[0])
    return row.default_storage if row is not None else ""


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

    They are each compute with its default storage; each storage with bfloat16, or with the compute that it belongs to; then the
    recipes of aliases, and ``word`` with all computes that support it.
    """
    names = [f"{compute.name}/{compute.default_storage}" for compute in COMPUTES.values()]
    names += [name if "/" in name else f"bfloat16/{name}" for name in STORAGES]
    names += [alias.recipe for alias in ALIASES.values() if alias.is_taken and "/" in alias.recipe]
    names += [name for name in full_names() if name.endswith("/word")]
    return list(dict.fromkeys(names))


def known_names() -> list[str]:
    """All names that :func:`parse` accepts, except for other spellings and files."""
    asked = {name for name, alias in ALIASES.items() if not alias.is_taken}
    narrow = [name for name in computes.names() if name not in asked]
    return [*(name for name in ALIASES if name not in asked), *full_names(), *narrow]


def get_compute(compute: str | Compute) -> Compute:
    """A compute by its name, here or in another library, or itself; an unknown or ambiguous name is refused."""
    if isinstance(compute, str):
        require_one_compute(compute)
    found = computes.find(compute_name(compute)) if isinstance(compute, str) else compute
    if found is None:
        computes.refuse_threshold(compute_name(str(compute)))
        advice = f"{suggestion(str(compute), computes.names())} (narrowgauge show recipes lists all.)".strip()
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
    if name in RECIPE_SETS:
        raise RecipeError(
            f"'{text}' is a set of {len(RECIPE_SETS[name].recipes)} recipes, and one recipe was expected.",
            f"Name one of them, or take narrowgauge compare --recipes {name}.",
        )
    if len(rest) > 2 or (not rest and computes.find(compute) is None):
        computes.refuse_threshold(compute)
        # A storage alone is a likely mistake, and not similar to any full name.
        near = f"Did you mean 'bfloat16/{name}'?" if name in STORAGES else suggestion(name, known_names())
        raise RecipeError(f"no recipe is named '{text}'.", f"{near} {_SEE}".strip())
    found = _find_compute(compute)
    storage = _find_storage(rest[0] if rest else default_storage(found.name), found.name)
    return Recipe(found, storage, _entry(REDUCTIONS, rest[1]) if len(rest) == 2 else REDUCTIONS["native"])


def parse_names(names: str, is_native: Callable[[Recipe], bool] = lambda recipe: True) -> list[Recipe]:
    """Read the recipes of a command line: names, ``.toml`` files and sets of :data:`RECIPE_SETS`, separated by commas.

    Args:
        names: a set stands for those of its recipes that are not listed by themselves.
        is_native: whether the machine multiplies a recipe's operands; asked of a set's recipes that are useless elsewhere.

    Example:
        >>> [recipe.name for recipe in parse_names("bf16/master, bf16/word")]
        ['bfloat16/master', 'bfloat16/word']
        >>> [recipe.name for recipe in parse_names("sixteen-bit", lambda recipe: False)]
        ['float32/float32', 'float16/float32', 'bfloat16/float32', 'float16/naive', 'bfloat16/naive']
    """
    parts = [part for part in map(str.strip, names.split(",")) if part]
    listed = {part: _parse_listed(part) for part in parts if part.lower() not in RECIPE_SETS}
    recipes: list[Recipe] = []
    for part in parts:
        if part in listed:
            recipes.append(listed[part])
            continue
        row = RECIPE_SETS[part.lower()]
        members = {name: parse(name) for name in row.recipes}
        recipes += [
            recipe
            for name, recipe in members.items()
            if recipe not in (*listed.values(), *recipes) and (name not in row.where_native or is_native(recipe))
        ]
    return recipes


def _parse_listed(name: str) -> Recipe:
    try:
        return parse(name)
    except RecipeError:
        if Path(name).is_dir():
            raise RecipeError(f"the recipe {name} was requested, and it is a folder.", "Name a .toml file.") from None
        raise


def parse_value(value: Any, where: str = "the record") -> Recipe:
    """Read a recipe from a TOML or JSON value: a name or a table, as :meth:`Recipe.to_value` returns it.

    ``where`` names the value's place in error messages.

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
    """Read a recipe from a TOML file, labelled by its ``name``, else by the file's stem; see :func:`parse_table` for its keys."""
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
        where: names the table in error messages.
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
    full = compute_name(name)
    alias = ALIASES.get(full)
    if (compute := computes.find(full)) is not None:
        return compute
    if alias is not None and not alias.is_taken:
        nearest = alias.recipe.partition("/")[0]
        raise RecipeError(
            f"no recipe part is named '{name}': {alias.differs}", f"Take compute '{nearest}'. {SEE_ALIASES}"
        )
    computes.refuse_threshold(full)
    base, plus, _ = full.partition("+")
    if plus and base in COMPUTES:
        also = [known for known in computes.names() if known.startswith(f"{base}+")]
        advice = f"Take {' or '.join(map(repr, also))}." if also else f"It has no variants; take '{base}'."
        raise RecipeError(f"compute '{base}' has no variant '{full}'.", f"{advice} {_SEE}")
    raise RecipeError(f"no recipe part is named '{full}'.", f"{suggestion(full, computes.names())} {_SEE}".strip())


def _find_storage(name: str, compute: str) -> Storage:
    """The storage of that name: one that belongs to the compute, else one that belongs to none, else a composed one."""
    full = name.strip().lower() if "+" in name else spelled(name)
    storage = storages.find(f"{compute}/{full}") or storages.find(full)
    if storage is None:
        names = [
            own_name(known) for known in STORAGES.values() if known.name.partition("/")[0] in (known.name, compute)
        ]
        if full == "float64":
            raise RecipeError(
                f"storage 'float64' was requested with compute '{compute}', and belongs to compute 'float64'.",
                "Take 'float64/float64', or storage 'master64', which updates narrow weights in float64.",
            )
        raise RecipeError(f"no recipe part is named '{full}'.", f"{suggestion(full, names)} {_SEE}".strip())
    return storage


def _entry(table: Mapping[str, Any], name: str) -> Any:
    if name in table:
        return table[name]
    raise RecipeError(f"no recipe part is named '{name}'.", f"{suggestion(name, table)} {_SEE}".strip())
