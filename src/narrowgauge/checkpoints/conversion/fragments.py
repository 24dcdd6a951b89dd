"""Parts of parameters in the files of a sharded checkpoint: read into whole tensors, and written back from them.

A framework's checkpoint is a list of fragments. Each says whose numbers it holds, where in the parameter they belong, and which
tensor in a file they are; the reading and the writing of all formats are the two functions below.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from narrowgauge.errors import DataError
from narrowgauge.spec.storages import STATE_NAMES

WEIGHT, SEEN = "weight", "seen"
KINDS = (WEIGHT, *STATE_NAMES)


@dataclass(frozen=True, eq=False)
class Fragment:
    """A part of a parameter in a file.

    Args:
        name: of the parameter.
        kind: ``weight`` (float32), ``exp_avg``, ``exp_avg_sq``; or ``seen``, the copy that the model computes with.
        stored: the tensor in the file, flat or of the block's shape; writing to a mapped file goes through it.
        shape: of the whole parameter.
        block: the part of the parameter, as slices of its dimensions; empty: all of it.
        start: where the fragment begins within that block, flattened.
        words: the dtype of the numbers, where ``stored`` are their bytes.
    """

    name: str
    kind: str
    stored: Tensor
    shape: tuple[int, ...]
    block: tuple[slice, ...] = ()
    start: int = 0
    words: torch.dtype | None = None

    def read(self) -> Tensor:
        """Its numbers, flat."""
        stored = self.stored.detach()  # DeepSpeed saves parameters
        return (stored if self.words is None else stored.clone().view(self.words)).reshape(-1)

    def write(self, values: Tensor) -> None:
        """Replace its numbers, rounded to the nearest of its dtype."""
        if self.words is not None:
            values = values.to(self.words).contiguous().view(torch.uint8)
        self.stored.detach().copy_(values.view(self.stored.shape))


def gather(fragments: Iterable[Fragment], where: object) -> dict[str, dict[str, Tensor]]:
    """Join fragments into whole tensors.

    Args:
        fragments: of any number of parameters.
        where: the checkpoint, for errors.
    Returns:
        By kind, by parameter name: float32, and ``seen`` in its own dtype.
    Raises:
        DataError: a part of a parameter is missing.
    """
    whole: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*KINDS, SEEN)}
    counts: dict[tuple[str, str], int] = {}
    for fragment in fragments:
        part = fragment.read()
        known = whole[fragment.kind]
        if fragment.name not in known:
            known[fragment.name] = torch.zeros(
                fragment.shape, dtype=part.dtype if fragment.kind == SEEN else torch.float32
            )
        block = known[fragment.name][fragment.block]
        flat = block.reshape(-1)
        flat[fragment.start : fragment.start + part.numel()] = part
        block.copy_(flat.view(block.shape))  # a block of columns was flattened into a copy
        key = (fragment.kind, fragment.name)
        counts[key] = counts.get(key, 0) + part.numel()
    for (kind, name), count in counts.items():
        if count < math.prod(whole[kind][name].shape):
            raise DataError(
                f"{where} contains {count} of the {whole[kind][name].numel()} values of '{name}' ({kind}).",
                "Give a checkpoint with the files of all ranks.",
            )
    return whole


def scatter(fragments: Iterable[Fragment], whole: Mapping[str, Mapping[str, Tensor]], where: object) -> None:
    """Write whole tensors into the files of fragments.

    Args:
        fragments: of a checkpoint whose files are mapped for writing.
        whole: float32 values by kind, by parameter name.
        where: the checkpoint, for errors.
    Raises:
        DataError: a parameter that is not given, or of another shape.
    """
    for fragment in fragments:
        values = whole[WEIGHT if fragment.kind == SEEN else fragment.kind].get(fragment.name)
        if values is None or tuple(values.shape) != tuple(fragment.shape):
            found = "absent" if values is None else f"of shape {tuple(values.shape)}"
            raise DataError(
                f"'{fragment.name}' ({fragment.kind}) has shape {tuple(fragment.shape)} in {where} and is {found} in the source.",
                "Give a checkpoint of the same model.",
            )
        flat = values[fragment.block].reshape(-1)
        size = fragment.stored.numel() // (1 if fragment.words is None else fragment.words.itemsize)
        fragment.write(flat[fragment.start : fragment.start + size])
