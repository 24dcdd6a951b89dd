"""Recipes: which numbers a model computes with, and which it keeps.

A recipe has up to three parts, ``compute/storage/reduction``: how operands enter a matmul, how weights and moments are
cut to be kept, and how gradients are summed across ranks. Three small tables, N + M + K rows, stand for N x M x K named
classes; a row is a value that tests, docs, ``narrowgauge show``, the optimizer and the trainer all read. Computes and
storages have files of their own, :mod:`narrowgauge.spec.computes` and :mod:`narrowgauge.spec.storages`.

How recipes are written, as names or as TOML tables, is :mod:`narrowgauge.spec.notation`.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from narrowgauge.errors import RecipeError
from narrowgauge.spec.computes import COMPUTES, Compute
from narrowgauge.spec.storages import STORAGES, Storage, for_vectors
from narrowgauge.spec.variants import at_layer


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
    """Another storage, compute or both for what has a name like ``pattern`` (shell wildcards; ``*`` crosses dots).

    A storage is for the parameters of such names, a compute for the linear layers.
    """

    pattern: str
    storage: Storage | None = None
    compute: Compute | None = None

    def matches(self, name: str) -> bool:
        """Whether the parameter or module ``name`` is meant."""
        return fnmatch.fnmatchcase(name, self.pattern)


@dataclass(frozen=True, slots=True)
class Phase:
    """The compute of all steps before the share ``until`` of a run is done, and after the phase before."""

    until: float
    compute: Compute


OWN_STORAGES_ONLY = ("float16-throughout", "float8")
"""Computes that say how weights are kept, and so take no storage but those that bear their name."""


_PARTS = ("compute", "storage", "reduction")


@dataclass(frozen=True, slots=True)
class Recipe:
    """A policy for a whole model: one row of each table, and the exceptions by module name and by progress.

    Args:
        compute: how operands enter matmuls, after the last of ``phases``.
        storage: how weights and moments are kept.
        reduction: how gradients are summed across ranks.
        keep: patterns of module names that stay in float32 altogether.
        overrides: other storages and computes by pattern of name; the last match wins.
        phases: other computes for the earlier parts of a run, in order.
        evaluation: the compute in which the model is evaluated, where that is another.
        label: what its writer calls it, to tell it from others of one name; no part of what it is.

    Raises:
        RecipeError: when the parts contradict each other.

    Example:
        >>> from narrowgauge.spec.notation import parse
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
    phases: tuple[Phase, ...] = ()
    evaluation: Compute | None = None
    label: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        _check_pair(self.compute, self.storage)
        _check_ends([phase.until for phase in self.phases])
        for where, other in self._others():
            _check_beside(self, where, other)

    def _others(self) -> Iterator[tuple[str, Compute]]:
        """Every compute that is named beside the recipe's own, and where."""
        for phase in self.phases:
            yield f"the phase until {phase.until:g}", phase.compute
        for override in self.overrides:
            if override.compute is not None:
                yield f"override '{override.pattern}'", override.compute
        if self.evaluation is not None:
            yield "evaluation", self.evaluation

    @property
    def name(self) -> str:
        """The full name, ``compute/storage`` and the reduction where it is not the native one."""
        tail = "" if self.reduction.name == "native" else f"/{self.reduction.name}"
        return f"{self.compute.name}/{own_name(self.storage)}{tail}"

    @property
    def is_plain(self) -> bool:
        """Whether the full name says all: no exceptions by module, phase or evaluation."""
        return not (self.keep or self.overrides or self.phases or self.evaluation)

    @property
    def title(self) -> str:
        """The name to display: the full name, and what else there is: the label, or which kinds of exceptions.

        Example:
            >>> from narrowgauge.spec.notation import parse_table
            >>> parse_table({"recipe": "bf16/word", "keep": ["lm_head"]}).title
            'bfloat16/word with keep'
            >>> parse_table({"recipe": "bf16/word", "keep": ["lm_head"], "name": "wide head"}).title
            'bfloat16/word (wide head)'
        """
        if self.is_plain:
            return self.name
        # The full name comes first: people and programs look for the compute and the storage there.
        if self.label:
            return f"{self.name} ({self.label})"
        return f"{self.name} with {', '.join(key for key in self.to_dict() if key not in _PARTS)}"

    @property
    def bytes_per_param(self) -> float:
        """Bytes per parameter of weight, gradient and states, for matrices."""
        return self.storage.bytes_per_param

    @property
    def computes(self) -> tuple[Compute, ...]:
        """Every compute that the recipe names, its own first, none twice."""
        return tuple(dict.fromkeys([self.compute, *(other for _, other in self._others())]))

    @property
    def dtype(self) -> str:
        """What a plain linear layer, a norm and the rest of the model compute in, whatever format the weights lie in."""
        return self.compute.dtype

    @property
    def dtypes(self) -> dict[str, str]:
        """The dtype of everything outside the casts, by place.

        Example:
            >>> from narrowgauge.spec.notation import parse
            >>> parse("int8-row/word").dtypes["kept for backward"]
            'int8 codes, 1 byte'
        """
        # Autocast narrows the matmuls alone: what flows between them over float32 weights is float32.
        stream = "float32" if self.storage.visible == "float32" else self.dtype
        return {
            "weights seen": self.storage.visible,
            "norms": f"float32 inside, {stream} out",
            "softmax": "float32",
            "rotary buffers": "float32",
            "residual": stream,
            "kept for backward": _kept_for_backward(self.compute),
            "logits": self.dtype,
            "loss": "float32",
        }

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
        matches = (o.storage for o in reversed(self.overrides) if o.storage is not None and o.matches(name))
        row = next(matches, self.storage)
        return for_vectors(row) if num_dims < 2 else row

    def compute_of(self, name: str, progress: float = 1.0) -> Compute:
        """The row for the linear layer ``name``.

        Law: float32 for what the recipe keeps; else the last override that names it; else, for what the row in force
        keeps, the plain row of the recipe's ``dtype``; else the row in force, as that layer computes it.

        Args:
            name: dotted module name.
            progress: as for :meth:`compute_at`.
        Returns:
            A row of ``COMPUTES``, or a variant of one.
        Example:
            >>> from narrowgauge.spec.notation import parse
            >>> recipe = parse("float8-row/word")
            >>> [recipe.compute_of(name).name for name in ("model.layers.0.mlp.up_proj", "lm_head")]
            ['float8-row', 'bfloat16']
        """
        if self.keeps(name):
            return COMPUTES["float32"]
        asked = (o.compute for o in reversed(self.overrides) if o.compute is not None and o.matches(name))
        if (row := next(asked, None)) is not None:
            return at_layer(row, name)
        row = self.compute_at(progress)
        return COMPUTES[self.dtype] if _lies_under(name, row.keep) else at_layer(row, name)

    def compute_at(self, progress: float) -> Compute:
        """The row in force at a step.

        Args:
            progress: the share of all steps that was done before it, 0 to 1; 1 stands for the end of the run.
        Returns:
            The compute of the first phase that has not ended, the recipe's own after the last.
        """
        return next((phase.compute for phase in self.phases if progress < phase.until), self.compute)

    def keeps(self, name: str) -> bool:
        """Whether the module or parameter ``name`` lies under a ``keep`` pattern."""
        return _lies_under(name, self.keep)

    def to_value(self) -> str | dict[str, Any]:
        """The shortest TOML value that :func:`~narrowgauge.spec.notation.parse_value` reads back to an equal recipe.

        Returns:
            The full name where it says all, else the table.
        """
        return self.name if self.is_plain else self.to_dict()

    def to_dict(self) -> dict[str, Any]:
        """The recipe as a TOML table that :func:`~narrowgauge.spec.notation.parse_table` reads back to an equal recipe."""
        table: dict[str, Any] = {
            "compute": self.compute.name,
            "storage": own_name(self.storage),
            "reduction": self.reduction.name,
        }
        if self.label:
            table["name"] = self.label
        if self.evaluation is not None:
            table["evaluation"] = self.evaluation.name
        if self.keep:
            table["keep"] = list(self.keep)
        if self.overrides:
            table["override"] = [_override_table(override) for override in self.overrides]
        if self.phases:
            table["phase"] = [{"until": phase.until, "compute": phase.compute.name} for phase in self.phases]
        return table


