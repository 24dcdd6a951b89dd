"""Tensors of a checkpoint, whole, whoever wrote it: one process or many ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checkpoints.manifest import INDEX, TENSORS
from narrowgauge.checkpoints.tensor_files import NAMED, TensorFile
from narrowgauge.runs.atomic_io import load_json


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a tensor.

    Args:
        file: the name of the file that holds it.
        offsets: where it begins in the tensor.
        shape: its shape.
    """

    file: str
    offsets: tuple[int, ...]
    shape: tuple[int, ...]

    @property
    def slices(self) -> tuple[slice, ...]:
        """Its place in the tensor."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.shape, strict=True))


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """What a checkpoint holds of one tensor.

    Args:
        dtype: its dtype.
        shape: of the whole.
        parts: which together are the whole.
    """

    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]


def saved_tensors(path: Path) -> dict[str, SavedTensor]:
    """What a checkpoint holds, by name.

    Args:
        path: the folder of one checkpoint, whose checksums were verified.
    Raises:
        OSError: a file cannot be read.
    """
    if (path / INDEX).is_file():
        index = load_json((path / INDEX).read_bytes())
        return {name: _saved_tensor(entry) for name, entry in index.items()}
    with TensorFile(path / TENSORS) as file:
        shapes = file.shapes()
    return {
        name: SavedTensor(dtype, shape, (Part(TENSORS, (0,) * len(shape), shape),))
        for name, (dtype, shape) in shapes.items()
    }


def _saved_tensor(entry: dict[str, Any]) -> SavedTensor:
    parts = tuple(Part(file, tuple(offsets), tuple(shape)) for file, offsets, shape in entry["parts"])
    return SavedTensor(NAMED[entry["dtype"]], tuple(entry["shape"]), parts)


def load_whole(path: Path, names: Iterable[str] | None = None) -> dict[str, Tensor]:
    """Tensors of a checkpoint, put together from their parts.

    Args:
        path: the folder of one checkpoint, whose checksums were verified.
        names: which; ``None`` for all.
    Returns:
        Tensors on the CPU, by name, in the order of the checkpoint.
    Raises:
        KeyError: it has no such tensor.
        OSError: a file cannot be read.

    Cost: one read of these tensors, in memory once.
    """
    saved = saved_tensors(path)
    wanted = {name: saved[name] for name in (saved if names is None else names)}
    tensors = {name: torch.empty(of.shape, dtype=of.dtype) for name, of in wanted.items()}
    by_file: dict[str, list[tuple[str, Part]]] = {}
    for name, of in wanted.items():
        for part in of.parts:
            by_file.setdefault(part.file, []).append((name, part))
    for file_name, held in by_file.items():
        with TensorFile(path / file_name) as file:
            for name, part in held:
                tensors[name][part.slices] = file.read(name)
    return tensors
