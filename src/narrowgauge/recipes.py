"""Recipes: which numbers a model computes with, and which it keeps.

A recipe has up to three parts, ``compute/storage/reduction``: how operands enter a matmul, how weights and moments are
cut to be kept, and how gradients are summed across ranks. Three small tables, N + M + K rows, stand for N x M x K named
classes; a row is a value that tests, docs, ``narrowgauge show``, the optimizer and the trainer all read. Storages have a file of
their own, :mod:`narrowgauge.storages`.
"""

from __future__ import annotations

import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from narrowgauge import storages
from narrowgauge.errors import RecipeError, suggestion
from narrowgauge.storages import STORAGES, Storage, for_vectors


@dataclass(frozen=True, slots=True)
class Compute:
    """How the operands of a linear layer's three matmuls are cast, and the dtype of all else.

    Args:
        name: the row's name.
        output, grad_input, grad_weight: format of both operands of each matmul.
        purpose: when to use it.
        source: where it comes from.
    """

    name: str
    output: str
    grad_input: str
    grad_weight: str
    purpose: str
    source: str

    @property
    def scales_loss(self) -> bool:
        """Whether gradients need a loss scale to stay in range."""
        return self.output == "float16"

    def dtypes(self, storage: Storage) -> dict[str, str]:
        """The dtype of everything outside the matmuls, for weights kept in ``storage``."""
        autocast = self.output != storage.visible
        stream = storage.visible
        return {
            "weights seen": storage.visible,
            "norms": f"float32 inside, {stream} out",
            "softmax": "float32",
            "rotary buffers": "float32",
            "residual": stream,
            "kept for backward": self.output,
            "logits": self.output if autocast else stream,
            "loss": "float32",
        }


COMPUTES: dict[str, Compute] = {
    row.name: row
    for row in (
        Compute(
            "float32", "float32", "float32", "float32",
            "the reference every other row is compared with",
            "IEEE 754",
        ),
        Compute(
            "bfloat16", "bfloat16", "bfloat16", "bfloat16",
            "the field's default: 8 bits of precision, float32's range, sums inside a matmul in float32",
            "Kalamkar et al. 2019",
        ),
        Compute(
            "float16", "float16", "float16", "float16",
            "11 bits of precision, 2^-24 … 65504 only: the loss is scaled, and steps that overflow are skipped",
            "Micikevicius et al. 2018",
        ),
        Compute(
            "float8", "bfloat16", "bfloat16", "bfloat16",
            "weights that are float8 numbers of their row's scale, multiplied as bfloat16",
            "Yu et al. 2024, whose storages are its only ones",
        ),
    )
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Reduction:
    """How gradients are summed across ranks, and the format in which they travel."""

    name: str
    wire: str
    purpose: str
    source: str


REDUCTIONS: dict[str, Reduction] = {
    row.name: row
    for row in (Reduction("native", "the gradient's own", "one process: there is nothing to sum", "PyTorch"),)
}


@dataclass(frozen=True, slots=True)
class Override:
    """A storage for the parameters whose name matches ``pattern`` (shell wildcards)."""

    pattern: str
    storage: Storage

    def matches(self, name: str) -> bool:
        """Whether the parameter ``name`` is meant."""
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Recipe:
    """A policy for a whole model: one row of each table, and the exceptions by module name.

    Args:
        compute: how operands enter matmuls.
        storage: how weights and moments are kept.
        reduction: how gradients are summed across ranks.
        keep: patterns of module names that stay in float32 altogether.
        overrides: other storages by pattern of parameter name; the last match wins.

    Raises:
        RecipeError: when the parts contradict each other.

    Example:
        >>> parse("bf16/word").name
        'bfloat16/word'
        >>> parse("bfloat16/word").bytes_per_param
        8.0
    """

    compute: Compute
    storage: Storage
    reduction: Reduction = REDUCTIONS["native"]
    keep: tuple[str, ...] = ()
    overrides: tuple[Override, ...] = ()

    def __post_init__(self) -> None:
        if self.compute.name == "float32" and self.storage.visible != "float32":
            raise RecipeError(
                f"compute 'float32' was asked for over storage '{self.storage.name}', whose weights are "
                f"{self.storage.visible}.",
                "Take 'float32/float32', or compute 'bfloat16'.",
            )
        bound = self.storage.name.partition("/")[0] if "/" in self.storage.name else None
        other = self.compute.name in ("float16", "float8") and self.storage.visible != "float32" and bound is None
        if other or bound not in (None, self.compute.name) or (self.compute.name == "float8" and bound is None):
            fitting = [n.partition("/")[2] for n in STORAGES if n.startswith(f"{self.compute.name}/")]
            raise RecipeError(
                f"compute '{self.compute.name}' was asked for over storage '{self.storage.name}', which is not its own.",
                f"Take storage {', '.join(map(repr, fitting))}." if fitting else f"Take compute '{bound}'.",
            )

    @property
    def name(self) -> str:
        """The full name, ``compute/storage`` and the reduction where it is not the native one."""
        tail = "" if self.reduction.name == "native" else f"/{self.reduction.name}"
        return f"{self.compute.name}/{own_name(self.storage)}{tail}"

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient and states, for matrices."""
        return self.storage.bytes_per_param

    def storage_of(self, name: str, num_dims: int) -> Storage:
        """The row for the parameter ``name`` with ``num_dims`` dimensions.

        Args:
            name: dotted parameter name.
            num_dims: its number of dimensions; at most one makes it a vector.
        Returns:
            A row of ``STORAGES``: float32 for kept modules, then the last matching override, then the recipe's own.
        """
        if self.keeps(name):
            return STORAGES["float32"]
        matches = (o.storage for o in reversed(self.overrides) if o.matches(name))
        row = next(matches, self.storage)
        return for_vectors(row) if num_dims < 2 else row

    def keeps(self, name: str) -> bool:
        """Whether the module or parameter ``name`` lies under a ``keep`` pattern."""
        parts = name.split(".")
        return any(
            fnmatch.fnmatchcase(".".join(parts[:end]), pattern)
            for pattern in self.keep
            for end in range(1, len(parts) + 1)
        )

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a TOML table that :func:`parse_table` reads back to an equal recipe."""
        table: dict[str, Any] = {
            "compute": self.compute.name,
            "storage": own_name(self.storage),
            "reduction": self.reduction.name,
        }
        if self.keep:
            table["keep"] = list(self.keep)
        if self.overrides:
            table["override"] = [{"pattern": o.pattern, "storage": own_name(o.storage)} for o in self.overrides]
        return table


def own_name(storage: Storage) -> str:
    """A storage's name without that of the compute it belongs to."""
    return storage.name.rpartition("/")[2]


ALIASES: dict[str, str] = {
    "bfloat16-mixed": "bfloat16/float32",
    "bfloat16-true": "bfloat16/naive",
    "float32-true": "float32/float32",
    "float16-mixed": "float16/float32",
    "collage-light": "bfloat16/collage-light",
    "collage-plus": "bfloat16/collage-plus",
}
SPELLINGS = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "fp16": "float16", "fp8": "float8"}
DEFAULT_STORAGE = {"float32": "float32", "bfloat16": "word", "float16": "split", "float8": "collage-plus"}