def _lies_under(name: str, patterns: Iterable[str]) -> bool:
    """Whether a pattern matches ``name`` or a module above it."""
    parts = name.split(".")
    above = [".".join(parts[:end]) for end in range(1, len(parts) + 1)]
    return any(fnmatch.fnmatchcase(module, pattern) for pattern in patterns for module in above)


def _override_table(override: Override) -> dict[str, str]:
    table = {"pattern": override.pattern}
    if override.storage is not None:
        table["storage"] = own_name(override.storage)
    if override.compute is not None:
        table["compute"] = override.compute.name
    return table


def _kept_for_backward(compute: Compute) -> str:
    """What a linear layer keeps of each element of its input."""
    form = compute.output.left.format
    what = f"{form} codes" if compute.keeps_codes else form if compute.is_wide else compute.dtype
    return f"{what}, {compute.kept_bytes:g} byte{'' if compute.kept_bytes == 1 else 's'}"


def _check_pair(compute: Compute, storage: Storage) -> None:
    """Refuse a storage that belongs to another compute, or that this compute does not take."""
    fitting = [n.partition("/")[2] for n in STORAGES if n.startswith(f"{compute.name}/")]
    owner, slash, name = storage.name.rpartition("/")
    if slash:
        fits = owner == compute.name
    else:
        fits = compute.name not in OWN_STORAGES_ONLY and name not in fitting
    if fits:
        return
    if name in fitting:
        advice = f"Take the row '{compute.name}/{name}'."
    else:
        # Who writes float8 mostly means its matmuls, which take any storage.
        matmuls = f", or compute '{compute.name}-row'" if f"{compute.name}-row" in COMPUTES else ""
        advice = f"Take storage {', '.join(map(repr, fitting))}{matmuls}." if fitting else f"Take compute '{owner}'."
    raise RecipeError(
        f"compute '{compute.name}' was asked for over storage '{storage.name}', which is not its own.", advice
    )


