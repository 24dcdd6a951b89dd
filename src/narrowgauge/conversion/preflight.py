"""What a conversion cannot begin with, told before PyTorch is loaded."""

from __future__ import annotations

from pathlib import Path

from narrowgauge.errors import DataError
from narrowgauge.runs.writer import require_free
from narrowgauge.spec.notation import parse
from narrowgauge.spec.recipes import Recipe


def require_convertible(
    source: Path, recipe: str | Path | Recipe, out: Path | None = None, optimizer: Path | None = None
) -> Recipe:
    """The recipe of a conversion whose paths are there.

    Args:
        source: what to convert.
        recipe: as in :func:`narrowgauge.prepare`.
        out: the folder to make, where one was named.
        optimizer: the file of the optimizer's state, where one was named.
    Returns:
        The recipe.
    Raises:
        RecipeError: no such recipe.
        RecordError: ``out`` is not free.
        DataError: a path leads nowhere.
    """
    policy = parse(recipe)
    if out is not None:
        require_free(out)
    if not source.exists():
        raise DataError(f"there is nothing to convert: {source} does not exist.", "Name a run, a checkpoint or a file.")
    if optimizer is not None and not optimizer.is_file():
        raise DataError(f"there is no file {optimizer} of an optimizer's state.", "Name one that torch.save wrote.")
    return policy
