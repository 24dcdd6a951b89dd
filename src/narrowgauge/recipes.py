"""Recipes: which numbers a model computes with, and which it keeps.

A recipe has up to three parts, ``compute/storage/reduction``: how operands enter a matmul, how weights and moments are
cut to be kept, and how gradients are summed across ranks. Three small tables, N + M + K rows, stand for N x M x K named
classes; a row is a value that tests, docs, ``narrowgauge show``, the optimizer and the trainer all read.

A stored value is a float32 *cut* to fewer bits. A weight's upper 16 bits, so rounded, are the bfloat16 that the model
sees; the *tail* is the signed rest, so word and tail together give the cut value back exactly. A moment's code keeps a
few exponent and mantissa bits of the float32. "Nearest" means ties away from zero everywhere in this file.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from narrowgauge.errors import RecipeError, suggestion

Rounding = Literal["nearest", "stochastic"]
STATE_NAMES = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, slots=True)
class Code:
    """How one float32 is cut: which exponent and mantissa bits are kept, and how the rest is rounded.

    Codes with 8 exponent bits are the upper ``bits`` bits of the float32 itself. Fewer exponent bits select a window of
    binades: a small float whose smallest normal value is ``2**lowest``, with subnormals below and saturation above.

    Args:
        name: what tables call it.
        exponent_bits: exponent bits kept.
        mantissa_bits: mantissa bits kept, the hidden one not counted.
        signed: whether a sign bit is kept.
        rounding: ``"nearest"`` (ties away from zero) or ``"stochastic"`` (unbiased).
        lowest: exponent of the smallest normal value; -126 for codes that share float32's exponent.
        hold: never cut a positive value to zero (a second moment of zero makes the next step unbounded).
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    signed: bool = True
    rounding: Rounding = "nearest"
    lowest: int = -126
    hold: bool = False

    @property
    def bits(self) -> int:
        """Bits the code occupies."""
        return int(self.signed) + self.exponent_bits + self.mantissa_bits

    @property
    def is_window(self) -> bool:
        """Whether the code keeps a window of binades instead of float32's own exponent."""
        return self.exponent_bits != 8

    @property
    def highest(self) -> int:
        """Exponent of the largest binade that the code reaches."""
        return self.lowest + 2**self.exponent_bits - 2 if self.is_window else 127


FLOAT32 = Code("float32", 8, 23)
BFLOAT16 = Code("bfloat16", 8, 7)
TAIL16 = Code("bfloat16 + 16-bit tail", 8, 23)
TAIL8 = Code("bfloat16 + 8-bit tail", 8, 15, rounding="stochastic")
# The windows of `word`: the second moment needs twice the binades of the first, and both are centred so that gradients
# from 2^-54 to 2^10 survive; measured against other splits of the 32 bits in benchmarks/word_split.py.
MOMENT12 = Code("e6m5", 6, 5, rounding="stochastic", lowest=-54)
SECOND12 = Code("e7m5", 7, 5, signed=False, rounding="stochastic", lowest=-108, hold=True)


