"""A sharded checkpoint of another framework as fragments in mapped files: opened to be read, or to be written in place.

A framework's checkpoint is a list of fragments. Each says whose numbers it holds, where in the parameter they belong, and which
tensor in a file they are. :func:`gather` reads, and :func:`scatter` writes, the fragments of all frameworks.

Writing copies a checkpoint of theirs and replaces its numbers in place, byte for byte. Everything else in it, from the settings
to the random states, stays as the framework wrote it, and we write no pickle.
"""

from __future__ import annotations

import json
import mmap
import struct
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from narrowgauge.checkpoints.checkpoint_files import NAMED
from narrowgauge.checkpoints.conversion.files import UNREADABLE, load_pickle, unreadable
from narrowgauge.checkpoints.conversion.source import Source
from narrowgauge.errors import DataError
from narrowgauge.spec.storages import STATE_NAMES


@dataclass(frozen=True)
class Sharded:
    """What a checkpoint contains.

    Args:
        origin: the framework, as in the report.
        where: its folder.
        steps: the step counts: tensors in mapped files, or numbers in pickles, which cannot be replaced.
        others: integer buffers by name.
        left_out: other contents.
    """

    origin: str
    where: Path
    fragments: list[Fragment]
    steps: Sequence[Any]
    others: dict[str, Tensor] = field(default_factory=dict)
    left_out: tuple[str, ...] = ()

    def source(self) -> Source:
        """The training state, joined from all ranks; a missing fragment, or one moment without the other, is refused."""
        whole = gather(self.fragments, self.where)
        weights = {**whole[SEEN], **whole[WEIGHT]}
        step = max((int(step) for step in self.steps), default=0)
        states: dict[str, dict[str, Any]] = {}
        for name in whole[STATE_NAMES[0]] | whole[STATE_NAMES[1]]:
            if lacks := [kind for kind in STATE_NAMES if name not in whole[kind]]:
                raise DataError(
                    f"the state of '{name}' in {self.where} lacks '{lacks[0]}'.",
                    "Only states of Adam and AdamW can be converted.",
                )
            states[name] = {"step": step, **{kind: whole[kind][name] for kind in STATE_NAMES}}
        others = {f"model.{name}": value.clone() for name, value in self.others.items()}
        return Source(self.origin, weights, states, others=others, left_out=self.left_out)

    def fill(self, values: dict[str, dict[str, Tensor]], step: int) -> None:
        """Replace all numbers, float32 by kind and parameter name, of a checkpoint that was opened for writing.

        A step count in a pickle cannot be replaced; a different one is refused.
        """
        fixed = [int(known) for known in self.steps if not isinstance(known, Tensor) and int(known) != step]
        if fixed:
            raise DataError(
                f"{self.where} counts {fixed[0]} steps in a pickle, which cannot be replaced, and the source has taken {step}.",
                f"Give a checkpoint that was saved after {step} steps.",
            )
        scatter(self.fragments, {kind: values.get(kind, {}) for kind in KINDS}, self.where)
        for known in self.steps:
            if isinstance(known, Tensor):
                known.fill_(step)


def pickled(file: Path, *, writable: bool) -> Any:
    """A ``torch.save`` file with its tensors mapped, and stand-ins for classes of its framework."""
    shared: AbstractContextManager[Any] = (
        torch.serialization.set_default_mmap_options(mmap.MAP_SHARED) if writable else nullcontext()
    )
    try:
        with shared:
            return load_pickle(file, mmap=True)
    except UNREADABLE as error:
        raise unreadable(file, error) from error


def mapped(file: Path, *, writable: bool) -> Tensor:
    size = file.stat().st_size
    return torch.from_file(str(file), shared=writable, size=size, dtype=torch.uint8)


def safetensors(
    file: Path, *, writable: bool
) -> tuple[dict[str, tuple[Tensor, torch.dtype, tuple[int, ...]]], dict[str, str]]:
    """The bytes, dtype and shape of each tensor of a safetensors file, and its metadata."""
    try:
        whole = mapped(file, writable=writable)
        (length,) = struct.unpack("<Q", bytes(whole[:8].tolist()))
        header = json.loads(bytes(whole[8 : 8 + length].tolist()))
        metadata = header.pop("__metadata__", {})
        found = {
            name: (
                whole[8 + length + row["data_offsets"][0] : 8 + length + row["data_offsets"][1]],
                NAMED[row["dtype"]],
                tuple(row["shape"]),
            )
            for name, row in header.items()
        }
    except UNREADABLE as error:
        raise unreadable(file, error) from error
    return found, metadata


# ── fragments ─────────────────────────────────────────────────────────────────────────────────────────────────────────

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
    """Join fragments into whole tensors, by kind, by parameter name: float32, and ``seen`` in its own dtype."""
    whole: dict[str, dict[str, Tensor]] = {kind: {} for kind in (*KINDS, SEEN)}
    by_tensor: dict[tuple[str, str], list[Fragment]] = {}
    for fragment in fragments:
        by_tensor.setdefault((fragment.kind, fragment.name), []).append(fragment)
    for (kind, name), parts in by_tensor.items():
        values, is_known = _joined(parts)
        if not is_known.all():
            raise DataError(
                f"{where} contains {int(is_known.sum())} of the {values.numel()} values of '{name}' ({kind}).",
                "Give a checkpoint with the files of all ranks.",
            )
        whole[kind][name] = values
    return whole


def _joined(fragments: Sequence[Fragment]) -> tuple[Tensor, Tensor]:
    """The values of one tensor, zero where no fragment holds them, and whether one does."""
    first = fragments[0]
    values = torch.zeros(
        first.shape, dtype=(first.words or first.stored.dtype) if first.kind == SEEN else torch.float32
    )
    is_known = torch.zeros(first.shape, dtype=torch.bool)
    for fragment in fragments:
        part = fragment.read()
        for whole, own in ((values, part), (is_known, True)):
            block = whole[fragment.block]
            flat = block.reshape(-1)
            flat[fragment.start : fragment.start + part.numel()] = own
            block.copy_(flat.view(block.shape))  # a block of columns was flattened into a copy
    return values, is_known


def scatter(fragments: Iterable[Fragment], whole: Mapping[str, Mapping[str, Tensor]], where: object) -> None:
    """Write whole tensors, float32 values by kind, by parameter name, into fragments' files that are mapped for writing."""
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
