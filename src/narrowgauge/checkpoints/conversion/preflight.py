"""Checks of a conversion's arguments that need no PyTorch, so that errors come at once."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import DataError, RecipeError
from narrowgauge.runs.writer import require_free
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe


def require_convertible(
    source: Path,
    recipe: str | Path | Recipe | None,
    out: Path | None = None,
    optimizer: Path | None = None,
    like: Path | None = None,
) -> Recipe | None:
    """Check the paths of a conversion and parse its recipe; ``None`` with ``like``.

    Raises:
        RecipeError: an unknown recipe, one that stores float64, or neither or both of ``recipe`` and ``like``.
        RecordError: ``out`` exists and is not empty.
        DataError: a path does not exist.
    """
    if (recipe is None) == (like is None):
        raise RecipeError(
            f"the target of a conversion is a recipe or a checkpoint of another framework; {'both' if recipe else 'neither'} "
            "was given.",
            "Give --recipe NAME, or --like CKPT.",
        )
    policy = None if recipe is None else parse(recipe)
    if policy is not None and any(storage.arithmetic == "float64" for storage in policy.storages):
        raise RecipeError(
            f"recipe '{policy.title}' stores float64 and was requested of a conversion, which carries weights and states as "
            "float32.",
            "A run in float64 is resumed in its own recipe; to start one from other weights, give --model their folder.",
        )
    if out is not None:
        require_free(out)
    if not source.exists():
        raise DataError(f"there is nothing to convert: {source} does not exist.", "Give a run, a checkpoint or a file.")
    if like is not None and not like.is_dir():
        raise DataError(f"{like} is not a folder.", "Give a checkpoint of DeepSpeed, Megatron-Core or nanotron.")
    if optimizer is not None and not optimizer.is_file():
        raise DataError(f"the optimizer state {optimizer} is not a file.", "Give a file that torch.save wrote.")
    return policy