@dataclass(frozen=True, slots=True)
class Storage:
    """How a weight and its moments are kept between steps.

    Args:
        name: the row's name.
        visible: format of the weight that the model computes with (and of its gradient).
        weight: code of the stored weight; its upper part is the visible one.
        exp_avg: code of the first moment.
        exp_avg_sq: code of the second moment.
        master: keep the stored weight as a second, full float32 copy instead of a tail.
        vectors: the row that 1-D parameters (norm gains, biases) use instead, ``None`` for this one.
        loses: what is lost, in a few words.
        cure: the row an alarm advises when this one loses updates.
        source: where the scheme comes from.
    """

    name: str
    visible: str
    weight: Code
    exp_avg: Code
    exp_avg_sq: Code
    loses: str
    source: str
    master: bool = False
    vectors: str | None = "master"
    cure: str = "word"

    @property
    def tail_bits(self) -> int:
        """Bits of the stored weight that the model does not see and no full copy holds."""
        return 0 if self.master or self.visible == "float32" else self.weight.bits - 16

    @property
    def beside(self) -> str | None:
        """The name of what is kept of the weight beside the visible one: ``"master"``, ``"tail"`` or nothing."""
        return "master" if self.master else "tail" if self.tail_bits else None

    @property
    def fields(self) -> tuple[tuple[str, int], ...]:
        """Everything kept beside the visible weight: ``(name, bits)``."""
        beside = ((self.beside, 32 if self.master else self.tail_bits),) if self.beside else ()
        return (*beside, ("exp_avg", self.exp_avg.bits), ("exp_avg_sq", self.exp_avg_sq.bits))

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient (in the visible format) and all states."""
        visible = 4 if self.visible == "float32" else 2
        return 2 * visible + sum(bits for _, bits in self.fields) / 8

    @property
    def is_stochastic(self) -> bool:
        """Whether any code of the row rounds stochastically."""
        return any(code.rounding == "stochastic" for code in (self.weight, self.exp_avg, self.exp_avg_sq))


STORAGES: dict[str, Storage] = {
    row.name: row
    for row in (
        Storage(
            "float32", "float32", FLOAT32, FLOAT32, FLOAT32, vectors=None,
            loses="nothing beyond float32 rounding; with compute bfloat16 it is autocast",
            source="Kingma & Ba 2015; Loshchilov & Hutter 2019",
        ),
        Storage(
            "master", "bfloat16", FLOAT32, FLOAT32, FLOAT32, master=True,
            loses="nothing that float32 keeps; the model sees the nearest bfloat16",
            source="Micikevicius et al. 2018, mixed precision training",
        ),
        Storage(
            "exact", "bfloat16", TAIL16, FLOAT32, FLOAT32,
            loses="nothing that float32 keeps: bit-identical to master, 2 bytes less",
            source="16-bit tails: Intel's split SGD, apex's stored remainders",
        ),
        Storage(
            "split", "bfloat16", TAIL16, BFLOAT16, FLOAT32,
            loses="16 bits of the first moment, nearest; weight and second moment are float32",
            source="Narrowgauge; bytes of Collage-plus (Yu et al. 2024)",
        ),
        Storage(
            "word", "bfloat16", TAIL8, MOMENT12, SECOND12, cure="split",
            loses="8 bits of the weight, 18 of each moment, all stochastic: noise of 2^-16 per step, no bias",
            source="Narrowgauge: one 32-bit word of state beside each bfloat16 weight",
        ),
        Storage(
            "naive", "bfloat16", BFLOAT16, BFLOAT16, BFLOAT16, vectors=None,
            loses="every update below half a spacing (2^-9 of the weight); second moments freeze at beta2 0.999",
            source="what most optimizers do when given bfloat16 parameters",
        ),
    )
}  # fmt: skip


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

    @property
    def name(self) -> str:
        """The full name, ``compute/storage`` and the reduction where it is not the native one."""
        tail = "" if self.reduction.name == "native" else f"/{self.reduction.name}"
        return f"{self.compute.name}/{self.storage.name}{tail}"

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
            "storage": self.storage.name,
            "reduction": self.reduction.name,
        }
        if self.keep:
            table["keep"] = list(self.keep)
        if self.overrides:
            table["override"] = [{"pattern": o.pattern, "storage": o.storage.name} for o in self.overrides]
        return table


def for_vectors(storage: Storage) -> Storage:
    """The row that 1-D parameters use under ``storage``."""
    return STORAGES[storage.vectors] if storage.vectors else storage


ALIASES: dict[str, str] = {
    "bfloat16-mixed": "bfloat16/float32",
    "bfloat16-true": "bfloat16/naive",
    "float32-true": "float32/float32",
}
SPELLINGS = {"bf16": "bfloat16", "fp32": "float32", "f32": "float32", "fp16": "float16", "fp8": "float8-row"}
DEFAULT_STORAGE = {"float32": "float32", "bfloat16": "word"}


def full_names() -> list[str]:
    """Every legal ``compute/storage`` name, in table order."""
    names = []
    for compute in COMPUTES.values():
        for storage in STORAGES.values():
            try:
                names.append(Recipe(compute, storage).name)
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
    storage = _row(STORAGES, rest[0] if rest else DEFAULT_STORAGE[row.name])
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
    return Recipe(
        _row(COMPUTES, _spelled(parts.get("compute", base["compute"]))),
        _row(STORAGES, _spelled(parts.get("storage", base["storage"]))),
        _row(REDUCTIONS, parts.get("reduction", base["reduction"])),
        _patterns(table, where),
        _overrides(table, where),
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


def _overrides(table: Mapping[str, Any], where: str) -> tuple[Override, ...]:
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
        Override(_text(entry, "pattern", within), _row(STORAGES, _spelled(_text(entry, "storage", within))))
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


def _row(table: Mapping[str, Any], name: str) -> Any:
    """The row of one of the three tables, or an error that suggests the nearest."""
    if name in table:
        return table[name]
    raise RecipeError(f"no recipe part is named '{name}'.", f"{suggestion(name, table)} {_SEE}".strip())


def with_rounding(storage: Storage, rounding: Rounding) -> Storage:
    """The same row with every code rounded in one way; for tests and benchmarks that compare roundings."""
    codes = {n: dataclasses.replace(getattr(storage, n), rounding=rounding) for n in ("weight", *STATE_NAMES)}
    return dataclasses.replace(storage, **codes)