def _check_ends(ends: list[float]) -> None:
    """Refuse phases that do not follow each other within a run."""
    for before, end in zip([0.0, *ends], ends, strict=False):
        if not before < end <= 1:
            raise RecipeError(
                f"a phase until {end:g} was asked for after {before:g} of the run.",
                "Each until is a share of the run, above the one before and at most 1.",
            )


def _check_beside(recipe: Recipe, where: str, other: Compute) -> None:
    """Refuse a compute that a model prepared for the recipe's own could not take."""
    own = recipe.compute
    asked = f"{where} asks for compute '{other.name}'"
    if other != own and other.name in OWN_STORAGES_ONLY:
        raise RecipeError(f"{asked} in a recipe of '{own.name}'; it takes storages of its own only.", "Take another.")
    if other.transform != own.transform:
        raise RecipeError(
            f"{asked}{_transforming(other)}, in a recipe of '{own.name}'{_transforming(own)}.",
            "A transform changes the whole model once: take computes that share it.",
        )
    if recipe.storage.visible == "float32" and other.dtype != own.dtype:
        raise RecipeError(
            f"{asked} of {other.dtype} in a recipe of '{own.name}', which casts float32 weights to {own.dtype}.",
            "Take computes of one dtype, or a storage of narrow weights such as 'word'.",
        )


def _transforming(compute: Compute) -> str:
    return f" with transform '{compute.transform}'" if compute.transform else " without a transform"


def own_name(storage: Storage) -> str:
    """A storage's name without that of the compute it belongs to."""
    return storage.name.rpartition("/")[2]