def full_names() -> list[str]:
    """Every legal ``compute/storage`` name, in table order."""
    names = []
    for compute in COMPUTES.values():
        for storage in STORAGES:
            try:
                names.append(Recipe(compute, STORAGES[storage]).name)
            except RecipeError:
                continue
    return names


def known_names() -> list[str]:
    """Everything :func:`parse` takes for a whole recipe, but for spellings and files."""
    return [*ALIASES, *full_names(), *COMPUTES]


def parse(text: str | Path | Recipe) -> Recipe:
    """Read a recipe from its name or from a TOML file.

    Args:
        text: ``"bfloat16/word"``, an alias such as ``"bfloat16-mixed"``, a compute alone (its default storage is
            added), the path of a ``.toml`` file, or a recipe, which is returned as it is.
    Returns:
        The recipe.
    Raises:
        RecipeError: for an unknown part, parts that contradict each other, or a file that cannot be read.

    Example:
        >>> parse("bf16-mixed").name, parse("bfloat16").name
        ('bfloat16/float32', 'bfloat16/word')
    """
    if isinstance(text, Recipe):
        return text
    if str(text).endswith(".toml"):
        return parse_file(Path(text))
    name = "/".join(_spelled(part) for part in str(text).strip().split("/"))
    name = ALIASES.get(name, name)
    compute, *rest = name.split("/")
    if len(rest) > 2 or (not rest and compute not in COMPUTES):
        # A storage alone is a likely slip, and too short to resemble any full name.
        near = f"Did you mean 'bfloat16/{name}'?" if name in STORAGES else suggestion(name, known_names())
        raise RecipeError(f"no recipe is named '{text}'.", f"{near} {_SEE}".strip())
    row = _row(COMPUTES, compute)
    storage = _storage(rest[0] if rest else DEFAULT_STORAGE[row.name], row.name)
    return Recipe(row, storage, _row(REDUCTIONS, rest[1]) if len(rest) == 2 else REDUCTIONS["native"])


