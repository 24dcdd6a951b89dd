"""Checks of a conversion's arguments that need no PyTorch, so that errors come at once."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import DataError
from narrowgauge.runs.writer import require_free
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe


def require_convertible(
    source: Path, recipe: str | Path | Recipe, out: Path | None = None, optimizer: Path | None = None
) -> Recipe:
    """Check the paths of a conversion and parse its recipe.

    Args:
        source: path to convert.
        recipe: as in :func:`narrowgauge.prepare`.
        out: folder to create, if given.
        optimizer: file of the optimizer state, if given.
    Returns:
        The recipe.
    Raises:
        RecipeError: an unknown recipe.
        RecordError: ``out`` exists and is not empty.
        DataError: a path does not exist.
    """
    policy = parse(recipe)
    if out is not None:
        require_free(out)
    if not source.exists():
        raise DataError(f"there is nothing to convert: {source} does not exist.", "Give a run, a checkpoint or a file.")
    if optimizer is not None and not optimizer.is_file():
        raise DataError(f"the optimizer state {optimizer} is not a file.", "Give a file that torch.save wrote.")
    return policy
