"""Write a training state as a checkpoint of another framework: a copy of one of theirs with our numbers in it."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from torch import Tensor

from narrowgauge.checkpoints.conversion.conversion_report import Pair, Report, compare
from narrowgauge.checkpoints.conversion.folders import new_folder
from narrowgauge.checkpoints.conversion.foreign import SHARDED, open_sharded, sharded_format
from narrowgauge.checkpoints.conversion.fragments import WEIGHT
from narrowgauge.checkpoints.conversion.source import Source
from narrowgauge.errors import DataError
from narrowgauge.runs.writer import require_free
from narrowgauge.spec.codes import FLOAT32
from narrowgauge.spec.storages import STATE_NAMES

Values = tuple[dict[str, Tensor], dict[str, dict[str, Any]]]


def write_like(
    path: Path, source: Source, float32: Callable[[Source], Values], like: Path, out: str | Path | None
) -> Report:
    """Write a state into a copy of a checkpoint of another framework.

    Args:
        path: of the source.
        source: the state.
        float32: gives its weights and moments as float32.
        like: the checkpoint to copy; it is not changed.
        out: the folder to create; default: next to the source, named after the framework.
    Returns:
        The losses, found by reading what was written.
    Raises:
        DataError: ``like`` is no such checkpoint, or of another model.
    """
    framework = sharded_format(like)
    if framework is None:
        raise DataError(
            f"{like} is no checkpoint of a framework that can be written.", f"Give one of {', '.join(SHARDED)}."
        )
    place = Path(out) if out is not None else path.with_name(f"{path.stem}-{framework.split()[0].lower()}")
    require_free(place)
    weights, moments = float32(source)
    values = {WEIGHT: weights, **{kind: {name: entry[kind] for name, entry in moments.items()} for kind in STATE_NAMES}}
    step = max((int(entry["step"]) for entry in moments.values()), default=source.step)
    template = open_sharded(framework, like)
    if strange := sorted(set(weights) - {fragment.name for fragment in template.fragments}):
        raise DataError(
            f"'{strange[0]}' is not among the weights of {like}.",
            "Give a checkpoint of the same model, with the same names.",
        )
    with new_folder(place) as folder:
        _copy(like, template.where, folder)
        open_sharded(framework, folder, writable=True).fill(values, step)
        written = open_sharded(framework, folder).source()
    found = {WEIGHT: written.weights, **{kind: {n: e[kind] for n, e in written.states.items()} for kind in STATE_NAMES}}

    def pairs(kind: str) -> Iterator[Pair]:
        for name, value in found[kind].items():
            yield values[kind][name], value.float(), FLOAT32, None

    kept = tuple(compare(kind, pairs(kind)) for kind in (WEIGHT, *STATE_NAMES) if found[kind])
    others = [key for key in source.others if key.startswith("audit.")]
    left_out = (
        *source.left_out,
        *(["audit sums"] if others else []),
        "settings and data position, which are those of the copy",
    )
    return Report(str(path), str(place), source.origin, framework, step, kept, left_out)


def _copy(like: Path, checkpoint: Path, folder: Path) -> None:
    """Copy one checkpoint, and the files beside it that name it as the newest."""
    if checkpoint == like:
        shutil.copytree(like, folder, dirs_exist_ok=True)
        return
    for entry in like.iterdir():
        if entry.is_file():
            shutil.copy2(entry, folder)
    shutil.copytree(checkpoint, folder / checkpoint.relative_to(like))