def parse_file(path: Path) -> Recipe:
    """Read a recipe from a TOML file; see :func:`parse_table` for its keys.

    Args:
        path: a UTF-8 TOML file.
    Returns:
        The recipe.
    Raises:
        RecipeError: when the file is missing, is not TOML, or names something unknown.
    """
    try:
        table = load_toml(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RecipeError(f"the recipe file '{path}' does not exist.", _SEE) from None
    except (ValueError, OSError) as error:
        raise RecipeError(f"the recipe file '{path}' cannot be read: {error}.") from None
    return parse_table(table, str(path))


def parse_table(table: Mapping[str, Any], where: str = "the recipe table") -> Recipe:
    """Read a recipe from a TOML table: ``compute``, ``storage``, ``reduction``, ``keep`` and ``[[override]]``.

    Args:
        table: ``{"compute": "bfloat16", "storage": "word", "keep": ["lm_head"], "override": [{"pattern": …,
            "storage": …}]}``; ``recipe = "bfloat16/word"`` may stand for the first three.
        where: what to call the table in an error.
    Returns:
        The recipe.
    Raises:
        RecipeError: for an unknown key or row, or a value of the wrong kind.
    """
    for key in table:
        if key not in _KEYS:
            raise RecipeError(
                f"{where} has an unknown key '{key}'.", suggestion(key, _KEYS) or f"It takes {', '.join(_KEYS)}."
            )
    parts = {key: _text(table, key, where) for key in ("recipe", "compute", "storage", "reduction") if key in table}
    if "recipe" in parts:
        # A file that named itself would be read for ever.
        if parts["recipe"].endswith(".toml"):
            raise RecipeError(f"{where} takes its recipe from another file, {parts['recipe']}.", "Write it out here.")
        base = parse(parts["recipe"]).to_dict()
    elif "compute" in parts:
        compute = _spelled(parts["compute"])
        base = {"compute": compute, "storage": DEFAULT_STORAGE.get(compute, ""), "reduction": "native"}
    else:
        raise RecipeError(f"{where} names no compute.", 'Add compute = "bfloat16" or recipe = "bfloat16/word".')
    compute = _row(COMPUTES, _spelled(parts.get("compute", base["compute"])))
    return Recipe(
        compute,
        _storage(parts.get("storage", base["storage"]), compute.name),
        _row(REDUCTIONS, parts.get("reduction", base["reduction"])),
        _patterns(table, where),
        _overrides(table, where, compute.name),
    )


def _text(table: Mapping[str, Any], key: str, where: str) -> str:
    if not isinstance(table[key], str):
        raise RecipeError(f"{where} has {key} = {table[key]!r}, which is no text.", "Write a name in quotes.")
    return str(table[key])


def _patterns(table: Mapping[str, Any], where: str) -> tuple[str, ...]:
    keep = table.get("keep", [])
    if not isinstance(keep, list) or not all(isinstance(pattern, str) for pattern in keep):
        raise RecipeError(
            f"{where} has keep = {keep!r}, which is no list of patterns.", 'For instance keep = ["lm_head"].'
        )
    return tuple(keep)


def _overrides(table: Mapping[str, Any], where: str, compute: str) -> tuple[Override, ...]:
    entries = table.get("override", [])
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise RecipeError(f"{where} has override = {entries!r}.", "Write [[override]] above each pattern and storage.")
    for entry in entries:
        if set(entry) != {"pattern", "storage"}:
            raise RecipeError(
                f"an [[override]] of {where} has the keys {', '.join(sorted(entry)) or 'none'}.",
                "It takes pattern and storage.",
            )
    within = f"an [[override]] of {where}"
    return tuple(
        Override(_text(entry, "pattern", within), _storage(_text(entry, "storage", within), compute))
        for entry in entries
    )


def load_toml(text: str) -> dict[str, Any]:
    """Parse TOML text with the standard library, or with ``tomli`` before Python 3.11."""
    if sys.version_info >= (3, 11):
        import tomllib
    else:
        import tomli as tomllib
    return tomllib.loads(text)


_KEYS = ("recipe", "compute", "storage", "reduction", "keep", "override")
_SEE = "(narrowgauge show recipes lists all.)"


def _spelled(part: str) -> str:
    """The full spelling of a part: ``bf16-mixed`` becomes ``bfloat16-mixed``."""
    head, dash, rest = part.strip().lower().partition("-")
    return SPELLINGS.get(head, head) + dash + rest


def _storage(name: str, compute: str) -> Storage:
    """The storage of that name that belongs to the compute, else the one that belongs to none, else a composed one."""
    spelled = name.strip().lower() if "+" in name else _spelled(name)
    row = storages.find(f"{compute}/{spelled}") or storages.find(spelled)
    if row is None:
        names = [
            own_name(known) for known in STORAGES.values() if known.name.partition("/")[0] in (known.name, compute)
        ]
        raise RecipeError(f"no recipe part is named '{spelled}'.", f"{suggestion(spelled, names)} {_SEE}".strip())
    return row


def _row(table: Mapping[str, Any], name: str) -> Any:
    """The row of one of the three tables, or an error that suggests the nearest."""
    if name in table:
        return table[name]
    raise RecipeError(f"no recipe part is named '{name}'.", f"{suggestion(name, table)} {_SEE}".strip())
